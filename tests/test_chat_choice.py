"""Which chat format a folder gets: from marks in its template, else from its control tokens."""

from dataclasses import replace

import pytest

from models.chat_choice import format_of_files, format_of_template
from models.chat_format import chat_format
from models.codec import Codec
from models.fields import Fields
from models.tokenizer import load_tokenizer
from tests.assets import checkpoint, mistral_file


def codec(kind: str, *names: str, n_ids: int = 100, version: str = "") -> Codec:
    pieces = {n_ids - 1: b"x"}
    return Codec(kind, lambda text: [], pieces, {name: i for i, name in enumerate(names)}, version=version)


BYTE_LEVEL = codec("byte-level BPE")
ROPE_31 = {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}
TEMPLATES = [
    ("{{ '<|start_header_id|>' + role }}", {}, BYTE_LEVEL, chat_format("llama3")),
    ("{{ '<|start_header_id|>' }} Cutting Knowledge Date: ", ROPE_31, BYTE_LEVEL, chat_format("llama3.1")),
    ("{{ '<|start_header_id|>' }}", ROPE_31, BYTE_LEVEL, replace(chat_format("llama3.1"), date=None)),
    ("[INST] <<SYS>>", {}, codec("sentencepiece", "<s>"), chat_format("llama2")),
    ("[INST]", {}, codec("sentencepiece", "<s>"), chat_format("mistral-v1")),
    ("[INST]", {}, codec("sentencepiece", "[INST]"), chat_format("mistral-v3")),
    ("[INST]", {}, codec("tekken", "[INST]", "[SYSTEM_PROMPT]"), chat_format("mistral-v3-tekken")),
    ("[SYSTEM_PROMPT] [INST]", {}, codec("sentencepiece", "[INST]"), chat_format("mistral-v7")),
    ("[SYSTEM_PROMPT] [INST]", {}, codec("tekken", "[INST]"), chat_format("mistral-v7-tekken")),
    ("'<｜User｜>' '<｜Assistant｜><think>\\n'", {}, BYTE_LEVEL, chat_format("r1")),
    ("'<｜User｜>' '<｜Assistant｜>'", {}, BYTE_LEVEL, replace(chat_format("r1"), open_think=False)),
    ("'<|user|>\n' + eos_token", {}, codec("sentencepiece"), chat_format("zephyr")),
    ("'<|user|>\n' '<|end|>'", {}, codec("sentencepiece"), None),
    ("'<|im_start|>' '<think>'", {}, BYTE_LEVEL, chat_format("qwen3")),
    ("'<|im_start|>' + role", {}, BYTE_LEVEL, chat_format("chatml")),
    # Qwen3, Qwen3-Thinking-2507, QwQ with a real line break, Qwen3-Instruct-2507
    (
        r"""'<|im_start|>assistant\n<think>\n' + reasoning {% if add_generation_prompt %}
        '<|im_start|>assistant\n' {% if not enable_thinking %} '<think>\n\n</think>\n\n' """,
        {},
        BYTE_LEVEL,
        chat_format("qwen3"),
    ),
    *(
        (
            f"'<think>' {{% if add_generation_prompt %}} '<|im_start|>assistant{newline}<think>{newline}' {{% endif %}}",
            {},
            BYTE_LEVEL,
            replace(chat_format("qwen3"), opens_thinking=True),
        )
        for newline in ("\n", "\\n")
    ),
    (
        "'<|im_start|>' + role {% if add_generation_prompt %} '<|im_start|>assistant\\n' {% endif %}",
        {},
        BYTE_LEVEL,
        chat_format("chatml"),
    ),
    (
        "'<|im_start|>system\\nBe brief.<|im_end|>' '<think>'",
        {},
        BYTE_LEVEL,
        replace(chat_format("qwen3"), default_system="Be brief."),
    ),
    *(
        (f"{{{{ '<|im_start|>system{newline}{chat_format(name).default_system}<|im_end|>' }}}}", {}, BYTE_LEVEL, chat_format(name))
        for name in ("qwen2", "qwen2.5", "smollm2")
        for newline in ("\n", "\\n")
    ),
    (
        r"""'<|im_start|>system\n' + x + '<|im_end|>' "<|im_start|>system\nPut it \"in\" \\boxed{}.<|im_end|>\n" """,
        {},
        BYTE_LEVEL,
        replace(chat_format("chatml"), default_system=r'Put it "in" \boxed{}.'),
    ),
    ("{{ messages }}", {}, BYTE_LEVEL, None),
]  # fmt: skip


