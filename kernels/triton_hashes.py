"""Triton form of `kernels.hashes`: signs and Hamming distances, one program = some vectors or some codes of a head."""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

VECTORS, CODES = 64, 1024  # of one program
CHANNELS = 32  # multiplied at a time


@triton.jit
def signs(
    x_ptr, directions_ptr, out_ptr, n, D: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr,
    VECTORS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)).to(tl.int64)[:, None]
    bit = tl.arange(0, WIDE)
    along = tl.zeros([VECTORS, WIDE], tl.float32)
    for first in range(0, D, CHANNELS):
        d = first + tl.arange(0, CHANNELS)
        x = tl.load(x_ptr + i * D + d, mask=(i < n) & (d < D), other=0.0).to(tl.float32)
        inside = (d[:, None] < D) & (bit < BITS)
        along += tl.dot(x, tl.load(directions_ptr + d[:, None] * BITS + bit, mask=inside, other=0.0),
                        input_precision="ieee")  # fmt: skip
    found = ((along >= 0) & (bit < BITS)).to(tl.int64) << bit
    tl.store(out_ptr + i, tl.sum(found, 1, keep_dims=True), mask=i < n)


@triton.jit
def ones(x):
    """How many bits of a uint64 are 1: sums of 2, of 4, of 8 neighbours, then all bytes by one product."""
    x -= (x >> 1) & 0x5555555555555555
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (x * 0x0101010101010101) >> 56


@triton.jit
def hamming(
    codes_ptr, probes_ptr, out_ptr, codes_b, codes_h, codes_n, probes_b, probes_h, probes_p,
    heads, n, P: tl.constexpr, BITS: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)  # of [B, H]
    b, h = row // heads, row % heads
    i = tl.program_id(0) * CODES + tl.arange(0, CODES)
    codes = tl.load(codes_ptr + b * codes_b + h * codes_h + i * codes_n, mask=i < n, other=0).to(tl.int64)
    total = tl.zeros([CODES], tl.float32)
    for p in range(P):
        probe = tl.load(probes_ptr + b * probes_b + h * probes_h + p * probes_p).to(tl.int64)
        # Bits above those of a code are shifted out; a short code's sign has been spread over them.
        differ = (codes ^ probe).to(tl.uint64) << (64 - BITS)
        total += ones(differ).to(tl.float32)
    tl.store(out_ptr + row * n + i, total, mask=i < n)


@triton_op("minikv::sign_codes", mutates_args={})
def sign_codes(x: Tensor, directions: Tensor) -> Tensor:
    """`kernels.hashes.sign_codes`; a product that is 0 but for rounding may come out on the other side."""
    d, bits = directions.shape
    x, directions = x.contiguous(), directions.contiguous()
    out = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    wrap_triton(signs)[(triton.cdiv(out.numel(), VECTORS),)](
        x, directions, out, out.numel(),
        D=d, BITS=bits, WIDE=max(16, triton.next_power_of_2(bits)), VECTORS=VECTORS, CHANNELS=CHANNELS,
    )  # fmt: skip
    return out


@triton_op("minikv::distances", mutates_args={})
def distances(codes: Tensor, probes: Tensor, bits: int) -> Tensor:
    """`kernels.hashes.distances`."""
    batch, heads, n = codes.shape
    out = torch.empty(codes.shape, dtype=torch.float32, device=codes.device)
    wrap_triton(hamming)[triton.cdiv(n, CODES), batch * heads](
        codes, probes, out, *codes.stride(), *probes.stride(), heads, n,
        P=probes.shape[2], BITS=bits, CODES=CODES,
    )  # fmt: skip
    return out
