"""Attention over a cache, in plain torch: one token against its slots, or a chunk against past and itself."""

import torch
import torch.nn.functional as F
from torch import Tensor

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


def step_attention(
    q: Tensor,
    parts: list[tuple[Tensor, Tensor, Tensor]],
    q_pos: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    """One token's attention over several stretches of slots, as if they were one.

    q `[B, H, G, D]`, each part (k `[B, H, n, D]`, v `[B, H, n, D]`, pos `[B, H, n]`), q_pos `[B, 1]` ->
    y `[B, H, G, D]` and the probabilities, float32 `[B, H, G, sum of n]`. Logits are joined, keys and
    values never are; all arithmetic is float32.
    """
    scaled = q.float() * q.shape[-1] ** -0.5
    logits = torch.cat([scaled @ k.float().mT for k, _, _ in parts], dim=-1)  # [B, H, G, n]
    pos = torch.cat([pos for _, _, pos in parts], dim=-1)  # [B, H, n]
    ok = visible(pos, q_pos[:, None], window)
    p = masked_softmax(logits, ok[:, :, None])
    sizes = [k.shape[2] for k, _, _ in parts]
    y = [share @ v.float() for share, (_, v, _) in zip(p.split(sizes, -1), parts, strict=True)]
    return sum(y).to(q.dtype), p


def pool_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pos: Tensor,
    owner: Tensor,
    fresh_k: Tensor,
    fresh_v: Tensor,
    fresh_pos: Tensor,
    q_pos: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """One token's attention over a pool whose blocks belong to heads, and over its fresh tokens.

    q `[B, H, G, D]`; k, v `[B, N, D]`, pos `[B, N]`, owner `[B, N / block]` the head of each block; fresh_k,
    fresh_v `[B, H, r, D]`, fresh_pos `[B, H, r]`; q_pos `[B, 1]` -> y `[B, H, G, D]` and the probabilities of
    pool `[B, N, G]` and fresh slots `[B, H, G, r]`, float32. Each block is one multiply-and-sum with its
    head's queries, whatever the split, and heads gather their blocks' partial sums.
    """
    batch, heads, group, d = q.shape
    blocks = owner.shape[1]
    scaled = q.float() * d**-0.5
    lowest = torch.finfo(torch.float32).min

    def of_owner(x: Tensor) -> Tensor:  # [B, H, ...] -> [B, blocks, ...]
        index = owner.view(batch, blocks, *(1 for _ in x.shape[2:]))
        return x.gather(1, index.expand(batch, blocks, *x.shape[2:]))

    def by_owner(x: Tensor) -> Tensor:  # sums [B, blocks, ...] -> [B, H, ...]
        index = owner.view(batch, blocks, *(1 for _ in x.shape[2:])).expand_as(x)
        return x.new_zeros(batch, heads, *x.shape[2:]).scatter_add(1, index, x)

    ok = visible(pos, q_pos, window).view(batch, blocks, 1, -1)  # [B, blocks, 1, slots of a block]
    logits = of_owner(scaled) @ k.float().view(batch, blocks, -1, d).mT  # [B, blocks, G, slots]
    logits = torch.where(ok, logits, lowest)
    fresh_ok = visible(fresh_pos, q_pos[:, None], window)[:, :, None]  # [B, H, 1, r]
    fresh_logits = torch.where(fresh_ok, scaled @ fresh_k.float().mT, lowest)  # [B, H, G, r]
    top = fresh_logits.amax(-1)
    index = owner[..., None].expand(batch, blocks, group)
    top = top.scatter_reduce(1, index, logits.amax(-1), "amax")  # [B, H, G]
    weights = (logits - of_owner(top)[..., None]).exp() * ok
    fresh_weights = (fresh_logits - top[..., None]).exp() * fresh_ok
    mass = by_owner(weights.sum(-1)) + fresh_weights.sum(-1)  # [B, H, G], 0 where nothing is seen
    scale = torch.where(mass > 0, 1 / mass, 0)
    p = weights * of_owner(scale)[..., None]
    fresh_p = fresh_weights * scale[..., None]
    y = by_owner(p @ v.float().view(batch, blocks, -1, d)) + fresh_p @ fresh_v.float()
    return y.to(q.dtype), p.mT.flatten(1, 2), fresh_p


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
