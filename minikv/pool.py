"""Where survivors live. `Pool`: the same number of slots for every head; `RaggedPool`: any split of them.

Both hold keys, values, true positions (-1: empty slot) and a scorer's statistics, and are written in place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from kernels.attend import pool_attention
from kernels.dispatch import gather
from kernels.gather import pick
from minikv.attention import Packed, in_kernels, kernel_attention
from minikv.axes import Codec, Fixed, Tier

BLOCK = 16  # slots; in a RaggedPool a block belongs to one head


@dataclass(frozen=True)
class Tokens:
    """Some slots or tokens: k, v `[B, H, n, D]`, pos `[B, H, n]`, statistics `[B, H, n, ...]`.

    home: the slot of a layer's pools, counted through, where a token already is; -1 elsewhere. None: nowhere.
    """

    k: Tensor
    v: Tensor
    pos: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)
    home: Tensor | None = None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """The same change made to every tensor."""
        k, v, pos = change(self.k), change(self.v), change(self.pos)
        home = None if self.home is None else change(self.home)
        return Tokens(k, v, pos, {name: change(x) for name, x in self.state.items()}, home)

    def gather(self, index: Tensor) -> "Tokens":
        """The tokens at `index [B, H, m]`."""
        k, v, pos = gather(self.k, self.v, self.pos, index)
        home = None if self.home is None else pick(self.home, index)
        return Tokens(k, v, pos, {name: pick(x, index) for name, x in self.state.items()}, home)

    def in_order(self) -> "Tokens":
        """Sorted by position, empty ones last."""
        never = torch.iinfo(self.pos.dtype).max
        return self.gather(torch.where(self.pos < 0, never, self.pos).argsort(dim=-1, stable=True))


def joined(parts: list[Tokens]) -> Tokens:
    """One stretch of tokens; the only part that is not empty is passed on as it is."""
    full = [t for t in parts if t.pos.shape[2]] or parts[:1]
    if len(full) == 1:
        return full[0]
    k, v, pos = (torch.cat(side, 2) for side in zip(*((t.k, t.v, t.pos) for t in full), strict=True))
    home = None
    if any(t.home is not None for t in full):
        home = torch.cat([torch.full_like(t.pos, -1) if t.home is None else t.home for t in full], 2)
    state = {name: torch.cat([t.state[name] for t in full], 2) for name in full[0].state}
    return Tokens(k, v, pos, state, home)


@dataclass(frozen=True)
class Sizes:
    """What the model dictates."""

    batch: int
    heads: int  # KV heads
    group: int  # query heads per KV head
    head_dim: int
    dtype: torch.dtype
    device: torch.device


Statistics = dict[str, tuple[tuple[int, ...], torch.dtype]]


class Slots(nn.Module):
    """Buffers for `[B, *lead]` slots: coded keys and values, positions, statistics, and what codecs fitted."""

    def __init__(
        self,
        sizes: Sizes,
        lead: tuple[int, ...],
        tier: Tier,
        statistics: Statistics,
        constants: dict[Codec, Fixed],
        offset: int,
    ):
        super().__init__()
        self.tier, self.dtype, self.statistics = tier, sizes.dtype, list(statistics)
        self.codecs: dict[str, Codec] = {"k": tier.keys, "v": tier.values}
        self.exact = tier.keys.exact and tier.values.exact
        self.slots, self.offset = tier.slots, offset
        self.parts: dict[str, list[str]] = {}
        self.fixed_names: dict[str, list[str]] = {}
        for which, codec in self.codecs.items():
            parts = codec.buffers((sizes.batch, *lead), sizes.head_dim, sizes.dtype, sizes.device)
            fitted = codec.fitted(sizes.head_dim)
            self.parts[which], self.fixed_names[which] = list(parts), [*constants[codec], *fitted]
            for name, tensor in parts.items():
                self.register_buffer(f"{which}_{name}", tensor)
            for name, tensor in constants[codec].items():
                self.register_buffer(f"{which}_fixed_{name}", tensor)
            for name, shape in fitted.items():
                zeros = torch.zeros(sizes.batch, sizes.heads, *shape, device=sizes.device)
                self.register_buffer(f"{which}_fixed_{name}", zeros)
        for name, (shape, dtype) in statistics.items():
            zeros = torch.zeros(sizes.batch, *lead, *shape, dtype=dtype, device=sizes.device)
            self.register_buffer(f"state_{name}", zeros)
        empty = torch.full((sizes.batch, *lead), -1, dtype=torch.int32, device=sizes.device)
        self.register_buffer("pos", empty)

    def coded(self, which: str) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"{which}_{name}") for name in self.parts[which]}

    def fixed(self, which: str) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"{which}_fixed_{name}") for name in self.fixed_names[which]}

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"state_{name}") for name in self.statistics}

    def set_fitted(self, which: str, numbers: dict[str, Tensor], rows: Tensor) -> None:
        for name, new in numbers.items():
            write(self.fixed(which)[name], new, rows)

    def rewrite(self, kept: Tokens, filled: Tensor, rows: Tensor) -> None:
        """In `rows` (bool `[B]`) all slots take these tokens, where filled (bool, as `pos`)."""
        for which, x in (("k", kept.k), ("v", kept.v)):
            parts = self.encode(which, x)
            for name, old in self.coded(which).items():
                write(old, self.moved(self.codecs[which], old, parts[name], kept.home), rows)
        write(self.pos, torch.where(filled, kept.pos, -1), rows)
        for name, old in self.state.items():
            write(old, kept.state[name], rows)

    def moved(self, codec: Codec, old: Tensor, new: Tensor, home: Tensor | None) -> Tensor:
        """New codes, but those of tokens that were here already as they were: coding again could change them."""
        if codec.exact or codec.span > 1 or home is None:
            return new
        slot, axis = home - self.offset, self.pos.dim() - 1
        here = (slot >= 0) & (slot < self.pos.shape[axis])
        index = slot.clamp(0, self.pos.shape[axis] - 1)[..., None].expand_as(new)
        return torch.where(here[..., None], old.gather(axis, index), new)

    def reset(self) -> None:
        """Empty; what layers share stays."""
        shared = {f"{which}_fixed_{name}" for which in "kv" for name in self.fixed_names[which]}
        shared -= {f"{w}_fixed_{n}" for w, codec in self.codecs.items() for n in codec.fitted(1)}
        for name, buffer in self.named_buffers():
            if name not in shared:
                buffer.fill_(-1 if name == "pos" else 0)


class Pool(Slots):
    """`tier.slots` per KV head: buffers `[B, H, slots, ...]`."""

    def __init__(
        self, sizes: Sizes, tier: Tier, statistics: Statistics, constants: dict[Codec, Fixed], offset: int
    ):
        super().__init__(sizes, (sizes.heads, tier.slots), tier, statistics, constants, offset)

    def cut(self, which: str, n: int) -> dict[str, Tensor]:
        """What is stored for the first n slots; n in whole spans."""
        return {name: x[:, :, : n * x.shape[2] // self.slots] for name, x in self.coded(which).items()}

    def filled(self, used: int) -> int:
        """Slots to read so that the first `used` are among them."""
        span = max(self.tier.keys.span, self.tier.values.span)
        return min(-(-used // span) * span, self.slots)

    def encode(self, which: str, x: Tensor) -> dict[str, Tensor]:
        """Keys or values of slots `[B, H, n, D]` as they are stored."""
        return self.codecs[which].encode(x, self.fixed(which))

    def held(self) -> Tensor:
        """Tokens of each head, `[B, H]`."""
        return (self.pos >= 0).sum(-1)

    def positions(self) -> Tensor:
        return self.pos

    def tokens(self, n: int) -> Tokens:
        """The first n slots of every head, as keys and values."""
        k, v = (
            codec.decode(self.cut(which, n), self.fixed(which)).to(self.dtype)
            for which, codec in self.codecs.items()
        )
        pos, home = self.pos[:, :, :n], None
        if not self.exact:
            home = torch.where(pos >= 0, torch.arange(n, device=pos.device) + self.offset, -1)
        return Tokens(k, v, pos, {name: x[:, :, :n] for name, x in self.state.items()}, home)

    def stretch(self, n: int) -> Packed:
        """The first n slots of every head, for attention."""
        k, v = self.cut("k", n), self.cut("v", n)
        return Packed(self.tier, k, v, self.fixed("k"), self.fixed("v"), self.pos[:, :, :n])

    def keep(self, found: Tokens, survives: Tensor, rows: Tensor) -> None:
        """Replace what `rows` (bool `[B]`) hold by the candidates that survive (bool `[B, H, n]`), in their order."""
        index, filled = places(survives, self.slots)
        kept = found.gather(index)
        self.rewrite(kept, filled, rows)

    def extend(self, parts: list[Tokens], start: int) -> None:
        """Write tokens without statistics, as they are, to the slots from `start` on of every row and head."""
        for tokens in parts:
            end = start + tokens.pos.shape[2]
            for old, new in ((self.k_x, tokens.k), (self.v_x, tokens.v), (self.pos, tokens.pos)):
                old[:, :, start:end] = new
            start = end

    def append(self, found: Tokens, moves: Tensor, rows: Tensor) -> None:
        """Add the candidates that move (bool `[B, H, n]`) of `rows` (bool `[B]`) behind what is held."""
        n = min(self.filled(moves.shape[2]), self.slots)
        index, filled = places(moves & rows[:, None, None], n)
        count = (self.pos >= 0).sum(-1, keepdim=True)  # [B, H, 1]
        slot = (count + torch.arange(n, device=count.device)) % self.slots
        self.put(slot, filled, found.gather(index))

    def replace(self, victim: Tensor, token: Tokens) -> None:
        """Write one token per head over slot `victim [B, H, 1]`; `victim == slots` leaves all as it is."""
        self.put(victim.clamp(max=self.slots - 1), victim < self.slots, token)

    def put(self, slot: Tensor, filled: Tensor, tokens: Tokens) -> None:
        """Write tokens to different slots `[B, H, m]`, where filled; in whole spans."""
        pairs = [(self.pos, tokens.pos), *((old, tokens.state[name]) for name, old in self.state.items())]
        for which, x in (("k", tokens.k), ("v", tokens.v)):
            parts = self.encode(which, x)
            pairs += [(old, parts[name]) for name, old in self.coded(which).items()]
        for old, new in pairs:
            span = self.slots // old.shape[2]
            index = at_slots(slot[:, :, ::span] // span)
            takes = filled[:, :, ::span].view(*new.shape[:3], *(1 for _ in new.shape[3:]))
            old[index] = torch.where(takes, new.to(old.dtype), old[index])


class RaggedPool(Slots):
    """`heads * tier.slots` slots per row, each head owning one stretch of whole blocks: buffers `[B, N, ...]`.

    Who owns what is data, so its split over the heads can change without a shape changing.
    """

    def __init__(
        self, sizes: Sizes, tier: Tier, statistics: Statistics, constants: dict[Codec, Fixed], offset: int
    ):
        block = max(BLOCK, tier.keys.span, tier.values.span)
        # Every head may leave all but one slot of its last block empty.
        total = -(-sizes.heads * (tier.slots + block - 1) // block) * block if tier.slots else 0
        super().__init__(sizes, (total,), tier, statistics, constants, offset)
        self.total, self.block = total, block
        like = dict(dtype=torch.int64, device=sizes.device)
        self.register_buffer("start", torch.zeros(sizes.batch, sizes.heads, **like))  # first slot of a head
        self.register_buffer("count", torch.zeros(sizes.batch, sizes.heads, **like))  # tokens of a head
        self.register_buffer("owner", torch.zeros(sizes.batch, total // block, **like))  # head of a block

    def filled(self, used: int) -> int:
        return min(used, self.total)

    def held(self) -> Tensor:
        return self.count

    def positions(self) -> Tensor:
        return self.where()[1]

    def where(self) -> tuple[Tensor, Tensor]:
        """Slots of each head, padded to the longest, and their positions, both `[B, H, width]`."""
        slot = torch.arange(int(self.count.max()), device=self.pos.device)
        index = (self.start[..., None] + slot).clamp(max=self.total - 1)
        pos = self.pos.gather(1, index.flatten(1)).view_as(index)
        return index, torch.where(slot < self.count[..., None], pos, -1)

    def in_blocks(self, which: str) -> dict[str, Tensor]:
        """What is stored, `[B, blocks, slots of a block, ...]`."""
        return {name: x.unflatten(1, (self.owner.shape[1], -1)) for name, x in self.coded(which).items()}

    def fixed_of_blocks(self, which: str) -> dict[str, Tensor]:
        """What codecs fitted per head, for each block: `[B, blocks, ...]`."""
        found = self.fixed(which)
        for name in self.codecs[which].fitted(1):
            found[name] = found[name][torch.arange(len(self.owner))[:, None], self.owner]
        return found

    def encode(self, which: str, x: Tensor) -> dict[str, Tensor]:
        """Keys or values of all slots `[B, N, D]` as they are stored."""
        blocks = x.unflatten(1, (self.owner.shape[1], -1))
        parts = self.codecs[which].encode(blocks, self.fixed_of_blocks(which))
        return {name: part.flatten(1, 2) for name, part in parts.items()}

    def tokens(self, n: int) -> Tokens:
        """What each head holds, padded to the longest head; nothing for n = 0."""
        index, pos = self.where()
        if n == 0:
            index, pos = index[:, :, :0], pos[:, :, :0]
        k, v = (
            codec.decode(self.in_blocks(which), self.fixed_of_blocks(which)).flatten(1, 2).to(self.dtype)
            for which, codec in self.codecs.items()
        )
        flat = Tokens(k, v, self.pos, self.state).each(
            lambda x: x[:, None]
        )  # as one long head, [B, 1, N, ...]
        found = flat.gather(index.flatten(1)[:, None]).each(lambda x: x.view(*index.shape, *x.shape[3:]))
        home = None if self.exact else torch.where(pos >= 0, index + self.offset, -1)
        return replace(found, pos=pos, home=home)

    def attend(
        self, q: Tensor, others: list[Packed], q_pos: Tensor, window: int | None, want_p: bool
    ) -> tuple[Tensor, list[Tensor]]:
        """One token's attention to other stretches and to the pool; see `kernels.attend.pool_attention`."""
        k, v, fixed = self.coded("k"), self.coded("v"), (self.fixed("k"), self.fixed("v"))
        own = Packed(self.tier, k, v, *fixed, self.pos, self.owner)
        if in_kernels(q, [*others, own]):
            return kernel_attention(q, [*others, own], q_pos, window, want_p)
        k, v = self.in_blocks("k"), self.in_blocks("v")
        fixed = self.fixed_of_blocks("k"), self.fixed_of_blocks("v")
        own = Packed(self.tier, k, v, *fixed, self.pos.view(*self.owner.shape, self.block))
        return pool_attention(q, own, self.owner, others, q_pos, window)

    def of_owner(self, x: Tensor) -> Tensor:
        """A value per head `[B, H]` -> per slot `[B, N]`."""
        return x.gather(1, self.owner).repeat_interleave(self.block, dim=1)

    def keep(self, found: Tokens, survives: Tensor, rows: Tensor) -> None:
        """As `Pool.keep`; the survivors of a head may be any number, those of a row at most `heads * slots`."""
        batch, heads, n = survives.shape
        count = survives.sum(-1)  # [B, H]
        blocks = (count + self.block - 1) // self.block
        start = (blocks.cumsum(-1) - blocks) * self.block
        slot = torch.where(survives, start[..., None] + survives.cumsum(-1) - 1, self.total).flatten(1)
        index = torch.full((batch, self.total + 1), heads * n, device=slot.device)
        index.scatter_(1, slot, torch.arange(heads * n, device=slot.device).expand_as(slot))
        index = index[:, : self.total]
        filled = index < heads * n
        flat = found.each(lambda x: x.flatten(1, 2)[:, None])  # [B, 1, H * n, ...]
        kept = flat.gather(index.clamp(max=heads * n - 1)[:, None]).each(lambda x: x[:, 0])  # [B, N, ...]
        block = torch.arange(self.total // self.block, device=slot.device)
        owner = (start[..., None] <= block * self.block).sum(1) - 1
        for old, new in ((self.start, start), (self.count, count), (self.owner, owner)):
            write(old, new, rows)
        self.rewrite(kept, filled, rows)


def at_slots(slot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The index of slots `[B, H, m]` in a buffer `[B, H, n, ...]`.

    Compiled code writes there in place, where it would copy the whole buffer for a scatter.
    """
    batch, heads, _ = slot.shape
    row, head = torch.arange(batch, device=slot.device), torch.arange(heads, device=slot.device)
    return row[:, None, None], head[:, None], slot


def write(old: Tensor, new: Tensor, rows: Tensor) -> None:
    """`old[rows] = new[rows]` for a mask `[B]`, without a shape that depends on it."""
    old.copy_(torch.where(rows.view(-1, *(1 for _ in old.shape[1:])), new, old))


def places(survives: Tensor, slots: int) -> tuple[Tensor, Tensor]:
    """For each of `slots` slots the candidate it takes, `[B, H, slots]`, and whether it takes one at all.

    Survivors keep their order. The rejected all write to one slot more than there is.
    """
    batch, heads, n = survives.shape
    slot = torch.where(survives, survives.cumsum(-1) - 1, slots)
    index = torch.full((batch, heads, slots + 1), n, device=slot.device)
    index.scatter_(2, slot, torch.arange(n, device=slot.device).expand_as(slot))
    index = index[:, :, :slots]
    return index.clamp(max=n - 1), index < n
