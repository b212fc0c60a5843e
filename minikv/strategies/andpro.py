"""AnDPro: a token counts by what its value adds in the direction of the output.

NeurIPS 2025, OpenReview Tdl89SZItB. "Text" and "code" below are the paper and the authors' code.

The anchor y_i of window query i is its attention output before anything is dropped. Of it, token x brings

    score(x) = sum_i A_i(x) <v_x, y_i>

a signed share: without pooling, scores sum to sum_i |y_i|^2. Tokens are taken in chunks of `chunk`, which win
or lose together by their sums, and heads compete for the layer's budget without a floor.

Choices where text and code differ: each query has its own anchor (code). `anchor="full"` is the whole output
(text), "evictable" the code's: from max-pooled attention and without sinks and window. Scores use attention
max-pooled over `kernel` keys (code). Ours: the mean over the query heads of a group, where the authors have
no grouped heads; chunks count from the first token after the sinks, over the tokens that are still there; and
`normalise` divides by sum_i |y_i|^2, so that heads with large outputs do not win by size alone.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class AnDPro(Scorer):
    """Chunks of tokens, by the projection of what they add onto the output of the last `window` queries."""

    window: int = 32
    chunk: int = 4
    kernel: int = 7
    anchor: str = "full"
    normalise: bool = False
    sinks: int = 4

    def __post_init__(self):
        for name, least in (("window", 1), ("chunk", 1), ("kernel", 1), ("sinks", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"andpro needs {name} of {least} or more, not {getattr(self, name)}")
        if self.kernel % 2 == 0:
            raise ValueError(f"andpro pools over an odd number of neighbours, not {self.kernel}")
        if self.anchor not in ("full", "evictable"):
            raise ValueError(f'andpro takes anchor "full" or "evictable", not {self.anchor!r}')

    @property
    def n_queries(self) -> int:
        return self.window

    @property
    def keeps_window(self) -> int:
        return self.window

    def score(self, seen: Seen) -> Tensor:
        recent = seen.recent(self.window)
        evictable = (seen.pos >= self.sinks) & ~recent
        sums = self.chunk_sums(self.token_scores(seen, evictable), evictable)
        return torch.where(evictable, sums, torch.inf)

    def token_scores(self, seen: Seen, evictable: Tensor) -> Tensor:
        attention = seen.attention(self.window)  # [B, H, G, w, n]
        v = seen.v.float()[:, :, None]  # [B, H, 1, n, D]
        pooled = F.max_pool1d(attention.flatten(0, 3), self.kernel, stride=1, padding=self.kernel // 2)
        pooled = pooled.view_as(attention)
        source = attention if self.anchor == "full" else pooled * evictable[:, :, None, None]
        y = source @ v  # [B, H, G, w, D]
        scores = (pooled * (y @ v.mT)).sum(3)  # [B, H, G, n]
        if self.normalise:
            scores = scores / y.square().sum((3, 4)).clamp(min=1e-30)[..., None]
        return scores.mean(2)

    def chunk_sums(self, scores: Tensor, evictable: Tensor) -> Tensor:
        """Each evictable token gets the sum of its chunk, `[B, H, n]`; the last chunk may be short."""
        chunk = ((evictable.cumsum(-1) - 1) // self.chunk).clamp(min=0)
        sums = torch.zeros_like(scores).scatter_add_(2, chunk, scores * evictable)
        return sums.gather(2, chunk)
