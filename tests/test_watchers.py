"""Methods that look at every step, each against plain loops over the formula of its paper.

`Run` is a small cache of its own: it feeds a scorer chunks and single tokens with random attention, drops
one token at a time, and shows what happened to an oracle that shares no code with the scorer.
"""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kernels.hashes import gaussian
from minikv import CompressedKVCache
from minikv.axes import Scorer
from minikv.policy import Policy
from minikv.seen import Seen
from minikv.strategies import fastgen
from minikv.strategies.fastgen import FastGen
from minikv.strategies.h2o import H2O
from minikv.strategies.hashevict import HashEvict
from minikv.strategies.scissorhands import Scissorhands, ones
from minikv.strategies.tova import TOVA
from models.transformer import causal_attention
from tests.conftest import make_toy

B, H, G, D = 2, 2, 2, 8


def attention(seen: Seen, q: Tensor, q_pos: Tensor, b: int, h: int) -> list[tuple[int, list[float]]]:
    """(position, attention over the candidates, mean over the group) per query that exists, in plain loops."""
    found = []
    for t, at in enumerate(q_pos[b].tolist()):
        if at < 0:
            continue
        rows = []
        for g in range(q.shape[2]):
            weights = []
            products = (seen.k[b, h].double() @ q[b, h, g, t].double()).tolist()
            for pos, product in zip(seen.pos[b, h].tolist(), products, strict=True):
                hidden = pos < 0 or pos > at or (seen.sliding is not None and pos <= at - seen.sliding)
                weights.append(0.0 if hidden else math.exp(product / math.sqrt(q.shape[-1])))
            rows.append([w / sum(weights) for w in weights])
        found.append((at, [sum(column) / len(rows) for column in zip(*rows, strict=True)]))
    return found


class Run:
    """`B` rows of `H` heads with `budget` slots; `watched` and `absorbed` tell an oracle what was seen."""

    def __init__(self, scorer: Scorer, budget: int, seed: int = 0, sliding: int | None = None):
        self.scorer, self.budget, self.sliding = scorer, budget, sliding
        self.g = torch.Generator().manual_seed(seed)
        self.pos = torch.empty(B, H, 0, dtype=torch.int64)
        self.k = torch.empty(B, H, 0, D)
        self.state = scorer.enter(self.k, torch.empty(B, 0, dtype=torch.int64))
        self.last = torch.full((B,), -1)

    def seen(self, **new: Tensor) -> Seen:
        none = torch.empty(B, H, G, 0, D), torch.empty(B, 0, dtype=torch.int64)
        return Seen(
            *none, [self.k], [self.k], self.pos, self.last, self.sliding, state=self.state, **new
        )  # fmt: skip

    def arrive(self, pos: Tensor) -> None:
        """New tokens at `pos [B, T]` join, with random keys."""
        k = torch.randn(B, H, pos.shape[1], D, generator=self.g)
        new = self.scorer.enter(k, torch.zeros_like(pos))
        self.k = torch.cat((self.k, k), 2)
        self.pos = torch.cat((self.pos, pos[:, None].expand(-1, H, -1)), 2)
        self.state = {name: torch.cat((self.state[name], new[name]), 2) for name in new}
        self.last = torch.maximum(self.last, pos.amax(1))

    def chunk(self, pos: Tensor) -> Seen:
        self.arrive(pos)
        seen = self.seen(new_q=2 * torch.randn(B, H, G, pos.shape[1], D, generator=self.g), new_pos=pos)
        self.state = self.scorer.absorb(seen)
        return seen

    def step(self, resting: tuple[int, ...] = ()) -> Tensor:
        """One token, except in the resting rows; gives the attention `[B, H, n]` it showed to the scorer."""
        now = self.last[:, None] + 1
        for b in resting:
            now[b] = -1
        self.arrive(now)
        logits = 2 * torch.randn(self.pos.shape, generator=self.g)
        p = logits.masked_fill(self.pos < 0, -torch.inf).softmax(-1)
        for b in resting:
            p[b] = 0
        share = 1 / (self.pos >= 0).sum(-1, keepdim=True)
        self.scorer.watch(self.state, p, share, now[:, :, None])
        return p

    def drop(self, index: Tensor) -> None:
        """Forget the candidates at `index [B, H, 1]`; the others close up."""
        keep = torch.ones(self.pos.shape, dtype=torch.bool).scatter(2, index, False)

        def left(x: Tensor) -> Tensor:
            return x[keep].view(B, H, -1, *x.shape[3:])

        self.pos, self.k = left(self.pos), left(self.k)
        self.state = {name: left(x) for name, x in self.state.items()}


