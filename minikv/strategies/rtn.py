"""RTN: round to nearest, each token on its own grid. The baseline of KIVI (arXiv:2402.02750, section 3.1).

For every token, KV head and group of g channels, with b bits:

    zero = min x,  scale = (max x - min x) / (2^b - 1),  code = round((x - zero) / scale)

scale and zero in float16, so b + 32 / g bits per number. Symmetric grids have no zero: scale = max |x| /
(2^(b-1) - 1). Nothing joins tokens, so any of them can be dropped or replaced, and codes of a token that
stays never change. Eight bits lose next to nothing; at two the outliers among key channels hurt.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.codes import dot_tokens, mix_tokens
from kernels.dispatch import quantize_tokens
from kernels.pack import row_words
from kernels.stretches import Side, token_grid
from minikv.axes import Codec, Coded, Fixed

GROUP = 32  # channels of a grid where the store does not say


@dataclass(frozen=True)
class TokenGrid(Codec):
    """Codes of `bits` with a grid for each token and `group` of channels."""

    bits: int
    group: int
    symmetric: bool = False

    exact = False
    fused = True

    def buffers(
        self, lead: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        words = slots_last(lead, row_words(head_dim, self.bits, self.group), torch.float32, device)
        scale, zero = (slots_last(lead, head_dim // self.group, torch.float16, device) for _ in range(2))
        return {"words": words, "scale": scale} | ({} if self.symmetric else {"zero": zero})

    def encode(self, x: Tensor, fixed: Fixed) -> dict[str, Tensor]:
        words, scale, zero = quantize_tokens(x, self.bits, self.group, self.symmetric)
        return {"words": words, "scale": scale} | ({} if zero is None else {"zero": zero})

    def decode(self, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        return self.side(parts, fixed).decode()

    def side(self, parts: dict[str, Tensor], fixed: Fixed) -> Side:
        return token_grid(parts["words"], parts["scale"], parts.get("zero"), self.bits, self.group)

    def dot(self, q: Tensor, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        return dot_tokens(q, parts["words"], parts["scale"], parts.get("zero"), self.bits, self.group)

    def mix(self, weights: Tensor, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        return mix_tokens(weights, parts["words"], parts["scale"], parts.get("zero"), self.bits, self.group)


@dataclass(frozen=True)
class RTN(Coded):
    """Bits of keys and values; group 0 is 32 channels, or the whole head where 32 does not divide it."""

    k: int = 4
    v: int = 4
    group: int = 0
    symmetric: bool = False

    def __post_init__(self):
        super().__post_init__()
        check_bits("rtn", k=self.k, v=self.v)

    def codecs(self, head_dim: int) -> tuple[Codec, Codec]:
        group = group_of(head_dim, self.group)
        return tuple(TokenGrid(bits, group, self.symmetric) for bits in (self.k, self.v))


def slots_last(lead: tuple[int, ...], width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros `[*lead, width]` in whose memory the slots are neighbours, as attention reads them."""
    return torch.zeros(*lead[:-1], width, lead[-1], dtype=dtype, device=device).mT


def group_of(head_dim: int, group: int) -> int:
    """A group size for a head, checked. Raises ValueError if groups do not divide the head."""
    chosen = group or (GROUP if head_dim % GROUP == 0 else head_dim)
    if head_dim % chosen:
        raise ValueError(
            f"groups of {group} channels do not divide a head of {head_dim}; use a divisor of {head_dim}, or group=0"
        )
    return chosen


def check_bits(name: str, allowed: tuple[int, ...] = (2, 3, 4, 8), **bits: int) -> None:
    for key, value in bits.items():
        if value not in allowed:
            raise ValueError(f"{name}: {key}={value} bits; possible are {', '.join(map(str, allowed))}")
