#!/usr/bin/env python3
"""Compiled decode steps of several caches side by side: ratios that a drifting machine does not disturb.

    python scripts/bench_steps.py full::8000 snapkv:512:8000 snapkv:512:3000 snapkv:512:1000 adakv:512:8000
    python scripts/bench_steps.py full::6000 int8::6000 int4::6000 kivi4::6000 turbo4::6000 turbo2::6000
    python scripts/bench_steps.py full::8000:8 snapkv:512:8000:8

A row is POLICY:BUDGET:CONTEXT[:BATCH]; without a budget the cache holds the whole context. Caches are filled with
seeded random keys and values, compressed as they would be in a chat, and visited in turn, a few steps each. The
first row is what the others are compared with. Steps that compress are in the times, compiling is not.
"""

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from minikv import CompressedKVCache, Policy
from minikv.generate import wait_for
from minikv.step import CompiledStep
from models import load_model
from scripts.bench_row import fill_randomly
from scripts.command_line import Parser

PIECE = 1024  # tokens that are filled in at a time
VISIT = 4  # steps before the next cache's turn
WARMUP = 8


@dataclass
class Row:
    policy: str
    budget: int | None
    context: int
    batch: int = 1
    seconds: list[float] = field(default_factory=list)

    @classmethod
    def parse(cls, text: str) -> "Row":
        """Raises ValueError for what is no POLICY:BUDGET:CONTEXT[:BATCH]."""
        policy, *numbers = text.split(":")
        if len(numbers) not in (2, 3) or not all(n.isdigit() for n in numbers[1:]):
            raise ValueError(
                f"{text!r} is no row; write POLICY:BUDGET:CONTEXT[:BATCH], as in snapkv:512:8000"
            )
        Policy.parse(policy)
        return cls(policy, int(numbers[0]) if numbers[0] else None, *map(int, numbers[1:]))

    def cache(self, model: nn.Module, steps: int, batch: int) -> CompressedKVCache:
        whole = self.context + steps + WARMUP
        return CompressedKVCache.for_model(
            model, self.policy, self.budget or whole, batch, context=None if self.budget else whole
        )


@torch.no_grad()
def filled(model: nn.Module, row: Row, steps: int) -> CompressedKVCache:
    """The row's cache. Sequences of a batch hold the same: one is filled, the others are its copies."""
    one = row.cache(model, steps, batch=1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, row.context), generator=generator)
    fill_randomly(model, one, ids, piece_size=PIECE)
    if row.batch == 1:
        return one
    cache = row.cache(model, steps, row.batch)
    for (_, buffer), (_, source) in zip(cache.named_buffers(), one.named_buffers(), strict=True):
        buffer.copy_(source.expand_as(buffer))
    cache.rows.used, cache.rows.free = one.rows.used, one.rows.free
    return cache


@torch.no_grad()
def measure(model: nn.Module, rows: list[Row], steps: int) -> None:
    """Fill in each row's seconds per step."""
    runs = []
    for row in rows:
        cache = filled(model, row, steps)
        token = torch.zeros(row.batch, 1, dtype=torch.int64)
        print(f"{row.policy}, {row.context} tokens: {cache.nbytes / 2**20:.1f} MiB", file=sys.stderr)
        runs.append((row, cache, CompiledStep(cache), token))
    for _ in range(-(-(steps + WARMUP) // VISIT)):
        for row, cache, run, token in runs:
            for _ in range(VISIT):
                begun = perf_counter()
                wait_for(run(model, cache, token, cache.seen[:, None]))
                cache.settle()
                row.seconds.append(perf_counter() - begun)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Compiled decode steps of several caches, visited in turn.")
    parser.add_argument("rows", nargs="+", metavar="ROW", help="POLICY:BUDGET:CONTEXT[:BATCH]")
    parser.add_argument("--model", default="smollm2-135m", help="as in chat.py (smollm2-135m)")
    parser.add_argument("--dtype", help="as in chat.py")
    parser.add_argument("--quantize", help="int8 or int4 weights")
    parser.add_argument("--steps", type=int, default=152, help="timed steps of each (152)")
    args = parser.parse_args(argv)
    if args.steps < 1:
        parser.error(f"--steps must be at least 1, not {args.steps}")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        rows = [Row.parse(text) for text in args.rows]
        measure(load_model(args.model, "cpu", args.dtype, quantize=args.quantize), rows, args.steps)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    first = median(rows[0].seconds[WARMUP:])
    print("row                           ms/step (range)           time of the first = 1")
    for text, row in zip(args.rows, rows, strict=True):
        low, middle, high = (1e3 * f(row.seconds[WARMUP:]) for f in (min, median, max))
        print(f"{text:28} {middle:8.2f} ({low:.2f}, {high:.2f})   {middle / first / 1e3:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