def by_position(run: Run, x: Tensor) -> list[dict[int, float]]:
    """Values of `x [B, H, n]` under their positions, for each row and head in turn."""
    pairs = zip(run.pos.flatten(0, 1).tolist(), x.flatten(0, 1).tolist(), strict=True)
    return [{p: v for p, v in zip(pos, values, strict=True) if p >= 0} for pos, values in pairs]


def check(run: Run, oracle: list[dict[int, float]], tolerance: float) -> None:
    for got, want in zip(by_position(run, run.scorer.score(run.seen())), oracle, strict=True):
        assert got == pytest.approx(want, abs=tolerance, rel=tolerance)


def drop_lowest(run: Run, oracle: list[dict], recent: int) -> None:
    """Above the budget the lowest of the oracle's scores goes, the later one among equals, never a recent one."""
    index = []
    for pos, scores in zip(run.pos.flatten(0, 1).tolist(), oracle, strict=True):
        old = [p for p in pos if 0 <= p <= max(pos) - recent]
        empty = pos.index(-1) if -1 in pos else None
        victim = min(old, key=lambda p: (scores[p], -p)) if empty is None else -1
        index.append(pos.index(victim))
    if run.pos.shape[2] > run.budget:
        run.drop(torch.tensor(index).view(B, H, 1))


def prompt(n: int, padding: int = 0) -> Tensor:
    """Positions `[B, n]`; the last row is `padding` tokens shorter."""
    pos = torch.arange(n).repeat(B, 1)
    pos[-1, n - padding :] = -1
    return pos


# H2O.


def test_h2o_is_the_column_sum_of_the_attention_over_200_steps_and_a_turn():
    """Algorithm 1: o[x] = sum_t A[t, x] over all queries since x came, along the history that survived."""
    run, sums = Run(H2O(), budget=24), [{} for _ in range(B * H)]

    def absorb(pos: Tensor) -> None:
        seen = run.chunk(pos)
        for i, own in enumerate(sums):
            for _, row in attention(seen, seen.new_q, pos, *divmod(i, H)):
                for x, p in zip(seen.pos.flatten(0, 1)[i].tolist(), row, strict=True):
                    own[x] = own.get(x, 0.0) + p
            own.pop(-1, None)

    absorb(prompt(20, padding=3))
    # Each query gives away exactly 1.
    assert [sum(own.values()) for own in sums] == pytest.approx([20, 20, 17, 17])
    for t in range(220):
        if t == 100:
            absorb(run.last[:, None] + 1 + torch.arange(5))
            check(run, by_oracle(run, sums), 1e-5)
            while run.pos.shape[2] > run.budget:
                drop_lowest(run, sums, recent=12)
        p = run.step(resting=(1,) if t % 3 == 0 else ())
        for own, seen in zip(sums, by_position(run, p), strict=True):
            for x, value in seen.items():
                own[x] = own.get(x, 0.0) + value
        check(run, by_oracle(run, sums), 1e-5)
        drop_lowest(run, sums, recent=12)
    assert int(run.last[0]) == 20 + 5 + 220 - 1
    assert run.pos.shape[2] == run.budget


def by_oracle(run: Run, oracle: list[dict]) -> list[dict]:
    """The oracle's values of the tokens that are still there."""
    held = [{p for p in pos if p >= 0} for pos in run.pos.flatten(0, 1).tolist()]
    return [{p: own[p] for p in pos} for pos, own in zip(held, oracle, strict=True)]


def test_h2o_normalised_divides_by_the_queries_that_could_see_the_token():
    """kvpress's ObservedAttention: column sum / (T - x)."""
    run = Run(H2O(normalise=True), budget=30)
    seen = run.chunk(prompt(30))
    for i, scores in enumerate(by_position(run, run.scorer.score(run.seen()))):
        rows = attention(seen, seen.new_q, seen.new_pos, *divmod(i, H))
        assert scores == pytest.approx(
            {x: sum(r[x] for _, r in rows) / (30 - x) for x in range(30)}, rel=1e-4
        )


