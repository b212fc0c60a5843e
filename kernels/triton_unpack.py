"""Device functions: tiles of stored keys or values as numbers. The layout of words is that of `kernels.pack`.

A tile is `[rows, slots]`. A row is a channel, but not in order: rows run over lanes and within a lane over words,
so that a word is loaded once and all its codes are shifted out in registers; `channels` tells which is which.
Values as they are count as words of 32 bits: one lane, and rows are channels in order.
"""

import triton
import triton.language as tl

from kernels import stretches

# Ways to store.
RAW = tl.constexpr(stretches.RAW)
CHANNELS = tl.constexpr(stretches.CHANNELS)
LEVELS = tl.constexpr(stretches.LEVELS)


@triton.jit
def channels(D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr):
    """Channel of each row of a tile, D for rows that are none.

    WORDS: those of a token, rounded up to a power of two; of three bits, the words of the two lower ones.
    """
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    EACH: tl.constexpr = (GROUP * WIDTH + 31) // 32  # words of a group
    row = tl.arange(0, 32 // WIDTH * WORDS)
    word = row % WORDS
    inside = row // WORDS * EACH + word % EACH  # channel of its group
    channel = word // EACH * GROUP + inside
    return tl.where((inside < GROUP) & (channel < D), channel, D)


@triton.jit
def load_codes(
    data, slot_stride, word_stride, slot, seen,
    D: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Codes of `slot [slots]` as int32 `[lanes, words, slots]`, 0 where not `seen`."""
    WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
    EACH: tl.constexpr = (GROUP * WIDTH + 31) // 32
    word = tl.arange(0, WORDS)
    lane = tl.arange(0, 32 // WIDTH)[:, None, None]
    mask = (word < D // GROUP * EACH)[:, None] & seen[None, :]
    words = tl.load(data + word[:, None] * word_stride + slot[None, :] * slot_stride, mask=mask, other=0)
    codes = (words[None, :, :] >> (lane * WIDTH)) & ((1 << WIDTH) - 1)
    if BITS == 3:  # the high bits stand behind, in words of their own
        HIGH: tl.constexpr = (GROUP + 31) // 32
        inside = lane * EACH + (word % EACH)[None, :, None]
        at = D // GROUP * EACH + (word // EACH)[None, :, None] * HIGH + inside % HIGH
        mask = mask[None, :, :] & (inside < GROUP)
        words = tl.load(data + at * word_stride + slot[None, None, :] * slot_stride, mask=mask, other=0)
        codes |= ((words >> (inside // HIGH)) & 1) << 2
    return codes


@triton.jit
def load_tile(
    side, slot, seen,
    D: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, SPAN: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Numbers at `slot [slots]`, `[rows, slots]`, 0 where not `seen`; all of a channel grid's slots are of one span.

    side: pointers to data, scale, zero (None: symmetric) and levels, where of scale and zero to begin, and the
    strides of data (slot, word) and of scale and zero (slot or span, group or channel).
    """
    data, scale, zero, levels, begin, slot_stride, word_stride, scale_stride, group_stride = side
    if KIND == RAW:
        row = tl.arange(0, WORDS)
        at = row[:, None] * word_stride + slot[None, :] * slot_stride
        x = tl.load(data + at, mask=(row < D)[:, None] & seen[None, :], other=0.0)
    else:
        codes = load_codes(data, slot_stride, word_stride, slot, seen, D, BITS, GROUP, WORDS)
        if KIND == LEVELS:
            step = tl.load(scale + begin + slot * scale_stride, mask=seen, other=0.0).to(tl.float32)
            x = tl.load(levels + codes) * step[None, None, :]
        else:
            if KIND == CHANNELS:
                channel = tl.reshape(channels(D, BITS, GROUP, WORDS), [codes.shape[0], WORDS, 1])
                at = begin + tl.min(slot, 0) // SPAN * scale_stride + channel * group_stride
                mask = channel < D
            else:
                WIDTH: tl.constexpr = 2 if BITS == 3 else BITS
                group = tl.arange(0, WORDS)[None, :, None] // ((GROUP * WIDTH + 31) // 32)
                at = begin + group * group_stride + slot[None, None, :] * scale_stride
                mask = (group < D // GROUP) & seen[None, None, :]
            step = tl.load(scale + at, mask=mask, other=0.0).to(tl.float32)
            if zero is None:
                x = (codes - (1 << (BITS - 1))) * step
            else:
                x = codes * step + tl.load(zero + at, mask=mask, other=0.0).to(tl.float32)
        x = tl.reshape(x, [codes.shape[0] * WORDS, codes.shape[2]])
    return x
