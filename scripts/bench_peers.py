#!/usr/bin/env python3
"""minikv beside transformers, and kvpress, on the same weights, threads and prompt (needs requirements-dev.txt).

    python scripts/bench_peers.py decode --tokens 128 --new-tokens 256 --dtype bfloat16
    python scripts/bench_peers.py decode --tokens 4096 --policy snapkv adakv --budget 512
    python scripts/bench_peers.py prefill --tokens 128 2048 8000
    python scripts/bench_peers.py kvpress --tokens 4096 --repeat 3

`decode`: a full cache, eager and compiled, beside transformers' dynamic, static, and static and compiled one, and what
share of its ceiling each of ours reaches: bytes of weights and held tokens over the bandwidth of one large float32
matrix-vector product, measured in each round; medians of both. With --policy also that method at --budget: ours
compiled, and kvpress's, which compresses a dynamic cache after the prompt and adds nothing to a step. `prefill`:
reading a prompt. Rounds visit all in turn, so that drift of the machine hits them alike. `kvpress`: what its presses
add to reading a prompt, to be read beside scripts/bench_prefill.py. The last line is JSON.
"""

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import kvpress
import torch
import transformers
from torch import Tensor, nn

from minikv import CompressedKVCache
from minikv.generate import prefill
from minikv.physics import bandwidth, cache_bytes, weight_bytes
from minikv.step import CompiledStep, step
from models import load_model
from models.hub import find
from models.load import DTYPES
from scripts.bench_row import decode, digest
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

ROOM = 64  # fresh tokens: a full cache only copies them on, and a compiled step reads the empty slots too

Decoded = tuple[list[list[int]], list[float]]  # ids [n][B], and the seconds of each step


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="minikv beside transformers and kvpress, on the same weights.")
    tasks = parser.add_subparsers(dest="task", required=True, metavar="decode | prefill | kvpress")
    for name, what in (
        ("decode", "one token after another through a full cache"),
        ("prefill", "reading a prompt"),
        ("kvpress", "what its presses add to reading a prompt"),
    ):
        task = tasks.add_parser(name, help=what, description=what)
        task.add_argument("--model", default="smollm2-135m", help="as in chat.py (smollm2-135m)")
        task.add_argument("--repeat", type=int, default=3, help="rounds (3)")
        task.add_argument("--dtype", default="float32", choices=list(DTYPES), help="of weights (float32)")
        task.add_argument(
            "--tokens", type=int, nargs="+" if name == "prefill" else None, help="prompt",
            default={"decode": 128, "prefill": [128, 2048], "kvpress": 4096}[name],
        )  # fmt: skip
    decoding, press = tasks.choices["decode"], tasks.choices["kvpress"]
    decoding.add_argument("--new-tokens", type=int, default=64, help="tokens of a round (64)")
    decoding.add_argument("--quantize", nargs="+", default=[], help="also ours with these weights, compiled")
    decoding.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="both sides")
    for task, policies in ((decoding, []), (press, list(PRESSES))):
        task.add_argument("--policy", nargs="+", default=policies, choices=list(PRESSES))
        task.add_argument(
            "--budget", type=int, default=512, help="tokens per KV head that a method leaves (512)"
        )
    args = parser.parse_args(argv)
    tokens = args.tokens if args.task == "prefill" else [args.tokens]
    if args.repeat < 1 or min(tokens) < 1:
        parser.error("--repeat and --tokens must be at least 1")
    if args.task != "prefill" and args.policy and not 1 <= args.budget <= args.tokens:
        parser.error(f"a budget of {args.budget} of {args.tokens} tokens; --budget takes 1 to --tokens")
    return args


def load_theirs(args: argparse.Namespace) -> nn.Module:
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(find(args.model), dtype=DTYPES[args.dtype])
    return model.eval().requires_grad_(False)


def random_ids(model: nn.Module, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, model.config.vocab_size, (1, tokens), generator=generator)


# Decoding.


class Side(NamedTuple):
    """decode_round: a prompt, then timed steps. nbytes: what one of them must read, of ours."""

    decode_round: Callable[[], Decoded]
    nbytes: int | None = None


