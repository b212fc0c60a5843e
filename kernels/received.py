"""How much attention each key got from many queries, without a queries x keys matrix."""

from collections.abc import Iterator

import torch
from torch import Tensor

from kernels.attend import visible

ROWS = 64  # queries at a time: few enough that a block of probabilities stays near the processor


def received(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None, solid: bool = False
) -> Tensor:
    """Attention probabilities summed over queries and averaged over the query heads of a group.

    q `[B, H, G, T, D]` at q_pos `[B, T]` (-1 counts for nothing), k `[B, H, n, D]` at pos `[B, H, n]` ->
    float32 `[B, H, n]`. The last T keys are those of the queries or later in order than theirs. `solid`
    says that all keys before them are tokens and seen by every query, which saves masking them. Works through
    blocks of queries, so memory grows with n and not with T * n.
    """
    total = torch.zeros(pos.shape, dtype=torch.float32, device=k.device)
    for p, block_pos in blocks(q, q_pos, k, pos, window, solid):
        total[:, :, : p.shape[-1]] += over_queries(p, block_pos >= 0)
    return total


def over_queries(p: Tensor, counts: Tensor) -> Tensor:
    """Probabilities `[B, H, G, t, n]` -> sum over the queries that count (bool `[B, t]`), mean over G: `[B, H, n]`."""
    weight = (counts.float() / p.shape[2])[:, None, None].expand(*p.shape[:4]).flatten(2)  # [B, H, G * t]
    return (weight[:, :, None] @ p.flatten(2, 3))[:, :, 0]


def largest(q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None) -> Tensor:
    """Largest attention probability each key got from any query but its own, over all query heads of its group.

    Shapes as in `received`.
    """
    top = torch.zeros(pos.shape, dtype=torch.float32, device=k.device)
    for p, block_pos in blocks(q, q_pos, k, pos, window):
        n = p.shape[-1]
        at = block_pos[:, None, :, None]  # [B, 1, t, 1]
        others = (at != pos[:, :, None, :n]) & (at >= 0)
        top[:, :, :n] = torch.maximum(top[:, :, :n], (p * others[:, :, None]).amax((2, 3)))
    return top


def blocks(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None, solid: bool = False
) -> Iterator[tuple[Tensor, Tensor]]:
    """Probabilities `[B, H, G, t, m]` of t queries at a time over the first m keys, and their positions `[B, t]`.

    Rows of queries that do not exist (-1) hold anything.
    """
    batch, heads, group, length, d = q.shape
    n, keys, lowest = k.shape[2], k.float().mT, torch.finfo(torch.float32).min
    for start in range(0, length, ROWS):
        stop = min(start + ROWS, length)
        end = n - length + stop  # later keys stand after all of these queries
        first = end - (stop - start) if solid and window is None else 0
        block = q[:, :, :, start:stop].float().flatten(2, 3) * d**-0.5  # [B, H, G * t, D]
        logits = (block @ keys[:, :, :, :end]).unflatten(2, (group, -1))
        ok = visible(pos[:, :, None, first:end], q_pos[:, None, start:stop, None], window)
        logits[..., first:].masked_fill_(~ok[:, :, None], lowest)
        yield logits.softmax(-1), q_pos[:, start:stop]
