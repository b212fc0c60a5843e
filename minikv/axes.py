"""The axes of a policy and their neutral members. A strategy fills one axis; `minikv.policy` joins them.

| axis   | question                                  | neutral member        |
|--------|-------------------------------------------|-----------------------|
| score  | which tokens matter                       | `Full`: all of them   |
| refine | a second look once head budgets are known | `Refiner`: none       |
| heads  | a layer's budget over its KV heads        | `HeadSplit`: evenly   |
| layers | the model's budget over its layers        | `LayerSplit`: evenly  |
| store  | how a survivor is represented             | `Store`: as it is     |

Budgets are tokens per KV head per layer, on average.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from kernels.plain import dot, mix
from kernels.stretches import Side, raw
from minikv.seen import Seen


@dataclass(frozen=True)
class Scorer(ABC):
    """Ranks candidates: the highest scores stay. Rows of a batch must not depend on each other.

    A scorer may keep statistics per token: `state` declares them, `enter` gives those of new tokens,
    `absorb` and `watch` update them after a chunk and after a single token. They travel with the token.
    """

    # Facts about a method that the cache reads. A subclass sets them, or makes a property where they depend
    # on its fields.
    n_queries: ClassVar[int] = (
        0  # how many of the last queries `score` looks at; the cache keeps them at hand
    )
    keeps_window: ClassVar[int] = 0  # last tokens that the method never drops, whatever the policy's `recent`
    attention_scores: ClassVar[bool] = False  # scores are attention or sums of it, as some refiners need
    drops: ClassVar[bool] = True  # tokens are dropped at all; if not, the budget is a capacity
    before: ClassVar[bool] = False  # a step drops ahead of its attention, which then misses the dropped token
    one_by_one: ClassVar[bool] = (
        False  # with `before`: also what exceeds the budget in a prompt, token by token
    )
    watches: ClassVar[bool] = False  # `watch` is to see every step's attention
    replays: ClassVar[bool] = False  # prompts are read twice before they are compressed: `minikv.replay`
    weighs_output: ClassVar[bool] = False  # `seen.wo` is looked at
    shifts_sinks: ClassVar[bool] = (
        False  # sinks are moved up to the others: positions may pass the trained length
    )

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

    drops = False

    def score(self, seen: Seen) -> Tensor:
        return torch.zeros_like(seen.pos, dtype=torch.float32)


@dataclass(frozen=True)
class Refiner:
    """A second look at the scores once each head's budget is known; this one changes nothing."""

    needs_attention: ClassVar[bool] = False  # scores must be attention; see `Scorer.attention_scores`
    weighs_output: ClassVar[bool] = False  # `seen.wo` is looked at

    def refine(self, scores: Tensor, budgets: Tensor, seen: Seen) -> Tensor:
        """`scores [B, H, n]` with protected candidates at +inf, `budgets [B, H]` -> scores."""
        return scores


@dataclass(frozen=True)
class HeadSplit:
    """A layer's budget over its KV heads; this one gives each the same."""

    uniform: ClassVar[bool] = True  # every head always gets the same, so the layer is a rectangle

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


