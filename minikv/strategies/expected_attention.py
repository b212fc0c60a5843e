"""ExpectedAttention: what the queries to come will attend to, guessed from those so far. arXiv:2510.00636.

Queries before rope are taken as Gaussian. With R the rotation averaged over the next `n_future` positions,
mu' = R mu and S' = R S R^T, the attention that a key can expect is, in closed form,

    z_x = k_x mu' / sqrt(D) + k_x S' k_x / 2D
    score(x) = (mean over group of softmax(z)_x + epsilon) |v_x|

Sinks take no part: neither their queries in mu and S nor their keys in the softmax; they stay.

Deviations: a prompt's compression uses all its queries; the cache remembers just the last `window` queries,
so later ones use these and whatever has arrived since. As rotations commute, queries are turned to the next
position rather than back to 0.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class ExpectedAttention(Scorer):
    """Expected attention over `n_future` positions, times the length of the value."""

    n_future: int = 512
    covariance: bool = True
    value_norm: bool = True
    epsilon: float = 0.0
    window: int = 32
    sinks: int = 4

    def __post_init__(self):
        for name, least in (("n_future", 1), ("epsilon", 0), ("window", 1), ("sinks", 0)):
            if getattr(self, name) < least:
                raise ValueError(
                    f"expectedattention needs {name} of {least} or more, not {getattr(self, name)}"
                )

    @property
    def n_queries(self) -> int:
        return self.window

    @property
    def attention_scores(self) -> bool:
        return not self.value_norm

    def score(self, seen: Seen) -> Tensor:
        mean, spread = self.expected_query(seen)
        k = seen.k.float()[:, :, None] * seen.k.shape[-1] ** -0.5  # [B, H, 1, n, D]
        z = (k * mean).sum(-1)  # [B, H, G, n]
        if self.covariance:
            z = z + (k @ spread * k).sum(-1) / 2
        left_out = (seen.pos < self.sinks)[:, :, None]  # sinks, and empty candidates at -1
        share = z.masked_fill(left_out, torch.finfo(z.dtype).min).softmax(-1).mean(2)  # [B, H, n]
        if self.value_norm:
            share = (share + self.epsilon) * seen.v.float().norm(dim=-1)
        return share.masked_fill(seen.pos < self.sinks, torch.inf)

    def expected_query(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """Mean `[B, H, G, 1, D]` and covariance `[B, H, G, D, D]` of the queries to come."""
        q, pos = self.queries(seen)
        heads, d = q.shape[1], q.shape[-1]
        turned = seen.turn(q.float().flatten(1, 2), (seen.last + 1)[:, None] - pos).unflatten(1, (heads, -1))
        counts = (pos >= self.sinks)[:, None, None, :, None]  # [B, 1, 1, T, 1]
        n = counts.sum(3, keepdim=True).clamp(min=1)
        mean = (turned * counts).sum(3, keepdim=True) / n
        centered = (turned - mean) * counts
        spread = centered.mT @ centered / n
        # Row i of `average` is basis vector i, turned by 0 .. n_future - 1 positions and averaged.
        ahead = torch.arange(self.n_future, device=q.device)[None]
        basis = torch.eye(d, device=q.device)[None, :, None].expand(-1, -1, self.n_future, -1)
        average = seen.turn(basis, ahead).mean(2)[0]  # [D, D]
        return mean @ average, average.mT @ spread @ average

    def queries(self, seen: Seen) -> tuple[Tensor, Tensor]:
        """The chunk's queries and those remembered from before it, `[B, H, G, T, D]` and `[B, T]`."""
        if seen.new_q is None:
            return seen.q, seen.q_pos
        first = torch.where(seen.new_pos >= 0, seen.new_pos, seen.last[:, None] + 1).amin(1, keepdim=True)
        before = torch.where(seen.q_pos < first, seen.q_pos, -1)
        return torch.cat((seen.q, seen.new_q), dim=3), torch.cat((before, seen.new_pos), dim=1)
