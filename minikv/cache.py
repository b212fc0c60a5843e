"""CompressedKVCache: kept and fresh tokens of every layer, and one operation, compress.

    one layer:   | kept: survivors of the last compression | fresh: tokens since then |
    compress:      kept + fresh + new tokens  ->  kept

A prompt or a turn (T > 1) is compressed layer by layer right after it has attended, so at most one
layer's uncompressed keys and values exist at a time. A single token (T = 1) goes to fresh; when fresh
is full it is compressed into kept. Positions are true positions, one per slot, and the only mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import minikv.cache_file as cache_file
from minikv.layer import Layer
from minikv.policy import Policy
from minikv.pool import Sizes
from minikv.rows import Rows

DEFAULT_CONTEXT = 8192
UNLIMITED = 2**31 - 1  # positions are int32


class CompressedKVCache(nn.Module):
    """Made by `for_model`. A model calls `begin`, `attend` in each layer, `end`."""

    def __init__(
        self,
        model: nn.Module,
        policy: Policy,
        budgets: list[int],
        batch: int,
        room: int,
        limit: int,
        device: torch.device | None = None,
    ):
        super().__init__()
        config, weight = model.config, model.norm.weight
        self.policy, self.budgets, self.limit = policy, budgets, limit
        self.model_id = cache_file.fingerprint(model)
        self.note: dict[str, Any] | None = None  # what `save` was given beside the cache
        group = config.n_heads // config.n_kv_heads
        device = device or weight.device
        sizes = Sizes(batch, config.n_kv_heads, group, config.head_dim, weight.dtype, device)
        # Codes that span tokens and to which others are only added start at multiples of their span.
        aligned = policy.store.span > 1 and not policy.drops
        room = policy.store.span if aligned else policy.every or room
        self.rows = Rows(batch, room, policy.score.n_queries, not policy.heads.uniform, device, aligned)
        constants = policy.store.constants(config.head_dim, device)
        self.layers = nn.ModuleList(
            Layer(
                i,
                sizes,
                policy,
                budget,
                config.window(i),
                block.attention.wo,
                model.rope.turn,
                self.rows,
                constants,
                limit,
            )
            for i, (budget, block) in enumerate(zip(budgets, model.layers, strict=True))
        )

    @classmethod
    def for_model(
        cls,
        model: nn.Module,
        policy: Policy | str = "full",
        budget: int = 512,
        batch: int = 1,
        room: int = 256,
        context: int | None = None,
        device: torch.device | None = None,
    ) -> CompressedKVCache:
        """An empty cache of the model's shape, in its dtype and, by default, on its device.

        budget: tokens per KV head per layer, on average, that survive a compression, sinks and recent
            tokens included. Stores that drop nothing hold that many and refuse more; the full cache ignores
            it and holds `context` tokens.
        room: fresh tokens between two compressions; the policy's `every` overrides it.
        context: most tokens a full cache can hold; default the model's limit or 8192, whichever is less.
        Raises ValueError for numbers that cannot work.
        """
        policy = Policy.parse(policy) if isinstance(policy, str) else policy
        for name, value in (("budget", budget), ("batch", batch), ("room", room), ("context", context)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        limit = model.config.max_position
        if context is not None and context > limit:
            raise ValueError(f"a context of {context} tokens is more than the model's limit of {limit}")
        if not policy.drops and policy.store.coded:
            budget = limit = min(budget, limit)
        elif not policy.drops:
            budget = limit = context or min(DEFAULT_CONTEXT, limit)
        if policy.score.shifts_sinks:
            limit = UNLIMITED
        # No layer can ever hold more tokens than there may be.
        budgets = [min(b, limit) for b in policy.layers.split_layers(budget, model.config.n_layers)]
        policy.check_budget(min(budgets))
        return cls(model, policy, budgets, batch, room, limit, device)

    # What a model calls.

    def begin(self, tokens: Tensor, pos: Tensor | None = None) -> Tensor:
        """Positions `[B, T]` of new tokens (ids `[B, T]`), checked, with room made for them; -1 is a row at rest.

        `pos=None` continues after the tokens already seen. Raises ValueError where the batch differs,
        positions go back, or the context is exceeded.
        """
        rows = self.rows
        batch, length = tokens.shape
        if batch != len(rows.seen):
            raise ValueError(f"the cache holds {len(rows.seen)} rows, the tokens have {batch}")
        order = torch.arange(length, device=rows.seen.device)
        if pos is None:
            pos = rows.seen[:, None] + order
        if length == 0 or pos.shape != tokens.shape:
            raise ValueError(
                f"tokens are {list(tokens.shape)} and their positions {list(pos.shape)}; both must be [B, T] "
                "with at least one token"
            )
        # Each position is to be above all before it, in this chunk and in the cache.
        before = torch.cat((rows.seen[:, None] - 1, pos[:, :-1]), dim=1).cummax(1).values
        if bool(((pos >= 0) & (pos <= before)).any()):
            raise ValueError(
                f"positions go back: the cache has seen {rows.seen.tolist()} tokens per row, the new ones are "
                f"at {pos.tolist()}"
            )
        self.check_fits(int(pos.max()) + 1)
        rows.plain = bool(((pos < 0) | (pos == pos[:, :1] + order)).all())
        rows.gaps = rows.gaps or bool((pos < 0).any())
        if length == 1:
            self.reserve(1)
            rows.place(tokens, pos)
        else:
            rows.tokens = tokens
            rows.remember(pos)
        return pos

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        """q `[B, G*H, T, D]`, k and v `[B, H, T, D]` after rope, pos `[B, T]` -> y `[B, G*H, T, D]`."""
        if q.shape[2] == 1:
            return self.layers[layer].step(q, k, v, pos, self.rows)
        return self.layers[layer].chunk(q, k, v, pos, self.rows)

    def end(self, pos: Tensor) -> None:
        if pos.shape[1] == 1:
            self.advance(pos)
            self.settle()
        else:
            self.rows.absorb(pos)
            self.rows.tokens = self.rows.token

    # One decode step, in the parts a compiled loop calls: reserve; place, attend ..., advance; settle.

    def reserve(self, n: int) -> None:
        """Fresh slots for n more tokens where nothing makes room during decoding (`every=0`)."""
        rows = self.rows
        if self.policy.every == 0 and rows.free < n:
            # At least twofold, so that a compiled step has few lengths to be compiled for.
            blocks = -(-max(n - rows.free, rows.room) // rows.first_room)
            self.resize_room(rows.room + blocks * rows.first_room)

    def place(self, token: Tensor, pos: Tensor) -> None:
        self.rows.place(token, pos)

    def advance(self, pos: Tensor) -> None:
        self.rows.advance(pos, keeps_fresh=self.policy.every != 1)

    def settle(self) -> None:
        """Host side of a step: count, and compress the rows whose fresh part is full."""
        rows = self.rows
        if self.policy.every == 1:
            rows.used += 1
            return
        rows.free -= 1
        if rows.free == 0 and self.policy.every != 0:
            full = rows.cursor == rows.room
            for layer in self.layers:
                layer.flush(rows, full)
            rows.used += rows.room
            rows.clear(full)

    # What users ask.

    @property
    def seen(self) -> Tensor:
        """Tokens fed so far per row, `[B]`: the position of the next one. A copy."""
        return self.rows.seen.clone()

    @property
    def nbytes(self) -> int:
        """Bytes of every tensor the cache owns, with all that its storage holds."""
        return sum(buffer.untyped_storage().nbytes() for buffer in self.buffers())

    def kept(self, layer: int) -> list[list[list[int]]]:
        """Sorted original positions the layer holds, kept and fresh: rows of KV heads of positions."""
        held = self.layers[layer]
        fresh = held.fresh_tokens(self.rows.room, self.rows).pos
        pos = torch.cat((*held.kept.positions(), fresh), dim=2)  # [B, H, n]
        return [[sorted(p for p in head if p >= 0) for head in row] for row in pos.tolist()]

    def reset(self) -> None:
        """Forget everything. Buffers keep their place, unless fresh had grown (`every=0`)."""
        if self.rows.room != self.rows.first_room:
            self.resize_room(self.rows.first_room)
        self.rows.reset()
        for layer in self.layers:
            layer.reset()

    # Files.

    def save(self, path: str | Path, note: dict[str, Any] | None = None) -> None:
        """Write everything, the policy and the model's fingerprint to one safetensors file.

        `note` is kept beside it, for instance a conversation; `load` puts it into the cache's `note`.
        """
        rows = self.rows
        host = {name: getattr(rows, name) for name in ("used", "free", "room", "gaps")}
        about = dict(
            model=self.model_id,
            policy=cache_file.describe(self.policy),
            make=dict(budgets=self.budgets, batch=len(rows.seen), room=rows.first_room, limit=self.limit),
            host=host,
            note=note,
        )
        cache_file.write(path, dict(self.named_buffers()), about)

    @classmethod
    def load(cls, path: str | Path, model: nn.Module) -> CompressedKVCache:
        """A cache as `save` left it. Raises ValueError if it belongs to another model or dtype."""
        buffers, about = cache_file.read(path)
        if about["model"] != cache_file.fingerprint(model):
            raise ValueError(f"{path} was saved with another model; load it with the one it was made with")
        cache = cls(model, cache_file.policy_of(about["policy"]), **about["make"])
        host = about["host"]
        if host["room"] != cache.rows.room:
            cache.resize_room(host["room"])
        for name, value in host.items():
            setattr(cache.rows, name, value)
        for name, buffer in cache.named_buffers():
            if buffers[name].dtype != buffer.dtype:
                raise ValueError(
                    f"{path} was saved with the model in {buffers[name].dtype}, which is {buffer.dtype} here; "
                    "load the model with that --dtype"
                )
            buffer.copy_(buffers[name])
        cache.note = about["note"]
        return cache

    def check_fits(self, n: int) -> None:
        """Raises ValueError if n tokens in all are more than the cache or the model can take."""
        if n > self.limit:
            raise ValueError(
                f"{n} tokens do not fit into a context of {self.limit}; use a shorter text, or, where that is "
                "less than the model's own limit, a larger context (of a store like int4: a larger budget), or "
                "join an eviction method, as in snapkv+int4"
            )

    def resize_room(self, room: int) -> None:
        self.rows.resize(room)
        for layer in self.layers:
            layer.resize_room(room)