def ours(
    model: nn.Module, compiled: bool, ids: Tensor, n: int, policy: str = "full", budget: int = 512
) -> Side:
    """The prompt is `ids [1, T]`; n timed steps."""
    cache = CompressedKVCache.for_model(model, policy, budget, context=ids.shape[1] + n, room=ROOM)
    run = CompiledStep(cache) if compiled else step

    def decode_round() -> Decoded:
        cache.reset()
        token = prefill(model, ids.tolist(), cache).argmax(-1, keepdim=True)
        return decode(model, cache, run, token, n)

    return Side(decode_round, weight_bytes(model) + cache_bytes(cache, ids.shape[1], n // 2))


def theirs(
    model: nn.Module,
    static: bool,
    compiled: bool,
    ids: Tensor,
    n: int,
    press: kvpress.BasePress | None = None,
) -> Side:
    """transformers' model with nothing around it: their `generate` adds work to every token."""
    length = ids.shape[1]
    buffers = transformers.StaticCache(config=model.config, max_cache_len=length + n) if static else None
    forward = torch.compile(model.forward, fullgraph=True, dynamic=False) if compiled else model.forward

    def decode_round() -> Decoded:
        cache = transformers.DynamicCache(config=model.config)
        if buffers is not None:
            cache = buffers
            cache.reset()
        with nullcontext() if press is None else press(model):
            logits = model(ids, past_key_values=cache, logits_to_keep=1).logits
        token = logits[:, -1].argmax(-1, keepdim=True)
        found, seconds = [], []
        for i in range(length, length + n):
            begun = perf_counter()
            pos = torch.tensor([i])
            out = forward(token, past_key_values=cache, cache_position=pos, position_ids=pos[None])
            seconds.append(perf_counter() - begun)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            found.append(token[:, 0].tolist())
        return found, seconds

    return Side(decode_round)


def contenders(args: argparse.Namespace) -> dict[str, Side]:
    model, peer = load_model(args.model, "cpu", args.dtype), load_theirs(args)
    ids, n = random_ids(model, args.tokens), args.new_tokens
    found = {
        "minikv": ours(model, False, ids, n),
        "transformers dynamic": theirs(peer, False, False, ids, n),
        "transformers static": theirs(peer, True, False, ids, n),
    }
    if args.compile:
        found["minikv compiled"] = ours(model, True, ids, n)
        found["transformers static compiled"] = theirs(peer, True, True, ids, n)
    for policy in args.policy:
        press = PRESSES[policy](1 - args.budget / args.tokens)
        found[f"kvpress {policy}"] = theirs(peer, False, False, ids, n, press)
        name = f"minikv {policy}" + " compiled" * args.compile
        found[name] = ours(model, args.compile, ids, n, policy, args.budget)
    for bits in args.quantize:
        small = load_model(args.model, "cpu", args.dtype, quantize=bits)
        found[f"minikv {bits}" + " compiled" * args.compile] = ours(small, args.compile, ids, n)
    return found


@torch.no_grad()
def compare_decoding(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds per step, each the median of a round, and a hash of the ids by name; a first round warms up."""
    sides = contenders(args)
    hashes = {}
    for name, side in sides.items():
        print(f"warming up {name}", file=sys.stderr)
        hashes[name] = digest(side.decode_round()[0])
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    speeds = []  # bytes per second
    for index in range(args.repeat):
        found = bandwidth(torch.device("cpu"), torch.float32, typical=median)
        speeds.append(max(filter(None, found.values())))
        for name in turned(list(sides), index):
            seconds[name].append(median(sides[name].decode_round()[1]))
    show(f"decode after {args.tokens} tokens, {args.dtype}", seconds, 1000, "ms/token")
    reached = shares(sides, seconds, median(speeds))
    print("ids: " + ", ".join(f"{name} {digits[:6]}" for name, digits in hashes.items()))
    return dict(seconds=seconds, ids=hashes, bandwidth=speeds, share_of_ceiling=reached)


def shares(sides: dict[str, Side], seconds: dict[str, list[float]], speed: float) -> dict[str, float]:
    """Share of its ceiling that each of ours reaches, told on a line."""
    least = {name: side.nbytes / speed for name, side in sides.items() if side.nbytes}  # seconds
    found = {name: time / median(seconds[name]) for name, time in least.items()}
    told = ", ".join(f"{name} {found[name]:.0%} of {1000 * least[name]:.2f} ms" for name in found)
    print(f"ceiling, at {speed / 1e9:.1f} GB/s: {told}")
    return found


def turned(names: list[str], index: int) -> list[str]:
    """Every other round in reverse: a machine that slows down is then no one's advantage."""
    return names[::-1] if index % 2 else names


# Prefill.


@torch.no_grad()
def compare_prefill(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the logits after the prompt, for each length by name; a first round warms up."""
    model, peer = load_model(args.model, "cpu", args.dtype), load_theirs(args)
    found = {}
    for tokens in args.tokens:
        ids = random_ids(model, tokens)
        # Made once: in a fresh one the first touch of its memory would be in the time.
        cache = CompressedKVCache.for_model(model, "full", context=tokens)
        sides = {
            "minikv": partial(our_prefill, model, cache),
            "transformers": partial(their_prefill, peer),
        }
        rounds = [
            {name: sides[name](ids) for name in turned(list(sides), index)}
            for index in range(args.repeat + 1)
        ][1:]
        seconds = {name: [one[name] for one in rounds] for name in sides}
        show(f"prefill of {tokens} tokens, {args.dtype}", seconds, 1, "s")
        found[tokens] = seconds
    return dict(seconds=found)


def our_prefill(model: nn.Module, cache: CompressedKVCache, ids: Tensor) -> float:
    cache.reset()
    begun = perf_counter()
    prefill(model, ids.tolist(), cache)
    return perf_counter() - begun


def their_prefill(model: nn.Module, ids: Tensor) -> float:
    cache = transformers.DynamicCache(config=model.config)
    begun = perf_counter()
    model(ids, past_key_values=cache, logits_to_keep=1)
    return perf_counter() - begun


def show(title: str, seconds: dict[str, list[float]], scale: float, unit: str) -> None:
    """Medians, ranges, and how many times as fast as the best of transformers."""
    best = min(median(took) for name, took in seconds.items() if name.startswith("transformers"))
    print(
        f"{title}: {unit}, median of {len(seconds['minikv'])} rounds (range), speed over transformers' best"
    )
    for name, took in seconds.items():
        low, middle, high = (scale * x for x in (min(took), median(took), max(took)))
        print(f"{name:30} {middle:8.2f} ({low:.2f}, {high:.2f})  {best / median(took):5.2f}")


# kvpress.


@torch.no_grad()
def measure_presses(args: argparse.Namespace) -> dict[str, list[float]]:
    model = load_theirs(args)
    ids = random_ids(model, args.tokens)
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
    try:
        if args.task == "kvpress":
            print_seconds("kvpress", measure_presses(args), vars(args))
            return 0
        found = {"decode": compare_decoding, "prefill": compare_prefill}[args.task](args)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(dict(settings=vars(args), threads=torch.get_num_threads(), **found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
