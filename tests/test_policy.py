"""Policies as text, as numbers, and the positions each scorer keeps against independent oracles."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from minikv import METHODS, CompressedKVCache, Policy
from minikv.axes import Full, Scorer
from minikv.policy import rank
from minikv.seen import Seen
from minikv.strategies.criticalkv import CriticalKV
from minikv.strategies.snapkv import SnapKV
from minikv.strategies.streaming import StreamingLLM


def layer_seen(n=60, heads=2, group=2, window=8, d=16, seed=0, rows=1) -> Seen:
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(rows, heads, n, d, generator=g) for _ in range(2))
    q = torch.randn(rows, heads, group, window, d, generator=g) * 2
    pos = torch.arange(n).expand(rows, heads, n)
    return Seen(q, pos[:, 0, -window:], [k], [v], pos, torch.full((rows,), n - 1))


def test_text_and_python_say_the_same():
    assert Policy.parse("snapkv") == METHODS["snapkv"] == Policy(SnapKV())
    assert Policy.parse(" SnapKV( window = 16 , kernel=5, pool=avg ) ") == Policy(SnapKV(16, 5, "avg"))
    assert Policy.parse("streaming") == METHODS["streaming"]
    assert Policy.parse("full").score == Full()
    assert replace(Policy.parse("snapkv"), every=0).every == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("snapvk", ["'snapvk'", "snapkv"]),
        ("snapkv(windw=3)", ["windw", "window, kernel, pool"]),
        ("snapkv(window=3", ["bracket"]),
        ("snapkv(3)", ["'3'", "window"]),
        ("full(window=3)", ["no keywords"]),
        ("streaming(window=3)", ["shift_sinks"]),
        ("snapkv+streaming", ["'snapkv'", "'streaming'", "score"]),
        ("snapkv+", ["''"]),
        ("", ["''", "known are"]),
        ("snapkv(kernel=4)", ["odd", "4"]),
        ("snapkv(window=a)", ["window", "int", "'a'"]),
        ("snapkv(window=1.5)", ["window", "int"]),
        ("snapkv(window=True)", ["window", "int"]),
        ("snapkv(window=16))", ["window"]),
        ("snapkv(window=8,window=9)", ["window=9", "once"]),
        ("l2+criticalkv", ["attention", "snapkv"]),
        ("fastgen+adakv", ["'fastgen'", "'adakv'", "heads"]),
        ("snapkv(window=0)", ["window", "0"]),
        ("snapkv(pool=median)", ["median"]),
    ],
)
def test_a_policy_that_cannot_be_is_refused_with_the_word(text, words):
    with pytest.raises(ValueError) as error:
        Policy.parse(text)
    assert all(word in str(error.value) for word in words), error.value


def test_numbers_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="every=8.*32 queries.*every=32"):
        Policy(SnapKV(), every=8)
    with pytest.raises(ValueError, match="every=1 drops a single one"):
        replace(METHODS["h2o"], refine=CriticalKV())
    assert Policy.parse("h2o+criticalkv").every is None
    with pytest.raises(ValueError, match="sinks must be 0 or more, not -1"):
        Policy(Full(), sinks=-1)
    with pytest.raises(ValueError, match=r"budget of 8 .* 4 sinks \+ 32 recent tokens = 36"):
        METHODS["streaming"].check_budget(8)
    with pytest.raises(ValueError, match="64 recent"):
        Policy(SnapKV(window=64)).check_budget(60)


def test_equal_scores_keep_the_lower_position():
    assert rank(torch.tensor([[[1.0, 2.0, 2.0, 1.0, 2.0]]])).tolist() == [[[3, 0, 1, 4, 2]]]


def test_streaming_keeps_sinks_and_the_newest():
    seen = layer_seen()
    keep = Policy(StreamingLLM(), sinks=4, recent=8).select(seen, 20)
    assert keep[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, *range(44, 60)]


def snapkv_votes(seen: Seen, window: int, kernel: int, pool: str) -> list[list[float]]:
    """SnapKV's section 4 in plain loops: mean attention of the window, then pooling, per KV head."""
    heads, group, d = seen.q.shape[1], seen.q.shape[2], seen.q.shape[-1]
    n, scores = seen.k.shape[2], []
    for h in range(heads):
        votes = [0.0] * (n - window)
        for g in range(group):
            for i in range(window):
                logits = (seen.k[0, h] @ seen.q[0, h, g, i] / d**0.5)[: n - window + i + 1]
                for x, p in enumerate(logits.softmax(0)[: n - window].tolist()):
                    votes[x] += p / (group * window)
        half = kernel // 2
        near = [votes[max(x - half, 0) : x + half + 1] for x in range(n - window)]
        scores.append([max(v) if pool == "max" else sum(v) / kernel for v in near])
    return scores


@pytest.mark.parametrize("kernel", [1, 5, 7])
@pytest.mark.parametrize("pool", ["max", "avg"])
def test_snapkv_scores_equal_the_papers_formula(kernel, pool):
    seen = layer_seen(window=8)
    got = SnapKV(8, kernel, pool).score(seen)[0, :, :-8]
    torch.testing.assert_close(got, torch.tensor(snapkv_votes(seen, 8, kernel, pool)), rtol=1e-5, atol=1e-6)


def test_snapkv_keeps_a_needle_the_window_looks_at():
    seen = layer_seen(n=200)
    k = seen.k.clone()
    k[:, :, 77] = 4 * seen.q[:, :, 0, 3]
    keep = Policy(SnapKV(8), sinks=4, recent=8).select(replace(seen, k_parts=[k]), 30)
    assert keep[0, :, 77].all()
    assert keep.sum(-1).tolist() == [[30, 30]]


class MinusInfinity(Scorer):
    def score(self, seen: Seen) -> Tensor:
        return torch.full(seen.pos.shape, -torch.inf)


def test_an_empty_slot_never_wins_over_a_real_one():
    seen = layer_seen()
    seen = replace(seen, pos=torch.where(seen.pos % 3 == 0, -1, seen.pos))
    keep = Policy(MinusInfinity(), sinks=0, recent=2).select(seen, 10)
    assert not keep[seen.pos < 0].any()
    assert keep.sum(-1).tolist() == [[10, 10]]


def test_guards_survive_scores_of_any_size():
    class Huge(Scorer):
        def score(self, seen: Seen) -> Tensor:
            return torch.full(seen.pos.shape, torch.inf)

    keep = Policy(Huge(), sinks=4, recent=8).select(layer_seen(), 20)
    assert keep[0, 0].nonzero()[:, 0].tolist() == [*range(12), *range(52, 60)]


@pytest.mark.parametrize("n", [1, 2, 31, 32, 33, 39, 40])
def test_a_prompt_within_the_budget_is_kept_whole(n, toy):
    cache = CompressedKVCache.for_model(toy, "snapkv", budget=40)
    toy(torch.arange(n)[None], None, cache)
    assert cache.kept(0) == [[list(range(n))] * 2]


def test_one_token_beyond_the_budget_drops_exactly_one(toy):
    cache = CompressedKVCache.for_model(toy, "snapkv", budget=40)
    toy(torch.arange(41)[None], None, cache)
    assert [len(head) for head in cache.kept(1)[0]] == [40, 40]
