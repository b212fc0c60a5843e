#!/usr/bin/env python3
"""What kvpress adds to the time of reading a prompt, on the same weights (needs requirements-dev.txt).

    python scripts/bench_peers.py --tokens 4096 --repeat 3

To be read beside scripts/bench_prefill.py, which measures ours in the same way. The last line is JSON.
"""

import argparse
import sys
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kvpress
import torch
import transformers

from models.hub import find
from scripts.command_line import Parser, print_seconds

PRESSES = {
    "snapkv": lambda r: kvpress.SnapKVPress(r, window_size=32, kernel_size=7),
    "pyramidkv": lambda r: kvpress.PyramidKVPress(r, window_size=32, kernel_size=7),
    "adakv": lambda r: kvpress.AdaKVPress(kvpress.SnapKVPress(r, window_size=32, kernel_size=7)),
    "criticalkv": lambda r: kvpress.CriticalKVPress(kvpress.SnapKVPress(r, window_size=32, kernel_size=7)),
    "l2": kvpress.KnormPress,
    "keydiff": kvpress.KeyDiffPress,
    "streaming": kvpress.StreamingLLMPress,
    "tova": kvpress.TOVAPress,
    "expectedattention": kvpress.ExpectedAttentionPress,
    "random": kvpress.RandomPress,
}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="What kvpress adds to the time of reading a prompt.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policy", nargs="+", default=list(PRESSES), choices=list(PRESSES))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3)
    return parser.parse_args(argv)


@torch.no_grad()
def measure(args: argparse.Namespace) -> dict[str, list[float]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(find(args.model), dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (1, args.tokens), generator=generator)
    ratio = 1 - args.budget / args.tokens
    presses = {"full": None} | {name: PRESSES[name](ratio) for name in args.policy}
    times: dict[str, list[float]] = {name: [] for name in presses}
    model(ids, logits_to_keep=1)  # warms up
    for name, press in [item for _ in range(args.repeat) for item in presses.items()]:
        start = perf_counter()
        with nullcontext() if press is None else press(model):
            model(ids, past_key_values=transformers.DynamicCache(), logits_to_keep=1)
        times[name].append(perf_counter() - start)
    return times


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    times = measure(args)
    print_seconds("kvpress", times, vars(args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
