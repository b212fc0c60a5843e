"""`tokenizer.json` of the `tokenizers` library -> Codec, for byte-level BPE (Llama 3, Qwen, SmolLM2).

The file lists merges; tiktoken only knows an order of tokens, and merges *any* two neighbours that
spell a token. The two agree exactly if, for each token, merging its bytes alone tiktoken's way ends
with a pair that the list has, and these pairs stand in the list in the order of the tokens: what
happens inside the span of a token does not depend on the text around it, as long as no merge
crosses its border. `merge_order` checks this for every token and refuses a file where it fails.
"""

from typing import Any

from models.codec import BytePairEncoder, Codec, merge
from models.fields import Fields
from models.patterns import DIGITS_THEN_GPT2, GPT2


def read_tokenizer_json(document: dict[str, Any], path: str) -> Codec:
    """A parsed tokenizer.json as a Codec. Raises ValueError naming the part that is not supported.

    Bytes that the vocabulary lacks are dropped, also where the file names an `unk_token`: that is a
    control token, and text never becomes one.
    """
    check_is_byte_level(document, path)
    fields = Fields(document, f"{path}: ")
    model = fields.table("model")
    added = {token.integer("id", 0): token for token in fields.tables("added_tokens", [])}
    ids = model.table("vocab").raw
    spelled = {token: text_bytes(token) for token in ids}
    vocab = {id: spelled[token] for token, id in ids.items()}
    pieces = vocab | {
        id: b"" if token.flag("special") else token.text("content").encode() for id, token in added.items()
    }
    words = {data: id for id, data in vocab.items() if id not in added}
    tokens = merge_order(model, words, spelled, path)
    encode = BytePairEncoder(
        pattern(document.get("pre_tokenizer"), path),
        tokens,
        [words[token] for token in tokens],
        normalizer(document.get("normalizer"), path),
    )
    names = {token.text("content"): id for id, token in added.items()}
    return Codec("byte-level BPE", encode, pieces, names)


def byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as they are, the others from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


BYTES = byte_alphabet()
OUTSIDE = 0xFFFF
TO_LATIN1 = {code: BYTES.get(chr(code), OUTSIDE) for code in range(0x144)}


