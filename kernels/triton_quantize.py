"""Triton form of `kernels.quantize`: grid, codes and packed words in one pass, equal to it bit for bit.

    tokens     one program = some tokens, one group of channels
    channels   one program = one span of tokens, some words and the channels in them

A tile holds channels as `kernels.pack` places them, `[tokens, lanes, words]`: lane j of word w is channel
`j * W + w`. Three bits are two planes, and so two launches, which find the same grid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from kernels.pack import planes, row_words, words_per_group

HALF_MAX = tl.constexpr(65504.0)
# Added and taken away again, it rounds a small float32 to the nearest integer, halves to even.
ROUND = tl.constexpr(1.5 * 2**23)
TILE = 2048  # values of one program


@triton.jit
def min_max_grid(low, high, largest):
    """Scale and zero, float16, of codes 0 .. largest."""
    scale = tl.minimum(tl.div_rn(high - low, largest), HALF_MAX)
    return scale.to(tl.float16), tl.clamp(low, -HALF_MAX, HALF_MAX).to(tl.float16)


@triton.jit
def packed(x, used, scale, zero, lane, smallest, largest, low, WIDTH: tl.constexpr):
    """Bits low .. low + WIDTH of the codes of x, float32 `[tokens, lanes, words]` -> int32 `[tokens, words]`."""
    scale, zero = scale.to(tl.float32), zero.to(tl.float32)
    steps = tl.div_rn(x - zero, tl.where(scale > 0, scale, 1.0))
    # Clamped first: rounding keeps the limits, and works for small numbers only.
    steps = tl.clamp(steps, smallest, largest) + ROUND - ROUND
    codes = tl.where((scale > 0) & used, steps, 0.0).to(tl.int32)
    return tl.sum(((codes >> low) & (2**WIDTH - 1)) << (lane * WIDTH), 1)


@triton.jit
def tokens(
    x_ptr, words_ptr, scale_ptr, zero_ptr, n, groups, row, first_word, smallest, largest, low,
    D: tl.constexpr, GROUP: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr,
    SYMMETRIC: tl.constexpr, TOKENS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)[:, None]
    group = tl.program_id(1)
    lane = tl.arange(0, 32 // WIDTH)[:, None]
    word = tl.arange(0, WORDS)
    channel = lane * W + word
    used = (word < W) & (channel < GROUP)
    at = x_ptr + token[:, :, None] * D + group * GROUP + channel
    x = tl.load(at, mask=(token[:, :, None] < n) & used, other=0.0).to(tl.float32)
    at_grid = token * groups + group
    if SYMMETRIC:
        most = tl.max(tl.max(tl.abs(x), 2), 1)[:, None]
        scale = tl.minimum(tl.div_rn(most, (largest - 1) / 2), HALF_MAX).to(tl.float16)
        zero = -scale.to(tl.float32) * ((largest + 1) / 2)
    else:
        least = tl.min(tl.min(tl.where(used, x, float("inf")), 2), 1)[:, None]
        most = tl.max(tl.max(tl.where(used, x, float("-inf")), 2), 1)[:, None]
        scale, zero = min_max_grid(least, most, largest)
        tl.store(zero_ptr + at_grid, zero, mask=token < n)
    tl.store(scale_ptr + at_grid, scale, mask=token < n)
    words = packed(x, used, scale[:, :, None], zero[:, :, None], lane, smallest, largest, low, WIDTH)
    at = words_ptr + token * row + first_word + group * W + word
    tl.store(at, words, mask=(token < n) & (word < W))


@triton.jit
def channels(
    x_ptr, words_ptr, scale_ptr, zero_ptr, row, first_word, largest, low,
    D: tl.constexpr, SPAN: tl.constexpr, W: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    span = tl.program_id(0).to(tl.int64)
    token = tl.arange(0, TOKENS)[:, None]
    lane = tl.arange(0, 32 // WIDTH)[:, None]
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    channel = (lane * W + word)[None]  # [1, lanes, words]
    exists = (word < W) & (channel < D)
    used = (token[:, :, None] < SPAN) & exists
    x = tl.load(x_ptr + (span * SPAN + token[:, :, None]) * D + channel, mask=used, other=0.0).to(tl.float32)
    least = tl.min(tl.where(used, x, float("inf")), 0)[None]
    most = tl.max(tl.where(used, x, float("-inf")), 0)[None]
    scale, zero = min_max_grid(least, most, largest)
    tl.store(scale_ptr + span * D + channel, scale, mask=exists)
    tl.store(zero_ptr + span * D + channel, zero, mask=exists)
    words = packed(x, used, scale, zero, lane, 0.0, largest, low, WIDTH)
    at = words_ptr + (span * SPAN + token) * row + first_word + word
    tl.store(at, words, mask=(token < SPAN) & (word < W))


def quantize_tokens(
    x: Tensor, bits: int, group: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """`kernels.quantize.quantize_tokens`."""
    words, scale, zero = token_codes(x, bits, group, symmetric)
    return words.view(torch.float32), scale, None if symmetric else zero


def quantize_channels(x: Tensor, bits: int, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """`kernels.quantize.quantize_channels`."""
    words, scale, zero = channel_codes(x, bits, span)
    return words.view(torch.float32), scale, zero


@triton_op("minikv::token_codes", mutates_args={})
def token_codes(x: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Words as int32, scale and zero; nothing is written to the zero of a symmetric grid."""
    lead, d = x.shape[:-1], x.shape[-1]
    x = x.contiguous()
    n, groups, row = x.numel() // d, d // group, row_words(d, bits, group)
    words = torch.empty(*lead, row, dtype=torch.int32, device=x.device)
    scale, zero = (torch.empty(*lead, groups, dtype=torch.float16, device=x.device) for _ in range(2))
    first_word = low = 0
    for width in planes(bits):
        w = words_per_group(group, width)
        wide = triton.next_power_of_2(w)
        size = max(1, TILE // (wide * (32 // width)))
        wrap_triton(tokens)[triton.cdiv(n, size), groups](
            x, words, scale, zero, n, groups, row, first_word, float(symmetric), 2.0**bits - 1, low,
            D=d, GROUP=group, W=w, WIDTH=width, SYMMETRIC=symmetric, TOKENS=size, WORDS=wide,
        )  # fmt: skip
        first_word, low = first_word + groups * w, low + width
    return words, scale, zero


@triton_op("minikv::channel_codes", mutates_args={})
def channel_codes(x: Tensor, bits: int, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """Words as int32, scale and zero."""
    *lead, n, d = x.shape
    x = x.contiguous()
    row, spans = row_words(d, bits, d), x.numel() // (d * span)
    words = torch.empty(*lead, n, row, dtype=torch.int32, device=x.device)
    scale, zero = (torch.empty(*lead, n // span, d, dtype=torch.float16, device=x.device) for _ in range(2))
    first_word = low = 0
    for width in planes(bits):
        w, tall = words_per_group(d, width), triton.next_power_of_2(span)
        wide = min(triton.next_power_of_2(w), max(1, TILE // (tall * (32 // width))))
        wrap_triton(channels)[spans, triton.cdiv(w, wide)](
            x, words, scale, zero, row, first_word, 2.0**bits - 1, low,
            D=d, SPAN=span, W=w, WIDTH=width, TOKENS=tall, WORDS=wide,
        )  # fmt: skip
        first_word, low = first_word + w, low + width
    return words, scale, zero
