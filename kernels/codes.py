"""Attention products with keys and values that stay packed: uniform grids per token or per channel, or levels.

`x^ = code * scale + zero`. Every product is written twice with one meaning: for the compiler as one
multiply-and-sum that unpacks in registers, eagerly as a loop over tiles of `TILE` slots, so that neither ever
holds a whole cache unpacked. Leading axes `...` are batch and KV head, or batch and block of a ragged pool.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.pack import shifts, split_planes, unit_values, unpack

TILE = 1024  # slots unpacked at a time
HALF_MAX = torch.finfo(torch.float16).max


# Grids: scale and zero in float16.


def grid(x: Tensor, bits: int, symmetric: bool, dim: int) -> tuple[Tensor, Tensor | None]:
    """Scale and zero for codes of `x` along `dim`, kept as size 1: min-max, or symmetric about 0 (zero is None).

    A constant stretch gets scale 0 and is its zero.
    """
    x = x.float()
    if symmetric:
        scale = x.abs().amax(dim, keepdim=True) / (2 ** (bits - 1) - 1)
        return scale.clamp(max=HALF_MAX).half(), None
    low, high = x.amin(dim, keepdim=True), x.amax(dim, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return scale.clamp(max=HALF_MAX).half(), low.clamp(-HALF_MAX, HALF_MAX).half()


def encode_grid(x: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """Nearest codes, int32; all shapes broadcast."""
    scale = scale.float()
    steps = (x.float() - zero_of(scale, zero, bits)) / torch.where(scale > 0, scale, 1)
    lowest = 0 if zero is not None else 1  # a symmetric grid has as many steps below 0 as above
    codes = steps.round().clamp(lowest, 2**bits - 1)
    return torch.where(scale > 0, codes, 0).to(torch.int32)


def decode_grid(codes: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    return codes * scale.float() + zero_of(scale, zero, bits)


def zero_of(scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
    """What code 0 means, float32; a symmetric grid is centred on code 2**(bits - 1)."""
    return -scale.float() * 2 ** (bits - 1) if zero is None else zero.float()


def decode_tokens(words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tensor:
    """Grids per token: words `[..., n, W]`, scale and zero `[..., n, D / group]` -> float32 `[..., n, D]`."""
    codes = unpack(words, bits, group).unflatten(-1, (-1, group))
    zero = None if zero is None else zero[..., None]
    return decode_grid(codes, scale[..., None], zero, bits).flatten(-2)


def decode_channels(words: Tensor, scale: Tensor, zero: Tensor, bits: int, span: int) -> Tensor:
    """Grids per channel and `span` tokens: scale and zero `[..., n / span, D]` -> float32 `[..., n, D]`."""
    codes = unpack(words, bits, scale.shape[-1]).unflatten(-2, (-1, span))
    return decode_grid(codes, scale[..., None, :], zero[..., None, :], bits).flatten(-3, -2)


def decode_levels(words: Tensor, scale: Tensor, levels: Tensor, bits: int, d: int) -> Tensor:
    """A table of levels and one scale per token `[..., n, 1]` -> float32 `[..., n, D]`."""
    return levels[unpack(words, bits, d)] * scale.float()


# Products: q `[..., G, D]` float32 -> logits `[..., G, n]`; weights `[..., G, n]` float32 -> `[..., G, D]`.


def dot_tokens(q: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tensor:
    """`q . x^` for grids per token; see `decode_tokens`."""
    if not torch.compiler.is_compiling():
        return dot_tiles(q, words.shape[-2], TILE, token_tile(words, scale, zero, bits, group))
    grouped = q.unflatten(-1, (-1, group))  # [..., G, D / group, group]
    planes = lanes(words, bits, group)
    heads = []
    for head in range(q.shape[-2]):
        mine, total = grouped[..., head, :, :], 0
        for weight, values in planes:
            spread = spread_over(mine, values.shape[-3:-1])  # [..., D / group, 32 / width, W]
            sums = (spread[..., None] * values).sum((-3, -2)) - mine.sum(-1, keepdim=True)
            total = total + weight * sums  # [..., D / group, n]
        heads.append(total)
    codes = torch.stack(heads, -3)  # [..., G, D / group, n]
    step, zeros = scale.float().mT[..., None, :, :], zero_of(scale, zero, bits).mT[..., None, :, :]
    return (codes * step + grouped.sum(-1, keepdim=True) * zeros).sum(-2)


def mix_tokens(w: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tensor:
    """`weights . x^` for grids per token."""
    if not torch.compiler.is_compiling():
        return mix_tiles(w, TILE, token_tile(words, scale, zero, bits, group))
    step, zeros = scale.float().mT[..., None, :, :], zero_of(scale, zero, bits).mT[..., None, :, :]
    weights = stored(w[..., None, :] * step)  # [..., G, D / group, n]
    codes = mix_lanes(weights, lanes(words, bits, group), group)  # [..., G, D / group, group]
    return (codes + (w[..., None, :] * zeros).sum(-1, keepdim=True)).flatten(-2)


def dot_channels(q: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bits: int, span: int) -> Tensor:
    """`q . x^` for grids per channel and `span` tokens; see `decode_channels`. The scale goes to the query."""
    if not torch.compiler.is_compiling():

        def decode(first: int, end: int) -> Tensor:
            over = (..., slice(first // span, end // span), slice(None))
            return decode_channels(words[..., first:end, :], scale[over], zero[over], bits, span)

        return dot_tiles(q, words.shape[-2], TILE // span * span, decode)
    scaled = stored(q[..., None, :] * scale.float()[..., None, :, :])  # [..., G, n / span, D]
    heads = []
    for head in range(q.shape[-2]):
        mine, total = scaled[..., head, :, :], 0
        for weight, values in lanes(words, bits, q.shape[-1]):
            values = values.squeeze(-4).unflatten(-1, (-1, span))  # [..., 32 / width, W, n / span, span]
            spread = spread_over(mine, values.shape[-4:-2]).movedim(-3, -1)  # [..., 32 / width, W, n / span]
            sums = (spread[..., None] * values).sum((-4, -3)) - mine.sum(-1)[..., None]
            total = total + weight * sums  # [..., n / span, span]
        heads.append(total)
    codes = torch.stack(heads, -3).flatten(-2)  # [..., G, n]
    return codes + (q @ zero.float().mT).repeat_interleave(span, -1)


def dot_levels(q: Tensor, words: Tensor, scale: Tensor, levels: Tensor, bits: int) -> Tensor:
    """`q . x^` for levels; q is rotated as the keys are. See `decode_levels`."""
    if torch.compiler.is_compiling():
        values = chosen(words, levels, bits, q.shape[-1])
        heads = [(head[..., None] * values).sum(-2) for head in stored(q).unbind(-2)]
        return torch.stack(heads, -2) * scale.float().mT
    return dot_tiles(q, words.shape[-2], TILE, level_tile(q.shape[-1], words, scale, levels, bits))


def mix_levels(w: Tensor, words: Tensor, scale: Tensor, levels: Tensor, bits: int, d: int) -> Tensor:
    """`weights . x^` for levels, still rotated."""
    if torch.compiler.is_compiling():
        values = chosen(words, levels, bits, d)
        heads = stored(w * scale.float().mT).unbind(-2)
        return torch.stack([(head[..., None, :] * values).sum(-1) for head in heads], -2)
    return mix_tiles(w, TILE, level_tile(d, words, scale, levels, bits))


# Tiles: `decode(first, end)` gives float32 `[..., end - first, D]`.

Tile = Callable[[int, int], Tensor]


def dot_tiles(q: Tensor, n: int, size: int, decode: Tile) -> Tensor:
    parts = [q @ decode(first, min(first + size, n)).mT for first in range(0, n, size)]
    return torch.cat(parts, -1) if parts else q.new_zeros(*q.shape[:-1], 0)


def mix_tiles(w: Tensor, size: int, decode: Tile) -> Tensor:
    n = w.shape[-1]
    starts = range(0, n, size)
    return sum(w[..., i : i + size] @ decode(i, min(i + size, n)) for i in starts) if n else w @ decode(0, 0)


def token_tile(words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group: int) -> Tile:
    def decode(first: int, end: int) -> Tensor:
        part = None if zero is None else zero[..., first:end, :]
        return decode_tokens(words[..., first:end, :], scale[..., first:end, :], part, bits, group)

    return decode


def level_tile(d: int, words: Tensor, scale: Tensor, levels: Tensor, bits: int) -> Tile:
    def decode(first: int, end: int) -> Tensor:
        return decode_levels(words[..., first:end, :], scale[..., first:end, :], levels, bits, d)

    return decode


# The pieces of the compiled form.


def lanes(words: Tensor, bits: int, group: int) -> list[tuple[int, Tensor]]:
    """Per plane what a unit of it weighs, and its values `1 + code / 2**width`: `[..., D / group, 32 / width, W, n]`."""
    found, low = [], 0
    for width, plane in split_planes(words, bits, group):
        found.append((2 ** (low + width), unit_values(plane.movedim(-3, -1), width)))
        low += width
    return found


def spread_over(q: Tensor, shape: tuple[int, ...]) -> Tensor:
    """q `[..., group]` in the order of a plane's lanes: `[..., 32 / width, W]`, zeros where words are not full."""
    return F.pad(q, (0, shape[0] * shape[1] - q.shape[-1])).unflatten(-1, shape)


