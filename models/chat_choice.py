"""Which chat format a checkpoint folder was trained with, told by its files and never by its name."""

import re
from collections.abc import Set
from dataclasses import replace

from models.chat_format import FORMATS, ChatFormat
from models.codec import Codec
from models.config_json import rope_table
from models.fields import Fields

MISTRAL_V1_IDS = 32_000

# A quoted string of the template that writes a whole system turn: ChatML's default system text.
DEFAULT_SYSTEM = re.compile(
    r"""(['"])<\|im_start\|>system(?:\\n|\n)((?:\\.|(?!\1)[^\\])*?)<\|im_end\|>""", re.DOTALL
)
# One that opens an answer and its reasoning at once: QwQ, Qwen3-*-Thinking-2507.
OPEN_THINK = re.compile(r"""<\|im_start\|>assistant(?:\\n|\n)<think>(?:\\n|\n)['"]""")


def format_of_template(template: str, config: Fields, codec: Codec) -> ChatFormat | None:
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


def llama3(config: Fields, dated: bool) -> ChatFormat:
    """Without dates the generations differ by <|eom_id|>, at which only 3.1 and later may stop."""
    if dated:
        return FORMATS["llama3.1"]
    if has_llama3_scaling(config):
        return replace(FORMATS["llama3.1"], date=None)
    return FORMATS["llama3"]


def has_llama3_scaling(config: Fields) -> bool:
    """True from Llama 3.1 on."""
    scaling = rope_table(config).raw
    return "llama3" in (scaling.get("rope_type"), scaling.get("type"))


def chatml(template: str) -> ChatFormat:
    plain = FORMATS["chatml"]
    if "<think>" in template:
        _, found, opening = template.rpartition("add_generation_prompt")
        opens = bool(found and OPEN_THINK.search(opening))
        plain = replace(FORMATS["qwen3"], opens_thinking=opens)
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


def format_of_files(config: Fields, codec: Codec, eos: Set[int]) -> ChatFormat | None:
    """The format of a folder without a template, by its control tokens; None where nothing tells.

    Base checkpoints may have the control tokens of a chat format too, but their configs name another
    end than that of a turn. A Llama with a Llama 2 vocabulary can be one of many things, or no chat
    model at all: None.
    """
    chosen = format_of_tokens(config, codec)
    if chosen and eos and codec.names.get(chosen.stops[0]) not in eos:
        return None
    return chosen


def format_of_tokens(config: Fields, codec: Codec) -> ChatFormat | None:
    model_type, names = config.text("model_type", ""), codec.names
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
