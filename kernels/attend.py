"""Attention over a cache, in plain torch: one token against its slots, or a chunk against past and itself."""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.plain import dot, in_loops, mix

QUERY_BLOCK = 256  # query rows per masked attention call: bounds the mask to QUERY_BLOCK x n


def visible(pos: Tensor, q_pos: Tensor, window: int | None) -> Tensor:
    """Which keys a query may see; positions are the only mask there is.

    A key counts if its slot is not empty (-1), it is not later than the query and lies within the
    layer's sliding window. Both arguments broadcast against each other.
    """
    ok = (pos >= 0) & (pos <= q_pos)
    return ok if window is None else ok & (pos > q_pos - window)


def masked_softmax(logits: Tensor, ok: Tensor) -> Tensor:
    """Softmax over the last axis where `ok`; a row that sees nothing is all zeros, never NaN."""
    lowest = torch.finfo(logits.dtype).min
    return torch.where(ok, logits, lowest).softmax(-1) * ok


class Stretch(Protocol):
    """Some slots that a token attends to, however they are stored. `...` is `[B, H]`, or `[B, blocks]` of a pool."""

    pos: Tensor  # [..., n] true positions, -1 where a slot is empty

    def dot(self, q: Tensor) -> Tensor:
        """q float32 `[..., G, D]` -> logits `[..., G, n]`."""

    def mix(self, weights: Tensor) -> Tensor:
        """weights float32 `[..., G, n]` -> their sum of values, `[..., G, D]`."""


class Plain(NamedTuple):
    """A stretch of keys and values `[..., n, D]` as they are."""

    k: Tensor
    v: Tensor
    pos: Tensor

    def dot(self, q: Tensor) -> Tensor:
        return dot(q, self.k)

    def mix(self, weights: Tensor) -> Tensor:
        return mix(weights, self.v)


def step_attention(
    q: Tensor, stretches: Sequence[Stretch], q_pos: Tensor, window: int | None
) -> tuple[Tensor, list[Tensor]]:
    """One token's attention over several stretches of slots, as if they were one.

    q `[B, H, G, D]`, q_pos `[B, 1]` -> y `[B, H, G, D]` and the probabilities of each stretch, float32
    `[B, H, G, n]`. A head that sees nothing gives zeros. Nothing is joined; all arithmetic is float32.
    """
    scaled = q.float() * q.shape[-1] ** -0.5
    logits = [seen_logits(part, scaled, q_pos, window) for part in stretches]
    top = finite(reduce(torch.maximum, largest(logits)))  # [B, H, G]
    weights = [(x - top[..., None]).exp() for x in logits]
    scale = inverse(sum(x.sum(-1) for x in weights))[..., None]
    y = sum(part.mix(x) for part, x in zip(stretches, weights, strict=True)) * scale
    return y.to(q.dtype), [x * scale for x in weights]


