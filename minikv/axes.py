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
    """Ranks candidates: the highest scores stay. Rows of a batch must not depend on each other.

    A scorer may keep statistics per token: `state` declares them, `enter` gives those of new tokens,
    `absorb` and `watch` update them after a chunk and after a single token. They travel with the token.
    """

    @property
    def n_queries(self) -> int:
        """How many of the last queries `score` looks at; the cache keeps that many at hand."""
        return 0

    @property
    def attention_scores(self) -> bool:
        """Whether scores are attention probabilities or sums of them, as some refiners need."""
        return False

    @property
    def keeps_window(self) -> int:
        """How many of the last tokens the method itself never drops, whatever the policy's `recent`."""
        return 0

    @property
    def drops(self) -> bool:
        """Whether tokens are ever dropped; if not, the budget is a capacity."""
        return True

    @property
    def before(self) -> bool:
        """Whether a step drops ahead of its attention, so that the dropped token is not seen any more."""
        return False

    @property
    def one_by_one(self) -> bool:
        """With `before`: whether a prompt or turn beyond the budget is taken token by token as well."""
        return False

    @property
    def shifts_sinks(self) -> bool:
        """Whether the sinks are moved up to the other tokens, so that positions may pass the trained length."""
        return False

    @property
    def replays(self) -> bool:
        """Whether prompts are read a second time before they are compressed; see `minikv.replay`."""
        return False

    @property
    def watches(self) -> bool:
        """Whether `watch` wants to see every step's attention."""
        return False

    @abstractmethod
    def score(self, seen: Seen) -> Tensor:
        """Float32 `[B, H, n]`, higher is more important; empty candidates may get anything."""

    def state(self, head_dim: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Statistics per token and KV head: name -> (shape, dtype)."""
        return {}

    def enter(self, k: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Statistics of tokens that have just arrived, with keys `[B, H, T, D]` and ids `[B, T]`: zeros by default."""
        return {
            name: torch.zeros(*k.shape[:3], *shape, dtype=dtype, device=k.device)
            for name, (shape, dtype) in self.state(k.shape[-1]).items()
        }

    def absorb(self, seen: Seen) -> dict[str, Tensor]:
        """Statistics of all candidates after a chunk has attended, each `[B, H, n, ...]`."""
        return dict(seen.state)

    def watch(self, state: dict[str, Tensor], p: Tensor, share: Tensor, now: Tensor) -> None:  # noqa: B027
        """Update statistics in place after one token has attended. Tensor code only: part of the compiled step.

        state: name -> `[B, H, n, ...]`; p `[B, H, n]`: attention each slot got, mean over the group, float32;
        share, broadcasting to p: 1 / number of tokens the head held; now `[B, 1, 1]`: position, -1 at rest
        (a row at rest, like an empty slot, has p = 0; its statistics must stay as they are).
        """


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

    @property
    def needs_attention(self) -> bool:
        """Whether scores must be attention; see `Scorer.attention_scores`."""
        return False

    def refine(self, scores: Tensor, budgets: Tensor, seen: Seen) -> Tensor:
        """`scores [B, H, n]` with protected candidates at +inf, `budgets [B, H]` -> scores."""
        return scores


@dataclass(frozen=True)
class HeadSplit:
    """A layer's budget over its KV heads; this one gives each the same."""

    @property
    def uniform(self) -> bool:
        """Whether every head always gets the same, so that the layer can be stored as a rectangle."""
        return True

    def split(self, scores: Tensor, budget: int, layer: int) -> Tensor:
        """`scores [B, H, n]`, budget per head on average -> int64 `[B, H]` summing to at most `H * budget`.

        Protected candidates have +inf, empty ones -inf. A head that has fewer tokens than it is given
        wastes the difference, so budget is to be given where there are tokens.
        """
        batch, heads, _ = scores.shape
        return torch.full((batch, heads), budget, device=scores.device)


@dataclass(frozen=True)
class LayerSplit:
    """The model's budget over its layers, decided once; this one gives each the same."""

    def split_layers(self, budget: int, n_layers: int) -> list[int]:
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
