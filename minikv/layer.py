"""One layer of the cache: its kept pool and fresh tokens, how it attends, and how it compresses."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.attend import causal_chunk, chunk_attention, step_attention
from minikv.policy import Policy
from minikv.pool import Pool
from minikv.rows import Rows, resized
from minikv.seen import Seen


@dataclass(frozen=True)
class Sizes:
    """What the model dictates."""

    batch: int
    heads: int  # KV heads
    group: int  # query heads per KV head
    head_dim: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class Tokens:
    """Keys, values and positions of some slots or tokens: k, v `[B, H, n, D]`, pos `[B, H, n]`."""

    k: Tensor
    v: Tensor
    pos: Tensor


class Layer(nn.Module):
    """`budget` kept slots per KV head beside `rows.room` fresh ones, and a ring of recent queries."""

    def __init__(self, sizes: Sizes, policy: Policy, budget: int, window: int | None, wo: Tensor, rows: Rows):
        super().__init__()
        self.sizes, self.policy, self.budget, self.window = sizes, policy, budget, window
        # Plain values for the step: a compiled step that looks at the policy is compiled anew for each.
        self.drops_each_step = policy.every == 1
        self.borrowed = (wo,)  # in a tuple, so that the model's weight is not registered as the cache's
        # Beyond the model's own sliding window nothing is ever looked at again.
        slots = budget if window is None else min(budget, window)
        self.kept = Pool(
            sizes.batch, sizes.heads, slots, sizes.head_dim, policy.store, sizes.dtype, sizes.device
        )
        lead, like = (sizes.batch, sizes.heads), dict(dtype=sizes.dtype, device=sizes.device)
        self.register_buffer("fresh_k", torch.zeros(*lead, rows.room, sizes.head_dim, **like))
        self.register_buffer("fresh_v", torch.zeros(*lead, rows.room, sizes.head_dim, **like))
        ring = rows.n_queries + 1 if rows.n_queries else 0
        self.register_buffer("queries", torch.zeros(*lead, sizes.group, ring, sizes.head_dim, **like))

    # Attention.

    def step(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, rows: Rows) -> Tensor:
        """One token: it joins the fresh ones and attends. q `[B, G*H, 1, D]`, k, v `[B, H, 1, D]`, pos `[B, 1]`."""
        slot = rows.cursor[:, None, None, None].expand_as(k)
        self.fresh_k.scatter_(2, slot, k)
        self.fresh_v.scatter_(2, slot, v)
        self.remember(q, pos, rows)
        n = self.kept.slots if rows.static else min(rows.used, self.kept.slots)
        r = rows.room if rows.static else rows.n_fresh + 1
        held = [(t.k, t.v, t.pos) for t in (self.kept_tokens(n), self.fresh_tokens(r, rows))]
        y = step_attention(q[:, :, 0].unflatten(1, (self.sizes.heads, -1)), held, pos, self.window)
        if self.drops_each_step:
            self.drop_one(k, v, pos, rows)
        return y.flatten(1, 2)[:, :, None]

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, rows: Rows) -> Tensor:
        """Several tokens: they attend, then kept, fresh and they are compressed. Shapes as in `step`, T tokens."""
        new = Tokens(k, v, pos[:, None].expand(-1, k.shape[1], -1))
        held = self.held(rows)
        fits_window = self.window is None or pos.shape[1] <= self.window
        if rows.empty and rows.plain and fits_window:
            y = causal_chunk(q, k, v)
        else:
            past = joined([*held, new])
            y = chunk_attention(q, past.k, past.v, pos, past.pos, self.window)
        self.remember(q, pos, rows)
        self.compress([*held, new], rows.last(pos), rows, (pos >= 0).any(1))
        return y

    # Compression.

    def flush(self, rows: Rows, full: Tensor) -> None:
        """Compress the rows (bool `[B]`) whose fresh part is full."""
        self.compress(self.held(rows), rows.last(None), rows, full)

    def compress(self, parts: list[Tokens], last: Tensor, rows: Rows, active: Tensor) -> None:
        """Survivors of all candidates become kept, in the active rows; the others stay as they are."""
        found = joined(parts)
        found = Tokens(found.k, found.v, self.in_window(found.pos, last))
        if rows.gaps or self.drops_each_step:
            found = in_order(found)
        if found.pos.shape[2] <= self.kept.slots:
            survives = found.pos >= 0
        else:
            survives = self.policy.select(self.seen([found], last, rows), self.budget)
        self.kept.keep(found.k, found.v, found.pos, survives, active)

    def drop_one(self, k: Tensor, v: Tensor, pos: Tensor, rows: Rows) -> None:
        """Of the kept tokens and the newest one the least important goes; an empty slot goes first."""
        new = Tokens(k, v, pos[:, None].expand(-1, k.shape[1], -1))
        seen = self.seen([self.kept_tokens(self.kept.slots), new], rows.last(pos), rows)
        ranks = self.policy.guard(self.policy.score.score(seen), seen)
        # Among equals the later position goes.
        least = torch.where(ranks == ranks.amin(-1, keepdim=True), seen.pos, -2)
        self.kept.replace(least.argmax(-1, keepdim=True), k, v, new.pos)

    def seen(self, parts: list[Tokens], last: Tensor, rows: Rows) -> Seen:
        n = rows.n_queries
        return Seen(
            q=self.queries[:, :, :, :n],
            q_pos=rows.query_pos[:, :n],
            k_parts=[t.k for t in parts],
            v_parts=[t.v for t in parts],
            pos=self.in_window(torch.cat([t.pos for t in parts], 2), last),
            last=last,
            sliding=self.window,
            wo=self.borrowed[0].view(-1, self.sizes.heads, self.sizes.group, self.sizes.head_dim),
        )

    def in_window(self, pos: Tensor, last: Tensor) -> Tensor:
        """`pos [B, H, n]` with -1 for what the layer's sliding window has left behind for good."""
        if self.window is None:
            return pos
        # The next query stands at last + 1 and sees `window` positions, itself among them.
        return torch.where(pos > (last + 1 - self.window)[:, None, None], pos, -1)

    def remember(self, q: Tensor, pos: Tensor, rows: Rows) -> None:
        """Keep the last queries, for scorers that look at them."""
        if rows.n_queries == 0:
            return
        q = q.unflatten(1, (self.sizes.heads, -1))  # [B, H, G, T, D]
        index, slot = (
            x[:, None, None, :, None].expand(-1, *q.shape[1:3], -1, q.shape[-1]) for x in rows.tail(pos)
        )
        self.queries.scatter_(3, slot, q.gather(3, index))

    # What is held.

    def held(self, rows: Rows) -> list[Tokens]:
        return [self.kept_tokens(min(rows.used, self.kept.slots)), self.fresh_tokens(rows.n_fresh, rows)]

    def kept_tokens(self, n: int) -> Tokens:
        return Tokens(self.kept.keys(n), self.kept.values(n), self.kept.pos[:, :, :n])

    def fresh_tokens(self, n: int, rows: Rows) -> Tokens:
        pos = rows.fresh_pos[:, None, :n].expand(-1, self.sizes.heads, -1)
        return Tokens(self.fresh_k[:, :, :n], self.fresh_v[:, :, :n], pos)

    def resize_room(self, room: int) -> None:
        self.fresh_k = resized(self.fresh_k, 2, room)
        self.fresh_v = resized(self.fresh_v, 2, room)

    def reset(self) -> None:
        for name, buffer in self.named_buffers():
            buffer.fill_(-1 if name.endswith("pos") else 0)


def joined(parts: list[Tokens]) -> Tokens:
    """One stretch of tokens; the only part that is not empty is passed on as it is."""
    full = [t for t in parts if t.pos.shape[2]]
    if len(full) == 1:
        return full[0]
    k, v, pos = (torch.cat(side, 2) for side in zip(*((t.k, t.v, t.pos) for t in full), strict=True))
    return Tokens(k, v, pos)


def in_order(tokens: Tokens) -> Tokens:
    """Sorted by position, empty ones last."""
    never = torch.iinfo(tokens.pos.dtype).max
    order = torch.where(tokens.pos < 0, never, tokens.pos).argsort(dim=-1, stable=True)
    wide = order[..., None].expand_as(tokens.k)
    return Tokens(tokens.k.gather(2, wide), tokens.v.gather(2, wide), tokens.pos.gather(2, order))
