"""Survivors of a compression moved together: keys, values and positions in one launch.

Its plain twin is `kernels.gather.gather`. One program = some slots of one KV head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton


@triton.jit
def move(
    k_ptr, v_ptr, pos_ptr, index_ptr, k_out_ptr, v_out_ptr, pos_out_ptr,
    k_b, k_h, k_n, v_b, v_h, v_n, pos_b, pos_h, pos_n, index_b, index_h, index_m,
    heads, m, D: tl.constexpr, WIDE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)  # of [B, H]
    b, h = row // heads, row % heads
    slot = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    inside = slot < m
    source = tl.load(index_ptr + b * index_b + h * index_h + slot * index_m, mask=inside, other=0).to(
        tl.int64
    )
    pos = tl.load(pos_ptr + b * pos_b + h * pos_h + source * pos_n, mask=inside)
    tl.store(pos_out_ptr + row * m + slot, pos, mask=inside)
    d = tl.arange(0, WIDE)
    whole = inside[:, None] & (d < D)
    to = (row * m + slot)[:, None] * D + d
    k = tl.load(k_ptr + b * k_b + h * k_h + source[:, None] * k_n + d, mask=whole)
    tl.store(k_out_ptr + to, k, mask=whole)
    v = tl.load(v_ptr + b * v_b + h * v_h + source[:, None] * v_n + d, mask=whole)
    tl.store(v_out_ptr + to, v, mask=whole)


@triton_op("minikv::gather", mutates_args={})
def gather(k: Tensor, v: Tensor, pos: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """k, v `[B, H, n, D]`, pos `[B, H, n]` at index `[B, H, m]` -> `[B, H, m, D]` twice, `[B, H, m]`."""
    k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (k, v))
    batch, heads, m = index.shape
    d = k.shape[-1]
    wide = triton.next_power_of_2(d)
    slots = max(1, 2048 // wide)
    k_out, v_out = (torch.empty(batch, heads, m, d, dtype=x.dtype, device=x.device) for x in (k, v))
    pos_out = torch.empty(batch, heads, m, dtype=pos.dtype, device=pos.device)
    wrap_triton(move)[triton.cdiv(m, slots), batch * heads](
        k, v, pos, index, k_out, v_out, pos_out,
        *k.stride()[:3], *v.stride()[:3], *pos.stride(), *index.stride(), heads, m,
        D=d, WIDE=wide, SLOTS=slots,
    )  # fmt: skip
    return k_out, v_out, pos_out
