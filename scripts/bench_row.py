#!/usr/bin/env python3
"""One row of scripts/bench.py in a process of its own, or the theory of all rows. bench.py starts it.

    python scripts/bench_row.py physics '{"settings": {...}, "rows": [{"policy": "full", ...}, ...]}'
    python scripts/bench_row.py measure '{"settings": {...}, "rows": [{"policy": "full", ...}]}'

The last line is JSON; what goes wrong is one line on standard error and exit code 2.
"""

import hashlib
import json
import resource
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn

from minikv import CompressedKVCache, Policy
from minikv.generate import prefill, wait_for
from minikv.physics import bandwidth, cache_bytes, weight_bytes
from minikv.step import CompiledStep, Step, step
from models import load_model, random_model

PIECE = 512  # tokens that a synthetic fill feeds at a time
CHECKED = 32  # first tokens of which the ids are compared and hashed: eager steps can be slow


@dataclass(frozen=True)
class Settings:
    """What all rows of a run share. Flags of bench.py with the same names explain them."""

    model: str
    random_weights: str | None
    quantize: str | None
    dtype: str | None
    device: str | None
    compile: bool
    fill: str  # "prefill" | "synthetic"
    new_tokens: int
    repeat: int
    warmup: int
    room: int
    every: int | None

    @property
    def total(self) -> int:
        """Tokens generated per batch row: the rounds follow each other in one cache."""
        return (self.warmup + self.repeat) * self.new_tokens


@dataclass(frozen=True)
class Row:
    policy: str
    budget: int | None  # None where the policy drops nothing
    context: int
    batch: int


def load(settings: Settings) -> nn.Module:
    place = dict(device=settings.device, dtype=settings.dtype, quantize=settings.quantize)
    if settings.random_weights:
        return random_model(settings.random_weights, **place)
    return load_model(settings.model, **place)


def make_cache(model: nn.Module, row: Row, settings: Settings) -> CompressedKVCache:
    """As the chat makes it: recompressed whenever the room is full, unless `every` says otherwise."""
    policy = replace(Policy.parse(row.policy), every=settings.every)
    n = row.context + settings.total
    shape = dict(batch=row.batch, room=settings.room)
    if row.budget is None:
        return CompressedKVCache.for_model(model, policy, budget=n, context=n, **shape)
    cache = CompressedKVCache.for_model(model, policy, budget=row.budget, **shape)
    cache.check_fits(n)
    return cache


# Theory.


def physics(settings: Settings, rows: list[Row]) -> dict[str, Any]:
    """Bytes of weights and cache per step, and bytes per second. A row that cannot work has an error instead."""
    model = load(settings)
    device, dtype = model.norm.weight.device, model.norm.weight.dtype
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found = [theory(model, row, settings) for row in rows]
    return dict(
        machine=dict(device=name, threads=torch.get_num_threads(), torch=torch.__version__),
        dtype=str(dtype).removeprefix("torch."),
        bandwidth=bandwidth(device, dtype),
        rows=found,
    )


def theory(model: nn.Module, row: Row, settings: Settings) -> dict[str, Any]:
    """Bytes a step reads in the middle of the timed ones."""
    try:
        cache = make_cache(model, row, settings)
        cache.reserve(settings.total)
    except (ValueError, RuntimeError) as error:  # RuntimeError: out of memory
        return dict(error=first_line(error))
    middle = settings.warmup * settings.new_tokens + settings.repeat * settings.new_tokens // 2
    read = cache_bytes(cache, row.context, middle)
    return dict(weight_bytes=weight_bytes(model, row.batch), cache_read_bytes=read, cache_bytes=cache.nbytes)


# Measurement.


@torch.no_grad()
def measure(settings: Settings, row: Row) -> dict[str, Any]:
    """Seconds of prefills, first tokens and the steps of each timed round, hashes of the ids, bytes of memory.

    The first fill is followed by eager steps, if the others are to be compiled: the ids to compare with.
    Rounds of decoding follow each other after the last fill. Only the last `repeat` of each are given.
    """
    begun = perf_counter()
    model = load(settings)
    load_seconds = perf_counter() - begun
    device = model.norm.weight.device
    forget_peak(device)
    cache = make_cache(model, row, settings)
    rounds = settings.warmup + settings.repeat
    n_fills = max(1 + settings.compile, rounds if settings.fill == "prefill" else 1)
    checked, eager, fills = min(settings.new_tokens, CHECKED), None, []
    for _ in range(n_fills):
        cache.reset()
        token, times = fill(model, cache, row, settings)
        cache.reserve(settings.total)
        fills.append(times)
        if settings.compile and eager is None:
            eager, _ = decode(model, cache, step, token, checked)
    run = CompiledStep(cache) if settings.compile else step
    decoded = [decode(model, cache, run, token, settings.new_tokens) for _ in range(rounds)]
    timed = [times for times in fills[-settings.repeat :] if times]
    ids = decoded[0][0][:checked]
    return dict(
        load_seconds=load_seconds,
        prefill_seconds=[prefilled for prefilled, _ in timed],
        first_token_seconds=[first for _, first in timed],
        compile_seconds=decoded[0][1][0] if settings.compile else None,
        step_seconds=[times for _, times in decoded[-settings.repeat :]],
        ids_hash=digest(ids),
        eager_hash=None if eager is None else digest(eager),
        differs_at=None if eager is None else first_difference(ids, eager),
        cache_bytes=cache.nbytes,
        **memory(device),
    )