# Scissorhands.


@pytest.mark.parametrize("history", [1, 7, 40, 400])
def test_scissorhands_counts_the_votes_of_the_last_steps_exactly(history):
    """Section 4: score = sum of the last W votes [A >= 1/n] / min(votes cast, W), well past a full ring."""
    run, votes = Run(Scissorhands(history), budget=16), [{} for _ in range(B * H)]

    def absorb(pos: Tensor) -> None:
        """One vote per token and chunk: mean attention of the queries that could see it, against 1/n."""
        seen = run.chunk(pos)
        for i, own in enumerate(votes):
            rows = attention(seen, seen.new_q, pos, *divmod(i, H))
            held = seen.pos.flatten(0, 1)[i].tolist()
            for x, p in enumerate(held):
                got = [row[x] for at, row in rows if at >= p]
                if p >= 0:
                    own.setdefault(p, []).append(sum(got) / len(got) >= 1 / sum(h >= 0 for h in held))

    def scores() -> list[dict]:
        own = by_oracle(run, votes)
        return [{p: sum(v[-history:]) / min(len(v), history) for p, v in head.items()} for head in own]

    absorb(prompt(14, padding=2))
    check(run, scores(), 1e-6)
    for t in range(450 if history == 400 else 230):
        if t == 90:
            absorb(run.last[:, None] + 1 + torch.arange(40))
            check(run, scores(), 1e-6)
            while run.pos.shape[2] > run.budget:
                drop_lowest(run, scores(), recent=4)
        p = run.step(resting=(0,) if t % 5 == 0 else ())
        for own, seen in zip(votes, by_position(run, p), strict=True):
            if sum(seen.values()) > 0:
                for x, value in seen.items():
                    own.setdefault(x, []).append(value >= 1 / len(seen))
        if t % 10 == 0:
            check(run, scores(), 1e-6)
        drop_lowest(run, scores(), recent=4)
    assert max(len(v) for head in by_oracle(run, votes) for v in head.values()) > min(history, 100)


def test_scissorhands_remembers_400_steps_in_13_words_and_a_count():
    assert Scissorhands().state(64) == {"votes": ((13,), torch.int32), "cast": ((), torch.int32)}


def test_scissorhands_in_a_sliding_window_asks_only_the_queries_that_could_see_the_token():
    run = Run(Scissorhands(8), budget=40, sliding=6)
    seen = run.chunk(prompt(30))
    for i, scores in enumerate(by_position(run, run.scorer.score(run.seen()))):
        rows = attention(seen, seen.new_q, seen.new_pos, *divmod(i, H))
        for x, score in scores.items():
            got = [row[x] for at, row in rows if x <= at < x + 6]
            assert score == (sum(got) / len(got) >= 1 / 30)


def test_words_have_as_many_ones_as_python_counts():
    drawn = torch.randint(-(2**31), 2**31, (1000,), generator=torch.Generator().manual_seed(0))
    words = [
        0,
        -1,
        -(2**31),
        *(byte << shift for shift in (0, 8, 16) for byte in range(256)),
        *drawn.tolist(),
    ]
    assert ones(torch.tensor(words, dtype=torch.int32)).tolist() == [(x % 2**32).bit_count() for x in words]


# TOVA.


def last_query(n=40, window=5, seed=0) -> Seen:
    g = torch.Generator().manual_seed(seed)
    k = torch.randn(B, H, n, D, generator=g)
    q = torch.randn(B, H, G, window, D, generator=g) * 2
    pos = torch.arange(n).expand(B, H, n)
    return Seen(q, pos[:, 0, n - window :], [k], [k], pos, torch.full((B,), n - 1))


def test_tova_is_the_last_querys_attention_over_all_heads_and_drops_the_same_token_in_each():
    """Section 3: s[x] = (1 / H_q) sum_h A[h, last, x]; one token goes, the newest may be it."""
    for seed in range(20):
        seen = last_query(seed=seed)
        for b in range(B):
            rows = [attention(seen, seen.q, seen.q_pos, b, h)[-1] for h in range(H)]
            assert [at for at, _ in rows] == [39] * H
            want = [sum(column) / H for column in zip(*(row for _, row in rows), strict=True)]
            for h in range(H):
                assert TOVA().score(seen)[b, h].tolist() == pytest.approx(want, rel=1e-4, abs=1e-7)
            keep = Policy(TOVA(), every=1, sinks=0, recent=0).select(seen, 39, 0)[b]
            lost = [x for x in range(40) if not keep[0, x]]
            assert lost == [min(range(40), key=lambda x: (want[x], -x))]
            assert torch.equal(keep[0], keep[1])


