"""Triton form of `kernels.received`: attention each key received, without a queries x keys matrix in memory.

    normalizers   one program = a tile of one head's queries: log-sum-exp over every key a query sees
    sums, tops    one program = a tile of one KV head's keys: what all queries gave them

Logits are in base 2, exp2(x) = e**(x * ln 2), and all sums in float32.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

LOWEST = tl.constexpr(
    -1e30
)  # logit of a key that is not seen: finite, so that differences of two are numbers
NO_WINDOW = 2**31 - 1
TILES = {2: (64, 64), 4: (32, 32)}  # bytes of a number -> queries and keys of a tile, channels at a time


@triton.jit
def logits(
    q_ptr, q_t, q_pos_ptr, q_pos_t, t, length, k_ptr, k_n, pos_ptr, pos_n, i, n, window, scale,
    D, CHANNELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Of one head's queries t and keys i, `[queries, keys]`, and their positions. Mask: `kernels.attend.visible`."""
    x = tl.zeros([TILE, TILE], tl.float32)
    for first in range(0, D, CHANNELS):
        d = first + tl.arange(0, CHANNELS)
        at_q = q_ptr + t.to(tl.int64)[:, None] * q_t + d
        at_k = k_ptr + i.to(tl.int64) * k_n + d[:, None]
        q = tl.load(at_q, mask=(t[:, None] < length) & (d < D), other=0.0)
        k = tl.load(at_k, mask=(i < n) & (d[:, None] < D), other=0.0)
        x += tl.dot(q, k, input_precision="ieee")
    q_pos = tl.load(q_pos_ptr + t * q_pos_t, mask=t < length, other=-1)[:, None]
    pos = tl.load(pos_ptr + i * pos_n, mask=i < n, other=-1)
    ok = (pos >= 0) & (pos <= q_pos) & (pos > q_pos - window)
    return tl.where(ok, x * scale, LOWEST), q_pos, pos


