"""Triton form of `kernels.stretches.attend`: one token's attention, split over blocks of slots, then merged.

    partial   one program = some slots of one KV head: largest logit, sum and weighted values of its queries
    merge     one program = one query head: joins the partial sums of all stretches, and finishes probabilities

One launch of `partial` for each stretch and one of `merge` is all that a layer needs. A partial sum has a place:
a stretch of heads has some for each head, a pool one for each block, of which those are used where, within the
slots of one program, the blocks of a head begin. Sums and softmax are float32; keys and values are multiplied in
the dtype of the queries, into which packed ones are rounded as the model's own cache would.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from kernels.stretches import LEVELS, RAW, Side, Stretch
from kernels.triton_merge import finite, merge
from kernels.triton_unpack import channels, load_tile

MOST = 3  # stretches of a layer
NO_WINDOW = 2**31 - 1
TILE_NUMBERS = 4096  # keys, and again values, that a program works on at a time
PROGRAMS = 512  # worth having before a program is given several tiles: a few for each multiprocessor
MOST_TILES = 16


@triton.jit
def walk(
    q, bias, q_pos, window, scale, pos, pos_stride, k, v, logits, first, last,
    D: tl.constexpr, G: tl.constexpr, TILE: tl.constexpr,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_SPAN: tl.constexpr, K_WORDS: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_SPAN: tl.constexpr, V_WORDS: tl.constexpr,
):  # fmt: skip
    """Softmax over slots first..last - 1, not yet divided: tops and masses `[G]`, sums `[rows, G]`."""
    WIDE: tl.constexpr = q.shape[1]
    g = tl.arange(0, WIDE)[None, :]
    top = tl.full([WIDE], float("-inf"), tl.float32)
    mass = tl.zeros([WIDE], tl.float32)
    mixed = tl.zeros([channels(D, V_BITS, V_GROUP, V_WORDS).shape[0], WIDE], tl.float32)
    for start in range(first, last, TILE):
        slot = start + tl.arange(0, TILE)
        at = tl.load(pos + slot * pos_stride, mask=slot < last, other=-1).to(tl.int32)
        # What is not seen is not read: empty slots and those outside the window cost no bandwidth.
        seen = (at >= 0) & (at <= q_pos) & (at > q_pos - window)
        keys = load_tile(k, slot, seen, D, K_KIND, K_BITS, K_GROUP, K_SPAN, K_WORDS).to(q.dtype)
        x = tl.dot(tl.trans(keys), q, input_precision="ieee") + bias[None, :]  # [slots, G]
        x = tl.where(seen[:, None], x * scale, float("-inf"))
        if logits is not None:
            tl.store(logits + slot[:, None] * G + g, x, mask=(g < G) & (slot < last)[:, None])
        higher = tl.maximum(top, tl.max(x, 0))
        base = finite(higher)
        fading = tl.exp(top - base)
        p = tl.exp(x - base[None, :])
        mass = mass * fading + tl.sum(p, 0)
        values = load_tile(v, slot, seen, D, V_KIND, V_BITS, V_GROUP, V_SPAN, V_WORDS).to(q.dtype)
        mixed = tl.dot(values, p.to(q.dtype), mixed * fading[None, :], input_precision="ieee")
        top = higher
    return top, mass, mixed


@triton.jit
def partial(
    tops, masses, sums, logits, q, bias, q_pos, pos, owner,
    k_data, k_scale, k_zero, k_levels, v_data, v_scale, v_zero, v_levels,
    pos_b, pos_h, pos_n, k_b, k_h, k_n, k_w, k_scale_b, k_scale_h, k_scale_n, k_scale_g,
    v_b, v_h, v_n, v_w, v_scale_b, v_scale_h, v_scale_n, v_scale_g,
    window, scale, heads, n, places, first_place, slots, first_slot,
    D: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr, SHARE: tl.constexpr, BLOCK: tl.constexpr,
    K_KIND: tl.constexpr, K_BITS: tl.constexpr, K_GROUP: tl.constexpr, K_SPAN: tl.constexpr, K_WORDS: tl.constexpr,
    V_KIND: tl.constexpr, V_BITS: tl.constexpr, V_GROUP: tl.constexpr, V_SPAN: tl.constexpr, V_WORDS: tl.constexpr,
):  # fmt: skip
    """One program = SHARE slots of a KV head, or of a pool (owner is not None) with blocks of BLOCK slots.

    Writes tops and masses `[B, places, G]`, sums `[B, places, G, D]` and, if not None, logits `[B, slots, G]`.
    """
    share = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    h = b * 0
    if owner is None:
        h = b % heads
        b = b // heads
    now = tl.load(q_pos + b).to(tl.int32)
    pos += b * pos_b + h * pos_h
    k_begin, v_begin = b * k_scale_b + h * k_scale_h, b * v_scale_b + h * v_scale_h
    k = (k_data + b * k_b + h * k_h, k_scale, k_zero, k_levels, k_begin, k_n, k_w, k_scale_n, k_scale_g)
    v = (v_data + b * v_b + h * v_h, v_scale, v_zero, v_levels, v_begin, v_n, v_w, v_scale_n, v_scale_g)
    if logits is not None:
        logits += (b * slots + first_slot + h * n) * G
    first = share * SHARE
    last = tl.minimum(first + SHARE, n)
    while first < last:
        if owner is None:
            end = last
            place = b * places + first_place + h * tl.cdiv(n, SHARE) + share
        else:
            block = first // BLOCK
            h = tl.load(owner + b * (n // BLOCK) + block).to(tl.int64)
            end = first + BLOCK * blocks_of(h, owner + b * (n // BLOCK), block, last // BLOCK, SHARE // BLOCK)
            place = b * places + first_place + block
        channel = channels(D, K_BITS, K_GROUP, K_WORDS)
        x, added = load_queries(q, bias, (b * heads + h) * G, channel, D, G, WIDE)
        top, mass, mixed = walk(
            x, added, now, window, scale, pos, pos_n, k, v, logits, first, end, D, G, TILE,
            K_KIND, K_BITS, K_GROUP, K_SPAN, K_WORDS, V_KIND, V_BITS, V_GROUP, V_SPAN, V_WORDS,
        )  # fmt: skip
        channel = channels(D, V_BITS, V_GROUP, V_WORDS)
        store_sums(tops, masses, sums, place * G, top, mass, mixed, channel, D, G)
        first = end


@triton.jit
def blocks_of(h, owner, first, last, MOST: tl.constexpr):
    """How many of a pool's blocks first..last - 1, at most MOST, head h owns."""
    block = first + tl.arange(0, MOST)
    owners = tl.load(owner + block, mask=block < last, other=-1)
    return tl.sum((owners == h).to(tl.int32), 0)