# HashEvict.


def packed(x: Tensor, scorer: HashEvict) -> list[list[bool]]:
    """Section 3's bits [x R >= 0] of each vector, in double precision."""
    r = gaussian(D, scorer.bits, scorer.seed, x.device).double()
    return [[float(v.double() @ r[:, i]) >= 0 for i in range(scorer.bits)] for v in x.reshape(-1, D)]


def with_codes(seen: Seen, scorer: HashEvict) -> Seen:
    return replace(seen, state=scorer.enter(seen.k, torch.zeros(B, seen.k.shape[2], dtype=torch.int64)))


@pytest.mark.parametrize("bits", [1, 8, 16, 17, 32, 64])
@pytest.mark.parametrize("probe", ["query", "key"])
def test_hashevict_counts_the_bits_in_which_codes_differ(bits, probe):
    """Score = -Hamming(code(probe), code(k)), of the group's queries summed, or of the newest key."""
    scorer = HashEvict(bits, probe, seed=3)
    seen = with_codes(last_query(), scorer)
    # Slots in any order, as in a step.
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    seen = replace(seen, k_parts=[seen.k[:, :, order]], pos=seen.pos[:, :, order])
    seen = replace(seen, state={"code": seen.state["code"][:, :, order]})
    for b, h in ((0, 0), (1, 1)):
        keys = packed(seen.k[b, h], scorer)
        newest = order.tolist().index(39)
        probes = packed(seen.q[b, h, :, -1], scorer) if probe == "query" else [keys[newest]]
        want = [-sum(x != y for code in probes for x, y in zip(code, key, strict=True)) for key in keys]
        assert scorer.score(seen)[b, h].tolist() == want


def test_hashevict_stores_16_bits_in_two_bytes():
    assert HashEvict().state(D) == {"code": ((), torch.int16)}


def test_an_equal_key_is_at_distance_0_and_an_opposite_one_at_all_bits():
    seen = last_query()
    newest = seen.k[:, :, -1:]
    k = torch.cat((newest * 7, -newest, seen.k[:, :, 2:]), 2)
    scorer = HashEvict(probe="key")
    scores = scorer.score(with_codes(replace(seen, k_parts=[k]), scorer))
    assert (scores[..., 0] == 0).all()
    assert (scores[..., 1] == -16).all()
    assert (scores[..., -1] == 0).all()


@pytest.mark.parametrize("angle", [0.3, 1.0, 1.57, 2.5])
def test_bits_differ_as_often_as_the_angle_says(angle):
    """SimHash: P(a bit differs) = angle / pi, over many matrices."""
    a = torch.zeros(64)
    a[5] = 3.0
    b = torch.zeros(64)
    b[5], b[40] = math.cos(angle), math.sin(angle)
    codes = [HashEvict(seed=seed).code(torch.stack((a, b))).tolist() for seed in range(600)]
    differing = sum(bin(x ^ y).count("1") for x, y in codes)
    # 9,600 coin tosses: four standard deviations are at most 0.02.
    assert differing / (600 * 16) == pytest.approx(angle / math.pi, abs=0.021)


def test_the_matrix_is_standard_normal_fixed_by_its_seed_and_different_for_another():
    r = gaussian(512, 64, 7, torch.device("cpu"))
    assert r.mean() == pytest.approx(0, abs=0.02)
    assert r.var() == pytest.approx(1, abs=0.03)
    assert (r**4).mean() == pytest.approx(3, abs=0.2)
    assert (r < -1).float().mean() == pytest.approx(0.1587, abs=0.01)
    assert float((r[:, :1].T @ r[:, 1:]).abs().max()) < 5 * math.sqrt(512)
    assert torch.equal(r, gaussian(512, 64, 7, torch.device("cpu")))
    assert float((r * gaussian(512, 64, 8, torch.device("cpu"))).mean()) == pytest.approx(0, abs=0.03)


