"""FastGen: each head gets the cheapest rule that keeps most of its attention. arXiv:2310.01801, section 3.

At the end of a prompt the rules are tried in the order of their cost, each containing the ones before and
the first tokens:

    special tokens | + punctuation | + heavy hitters | + a local window | everything

and a head takes the first whose share of the attention, averaged over the prompt's queries, is at least
`recovery` (algorithm 1). Heavy hitters are the `heavy` share of all tokens that got most attention per
query that could see them; the window is the `local` share before each query. Heads differ in length. (Rules
and shares as in cold-compress, to which the authors point.)

Our pool is of fixed size. If the heads ask for more than it holds, the longest are cut to the highest
level at which all fit, keeping what got most attention; if they ask for less, no more is kept. The paper has
no budget. Rules are chosen anew at each compression; where no prompt has just attended, from the attention
that what is left has gathered, in which the window counts for what stands in it now (a lower bound). Shares
are of all tokens so far, so that compressing again does not shrink a head. The policy's `recent` is kept too.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.received import blocks, over_queries
from minikv.axes import HeadSplit, Scorer
from minikv.seen import Seen

QUERY_BLOCK = 256  # queries profiled at a time: memory grows with the prompt and not with its square
ALL = 1 << 40  # a number of queries beyond every position


@dataclass(frozen=True)
class FastGen(Scorer, HeadSplit):
    """Fills two axes: scores are -1 outside a head's rule, and a head's budget is what its rule asks for.

    special, punctuation: ids of such tokens. Each is compared in every step, so a few dozen are best.
    """

    recovery: float = 0.9
    heavy: float = 0.3
    local: float = 0.3
    first: int = 4
    special: tuple[int, ...] = ()
    punctuation: tuple[int, ...] = ()

    watches = True
    uniform = False

    def __post_init__(self):
        for name in ("recovery", "heavy", "local"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"fastgen: {name} is a share from 0 to 1, not {getattr(self, name)}")
        if self.first < 0:
            raise ValueError(f"fastgen keeps 0 or more first tokens, not {self.first}")
        for name in ("special", "punctuation"):
            if not isinstance(getattr(self, name), tuple):
                raise ValueError(f"fastgen: {name} takes ids as in (1, 2) or (1,), not {getattr(self, name)}")

    def state(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        sums = {name: ((), torch.float32) for name in ("received", "got", "near")}
        return {**sums, "kind": ((), torch.uint8)}

    def enter(self, k: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        kind = torch.where(among(tokens, self.special), 1, 2 * among(tokens, self.punctuation))  # [B, T]
        return {**super().enter(k, tokens), "kind": kind.to(torch.uint8)[:, None].expand(k.shape[:3])}

    def absorb(self, seen: Seen) -> dict[str, Tensor]:
        got, near = profile(seen, self.local * (seen.last[:, None, None] + 1))
        received = seen.state["received"] + got
        return {"received": received, "got": got, "near": near, "kind": seen.state["kind"]}

    def watch(self, state: dict[str, Tensor], p: Tensor, share: Tensor, now: Tensor) -> None:
        state["received"].add_(p)

    def score(self, seen: Seen) -> Tensor:
        importance, rules = self.rules(seen)
        keep, got = rules.pop()  # everything
        for rule, mass in reversed(rules):
            enough = mass.sum(-1, keepdim=True) >= self.recovery * got.sum(-1, keepdim=True)
            keep = torch.where(enough, rule, keep)
        return torch.where(keep, importance, -1.0)

    def rules(self, seen: Seen) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Mean attention each candidate got, and per rule what it keeps and the attention that keeps, `[B, H, n]`."""
        length = seen.last[:, None, None] + 1
        received, kind = seen.state["received"], seen.state["kind"]
        importance = received / (length - seen.pos)
        window = seen.valid & (length - 1 - seen.pos < self.local * length)
        if seen.new_q is None:
            got, near = received * seen.valid, received * window
        else:
            got, near = seen.state["got"], seen.state["near"]
        special = seen.valid & ((seen.pos < self.first) | (kind == 1))
        marks = special | (seen.valid & (kind == 2))
        others = importance.masked_fill(marks | ~seen.valid, -1.0)
        place = others.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
        heavy = marks | ((place < self.heavy * length) & (others >= 0))
        fixed = [(rule, got * rule) for rule in (special, marks, heavy)]
        return importance, [*fixed, (heavy | window, torch.where(heavy, got, near)), (seen.valid, got)]

    def split(self, scores: Tensor, budget: int, layer: int) -> Tensor:
        """What each head asks for, at most a common level, `[B, H]`; the sum may be less than the pool."""
        asked, order = (scores >= 0).sum(-1).sort(dim=-1, stable=True)
        heads, given = scores.shape[1], []
        left = torch.full_like(asked[:, 0], heads * budget)
        for i in range(heads):  # from the most modest on, nobody takes more than an even share of the rest
            given.append(torch.minimum(asked[:, i], left // (heads - i)))
            left = left - given[-1]
        return torch.empty_like(asked).scatter_(1, order, torch.stack(given, 1))


def profile(seen: Seen, width: Tensor) -> tuple[Tensor, Tensor]:
    """Attention each candidate got from the chunk's queries, and from those less than `width` behind it.

    Mean over the group, sum over queries, float32 `[B, H, n]` each; width `[B, 1, 1]`.
    """
    got = torch.zeros(seen.pos.shape, device=seen.pos.device)
    near = torch.zeros_like(got)
    for p, q_pos in blocks(seen.new_q, seen.new_pos, seen.k, seen.pos, seen.sliding, seen.solid):
        n = p.shape[-1]
        got[:, :, :n] += over_queries(p, q_pos >= 0)
        far = q_pos[:, None, :, None] - seen.pos[:, :, None, :n] >= width[..., None]  # [B, H, t, n]
        near[:, :, :n] += over_queries(p.masked_fill_(far[:, :, None], 0.0), q_pos >= 0)
    return got, near


def among(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    """Which tokens are one of `ids`. One by one: a compiled step cannot read a table of the host."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for i in ids:
        found = found | (tokens == i)
    return found
