"""SnapKV: what the end of the prompt attends to. arXiv:2404.14469, section 4.

The last `window` queries vote for earlier tokens with their attention; votes are smoothed over
neighbours, so that a wanted token brings its context along, and the window itself stays.

Where code bases differ we take the mean over the query heads of a KV head and pool after it (a GQA cache
stores one choice per KV head), max-pooling of width 7 and a window of 32.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class SnapKV(Scorer):
    """Attention of the last `window` queries, pooled over `kernel` neighbours (`pool` "max" or "avg")."""

    window: int = 32
    kernel: int = 7
    pool: str = "max"

    attention_scores = True

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"snapkv needs a window of at least 1 query, not {self.window}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(
                f"snapkv pools over an odd number of neighbours, not {self.kernel}: "
                "an even kernel would shift every score by half a token"
            )
        if self.pool not in ("max", "avg"):
            raise ValueError(f'snapkv pools by "max" or "avg", not {self.pool!r}')

    @property
    def n_queries(self) -> int:
        return self.window

    @property
    def keeps_window(self) -> int:
        return self.window

    def score(self, seen: Seen) -> Tensor:
        votes = seen.attention(self.window).mean((2, 3))  # [B, H, n]
        recent = seen.recent(self.window)
        # The window does not vote for itself: it stays anyway, and must not lift its neighbours.
        votes = votes.masked_fill(recent, 0.0)
        pool = F.max_pool1d if self.pool == "max" else F.avg_pool1d
        pooled = pool(votes, self.kernel, stride=1, padding=self.kernel // 2)
        return pooled.masked_fill(recent, torch.inf)
