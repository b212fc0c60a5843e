"""Which chat format a checkpoint folder was trained with, told by its files and never by its name."""

import re
from collections.abc import Set
from dataclasses import replace
from typing import Any

from models.chat_format import FORMATS, ChatFormat
from models.codec import Codec

MISTRAL_V1_IDS = 32_000

# A quoted string of the template that writes a whole system turn: ChatML's default system text.
DEFAULT_SYSTEM = re.compile(
    r"""(['"])<\|im_start\|>system(?:\\n|\n)((?:\\.|(?!\1)[^\\])*?)<\|im_end\|>""", re.DOTALL
)


def format_of_template(template: str, config: dict[str, Any], codec: Codec) -> ChatFormat | None:
    """The format that writes what a Jinja chat template writes, by marks in its text; None if unknown."""
    if "<|start_header_id|>" in template:
        return llama3(config, dated="Cutting Knowledge Date" in template)
    if "<｜User｜>" in template:
        return replace(FORMATS["r1"], open_think="<｜Assistant｜><think>" in template)
    if "<|im_start|>" in template:
        return chatml(template)
    if "<<SYS>>" in template:
        return FORMATS["llama2"]
    if "[INST]" in template:
        return mistral(codec, has_system_block="[SYSTEM_PROMPT]" in template)
    if "<|user|>" in template and ("</s>" in template or "eos_token" in template):
        return FORMATS["zephyr"]
    return None


def llama3(config: dict[str, Any], dated: bool) -> ChatFormat:
    """Without dates the generations differ by <|eom_id|>, at which only 3.1 and later may stop."""
    if dated:
        return FORMATS["llama3.1"]
    if has_llama3_scaling(config):
        return replace(FORMATS["llama3.1"], date=None)
    return FORMATS["llama3"]


def has_llama3_scaling(config: dict[str, Any]) -> bool:
    """True from Llama 3.1 on."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return "llama3" in (scaling.get("rope_type"), scaling.get("type"))


def chatml(template: str) -> ChatFormat:
    plain = FORMATS["qwen3" if "<think>" in template else "chatml"]
    literal = DEFAULT_SYSTEM.search(template)
    if literal is None:
        return plain
    # Jinja reads the escapes of a string as Python does.
    text = literal[2].encode("ascii", "backslashreplace").decode("unicode-escape")
    chosen = replace(plain, default_system=text)
    known = {replace(each, name=chosen.name): each for each in FORMATS.values()}
    return known.get(chosen, chosen)


def mistral(codec: Codec, has_system_block: bool) -> ChatFormat:
    if "[INST]" not in codec.names:
        return FORMATS["mistral-v1"]
    version = "mistral-v7" if has_system_block else "mistral-v3"
    return FORMATS[version if codec.kind == "sentencepiece" else f"{version}-tekken"]


def format_of_files(config: dict[str, Any], codec: Codec, eos: Set[int]) -> ChatFormat | None:
    """The format of a folder without a template, by its control tokens; None where nothing tells.

    Base checkpoints may have the control tokens of a chat format too, but their configs name another
    end than that of a turn. A Llama with a Llama 2 vocabulary can be one of many things, or no chat
    model at all: None.
    """
    chosen = format_of_tokens(config, codec)
    if chosen and eos and codec.names.get(chosen.stops[0]) not in eos:
        return None
    return chosen


def format_of_tokens(config: dict[str, Any], codec: Codec) -> ChatFormat | None:
    model_type, names = config.get("model_type", ""), codec.names
    if "<｜User｜>" in names:
        return FORMATS["r1"]
    if "<|start_header_id|>" in names:
        return llama3(config, dated=has_llama3_scaling(config))
    if "[INST]" in names:
        # Every tekken.json has the tokens of the block; they were first used in version 7.
        return mistral(codec, has_system_block="[SYSTEM_PROMPT]" in names and codec.version != "v3")
    if "<|im_start|>" in names:
        if model_type.startswith("qwen3"):
            return FORMATS["qwen3"]
        if model_type.startswith("qwen"):
            return FORMATS["qwen2.5" if "<tool_call>" in names else "qwen2"]
        return FORMATS["smollm2" if "<gh_stars>" in names else "chatml"]
    if model_type == "mistral" and codec.n_ids == MISTRAL_V1_IDS:
        return FORMATS["mistral-v1"]
    return None