def text_bytes(token: str) -> bytes:
    """What a token of the vocabulary stands for; one outside the byte alphabet stands for itself."""
    try:
        return token.translate(TO_LATIN1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def merge_order(model: Fields, words: dict[bytes, int], spelled: dict[str, bytes], path: str) -> list[bytes]:
    """The tokens in tiktoken's order: single bytes, then what the merges make, in the list's order.

    With `ignore_merges`, tokens that no merge makes follow: they are found as whole words only.
    Without it they are never found, and left out. Raises ValueError on a list that no order of tokens
    reproduces, with the first token that shows it.
    """
    pairs: dict[tuple[bytes, bytes], int] = {}
    splits: dict[bytes, tuple[bytes, bytes]] = {}  # of tokens that certainly are what their first pair says
    singles = [token for token in words if len(token) == 1]
    ranks = {token: rank for rank, token in enumerate(singles)}
    for index, entry in enumerate(model.listed("merges", object)):
        first, second = pair(entry, f"{path}: merge {index}")
        left, right = spelled.get(first, b""), spelled.get(second, b"")
        token = left + right
        if not (left in words and right in words and token in words):
            raise ValueError(f"{path}: merge {index} ({entry}) is not in the vocabulary")
        pairs[left, right] = index
        if token not in ranks:
            # Later tokens have no rank yet, and would not count.
            if left in ranks and right in ranks and meet_last(left, right, len(ranks), ranks, splits):
                splits[token] = left, right
            ranks[token] = len(ranks)
    whole_words = model.flag("ignore_merges", False)
    if whole_words:
        unmade = [token for token in words if token not in ranks]
        ranks |= {token: len(ranks) + i for i, token in enumerate(unmade)}

    found, newest = [], -1
    for token in ranks:
        parts = splits.get(token) or merge(token, ranks, until=2)
        if len(parts) == 2:
            index = pairs.get((parts[0], parts[1]), -1)
            if index <= newest:
                raise ValueError(
                    f"{path}: its merges cannot be turned into ranks: {token!r} would be made of "
                    f"{parts[0]!r} and {parts[1]!r}, "
                    + ("out of order" if index >= 0 else "which the list does not merge")
                )
            newest = index
        if whole_words or len(parts) <= 2:
            found.append(token)
    return found


def meet_last(
    left: bytes,
    right: bytes,
    rank: int,
    ranks: dict[bytes, int],
    splits: dict[bytes, tuple[bytes, bytes]],
) -> bool:
    """Whether merging the bytes of a token of this rank ends with left and right; True is certain, False is not.

    Undoes merges on either side of the border, the later one first. Had some pair across the border a lower rank
    than the merge undone (or, right of the border, the same: the leftmost goes first), it would have been merged
    instead. `splits` tells what longer tokens were made of; single bytes have the lowest ranks.
    """
    while ranks.get(left + right, rank) >= rank:
        of_left, of_right = ranks[left], ranks[right]
        if of_left > of_right:
            if left not in splits:
                return len(left) == 1
            left, rank = splits[left][1], of_left
        else:
            if right not in splits:
                return len(right) == 1
            right, rank = splits[right][0], of_right + 1
    return False


def pair(entry: object, where: str) -> list[str]:
    """The two tokens of a merge, written "a b" or, in newer files, ["a", "b"]."""
    halves = entry.split(" ") if isinstance(entry, str) else entry
    if isinstance(halves, list) and list(map(type, halves)) == [str, str]:
        return halves
    raise ValueError(f"{where} ({entry!r}) is not a pair of tokens")


def check_is_byte_level(document: dict[str, Any], path: str) -> None:
    model, decoder = document["model"], document.get("decoder") or {}
    kind = model.get("type", "BPE" if "merges" in model else "unknown")
    if kind != "BPE":
        raise ValueError(f"{path} is a {kind} tokenizer; of tokenizer.json only byte-level BPE is read")
    if model.get("byte_fallback") or decoder.get("type", "ByteLevel") != "ByteLevel":
        raise ValueError(
            f"{path} is a sentencepiece-style BPE tokenizer.json (not byte-level); "
            "put the model's tokenizer.model beside it"
        )
    for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise ValueError(f"{path} sets {key} to {model[key]!r}, which is not supported")


def normalizer(step: dict[str, Any] | None, path: str) -> bool:
    """True for NFC, False for none."""
    if step is None:
        return False
    if step["type"] == "NFC":
        return True
    raise ValueError(f"{path} has the normalizer {step['type']}; supported are NFC and none")


def pattern(step: dict[str, Any] | None, path: str) -> str:
    """The one regular expression that does what the pre-tokenizer does."""
    steps = [] if step is None else step.get("pretokenizers", [step])
    match [reduced(each) for each in steps]:
        case ["ByteLevel with regex"]:
            return GPT2
        case ["Digits" | {"Regex": r"\p{N}"}, "ByteLevel with regex"]:
            return DIGITS_THEN_GPT2
        case [{"Regex": str(split)}, "ByteLevel"]:
            # What the pattern skips stays one piece there, but would be lost here.
            return rf"{split}|(?:(?!{split})[\s\S])+"
    given = ", then ".join(map(str, steps)) or "nothing"
    raise ValueError(
        f"{path} splits text by {given}; supported are ByteLevel alone, individual Digits then "
        "ByteLevel, and one isolated Split by a Regex then ByteLevel, without added spaces"
    )


def reduced(step: dict[str, Any]) -> str | dict[str, str] | None:
    """A pre-tokenizing step as `pattern` matches it, None for one it cannot express."""
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False}:
            return "ByteLevel with regex" if step.get("use_regex", True) else "ByteLevel"
        case {"type": "Digits", "individual_digits": True}:
            return "Digits"
        case {"type": "Split", "behavior": "Isolated", "pattern": dict(split)} if not step.get("invert"):
            return split
    return None