def test_the_same_seed_chooses_the_same_tokens_and_the_newest_is_never_among_them():
    seen = last_query(n=60)
    masks = []
    for seed in (0, 0, 1):
        scorer = HashEvict(seed=seed)
        policy = Policy(scorer, every=1, sinks=4, recent=10)
        masks.append(policy.select(with_codes(seen, scorer), 30, 0))
        assert masks[-1][:, :, 50:].all()
        assert masks[-1][:, :, :4].all()
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_only_the_query_probe_needs_queries_and_both_drop_ahead_of_attention():
    assert [HashEvict(probe=p).n_queries for p in ("query", "key")] == [1, 0]
    assert [HashEvict(prompt=p).one_by_one for p in ("token", "batched")] == [True, False]
    assert HashEvict().before


# FastGen.

KINDS = {7: 1, 20: 1, 33: 1, 9: 2, 21: 2, 40: 2, 55: 2}  # position -> special or punctuation


def profiled(n=60, seed=0, **changes) -> tuple[FastGen, Seen]:
    """A prompt whose ids are its positions + 100, and its statistics once it has attended."""
    g = torch.Generator().manual_seed(seed)
    scorer = FastGen(
        special=tuple(100 + p for p, kind in KINDS.items() if kind == 1),
        punctuation=tuple(100 + p for p, kind in KINDS.items() if kind == 2),
        **changes,
    )
    k = torch.randn(B, H, n, D, generator=g)
    pos = torch.arange(n).repeat(B, H, 1)
    pos[1, :, n - 4 :] = -1
    new_pos = pos[:, 0]
    q = 2 * torch.randn(B, H, G, n, D, generator=g)
    # One head looks at the first token, so that heads differ.
    q[:, 1] += 8 * k[:, 1, :1, None].transpose(1, 2) if seed % 2 else 0
    seen = Seen(q[:, :, :, :0], new_pos[:, :0], [k], [k], pos, new_pos.amax(1), new_q=q, new_pos=new_pos)
    seen = replace(seen, state=scorer.enter(k, torch.arange(n).repeat(B, 1) + 100))
    return scorer, replace(seen, state=scorer.absorb(seen))


def fastgen_rules(scorer: FastGen, rows: list[tuple[int, list[float]]]) -> list[tuple[float, set[int]]]:
    """Algorithm 1 by rows of the attention matrix: what each rule recovers, and what it keeps."""
    n = len(rows)
    got = [sum(row[x] for _, row in rows) / (n - x) for x in range(n)]
    special = {x for x in range(n) if x < 4 or KINDS.get(x) == 1}
    marks = special | {x for x in range(n) if KINDS.get(x) == 2}
    others = sorted(set(range(n)) - marks, key=lambda x: (-got[x], x))
    heavy = marks | set(others[: math.ceil(scorer.heavy * n)])
    width = scorer.local * n
    rules = [lambda t, x, s=s: x in s for s in (special, marks, heavy)]
    rules += [lambda t, x: x in heavy or t - x < width, lambda t, x: True]
    shares = [sum(row[x] for t, row in rows for x in range(n) if rule(t, x)) / n for rule in rules]
    return [(s, {x for x in range(n) if rule(n - 1, x)}) for s, rule in zip(shares, rules, strict=True)]


def test_fastgen_takes_the_first_rule_that_recovers_enough():
    taken = set()
    for seed in range(2):
        scorer, seen = profiled(seed=seed, heavy=0.25, local=0.35)
        for b, h in ((0, 0), (0, 1), (1, 0)):
            rules = fastgen_rules(scorer, attention(seen, seen.new_q, seen.new_pos, b, h))
            for recovery in (0.05, 0.25, 0.35, 0.5, 0.65, 0.75, 0.9, 0.99):
                rule = next(i for i, (share, _) in enumerate(rules) if share >= recovery)
                kept = replace(scorer, recovery=recovery).score(seen)[b, h] >= 0
                assert set(kept.nonzero()[:, 0].tolist()) == rules[rule][1], (seed, recovery, rule)
                taken.add(rule)
    assert taken == {0, 1, 2, 3, 4}


