"""How much attention each key got from many queries, without a queries x keys matrix."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attend import QUERY_BLOCK, masked_softmax, visible


def received(q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None) -> Tensor:
    """Attention probabilities summed over queries and averaged over the query heads of a group.

    q `[B, H, G, T, D]` at q_pos `[B, T]` (-1 counts for nothing), k `[B, H, n, D]` at pos `[B, H, n]` ->
    float32 `[B, H, n]`. Works through blocks of queries, so memory grows with n and not with T * n.
    """
    total = torch.zeros(pos.shape, dtype=torch.float32, device=k.device)
    for p, _ in blocks(q, q_pos, k, pos, window):
        total += p.mean(2).sum(2)
    return total


def largest(q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None) -> Tensor:
    """Largest attention probability each key got from any query but its own, over all query heads of its group.

    Shapes as in `received`.
    """
    top = torch.zeros(pos.shape, dtype=torch.float32, device=k.device)
    for p, block_pos in blocks(q, q_pos, k, pos, window):
        others = (block_pos != pos[:, :, None])[:, :, None]  # [B, H, 1, t, n]
        top = torch.maximum(top, (p * others).amax((2, 3)))
    return top


def blocks(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Probabilities `[B, H, G, t, n]` of t queries at a time, and these queries' positions `[B, 1, t, 1]`."""
    keys = k.float().mT[:, :, None]  # [B, H, 1, D, n]
    for start in range(0, q.shape[3], QUERY_BLOCK):
        block = q[:, :, :, start : start + QUERY_BLOCK].float() * q.shape[-1] ** -0.5
        block_pos = q_pos[:, None, start : start + QUERY_BLOCK, None]
        ok = visible(pos[:, :, None], block_pos, window)  # [B, H, t, n]
        yield masked_softmax(block @ keys, ok[:, :, None]), block_pos
