"""Where survivors live. `Pool`: the same number of slots for every head; `RaggedPool`: any split of them.

Both hold keys, values, true positions (-1: empty slot) and a scorer's statistics, and are written in place.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from kernels.attend import pool_attention
from minikv.axes import Codec

BLOCK = 16  # slots; in a RaggedPool a block belongs to one head


@dataclass(frozen=True)
class Tokens:
    """Some slots or tokens: k, v `[B, H, n, D]`, pos `[B, H, n]`, statistics `[B, H, n, ...]`."""

    k: Tensor
    v: Tensor
    pos: Tensor
    state: dict[str, Tensor] = field(default_factory=dict)

    def each(self, change: Callable[[Tensor], Tensor]) -> "Tokens":
        """The same change made to every tensor."""
        k, v, pos = change(self.k), change(self.v), change(self.pos)
        return Tokens(k, v, pos, {name: change(x) for name, x in self.state.items()})

    def gather(self, index: Tensor) -> "Tokens":
        """The tokens at `index [B, H, m]`."""
        return self.each(lambda x: pick(x, index))

    def in_order(self) -> "Tokens":
        """Sorted by position, empty ones last."""
        never = torch.iinfo(self.pos.dtype).max
        return self.gather(torch.where(self.pos < 0, never, self.pos).argsort(dim=-1, stable=True))


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x `[B, H, n, ...]` at index `[B, H, m]` -> `[B, H, m, ...]`."""
    tail = x.shape[3:]
    return x.gather(2, index.view(*index.shape, *(1 for _ in tail)).expand(*index.shape, *tail))


def joined(parts: list[Tokens]) -> Tokens:
    """One stretch of tokens; the only part that is not empty is passed on as it is."""
    full = [t for t in parts if t.pos.shape[2]] or parts[:1]
    if len(full) == 1:
        return full[0]
    k, v, pos = (torch.cat(side, 2) for side in zip(*((t.k, t.v, t.pos) for t in full), strict=True))
    return Tokens(k, v, pos, {name: torch.cat([t.state[name] for t in full], 2) for name in full[0].state})


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
    """Buffers for `[B, *lead]` slots: coded keys and values, positions, statistics."""

    def __init__(self, sizes: Sizes, lead: tuple[int, ...], store: Codec, statistics: Statistics):
        super().__init__()
        self.store = store
        lead = (sizes.batch, *lead)
        parts = store.buffers(lead, sizes.head_dim, sizes.dtype, sizes.device)
        self.parts, self.statistics = list(parts), list(statistics)
        for name, tensor in parts.items():
            self.register_buffer(f"k_{name}", tensor)
            self.register_buffer(f"v_{name}", torch.zeros_like(tensor))
        for name, (shape, dtype) in statistics.items():
            self.register_buffer(
                f"state_{name}", torch.zeros(*lead, *shape, dtype=dtype, device=sizes.device)
            )
        self.register_buffer("pos", torch.full(lead, -1, dtype=torch.int32, device=sizes.device))

    def coded(self, which: str) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"{which}_{name}") for name in self.parts}

    @property
    def state(self) -> dict[str, Tensor]:
        return {name: self.get_buffer(f"state_{name}") for name in self.statistics}

    def pairs(self, tokens: Tokens) -> list[tuple[Tensor, Tensor]]:
        """(own buffer, what `tokens` would put there) for everything but the positions."""
        found = [(self.state[name], tokens.state[name]) for name in self.statistics]
        for which, x in (("k", tokens.k), ("v", tokens.v)):
            found += [
                (self.get_buffer(f"{which}_{name}"), part) for name, part in self.store.encode(x).items()
            ]
        return found


class Pool(Slots):
    """`slots` per KV head: buffers `[B, H, slots, ...]`."""

    def __init__(self, sizes: Sizes, slots: int, store: Codec, statistics: Statistics):
        super().__init__(sizes, (sizes.heads, slots), store, statistics)
        self.slots = slots

    def tokens(self, n: int) -> Tokens:
        """The first n slots of every head."""
        k, v = (
            self.store.decode({name: x[:, :, :n] for name, x in self.coded(which).items()}) for which in "kv"
        )
        return Tokens(k, v, self.pos[:, :, :n], {name: x[:, :, :n] for name, x in self.state.items()})

    def keep(self, found: Tokens, survives: Tensor, rows: Tensor) -> None:
        """Replace what `rows` (bool `[B]`) hold by the candidates that survive (bool `[B, H, n]`), in their order."""
        index, filled = places(survives, self.slots)
        kept = found.gather(index)
        write(self.pos, torch.where(filled, kept.pos, -1), rows)
        for old, new in self.pairs(kept):
            write(old, new, rows)

    def replace(self, victim: Tensor, token: Tokens) -> None:
        """Write one token per head over slot `victim [B, H, 1]`; `victim == slots` leaves all as it is."""
        stays = victim == self.slots
        victim = victim.clamp(max=self.slots - 1)
        for old, new in [(self.pos, token.pos), *self.pairs(token)]:
            tail = old.shape[3:]
            index = victim.view(*victim.shape, *(1 for _ in tail)).expand(*victim.shape, *tail)
            keep = stays.view(*stays.shape, *(1 for _ in tail))
            old.scatter_(2, index, torch.where(keep, old.gather(2, index), new.to(old.dtype)))


