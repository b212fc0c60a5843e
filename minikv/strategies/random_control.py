"""Two controls that look at nothing but the position. A method that does not beat them has learnt nothing.

`Random` draws every token's score by hashing seed, KV head and position. A token so keeps its score through
all compressions, and what is kept at last is a uniform sample of all tokens ever seen; a generator would draw
anew each time and favour the late ones. All layers draw the same.

`Stride` keeps evenly spread positions. A score does not know the budget, so every k-th token cannot be asked
for; the van der Corput sequence (the position's bits read backwards) gives it at every budget: multiples of
2^j come before all other multiples of 2^(j-1), hence gaps differ by a factor of two at most, and where the
budget is 1 / 2^j of the tokens all are 2^j.
"""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from minikv.axes import Scorer
from minikv.seen import Seen

BITS = 24  # integers that float32 tells apart, and positions that a model may reach

Integer = TypeVar("Integer", int, Tensor)


@dataclass(frozen=True)
class Random(Scorer):
    """Uniform in 0..1 by seed, KV head and position."""

    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"random takes a seed from 0 to 2**32 - 1, not {self.seed}")

    def score(self, seen: Seen) -> Tensor:
        heads = torch.arange(seen.pos.shape[1], device=seen.pos.device)[:, None]  # [H, 1]
        drawn = mixed(mixed(mixed(self.seed) + heads) + seen.pos)  # [B, H, n]
        return (drawn >> (32 - BITS)).float() / 2**BITS


@dataclass(frozen=True)
class Stride(Scorer):
    """Evenly spread positions at any budget."""

    def score(self, seen: Seen) -> Tensor:
        backwards = torch.zeros_like(seen.pos)
        for bit in range(BITS):
            backwards = backwards * 2 + (seen.pos >> bit & 1)
        return -backwards.float()


def mixed(x: Integer) -> Integer:
    """A 32-bit hash. Its products stay below 2^63, so that int64 never overflows."""
    x = (x + 0x9E3779B9) & 0xFFFFFFFF
    for _ in range(2):
        x = (x ^ (x >> 16)) * 0x45D9F3B & 0xFFFFFFFF
    return x ^ (x >> 16)
