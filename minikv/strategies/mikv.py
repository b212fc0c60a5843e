"""MiKV: no token left behind; what eviction would drop stays at low precision. arXiv:2402.18096, section 3.

Of S tokens the floor(r S) most important ones, by any scorer, are kept at high precision: half of them the most
recent, half the highest scores, as in H2O. All others go to a low tier of a few bits, with a grid per token
and half a head. In decoding tokens only ever move down, since what rounding lost is gone.

Keys have channels with outliers. Before rounding a low key, each channel is balanced against the queries:

    beta_c = sqrt(max |Q_c| / max |K_c|),  k' = beta * k,  q' = q / beta        (section 3.3)

over the tokens and queries of the first chunk, then fixed. Only the low tier is balanced, so a high tier of 16
bits is exact. `evict=True` adds a third tier of no bits: the budget is all slots, and beyond it the policy's
scorer decides what is dropped; without it the budget is the capacity and nothing ever is.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.axes import Codec, Fixed, Store, Tier, rank
from minikv.strategies.rtn import TokenGrid, check_bits, group_of


@dataclass(frozen=True)
class BalancedGrid(TokenGrid):
    """Keys times a factor per channel, on grids per token."""

    def fitted(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        return {"balance": (head_dim,)}

    def fit(self, x: Tensor, valid: Tensor, q: Tensor | None) -> dict[str, Tensor]:
        keys = (x.float().abs() * valid[..., None]).amax(-2)  # [B, H, D]
        queries = keys if q is None else q.float().abs().amax((2, 3))
        known = (keys > 0) & (queries > 0)
        return {"balance": torch.where(known, (queries / keys).sqrt(), 1)}

    def encode(self, x: Tensor, fixed: Fixed) -> dict[str, Tensor]:
        return super().encode(x.float() * balance(fixed), fixed)

    def decode(self, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        return super().decode(parts, fixed) / balance(fixed)

    def dot(self, q: Tensor, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        return super().dot(q / balance(fixed), parts, fixed)

    def asked(self, q: Tensor, fixed: Fixed) -> tuple[Tensor, None]:
        return q.float() / balance(fixed), None


def balance(fixed: Fixed) -> Tensor:
    """`[..., 1, D]`; 1 before anything has been fitted."""
    found = fixed["balance"][..., None, :]
    return torch.where(found > 0, found, 1)


@dataclass(frozen=True)
class MiKV(Store):
    """`ratio` of the tokens at `high` bits (16: as they are), the others at `low`; group 0 is half a head."""

    ratio: float = 0.2
    high: int = 16
    low: int = 2
    group: int = 0
    evict: bool = False

    coded = True
    tiers_by_score = True

    def __post_init__(self):
        check_bits("mikv", (4, 8, 16), high=self.high)
        check_bits("mikv", (2, 3, 4), low=self.low)
        if not 0 <= self.ratio <= 1:
            raise ValueError(f"mikv: ratio={self.ratio} must be between 0 and 1")

    @property
    def holds_all(self) -> bool:
        return not self.evict

    def tiers(self, slots: int, sinks: int, head_dim: int) -> list[Tier]:
        group = group_of(head_dim, self.group or head_dim // 2)
        high, values = int(self.ratio * slots), TokenGrid(self.low, group)
        upper = Codec() if self.high == 16 else TokenGrid(self.high, group)
        return [Tier(high, upper, upper), Tier(slots - high, BalancedGrid(self.low, group), values)]

    def first_tier(
        self, survives: Tensor, pos: Tensor, sinks: int, scores: Tensor | None, settled: Tensor
    ) -> Tensor:
        """The high tier: tokens that were not yet low, half of them the last ones, half by score."""
        count = survives.sum(-1, keepdim=True)  # [B, H, 1]
        high = (count.double() * self.ratio).long()
        free = survives & ~settled
        recent = survives & (survives.cumsum(-1) > count - high // 2)
        scores = scores.masked_fill(recent, torch.inf).masked_fill(~free, -torch.inf)
        return free & (rank(scores) < high)