def pool_attention(
    q: Tensor,
    pool: Stretch,
    owner: Tensor,
    others: Sequence[Stretch],
    q_pos: Tensor,
    window: int | None,
) -> tuple[Tensor, list[Tensor]]:
    """One token's attention over a pool whose blocks belong to heads, and over other stretches.

    q `[B, H, G, D]`; pool, a stretch `[B, blocks, slots of a block]`; owner `[B, blocks]`, the head of each
    block; others `[B, H, n]`; q_pos `[B, 1]` -> y `[B, H, G, D]` and the probabilities, float32, of each of the
    others `[B, H, G, n]` and last of the pool `[B, N, G]`. Each block is one product with its head's
    queries, whatever the split, and heads gather their blocks' partial sums.
    """
    batch, heads, _, d = q.shape
    blocks = owner.shape[1]
    scaled = q.float() * d**-0.5

    def of_owner(x: Tensor) -> Tensor:  # [B, H, ...] -> [B, blocks, ...]
        index = owner.view(batch, blocks, *(1 for _ in x.shape[2:]))
        return x.gather(1, index.expand(batch, blocks, *x.shape[2:]))

    mine = owner[:, None] == torch.arange(heads, device=q.device)[:, None]  # [B, H, blocks]

    def by_owner(x: Tensor) -> Tensor:  # sums [B, blocks, ...] -> [B, H, ...]
        if in_loops(x):  # a scatter would be a loop of single atomic additions
            return (mine.view(*mine.shape, *(1 for _ in x.shape[2:])) * x[:, None]).sum(2)
        index = owner.view(batch, blocks, *(1 for _ in x.shape[2:])).expand_as(x)
        return x.new_zeros(batch, heads, *x.shape[2:]).scatter_add(1, index, x)

    own = seen_logits(pool, of_owner(scaled), q_pos, window)  # [B, blocks, G, slots]
    logits = [seen_logits(part, scaled, q_pos, window) for part in others]
    tops = torch.where(mine[..., None], own.amax(-1)[:, None], -torch.inf).amax(2)  # [B, H, G]
    top = finite(reduce(torch.maximum, largest(logits), tops))
    own_weights = (own - of_owner(top)[..., None]).exp()
    weights = [(x - top[..., None]).exp() for x in logits]
    scale = inverse(by_owner(own_weights.sum(-1)) + sum(x.sum(-1) for x in weights))[..., None]
    y = by_owner(pool.mix(own_weights)) + sum(part.mix(x) for part, x in zip(others, weights, strict=True))
    p = own_weights * of_owner(scale)
    return (y * scale).to(q.dtype), [*(x * scale for x in weights), p.mT.flatten(1, 2)]


def seen_logits(part: Stretch, scaled: Tensor, q_pos: Tensor, window: int | None) -> Tensor:
    """`[..., G, n]`, -inf where a slot is not seen."""
    # Positions are compared as the 32-bit numbers that slots hold: half the vectors of a 64-bit comparison.
    ok = visible(part.pos, q_pos[:, None].to(part.pos.dtype), window)
    return torch.where(ok[..., None, :], part.dot(scaled), -torch.inf)


def largest(logits: Sequence[Tensor]) -> list[Tensor]:
    return [x.amax(-1) for x in logits if x.shape[-1]]


def finite(top: Tensor) -> Tensor:
    """The largest logit, or a number to subtract from -inf where none is seen."""
    return top.clamp(min=torch.finfo(top.dtype).min)


def inverse(mass: Tensor) -> Tensor:
    """1 / mass, 0 where nothing was seen."""
    return torch.where(mass > 0, 1 / mass, 0)


def causal_chunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A first chunk: nothing lies before it. q `[B, G*H, T, D]`, k, v `[B, H, T, D]`."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def chunk_attention(
    q: Tensor, k: Tensor, v: Tensor, q_pos: Tensor, pos: Tensor, window: int | None
) -> Tensor:
    """New tokens attend to the past and, causally, to each other.

    q `[B, G*H, T, D]`; k, v `[B, H, n, D]` with positions `[B, H, n]`, the last T of the n being the new
    tokens themselves; q_pos `[B, T]`, -1 for rows of padding, whose output is zero. Memory for the mask
    grows with n, not with T.
    """
    batch, q_heads, length, d = q.shape
    heads, n = k.shape[1:3]
    grouped = q.unflatten(1, (heads, -1))  # [B, H, G, T, D]
    out = torch.empty_like(grouped)
    for start in range(0, length, QUERY_BLOCK):
        stop = min(start + QUERY_BLOCK, length)
        # Nothing after the block itself can be visible, and in a first chunk nothing before its window.
        end = n - length + stop
        first = max(start + 1 - window, 0) if window is not None and n == length else 0
        block_pos = q_pos[:, None, start:stop, None]
        ok = visible(pos[:, :, None, first:end], block_pos, window)  # [B, H, t, end - first]
        ok = ok[:, :, None].expand(-1, -1, grouped.shape[2], -1, -1).flatten(2, 3)
        # Folding the query heads of a group into the query axis spares repeating k and v.
        y = F.scaled_dot_product_attention(
            grouped[:, :, :, start:stop].flatten(2, 3), k[:, :, first:end], v[:, :, first:end], attn_mask=ok
        )
        out[:, :, :, start:stop] = y.unflatten(2, (grouped.shape[2], -1))
    out = torch.where(q_pos[:, None, None, :, None] >= 0, out, 0)
    return out.view(batch, q_heads, length, d)
