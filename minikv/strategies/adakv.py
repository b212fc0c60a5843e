"""Ada-KV: heads whose attention is spread out get more of the layer's budget. arXiv:2407.11550, section 3.

Taking the H * budget best candidates over all heads at once, rather than the best of each, bounds the loss
of the layer's output most tightly. So each head first reserves its own best `floor * budget` candidates, lest
a head with one huge peak starve, and then all compete; a head's budget is the number of its winners.

Deviation: the authors' code blends the competition's result with an even split by `floor`; we reserve, then
compete, which keeps totals exact. Both agree at 0 and 1. Protected tokens count inside.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.axes import HeadSplit


@dataclass(frozen=True)
class AdaKV(HeadSplit):
    """Budgets by competition, each head sure of the share `floor` and of one token at least."""

    floor: float = 0.2

    uniform = False

    def __post_init__(self):
        if not 0 <= self.floor <= 1:
            raise ValueError(f"adakv needs a floor from 0 to 1, not {self.floor}")

    def split(self, scores: Tensor, budget: int, layer: int) -> Tensor:
        """Among equal scores the earlier candidate wins, then the lower head."""
        batch, heads, n = scores.shape
        places = min(budget, n)  # for each head on average; what is beyond n is of no use to anyone
        reserve = max(1, int(self.floor * budget))
        best = scores.argsort(dim=-1, descending=True, stable=True)[..., :reserve]
        raised = scores.scatter(-1, best, torch.inf)
        # Empty candidates stay last, so they win only when no token is left in any head.
        raised = torch.where(scores > -torch.inf, raised, scores)
        # With heads as the faster axis, a stable sort prefers the earlier candidate, then the lower head.
        order = raised.mT.flatten(1).argsort(dim=-1, descending=True, stable=True)  # [B, n * H]
        head = order[:, : heads * places] % heads
        wins = torch.zeros(batch, heads, dtype=torch.int64, device=scores.device)
        return wins.scatter_add_(1, head, torch.ones_like(head)) + (budget - places)
