#!/usr/bin/env python3
"""One command for a GPU: are the kernels right, are CUDA graphs on, and how near to its bandwidth does decoding come?

    python scripts/gpu_check.py --out h200.json
    python scripts/gpu_check.py --preset llama3.2-1b --policy full snapkv --context 2048 --batch 1 --seconds 100

Random weights in a preset's shape, random keys and values: nothing is downloaded and no long prompt is read. First
every Triton kernel against its plain twin, then decoding: eager, compiled with CUDA graphs, compiled without, each
with tokens per second, bytes per step and share of the copy bandwidth measured here, and with no step waiting for the
device. `MINIKV_TRITON=0` decodes without those kernels, to compare. What does not fit into memory or time is named as
skipped; --seconds gives it more. The last line is JSON. Exit code 0: all right, 1: something is wrong, 2: it could
not start.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import nn

from minikv import CompressedKVCache, Policy
from minikv.generate import wait_for
from minikv.physics import cache_bytes, weight_bytes
from minikv.step import CompiledStep, Step, step
from models import MODELS, random_model
from scripts import gpu_kernels
from scripts.bench_row import fill_randomly
from scripts.command_line import Parser

KERNEL_TOKENS = 1000
COPIED_BYTES = {"cpu": 2**26, "cuda": 2**32}
PIECE = 4096  # tokens fed at a time where the cache drops what is beyond its budget
WARMUP = 4  # a compiled step is compiled, then recorded, then replayed
STEPS = 16
ROOM = 256  # for the steps of all modes: none of them compresses
MODES = ("eager", "graphs", "compiled")
POLICIES = ("snapkv", "adakv", "snapkv+int4", "full", "int4")


@dataclass(frozen=True)
class Case:
    """One cache, filled to several contexts in turn, as what is compiled for it depends on its size only."""

    policy: str
    budget: int | None  # None where nothing is dropped
    batch: int
    contexts: tuple[int, ...]

    def cache(self, model: nn.Module) -> CompressedKVCache:
        n = max(self.contexts) + ROOM
        shape = dict(batch=self.batch, room=ROOM)
        if self.budget is None:
            return CompressedKVCache.for_model(model, self.policy, budget=n, context=n, **shape)
        cache = CompressedKVCache.for_model(model, self.policy, budget=self.budget, **shape)
        cache.check_fits(n)
        return cache

    def about(self, context: int) -> dict[str, Any]:
        return dict(policy=self.policy, budget=self.budget, batch=self.batch, context=context)

    def piece(self, context: int) -> int:
        return context if self.budget is None else PIECE

    def pairs(self, context: int) -> int:
        """Queries times keys of a fill, its cost."""
        return self.batch * context * self.piece(context)


class Clock:
    """How long there still is, and how long a fill may take."""

    def __init__(self, seconds: float):
        self.end = perf_counter() + seconds
        self.rates: dict[bool, float] = {}  # queries times keys per second: of full caches, of others

    @property
    def left(self) -> float:
        return self.end - perf_counter()

    def refuses(self, case: Case, context: int) -> str | None:
        """Why a fill is not to be begun."""
        if self.left < 0:
            return "no time left"
        rate = self.rates.get(case.budget is None)
        seconds = case.pairs(context) / rate if rate else 0
        if seconds > self.left:
            return f"filling it takes {seconds:.0f} s, and {self.left:.0f} s are left"
        return None

    def learn(self, case: Case, context: int, seconds: float) -> None:
        """A fill took so long. Small ones are slow for their size, so the fastest counts."""
        kind = case.budget is None
        self.rates[kind] = max(case.pairs(context) / seconds, self.rates.get(kind, 0))


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(description="Kernels, CUDA graphs and decoding speed on a GPU.")
    add = parser.add_argument
    add("--preset", default="llama3-8b", help="whose shape the random weights have (llama3-8b)")
    add("--policy", nargs="+", default=list(POLICIES), help=f"policies as in chat.py ({' '.join(POLICIES)})")
    add("--budget", type=int, default=512, help="tokens per KV head of policies that drop (512)")
    add("--context", nargs="+", type=int, default=[32768, 2048, 131072], help="(32768 2048 131072)")
    add("--batch", nargs="+", type=int, default=[1, 8], help="(1 8)")
    add("--mode", nargs="+", choices=MODES, default=list(MODES), help=f"({' '.join(MODES)})")
    add("--seconds", type=float, default=270, help="nothing new is begun after that long (270)")
    add("--out", type=Path, metavar="FILE", help="write the JSON here, too")
    args = parser.parse_args(argv)
    if min(args.context) < 1 or min(args.batch) < 1 or args.budget < 1:
        parser.error("--context, --batch and --budget must be at least 1")
    if args.preset not in MODELS:
        parser.error(f"no preset is called {args.preset!r}; presets are {', '.join(MODELS)}")
    return args


def all_cases(args: argparse.Namespace) -> list[Case]:
    """What drops first: compiled once for all contexts. Raises ValueError for policies and budgets that cannot be."""
    policies = {text: Policy.parse(text) for text in args.policy}
    for policy in policies.values():
        policy.check_budget(args.budget)
    drops = {text: policy.drops for text, policy in policies.items()}
    contexts = tuple(args.context)
    found = [
        Case(text, args.budget, batch, contexts) for batch in args.batch for text in drops if drops[text]
    ]
    for batch in args.batch:
        for context in contexts:
            found += [Case(text, None, batch, (context,)) for text in drops if not drops[text]]
    return found


# Measurement. Everything takes its device from its tensors.


@torch.no_grad()
def copy_bandwidth(device: torch.device, repeat: int = 10) -> float:
    """Bytes read and written per second by the fastest of `repeat` large copies."""
    source = torch.ones(COPIED_BYTES.get(device.type, COPIED_BYTES["cpu"]), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    times = []
    for _ in range(repeat + 1):  # the first one warms up
        wait_for(target)
        begun = perf_counter()
        target.copy_(source)
        wait_for(target)
        times.append(perf_counter() - begun)
    return 2 * source.nbytes / min(times[1:])


@torch.no_grad()
def fill(model: nn.Module, cache: CompressedKVCache, context: int, piece: int) -> None:
    """`context` tokens of random queries, keys and values, without running the model; the policy drops as ever."""
    seen = cache.rows.seen
    fill_randomly(model, cache, seen.new_zeros(len(seen), context), piece)


@contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raises RuntimeError where the host waits for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
def decode(model: nn.Module, cache: CompressedKVCache, run: Step, n: int) -> None:
    """n greedy steps; a host that does not wait for any of them."""
    token = torch.zeros(len(cache.rows.seen), 1, dtype=torch.int64, device=cache.rows.seen.device)
    pos = cache.seen[:, None].clone()
    for _ in range(n):
        logits = run(model, cache, token, pos)
        cache.settle()
        token.copy_(logits.argmax(-1, keepdim=True))
        pos.add_(1)


def timed(model: nn.Module, cache: CompressedKVCache, run: Step) -> tuple[float, float]:
    """Seconds until the step is warm (compiled, recorded) and seconds of a step after that."""
    device = cache.rows.seen.device
    begun = perf_counter()
    decode(model, cache, run, WARMUP)
    wait_for(cache.rows.seen)
    warm = perf_counter()
    with no_waiting(device):
        decode(model, cache, run, STEPS)
    wait_for(cache.rows.seen)
    return warm - begun, (perf_counter() - warm) / STEPS


def replays_graphs(model: nn.Module, cache: CompressedKVCache, run: Step) -> bool:
    """Whether a step is one CUDA graph, as the driver's own record of its calls has it."""
    with torch.profiler.profile() as record:
        decode(model, cache, run, 1)
        wait_for(cache.rows.seen)
    return any("cudaGraphLaunch" in event.key for event in record.key_averages())


