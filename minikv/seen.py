"""What a strategy may look at when a layer is compressed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kernels.attend import masked_softmax, visible
from kernels.dispatch import received


@dataclass(frozen=True)
class Seen:
    """One layer at compression time: the candidates (kept, fresh and new tokens) and the latest queries.

    Candidates are in order of position (in per-step dropping: in any order), empty ones (`pos = -1`)
    anywhere. Keys and queries are as the model attends with them, after rope. Scores are float32 `[B, H, n]`.
    """

    q: Tensor  # [B, H, G, w, D] the last queries, in no particular order
    q_pos: Tensor  # [B, w] their positions, -1 where there is none yet
    k_parts: list[Tensor]  # [B, H, n_i, D] each, together the n candidates
    v_parts: list[Tensor]
    pos: Tensor  # [B, H, n]
    last: Tensor  # [B] position of the newest token of each row
    sliding: int | None = None  # the layer's own sliding window
    ahead: int = 1  # the next query to attend stands at last + ahead
    solid: bool = False  # no candidate is empty, and they are in order
    wo: Tensor | None = None  # [C, H, G, D] output projection of each query head, for who `weighs_output`
    state: Mapping[str, Tensor] = field(default_factory=dict)  # the scorer's statistics, [B, H, n, ...]
    new_q: Tensor | None = None  # [B, H, G, T, D] all queries of the chunk that has just attended, if one has
    new_pos: Tensor | None = None  # [B, T]
    turn: Callable[[Tensor, Tensor], Tensor] | None = None  # x [B, h, n, D], by [B, n] positions -> x rotated

    @property
    def k(self) -> Tensor:
        """Keys of all candidates, `[B, H, n, D]`. Joined on demand: many scorers never look at them."""
        return self.k_parts[0] if len(self.k_parts) == 1 else torch.cat(self.k_parts, dim=2)

    @property
    def v(self) -> Tensor:
        return self.v_parts[0] if len(self.v_parts) == 1 else torch.cat(self.v_parts, dim=2)

    @property
    def valid(self) -> Tensor:
        """Which candidates are tokens that a later query can still see, bool `[B, H, n]`.

        What has left the layer's sliding window is lost for good; earlier queries did see it, though.
        """
        ok = self.pos >= 0
        if self.sliding is None:
            return ok
        return ok & (self.pos > (self.last + self.ahead - self.sliding)[:, None, None])

    def recent(self, n: int) -> Tensor:
        """Which candidates are among the last n tokens of their row, bool `[B, H, n]`."""
        return self.valid & (self.pos > self.last[:, None, None] - n)

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

    @property
    def real_queries(self) -> Tensor | None:
        """The new chunk's queries `[B, H, G, T, D]` with zeros for padding; None where no chunk has attended."""
        if self.new_q is None:
            return None
        return self.new_q.masked_fill((self.new_pos < 0)[:, None, None, :, None], 0)

    def received(self) -> Tensor:
        """Attention each candidate got from all queries of the new chunk, float32 `[B, H, n]`.

        Mean over the query heads of a group, sum over queries; zeros where no chunk has attended.
        """
        if self.new_q is None:
            return torch.zeros_like(self.pos, dtype=torch.float32)
        return received(self.new_q, self.new_pos, self.k, self.pos, self.sliding, self.solid)