def test_fastgen_profiles_a_long_prompt_in_blocks(monkeypatch):
    scorer, seen = profiled(n=70)
    width = torch.full((B, 1, 1), 9.0)
    whole = fastgen.profile(seen, width)
    monkeypatch.setattr(fastgen, "QUERY_BLOCK", 16)
    for one, many in zip(whole, fastgen.profile(seen, width), strict=True):
        torch.testing.assert_close(one, many)
    torch.testing.assert_close(whole[0], seen.received())
    rows = attention(seen, seen.new_q, seen.new_pos, 0, 1)
    near = [sum(row[x] for t, row in rows if t - x < 9) for x in range(70)]
    assert whole[1][0, 1].tolist() == pytest.approx(near, rel=1e-4, abs=1e-6)


def test_fastgen_between_prompts_judges_by_what_the_survivors_have_gathered():
    """recovered = attention gathered by the rule's tokens / by all that are left."""
    taken = set()
    for recovery in (0.05, 0.3, 0.6, 0.7, 0.97):
        scorer, seen = profiled(recovery=recovery, heavy=0.2, local=0.2)
        left = (seen.pos % 5 != 2) & (seen.pos >= 0)
        seen = replace(seen, new_q=None, new_pos=None, pos=torch.where(left, seen.pos, -1))
        kept, received = scorer.score(seen) >= 0, seen.state["received"][0, 0].tolist()
        held = [x for x in range(60) if left[0, 0, x]]
        special = {x for x in held if x < 4 or KINDS.get(x) == 1}
        marks = special | {x for x in held if KINDS.get(x) == 2}
        others = sorted(set(held) - marks, key=lambda x: (-received[x] / (60 - x), x))
        heavy = marks | set(others[:12])
        rules = [special, marks, heavy, heavy | {x for x in held if 59 - x < 12}, set(held)]
        total = sum(received[x] for x in held)
        enough = [i for i, rule in enumerate(rules) if sum(received[x] for x in rule) / total >= recovery]
        assert set(kept[0, 0].nonzero()[:, 0].tolist()) == rules[enough[0]]
        taken.add(enough[0])
    assert len(taken) >= 4


@pytest.mark.parametrize("budget", [1, 5, 12, 20, 40])
def test_fastgen_gives_what_is_asked_or_the_highest_common_level(budget):
    g = torch.Generator().manual_seed(budget)
    asked = torch.randint(1, 40, (8, 4), generator=g)
    scores = torch.where(torch.arange(50) < asked[..., None], 0.5, -1.0)
    given = FastGen().split(scores, budget, 0)
    for want, got in zip(asked.tolist(), given.tolist(), strict=True):
        room = 4 * budget
        level = max(v for v in range(room + 1) if sum(min(w, v) for w in want) <= room)
        assert sum(got) == min(room, sum(want))
        for w, n in zip(want, got, strict=True):
            assert n in (min(w, level), min(w, level + 1))


def test_fastgen_cuts_a_head_back_to_what_got_most_attention():
    scorer, seen = profiled(recovery=1.0)
    policy = Policy(scorer, heads=scorer, sinks=4, recent=0)
    keep = policy.select(seen, 20, 0)
    assert keep.sum(-1).tolist() == [[20, 20], [20, 20]]
    rows = attention(seen, seen.new_q, seen.new_pos, 0, 0)
    got = [sum(row[x] for _, row in rows) / (60 - x) for x in range(60)]
    want = {0, 1, 2, 3, *sorted(range(4, 60), key=lambda x: -got[x])[:16]}
    assert set(keep[0, 0].nonzero()[:, 0].tolist()) == want


def test_fastgen_keeps_no_more_than_its_rule_where_there_is_room():
    scorer, seen = profiled(recovery=0.0)
    keep = Policy(scorer, heads=scorer, sinks=4, recent=0).select(seen, 50, 0)
    assert keep[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, 7, 20, 33]


# All of them.

WATCHERS = [H2O(), H2O(normalise=True), Scissorhands(12), TOVA(), HashEvict(), HashEvict(probe="key")]


@pytest.mark.parametrize("scorer", [*WATCHERS, FastGen(special=(1, 2))], ids=str)
def test_what_runs_in_every_step_is_one_graph(scorer):
    """Entering, watching and scoring hold no branch on a value and no tensor of the host."""

    def step(k: Tensor, tokens: Tensor, p: Tensor, seen: Seen) -> Tensor:
        state = {**seen.state, **scorer.enter(k, tokens)}
        scorer.watch(state, p, torch.tensor(0.1), torch.full((B, 1, 1), 5))
        return scorer.score(replace(seen, state=state))

    torch.compiler.reset()
    seen = last_query(n=10, window=1)
    p = torch.rand(B, H, 10, generator=torch.Generator().manual_seed(0))
    arguments = (seen.k, torch.arange(20).view(B, 10), p, seen)
    traced = torch.compile(step, fullgraph=True, backend="eager")(*arguments)
    torch.testing.assert_close(traced, step(*arguments), equal_nan=True)
    assert traced.dtype == torch.float32