def make_step(mode: str, cache: CompressedKVCache) -> Step:
    """The step of one mode; "graphs" is what the chat runs on a GPU."""
    if mode == "eager":
        return step
    return CompiledStep(cache, cuda_graph=mode == "graphs")


def measure(
    model: nn.Module, case: Case, modes: list[str], bandwidth: float, clock: Clock
) -> Iterator[dict[str, Any]]:
    """A row for each context and mode. One that is not measured says why: "skipped" or "error"."""
    cache = None
    steps: dict[str, Step] = {}
    for context in case.contexts:
        about = case.about(context)
        if reason := clock.refuses(case, context):
            yield about | dict(skipped=reason)
            continue
        try:
            cache = cache or case.cache(model)
            cache.reset()
            begun = perf_counter()
            fill(model, cache, context, case.piece(context))
            wait_for(cache.rows.seen)
            clock.learn(case, context, perf_counter() - begun)
            for mode in modes:
                row = about | dict(mode=mode)
                if clock.left < 0 and mode not in steps:
                    yield row | dict(skipped="no time left")
                    continue
                steps[mode] = steps.get(mode) or make_step(mode, cache)
                # What is compiled reads whole buffers, an eager step only what is filled.
                cache.rows.static = mode != "eager"
                yield row | measure_mode(model, cache, steps[mode], context, bandwidth, mode)
        except torch.OutOfMemoryError:
            yield about | dict(skipped="does not fit into memory")
        except RuntimeError as error:
            yield about | dict(error=first_line(error))