def mix_lanes(weights: Tensor, planes: list[tuple[int, Tensor]], group: int) -> Tensor:
    """weights `[..., G, D / group, n]` times the planes' codes -> `[..., G, D / group, group]`."""
    heads = []
    for head in range(weights.shape[-3]):
        mine, total = weights[..., head, :, :], 0
        for weight, values in planes:
            sums = (mine[..., None, None, :] * values).sum(-1) - mine.sum(-1)[..., None, None]
            total = total + weight * sums.flatten(-2)[..., :group]
        heads.append(total)
    return torch.stack(heads, -3)


def chosen(words: Tensor, levels: Tensor, bits: int, d: int) -> Tensor:
    """Levels `[..., d, n]`. Each bit chooses a half of the table: a lookup would go lane by lane."""
    codes, low = 0, 0
    for width, plane in split_planes(words, bits, d):
        places = shifts(width, words.device)[:, None, None]
        lane = (plane.squeeze(-2).mT[..., None, :, :] >> places) & (2**width - 1)  # [..., 32 / width, W, n]
        codes = codes + (lane.flatten(-3, -2)[..., :d, :] << low)
        low += width

    def among(first: int, bit: int) -> Tensor:
        if bit < 0:
            return levels[first]
        half = 1 << bit
        return torch.where((codes & half) != 0, among(first + half, bit - 1), among(first, bit - 1))

    return among(0, bits - 1)


def stored(x: Tensor) -> Tensor:
    """x, contiguous. Compiled code writes it to memory here; otherwise it is computed anew for each of its readers."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())
