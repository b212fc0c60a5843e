"""KIVI: keys on grids per channel, values on grids per token, the newest tokens exact. arXiv:2402.02750, section 3.

Key channels differ far more from each other than tokens do, so a key grid spans 32 tokens of one channel:

    zero, scale from min and max over 32 tokens,  code = round((k - zero) / scale)

and values have a grid per token and group of channels, as in RTN. Codes come 32 tokens at a time; until then
tokens wait in full precision behind the last `residual` ones.

Ours: after any feed the newest R to R + 31 tokens are exact in keys and values and all older ones are coded,
groups starting at multiples of 32, whatever the chunking; the authors' code leaves 0 to R - 1 exact keys and R
exact values, which depends on how the prompt's length divides. Where tokens are also dropped, survivors are
grouped anew at each compression: ranges are a little wider, and what moves to another group is rounded again.
The authors advise 2 bits for models without shared KV heads and 4 bits for those with.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.codes import dot_channels
from kernels.dispatch import quantize_channels
from kernels.pack import row_words
from kernels.stretches import Side, channel_grid
from minikv.axes import Codec, Coded, Fixed
from minikv.strategies.rtn import TokenGrid, check_bits, group_of, slots_last

SPAN = 32


@dataclass(frozen=True)
class ChannelGrid(Codec):
    """Codes of `bits` with a grid for each channel of SPAN tokens."""

    bits: int

    exact = False
    fused = True
    span = SPAN

    def buffers(
        self, lead: tuple[int, ...], head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> dict[str, Tensor]:
        words = slots_last(lead, row_words(head_dim, self.bits, head_dim), torch.float32, device)
        spans = (*lead[:-1], lead[-1] // SPAN, head_dim)
        scale, zero = (torch.zeros(spans, dtype=torch.float16, device=device) for _ in range(2))
        return {"words": words, "scale": scale, "zero": zero}

    def encode(self, x: Tensor, fixed: Fixed) -> dict[str, Tensor]:
        words, scale, zero = quantize_channels(x, self.bits, SPAN)
        return {"words": words, "scale": scale, "zero": zero}

    def decode(self, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        return self.side(parts, fixed).decode()

    def side(self, parts: dict[str, Tensor], fixed: Fixed) -> Side:
        return channel_grid(parts["words"], parts["scale"], parts["zero"], self.bits, SPAN)

    def dot(self, q: Tensor, parts: dict[str, Tensor], fixed: Fixed) -> Tensor:
        return dot_channels(q, parts["words"], parts["scale"], parts["zero"], self.bits, SPAN)


@dataclass(frozen=True)
class KIVI(Coded):
    """Bits of keys and values; `group` of channels for values as in RTN."""

    residual: int = 128
    k: int = 4
    v: int = 4
    group: int = 0

    span = SPAN

    def __post_init__(self):
        super().__post_init__()
        check_bits("kivi", (2, 3, 4, 8), k=self.k, v=self.v)

    def codecs(self, head_dim: int) -> tuple[Codec, Codec]:
        return ChannelGrid(self.k), TokenGrid(self.v, group_of(head_dim, self.group))