def rank(scores: Tensor) -> Tensor:
    """Place of each candidate in descending order, 0 is best; equal scores keep their order. `[B, H, n]`."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


Fixed = Mapping[str, Tensor]  # numbers a codec needs beside the codes


@dataclass(frozen=True)
class Codec:
    """How keys, or values, are written into slots; this one writes them as they are.

    Products take and give float32. `...` is batch and KV head, or batch and block of a ragged pool.
    """

    exact: ClassVar[bool] = True  # decoding gives back what was encoded
    span: ClassVar[int] = 1  # neighbouring slots that share numbers and so are written together

    def buffers(
        self, lead: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        """Zeroed storage for slots `lead`: name -> `[*lead, ...]`, or one entry for each span of slots."""
        return {"x": torch.zeros(*lead, head_dim, dtype=dtype, device=device)}

    def constants(self, head_dim: int, device: torch.device) -> dict[str, Tensor]:
        """Tensors that all layers share, such as a rotation."""
        return {}

    def fitted(self, head_dim: int) -> dict[str, tuple[int, ...]]:
        """Numbers per sequence and KV head that its first tokens decide for good: name -> shape."""
        return {}

    def fit(self, x: Tensor, valid: Tensor, q: Tensor | None) -> dict[str, Tensor]:
        """Those numbers, float32 `[B, H, ...]`: from x `[B, H, n, D]`, which of them are tokens `[B, H, n]`,
        and the queries `[B, H, G, T, D]` of the same chunk, None where single tokens have filled the cache."""
        return {}

    def encode(self, x: Tensor, fixed: Fixed) -> dict[str, Tensor]:
        """`x [..., n, D]` -> what `buffers` holds, by name."""
        return {"x": x}

    def decode(self, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        """The inverse of `encode` as far as it goes, `[..., n, D]`."""
        return parts["x"]

    def dot(self, q: Tensor, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        """q `[..., G, D]` with stored keys -> `[..., G, n]`."""
        return dot(q, parts["x"])

    def mix(self, weights: Tensor, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        """Stored values summed with weights `[..., G, n]` -> `[..., G, D]`."""
        return mix(weights, parts["x"])

    # The same products as Triton kernels make them, of slots as `side` describes them.

    turns: ClassVar[bool] = False  # values are stored rotated: their sum is to be `turned_back`

    @property
    def fused(self) -> bool:
        """Whether `side` is all there is of a slot. If not, `dot` and `mix` stay in use on a GPU."""
        return self.exact

    def side(self, parts: dict[str, Tensor], fixed: Fixed) -> Side:
        return raw(parts["x"])

    def asked(self, q: Tensor, fixed: Fixed) -> tuple[Tensor | None, Tensor | None]:
        """What stored keys are multiplied with instead of q `[B, H, G, D]`, and what that misses, `[B, H, G]`."""
        return None, None

    def turned_back(self, y: Tensor, fixed: Fixed) -> Tensor:
        """A sum of stored values `[B, H, G, D]` as it would be of values."""
        return y


class Tier(NamedTuple):
    """A number of slots per KV head and how they are written."""

    slots: int
    keys: Codec
    values: Codec


@dataclass(frozen=True)
class Store:
    """How survivors are represented; this one keeps them as they are."""

    coded: ClassVar[bool] = False  # there is a second tier, of codes
    span: ClassVar[int] = 1  # tokens coded together
    tiers_by_score: ClassVar[bool] = False  # the scores, not recency, decide who is in the first tier
    holds_all: ClassVar[bool] = (
        False  # nothing is dropped, whatever the scorer: the scores decide on tiers only
    )

    def tiers(self, slots: int, sinks: int, head_dim: int) -> list[Tier]:
        """A layer's slots per KV head, the exact ones first."""
        return [Tier(slots, Codec(), Codec())]

    def constants(self, head_dim: int, device: torch.device) -> dict[Codec, Fixed]:
        """What the codecs share over all layers."""
        codecs = {codec for tier in self.tiers(2**20, 0, head_dim) for codec in (tier.keys, tier.values)}
        return {codec: codec.constants(head_dim, device) for codec in codecs}


@dataclass(frozen=True)
class Coded(Store):
    """Sinks and the last `residual` tokens as they are, everything else in codes."""

    residual: int = 32

    coded = True

    def __post_init__(self):
        if self.residual < 0 or self.residual % self.span:
            raise ValueError(f"residual={self.residual} must be a multiple of {self.span}, and not negative")

    @abstractmethod
    def codecs(self, head_dim: int) -> tuple[Codec, Codec]:
        """Of keys and of values."""

    def tiers(self, slots: int, sinks: int, head_dim: int) -> list[Tier]:
        exact = sinks + self.residual
        # Codes come in whole spans, so up to span - 1 more tokens wait among the exact ones.
        coded = max(slots - exact, 0) // self.span * self.span
        keys, values = self.codecs(head_dim)
        return [Tier(min(slots, exact + self.span - 1), Codec(), Codec()), Tier(coded, keys, values)]

    def first_tier(
        self, survives: Tensor, pos: Tensor, sinks: int, scores: Tensor | None, settled: Tensor
    ) -> Tensor:
        """Which survivors (bool `[B, H, n]`, in order of position) go to the first tier.

        scores `[B, H, n]`: where they decide; settled: tokens that are in the second tier already.
        """
        first = survives & (pos < sinks)
        rest = survives & ~first
        waiting = (survives.sum(-1, keepdim=True) - sinks - self.residual).clamp(min=0)
        return first | (rest & (rest.cumsum(-1) > waiting // self.span * self.span))
