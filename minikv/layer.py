"""One layer of the cache: its kept pool and fresh tokens, how it attends, and how it compresses."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from kernels.attend import causal_chunk, chunk_attention
from minikv.attention import Packed, attend, exact
from minikv.axes import Codec, Fixed
from minikv.kept import Kept
from minikv.policy import Policy
from minikv.pool import Sizes, Tokens, at_slots, joined
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
        wo: nn.Module,
        turn: Turn,
        rows: Rows,
        constants: dict[Codec, Fixed],
        limit: int,
    ):
        super().__init__()
        self.index, self.sizes, self.policy, self.budget, self.window = index, sizes, policy, budget, window
        # Plain values for the step: a compiled step that looks at the policy is compiled anew for each.
        self.drops_each_step = policy.every == 1
        self.drops_before = policy.score.before and self.drops_each_step
        self.watches = policy.score.watches
        self.ragged = not policy.heads.uniform
        # Slots come out of order where single ones are replaced, and where there are tiers.
        self.disorders = self.drops_each_step or policy.store.coded
        # One tier of slots as they are, and nothing to remember of tokens.
        self.extends = not (self.ragged or policy.store.coded or policy.score.state(sizes.head_dim))
        self.turned_sinks = policy.sinks if policy.score.shifts_sinks else 0
        # Not registered: the model's output projection and its rope are borrowed.
        self.borrowed: tuple[nn.Module, Turn] = (wo, turn)
        self.weighs_output = policy.score.weighs_output or policy.refine.weighs_output
        # Beyond the model's own sliding window nothing is ever looked at again.
        slots = budget if window is None else min(budget, window)
        statistics = policy.score.state(sizes.head_dim)
        self.kept = Kept(sizes, slots, policy.store, policy.sinks, self.ragged, statistics, constants)
        # Where nothing is ever dropped, codes that are there stay there and others are added behind them.
        self.adds = policy.store.coded and not policy.drops and not self.ragged and slots == limit
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

    @property
    def kind(self) -> tuple:
        """What a compiled step depends on: layers of a kind differ by their tensors' values alone."""
        return (self.window, *((x.shape, x.dtype) for x in self.buffers()))

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
        stretches = self.stretches(fresh, pos, rows)
        share = self.share(rows) if self.watches else None
        if self.ragged:
            pool = self.kept.pools[-1]
            y, p = pool.attend(grouped, stretches, pos, self.window, self.watches)
            if self.watches:
                self.watch_pool(p.pop(), share, pos)
        else:
            y, p = attend(grouped, stretches, pos, self.window, self.watches)
        if self.watches:
            self.watch(p, share, pos)
        if self.drops_each_step:
            self.drop_one(fresh, q, pos, rows)
        return y.flatten(1, 2)[:, :, None]

    def stretches(self, fresh: Tokens, pos: Tensor, rows: Rows) -> list[Packed]:
        """What a token at `pos [B, 1]` attends to: each kept tier, and the fresh tokens last."""
        used = self.kept.slots if rows.static else rows.used
        found = [*self.kept.stretches(used), exact(fresh.k, fresh.v, fresh.pos)]
        if self.turned_sinks:
            pool = self.kept.pools[0]
            sinks = pool.tokens(pool.filled(used))
            k = self.turned(sinks.k, [part.pos for part in found], pos[:, 0])
            found[0] = exact(k, sinks.v, sinks.pos)
        return found

    def chunk(self, q: Tensor, k: Tensor, v: Tensor, pos: Tensor, rows: Rows) -> Tensor:
        """Several tokens: they attend, then kept, fresh and they are compressed. Shapes as in `step`, T tokens."""
        free = self.kept.slots - min(rows.used, self.kept.slots)
        if self.drops_before and self.policy.score.one_by_one and pos.shape[1] > free:
            return self.one_by_one(q, k, v, pos, rows, free)
        new = self.arrived(k, v, pos, rows.tokens)
        y = self.attend_chunk(q, [*self.held(rows), new], pos, rows)
        self.take(new, q, pos, rows)
        return y

    def take(self, new: Tokens, q: Tensor, pos: Tensor, rows: Rows) -> None:
        """Tokens that have attended join what is held, and all of it is compressed."""
        self.remember(q, pos, rows)
        self.compress([*self.candidates(rows), new], rows, pos, q)

    def attend_chunk(self, q: Tensor, parts: list[Tokens], pos: Tensor, rows: Rows) -> Tensor:
        """New tokens, the last of the parts, attend to what is held and to each other."""
        new = parts[-1]
        fits_window = self.window is None or pos.shape[1] <= self.window
        if rows.empty and rows.plain and fits_window:
            return causal_chunk(q, new.k, new.v)
        if self.turned_sinks:
            first = parts[0]
            k = self.turned(first.k, [t.pos for t in parts], rows.seen)
            parts = [replace(first, k=k), *parts[1:]]
        return self.attend_past(q, joined(parts), pos)

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
            self.compress(parts, rows, place, query)
        for t in range(free, pos.shape[1]):
            query, new, place = taken(t, t + 1)
            self.remember(query, place, rows)
            self.drop_one(new, query, place, rows)
            done.append(self.attend_kept(query, place))
        return torch.cat(done, dim=2)

    def attend_kept(self, q: Tensor, pos: Tensor) -> Tensor:
        """Attention where the new token is already among the kept ones."""
        grouped = q[:, :, 0].unflatten(1, (self.sizes.heads, -1))
        y, _ = attend(grouped, self.kept.stretches(self.kept.slots), pos, self.window, want_p=False)
        return y.flatten(1, 2)[:, :, None]

    def turned(self, k: Tensor, pos: list[Tensor], now: Tensor) -> Tensor:
        """The first stretch's keys with the sinks moved next to all else, for a query at `now [B]`; see StreamingLLM.

        pos: positions of everything held. Sinks always are the first kept slots, and exact. Only they are too
        far away: the others follow each other.
        """
        n = min(self.turned_sinks, k.shape[2])
        held = sum((p[:, 0] >= 0).logical_and(p[:, 0] < now[:, None]).sum(1) for p in pos)  # [B]
        sinks = self.borrowed[1](k[:, :, :n], (now - held)[:, None].expand(-1, n))
        return torch.cat((sinks, k[:, :, n:]), 2)

    def share(self, rows: Rows) -> Tensor:
        """1 / number of tokens that each head holds, `[B, H, 1]`."""
        held = self.kept.count() + (rows.fresh_pos >= 0).sum(-1, keepdim=True)
        return 1 / held.clamp(min=1)[..., None]

    def watch(self, p: list[Tensor], share: Tensor, pos: Tensor) -> None:
        """Show a watching scorer the step's attention, `[B, H, G, n]`: to each tier and to the fresh tokens."""
        states = [pool.state for pool in self.kept.pools[: len(p) - 1]]
        states.append({name: self.get_buffer(f"fresh_{name}") for name in self.statistics})
        for state, part in zip(states, p, strict=True):
            here = {name: x[:, :, : part.shape[-1]] for name, x in state.items()}
            self.policy.score.watch(here, part.mean(2), share, pos[:, :, None])

    def watch_pool(self, p: Tensor, share: Tensor, pos: Tensor) -> None:
        """As `watch`, for the attention `[B, N, G]` to a ragged pool."""
        pool = self.kept.pools[-1]
        state = {name: x[:, None] for name, x in pool.state.items()}
        share = pool.of_owner(share[..., 0])[:, None]
        self.policy.score.watch(state, p.mean(-1)[:, None], share, pos[:, :, None])

    # Compression.

    def flush(self, rows: Rows, full: Tensor) -> None:
        """Compress the rows (bool `[B]`) whose fresh part is full."""
        self.compress(self.candidates(rows), rows, active=full)

    def compress(
        self,
        parts: list[Tokens],
        rows: Rows,
        pos: Tensor | None = None,
        q: Tensor | None = None,
        active: Tensor | None = None,
    ) -> None:
        """Survivors of all candidates become kept, in the active rows (bool `[B]`); the others stay as they are.

        pos `[B, T]`: of a chunk that is last among the parts, whose rows are active; q `[B, G*H, T, D]`: its
        queries, if it has attended through the cache.
        """
        solid = not rows.gaps and (rows.empty or not self.disorders)
        if solid and self.extends and sum(t.pos.shape[2] for t in parts) <= self.kept.slots:
            # Nothing to choose, and nothing that is kept already moves.
            kept, arriving = (0, parts) if rows.empty else (parts[0].pos.shape[2], parts[1:])
            self.kept.pools[0].extend(arriving, kept)
            return
        if active is None:
            active = (pos >= 0).any(1)
        found = joined(parts)
        if not solid:
            found = found.in_order()
        seen = replace(self.seen([found], rows, pos, q), solid=solid)
        if q is not None and self.statistics:
            found = replace(found, state=self.policy.score.absorb(seen))
            seen = replace(seen, state=found.state)
        survives = seen.valid
        if found.pos.shape[2] > self.kept.slots and not self.adds:
            survives = self.policy.select(seen, self.budget, self.index)
        scores = self.policy.score.score(seen) if self.policy.store.tiers_by_score else None
        if self.kept.fits:
            self.kept.fit(found, survives, seen.real_queries, active)
        self.kept.keep(found, survives, active, scores, self.adds)

    def drop_one(self, new: Tokens, q: Tensor, pos: Tensor, rows: Rows) -> None:
        """Of the kept tokens and the newest one the least important goes; an empty slot goes first."""
        seen = self.seen([*self.kept.tokens(self.kept.slots), new], rows, pos, q)
        if self.drops_before:
            seen = replace(seen, ahead=0)
        ranks = self.policy.guard(self.policy.score.score(seen), seen, self.budget)
        # Among equals the later position goes.
        least = torch.where(ranks == ranks.amin(-1, keepdim=True), seen.pos, -2)
        self.kept.replace(least.argmax(-1, keepdim=True), new)

    def seen(self, parts: list[Tokens], rows: Rows, pos: Tensor | None, q: Tensor | None) -> Seen:
        """What scorers are shown; pos and q as in `compress`."""
        n, (wo, turn) = rows.n_queries, self.borrowed
        queries, q_pos = self.queries, rows.query_pos
        if n and q is not None:
            queries, q_pos = self.with_latest(q, pos, rows), rows.with_latest(pos)
        return Seen(
            q=queries[:, :, :, :n],
            q_pos=q_pos[:, :n],
            k_parts=[t.k for t in parts],
            v_parts=[t.v for t in parts],
            pos=torch.cat([t.pos for t in parts], 2),
            last=rows.last(pos),
            sliding=self.window,
            wo=wo.weight.view(-1, *self.queries.shape[1:3], self.sizes.head_dim)
            if self.weighs_output
            else None,
            state={name: torch.cat([t.state[name] for t in parts], 2) for name in self.statistics},
            new_q=None if q is None else q.unflatten(1, (self.sizes.heads, -1)),
            new_pos=None if q is None else pos,
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
        slot = at_slots(rows.cursor[:, None, None].expand(-1, self.sizes.heads, -1))
        for buffer, x in pairs:
            buffer[slot] = x

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
        if rows.empty:
            return []
        return [*self.kept.tokens(rows.used), self.fresh_tokens(rows.n_fresh, rows)]

    def candidates(self, rows: Rows) -> list[Tokens]:
        """Of what is held, that which may move: codes to which others are only added need no look."""
        if rows.empty:
            return []
        adds_only = self.adds and not self.policy.store.tiers_by_score
        pools = [pool for pool in self.kept.pools if pool.exact or not adds_only]
        tokens = [pool.tokens(pool.filled(rows.used)) for pool in pools]
        return [*tokens, self.fresh_tokens(rows.n_fresh, rows)]

    def fresh_tokens(self, n: int, rows: Rows) -> Tokens:
        pos = rows.fresh_pos[:, None, :n].expand(-1, self.sizes.heads, -1)
        state = {name: self.get_buffer(f"fresh_{name}")[:, :, :n] for name in self.statistics}
        return Tokens(self.fresh_k[:, :, :n], self.fresh_v[:, :, :n], pos, state)

    def resize_room(self, room: int) -> None:
        for name in ("k", "v", *self.statistics):
            setattr(self, f"fresh_{name}", resized(self.get_buffer(f"fresh_{name}"), 2, room))

    def reset(self) -> None:
        self.kept.reset()
        for buffer in self.buffers(recurse=False):
            buffer.zero_()
