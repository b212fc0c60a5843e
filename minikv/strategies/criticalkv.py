"""CriticalKV: attention counts by how much its value moves the layer's output. arXiv:2502.03805.

Dropping tokens moves the output by at most theta = sum_i A_i p_i - (2 - 1 / s) sum_kept A_i p_i, where
p_i = |v_i W_O|_1 and s is the attention kept. If s > 1/2, keeping the largest A_i p_i makes this bound
smallest. So, of the b tokens a head may choose:

    stage 1: the floor(alpha b) with the largest A, which make s large
    stage 2: of the rest those with the largest (A + epsilon) p

alpha = 1 is the host method. A query head h has its own W_O; in a group A and p are both means over h, and
their product stands for the mean of products, as in the authors' code.

Choices: guarded tokens (sinks, window) stay outside b, whereas the authors' code spends stage 1 on them;
alpha 0.25 is the first version's, a later one has 0.5.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.axes import Refiner
from minikv.seen import Seen


@dataclass(frozen=True)
class CriticalKV(Refiner):
    """The share `alpha` of a head's budget by attention, the rest by attention times projected value."""

    alpha: float = 0.25
    epsilon: float = 1e-4

    needs_attention = True
    weighs_output = True

    def __post_init__(self):
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"criticalkv needs alpha from 0 to 1, not {self.alpha}")
        if self.epsilon < 0:
            raise ValueError(f"criticalkv needs epsilon of 0 or more, not {self.epsilon}")

    def refine(self, scores: Tensor, budgets: Tensor, seen: Seen) -> Tensor:
        # What a scorer keeps by itself, as ExpectedAttention its sinks, comes as the largest number there is.
        guarded = scores >= torch.finfo(scores.dtype).max
        n_guarded = guarded.sum(-1)  # [B, H]
        first = n_guarded + ((budgets - n_guarded).clamp(min=0) * self.alpha).long()
        order = scores.argsort(dim=-1, descending=True, stable=True)
        places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
        chosen = torch.zeros_like(guarded).scatter_(-1, order, places < first[..., None])
        return ((scores + self.epsilon) * output_norm(seen)).masked_fill(chosen, torch.inf)


def output_norm(seen: Seen) -> Tensor:
    """|v W_O|_1 of each candidate, mean over the query heads of a group, float32 `[B, H, n]`.

    One query head at a time: at most `[B, n, C]` exists at once.
    """
    v, (_, heads, group, _) = seen.v, seen.wo.shape

    def norm(head: int, g: int) -> Tensor:
        # A contiguous matrix halves the time of the product on a CPU.
        return (v[:, head] @ seen.wo[:, head, g].mT.contiguous()).abs().sum(-1, dtype=torch.float32)

    norms = [sum(norm(head, g) for g in range(group)) for head in range(heads)]
    return torch.stack(norms, dim=1) / group