def measure_mode(
    model: nn.Module, cache: CompressedKVCache, run: Step, context: int, bandwidth: float, mode: str
) -> dict[str, Any]:
    """What one mode needs per step, or the error that it ended with."""
    batch, generated = len(cache.rows.seen), int(cache.rows.seen[0]) - context
    read = weight_bytes(model, batch) + cache_bytes(cache, context, generated + WARMUP + STEPS // 2)
    try:
        warm, seconds = timed(model, cache, run)
        found = dict(
            warm_seconds=warm,
            step_seconds=seconds,
            tokens_per_second=batch / seconds,
            bytes_per_step=read,
            share_of_copy=read / seconds / bandwidth,
        )
        if mode == "graphs" and not replays_graphs(model, cache, run):
            found["error"] = "CUDA graphs are off: the step is launched kernel by kernel"
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # a compiler's, or a step that waits for the device
        return dict(error=first_line(error))
    return found


def first_line(error: RuntimeError) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def measure_all(
    model: nn.Module, cases: list[Case], modes: list[str], bandwidth: float, clock: Clock
) -> list[dict[str, Any]]:
    """All rows, each printed when it is there."""
    rows = []
    for case in cases:
        for row in measure(model, case, modes, bandwidth, clock):
            rows.append(row)
            print(line(row), flush=True)
        # Graphs and their memory belong to the cache, which is gone.
        torch.compiler.reset()
        torch.cuda.empty_cache()
    return rows


# Output.


def line(row: dict[str, Any]) -> str:
    budget, mode = row["budget"] or "all", row.get("mode", "")
    name = f"{row['policy']:12}{budget:>5}  batch {row['batch']:2}  context {row['context']:6}  {mode:8}  "
    if "step_seconds" not in row:
        return name + (row.get("skipped") or row["error"])
    numbers = f"{row['tokens_per_second']:8.1f} tokens/s  {row['bytes_per_step'] / 1e9:6.2f} GB a step  "
    return name + numbers + f"{100 * row['share_of_copy']:3.0f} % of copying  {row.get('error', '')}"


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    begun, clock = perf_counter(), Clock(args.seconds)
    try:
        if not torch.cuda.is_available():
            raise ValueError("this PyTorch sees no GPU, and this script measures nothing else")
        if args.out and not args.out.parent.is_dir():
            raise ValueError(f"--out {args.out}: there is no folder {args.out.parent}")
        cases = all_cases(args)
        config = replace(MODELS[args.preset].config, max_position=max(args.context) + ROOM)
        model = random_model(config, "cuda", torch.bfloat16)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    device = model.norm.weight.device
    kernels = []
    for check in gpu_kernels.all_checks(device, torch.bfloat16, KERNEL_TOKENS):
        kernels.append(gpu_kernels.run(check))
        print(gpu_kernels.line(kernels[-1]), flush=True)
    bandwidth = copy_bandwidth(device)
    print(f"{torch.cuda.get_device_name(device)} copies {bandwidth / 1e9:.0f} GB/s, read and written")
    rows = measure_all(model, cases, args.mode, bandwidth, clock)
    document = dict(
        preset=args.preset,
        device=torch.cuda.get_device_name(device),
        torch=torch.__version__,
        copy_bandwidth=bandwidth,
        seconds=perf_counter() - begun,
        kernels=kernels,
        rows=rows,
    )
    text = json.dumps(document)
    if args.out:
        args.out.write_text(text + "\n")
    print(text)
    wrong = [k for k in kernels if not k["ok"]] + [row for row in rows if "error" in row]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
