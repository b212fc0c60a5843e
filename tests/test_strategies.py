"""Prompt-time methods against oracles in plain loops, and the facts that must hold whatever the numbers."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from minikv import Policy
from minikv.axes import HeadSplit, Refiner
from minikv.policy import rank
from minikv.seen import Seen
from minikv.strategies.adakv import AdaKV
from minikv.strategies.andpro import AnDPro
from minikv.strategies.criticalkv import CriticalKV, output_norm
from minikv.strategies.expected_attention import ExpectedAttention
from minikv.strategies.keydiff import KeyDiff
from minikv.strategies.l2norm import L2Norm
from minikv.strategies.pyramidkv import PyramidKV
from minikv.strategies.random_control import Random, Stride
from minikv.strategies.snapkv import SnapKV
from minikv.strategies.streaming import StreamingLLM
from models.rope import Rope
from tests.conftest import TOY

INF, D, WINDOW = math.inf, TOY.head_dim, 8
SCORERS = [
    L2Norm(),
    KeyDiff(),
    Random(),
    Stride(),
    ExpectedAttention(n_future=20, window=WINDOW),
    ExpectedAttention(n_future=1, covariance=False, value_norm=False, window=WINDOW),
    SnapKV(WINDOW),
    AnDPro(WINDOW),
    AnDPro(WINDOW, anchor="evictable", normalise=True),
]


def layer(*lengths: int, heads=2, group=2, sharpness=2.0) -> Seen:
    """One layer after a prompt per row, padded with rubbish; a row depends on its length only."""
    rows, n = [], max(lengths)
    for length in lengths:
        g = torch.Generator().manual_seed(length)
        q = torch.randn(heads, group, length, D, generator=g) * sharpness
        k, v = (torch.randn(heads, length, D, generator=g) for _ in range(2))
        pos = torch.arange(length)
        pad = n - length
        rows.append(
            dict(
                q=q[:, :, -WINDOW:],
                q_pos=pos[-WINDOW:],
                k=F.pad(k, (0, 0, 0, pad), value=7.0),
                v=F.pad(v, (0, 0, 0, pad), value=-7.0),
                new_q=F.pad(q, (0, 0, 0, pad), value=7.0),
                new_pos=F.pad(pos, (0, pad), value=-1),
            )
        )
    all_ = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    k, v = all_.pop("k"), all_.pop("v")
    pos = all_["new_pos"][:, None].expand(-1, heads, -1)
    wo = torch.randn(24, heads, group, D, generator=torch.Generator().manual_seed(0))
    last = torch.tensor(lengths) - 1
    return Seen(k_parts=[k], v_parts=[v], pos=pos, last=last, wo=wo, turn=Rope(TOY).turn, **all_)


def with_holes(seen: Seen) -> Seen:
    """An empty candidate, full of rubbish, before every third one and two at the end."""
    n = seen.pos.shape[2]
    source = torch.tensor([i for x in range(n) for i in ([-1, x] if x % 3 == 0 else [x])] + [-1, -1])
    wide = source.clamp(min=0)
    k, v = (torch.where(source[:, None] < 0, 9.0, x[:, :, wide]) for x in (seen.k, seen.v))
    return replace(
        seen,
        k_parts=[k],
        v_parts=[v],
        pos=torch.where(source < 0, -1, seen.pos[:, :, wide].expand(-1, -1, -1)),
    )


def kept(seen: Seen, policy: Policy, budget: int) -> list[list[list[int]]]:
    keep = policy.select(seen, budget, 0)
    return [[p[m].tolist() for p, m in zip(*row, strict=True)] for row in zip(seen.pos, keep, strict=True)]


def best(scores: list[float], n: int, protected: set[int]) -> list[int]:
    """The protected positions and the best of the others, n in all; the earlier wins a tie."""
    order = sorted(range(len(scores)), key=lambda x: (x not in protected, -scores[x], x))
    return sorted(order[:n])


def agree(got: Tensor, want: list, rtol=1e-5) -> None:
    torch.testing.assert_close(got.double(), torch.tensor(want, dtype=torch.float64), rtol=rtol, atol=1e-6)


def name(strategy: object) -> str:
    return repr(strategy).replace(" ", "")


# Facts that hold for every scorer.


@pytest.mark.parametrize("scorer", SCORERS, ids=name)
@pytest.mark.parametrize("heads", [HeadSplit(), AdaKV(0.2)], ids=name)
def test_rows_and_padding_do_not_change_what_a_row_keeps(scorer, heads):
    """Invariant 19: a batch of prompts is a prompt after the other."""
    policy = Policy(scorer, heads=heads, sinks=4, recent=8)
    batch = kept(layer(60, 45, 60), policy, 30)
    assert batch == [kept(layer(n), policy, 30)[0] for n in (60, 45, 60)]


@pytest.mark.parametrize("scorer", SCORERS, ids=name)
def test_empty_candidates_change_nothing(scorer):
    if isinstance(scorer, SnapKV | AnDPro):
        scorer = replace(scorer, kernel=1)  # pooling looks at neighbours in storage, holes among them
    policy = Policy(scorer, sinks=4, recent=8)
    assert kept(with_holes(layer(60)), policy, 30) == kept(layer(60), policy, 30)


@pytest.mark.parametrize("scorer", SCORERS, ids=name)
@pytest.mark.parametrize("heads", [HeadSplit(), AdaKV(0), AdaKV(0.5)], ids=name)
def test_the_budget_is_met_exactly_and_the_guards_survive(scorer, heads):
    refine = CriticalKV() if scorer.attention_scores else Refiner()
    policy = Policy(scorer, refine, heads, sinks=4, recent=8)
    for row in kept(layer(60, 50), policy, 21):
        assert sum(len(head) for head in row) == 2 * 21
        for head in row:
            last = max(head)
            assert {0, 1, 2, 3, *range(last - 7, last + 1)} <= set(head)


@pytest.mark.parametrize("scorer", SCORERS, ids=name)
def test_grouped_heads_score_the_mean_of_single_heads(scorer):
    """Invariant 18: keys and values repeated for each query head, then averaged."""
    if isinstance(scorer, SnapKV):
        scorer = replace(scorer, kernel=1)  # the maximum of means is not the mean of maxima
    if isinstance(scorer, Random):
        pytest.skip("a control that differs by head on purpose")
    seen = layer(60, group=3)

    def alone(x: Tensor) -> Tensor:
        return x.repeat_interleave(3, dim=1)

    single = replace(
        seen,
        q=seen.q.flatten(1, 2)[:, :, None],
        new_q=seen.new_q.flatten(1, 2)[:, :, None],
        k_parts=[alone(seen.k)],
        v_parts=[alone(seen.v)],
        pos=alone(seen.pos),
    )
    want = scorer.score(single).unflatten(1, (2, 3)).mean(2)
    torch.testing.assert_close(scorer.score(seen), want, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("scorer", SCORERS, ids=name)
def test_half_precision_gives_float32_scores_without_nan(scorer):
    seen = layer(60, 45)
    half = replace(
        seen,
        q=seen.q.half(),
        new_q=seen.new_q.half(),
        k_parts=[seen.k.half() * 100],
        v_parts=[seen.v.half()],
    )
    scores = scorer.score(half)
    assert scores.dtype == torch.float32 and not scores.isnan().any()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Random(-1), "seed.*-1"),
        (lambda: ExpectedAttention(n_future=0), "n_future of 1.*0"),
        (lambda: ExpectedAttention(epsilon=-0.1), "epsilon.*-0.1"),
        (lambda: PyramidKV(beta=0.5), "beta of 1.*0.5"),
        (lambda: PyramidKV(guarded=-1), "guarded.*-1"),
        (lambda: AdaKV(1.5), "floor from 0 to 1.*1.5"),
        (lambda: CriticalKV(alpha=2), "alpha from 0 to 1.*2"),
        (lambda: CriticalKV(epsilon=-1), "epsilon.*-1"),
        (lambda: AnDPro(window=0), "window of 1.*0"),
        (lambda: AnDPro(chunk=0), "chunk of 1.*0"),
        (lambda: AnDPro(kernel=4), "odd.*4"),
        (lambda: AnDPro(anchor="half"), "full.*evictable.*half"),
    ],
)
def test_numbers_that_cannot_be_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Scores from keys alone, and the controls.


def test_l2norm_keeps_the_shortest_keys():
    """arXiv:2406.11430: low norm, high influence."""
    seen = layer(60)
    want = [[-math.sqrt(sum(x * x for x in key)) for key in head] for head in seen.k[0].tolist()]
    agree(L2Norm().score(seen)[0], want)
    guards = {0, 1, 2, 3, *range(50, 60)}
    assert kept(seen, Policy(L2Norm(), recent=10), 25)[0] == [best(scores, 25, guards) for scores in want]


def test_keydiff_keeps_keys_unlike_their_mean_direction():
    """arXiv:2504.15364: minus the cosine to the mean of the normalized keys."""
    seen = layer(60)
    want = []
    for keys in seen.k[0].double().tolist():
        units = [[x / math.hypot(*key) for x in key] for key in keys]
        anchor = [sum(column) / len(units) for column in zip(*units, strict=True)]
        length = math.hypot(*anchor)
        want.append([-sum(a * u for a, u in zip(anchor, unit, strict=True)) / length for unit in units])
    agree(KeyDiff().score(seen)[0], want)
    guards = {0, 1, 2, 3, *range(50, 60)}
    assert kept(seen, Policy(KeyDiff(), recent=10), 25)[0] == [best(scores, 25, guards) for scores in want]


def at(pos: Tensor, heads=2) -> Seen:
    """Candidates of which only the positions matter."""
    pos = pos.expand(1, heads, -1)
    nothing = torch.zeros(1, heads, pos.shape[2], 0)
    return Seen(nothing[:, :, None, :0], pos[:, 0, :0], [nothing], [nothing], pos, pos[:, 0].amax(1))


@pytest.mark.parametrize("scorer", [Random(), Random(3), Stride()], ids=name)
def test_a_control_keeps_the_same_tokens_whether_compressed_once_or_often(scorer):
    policy = Policy(scorer, sinks=0, recent=0)
    once = kept(at(torch.arange(1000)), policy, 50)[0]
    pos = torch.arange(100).expand(2, -1)
    for start in range(100, 1000, 90):
        held = kept(at(pos), policy, 50)[0]
        pos = torch.cat((torch.tensor(held), torch.arange(start, start + 90).expand(2, -1)), 1)
    assert kept(at(pos), policy, 50)[0] == once


def test_random_is_uniform_and_differs_by_seed_head_and_position():
    scores = torch.stack([Random(seed).score(at(torch.arange(20_000), heads=3))[0] for seed in range(3)])
    flat = scores.flatten(0, 1)  # [seeds * heads, n]
    assert 0 <= flat.min() and flat.max() < 1
    counts = torch.stack([row.histc(20, 0, 1) for row in flat])
    # 1000 expected in each of 20 bins: chi-square with 19 degrees of freedom, 1 in 10^5 above 55.
    assert ((counts - 1000) ** 2 / 1000).sum(1).max() < 55
    correlated = torch.corrcoef(torch.cat((flat[:, 1:], flat[:, :-1])))  # also with the next position
    assert (correlated - torch.eye(len(correlated))).abs().max() < 0.05


@pytest.mark.parametrize("budget", [8, 16, 128])
def test_stride_keeps_every_kth_token(budget):
    policy = Policy(Stride(), sinks=0, recent=0)
    assert kept(at(torch.arange(1024)), policy, budget)[0][0] == list(range(0, 1024, 1024 // budget))


@pytest.mark.parametrize("n", [500, 1024, 1500])
@pytest.mark.parametrize("budget", [3, 10, 77, 100, 300])
def test_stride_leaves_gaps_within_a_factor_of_two_at_any_budget(n, budget):
    held = kept(at(torch.arange(n)), Policy(Stride(), sinks=0, recent=0), budget)[0][0]
    gaps = [b - a for a, b in zip(held, held[1:], strict=False)]
    assert len(held) == budget and max(gaps) <= 2 * min(gaps)


# ExpectedAttention.


def rotation(position: int) -> Tensor:
    """Rope's matrix at a position, `[D, D]`: pairs (i, i + D/2) turn by position * theta^(-2i/D)."""
    matrix = torch.zeros(D, D, dtype=torch.float64)
    for i in range(D // 2):
        angle = position * TOY.rope_theta ** (-2 * i / D)
        matrix[i, i] = matrix[i + D // 2, i + D // 2] = math.cos(angle)
        matrix[i, i + D // 2], matrix[i + D // 2, i] = -math.sin(angle), math.sin(angle)
    return matrix


def expected_attention(
    queries: list[list[tuple[Tensor, int]]], keys: Tensor, values: Tensor, last: int, n_future: int
) -> list[float]:
    """arXiv:2510.00636 for one KV head: queries (after rope, position) of each head of the group."""
    sinks, n, shares = 4, len(keys), []
    average = sum(rotation(last + 1 + j) for j in range(n_future)) / n_future
    for head in queries:
        plain = [rotation(p).T @ q.double() for q, p in head if p >= sinks]
        mean = sum(plain) / len(plain)
        spread = sum(torch.outer(q - mean, q - mean) for q in plain) / len(plain)
        mean, spread = average @ mean, average @ spread @ average.T
        z = [float(k @ mean / D**0.5 + k @ spread @ k / (2 * D)) for k in keys.double()[sinks:]]
        total = sum(math.exp(x) for x in z)
        shares.append([math.exp(x) / total for x in z])
    means = [sum(s[x] for s in shares) / len(shares) for x in range(n - sinks)]
    return [INF] * sinks + [m * float(v.norm()) for m, v in zip(means, values[sinks:], strict=True)]


@pytest.mark.parametrize("n_future", [1, 7, 32])
def test_expected_attention_is_the_closed_form_over_the_coming_positions(n_future):
    seen, scorer = layer(40, sharpness=1.0), ExpectedAttention(n_future, window=WINDOW)
    want = [
        expected_attention(
            [[(q, p) for p, q in enumerate(head)] for head in seen.new_q[0, h]],
            seen.k[0, h],
            seen.v[0, h],
            last=39,
            n_future=n_future,
        )
        for h in range(2)
    ]
    agree(scorer.score(seen)[0], want, rtol=1e-4)
    guards = {0, 1, 2, 3, *range(32, 40)}
    got = kept(seen, Policy(scorer, sinks=4, recent=8), 20)[0]
    assert got == [best(scores, 20, guards) for scores in want]


def test_expected_attention_takes_the_remembered_queries_when_no_chunk_has_come():
    seen = layer(40, sharpness=1.0)
    seen = replace(seen, new_q=None, new_pos=None)
    want = [
        expected_attention(
            [list(zip(head, seen.q_pos[0].tolist(), strict=True)) for head in seen.q[0, h]],
            seen.k[0, h],
            seen.v[0, h],
            last=39,
            n_future=5,
        )
        for h in range(2)
    ]
    agree(ExpectedAttention(5, window=WINDOW).score(seen)[0], want, rtol=1e-4)


def test_expected_attention_counts_no_query_twice_when_a_short_chunk_follows():
    """Eight queries are remembered, three of which are the chunk's own."""
    seen = layer(40)
    short = replace(seen, new_q=seen.new_q[:, :, :, -3:], new_pos=seen.new_pos[:, -3:])
    remembered = replace(seen, new_q=None, new_pos=None)
    scorer = ExpectedAttention(5, window=WINDOW)
    torch.testing.assert_close(scorer.score(short), scorer.score(remembered))


def test_expected_attention_survives_a_prompt_of_sinks_alone():
    assert not ExpectedAttention(5, window=WINDOW).score(layer(3)).isnan().any()


# PyramidKV.


@pytest.mark.parametrize("n_layers", [1, 2, 3, 28, 32, 64])
@pytest.mark.parametrize("budget", [37, 64, 128, 500, 2048])
@pytest.mark.parametrize("beta", [1, 1.5, 2, 20, 1000])
def test_a_pyramid_sums_exactly_never_rises_and_leaves_the_guards_their_room(n_layers, budget, beta):
    """Invariant 8."""
    split = PyramidKV(beta).split_layers(budget, n_layers)
    assert sum(split) == budget * n_layers and len(split) == n_layers
    assert all(type(size) is int for size in split)
    assert sorted(split, reverse=True) == split and min(split) >= 36
    if beta == 1:
        assert split == [budget] * n_layers
    # The line through 2N - N / beta and N / beta, rounded.
    free = budget - 36
    for i, size in enumerate(split):
        line = (
            free if n_layers == 1 else 2 * free - free / beta - i * 2 * (free - free / beta) / (n_layers - 1)
        )
        assert abs(size - 36 - line) <= 0.5 + 1e-9


def test_a_pyramid_within_the_guards_is_level():
    assert PyramidKV().split_layers(36, 4) == [36] * 4
    assert PyramidKV().split_layers(20, 4) == [20] * 4
    with pytest.raises(ValueError, match=r"budget of 3\d .* 36"):
        Policy(SnapKV(), layers=PyramidKV(guarded=32)).check_budget(
            min(PyramidKV(guarded=32).split_layers(64, 32))
        )


@pytest.mark.parametrize(
    ("budget", "window", "n_layers", "mean"),
    [
        (128, 32, 32, 142.5),
        (128, 8, 32, 133.5),
        (256, 32, 32, 267.5),
        (1024, 8, 32, 1029),
        (128, 32, 64, 157),
    ],
)
def test_the_authors_floor_keeps_more_than_the_budget(budget, window, n_layers, mean):
    """min = N // beta, max = 2N - min, step = (max - min) // (L - 1), from the top down."""
    split = PyramidKV(20, window, legacy_floor=True).split_layers(budget, n_layers)
    free = budget - window
    least = free // 20
    step = (2 * free - 2 * least) // (n_layers - 1)
    assert split == [window + 2 * free - least - i * step for i in range(n_layers)]
    assert sum(split) / n_layers == mean > budget


# Ada-KV.


def compete(scores: list[list[float]], budget: int, floor: float) -> list[int]:
    """arXiv:2407.11550 with a reserve: each head's best floor * budget first, then all against all."""
    places = min(budget, len(scores[0]))
    counts, rest = [], []
    for h, head in enumerate(scores):
        order = sorted((x for x, s in enumerate(head) if s > -INF), key=lambda x: (-head[x], x))
        sure = max(1, int(floor * budget), sum(s == INF for s in head))
        counts.append(len(order[:sure]))
        rest += [(-head[x], x, h) for x in order[sure:]]
    left = len(scores) * places - sum(counts)
    for _, _, h in sorted(rest)[:left]:
        counts[h] += 1
    return counts


@pytest.mark.parametrize("floor", [0, 0.1, 0.2, 0.5, 1])
@pytest.mark.parametrize("budget", [12, 20, 33])
@pytest.mark.parametrize("ties", [False, True])
def test_adakv_reserves_then_lets_the_heads_compete(floor, budget, ties):
    scores = torch.rand(3, 4, 60, generator=torch.Generator().manual_seed(5))
    scores = scores * torch.tensor([1, 0.5, 0.2, 0.01])[:, None]
    if ties:
        scores = (scores * 4).round()
    scores[..., :4] = scores[..., -8:] = INF
    scores[1, :, 20:30] = -INF
    got = AdaKV(floor).split(scores, budget, 0)
    assert got.dtype == torch.int64
    assert got.sum(1).tolist() == [4 * budget] * 3
    assert got.tolist() == [compete(row, budget, floor) for row in scores.tolist()]
    if floor == 1:
        assert (got == budget).all()


def test_adakv_gives_identical_heads_the_same():
    """Invariant 7, ties across heads included."""
    for scores in (torch.rand(1, 1, 50).expand(2, 4, -1), torch.zeros(2, 4, 50)):
        assert (AdaKV(0).split(scores, 17, 0) == 17).all()


def test_adakv_leaves_no_budget_with_a_head_that_has_no_tokens_for_it():
    scores = torch.full((1, 3, 40), -INF)
    scores[0, 0, 5:10] = torch.arange(5) + 10.0
    scores[0, 1, 20] = 0.0
    scores[0, 2] = torch.arange(40.0)
    assert AdaKV(0.9).split(scores, 15, 0).tolist() == [[5, 1, 39]]


def test_adakv_spends_what_nobody_can_use_on_anyone():
    """Totals stay exact with fewer tokens than budget, or none at all, as in a row at rest."""
    scores = torch.full((2, 2, 10), -INF)
    scores[0, 0, :3] = scores[0, 1, :10] = 1.0
    split = AdaKV().split(scores, 25, 0)
    assert split.sum(1).tolist() == [50, 50]
    assert split[0, 0] >= 3 and split[0, 1] >= 10


def test_adakv_keeps_at_least_the_attention_an_even_split_keeps():
    """Invariant 7: without reserve and pooling, competition maximises the mass the layer retains."""
    seen, scorer = layer(80, heads=4, sharpness=3.0), SnapKV(WINDOW, kernel=1)
    mass = seen.attention(WINDOW).mean((2, 3))
    even, split = (
        (mass * Policy(scorer, heads=heads, sinks=0, recent=8).select(seen, 20, 0)).sum()
        for heads in (HeadSplit(), AdaKV(0))
    )
    assert split > even


# CriticalKV.


def projected(seen: Seen) -> list[list[float]]:
    """|v W_O|_1 by hand, mean over the query heads of a group: KV heads of candidates."""
    v, wo = seen.v[0].double(), seen.wo.double()
    return [
        [
            sum(float((wo[:, h, g] @ v[h, x]).abs().sum()) for g in range(wo.shape[2])) / wo.shape[2]
            for x in range(v.shape[1])
        ]
        for h in range(v.shape[0])
    ]


def test_output_norm_is_the_l1_norm_of_the_projected_value():
    agree(output_norm(layer(30))[0], projected(layer(30)))


def two_stages(
    scores: list[float], norms: list[float], budget: int, protected: set[int], alpha: float, eps: float
) -> list[int]:
    """arXiv:2502.03805, the two-stage selection; guarded tokens stand outside the budget it divides."""
    free = [x for x in range(len(scores)) if x not in protected]
    b = budget - len(protected)
    first = sorted(free, key=lambda x: (-scores[x], x))[: int(alpha * b)]
    rest = [x for x in free if x not in first]
    second = sorted(rest, key=lambda x: (-(scores[x] + eps) * norms[x], x))[: b - len(first)]
    return sorted([*protected, *first, *second])


@pytest.mark.parametrize("alpha", [0, 0.25, 0.5, 1])
@pytest.mark.parametrize("recent", [0, 8, 12])
@pytest.mark.parametrize("heads", [HeadSplit(), AdaKV(0.2)], ids=name)
def test_criticalkv_takes_some_by_attention_and_the_rest_by_its_effect(alpha, recent, heads):
    """With recent=0 the window is guarded for the scorer's sake, and still stands outside the first stage."""
    seen, host = layer(60), Policy(SnapKV(WINDOW), heads=heads, sinks=4, recent=recent)
    scores = host.score.score(seen)
    budgets = heads.split(host.guard(scores, seen, 30), 30, 0)[0].tolist()
    protected = {0, 1, 2, 3, *range(60 - max(recent, WINDOW), 60)}
    got = kept(seen, replace(host, refine=CriticalKV(alpha)), 30)[0]
    assert got == [
        two_stages(scores[0, h].tolist(), projected(seen)[h], budgets[h], protected, alpha, 1e-4)
        for h in range(2)
    ]
    if alpha == 1:
        assert got == kept(seen, host, 30)[0]


@pytest.mark.parametrize("n", [50, 60, 70, 80])
def test_criticalkv_leaves_what_its_host_keeps_by_itself_outside_the_first_stage(n):
    """ExpectedAttention's own sinks, with no guard of the policy's."""
    seen, host = layer(n), Policy(ExpectedAttention(20, value_norm=False), sinks=0, recent=0)
    sizes = torch.randn(n, 1, generator=torch.Generator().manual_seed(n)).mul(3).exp()
    seen = replace(seen, v_parts=[seen.v * sizes])  # so that the second stage's order is quite another
    scores = host.score.score(seen)[0]
    want = [two_stages(scores[h].tolist(), projected(seen)[h], 30, {0, 1, 2, 3}, 0.5, 1e-4) for h in range(2)]
    assert kept(seen, replace(host, refine=CriticalKV(0.5)), 30)[0] == want


@pytest.mark.parametrize("alpha", [0, 0.25, 0.7])
def test_criticalkv_is_its_host_where_all_values_weigh_the_same(alpha):
    """Invariant 6: values that differ by sign only are projected to the same length."""
    seen, host = layer(60), Policy(SnapKV(WINDOW), sinks=4, recent=8)
    signs = torch.randint(0, 2, (1, 2, 60, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    seen = replace(seen, v_parts=[signs * seen.v[:, :, :1]])
    assert kept(seen, replace(host, refine=CriticalKV(alpha)), 30) == kept(seen, host, 30)


@pytest.mark.parametrize("scorer", [L2Norm(), StreamingLLM(), ExpectedAttention(), AnDPro()], ids=name)
def test_criticalkv_refuses_scores_that_are_not_attention(scorer):
    with pytest.raises(ValueError, match="attention"):
        Policy(scorer, CriticalKV())


def test_criticalkv_changes_what_is_kept_and_never_how_much():
    seen, host = layer(60), Policy(SnapKV(WINDOW), heads=AdaKV(), sinks=4, recent=8)
    ours, plain = kept(seen, replace(host, refine=CriticalKV()), 30)[0], kept(seen, host, 30)[0]
    assert ours != plain
    assert [len(head) for head in ours] == [len(head) for head in plain]


@pytest.mark.parametrize("alpha", [0, 0.25, 1])
@pytest.mark.parametrize("n", [50, 60, 70, 80])
def test_the_output_moves_by_no_more_than_the_bound(alpha, n):
    """Invariant 6: L <= theta = sum A p - (2 - 1 / s) sum_kept A p, for the last query of each head."""
    seen = layer(n, group=1)
    attention = seen.attention(1)[:, :, 0].sum(2)  # [1, H, n]: other rows of the window are zero
    policy = Policy(SnapKV(WINDOW), refine=CriticalKV(alpha), sinks=4, recent=8)
    keep = policy.select(seen, 30, 0)
    p, held = output_norm(seen), (attention * keep).sum(-1)
    after = attention * keep / held[..., None]
    change = torch.stack([((attention - after)[:, h] @ seen.v[:, h]) @ seen.wo[:, h, 0].T for h in range(2)])
    moved = change.abs().sum(-1).squeeze()
    theta = (attention * p).sum(-1) - (2 - 1 / held) * (attention * keep * p).sum(-1)
    assert (moved > 0).all() and (moved <= theta[0] * (1 + 1e-5)).all()


# AnDPro.


def anchor_projections(
    seen: Seen, kernel: int, anchor: str, chunk: int, normalise=False
) -> list[list[float]]:
    """NeurIPS 2025, Tdl89SZItB, for one row: score of each token's chunk, infinite for sinks and window."""
    heads, group, n, half = seen.q.shape[1], seen.q.shape[2], seen.k.shape[2], kernel // 2
    out = []
    for h in range(heads):
        v, tokens = seen.v[0, h].double(), [0.0] * n
        for g in range(group):
            mine, size = [0.0] * n, 0.0
            for i in range(WINDOW):
                logits = seen.k[0, h].double() @ seen.q[0, h, g, i].double() / D**0.5
                a = logits[: n - WINDOW + i + 1].softmax(0).tolist() + [0.0] * (WINDOW - i - 1)
                pooled = [max(a[max(x - half, 0) : x + half + 1]) for x in range(n)]
                inside = range(n) if anchor == "full" else range(4, n - WINDOW)
                y = sum((a if anchor == "full" else pooled)[x] * v[x] for x in inside)
                size += float(y @ y)
                for x in range(n):
                    mine[x] += pooled[x] * float(v[x] @ y)
            for x in range(n):
                tokens[x] += mine[x] / group / (size if normalise else 1)
        scores = [INF] * n
        for start in range(4, n - WINDOW, chunk):
            members = range(start, min(start + chunk, n - WINDOW))
            for x in members:
                scores[x] = sum(tokens[m] for m in members)
        out.append(scores)
    return out


@pytest.mark.parametrize("kernel", [1, 7])
@pytest.mark.parametrize("anchor", ["full", "evictable"])
@pytest.mark.parametrize("chunk", [1, 2, 4])
@pytest.mark.parametrize("normalise", [False, True])
def test_andpro_projects_on_the_output_chunk_by_chunk(kernel, anchor, chunk, normalise):
    """51 tokens leave a last chunk of three; chunk=1 is the score of single tokens (invariant 9)."""
    seen, scorer = layer(51), AnDPro(WINDOW, chunk, kernel, anchor, normalise)
    want = anchor_projections(seen, kernel, anchor, chunk, normalise)
    assert chunk > 1 or min(min(head) for head in want) < 0  # a share may be negative
    agree(scorer.score(seen)[0], want, rtol=1e-4)
    policy = Policy(scorer, heads=AdaKV(0), sinks=4, recent=8)
    protected = {0, 1, 2, 3, *range(43, 51)}
    counts = compete(want, 24, 0)
    assert kept(seen, policy, 24)[0] == [best(want[h], counts[h], protected) for h in range(2)]


@pytest.mark.parametrize("group", [1, 3])
def test_andpro_scores_are_shares_of_the_output(group):
    """Invariant 9: without pooling, and nothing held back, they sum to the anchors' squared lengths."""
    seen = layer(50, group=group)
    scorer = AnDPro(WINDOW, chunk=1, kernel=1, sinks=0)
    every = torch.ones_like(seen.pos, dtype=torch.bool)
    y = seen.attention(WINDOW) @ seen.v[:, :, None]
    want = y.square().sum((3, 4)).mean(2)  # [1, H]
    torch.testing.assert_close(scorer.token_scores(seen, every).sum(-1), want)
    shares = replace(scorer, normalise=True).token_scores(seen, every).sum(-1)
    torch.testing.assert_close(shares, torch.ones_like(shares))


def test_andpro_ranks_by_attention_where_all_values_are_equal():
    """Invariant 9."""
    seen = layer(50, group=1)
    seen = replace(seen, v_parts=[torch.ones_like(seen.v)])
    scores = AnDPro(WINDOW, chunk=1, kernel=1).score(seen)[..., 4:-WINDOW]
    votes = seen.attention(WINDOW).sum((2, 3))[..., 4:-WINDOW]
    assert torch.equal(rank(scores), rank(votes))


def test_andpro_chunks_win_or_lose_together_and_keep_together_later():
    """Survivors of one compression, whole chunks, are chunked alike in the next, holes or not."""
    seen, scorer = layer(60), AnDPro(WINDOW)  # 48 evictable tokens in 12 chunks
    policy = Policy(scorer, sinks=4, recent=8)
    first = kept(seen, policy, 12 + 5 * 4)[0]
    for head in first:
        assert [len([x for x in head if start <= x < start + 4]) in (0, 4) for start in range(4, 52, 4)]
    keep = policy.select(seen, 12 + 5 * 4, 0)
    later = replace(seen, pos=torch.where(keep, seen.pos, -1))
    for before, after in zip(first, kept(later, policy, 12 + 3 * 4)[0], strict=True):
        middle = [x for x in before if 4 <= x < 52]
        chunks = [middle[i : i + 4] for i in range(0, 20, 4)]
        assert all(set(chunk) <= set(after) or not set(chunk) & set(after) for chunk in chunks)
        assert len(after) == 24
