"""Tokenizers rebuilt from GGUF fields, against the real files and patterns they were released with."""

import base64
import json
from pathlib import Path
from pydoc_data.topics import topics

import mistral_common
import pytest
import sentencepiece
import tiktoken
import tokenizers
from transformers.convert_slow_tokenizer import TikTokenConverter, bytes_to_unicode
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN2_REGEX

from models import gguf_tokenizer
from models.fields import Fields
from models.tokenizer import load_tokenizer
from tests.gguf_files import byte_vocabulary

TEXTS = [
    "Hello, world! It's 12345 o'clock;  two  spaces\n\n\tand tabs \r\n",
    "don't WON'T we'LL, HTTPServer/path\\file.txt a_b-c",
    "Grüße aus Köln, naïve café, Ελληνικά, Привет, 你好世界 1234567, こんにちは, مرحبا ١٢٣",
    "🙂👍🏽 e\u0301 \u00a0 \u2028 x = y**2 + 3.14e-5;;; ...???",
    "   leading and trailing   ",
]


def tokenizer_files(meta: dict[str, object]) -> dict[str, bytes]:
    return gguf_tokenizer.tokenizer_files(Fields(meta))


def tokenizer_of(meta: dict[str, object]) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(tokenizer_files(meta)["tokenizer.json"].decode())


def ids(tokenizer: tokenizers.Tokenizer, text: str, bos: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=bos).ids


def split(regex: str) -> tokenizers.pre_tokenizers.PreTokenizer:
    pieces = tokenizers.pre_tokenizers.Split(tokenizers.Regex(regex), "isolated")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizers.pre_tokenizers.Sequence([pieces, byte_level])


def tekken_document() -> dict:
    folder = Path(mistral_common.__file__).parent / "data"
    return json.loads((folder / "tekken_240718.json").read_text(encoding="utf-8"))


LLAMA3_REGEX = TikTokenConverter(vocab_file="", additional_special_tokens=[]).pattern
DIGITS = tokenizers.pre_tokenizers.Digits(individual_digits=True)
BYTE_LEVEL = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
PRE_TOKENIZERS = {
    "gpt-2": BYTE_LEVEL,
    "smollm": tokenizers.pre_tokenizers.Sequence([DIGITS, BYTE_LEVEL]),
    "llama-bpe": split(LLAMA3_REGEX),
    "qwen2": split(QWEN2_REGEX),
    "deepseek-r1-qwen": split(QWEN2_REGEX),
    "tekken": split(tekken_document()["config"]["pattern"]),
}


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_text_is_split_as_the_models_release_splits_it(pre):
    tokenizer = tokenizer_of(byte_vocabulary() | {"tokenizer.ggml.pre": pre})
    for text in TEXTS:
        expected = PRE_TOKENIZERS[pre].pre_tokenize_str(text)
        assert tokenizer.pre_tokenizer.pre_tokenize_str(text) == expected


def test_bytes_merges_control_and_added_tokens_keep_their_ids():
    meta = byte_vocabulary()
    tokens = meta["tokenizer.ggml.tokens"]
    tokenizer = tokenizer_of(meta)
    assert ids(tokenizer, " the") == [tokens.index("Ġthe")]
    assert ids(tokenizer, "12") == [tokens.index("1"), tokens.index("2")]  # digits stand alone
    assert ids(tokenizer, "<|end|>x<think>") == [0, tokens.index("x"), 1]
    for text in TEXTS:
        assert tokenizer.decode(ids(tokenizer, text)) == text
    assert tokenizer.token_to_id("[PAD0]") is None
    special = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert special == {"<|end|>": True, "<think>": False}


def test_only_qwen_composes_characters_first():
    for pre in PRE_TOKENIZERS:
        tokenizer = tokenizer_of(byte_vocabulary() | {"tokenizer.ggml.pre": pre})
        composed = ids(tokenizer, "e\u0301") == ids(tokenizer, "\u00e9")
        assert composed == (pre in ("qwen2", "deepseek-r1-qwen"))


def test_whole_words_need_no_merges_where_the_release_ranks_words():
    """Llama 3 and tekken come from tiktoken, which looks a word up before it merges."""
    meta = byte_vocabulary()
    tokens = meta["tokenizer.ggml.tokens"]
    word = tokens.index("[PAD0]")
    meta["tokenizer.ggml.tokens"] = [*tokens[:word], "Ġxyz", *tokens[word + 1 :]]
    meta["tokenizer.ggml.token_type"][word] = 1
    for pre in PRE_TOKENIZERS:
        found = ids(tokenizer_of(meta | {"tokenizer.ggml.pre": pre}), " xyz")
        assert (found == [word]) == (pre in ("llama-bpe", "tekken"))