@pytest.mark.parametrize("scorer", [*WATCHERS, FastGen()], ids=str)
def test_rows_of_a_batch_do_not_touch_each_other(scorer):
    seen = last_query(n=20, window=1)
    seen = replace(seen, new_q=seen.q, new_pos=seen.q_pos)
    tokens = torch.zeros(B, 20, dtype=torch.int64)
    seen = replace(seen, state=scorer.enter(seen.k, tokens))
    seen = replace(seen, state=scorer.absorb(seen))
    other = replace(seen, k_parts=[torch.cat((seen.k[:1], seen.k[1:].flip(2)))])
    other = replace(other, state=scorer.enter(other.k, tokens))
    other = replace(other, state=scorer.absorb(other))
    torch.testing.assert_close(scorer.score(seen)[0], scorer.score(other)[0])
    assert not torch.equal(scorer.score(seen)[1], scorer.score(other)[1])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Scissorhands(0), "history of at least 1 step, not 0"),
        (lambda: HashEvict(bits=65), "1 to 64 bits, not 65"),
        (lambda: HashEvict(probe="value"), "not 'value'"),
        (lambda: HashEvict(prompt="whole"), "not 'whole'"),
        (lambda: FastGen(recovery=1.5), "recovery is a share from 0 to 1, not 1.5"),
        (lambda: FastGen(heavy=-0.1), "heavy is a share from 0 to 1, not -0.1"),
        (lambda: FastGen(first=-1), "0 or more first tokens, not -1"),
        (lambda: FastGen(special=7), r"special takes ids as in \(1, 2\) or \(1,\), not 7"),
    ],
)
def test_hyper_parameters_that_cannot_be_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


# Through the whole cache.


