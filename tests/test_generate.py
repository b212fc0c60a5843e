import numpy as np
import pytest
import torch

from minikv import CompressedKVCache, generate
from minikv.step import CompiledStep
from tests.conftest import make_toy

PROMPT = list(range(40, 70))


def full(model, batch=1):
    return CompressedKVCache.for_model(model, "full", batch=batch)


def greedy(model, ids, n):
    """The definition: run the whole text again for every token."""
    ids = list(ids)
    for _ in range(n):
        ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
    return ids[-n:]


def test_greedy_tokens_are_those_of_the_model_without_a_cache(toy):
    cache = full(toy)
    out = generate(toy, PROMPT, cache, max_new_tokens=12, ignore_eos=True)
    assert out.ids == greedy(toy, PROMPT, 12)
    assert (out.text, out.reason) == (None, "length")
    assert cache.seen.tolist() == [len(PROMPT) + 12 - 1]  # the last token is not fed


def test_a_second_call_goes_on_where_the_first_ended(toy):
    cache = full(toy)
    first = generate(toy, PROMPT, cache, max_new_tokens=5, ignore_eos=True).ids
    more = [first[-1], 7, 8]
    second = generate(toy, torch.tensor(more), cache, max_new_tokens=5, ignore_eos=True).ids
    assert second == greedy(toy, PROMPT + first[:-1] + more, 5)


def test_rows_of_a_batch_are_what_each_gives_alone_and_end_on_their_own(toy):
    prompts = [PROMPT, PROMPT[:11], PROMPT[5:6]]
    alone = [greedy(toy, p, 10) for p in prompts]
    toy_ending = make_toy(eos_ids=(alone[1][4],))
    cache = full(toy_ending, 3)
    out = generate(toy_ending, prompts, cache, max_new_tokens=10)
    assert out.ids[1] == alone[1][: alone[1].index(alone[1][4])]
    assert out.reason[1] == "eos"
    for row in (0, 2):
        if out.reason[row] == "length":
            assert out.ids[row] == alone[row]
    fed = [len(p) + len(i) - (r == "length") for p, i, r in zip(prompts, out.ids, out.reason, strict=True)]
    assert cache.seen.tolist() == fed


def test_a_chunked_prompt_of_the_full_cache_gives_the_same_tokens(toy):
    want = generate(toy, [PROMPT, PROMPT[:13]], full(toy, 2), max_new_tokens=6, ignore_eos=True).ids
    for chunk in (1, 4, 13, 29, 100):
        out = generate(
            toy, [PROMPT, PROMPT[:13]], full(toy, 2), max_new_tokens=6, ignore_eos=True, chunk=chunk
        )
        assert out.ids == want


@pytest.mark.parametrize(("length", "expected"), [(60, 4), (63, 1), (64, 0)])
def test_generation_ends_at_the_context_limit(length, expected):
    model = make_toy(max_position=64)
    out = generate(model, [5] * length, full(model), max_new_tokens=20, ignore_eos=True)
    assert (len(out.ids), out.reason) == (expected, "length")


def test_a_prompt_beyond_the_limit_is_refused_before_anything_runs():
    model = make_toy(max_position=64)
    cache = full(model)
    with pytest.raises(ValueError, match="70 tokens do not fit into a context of 64"):
        generate(model, [5] * 70, cache)
    assert cache.seen.tolist() == [0]


def test_ids_past_the_tokenizer_are_never_sampled(toy):
    class FewIds:
        vocab_size = 10
        stop_ids = frozenset()

        def stream(self):
            return self

        def feed(self, token):
            return f"<{token}>"

        def finish(self):
            return ""

    out = generate(toy, PROMPT, full(toy), FewIds(), max_new_tokens=8)
    assert max(out.ids) < 10
    assert out.text == "".join(f"<{i}>" for i in out.ids)
    stopped = generate(toy, PROMPT, full(toy), FewIds(), max_new_tokens=8, stop=[f"<{out.ids[2]}>"])
    at = out.ids.index(out.ids[2])
    assert stopped.reason == "stop"
    assert stopped.text == "".join(f"<{i}>" for i in out.ids[:at])


def test_the_same_seed_gives_the_same_tokens(toy):
    a, b, c = (
        generate(toy, PROMPT, full(toy), max_new_tokens=20, temperature=2.0, seed=s, ignore_eos=True).ids
        for s in (1, 1, 2)
    )
    assert a == b != c


@pytest.mark.parametrize(
    ("ids", "options", "words"),
    [
        ([], {}, "no tokens"),
        ([[1, 2], [3]], {}, "1 rows, 2 prompts"),
        ([1, 999], {}, "999"),
        ([1, -1], {}, "-1"),
        ([1], dict(temperature=-1), "temperature"),
        ([1], dict(max_new_tokens=-1), "max_new_tokens"),
        ([1], dict(chunk=0), "chunk"),
        ([1], dict(stop=["x"]), "tokenizer"),
    ],
)
def test_bad_input_is_named(ids, options, words, toy):
    cache = full(toy)
    with pytest.raises(ValueError, match=words):
        generate(toy, ids, cache, **options)
    assert cache.seen.tolist() == [0]


def test_nan_logits_raise_instead_of_choosing_a_token(toy):
    broken = make_toy()
    broken.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        generate(broken, PROMPT, full(broken), max_new_tokens=3)


def test_compiled_steps_give_the_tokens_of_eager_ones(toy):
    cache = CompressedKVCache.for_model(toy, "snapkv", budget=40, room=4)
    eager = generate(toy, PROMPT * 2, cache, max_new_tokens=12, ignore_eos=True).ids
    cache.reset()
    compiled = generate(
        toy, PROMPT * 2, cache, max_new_tokens=12, ignore_eos=True, step=CompiledStep(cache)
    ).ids
    assert compiled == eager


def test_a_row_that_ends_at_the_context_limit_leaves_its_last_token_unfed():
    model = make_toy(max_position=64)
    cache = full(model, 2)
    out = generate(model, [[5] * 62, [6] * 3], cache, max_new_tokens=20, ignore_eos=True)
    assert [len(i) for i in out.ids] == [2, 20]
    assert cache.seen.tolist() == [63, 22]


def test_ids_may_be_any_integers(toy):
    want = generate(toy, [3, 4, 5], full(toy), max_new_tokens=3, ignore_eos=True).ids
    for ids in (np.array([3, 4, 5]), torch.tensor([3, 4, 5]), (3, 4, 5), list(np.array([3, 4, 5]))):
        assert generate(toy, ids, full(toy), max_new_tokens=3, ignore_eos=True).ids == want
    rows = generate(toy, np.array([[3, 4, 5]]), full(toy), max_new_tokens=3, ignore_eos=True)
    assert rows.ids == [want]
    for ids in (torch.tensor([1.5]), ["a"], [None]):
        with pytest.raises(ValueError, match="integers"):
            generate(toy, ids, full(toy))