class RaggedPool(Slots):
    """`heads * slots` slots per row, each head owning one stretch of whole blocks: buffers `[B, N, ...]`.

    Who owns what is data, so its split over the heads can change without a shape changing.
    """

    def __init__(self, sizes: Sizes, slots: int, store: Codec, statistics: Statistics):
        # Every head may leave all but one slot of its last block empty.
        total = -(-sizes.heads * (slots + BLOCK - 1) // BLOCK) * BLOCK
        super().__init__(sizes, (total,), store, statistics)
        self.slots, self.total, self.heads = slots, total, sizes.heads
        like = dict(dtype=torch.int64, device=sizes.device)
        self.register_buffer("start", torch.zeros(sizes.batch, sizes.heads, **like))  # first slot of a head
        self.register_buffer("count", torch.zeros(sizes.batch, sizes.heads, **like))  # tokens of a head
        self.register_buffer("owner", torch.zeros(sizes.batch, total // BLOCK, **like))  # head of a block

    def tokens(self, n: int) -> Tokens:
        """What each head holds, padded to the longest head; nothing for n = 0."""
        width = int(self.count.max()) if n else 0
        slot = torch.arange(width, device=self.pos.device)
        index = (self.start[..., None] + slot).clamp(max=self.total - 1)  # [B, H, width]
        k, v = (self.store.decode(self.coded(which)) for which in "kv")
        # The pool as one long head: [B, 1, N, ...]
        flat = Tokens(k, v, self.pos, self.state).each(lambda x: x[:, None])
        found = flat.gather(index.flatten(1)[:, None]).each(lambda x: x.view(*index.shape, *x.shape[3:]))
        return replace(found, pos=torch.where(slot < self.count[..., None], found.pos, -1))

    def attend(
        self, q: Tensor, fresh: Tokens, q_pos: Tensor, window: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One token's attention; see `kernels.attend.pool_attention`."""
        k, v = (self.store.decode(self.coded(which)) for which in "kv")
        return pool_attention(q, k, v, self.pos, self.owner, fresh.k, fresh.v, fresh.pos, q_pos, window)

    def of_owner(self, x: Tensor) -> Tensor:
        """A value per head `[B, H]` -> per slot `[B, N]`."""
        return x.gather(1, self.owner).repeat_interleave(BLOCK, dim=1)

    def keep(self, found: Tokens, survives: Tensor, rows: Tensor) -> None:
        """As `Pool.keep`; the survivors of a head may be any number, those of a row at most `heads * slots`."""
        batch, heads, n = survives.shape
        count = survives.sum(-1)  # [B, H]
        blocks = (count + BLOCK - 1) // BLOCK
        start = (blocks.cumsum(-1) - blocks) * BLOCK
        slot = torch.where(survives, start[..., None] + survives.cumsum(-1) - 1, self.total).flatten(1)
        index = torch.full((batch, self.total + 1), heads * n, device=slot.device)
        index.scatter_(1, slot, torch.arange(heads * n, device=slot.device).expand_as(slot))
        index = index[:, : self.total]
        filled = index < heads * n
        flat = found.each(lambda x: x.flatten(1, 2)[:, None])  # [B, 1, H * n, ...]
        kept = flat.gather(index.clamp(max=heads * n - 1)[:, None])
        write(self.pos, torch.where(filled, kept.pos[:, 0], -1), rows)
        for old, new in self.pairs(kept):
            write(old, new[:, 0], rows)
        block = torch.arange(self.total // BLOCK, device=slot.device)
        owner = (start[..., None] <= block * BLOCK).sum(1) - 1
        for old, new in ((self.start, start), (self.count, count), (self.owner, owner)):
            write(old, new, rows)


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
