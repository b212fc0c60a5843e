#!/usr/bin/env python3
"""What each method adds to the time of reading a prompt.

    python scripts/bench_prefill.py --tokens 4096 --repeat 3
    python scripts/bench_prefill.py --policy snapkv h2o --random-weights llama3.2-1b --dtype bfloat16

Rounds visit all policies in turn, so that drift of the machine hits them alike. The last line is JSON.
"""

import argparse
import sys
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.progress import track

from minikv import METHODS, CompressedKVCache
from minikv.generate import prefill, wait_for
from models import load_model, random_model
from scripts.command_line import Parser, print_seconds

SKIPPED = ("hashevict", "kvzip")  # thousands of small steps, and a second reading: name them to have them


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="What each method adds to the time of reading a prompt.")
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="as in chat.py (smollm2-135m)")
    add("--random-weights", metavar="PRESET", help="a preset's shape instead of a model")
    add("--policy", nargs="+", default=[m for m in METHODS if m not in (*SKIPPED, "full")])
    add("--tokens", type=int, default=4096)
    add("--budget", type=int, default=512)
    add("--repeat", type=int, default=3)
    add("--device")
    add("--dtype")
    return parser.parse_args(argv)


def seconds(model: torch.nn.Module, cache: CompressedKVCache, ids: list[int]) -> float:
    cache.reset()
    start = perf_counter()
    wait_for(prefill(model, [ids], cache))
    return perf_counter() - start


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds per policy and round, the full cache first."""
    if args.random_weights:
        model = random_model(args.random_weights, args.device, args.dtype)
    else:
        model = load_model(args.model, args.device, args.dtype)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (args.tokens,), generator=generator).tolist()
    names = ["full", *args.policy]
    caches = {
        name: CompressedKVCache.for_model(
            model, name, budget=args.budget, context=args.tokens if name == "full" else None
        )
        for name in names
    }
    times: dict[str, list[float]] = {name: [] for name in names}
    seconds(model, caches["full"], ids)  # warms up
    runs = [name for _ in range(args.repeat) for name in names]
    for name in track(runs, "prefills", disable=not sys.stderr.isatty()):
        times[name].append(seconds(model, caches[name], ids))
    return times


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        times = measure(args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_seconds("prefill", times, vars(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
