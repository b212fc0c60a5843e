"""The axes of a policy and their neutral members. A strategy fills one axis; `minikv.policy` joins them.

| axis   | question                                  | neutral member        |
|--------|-------------------------------------------|-----------------------|
| score  | which tokens matter                       | `Full`: all of them   |
| refine | a second look once head budgets are known | `Refiner`: none       |
| heads  | a layer's budget over its KV heads        | `HeadSplit`: evenly   |
| layers | the model's budget over its layers        | `LayerSplit`: evenly  |
| store  | how a survivor is represented             | `Codec`: as it is     |

Budgets are tokens per KV head per layer, on average.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from minikv.seen import Seen


@dataclass(frozen=True)
class Scorer(ABC):
    """Ranks candidates: the highest scores stay. `score` must not depend on other rows of the batch."""

    @property
    def n_queries(self) -> int:
        """How many of the last queries `score` looks at; the cache keeps that many at hand."""
        return 0

    @property
    def drops(self) -> bool:
        """Whether tokens are ever dropped; if not, the budget is a capacity."""
        return True

    @abstractmethod
    def score(self, seen: Seen) -> Tensor:
        """Float32 `[B, H, n]`, higher is more important; empty candidates may get anything."""


@dataclass(frozen=True)
class Full(Scorer):
    """The full cache: nothing is ever dropped."""

    @property
    def drops(self) -> bool:
        return False

    def score(self, seen: Seen) -> Tensor:
        return torch.zeros_like(seen.pos, dtype=torch.float32)


@dataclass(frozen=True)
class Refiner:
    """A second look at the scores once each head's budget is known; this one changes nothing."""

    def refine(self, scores: Tensor, budgets: Tensor, seen: Seen) -> Tensor:
        """`scores [B, H, n]` with protected candidates at +inf, `budgets [B, H]` -> scores."""
        return scores


@dataclass(frozen=True)
class HeadSplit:
    """A layer's budget over its KV heads; this one gives each the same."""

    def split(self, scores: Tensor, budget: int) -> Tensor:
        """`scores [B, H, n]`, budget per head on average -> int64 `[B, H]` summing to `H * budget`."""
        batch, heads, _ = scores.shape
        return torch.full((batch, heads), budget, device=scores.device)


@dataclass(frozen=True)
class LayerSplit:
    """The model's budget over its layers, decided once; this one gives each the same."""

    def split(self, budget: int, n_layers: int) -> list[int]:
        return [budget] * n_layers


@dataclass(frozen=True)
class Codec:
    """How keys and values are stored; this one stores them as they are."""

    def buffers(
        self, lead: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Zeroed storage for `[*lead, head_dim]`: name -> tensor with the same leading axes."""
        return {"x": torch.zeros(*lead, head_dim, dtype=dtype, device=device)}

    def encode(self, x: Tensor) -> dict[str, Tensor]:
        """`x [B, H, n, D]` -> what `buffers` holds, by name."""
        return {"x": x}

    def decode(self, parts: dict[str, Tensor]) -> Tensor:
        """The inverse of `encode`, `[B, H, n, D]`."""
        return parts["x"]