def test_bos_is_added_where_the_file_or_its_kind_of_vocabulary_says_so():
    meta = byte_vocabulary()
    for pre, flag, expected in [
        ("smollm", None, False),
        ("smollm", True, True),
        ("llama-bpe", None, True),
        ("llama-bpe", False, False),
        ("qwen2", None, False),
        ("tekken", None, True),
    ]:
        given = {} if flag is None else {"tokenizer.ggml.add_bos_token": flag}
        case = meta | {"tokenizer.ggml.pre": pre} | given
        assert (ids(tokenizer_of(case), "x", bos=True)[0] == 0) == expected
        config = json.loads(tokenizer_files(case)["tokenizer_config.json"])
        assert config["add_bos_token"] == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer.ggml.pre": "default"}, "'default'"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is missing"),
        ({"tokenizer.ggml.pre": ["smollm"]}, r"tokenizer.ggml.pre is \['smollm'\]"),
        ({"tokenizer.ggml.merges": [1]}, r"tokenizer.ggml.merges is \[1\]"),
        ({"tokenizer.ggml.bos_token_id": 288}, "bos_token_id is 288; needed is the id of one of the 288"),
        ({"tokenizer.ggml.bos_token_id": "a"}, "bos_token_id is 'a'"),
        ({"tokenizer.chat_template": 5}, "tokenizer.chat_template is 5"),
        ({"tokenizer.ggml.model": "bert"}, "'bert'"),
        ({"tokenizer.ggml.token_type": [1, 1]}, "288 tokens but 2 token types"),
        ({"tokenizer.ggml.tokens": ["a", "a"], "tokenizer.ggml.token_type": [1, 1]}, "occur twice"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores"),
    ],
)
def test_tokenizers_that_cannot_be_carried_over_are_refused_by_name(change, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_files(byte_vocabulary() | change)


def last_merge(word: bytes, ranks: dict[bytes, int]) -> list[bytes]:
    """The two tokens `word` is made of: what is left when all earlier merges have been done."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 2:
        pairs = [parts[i] + parts[i + 1] for i in range(len(parts) - 1)]
        i = min(range(len(pairs)), key=lambda i: ranks.get(pairs[i], len(ranks)))
        parts[i : i + 2] = [pairs[i]]
    return parts


def test_a_tekken_vocabulary_encodes_as_tiktoken_does():
    """The first 4000 ranks of Mistral's file; cutting a rank list gives a smaller, equally valid one."""
    document = tekken_document()
    words = [base64.b64decode(item["token_bytes"]) for item in document["vocab"][:4000]]
    ranks = {word: rank for rank, word in enumerate(words)}
    pattern = document["config"]["pattern"]
    oracle = tiktoken.Encoding("", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    alphabet = bytes_to_unicode()
    spelled = ["".join(alphabet[byte] for byte in word) for word in words]
    merges = [last_merge(word, ranks) for word in words[256:]]
    meta = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "tekken",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", *spelled],
        "tokenizer.ggml.token_type": [3, 3, *[1] * len(words)],
        "tokenizer.ggml.merges": [
            " ".join("".join(alphabet[byte] for byte in part) for part in parts) for parts in merges
        ],
        "tokenizer.ggml.bos_token_id": 1,
    }
    tokenizer = tokenizer_of(meta)
    for text in sentences(200):
        assert ids(tokenizer, text) == [rank + 2 for rank in oracle.encode_ordinary(text)]
        assert tokenizer.decode(ids(tokenizer, text)) == text


def sentences(count: int) -> list[str]:
    """The texts above and lines of the Python reference, which is long and ships with Python."""
    lines = [line for topic in topics.values() for line in topic.splitlines() if len(line) > 30]
    return TEXTS + lines[:: len(lines) // count][: count - len(TEXTS)]


def sentencepiece_fields(processor: sentencepiece.SentencePieceProcessor) -> dict[str, object]:
    """What llama.cpp's converter writes for a tokenizer.model."""
    size = processor.vocab_size()
    types = []
    for index in range(size):
        if processor.is_unknown(index):
            types.append(2)
        elif processor.is_control(index):
            types.append(3)
        else:
            types.append(6 if processor.is_byte(index) else 1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [processor.id_to_piece(i) for i in range(size)],
        "tokenizer.ggml.scores": [processor.get_score(i) for i in range(size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": processor.bos_id(),
        "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
    }


@pytest.mark.parametrize(
    "file",
    [
        "tokenizer.model.v1",
        "mistral_instruct_tokenizer_240216.model.v2",
        "mistral_instruct_tokenizer_240323.model.v3",
        "mistral_instruct_tokenizer_241114.model.v7",
    ],
)
def test_a_rebuilt_sentencepiece_model_encodes_as_the_original(file):
    path = Path(mistral_common.__file__).parent / "data" / file
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    content = tokenizer_files(sentencepiece_fields(original))["tokenizer.model"]
    rebuilt = sentencepiece.SentencePieceProcessor(model_proto=content)
    for text in sentences(500):
        assert rebuilt.encode(text) == original.encode(text)
        assert rebuilt.decode(rebuilt.encode(text)) == original.decode(original.encode(text))
    for name in ("vocab_size", "bos_id", "eos_id", "unk_id", "pad_id"):
        assert getattr(rebuilt, name)() == getattr(original, name)()


def test_a_vocabulary_without_an_unknown_token_is_no_sentencepiece_model():
    meta = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<s>", "a"],
        "tokenizer.ggml.scores": [0.0, -1.0],
        "tokenizer.ggml.token_type": [3, 1],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 0,
    }
    with pytest.raises(ValueError, match="makes no sentencepiece model"):
        tokenizer_files(meta)


def test_added_tokens_of_a_sentencepiece_vocabulary_are_never_made_from_text(tmp_path):
    """llama.cpp writes a checkpoint's added tokens as user-defined ones."""
    path = Path(mistral_common.__file__).parent / "data" / "tokenizer.model.v1"
    original = sentencepiece.SentencePieceProcessor(model_file=str(path))
    meta = sentencepiece_fields(original)
    meta["tokenizer.ggml.tokens"] += ["<|im_start|>", "<think>"]
    meta["tokenizer.ggml.scores"] += [-1000.0, -1000.0]
    meta["tokenizer.ggml.token_type"] += [3, 4]
    for name, content in tokenizer_files(meta).items():
        (tmp_path / name).write_bytes(content)
    tok = load_tokenizer(tmp_path)
    for text in [*TEXTS, "a<|im_start|>b", "<think>", "x <think>"]:
        assert tok.encode(text) == original.encode(text)
    assert (tok.codec.names["<|im_start|>"], tok.codec.names["<think>"]) == (32000, 32001)
    assert tok.decode([32000, 32001]) == "<think>"
