"""tokenizer.json files: the library's ids, or a refusal that names the reason."""

import json
import random

import pytest
import tokenizers
from tokenizers import Regex, pre_tokenizers

from models.bpe import meet_last, read_tokenizer_json
from models.codec import merge
from models.tokenizer import load_tokenizer
from tests.assets import checkpoint, varied_texts
from tests.library import LLAMA3, QWEN, differing, digits_first, library_ids, small_json, split_by, trained

TEXTS = varied_texts(300)

PRE_TOKENIZERS = {
    "gpt2": pre_tokenizers.ByteLevel(False),
    "smollm2": digits_first(),
    "starcoder": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(False)]
    ),
    "llama3": split_by(LLAMA3),
    "qwen": split_by(QWEN),
    "gaps": split_by(r"\p{L}+"),  # skips text, which HF keeps as pieces of its own
}


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("alphabet", [False, True], ids=["few bytes", "all bytes"])
@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_a_trained_tokenizer_json_gives_the_librarys_ids(name, alphabet, ignore_merges, tmp_path):
    library = trained(PRE_TOKENIZERS[name], alphabet, ignore_merges=ignore_merges)
    tok = load_tokenizer(checkpoint(tmp_path, {"tokenizer.json": library.to_str().encode()}))
    assert differing(tok.encode, lambda text: library_ids(library, text), TEXTS) == []
    if alphabet:
        assert differing(lambda text: tok.decode(tok.encode(text)), str, TEXTS) == []


def test_merges_that_ranks_cannot_express_are_refused():
    """HF stops at ab, c; tiktoken would merge them, because abc is a token."""
    document = small_json(["a", "b", "c", "ab", "bc", "abc"], ["a b", "b c", "a bc"])
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    assert library.encode("abc").tokens == ["ab", "c"]
    with pytest.raises(ValueError, match="b'abc' would be made of b'ab' and b'c'"):
        read_tokenizer_json(document, "tokenizer.json")


def test_random_merge_lists_are_refused_or_give_the_librarys_ids():
    draw = random.Random(2)
    refused = 0
    for _ in range(600):
        vocab, merges = ["a", "b", "c"], []
        for _ in range(draw.randint(1, 9)):
            pair = [draw.choice(vocab), draw.choice(vocab)]
            if pair not in merges:
                merges.append(pair)
                vocab += ["".join(pair)] * ("".join(pair) not in vocab)
        extra = "".join(draw.choices("abc", k=4))  # a token that perhaps no merge makes
        vocab += [extra] * (extra not in vocab)
        draw.shuffle(vocab)  # ids need not follow the merges
        document = small_json(vocab, merges, model={"ignore_merges": draw.random() < 0.5})
        library = tokenizers.Tokenizer.from_str(json.dumps(document))
        try:
            codec = read_tokenizer_json(document, "tokenizer.json")
        except ValueError:
            refused += 1
            continue
        for word in [extra, *("".join(draw.choices("abc", k=draw.randint(1, 9))) for _ in range(40))]:
            assert codec.encode(word) == library_ids(library, word), (document, word)
    assert 100 < refused < 400


def test_a_border_found_to_be_merged_last_is_where_merging_ends():
    draw, certain = random.Random(3), 0
    for _ in range(300):
        ranks, splits = {b"a": 0, b"b": 1, b"c": 2}, {}
        for _ in range(30):
            left, right = draw.choices(list(ranks), k=2)
            ranks.setdefault(left + right, len(ranks))
            last = merge(left + right, ranks, until=2)
            if meet_last(left, right, ranks[left + right], ranks, splits):
                assert last == [left, right]
                splits[left + right] = left, right
                certain += 1
    assert certain > 3000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"type": "WordPiece"}}, "WordPiece"),
        ({"model": {"type": "Unigram"}}, "Unigram"),
        ({"model": {"byte_fallback": True}}, "tokenizer.model"),
        ({"decoder": {"type": "Metaspace"}}, "tokenizer.model"),
        ({"normalizer": {"type": "Lowercase"}}, "Lowercase"),
        ({"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace"),
        ({"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True}}, "add_prefix_space"),
        ({"model": {"merges": ["a z"]}}, "merge 0"),
        ({"model": {"dropout": 0.1}}, "dropout"),
    ],
)
def test_an_unsupported_tokenizer_json_is_refused_by_name(changes, message, tmp_path):
    folder = checkpoint(tmp_path, {"tokenizer.json": small_json(["a", "b"], [], **changes)})
    with pytest.raises(ValueError, match=message) as error:
        load_tokenizer(folder)
    assert "\n" not in str(error.value)
