"""Byte-level BPE in the `tokenizers` library, the oracle for tokenizer.json files."""

from collections.abc import Callable
from pydoc_data.topics import topics

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = rf"{WORDS}|\p{{N}}|{REST}"
LLAMA3 = rf"{WORDS}|\p{{N}}{{1,3}}|{REST}"


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(False, use_regex=False),
    ]
    return pre_tokenizers.Sequence(steps)


def digits_first() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(False)])


def library_ids(library: tokenizers.Tokenizer, text: str) -> list[int]:
    return library.encode(text, add_special_tokens=False).ids


def differing(ours: Callable, theirs: Callable, inputs: list) -> list[tuple]:
    """(input, our result, their result) wherever the two differ."""
    results = ((each, ours(each), theirs(each)) for each in inputs)
    return [result for result in results if result[1] != result[2]]


def trained(pre_tokenizer, alphabet: bool = True, **model) -> tokenizers.Tokenizer:
    """A small byte-level BPE, trained on Python's language reference."""
    library = tokenizers.Tokenizer(models.BPE(**model))
    library.pre_tokenizer = pre_tokenizer
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet() if alphabet else [],
    )
    library.train_from_iterator([topics["exprlists"], topics["strings"], "12 345 ÄÖ 中文 \t\t"], trainer)
    return library


def small_json(vocab: list[str], merges: list, **changes) -> dict:
    model = {"type": "BPE", "vocab": {token: id for id, token in enumerate(vocab)}, "merges": merges}
    model |= changes.pop("model", {})
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    document = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level}
    return document | {"decoder": byte_level, "model": model} | changes