@triton.jit
def load_queries(q, bias, row, channel, D: tl.constexpr, G: tl.constexpr, WIDE: tl.constexpr):
    """Rows row..row + G - 1 of q as columns `[len(channel), WIDE]`, and of bias `[WIDE]`, with zeros beyond."""
    g = tl.arange(0, WIDE)
    at = (row + g)[None, :] * D + channel[:, None]
    x = tl.load(q + at, mask=(g < G)[None, :] & (channel < D)[:, None], other=0.0)
    added = tl.zeros([WIDE], tl.float32)
    if bias is not None:
        added += tl.load(bias + row + g, mask=g < G, other=0.0)
    return x, added


@triton.jit
def store_sums(tops, masses, sums, row, top, mass, mixed, channel, D: tl.constexpr, G: tl.constexpr):
    """At rows row..row + G - 1."""
    g = tl.arange(0, top.shape[0])
    tl.store(tops + row + g, top, mask=g < G)
    tl.store(masses + row + g, mass, mask=g < G)
    at = (row + g)[None, :] * D + channel[:, None]
    tl.store(sums + at, mixed, mask=(g < G)[None, :] & (channel < D)[:, None])


# Launchers.


class Cut(NamedTuple):
    """How a stretch is divided among programs, and where its partial sums and its logits are, in one batch row."""

    n: int  # slots per head, or of the pool
    block: int  # slots of a pool's block, 0 of heads
    tile: int  # slots that a program works on at a time
    share: int  # and altogether
    first_place: int
    places: int
    first_slot: int
    slots: int