@triton.jit
def normalizers(
    q_ptr, k_ptr, q_pos_ptr, pos_ptr, out_ptr,
    q_b, q_h, q_g, q_t, k_b, k_h, k_n, q_pos_b, q_pos_t, pos_b, pos_h, pos_n,
    heads, group, length, n, window, scale,
    D, CHANNELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Log-sum-exp of each query's logits, `[B, H, G, T]`; infinite where a query sees nothing."""
    first = tl.program_id(0) * TILE
    row = tl.program_id(1).to(tl.int64)  # of [B, H, G]
    b, h, g = row // (heads * group), row // group % heads, row % group
    q_ptr += b * q_b + h * q_h + g * q_g
    k_ptr += b * k_b + h * k_h
    q_pos_ptr += b * q_pos_b
    pos_ptr += b * pos_b + h * pos_h
    t = first + tl.arange(0, TILE)
    top = tl.full([TILE], LOWEST, tl.float32)
    mass = tl.zeros([TILE], tl.float32)
    # Keys after those of the tile's last query are later than all of its queries.
    end = tl.minimum(n - length + first + TILE, n)
    for start in range(0, end, TILE):
        i = start + tl.arange(0, TILE)
        x, _, _ = logits(
            q_ptr, q_t, q_pos_ptr, q_pos_t, t, length, k_ptr, k_n, pos_ptr, pos_n, i, n, window, scale,
            D, CHANNELS, TILE,
        )  # fmt: skip
        higher = tl.maximum(top, tl.max(x, 1))
        # While nothing has been seen the mass counts unseen keys; the first seen one multiplies it by 0.
        mass = mass * tl.exp2(top - higher) + tl.sum(tl.exp2(x - higher[:, None]), 1)
        top = higher
    found = tl.where(top > LOWEST, top + tl.log2(mass), float("inf"))
    tl.store(out_ptr + row * length + t, found, mask=t < length)


@triton.jit
def sums(
    q_ptr, k_ptr, q_pos_ptr, pos_ptr, normalizer_ptr, out_ptr,
    q_b, q_h, q_g, q_t, k_b, k_h, k_n, q_pos_b, q_pos_t, pos_b, pos_h, pos_n,
    heads, group, length, n, window, scale,
    D, CHANNELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Probabilities summed over queries, mean over the group's heads: `[B, H, n]`."""
    first = tl.program_id(0) * TILE
    row = tl.program_id(1).to(tl.int64)  # of [B, H]
    b, h = row // heads, row % heads
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h * k_h
    q_pos_ptr += b * q_pos_b
    pos_ptr += b * pos_b + h * pos_h
    i = first + tl.arange(0, TILE)
    total = tl.zeros([TILE, TILE], tl.float32)
    earliest = tl.maximum(first - (n - length), 0)  # earlier queries stand before all of these keys
    for g in range(group):
        for start in range(earliest, length, TILE):
            t = start + tl.arange(0, TILE)
            x, _, _ = logits(
                q_ptr + g * q_g, q_t, q_pos_ptr, q_pos_t, t, length, k_ptr, k_n, pos_ptr, pos_n, i, n, window,
                scale, D, CHANNELS, TILE,
            )  # fmt: skip
            at = normalizer_ptr + (row * group + g) * length + t
            normalizer = tl.load(at, mask=t < length, other=float("inf"))[:, None]
            total += tl.exp2(x - normalizer)
    tl.store(out_ptr + row * n + i, tl.sum(total, 0) / group, mask=i < n)


@triton.jit
def tops(
    q_ptr, k_ptr, q_pos_ptr, pos_ptr, normalizer_ptr, out_ptr,
    q_b, q_h, q_g, q_t, k_b, k_h, k_n, q_pos_b, q_pos_t, pos_b, pos_h, pos_n,
    heads, group, length, n, window, scale,
    D, CHANNELS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Largest probability from any query but a key's own, over all heads of the group: `[B, H, n]`."""
    first = tl.program_id(0) * TILE
    row = tl.program_id(1).to(tl.int64)  # of [B, H]
    b, h = row // heads, row % heads
    q_ptr += b * q_b + h * q_h
    k_ptr += b * k_b + h * k_h
    q_pos_ptr += b * q_pos_b
    pos_ptr += b * pos_b + h * pos_h
    i = first + tl.arange(0, TILE)
    most = tl.zeros([TILE, TILE], tl.float32)
    earliest = tl.maximum(first - (n - length), 0)
    for g in range(group):
        for start in range(earliest, length, TILE):
            t = start + tl.arange(0, TILE)
            x, q_pos, pos = logits(
                q_ptr + g * q_g, q_t, q_pos_ptr, q_pos_t, t, length, k_ptr, k_n, pos_ptr, pos_n, i, n, window,
                scale, D, CHANNELS, TILE,
            )  # fmt: skip
            at = normalizer_ptr + (row * group + g) * length + t
            normalizer = tl.load(at, mask=t < length, other=float("inf"))[:, None]
            most = tl.maximum(most, tl.where(q_pos == pos, 0.0, tl.exp2(x - normalizer)))
    tl.store(out_ptr + row * n + i, tl.max(most, 0), mask=i < n)


@triton_op("minikv::received", mutates_args={})
def received(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None, solid: bool = False
) -> Tensor:
    """`kernels.received.received`; `solid` changes nothing, as masking costs next to nothing here."""
    grid, arguments = first_pass(q, q_pos, k, pos, window)
    out = torch.empty(pos.shape, dtype=torch.float32, device=k.device)
    wrap_triton(sums)[grid](out_ptr=out, **arguments)
    return out


@triton_op("minikv::largest", mutates_args={})
def largest(q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None) -> Tensor:
    """`kernels.received.largest`."""
    grid, arguments = first_pass(q, q_pos, k, pos, window)
    out = torch.empty(pos.shape, dtype=torch.float32, device=k.device)
    wrap_triton(tops)[grid](out_ptr=out, **arguments)
    return out


def first_pass(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None
) -> tuple[tuple[int, int], dict[str, Tensor | int | float]]:
    """Find the normalizers, and give grid and arguments of the second pass."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    batch, heads, group, length, d = q.shape
    n, (tile, channels) = pos.shape[2], TILES[q.itemsize]
    normalizer = torch.empty(batch, heads, group, length, dtype=torch.float32, device=q.device)
    arguments = dict(
        q_ptr=q, k_ptr=k, q_pos_ptr=q_pos, pos_ptr=pos,
        **strides("q", q, "bhgt"), **strides("k", k, "bhn"),
        **strides("q_pos", q_pos, "bt"), **strides("pos", pos, "bhn"),
        heads=heads, group=group, length=length, n=n,
        window=NO_WINDOW if window is None else window, scale=d**-0.5 / math.log(2),
        D=d, CHANNELS=channels, TILE=tile,
    )  # fmt: skip
    grid = (triton.cdiv(length, tile), batch * heads * group)
    wrap_triton(normalizers)[grid](out_ptr=normalizer, **arguments)
    return (triton.cdiv(n, tile), batch * heads), dict(arguments, normalizer_ptr=normalizer)


def strides(name: str, x: Tensor, axes: str) -> dict[str, int]:
    return {f"{name}_{axis}": x.stride(i) for i, axis in enumerate(axes)}