class Truth:
    """A cache in plain loops that attends, judges and drops by itself, for one row of tokens.

    `feeds[layer][head]` holds, for every chunk or single token so far, the attention of its queries as
    `{position: share}`; `judge` turns a layer's feeds into scores `{position: score}` per head.
    """

    def __init__(self, model, budget: int, judge, sinks: int, recent: int):
        n_layers, heads = model.config.n_layers, model.config.n_kv_heads
        self.budget, self.judge, self.sinks, self.recent = budget, judge, sinks, recent
        self.seen = 0
        self.k, self.v = ([[{} for _ in range(heads)] for _ in range(n_layers)] for _ in "kv")
        self.feeds = [[[] for _ in range(heads)] for _ in range(n_layers)]

    def begin(self, tokens: Tensor, pos: Tensor | None) -> Tensor:
        return self.seen + torch.arange(tokens.shape[1])[None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        y, group, new = torch.empty_like(q), q.shape[1] // k.shape[1], pos[0].tolist()
        for h, (keys, values) in enumerate(zip(self.k[layer], self.v[layer], strict=True)):
            keys.update(zip(new, k[0, h], strict=True))
            values.update(zip(new, v[0, h], strict=True))
            feed = []
            for t, at in enumerate(new):
                sees = [x for x in keys if x <= at]
                logits = q[0, h * group : (h + 1) * group, t] @ torch.stack([keys[x] for x in sees]).T
                p = (logits / math.sqrt(k.shape[-1])).softmax(-1)  # [G, n]
                y[0, h * group : (h + 1) * group, t] = p @ torch.stack([values[x] for x in sees])
                feed.append(dict(zip(sees, p.mean(0).tolist(), strict=True)))
            self.feeds[layer][h].append(feed)
        for h, scores in enumerate(self.judge(self.feeds[layer])):
            keys, last = self.k[layer][h], new[-1]
            old = [x for x in keys if self.sinks <= x <= last - self.recent]
            for x in sorted(old, key=lambda x: (scores[x], -x))[: max(len(keys) - self.budget, 0)]:
                del keys[x]
        return y

    def end(self, pos: Tensor) -> None:
        self.seen += pos.shape[1]

    def kept(self, layer: int) -> list[list[int]]:
        return [sorted(keys) for keys in self.k[layer]]


def sums(heads: list) -> list[dict[int, float]]:
    """H2O, algorithm 1."""
    found = []
    for feeds in heads:
        rows = [row for feed in feeds for row in feed]
        found.append({x: sum(row.get(x, 0.0) for row in rows) for x in {x for row in rows for x in row}})
    return found


def last_row(heads: list) -> list[dict[int, float]]:
    """TOVA, section 3."""
    rows = [feeds[-1][-1] for feeds in heads]
    return [{x: sum(row[x] for row in rows) / len(rows) for x in rows[0]}] * len(rows)


def votes_of_20(heads: list) -> list[dict[int, float]]:
    """Scissorhands with a history of 20: a feed is one vote, of the mean over the queries that saw a token."""
    found = []
    for feeds in heads:
        votes: dict[int, list[bool]] = {}
        for feed in feeds:
            for x in feed[-1]:
                got = [row[x] for row in feed if x in row]
                votes.setdefault(x, []).append(sum(got) / len(got) >= 1 / len(feed[-1]))
        found.append({x: sum(own[-20:]) / min(len(own), 20) for x, own in votes.items()})
    return found


@pytest.mark.parametrize(
    ("policy", "judge", "sinks", "recent"),
    [
        (Policy(H2O(), every=1, sinks=0, recent=0.5), sums, 0, 12),
        (Policy(TOVA(), every=1, sinks=0, recent=0), last_row, 0, 0),
        (Policy(Scissorhands(20), every=1, sinks=4, recent=10), votes_of_20, 4, 10),
    ],
    ids=["h2o", "tova", "scissorhands"],
)
def test_the_cache_keeps_what_plain_loops_keep_over_two_prompts_and_their_answers(
    policy, judge, sinks, recent, toy
):
    cache = CompressedKVCache.for_model(toy, policy, budget=24)
    truth = Truth(toy, 24, judge, sinks, recent)
    tokens = torch.randint(0, 300, (1, 107), generator=torch.Generator().manual_seed(5))
    start = 0
    for size in [40, *[1] * 25, 17, *[1] * 25]:
        ids = tokens[:, start : start + size]
        torch.testing.assert_close(toy(ids, None, cache), toy(ids, None, truth), rtol=1e-3, atol=1e-4)
        start += size
        for layer in range(2):
            kept = cache.kept(layer)[0]
            assert kept == truth.kept(layer), (start, layer)
            assert [len(head) for head in kept] == [24, 24]


@pytest.mark.parametrize("windows", [(), (7, None)], ids=["full", "windowed"])
def test_statistics_of_a_cache_that_drops_nothing_are_column_sums(windows):
    """A prompt, an answer and another prompt; within a sliding window, of the tokens still in it."""
    model = make_toy(windows=windows)
    policy = Policy(H2O(), every=None, sinks=0, recent=0)
    cache = CompressedKVCache.for_model(model, policy, budget=64, room=5)
    tokens = torch.randint(0, 300, (1, 46), generator=torch.Generator().manual_seed(2))

    class Recorder:
        def __init__(self):
            self.layers = []

        def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
            self.layers.append((q, k))
            return causal_attention(q, k, v, model.config.window(layer))

    recorder = Recorder()
    model.hidden(tokens, torch.arange(46)[None], recorder)
    start = 0
    for size in (20, *[1] * 10, 16):
        model(tokens[:, start : start + size], None, cache)
        start += size
    for layer, (q, k) in enumerate(recorder.layers):
        distance = torch.arange(46)[:, None] - torch.arange(46)
        ok = (distance >= 0) & (distance < (model.config.window(layer) or 46))
        logits = q[0].unflatten(0, (2, 2)) @ k[0, :, None].mT / math.sqrt(q.shape[-1])
        want = logits.masked_fill(~ok, -torch.inf).softmax(-1).mean(1).sum(1)  # [H, 46]
        held = cache.layers[layer].kept.pools[0]
        for h in range(2):
            pos = held.pos[0, h].tolist()
            got = held.state["received"][0, h].tolist()
            found = {x: value for x, value in zip(pos, got, strict=True) if x >= 0}
            assert len(found) == (46 if model.config.window(layer) is None else 6)
            assert found == pytest.approx({x: float(want[h, x]) for x in found}, rel=1e-4, abs=1e-5)
