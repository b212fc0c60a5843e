"""Which file of a folder is the tokenizer, told by content; and what is said where none is."""

import pytest

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
