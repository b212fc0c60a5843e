"""Attention products of one token with keys and values that are stored as they are.

Matrix products are the definition. Compiled for a CPU they are written as multiply-and-sum instead, which
becomes one loop of vector code that reads 16-bit numbers as they are; the library's products of such thin
matrices stay far below what memory can give, and want a float32 copy.
"""

import torch
from torch import Tensor

from kernels.codes import stored

TILE = 32  # values that are summed in registers: a sum over all slots would leave them for each


def dot(q: Tensor, k: Tensor) -> Tensor:
    """q float32 `[..., G, D]` with keys `[..., n, D]` -> logits `[..., G, n]`, float32."""
    if not in_loops(k):
        return q @ k.float().mT
    wide, q = k.float(), stored(q)
    return torch.stack([(head[..., None, :] * wide).sum(-1) for head in q.unbind(-2)], -2)


def mix(weights: Tensor, v: Tensor) -> Tensor:
    """Values `[..., n, D]` summed with weights float32 `[..., G, n]` -> `[..., G, D]`, float32."""
    if not in_loops(v):
        return weights @ v.float()
    whole = v.shape[-2] // TILE * TILE
    wide, weights = v.float(), stored(weights)
    tiles = wide[..., :whole, :].unflatten(-2, (-1, TILE))  # [..., n / TILE, TILE, D]
    heads = weights.unbind(-2)
    parts = [(head[..., :whole].unflatten(-1, (-1, TILE))[..., None] * tiles).sum(-2) for head in heads]
    y = stored(torch.stack(parts, -3)).sum(-2)
    if whole == v.shape[-2]:
        return y
    return y + torch.stack([(head[..., whole:, None] * wide[..., whole:, :]).sum(-2) for head in heads], -2)


def in_loops(x: Tensor) -> bool:
    return torch.compiler.is_compiling() and x.device.type == "cpu"
