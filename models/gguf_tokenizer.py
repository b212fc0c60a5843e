"""The tokenizer inside a GGUF file -> the tokenizer files of a Hugging Face folder.

`gpt2` vocabularies (byte-level BPE) become a `tokenizer.json`, `llama` ones (sentencepiece) a
`tokenizer.model`. GGUF names the pre-tokenization only; the patterns behind the names are those the
models were released with.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import sentencepiece

# Token types: the numbers of sentencepiece's ModelProto.SentencePiece.Type, which GGUF took over.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
LLAMA3 = rf"{WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
QWEN2 = rf"{WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
LEAD = r"[^\r\n\p{L}\p{N}]?"
TEKKEN = rf"{LEAD}{UPPER}*{LOWER}+|{LEAD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"


@dataclass(frozen=True)
class PreTokenizer:
    """What happens to text before BPE. `pattern` None: the GPT-2 pattern `tokenizers` has built in."""

    pattern: str | None = None
    digits: bool = False  # every digit on its own first
    nfc: bool = False
    whole_words: bool = False  # a word in the vocabulary is taken as it is, without merging
    bos: bool = False  # unless the file says otherwise

    def json(self) -> dict[str, Any]:
        """As the `pre_tokenizer` of a tokenizer.json."""
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps = [byte_level | {"use_regex": self.pattern is None}]
        if self.pattern:
            split = {"type": "Split", "pattern": {"Regex": self.pattern}}
            steps.insert(0, split | {"behavior": "Isolated", "invert": False})
        if self.digits:
            steps.insert(0, {"type": "Digits", "individual_digits": True})
        return steps[0] if len(steps) == 1 else {"type": "Sequence", "pretokenizers": steps}


# tokenizer.ggml.pre -> what it means.
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "llama-bpe": PreTokenizer(LLAMA3, whole_words=True, bos=True),
    "qwen2": PreTokenizer(QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(QWEN2, nfc=True),
    "tekken": PreTokenizer(TEKKEN, whole_words=True, bos=True),
}


def tokenizer_files(meta: Mapping[str, Any]) -> dict[str, bytes]:
    """File name -> content, from the `tokenizer.*` fields of a GGUF file."""
    kind = meta.get("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = pre_tokenizer(meta)
        add_bos = meta.get("tokenizer.ggml.add_bos_token", pre.bos)
        files = {"tokenizer.json": to_bytes(tokenizer_json(meta, pre, add_bos))}
    elif kind == "llama":
        add_bos = meta.get("tokenizer.ggml.add_bos_token", True)
        files = {"tokenizer.model": sentencepiece_model(meta)}
    else:
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; known are 'gpt2' (BPE) and 'llama'")
    files["tokenizer_config.json"] = to_bytes(tokenizer_config(meta, kind, add_bos))
    return files


def need(meta: Mapping[str, Any], key: str) -> Any:
    if key not in meta:
        raise ValueError(f"the file has no {key}")
    return meta[key]


def to_bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, indent=2).encode()


def pre_tokenizer(meta: Mapping[str, Any]) -> PreTokenizer:
    name = meta.get("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, so it is unknown how text is split; "
            f"known are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def vocabulary(meta: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """(id, token, type); UNUSED tokens are the padding of the embedding matrix."""
    tokens = need(meta, "tokenizer.ggml.tokens")
    types = meta.get("tokenizer.ggml.token_type", [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens but {len(types)} token types")
    return zip(range(len(tokens)), tokens, types, strict=True)


def special_token(meta: Mapping[str, Any], name: str) -> str | None:
    """Text of the bos, eos, padding or unknown token."""
    index = meta.get(f"tokenizer.ggml.{name}_token_id")
    return None if index is None else need(meta, "tokenizer.ggml.tokens")[index]


def tokenizer_json(meta: Mapping[str, Any], pre: PreTokenizer, add_bos: bool) -> dict[str, Any]:
    """Byte-level BPE in the format of the `tokenizers` library."""
    used = [item for item in vocabulary(meta) if item[2] != UNUSED]
    vocab = {token: index for index, token, _ in used}
    if len(vocab) != len(used):
        raise ValueError(f"{len(used) - len(vocab)} tokens of the vocabulary occur twice")
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": index, "content": token, **plain, "special": kind == CONTROL}
            for index, token, kind in used
            if kind in (CONTROL, USER_DEFINED)
        ],
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": pre.json(),
        "post_processor": bos_processor(meta) if add_bos else None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": True,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.whole_words,
            "vocab": vocab,
            "merges": need(meta, "tokenizer.ggml.merges"),
        },
    }


def bos_processor(meta: Mapping[str, Any]) -> dict[str, Any]:
    bos, index = special_token(meta, "bos"), meta.get("tokenizer.ggml.bos_token_id")
    if bos is None:
        raise ValueError("a BOS token is to be added, but tokenizer.ggml.bos_token_id is missing")
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, a],
        "pair": [start, a, b],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }


def tokenizer_config(meta: Mapping[str, Any], kind: str, add_bos: bool) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    texts = {f"{ours}_token": special_token(meta, theirs) for ours, theirs in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast" if kind == "gpt2" else "LlamaTokenizer",
        "add_bos_token": add_bos,
        "add_eos_token": meta.get("tokenizer.ggml.add_eos_token", False),
        **{name: text for name, text in texts.items() if text is not None},
        **({"chat_template": text} if (text := meta.get("tokenizer.chat_template")) else {}),
    }


def sentencepiece_model(meta: Mapping[str, Any]) -> bytes:
    """A sentencepiece BPE model with the pieces, scores and types of the file.

    Field numbers: google/sentencepiece, src/sentencepiece_model.proto. Llama 2 and Mistral use the
    identity normaliser and bytes for unknown characters.
    """
    tokens, scores = need(meta, "tokenizer.ggml.tokens"), need(meta, "tokenizer.ggml.scores")
    trainer = field(3, 2) + field(4, len(tokens)) + field(35, True)  # BPE, size, byte fallback
    # (GGUF name, where it is missing, number of the id's field, of the piece's field)
    specials = [("unknown", 0, 40, 45), ("bos", 1, 41, 46), ("eos", 2, 42, 47), ("padding", -1, 43, 48)]
    for name, default, id_field, piece_field in specials:
        index = meta.get(f"tokenizer.ggml.{name}_token_id", default)
        trainer += field(id_field, index)
        if index >= 0:
            trainer += field(piece_field, tokens[index])
    prefix = meta.get("tokenizer.ggml.add_space_prefix", True)
    trim = meta.get("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer = field(1, "identity") + field(3, prefix) + field(4, trim) + field(5, True)
    pieces = [
        field(1, field(1, piece) + field(2, scores[index]) + field(3, kind))
        for index, piece, kind in vocabulary(meta)
    ]
    model = b"".join(pieces) + field(2, trainer) + field(3, normalizer)
    try:
        sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise ValueError(f"the vocabulary makes no sentencepiece model: {error}") from error
    return model


def field(number: int, value: int | float | str | bytes) -> bytes:
    """A protobuf field (protobuf.dev, "Encoding"): varint, float32 or length-delimited bytes."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    data = value.encode() if isinstance(value, str) else value
    return varint(number << 3 | 2) + varint(len(data)) + data


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1  # negative numbers are written in two's complement
    groups = []
    while value > 127:
        groups.append(value & 127 | 128)
        value >>= 7
    return bytes([*groups, value])
