"""What one token attends to, as plain data: stretches of slots whose keys and values may be packed, and the twin
of `kernels.triton_attend`. A stretch belongs to heads, `[B, H, n]`, or is a pool `[B, N]` whose blocks do.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.attend import masked_softmax, visible
from kernels.codes import decode_channels, decode_levels, decode_tokens

RAW, TOKENS, CHANNELS, LEVELS = range(4)


class Side(NamedTuple):
    """Keys or values as they are stored; made by one of the four functions below. `...` is `[B, H]` or `[B]`."""

    kind: int
    bits: int  # 32 for values as they are, whatever their dtype
    group: int  # channels that share words
    span: int  # slots that share a scale
    d: int
    data: Tensor  # values [..., n, D] or packed words [..., n, W], bits in float32
    scale: Tensor | None = None
    zero: Tensor | None = None
    levels: Tensor | None = None

    def decode(self) -> Tensor:
        """Float32 `[..., n, D]`."""
        if self.kind == TOKENS:
            return decode_tokens(self.data, self.scale, self.zero, self.bits, self.group)
        if self.kind == CHANNELS:
            return decode_channels(self.data, self.scale, self.zero, self.bits, self.span)
        if self.kind == LEVELS:
            return decode_levels(self.data, self.scale, self.levels, self.bits, self.d)
        return self.data.float()


def raw(x: Tensor) -> Side:
    return Side(RAW, 32, x.shape[-1], 1, x.shape[-1], x)


def token_grid(words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Side:
    """A grid per token and group of channels; scale and zero `[..., n, D / group]`, zero None if symmetric."""
    return Side(TOKENS, bits, group, 1, scale.shape[-1] * group, words, scale, zero)


def channel_grid(words: Tensor, scale: Tensor, zero: Tensor, bits: int, span: int) -> Side:
    """A grid per channel and `span` tokens; scale and zero `[..., n / span, D]`."""
    return Side(CHANNELS, bits, scale.shape[-1], span, scale.shape[-1], words, scale, zero)


def level_table(words: Tensor, scale: Tensor, levels: Tensor, bits: int, d: int) -> Side:
    """Levels float32 `[2 ** bits]` times a scale per token `[..., n, 1]`."""
    return Side(LEVELS, bits, d, 1, d, words, scale, None, levels)


class Stretch(NamedTuple):
    """Slots that a token attends to."""

    k: Side
    v: Side
    pos: Tensor  # int [..., n], -1 where a slot is empty
    # Of a pool, int [B, blocks]: the head of each block. The blocks of a head are neighbours.
    owner: Tensor | None = None
    q: Tensor | None = None  # its own queries [B, H, G, D], where keys are stored rotated or scaled
    bias: Tensor | None = None  # [B, H, G], what to add to q . k where keys are stored less an offset
    turned: bool = False  # values are stored rotated: their sum is kept apart, for the caller to rotate back

    @property
    def n(self) -> int:
        """Slots per head, or of the pool."""
        return self.pos.shape[-1]


def attend(
    q: Tensor, stretches: Sequence[Stretch], q_pos: Tensor, window: int | None, want_p: bool = False
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """One token's attention over all stretches as if they were one, decoding everything: the definition.

    q `[B, H, G, D]`, q_pos `[B, 1]` -> y `[B, H, G, D]`, what the turned stretches add to it once rotated back
    (None where there are none), and if asked the probabilities of each stretch, float32 `[B, H, G, n]`, of a
    pool `[B, N, G]`. A head that sees nothing gives zeros.
    """
    batch, heads, _, d = q.shape
    logits, seen, values = [], [], []
    for part in stretches:
        k, v = part.k.decode(), part.v.decode()
        ok = visible(part.pos, q_pos if part.owner is not None else q_pos[:, None], window)
        if part.owner is not None:  # every head sees the pool, but for the blocks of others
            owner = part.owner.repeat_interleave(part.n // part.owner.shape[1], 1)  # [B, N]
            ok = ok[:, None] & (owner[:, None] == torch.arange(heads, device=q.device)[:, None])
            k, v = k[:, None], v[:, None]
        products = (q if part.q is None else part.q).float() @ k.mT  # [B, H, G, n]
        logits.append((products if part.bias is None else products + part.bias[..., None]) * d**-0.5)
        seen.append(ok[:, :, None])
        values.append(v)
    p = masked_softmax(torch.cat(logits, -1), torch.cat(seen, -1)).split([part.n for part in stretches], -1)
    sums = [torch.zeros(q.shape, device=q.device), torch.zeros(q.shape, device=q.device)]
    for share, v, part in zip(p, values, stretches, strict=True):
        sums[part.turned] = sums[part.turned] + share @ v
    y, turned = (x.to(q.dtype) for x in sums)
    found = [x if part.owner is None else x.sum(1).mT for x, part in zip(p, stretches, strict=True) if want_p]
    return y, turned if any(part.turned for part in stretches) else None, found