@pytest.mark.parametrize(("template", "config", "file", "expected"), TEMPLATES)
def test_a_template_tells_its_format(template, config, file, expected):
    assert format_of_template(template, Fields(config), file) == expected


LLAMA3_NAMES = codec("Llama 3 ranks", "<|start_header_id|>", "<|eot_id|>", "<|end_of_text|>")
CHATML_NAMES = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
UNTOLD = [
    ({"model_type": "llama"}, LLAMA3_NAMES, {1, 2}, "llama3"),
    ({"model_type": "llama", **ROPE_31}, LLAMA3_NAMES, set(), "llama3.1"),
    ({"model_type": "llama", **ROPE_31}, LLAMA3_NAMES, {2}, None),  # a base model: another end
    ({"model_type": "qwen2"}, codec("Qwen ranks", *CHATML_NAMES), {1}, "qwen2"),
    ({"model_type": "qwen2"}, codec("byte-level BPE", *CHATML_NAMES, "<tool_call>"), {1}, "qwen2.5"),
    ({"model_type": "qwen2"}, codec("byte-level BPE", *CHATML_NAMES), {2}, None),
    ({"model_type": "qwen3"}, codec("byte-level BPE", *CHATML_NAMES), {1, 2}, "qwen3"),
    ({"model_type": "llama"}, codec("byte-level BPE", *CHATML_NAMES, "<gh_stars>"), {1}, "smollm2"),
    ({"model_type": "llama"}, codec("byte-level BPE", *CHATML_NAMES), set(), "chatml"),
    ({"model_type": "qwen2"}, codec("byte-level BPE", "<｜User｜>"), set(), "r1"),
    ({"model_type": "mistral"}, codec("sentencepiece", "<s>", "</s>", n_ids=32000), {1}, "mistral-v1"),
    ({"model_type": "llama"}, codec("sentencepiece", "<s>", "</s>", n_ids=32000), {1}, None),
    ({}, codec("tekken", "[INST]", "[SYSTEM_PROMPT]", version="v3"), set(), "mistral-v3-tekken"),
    ({}, codec("tekken", "[INST]", "[SYSTEM_PROMPT]", version="v11"), set(), "mistral-v7-tekken"),
]


@pytest.mark.parametrize(("config", "file", "eos", "name"), UNTOLD)
def test_without_a_template_the_control_tokens_tell(config, file, eos, name):
    assert format_of_files(Fields(config), file, eos) == (name and chat_format(name))


def test_the_template_is_read_from_its_file_or_the_settings(tmp_path):
    model = {"tokenizer.model": mistral_file("v1").read_bytes()}
    older = model | {"chat_template.json": {"chat_template": "[INST]"}, "tokenizer_config.json": {}}
    assert load_tokenizer(checkpoint(tmp_path, older)).format.name == "mistral-v1"
    named = [{"name": "tool_use", "template": "[INST]"}, {"name": "default", "template": "<<SYS>>"}]
    settings = model | {"tokenizer_config.json": {"chat_template": named}}
    assert load_tokenizer(checkpoint(tmp_path, settings)).format.name == "llama2"
    (tmp_path / "chat_template.jinja").write_text("<|user|> eos_token")
    assert load_tokenizer(tmp_path).format.name == "zephyr"
    assert load_tokenizer(tmp_path, format="mistral-v1").format.name == "mistral-v1"
