"""H2O: heavy hitters, the tokens that have gathered most attention so far. arXiv:2306.14048, section 4.

A token's score is the attention it got from every query since it came, summed (algorithm 1):

    score[x] = sum over queries t of A[t, x]

with A averaged over the query heads of a KV head. The sum travels with the token and grows in each step;
the lowest goes, outside the recent half of the budget. Sinks need no protection: they gather most.

Sums favour the early tokens, which more queries have seen. `normalise` divides by that number, last - x
+ 1, as kvpress's ObservedAttention does; that favours the tokens just before the end instead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen


@dataclass(frozen=True)
class H2O(Scorer):
    """Attention received so far; with `normalise`, per query that could see the token."""

    normalise: bool = False

    attention_scores = True
    watches = True

    def state(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {"received": ((), torch.float32)}

    def absorb(self, seen: Seen) -> dict[str, Tensor]:
        return {"received": seen.state["received"] + seen.received()}

    def watch(self, state: dict[str, Tensor], p: Tensor, share: Tensor, now: Tensor) -> None:
        state["received"].add_(p)

    def score(self, seen: Seen) -> Tensor:
        received = seen.state["received"]
        return received / (seen.last[:, None, None] - seen.pos + 1) if self.normalise else received
