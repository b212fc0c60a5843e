"""The tokenizer file of a checkpoint folder: found by name, understood by content."""

import re
from collections.abc import Callable, Set
from pathlib import Path
from typing import Any

from models.bpe import read_tokenizer_json
from models.codec import Codec
from models.fields import parse_json
from models.ranks import read_rank_list, read_tekken
from models.spm import read_sentencepiece

# Where to look. What a file holds is never read off its name: Llama 2 and Llama 3 both call theirs
# tokenizer.model.
PLACES = ("*.model", "*.model.v*", "*.tiktoken", "tekken*.json", "tokenizer.json", "original/*.model")
NEEDED = (
    "a sentencepiece tokenizer.model (Llama 2, Mistral), a tekken.json (Mistral Nemo and later), a "
    "byte-level BPE tokenizer.json (Llama 3, Qwen, SmolLM2) or a tiktoken rank list (Llama 3's "
    "original/tokenizer.model, qwen.tiktoken)"
)
# Llama 2's and Mistral's own files come before the tokenizer.json converted from them. Llama 3's rank
# list comes last: unlike the tokenizer.json beside it, it does not name the control tokens.
TEKKEN, SENTENCEPIECE, TOKENIZER_JSON, RANKS = range(4)
RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* +\d+\r?(\n|$)")


def read_codec(directory: Path, model_type: str, special: Set[str] = frozenset()) -> Codec:
    """The tokenizer of a folder, from the first usable file in the order of kinds above.

    `special`: spellings of control tokens that a file may hold as text. Raises FileNotFoundError for a
    folder without a tokenizer file, and where none can be used a ValueError that says what each one is.
    """
    paths = sorted({path for place in PLACES for path in directory.glob(place) if path.is_file()})
    if not paths:
        raise FileNotFoundError(f"{directory} holds no tokenizer file; needed is {NEEDED}")
    readers, problems = [], []
    for path in paths:
        try:
            readers.append((*reader(path, model_type, special), str(path)))
        except ValueError as error:
            problems.append(str(error))
    cause = None
    for _, read, name in sorted(readers, key=lambda item: item[0]):
        try:
            return read()
        # A file of another shape than its kind has can fail anywhere; what it raised stays as the cause.
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            problems.append(problem(name, error))
            cause = error
    raise ValueError(f"{'; '.join(problems)}. Needed is {NEEDED}") from cause


def problem(name: str, error: Exception) -> str:
    """What is wrong with a file, in one line that names it; most of our own messages do already."""
    said = " ".join(str(error).split())
    if not isinstance(error, ValueError):
        return f"{name} is malformed ({type(error).__name__}: {said}); fetch it again"
    return said if said.startswith(name) else f"{name}: {said}"


def reader(path: Path, model_type: str, special: Set[str]) -> tuple[int, Callable[[], Codec]]:
    """(kind, function that reads the file). Raises ValueError saying what it is if not a tokenizer."""
    data, name = path.read_bytes(), str(path)
    if data.lstrip()[:1] == b"{":
        document = parse_json(data, name)
        if is_tekken(document):
            return TEKKEN, lambda: read_tekken(document, name)
        if isinstance(document.get("model"), dict) and "vocab" in document["model"]:
            return TOKENIZER_JSON, lambda: read_tokenizer_json(document, name)
        raise ValueError(f"{name} is JSON, but no tokenizer (keys: {', '.join(document)[:80]})")
    if RANK_LINE.match(data):
        return RANKS, lambda: read_rank_list(data, model_type, name)
    # Protobuf: the first field of a model is a piece, whose first field is its text.
    if data[:1] == b"\n" and data[2:3] == b"\n":
        return SENTENCEPIECE, lambda: read_sentencepiece(data, name, special)
    raise ValueError(f"{name} is {description(data)}")


def is_tekken(document: dict[str, Any]) -> bool:
    config = document.get("config")
    keys = {"pattern", "default_vocab_size", "default_num_special_tokens"}
    return isinstance(config, dict) and keys <= config.keys() and "vocab" in document


def description(data: bytes) -> str:
    """What a file that is no tokenizer is, as far as its beginning tells."""
    start = data.lstrip()[:64]
    if not start:
        return "empty"
    if start.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the file it stands for (run `git lfs pull`)"
    if start.startswith(b"<"):
        return "a web page, not a tokenizer (a download that failed)"
    return f"no known kind of tokenizer (it begins with {start[:16]!r})"
