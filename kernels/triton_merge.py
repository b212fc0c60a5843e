"""Joins partial sums of attention by their log-sum-exp: the second kernel of `kernels.triton_attend`."""

import triton
import triton.language as tl


@triton.jit
def finite(top):
    """What to subtract from logits: where nothing has been seen, 0, as -inf - -inf is no number."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def find(stretch, b, h, CHUNK: tl.constexpr):
    """The partial sums of head h in one stretch: start..stop - 1, number i at place base + max(begin, i * step).

    stretch: owner, first place, places per head or blocks of a program, first slot, slots per head or of the pool,
    slots of a block.
    """
    owner, base, each, first, n, block = stretch
    if owner is None:
        start, stop, begin, step = h * 0, h * 0 + each, h * 0, 1
        base += h * each
    else:
        count, begin = tl.zeros([CHUNK], tl.int64), tl.full([CHUNK], n // block, tl.int64)
        for chunk in range(0, n // block, CHUNK):
            i = chunk + tl.arange(0, CHUNK)
            mine = tl.load(owner + b * (n // block) + i, mask=i < n // block, other=-1) == h
            count += mine
            begin = tl.minimum(begin, tl.where(mine, i, n // block))
        count, begin = tl.sum(count, 0), tl.min(begin, 0)
        start, step = begin // each, each
        stop = tl.where(count > 0, tl.cdiv(begin + count, each), start)
    return start, stop, begin, step, base


@triton.jit
def fold(
    state, where, tops, masses, sums, channel,
    D: tl.constexpr, G: tl.constexpr, CHUNK: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """Adds the partial sums of a stretch to state: top, mass and sums of values, as they are and turned.

    The pointers are those of the row and query head, where is that of `find`.
    """
    top, mass, plain, turned = state
    start, stop, begin, step, base = where
    for chunk in range(start, stop, CHUNK):
        i = chunk + tl.arange(0, CHUNK)
        place = base + tl.maximum(begin, i * step)
        tops_here = tl.load(tops + place * G, mask=i < stop, other=float("-inf"))
        masses_here = tl.load(masses + place * G, mask=i < stop, other=0.0)
        at = place[:, None] * G * D + channel[None, :]
        values = tl.load(sums + at, mask=(i < stop)[:, None] & (channel < D)[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(tops_here, 0))
        weight, fading = tl.exp(tops_here - finite(higher)), tl.exp(top - finite(higher))
        mass = mass * fading + tl.sum(weight * masses_here, 0)
        more = tl.sum(weight[:, None] * values, 0)
        if TURNED:
            plain, turned = plain * fading, turned * fading + more
        else:
            plain, turned = plain * fading + more, turned * fading
        top = higher
    return top, mass, plain, turned


@triton.jit
def finish(logits, p, stretch, b, h, top, factor, G: tl.constexpr, CHUNK: tl.constexpr):
    """Logits of head h become probabilities; logits and p point to the first slot of the row, for a query head."""
    owner, base, each, first, n, block = stretch
    if owner is None:
        first += h * n
    for chunk in range(0, n, CHUNK):
        i = chunk + tl.arange(0, CHUNK)
        mine = i < n
        # A mask, not an address: torch takes for written whatever an address of a store was computed from.
        if owner is not None:
            mine &= tl.load(owner + b * (n // block) + i // block, mask=mine, other=-1) == h
        x = tl.load(logits + (first + i) * G, mask=mine, other=float("-inf"))
        tl.store(p + (first + i) * G, tl.exp(x - finite(top)) * factor, mask=mine)


@triton.jit
def merge(
    y, y_turned, p, tops, masses, sums, logits, heads, places, slots,
    owner_0, place_0, each_0, slot_0, n_0, block_0,
    owner_1, place_1, each_1, slot_1, n_1, block_1,
    owner_2, place_2, each_2, slot_2, n_2, block_2,
    N: tl.constexpr, TURNED_0: tl.constexpr, TURNED_1: tl.constexpr, TURNED_2: tl.constexpr,
    D: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """One program = one query head, over N stretches: y, y_turned (or None) `[B, H, G, D]`, p `[B, slots, G]`."""
    row = tl.program_id(0).to(tl.int64)  # of [B, H, G]
    b, h, g = row // (heads * G), row // G % heads, row % G
    line = b * places * G + g
    tops, masses, sums = tops + line, masses + line, sums + line * D
    channel = tl.arange(0, WIDE)
    zeros = tl.zeros([WIDE], tl.float32)
    state = (tl.full([], float("-inf"), tl.float32), tl.full([], 0.0, tl.float32), zeros, zeros)
    stretch_0 = (owner_0, place_0, each_0, slot_0, n_0, block_0)
    stretch_1 = (owner_1, place_1, each_1, slot_1, n_1, block_1)
    stretch_2 = (owner_2, place_2, each_2, slot_2, n_2, block_2)
    state = fold(state, find(stretch_0, b, h, LONG), tops, masses, sums, channel, D, G, CHUNK, TURNED_0)
    if N > 1:
        state = fold(state, find(stretch_1, b, h, LONG), tops, masses, sums, channel, D, G, CHUNK, TURNED_1)
    if N > 2:
        state = fold(state, find(stretch_2, b, h, LONG), tops, masses, sums, channel, D, G, CHUNK, TURNED_2)
    top, mass, plain, turned = state
    factor = 1 / tl.where(mass > 0, mass, float("inf"))  # 0 where nothing has been seen
    tl.store(y + row * D + channel, plain * factor, mask=channel < D)
    if y_turned is not None:
        tl.store(y_turned + row * D + channel, turned * factor, mask=channel < D)
    if p is not None:
        logits, p = logits + b * slots * G + g, p + b * slots * G + g
        finish(logits, p, stretch_0, b, h, top, factor, G, LONG)
        if N > 1:
            finish(logits, p, stretch_1, b, h, top, factor, G, LONG)
        if N > 2:
            finish(logits, p, stretch_2, b, h, top, factor, G, LONG)
