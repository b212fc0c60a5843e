"""A few rows of activations times a matrix whose weights are stored as 4- or 8-bit codes.

A weight is `scale * code + zero`, with float16 scale and zero for each group of a row: 32 neighbouring
channels, or the whole row. Codes are packed into 32-bit words so that a loop over LANES words meets LANES
neighbouring channels at every shift. What one such loop holds is a block: 32 channels of 8 bits or 64 of 4,
and rows are filled up to whole blocks.

    channel = (block * shifts + shift) * LANES + lane        code = words[row, block, lane] >> shift * bits

The words lie in a float32 tensor, as bits and never as numbers: compiled for AVX2, floats are loaded at
full speed and integers through the stack.

`dequantize_rows` and a matrix product are the definition; `matvec` is the same in one pass over the words.
"""

from functools import reduce
from operator import add, or_

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.codes import stored

LANES = 8  # floats in a vector of AVX2
GROUP = 32  # channels that share a scale where a row has several
SHIFTS_PER_GROUP = GROUP // LANES
MANTISSA = 23  # bits of a float32 behind the point
ONE = 0x3F800000  # the bits of 1.0


def quantize_rows(w: Tensor, bits: int, grouped: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Weights `[N, K]` -> words `[N, blocks, LANES]`, scale and zero `[N, groups]`; one group if not `grouped`.

    The codes of a group span its least to its greatest weight, so every weight is met within half a scale
    (or within 1e-5, where the scale is too small for float16).
    """
    levels = 2**bits - 1
    w = F.pad(w.float(), (0, -w.shape[1] % (LANES * 32 // bits)))
    groups = w.view(len(w), -1, GROUP) if grouped else w[:, None]  # [N, groups, channels]
    low, high = groups.aminmax(dim=-1)
    zero = low.half()
    scale = ((high - zero) / levels).half().clamp(min=2.0**-24)  # equal weights span nothing
    codes = ((groups - zero[..., None]) / scale.float()[..., None]).round_().clamp_(0, levels)
    return pack_rows(codes.view_as(w).int(), bits), scale, zero


def dequantize_rows(words: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The weights that `quantize_rows` stands for, float32 `[N, K]` with K filled up to whole blocks."""
    codes = unpack_rows(words, bits).float()
    codes.view(*scale.shape, -1).mul_(scale.float()[..., None]).add_(zero.float()[..., None])
    return codes


def pack_rows(codes: Tensor, bits: int) -> Tensor:
    """Codes int32 `[N, K]`, 0 to 2**bits - 1, K a multiple of a block -> words `[N, blocks, LANES]`."""
    by_shift = codes.view(len(codes), -1, 32 // bits, LANES).unbind(2)
    return reduce(or_, (part << shift * bits for shift, part in enumerate(by_shift))).view(torch.float32)


def unpack_rows(words: Tensor, bits: int) -> Tensor:
    """The inverse of `pack_rows`, int32 `[N, K]`."""
    moved = [words.view(torch.int32) >> shift for shift in range(0, 32, bits)]
    return torch.stack(moved, dim=2).bitwise_and_(2**bits - 1).flatten(1)


def matvec(x: Tensor, words: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """x `[M, K]` times the transposed weights, in float32 -> `[M, N]`. For torch.compile and small M.

    sum x * weight = scale * sum x * code + zero * sum x, group by group. A code comes as u = 1 + code / 2^bits; the
    ones are taken off for four products at a time, while the sums are still small.
    """
    n_rows, blocks, _ = words.shape
    shifts = 32 // bits
    x = stored(F.pad(x.float(), (0, blocks * shifts * LANES - x.shape[1])))
    x = x.view(len(x), blocks, shifts, LANES)
    # One sum for each group of a block. They share a loop; as one expression they would be too long for
    # inductor, which then writes all products to memory first.
    products = [units_at(words, shift, bits)[:, None] * x[:, :, shift] for shift in range(shifts)]
    lanes = []
    for at in range(0, shifts, SHIFTS_PER_GROUP):
        ones = stored(reduce(add, x[:, :, at : at + SHIFTS_PER_GROUP].unbind(2)))  # [M, blocks, LANES]
        lanes.append(reduce(add, products[at : at + SHIFTS_PER_GROUP]) - ones)
    scale = scale.float() * 2**bits
    if scale.shape[1] == 1:
        dot = reduce(add, (part.sum((-1, -2)) for part in lanes)) * scale  # [N, M]
    else:
        scales = scale.view(n_rows, 1, blocks, -1).split(1, dim=-1)  # each [N, 1, blocks, 1]
        dot = reduce(add, ((part * s).sum((-1, -2)) for part, s in zip(lanes, scales, strict=True)))
    sums = x.view(len(x), scale.shape[1], -1).sum(-1)  # [M, groups]
    return stored((dot + (zero.float()[:, None] * sums).sum(-1)).mT)


def units_at(words: Tensor, shift: int, bits: int) -> Tensor:
    """1 + code / 2**bits for the codes at one shift of all words, float32 `[N, blocks, LANES]`.

    Vector code converts integers slowly, so the code is made the beginning of a mantissa.
    """
    words, right = words.view(torch.int32), shift * bits - (MANTISSA - bits)
    moved = words >> right if right >= 0 else words << -right
    return (moved & ((2**bits - 1) << (MANTISSA - bits)) | ONE).view(torch.float32)
