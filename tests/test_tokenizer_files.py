"""Which file of a folder is the tokenizer, told by content; and what is said where none is."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest

import models
from models.tokenizer import load_tokenizer
from tests.assets import checkpoint, mistral_file, rank_file
from tests.library import small_json


def test_the_same_file_name_holds_ranks_or_sentencepiece(tmp_path):
    ranks = checkpoint(tmp_path / "a", {"tokenizer.model": rank_file("llama3")})
    pieces = checkpoint(tmp_path / "b", {"tokenizer.model": mistral_file("v1").read_bytes()})
    assert load_tokenizer(ranks).encode("Hello world") == [9906, 1917]
    assert load_tokenizer(pieces).encode("Hello world") == [22557, 1526]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html>\n<html>404</html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        (b'{"error": "gated"}', "no tokenizer"),
        (b'{"model": ', "not valid JSON"),
        (b"\x80\x04pickle", "begins with"),
        (b"IQ== 0\nIg== one\n", "line 2"),
        (b"IQ== 0\nIg== 5\n", "not 0 to 1"),
        (mistral_file("v1").read_bytes()[:5000], "damaged sentencepiece"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_named_in_one_line(content, message, tmp_path):
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(checkpoint(tmp_path, {"tokenizer.model": content}))
    assert "tokenizer.model" in str(error.value) and "byte-level BPE tokenizer.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_without_tokenizer_says_what_is_needed(tmp_path):
    with pytest.raises(FileNotFoundError, match="no tokenizer file; needed is"):
        load_tokenizer(checkpoint(tmp_path, {}))


def test_the_file_that_converts_exactly_wins(tmp_path):
    """Mistral ships a sentencepiece model and a tokenizer.json made from it; pointers are passed over."""
    pieces = mistral_file("v3").read_bytes()
    made = small_json(["a"], [], model={"byte_fallback": True})
    folder = checkpoint(tmp_path / "a", {"tokenizer.model": pieces, "tokenizer.json": made})
    assert load_tokenizer(folder).codec.kind == "sentencepiece"
    files = {"tokenizer.model": b"version https://git-lfs", "tokenizer.json": small_json(["a", "b"], [])}
    assert load_tokenizer(checkpoint(tmp_path / "b", files)).encode("ab") == [0, 1]


def test_a_folder_needs_a_tokenizer_file_and_no_weights(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(small_json(["a", "b"], [])))
    settings = {"config.json": {"model_type": "llama"}, "tokenizer_config.json": {}}
    for files in ({}, settings):
        for name, content in files.items():
            (tmp_path / name).write_text(json.dumps(content))
        tok = models.load_tokenizer(tmp_path)
        assert tok.encode("ab") == [0, 1] and tok.format is None
        assert models.load_tokenizer(str(tmp_path), format="llama3").format.name == "llama3"


TEKKEN_CONFIG = {
    "pattern": "a|b",
    "default_vocab_size": 258,
    "default_num_special_tokens": 2,
    "version": "v3",
}
BYTES = [{"token_bytes": base64.b64encode(bytes([b])).decode()} for b in range(256)]


def tekken(**changes) -> dict:
    return {"config": TEKKEN_CONFIG | changes.pop("config", {}), "vocab": BYTES} | changes


MALFORMED_JSON = {
    "no merges": ({"model": {"merges": None}}, "model.merges is missing"),
    "merges no list": ({"model": {"merges": "a b"}}, "model.merges is 'a b'"),
    "merge of a number": ({"model": {"merges": [5]}}, "merge 0 (5) is not a pair of tokens"),
    "merge of three": ({"model": {"merges": ["a b c"]}}, "merge 0 ('a b c') is not a pair of tokens"),
    "merge of numbers": ({"model": {"merges": [[0, 1]]}}, "merge 0 ([0, 1]) is not a pair of tokens"),
    "vocab as a list": ({"model": {"vocab": ["a", "b"]}}, "model.vocab is ['a', 'b']"),
    "no vocab": ({"model": {"vocab": {}}}, "the vocabulary is empty"),
    "vocab without ids": ({"model": {"vocab": {"a": "0"}}}, "'0' stands where a token id is needed"),
    "token not special or not": ({"added_tokens": [{"id": 1, "content": "b"}]}, "added_tokens[0].special is missing"),
    "token without text": ({"added_tokens": [{"id": 1, "special": False}]}, "added_tokens[0].content is missing"),
    "token without id": ({"added_tokens": [{"content": "b", "special": True}]}, "added_tokens[0].id is missing"),
    "tokens no list": ({"added_tokens": {"b": 1}}, "added_tokens is {'b': 1}"),
    "decoder in a word": ({"decoder": "ByteLevel"}, "malformed"),
    "normalizer without type": ({"normalizer": {}}, "malformed"),
    "bad pattern": (
        {
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "behavior": "Isolated", "pattern": {"Regex": "("}},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            }
        },
        "is no pattern to split text by",
    ),
}  # fmt: skip
MALFORMED_TEKKEN = {
    "entry without bytes": (tekken(vocab=[{"rank": 0}]), "vocab[0] has the token_bytes None"),
    "bytes not base64": (tekken(vocab=[{"token_bytes": "a"}]), "vocab[0] has the token_bytes 'a'; needed is base64"),
    "vocab no list": (tekken(vocab=5), "vocab is 5"),
    "a token twice": (tekken(vocab=[*BYTES[1:], BYTES[1]]), "1 tokens of the vocabulary occur twice"),
    "bad pattern": (tekken(config={"pattern": "("}), "'(' is no pattern to split text by"),
    "pattern no text": (tekken(config={"pattern": 5}), "config.pattern is 5"),
    "size in words": (tekken(config={"default_vocab_size": "258"}), "config.default_vocab_size is '258'"),
    "size too small": (tekken(config={"default_vocab_size": 1}), "config.default_vocab_size is 1"),
    "special without rank": (tekken(special_tokens=[{"token_str": "<s>"}]), "special_tokens[0].rank is missing"),
}  # fmt: skip


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("kind", MALFORMED_JSON)
def test_a_malformed_tokenizer_json_is_named_in_one_line(kind, tmp_path):
    changes, message = MALFORMED_JSON[kind]
    said = refusal(checkpoint(tmp_path, {"tokenizer.json": small_json(["a", "b"], [], **changes)}))
    assert said.startswith(str(tmp_path / "tokenizer.json")) and message in said


@pytest.mark.parametrize("kind", MALFORMED_TEKKEN)
def test_a_malformed_tekken_json_is_named_in_one_line(kind, tmp_path):
    document, message = MALFORMED_TEKKEN[kind]
    said = refusal(checkpoint(tmp_path, {"tekken.json": document}))
    assert said.startswith(str(tmp_path / "tekken.json")) and message in said


def test_the_tekken_file_of_these_tests_is_good_before_it_is_damaged(tmp_path):
    assert load_tokenizer(checkpoint(tmp_path, {"tekken.json": tekken()})).encode("ab") == [99, 100]


@pytest.mark.parametrize(
    ("file", "document", "message"),
    [
        ("tokenizer_config", {"chat_template": 5}, "chat_template is 5"),
        ("tokenizer_config", {"chat_template": ["x"]}, "chat_template is ['x']"),
        (
            "tokenizer_config",
            {"chat_template": [{"name": "default"}]},
            "chat_template[0].template is missing",
        ),
        ("tokenizer_config", {"added_tokens_decoder": [1]}, "added_tokens_decoder is [1]"),
        (
            "tokenizer_config",
            {"added_tokens_decoder": {"9": {}}},
            "added_tokens_decoder.9.content is missing",
        ),
        ("tokenizer_config", {"added_tokens_decoder": {"9": "x"}}, "added_tokens_decoder.9 is 'x'"),
        ("tokenizer_config", {"added_tokens_decoder": {"x": {}}}, "added_tokens_decoder.x: the name of each"),
        ("chat_template", {"chat_template": 5}, "chat_template is 5"),
        ("generation_config", {"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ("config", {"model_type": ["llama"]}, "model_type is ['llama']"),
        ("config", {"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
    ],
)
def test_a_wrong_setting_beside_the_file_is_named_with_file_key_and_value(file, document, message, tmp_path):
    tokens = small_json(["a", "<|start_header_id|>"], [])
    tokens["added_tokens"] = [{"id": 1, "content": "<|start_header_id|>", "special": True}]
    folder = checkpoint(tmp_path, {"tokenizer.json": tokens, f"{file}.json": document})
    assert refusal(folder).startswith(f"{tmp_path / file}.json: {message}")


def test_a_template_that_is_no_text_is_named(tmp_path):
    folder = checkpoint(tmp_path, {"tokenizer.json": small_json(["a"], []), "chat_template.jinja": b"\xff"})
    assert refusal(folder).startswith(str(tmp_path / "chat_template.jinja"))


WITHOUT = """
import sys
for name in sys.argv[1].split():
    sys.modules[name] = None  # an import of it fails
from models import load_tokenizer
for folder in sys.argv[2:]:
    try:
        print(load_tokenizer(folder).encode("Hello world"))
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("missing", "said"),
    [
        ("tiktoken regex gguf", ["[22557, 1526]", "pip install tiktoken regex", "pip install gguf"]),
        ("sentencepiece gguf", ["pip install sentencepiece", "[9906, 1917]", "pip install gguf"]),
    ],
)
def test_a_missing_library_is_named_where_it_is_needed_and_only_there(missing, said, tmp_path):
    pieces = checkpoint(tmp_path / "pieces", {"tokenizer.model": mistral_file("v1").read_bytes()})
    ranks = checkpoint(tmp_path / "ranks", {"tokenizer.model": rank_file("llama3")})
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    command = [sys.executable, "-c", WITHOUT, missing, *map(str, (pieces, ranks, file))]
    root = Path(models.__file__).parents[1]
    result = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    assert all(words in line for words, line in zip(said, result.stdout.splitlines(), strict=True))
