"""What a strategy may look at when a layer is compressed."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attend import masked_softmax, visible


@dataclass(frozen=True)
class Seen:
    """One layer at compression time: the candidates (kept, fresh and new tokens) and the latest queries.

    Candidates are in order of position, empty ones (`pos = -1`) anywhere. Keys and queries are as the
    model attends with them (after rope); every score is float32 `[B, H, n]`.
    """

    q: Tensor  # [B, H, G, w, D] the last queries, in no particular order
    q_pos: Tensor  # [B, w] their positions, -1 where there is none yet
    k_parts: list[Tensor]  # [B, H, n_i, D] each, together the n candidates
    v_parts: list[Tensor]
    pos: Tensor  # [B, H, n]
    last: Tensor  # [B] position of the newest token of each row
    sliding: int | None = None  # the layer's own sliding window
    wo: Tensor | None = None  # [C, H, G, D] output projection of each query head
    state: Mapping[str, Tensor] = field(default_factory=dict)  # the scorer's buffers, [B, H, n, ...]

    @property
    def k(self) -> Tensor:
        """Keys of all candidates, `[B, H, n, D]`. Joined on demand: many scorers never look at them."""
        return self.k_parts[0] if len(self.k_parts) == 1 else torch.cat(self.k_parts, dim=2)

    @property
    def v(self) -> Tensor:
        return self.v_parts[0] if len(self.v_parts) == 1 else torch.cat(self.v_parts, dim=2)

    def attention(self, window: int) -> Tensor:
        """Attention of the last `window` queries over the candidates, float32 `[B, H, G, w, n]`.

        Normalised over everything a query may see; queries that do not exist give rows of zeros.
        """
        q_pos = torch.where(self.q_pos > self.last[:, None] - window, self.q_pos, -1)
        ok = visible(self.pos[:, :, None], q_pos[:, None, :, None], self.sliding)  # [B, H, w, n]
        # Scaling before the product keeps float16 queries and keys from overflowing.
        q = self.q.float() * self.q.shape[-1] ** -0.5
        logits = q @ self.k.float().mT[:, :, None]  # [B, H, G, w, n]
        return masked_softmax(logits, ok[:, :, None])