def fill(
    model: nn.Module, cache: CompressedKVCache, row: Row, settings: Settings
) -> tuple[Tensor, tuple[float, float] | None]:
    """`row.context` random tokens per batch row into an empty cache -> the next token `[B, 1]` and seconds.

    These are to the prompt's logits and to that token; None for a synthetic fill.
    """
    device = cache.rows.seen.device
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (row.batch, row.context), generator=generator)
    if settings.fill == "synthetic":
        fill_randomly(model, cache, ids.to(device))
        return ids[:, -1:].to(device), None
    begun = perf_counter()
    logits = prefill(model, ids.tolist(), cache)
    wait_for(logits)
    prefilled = perf_counter() - begun
    token = logits.argmax(-1, keepdim=True)
    wait_for(token)
    return token, (prefilled, perf_counter() - begun)


def fill_randomly(model: nn.Module, cache: CompressedKVCache, ids: Tensor, piece_size: int = PIECE) -> None:
    """Random queries, keys and values for ids `[B, n]`, without running the model; the policy compresses as ever."""
    config, dtype = model.config, model.norm.weight.dtype
    generator = torch.Generator(ids.device).manual_seed(0)
    for piece in ids.split(piece_size, dim=1):
        pos = cache.begin(piece)
        for layer in range(config.n_layers):
            q, k, v = (
                torch.randn(
                    len(ids), heads, piece.shape[1], config.head_dim,
                    dtype=dtype, device=ids.device, generator=generator,
                )
                for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)
            )  # fmt: skip
            cache.attend(layer, q, k, v, pos)
        cache.end(pos)


def decode(
    model: nn.Module, cache: CompressedKVCache, run: Step, token: Tensor, n: int
) -> tuple[list[list[int]], list[float]]:
    """n greedy steps from `token [B, 1]`, which moves on -> ids `[n][B]` and the seconds of each step."""
    pos = torch.zeros_like(token)
    ids, seconds = [], []
    for _ in range(n):
        begun = perf_counter()
        pos.copy_(cache.seen[:, None])
        logits = run(model, cache, token, pos)
        cache.settle()
        wait_for(logits)
        seconds.append(perf_counter() - begun)
        token.copy_(logits.argmax(-1, keepdim=True))
        ids.append(token[:, 0].tolist())
    return ids, seconds


def digest(ids: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:16]


def first_difference(ids: list[list[int]], others: list[list[int]]) -> int | None:
    """The first step in which any row's ids differ; a rounding may tip two equally likely tokens."""
    return next((i for i, pair in enumerate(zip(ids, others, strict=True)) if pair[0] != pair[1]), None)


STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def forget_peak(device: torch.device) -> None:
    """Loading a model may take more than running it: count from here on, where the system lets us."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif CLEAR.exists():
        CLEAR.write_text("5")  # see proc(5)


def memory(device: torch.device) -> dict[str, int | None]:
    """Bytes held now and at most: of the GPU's memory, else of this process (compiler and mapped files too)."""
    if device.type == "cuda":
        return dict(
            resident_bytes=torch.cuda.memory_allocated(device),
            peak_bytes=torch.cuda.max_memory_allocated(device),
        )
    if STATUS.exists():
        lines = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        resident, peak = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
        return dict(resident_bytes=resident, peak_bytes=peak)
    # Without /proc only the peak can be asked for: in bytes on macOS.
    return dict(resident_bytes=None, peak_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def main(argv: list[str]) -> int:
    verb, text = argv
    task = json.loads(text)
    settings, rows = Settings(**task["settings"]), [Row(**row) for row in task["rows"]]
    try:
        found = physics(settings, rows) if verb == "physics" else measure(settings, rows[0])
    except (ValueError, OSError, RuntimeError) as error:  # RuntimeError: out of memory
        print(f"error: {first_line(error)}", file=sys.stderr)
        return 2
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
