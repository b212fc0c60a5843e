"""Scissorhands: what has mattered keeps mattering. arXiv:2305.17118, sections 3 and 4.

In each step a token gets one vote: whether its attention was at least average. Votes of the last
`history` steps count, and the token with the smallest share of them goes:

    vote_t[x] = A[t, x] >= 1 / n_t           n_t: tokens the head holds, A: mean over its query heads
    score[x]  = sum of the last `history` votes of x / min(votes x has cast, history)

As in cold-compress, one token goes per step (the paper drops many at a time and gives later layers more),
and a prompt casts one vote per token: whether the mean attention of those of its queries that could see
the token was at least 1/n. A later turn does the same. Here the newest step votes before a token goes.

A history is a ring of bits in `ceil(history / 32)` words. Each token counts its own votes, and the count
modulo `history` is the place of the next, so a chunk moves every ring on by one place and not by its length.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class Scissorhands(Scorer):
    """Share of the last `history` steps in which a token got at least average attention."""

    history: int = 400

    watches = True

    def __post_init__(self):
        if self.history < 1:
            raise ValueError(f"scissorhands needs a history of at least 1 step, not {self.history}")

    def state(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"votes": ((-(-self.history // 32),), torch.int32), "cast": ((), torch.int32)}

    def absorb(self, seen: Seen) -> dict[str, Tensor]:
        mean = seen.received() / n_seeing(seen).clamp(min=1)
        share = 1 / (seen.pos >= 0).sum(-1, keepdim=True).clamp(min=1)
        word, voted = self.vote(seen.state, mean >= share)
        return {"votes": seen.state["votes"].scatter(-1, word, voted), "cast": seen.state["cast"] + 1}

    def watch(self, state: dict[str, Tensor], p: Tensor, share: Tensor, now: Tensor) -> None:
        awake = (now >= 0).expand_as(p)
        word, voted = self.vote(state, p >= share)
        voted = torch.where(awake[..., None], voted, state["votes"].gather(-1, word))
        state["votes"].scatter_(-1, word, voted)
        state["cast"].add_(awake)

    def vote(self, state: dict[str, Tensor], yes: Tensor) -> tuple[Tensor, Tensor]:
        """Which word of its history each token's next vote falls in and that word after it, `[B, H, n, 1]`."""
        place = (state["cast"] % self.history)[..., None]
        word = (place >> 5).long()
        old = state["votes"].gather(-1, word)
        bit = torch.ones_like(place) << (place & 31)
        # A vote of `history` steps ago stands where this one goes: a no must clear it.
        return word, torch.where(yes[..., None], old | bit, old & ~bit)

    def score(self, seen: Seen) -> Tensor:
        cast = seen.state["cast"].clamp(min=1, max=self.history)
        return ones(seen.state["votes"]).sum(-1) / cast


def n_seeing(seen: Seen) -> Tensor:
    """How many of the chunk's queries could see each candidate, `[B, H, n]`."""
    queries = seen.new_pos.sort(-1).values  # [B, T], padding first
    pos = seen.pos.to(queries.dtype).flatten(1)  # [B, H * n]
    before = torch.searchsorted(queries, pos)
    end = queries.shape[1] if seen.sliding is None else torch.searchsorted(queries, pos + seen.sliding)
    return (end - before).view(seen.pos.shape)


def ones(x: Tensor) -> Tensor:
    """Bits set in each word: sums of neighbouring bits, of pairs, of fours, and of the bytes that remain."""
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return (x + (x >> 8) + (x >> 16) + (x >> 24)) & 0x3F
