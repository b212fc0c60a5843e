"""Tokenizer files that hold tiktoken ranks: Llama 3's, Qwen's and Mistral's tekken.json -> Codec."""

import base64
import reprlib
from typing import Any

from models.codec import BytePairEncoder, Codec
from models.fields import Fields
from models.patterns import LLAMA3, QWEN

# In the order of their ids. Names as of Llama 3.1; in 3.0 some of them were still reserved.
LLAMA3_CONTROL = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|step_id|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|image|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(2, 246)),
]
QWEN_CONTROL = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    *(f"<|extra_{i}|>" for i in range(205)),
]
# tekken.json names its control tokens from version 7 on; before, these were implied.
TEKKEN_CONTROL = [
    "<unk>",
    "<s>",
    "</s>",
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
    "[TOOL_CALLS]",
    "[IMG]",
    "<pad>",
    "[IMG_BREAK]",
    "[IMG_END]",
    "[PREFIX]",
    "[MIDDLE]",
    "[SUFFIX]",
    "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
]
LLAMA3_RANKS = 128_000
QWEN_RANKS = 151_643


def read_rank_list(data: bytes, model_type: str, path: str) -> Codec:
    """Lines of a base64 token and its rank, which is also its id; control tokens follow the last one.

    The file holds neither pattern nor control tokens. The number of ranks tells whose they are; for
    any other number `model_type` of config.json does.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(data.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(
                f"{path}: line {number} is not a base64 token and a rank; fetch the file again"
            ) from error
    tokens = sorted(ranks, key=ranks.__getitem__)
    n = len(tokens)
    if [ranks[token] for token in tokens] != list(range(n)):
        raise ValueError(f"{path}: its {n} ranks are not 0 to {n - 1}; fetch the file again")
    if n == QWEN_RANKS or (n != LLAMA3_RANKS and model_type.startswith("qwen")):
        control = dict(zip(QWEN_CONTROL, range(n, n + len(QWEN_CONTROL)), strict=True))
        return rank_codec("Qwen ranks", QWEN, tokens, 0, control, nfc=True)
    control = dict(zip(LLAMA3_CONTROL, range(n, n + len(LLAMA3_CONTROL)), strict=True))
    return rank_codec("Llama 3 ranks", LLAMA3, tokens, 0, control)


def read_tekken(document: dict[str, Any], path: str) -> Codec:
    """A parsed tekken.json; control tokens take the first ids, and the vocabulary is cut to its size."""
    fields = Fields(document, f"{path}: ")
    config = fields.table("config")
    n_control = config.integer("default_num_special_tokens")
    n_tokens = config.integer("default_vocab_size", n_control + 1) - n_control
    entries = fields.listed("vocab", dict)[:n_tokens]
    tokens = [token_bytes(entry, f"{path}: vocab[{i}]") for i, entry in enumerate(entries)]
    listed = fields.tables("special_tokens", [])
    names = {entry.integer("rank", 0): entry.text("token_str") for entry in listed}
    names = names or dict(enumerate(TEKKEN_CONTROL))
    control = {names.get(id, f"<SPECIAL_{id}>"): id for id in range(n_control)}
    pattern, version = config.text("pattern"), config.text("version", "")
    return rank_codec("tekken", pattern, tokens, n_control, control, version=version)


def token_bytes(entry: dict[str, Any], name: str) -> bytes:
    try:
        return base64.b64decode(entry["token_bytes"])
    except (KeyError, TypeError, ValueError) as error:
        given = reprlib.repr(entry.get("token_bytes"))
        raise ValueError(f"{name} has the token_bytes {given}; needed is base64") from error


def rank_codec(
    kind: str,
    pattern: str,
    tokens: list[bytes],
    first: int,
    control: dict[str, int],
    nfc: bool = False,
    version: str = "",
) -> Codec:
    """`tokens` in the order of their ranks, with ids from `first` on, and control tokens."""
    ids = range(first, first + len(tokens))
    pieces = dict(zip(ids, tokens, strict=True)) | dict.fromkeys(control.values(), b"")
    encode = BytePairEncoder(pattern, tokens, ids, nfc)
    return Codec(kind, encode, pieces, control, version=version)
