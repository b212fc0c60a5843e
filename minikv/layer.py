"""One layer of the cache: its kept pool and fresh tokens, how it attends, and how it compresses."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from kernels.attend import causal_chunk, chunk_attention, step_attention
from minikv.policy import Policy
from minikv.pool import Pool, RaggedPool, Sizes, Tokens, joined
from minikv.rows import Rows, resized
from minikv.seen import Seen

Turn = Callable[[Tensor, Tensor], Tensor]


class Layer(nn.Module):
    """`budget` kept slots per KV head beside `rows.room` fresh ones, and a ring of recent queries."""

    def __init__(
        self,
        index: int,
        sizes: Sizes,
        policy: Policy,
        budget: int,
        window: int | None,
        wo: Tensor,
        turn: Turn,
        rows: Rows,
    ):
        super().__init__()
        self.index, self.sizes, self.policy, self.budget, self.window = index, sizes, policy, budget, window
        # Plain values for the step: a compiled step that looks at the policy is compiled anew for each.
        self.drops_each_step = policy.every == 1
        self.drops_before = policy.score.before and self.drops_each_step
        self.watches = policy.score.watches
        self.ragged = not policy.heads.uniform
        self.turned_sinks = policy.sinks if policy.score.shifts_sinks else 0
        # Not registered: the model's weight and the model's rope are borrowed.
        self.borrowed: tuple[Tensor, Turn] = (wo, turn)
        # Beyond the model's own sliding window nothing is ever looked at again.
        slots = budget if window is None else min(budget, window)
        statistics = policy.score.state(sizes.head_dim)
        self.kept = (RaggedPool if self.ragged else Pool)(sizes, slots, policy.store, statistics)
        lead, like = (sizes.batch, sizes.heads), dict(dtype=sizes.dtype, device=sizes.device)
        self.register_buffer("fresh_k", torch.zeros(*lead, rows.room, sizes.head_dim, **like))
        self.register_buffer("fresh_v", torch.zeros(*lead, rows.room, sizes.head_dim, **like))
        self.statistics = list(statistics)
        for name, (shape, dtype) in statistics.items():
            zeros = torch.zeros(*lead, rows.room, *shape, dtype=dtype, device=sizes.device)
            self.register_buffer(f"fresh_{name}", zeros)
        # Remembered queries only rank tokens, and a query weighs as much as G / 2 tokens: 16 bits will do.
        ring = rows.n_queries + 1 if rows.n_queries else 0
        half = torch.bfloat16 if sizes.dtype == torch.float32 else sizes.dtype
        queries = torch.zeros(*lead, sizes.group, ring, sizes.head_dim, dtype=half, device=sizes.device)
        self.register_buffer("queries", queries)

    # Attention.

    def step(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, rows: Rows) -> Tensor:
        """One token: it joins the fresh ones and attends. q `[B, G*H, 1, D]`, k, v `[B, H, 1, D]`, pos `[B, 1]`."""
        new = self.arrived(k, v, pos, rows.tokens)
        self.remember(q, pos, rows)
        if self.drops_before:
            self.drop_one(new, q, pos, rows)
            return self.attend_kept(q, pos)
        self.put(new, rows)
        fresh = self.fresh_tokens(rows.room if rows.static else rows.n_fresh + 1, rows)
        grouped = q[:, :, 0].unflatten(1, (self.sizes.heads, -1))  # [B, H, G, D]
        if self.ragged:
            y, p_kept, p_fresh = self.kept.attend(grouped, fresh, pos, self.window)
        else:
            kept = self.kept.tokens(self.kept.slots if rows.static else rows.used)
            parts = self.shifted([kept, fresh], pos[:, 0])
            y, p = step_attention(grouped, [(t.k, t.v, t.pos) for t in parts], pos, self.window)
            p_kept, p_fresh = p.split([kept.pos.shape[2], fresh.pos.shape[2]], -1)
        if self.watches:
            self.watch(p_kept, p_fresh, fresh.pos, pos)
        if self.drops_each_step:
            self.drop_one(fresh, q, pos, rows)
        return y.flatten(1, 2)[:, :, None]

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, rows: Rows) -> Tensor:
        """Several tokens: they attend, then kept, fresh and they are compressed. Shapes as in `step`, T tokens."""
        free = self.kept.slots - min(rows.used, self.kept.slots)
        if self.drops_before and self.policy.score.one_by_one and pos.shape[1] > free:
            return self.one_by_one(q, k, v, pos, rows, free)
        parts = [*self.held(rows), self.arrived(k, v, pos, rows.tokens)]
        y = self.attend_chunk(q, parts, pos, rows)
        self.remember(q, pos, rows)
        self.compress(parts, rows.last(pos), rows, (pos >= 0).any(1), q, pos)
        return y

    def attend_chunk(self, q: Tensor, parts: list[Tokens], pos: Tensor, rows: Rows) -> Tensor:
        """New tokens, the last of the parts, attend to what is held and to each other."""
        new = parts[-1]
        fits_window = self.window is None or pos.shape[1] <= self.window
        if rows.empty and rows.plain and fits_window:
            return causal_chunk(q, new.k, new.v)
        return self.attend_past(q, joined(self.shifted(parts, rows.seen)), pos)

    def attend_past(self, q: Tensor, past: Tokens, pos: Tensor) -> Tensor:
        return chunk_attention(q, past.k, past.v, pos, past.pos, self.window)

    def one_by_one(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, rows: Rows, free: int) -> Tensor:
        """A chunk longer than the free slots, for a scorer that drops ahead of attention: token by token.

        A token's keys and values in this layer need nothing of this layer's cache, so the loop can stand
        here, inside the layer, and give exactly what feeding single tokens to the model would.
        """
        done = []

        def taken(first: int, end: int) -> tuple[Tensor, Tokens, Tensor]:
            at = slice(first, end)
            return (
                q[:, :, at],
                self.arrived(k[:, :, at], v[:, :, at], pos[:, at], rows.tokens[:, at]),
                pos[:, at],
            )

        if free:
            query, new, place = taken(0, free)
            parts = [*self.held(rows), new]
            done.append(self.attend_past(query, joined(parts), place))
            self.compress(parts, rows.last(place), rows, (place >= 0).any(1), query, place)
        for t in range(free, pos.shape[1]):
            query, new, place = taken(t, t + 1)
            self.remember(query, place, rows)
            self.drop_one(new, query, place, rows)
            done.append(self.attend_kept(query, place))
        return torch.cat(done, dim=2)

    def attend_kept(self, q: Tensor, pos: Tensor) -> Tensor:
        """Attention where the new token is already among the kept ones."""
        kept = self.kept.tokens(self.kept.slots)
        grouped = q[:, :, 0].unflatten(1, (self.sizes.heads, -1))
        y, _ = step_attention(grouped, [(kept.k, kept.v, kept.pos)], pos, self.window)
        return y.flatten(1, 2)[:, :, None]

    def shifted(self, parts: list[Tokens], first: Tensor) -> list[Tokens]:
        """The sinks moved next to what else is held, for a query at position `first [B]`; see StreamingLLM.

        Sinks always are the first kept slots. Only they are too far away: the others follow each other.
        """
        if not self.turned_sinks or parts[0].pos.shape[2] == 0:
            return parts
        held = sum((t.pos[:, 0] >= 0).logical_and(t.pos[:, 0] < first[:, None]).sum(1) for t in parts)  # [B]
        n, kept = self.turned_sinks, parts[0]
        by = (first - held)[:, None].expand(-1, min(n, kept.pos.shape[2]))
        sinks = self.borrowed[1](kept.k[:, :, :n], by)
        return [replace(kept, k=torch.cat((sinks, kept.k[:, :, n:]), 2)), *parts[1:]]

    def watch(self, p_kept: Tensor, p_fresh: Tensor, fresh_pos: Tensor, pos: Tensor) -> None:
        """Show a watching scorer the step's attention: `[B, H, G, n]`, of a ragged pool `[B, N, G]`."""
        held = (fresh_pos >= 0).sum(-1) + (self.kept.count if self.ragged else (self.kept.pos >= 0).sum(-1))
        share = 1 / held.clamp(min=1)[..., None]  # [B, H, 1]
        now, score = pos[:, :, None], self.policy.score
        fresh = {
            name: self.get_buffer(f"fresh_{name}")[:, :, : p_fresh.shape[-1]] for name in self.statistics
        }
        score.watch(fresh, p_fresh.mean(2), share, now)
        if self.ragged:
            pool = {name: x[:, None] for name, x in self.kept.state.items()}
            score.watch(pool, p_kept.mean(-1)[:, None], self.kept.of_owner(share[..., 0])[:, None], now)
        else:
            kept = {name: x[:, :, : p_kept.shape[-1]] for name, x in self.kept.state.items()}
            score.watch(kept, p_kept.mean(2), share, now)

    # Compression.

    def flush(self, rows: Rows, full: Tensor) -> None:
        """Compress the rows (bool `[B]`) whose fresh part is full."""
        self.compress(self.held(rows), rows.last(None), rows, full)

    def compress(
        self,
        parts: list[Tokens],
        last: Tensor,
        rows: Rows,
        active: Tensor,
        new_q: Tensor | None = None,
        new_pos: Tensor | None = None,
    ) -> None:
        """Survivors of all candidates become kept, in the active rows (bool `[B]`); the others stay as they are.

        new_q `[B, G*H, T, D]` and new_pos `[B, T]`: the queries of the chunk that has just attended, if one has.
        """
        found = joined(parts)
        solid = not rows.gaps and (rows.empty or not self.drops_each_step)
        if not solid:
            found = found.in_order()
        seen = replace(self.seen([found], last, rows, new_q, new_pos), solid=solid)
        if new_q is not None and self.statistics:
            found = replace(found, state=self.policy.score.absorb(seen))
            seen = replace(seen, state=found.state)
        if found.pos.shape[2] <= self.kept.slots:
            survives = seen.valid
        else:
            survives = self.policy.select(seen, self.budget, self.index)
        self.kept.keep(found, survives, active)

    def drop_one(self, new: Tokens, q: Tensor, pos: Tensor, rows: Rows) -> None:
        """Of the kept tokens and the newest one the least important goes; an empty slot goes first."""
        seen = self.seen([self.kept.tokens(self.kept.slots), new], rows.last(pos), rows, q, pos)
        if self.drops_before:
            seen = replace(seen, ahead=0)
        ranks = self.policy.guard(self.policy.score.score(seen), seen, self.budget)
        # Among equals the later position goes.
        least = torch.where(ranks == ranks.amin(-1, keepdim=True), seen.pos, -2)
        self.kept.replace(least.argmax(-1, keepdim=True), new)

    def seen(
        self,
        parts: list[Tokens],
        last: Tensor,
        rows: Rows,
        new_q: Tensor | None,
        new_pos: Tensor | None,
    ) -> Seen:
        n, (wo, turn) = rows.n_queries, self.borrowed
        queries, q_pos = self.queries, rows.query_pos
        if n and new_q is not None:
            queries, q_pos = self.with_latest(new_q, new_pos, rows), rows.with_latest(new_pos)
        return Seen(
            q=queries[:, :, :, :n],
            q_pos=q_pos[:, :n],
            k_parts=[t.k for t in parts],
            v_parts=[t.v for t in parts],
            pos=torch.cat([t.pos for t in parts], 2),
            last=last,
            sliding=self.window,
            wo=wo.view(-1, self.sizes.heads, self.sizes.group, self.sizes.head_dim),
            state={name: torch.cat([t.state[name] for t in parts], 2) for name in self.statistics},
            new_q=None if new_q is None else new_q.unflatten(1, (self.sizes.heads, -1)),
            new_pos=new_pos,
            turn=turn,
        )

    # What is held.

    def arrived(self, k: Tensor, v: Tensor, pos: Tensor, tokens: Tensor) -> Tokens:
        """New tokens with their first statistics; pos and tokens (ids) `[B, T]`."""
        pos = pos[:, None].expand(-1, self.sizes.heads, -1)
        return Tokens(k, v, pos, self.policy.score.enter(k, tokens) if self.statistics else {})

    def put(self, new: Tokens, rows: Rows) -> None:
        """Write one token to each row's cursor."""
        pairs = [(self.fresh_k, new.k), (self.fresh_v, new.v)]
        pairs += [(self.get_buffer(f"fresh_{name}"), new.state[name]) for name in self.statistics]
        for buffer, x in pairs:
            slot = rows.cursor.view(-1, *(1 for _ in x.shape[1:])).expand_as(x)
            buffer.scatter_(2, slot, x)

    def remember(self, q: Tensor, pos: Tensor, rows: Rows) -> None:
        """Keep the last queries, for scorers that look at them."""
        if rows.n_queries:
            self.queries.copy_(self.with_latest(q, pos, rows))

    def with_latest(self, q: Tensor, pos: Tensor, rows: Rows) -> Tensor:
        """The remembered queries and these exact ones, float32 `[B, H, G, n_queries + 1, D]`."""
        q = q.unflatten(1, (self.sizes.heads, -1)).float()  # [B, H, G, T, D]
        index, slot = (
            x[:, None, None, :, None].expand(-1, *q.shape[1:3], -1, q.shape[-1]) for x in rows.tail(pos)
        )
        return self.queries.float().scatter(3, slot, q.gather(3, index))

    def held(self, rows: Rows) -> list[Tokens]:
        return [self.kept.tokens(rows.used), self.fresh_tokens(rows.n_fresh, rows)]

    def fresh_tokens(self, n: int, rows: Rows) -> Tokens:
        pos = rows.fresh_pos[:, None, :n].expand(-1, self.sizes.heads, -1)
        state = {name: self.get_buffer(f"fresh_{name}")[:, :, :n] for name in self.statistics}
        return Tokens(self.fresh_k[:, :, :n], self.fresh_v[:, :, :n], pos, state)

    def resize_room(self, room: int) -> None:
        for name in ("k", "v", *self.statistics):
            setattr(self, f"fresh_{name}", resized(self.get_buffer(f"fresh_{name}"), 2, room))

    def reset(self) -> None:
        for name, buffer in self.named_buffers():
            buffer.fill_(-1 if name.endswith("pos") else 0)
