"""What every kind of tokenizer file boils down to, and byte-level BPE as tiktoken runs it."""

import re
import reprlib
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

try:
    import regex
    import tiktoken
except ImportError:  # sentencepiece models do without
    regex = tiktoken = None

# Spellings of the token that opens a text. Qwen and SmolLM2 have none: the `bos_token_id` in their
# configs (<|endoftext|>, <|im_start|>) is never put before a text.
BOS_NAMES = ("<s>", "<|begin_of_text|>", "<｜begin▁of▁sentence｜>")

# tiktoken's regex engine keeps one backtracking entry per character of a run of white space, and
# panics at a million of them.
LONGEST_RUN = 100_000


@dataclass(frozen=True)
class Codec:
    """One tokenizer file: how plain text becomes ids, and what each id adds to a text.

    encode: plain text only; spellings of control tokens are ordinary characters to it.
    pieces: the UTF-8 bytes (perhaps part of a character) of each id; b"" for control tokens.
    names: ids of control and added tokens by spelling.
    dummy_prefix: ids that lose their leading space where they open a text (sentencepiece only).
    version: what the file itself declares ("v7" in a tekken.json); "" where it says nothing.
    """

    kind: str
    encode: Callable[[str], list[int]] = field(repr=False)
    pieces: dict[int, bytes] = field(repr=False)
    names: dict[str, int] = field(repr=False)
    dummy_prefix: frozenset[int] = field(default=frozenset(), repr=False)
    version: str = ""

    def __post_init__(self) -> None:
        if not self.pieces:
            raise ValueError("the vocabulary is empty")
        wrong = [id for id in (*self.pieces, *self.names.values()) if not isinstance(id, int) or id < 0]
        if wrong:
            raise ValueError(f"{wrong[0]!r} stands where a token id is needed")

    @cached_property
    def n_ids(self) -> int:
        return max(self.pieces) + 1

    @property
    def bos_id(self) -> int | None:
        return next((self.names[name] for name in BOS_NAMES if name in self.names), None)


class BytePairEncoder:
    """Text to ids: split by a pattern, then merge the bytes of each word by tiktoken's rule.

    `tokens` stand in the order in which they merge, `ids` beside them. Single bytes may be missing:
    the `tokenizers` library drops those from a word before it merges, and so does this.
    """

    def __init__(self, pattern: str, tokens: Sequence[bytes], ids: Sequence[int], nfc: bool = False) -> None:
        if tiktoken is None:
            raise ValueError(
                "byte-level BPE needs the packages tiktoken and regex: pip install tiktoken regex"
            )
        self.ranks = {token: rank for rank, token in enumerate(tokens)}
        if len(self.ranks) < len(tokens):
            raise ValueError(f"{len(tokens) - len(self.ranks)} tokens of the vocabulary occur twice")
        self.ids = ids
        self.nfc = nfc
        self.missing = bytes(b for b in range(256) if bytes([b]) not in self.ranks)
        try:
            self.split = regex.compile(pattern)
            self.text = self._encoding(pattern)
        except (regex.error, ValueError) as error:
            raise ValueError(f"{reprlib.repr(pattern)} is no pattern to split text by: {error}") from error

    @cached_property
    def word(self) -> "tiktoken.Encoding":
        """tiktoken for a single word; seldom needed."""
        return self._encoding(r"[\s\S]+")

    def _encoding(self, pattern: str) -> "tiktoken.Encoding":
        # tiktoken panics without all 256 bytes; these ranks never reach the output.
        spare = {bytes([b]): len(self.ranks) + i for i, b in enumerate(self.missing)}
        ranks = self.ranks | spare
        return tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})

    def __call__(self, text: str) -> list[int]:
        text = unicodedata.normalize("NFC", text) if self.nfc else text
        if self._is_easy(text):
            return [self.ids[rank] for rank in self.text.encode_ordinary(text)]
        return [id for word in self.split.finditer(text) for id in self._word(word.group())]

    def _is_easy(self, text: str) -> bool:
        """Whether tiktoken may see the whole text at once."""
        data = text.encode()
        if len(data.translate(None, self.missing)) < len(data):
            return False
        return len(text) <= LONGEST_RUN or all(len(run) <= LONGEST_RUN for run in re.findall(r"\s+", text))

    def _word(self, word: str) -> list[int]:
        data = word.encode()
        kept = data.translate(None, self.missing)
        if len(kept) == len(data):
            return [self.ids[rank] for rank in self.word.encode_ordinary(word)]
        return [self.ids[self.ranks[part]] for part in merge(kept, self.ranks)]


def merge(word: bytes, ranks: dict[bytes, int], until: int = 1) -> list[bytes]:
    """Merge the pair of neighbours of lowest rank, leftmost first, while more than `until` parts remain.

    The plain definition of what tiktoken does to a word, quadratic in its length.
    """
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > until:
        best, at = len(ranks), -1
        for i in range(len(parts) - 1):
            rank = ranks.get(parts[i] + parts[i + 1], best)
            if rank < best:
                best, at = rank, i
        if at < 0:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
