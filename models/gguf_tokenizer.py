"""The tokenizer inside a GGUF file -> the tokenizer files of a Hugging Face folder.

`gpt2` vocabularies (byte-level BPE) become a `tokenizer.json`, `llama` ones (sentencepiece) a
`tokenizer.model`. GGUF names the pre-tokenization only; the patterns behind the names are those the
models were released with.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from models.fields import Fields
from models.patterns import LLAMA3, QWEN, TEKKEN
from models.protobuf import field
from models.spm import CONTROL, NORMAL, UNUSED, USER_DEFINED, processor


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
    "qwen2": PreTokenizer(QWEN, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(QWEN, nfc=True),
    "tekken": PreTokenizer(TEKKEN, whole_words=True, bos=True),
}


def tokenizer_files(meta: Fields) -> dict[str, bytes]:
    """File name -> content, from the `tokenizer.*` fields of a GGUF file."""
    kind = meta.text("tokenizer.ggml.model")
    if kind == "gpt2":
        pre = pre_tokenizer(meta)
        add_bos = meta.flag("tokenizer.ggml.add_bos_token", pre.bos)
        files = {"tokenizer.json": to_bytes(tokenizer_json(meta, pre, add_bos))}
    elif kind == "llama":
        add_bos = meta.flag("tokenizer.ggml.add_bos_token", True)
        files = {"tokenizer.model": sentencepiece_model(meta)}
    else:
        raise ValueError(f"tokenizer.ggml.model is {kind!r}; known are 'gpt2' (BPE) and 'llama'")
    files["tokenizer_config.json"] = to_bytes(tokenizer_config(meta, kind, add_bos))
    return files


def to_bytes(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, indent=2).encode()


def pre_tokenizer(meta: Fields) -> PreTokenizer:
    name = meta.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise ValueError(
            f"tokenizer.ggml.pre is {name!r}, so it is unknown how text is split; "
            f"known are {', '.join(PRE_TOKENIZERS)}"
        )
    return PRE_TOKENIZERS[name]


def vocabulary(meta: Fields) -> Iterator[tuple[int, str, int]]:
    """(id, token, type); UNUSED tokens are the padding of the embedding matrix."""
    tokens = meta.listed("tokenizer.ggml.tokens", str)
    types = meta.listed("tokenizer.ggml.token_type", int, [NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens but {len(types)} token types")
    return zip(range(len(tokens)), tokens, types, strict=True)


def special_token(meta: Fields, name: str) -> str | None:
    """Text of the bos, eos, padding or unknown token."""
    key, tokens = f"tokenizer.ggml.{name}_token_id", meta.listed("tokenizer.ggml.tokens", str)
    if not meta.has(key):
        return None
    if meta.integer(key, 0) >= len(tokens):
        raise meta.wrong(key, f"the id of one of the {len(tokens)} tokens")
    return tokens[meta.integer(key, 0)]


def tokenizer_json(meta: Fields, pre: PreTokenizer, add_bos: bool) -> dict[str, Any]:
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
            "merges": meta.listed("tokenizer.ggml.merges", str),
        },
    }


def bos_processor(meta: Fields) -> dict[str, Any]:
    bos = special_token(meta, "bos")
    if bos is None:
        raise ValueError("a BOS token is to be added, but tokenizer.ggml.bos_token_id is missing")
    index = meta.integer("tokenizer.ggml.bos_token_id", 0)
    start = {"SpecialToken": {"id": bos, "type_id": 0}}
    a, b = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, a],
        "pair": [start, a, b],
        "special_tokens": {bos: {"id": bos, "ids": [index], "tokens": [bos]}},
    }


def tokenizer_config(meta: Fields, kind: str, add_bos: bool) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    texts = {f"{ours}_token": special_token(meta, theirs) for ours, theirs in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast" if kind == "gpt2" else "LlamaTokenizer",
        "add_bos_token": add_bos,
        "add_eos_token": meta.flag("tokenizer.ggml.add_eos_token", False),
        **{name: text for name, text in texts.items() if text is not None},
        **({"chat_template": text} if (text := meta.text("tokenizer.chat_template", "")) else {}),
        **({"added_tokens_decoder": added_tokens(meta)} if kind == "llama" else {}),
    }


def added_tokens(meta: Fields) -> dict[str, dict[str, Any]]:
    """What llama.cpp calls user-defined are tokens that the checkpoint added to its sentencepiece model."""
    return {
        str(index): {"content": token, "special": False}
        for index, token, kind in vocabulary(meta)
        if kind == USER_DEFINED
    }


def sentencepiece_model(meta: Fields) -> bytes:
    """A sentencepiece BPE model with the pieces, scores and types of the file.

    Added tokens become control pieces: the library would find user-defined ones in any text.
    Field numbers: google/sentencepiece, src/sentencepiece_model.proto. Llama 2 and Mistral use the
    identity normaliser and bytes for unknown characters.
    """
    tokens = meta.listed("tokenizer.ggml.tokens", str)
    scores = meta.listed("tokenizer.ggml.scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"{len(tokens)} tokens but {len(scores)} scores")
    trainer = field(3, 2) + field(4, len(tokens)) + field(35, True)  # BPE, size, byte fallback
    # (GGUF name, where it is missing, number of the id's field, of the piece's field)
    specials = [("unknown", 0, 40, 45), ("bos", 1, 41, 46), ("eos", 2, 42, 47), ("padding", -1, 43, 48)]
    for name, default, id_field, piece_field in specials:
        trainer += field(id_field, meta.integer(f"tokenizer.ggml.{name}_token_id", 0, default))
        piece = special_token(meta, name) or (tokens[default] if 0 <= default < len(tokens) else None)
        if piece is not None:
            trainer += field(piece_field, piece)
    prefix = meta.flag("tokenizer.ggml.add_space_prefix", True)
    trim = meta.flag("tokenizer.ggml.remove_extra_whitespaces", False)
    normalizer = field(1, "identity") + field(3, prefix) + field(4, trim) + field(5, True)
    types = {USER_DEFINED: CONTROL}
    pieces = [
        field(1, field(1, piece) + field(2, scores[index]) + field(3, types.get(kind, kind)))
        for index, piece, kind in vocabulary(meta)
    ]
    model = b"".join(pieces) + field(2, trainer) + field(3, normalizer)
    try:
        processor(model)
    except RuntimeError as error:
        raise ValueError(f"the vocabulary makes no sentencepiece model: {error}") from error
    return model