def cut_up(q: Tensor, stretches: Sequence[Stretch]) -> list[Cut]:
    batch, heads = q.shape[:2]
    cuts, place, slot = [], 0, 0
    for part in stretches:
        n, span = part.n, max(part.k.span, part.v.span)
        block = 0 if part.owner is None else n // part.owner.shape[1]
        rows = max(padded_words(side) * 32 // low_bits(side.bits) for side in (part.k, part.v))
        # Codes that are looked up, or come in two planes, take twice the registers.
        hard = any(side.kind == LEVELS or side.bits == 3 for side in (part.k, part.v))
        tile = min(max(TILE_NUMBERS // rows // (1 + hard), 16), 64)
        tile = min(tile, span) if span > 1 else tile
        slots = n if block else heads * n
        unit = max(tile, block)
        tiles = min(max(batch * slots // (unit * PROGRAMS), 1), MOST_TILES)
        share = unit * 2 ** (tiles.bit_length() - 1)
        places = n // block if block else heads * triton.cdiv(n, share)
        cuts.append(Cut(n, block, tile, share, place, places, slot, slots))
        place, slot = place + places, slot + slots
    return cuts


def low_bits(bits: int) -> int:
    return 2 if bits == 3 else bits


def padded_words(side: Side) -> int:
    """WORDS of `triton_unpack.channels`, enough of them for 16 rows, the least that can be multiplied."""
    width = low_bits(side.bits)
    words = side.d // side.group * triton.cdiv(side.group * width, 32)
    return max(triton.next_power_of_2(words), width // 2)


def form(side: Side) -> list[int]:
    """KIND, BITS, GROUP, SPAN and WORDS."""
    return [side.kind, side.bits, side.group, side.span, padded_words(side)]


def tensors(side: Side) -> list[Tensor | None]:
    """Data, scale, zero and levels; words as the integers they are."""
    data = side.data if side.kind == RAW else side.data.view(torch.int32)
    return [data, side.scale, side.zero, side.levels]


def strides(x: Tensor | None, pool: bool, tail: int) -> list[int]:
    """Of batch, head (0 in a pool) and the last `tail` axes."""
    if x is None:
        return [0] * (2 + tail)
    head = () if pool else (x.stride(1),)
    return [x.stride(0), *head, *([0] * pool), *x.stride()[-tail:]]


@triton_op("minikv::attend_partial", mutates_args=("tops", "masses", "sums", "logits"))
def partial_op(
    tops: Tensor, masses: Tensor, sums: Tensor, logits: Tensor | None,
    q: Tensor, bias: Tensor | None, q_pos: Tensor, pos: Tensor, owner: Tensor | None,
    k: Sequence[Tensor | None], v: Sequence[Tensor | None],
    k_form: Sequence[int], v_form: Sequence[int], cut: Sequence[int], window: int,
) -> None:  # fmt: skip
    """`partial` for one stretch: k and v as of `tensors` and `form`, cut as of `Cut`."""
    batch, heads, group, d = q.shape
    n, block, tile, share, first_place, _, first_slot, _ = cut
    pool = owner is not None
    # Unpacking takes registers: with twice the threads none is spilled; wide tables of levels take twice that.
    warps = triton.next_power_of_2(d) // (32 if k_form[0] == RAW else 16)
    most = 16 if k_form[0] == LEVELS else 8
    wrap_triton(partial)[(triton.cdiv(n, share), batch if pool else batch * heads)](
        tops, masses, sums, logits, q, bias, q_pos, pos, owner, *k, *v,
        *strides(pos, pool, 1), *strides(k[0], pool, 2), *strides(k[1], pool, 2),
        *strides(v[0], pool, 2), *strides(v[1], pool, 2),
        window, d**-0.5, heads, n, tops.shape[1], first_place, 0 if logits is None else logits.shape[1], first_slot,
        d, group, max(triton.next_power_of_2(group), 8), tile, share, max(block, 1), *k_form, *v_form,
        num_warps=min(max(warps, 4), most),
    )  # fmt: skip


@triton_op("minikv::attend_merge", mutates_args=())
def merge_op(
    q: Tensor, tops: Tensor, masses: Tensor, sums: Tensor, logits: Tensor | None,
    owners: Sequence[Tensor | None], cuts: Sequence[int], turned: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`merge`: y, y turned (empty if nothing is), probabilities (empty without logits). cuts: one after the other."""
    batch, heads, group, d = q.shape
    y = torch.empty_like(q)
    y_turned = torch.empty_like(q) if any(turned) else q.new_empty(0)
    p = q.new_empty(0) if logits is None else torch.empty_like(logits)
    numbers = []
    for i, owner in enumerate(owners):
        n, block, _, share, place, _, slot, _ = cuts[i * len(Cut._fields) : (i + 1) * len(Cut._fields)]
        numbers += [owner, place, share // block if block else triton.cdiv(n, share), slot, n, block]
    missing = MOST - len(owners)
    wide = triton.next_power_of_2(d)
    wrap_triton(merge)[(batch * heads * group,)](
        y, y_turned if any(turned) else None, None if logits is None else p, tops, masses, sums, logits,
        heads, tops.shape[1], 0 if logits is None else logits.shape[1],
        *numbers, *[None, 0, 0, 0, 0, 0] * missing, len(owners), *turned, *[False] * missing,
        d, group, wide, max(2048 // wide, 1), 1024, num_warps=4,
    )  # fmt: skip
    return y, y_turned, p


def attend(
    q: Tensor, stretches: Sequence[Stretch], q_pos: Tensor, window: int | None, want_p: bool = False
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """See `kernels.stretches.attend`. Up to three stretches; a block, and a span, are a power of two from 16 on.

    Raises ValueError for more stretches or other sizes.
    """
    check(stretches)
    q, q_pos = q.contiguous(), q_pos.contiguous()
    batch, heads, group, d = q.shape
    cuts = cut_up(q, stretches)
    places, slots = sum(cut.places for cut in cuts), sum(cut.slots for cut in cuts)
    sums = torch.empty(batch, places, group, d, dtype=torch.float32, device=q.device)
    tops, masses = (sums.new_empty(batch, places, group) for _ in range(2))
    logits = sums.new_empty(batch, slots, group) if want_p else None
    for part, cut in zip(stretches, cuts, strict=True):
        if cut.places:
            own = q if part.q is None else part.q.to(q.dtype).contiguous()
            partial_op(
                tops, masses, sums, logits, own, None if part.bias is None else part.bias.contiguous(),
                q_pos, part.pos, part.owner, tensors(part.k), tensors(part.v),
                form(part.k), form(part.v), list(cut), NO_WINDOW if window is None else window,
            )  # fmt: skip
    turned = [part.turned for part in stretches]
    owners = [part.owner for part in stretches]
    y, y_turned, p = merge_op(q, tops, masses, sums, logits, owners, [x for cut in cuts for x in cut], turned)
    found = [of_stretch(p, cut, heads) for cut in cuts if want_p]
    return y, y_turned if any(turned) else None, found


def of_stretch(p: Tensor, cut: Cut, heads: int) -> Tensor:
    """A stretch's share of `[B, slots, G]`: `[B, H, G, n]`, of a pool `[B, N, G]`."""
    mine = p[:, cut.first_slot : cut.first_slot + cut.slots]
    return mine if cut.block else mine.unflatten(1, (heads, cut.n)).mT


def check(stretches: Sequence[Stretch]) -> None:
    if not 1 <= len(stretches) <= MOST:
        raise ValueError(f"{len(stretches)} stretches cannot be merged at once; the kernel takes 1 to {MOST}")
    for part in stretches:
        sizes = {"span": max(part.k.span, part.v.span)}
        if part.owner is not None:
            sizes["block"] = part.n // part.owner.shape[1]
        for name, size in sizes.items():
            if size > 1 and (size < 16 or size & (size - 1)):
                raise ValueError(f"a {name} of {size} slots; the kernel needs a power of two from 16 on")
        for side in (part.k, part.v):
            if side.zero is not None and side.zero.stride() != side.scale.stride():
                raise ValueError(
                    f"scale and zero with strides {side.scale.stride()} and {side.zero.stride()}; the kernel "
                    "needs them stored alike"
                )
