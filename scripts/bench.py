#!/usr/bin/env python3
"""Decoding speed and memory of any policies, beside the ceiling that the machine's bandwidth sets.

    python scripts/bench.py --policy full snapkv streaming --context 1024 4096 --compile
    python scripts/bench.py --random-weights llama3-8b --budget 512 2048 --context 8192 --batch 1 8 --fill synthetic

Every combination of policy, budget, context and batch is a row, measured in a process of its own. First comes
the theory: bytes a step must read, and how fast this machine reads. Then warm-up and timed rounds of
--new-tokens, which follow each other in one cache. The last line is JSON, and --from-json FILE repeats its
settings; flags beside it have the last word.
"""

import argparse
import json
import subprocess
import sys
from dataclasses import asdict, fields
from itertools import product
from pathlib import Path
from statistics import mean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import matplotlib
from rich.console import Console
from rich.progress import Progress, SpinnerColumn

from minikv import Policy
from scripts.bench_row import Row, Settings
from scripts.command_line import Parser

matplotlib.use("Agg")
from matplotlib import pyplot

CHILD = Path(__file__).with_name("bench_row.py")
LISTS = ("policy", "budget", "context", "batch")
MIB = 2**20
PICTURES = (".png", ".pdf", ".svg")
# Okabe and Ito's palette, told apart by colour-blind eyes too; the shapes help in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vP*X"


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(description="Decoding speed and memory of any policies, beside the machine's ceiling.")
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="as in chat.py (smollm2-135m)")
    add("--random-weights", metavar="PRESET", help="a preset's shape instead of a model")
    add("--quantize", metavar="BITS", help="int8 or int4 weights")
    add("--policy", nargs="+", default=["full", "snapkv"], help="policies as in chat.py (full snapkv)")
    add("--budget", nargs="+", type=int, default=[512], help="tokens per KV head, on average (512)")
    add("--context", nargs="+", type=int, default=[1024], help="tokens in the cache before decoding (1024)")
    add("--batch", nargs="+", type=int, default=[1], help="rows that decode together (1)")
    add("--compile", action=argparse.BooleanOptionalAction, default=False, help="compile the decode step")
    add(
        "--fill",
        choices=("prefill", "synthetic"),
        default="prefill",
        help="read a random prompt, or put random keys and values into the cache without running the model",
    )
    add("--new-tokens", type=int, default=32, help="tokens of a round (32)")
    add("--repeat", type=int, default=3, help="timed rounds, and timed prefills (3)")
    add("--warmup", type=int, default=1, help="rounds before them (1)")
    add("--room", type=int, default=256, help="fresh tokens between two compressions (256)")
    add("--every", type=int, help="compress every N generated tokens; 0: only after the prompt (--room)")
    add("--dtype", help="as in chat.py")
    add("--device", help="as in chat.py")
    add("--plot", type=Path, metavar="FILE", help="draw time per step and cache against context here")
    add("--from-json", type=Path, metavar="FILE", help="repeat the run whose output this file holds")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    try:
        if args.from_json is not None:
            parser.set_defaults(**read_settings(args.from_json))
            args = parser.parse_args(argv)
        check(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return args


def read_settings(path: Path) -> dict[str, Any]:
    """The settings in the last line of a run's output."""
    known = {*LISTS, *(f.name for f in fields(Settings))}
    try:
        settings = json.loads(path.read_text(encoding="utf-8").strip().rpartition("\n")[2])["settings"]
        unlike = known ^ set(settings)
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} does not end with the JSON line of a run of bench.py") from error
    if unlike:
        raise ValueError(f"{path} was written by another version: {', '.join(sorted(unlike))} is not in both")
    return settings


def check(args: argparse.Namespace) -> None:
    """What can be told before anything runs. Raises ValueError."""
    counts = dict(new_tokens=args.new_tokens, repeat=args.repeat, warmup=args.warmup)
    for name, value in counts.items():
        if value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    for name in ("budget", "context", "batch"):
        if min(getattr(args, name)) < 1:
            raise ValueError(f"--{name} must be at least 1, not {min(getattr(args, name))}")
    if args.plot and (args.plot.suffix not in PICTURES or not args.plot.parent.is_dir()):
        raise ValueError(f"--plot {args.plot}: give a file in an existing folder, with one of {PICTURES}")


def all_rows(args: argparse.Namespace) -> list[Row]:
    """Every combination; a policy that drops nothing has no budget, and so fewer rows."""
    rows = []
    for context, batch, text in product(args.context, args.batch, args.policy):
        drops = Policy.parse(text).drops
        rows += [Row(text, budget, context, batch) for budget in (args.budget if drops else [None])]
    return list(dict.fromkeys(rows))


# Processes.


def child(verb: str, settings: Settings, rows: list[Row]) -> dict[str, Any]:
    """What bench_row.py found. Raises RuntimeError with its last word if it failed."""
    task = json.dumps(dict(settings=asdict(settings), rows=[asdict(row) for row in rows]))
    run = subprocess.run([sys.executable, CHILD, verb, task], capture_output=True, text=True)
    said = run.stderr.strip()
    if run.returncode != 0:
        word = said.rpartition("\n")[2].removeprefix("error: ")
        raise RuntimeError(word or f"the process ended with code {run.returncode}, perhaps out of memory")
    if said:
        print(said, file=sys.stderr)
    return json.loads(run.stdout.strip().rpartition("\n")[2])


def measure_all(settings: Settings, rows: list[Row], theory: dict[str, Any]) -> list[dict[str, Any]]:
    """One result per row, in order; the error of a row that failed stands in its place."""
    found = []
    speed = max(filter(None, theory["bandwidth"].values()))
    columns = (SpinnerColumn(), *Progress.get_default_columns())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(rows))
        for row, reads in zip(rows, theory["rows"], strict=True):
            progress.update(task, description=" ".join(named(row)))
            result = asdict(row) | reads
            if "error" not in reads:
                try:
                    measured = child("measure", settings, [row])
                    result |= measured | summary(row, measured, ceiling(row, reads, speed))
                except RuntimeError as error:
                    result["error"] = str(error)
            found.append(result)
            progress.advance(task)
    return found


# Figures.


def ceiling(row: Row, reads: dict[str, int], speed: float) -> float:
    """Tokens per second, all rows of the batch together, if reading were all there is to a step."""
    return row.batch * speed / (reads["weight_bytes"] + reads["cache_read_bytes"])


def summary(row: Row, measured: dict[str, Any], most: float) -> dict[str, float | None]:
    """Medians over rounds. `tokens_per_second` counts all of a round, compressions too; a step's median does not."""
    rounds = measured["step_seconds"]
    medians = [median(steps) for steps in rounds]
    rate = row.batch / median(mean(steps) for steps in rounds)
    first, prefills = measured["first_token_seconds"], measured["prefill_seconds"]
    return dict(
        first_token=median(first) if first else None,
        prefill_per_second=row.batch * row.context / median(prefills) if prefills else None,
        step=median(step for steps in rounds for step in steps),
        step_low=min(medians),
        step_high=max(medians),
        tokens_per_second=rate,
        ceiling=most,
        share=rate / most,
    )


def named(row: Row | dict[str, Any]) -> list[str]:
    values = asdict(row) if isinstance(row, Row) else row
    return ["-" if values[name] is None else str(values[name]) for name in LISTS]


def aligned(header: list[str], lines: list[list[str]]) -> str:
    """Columns as wide as they need to be, the first to the left; a shorter line ends in a sentence."""
    n = len(header)
    cells = [line if len(line) == n else line[:-1] + [""] * (n + 1 - len(line)) for line in lines]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]

    def spaced(line: list[str]) -> str:
        rest = (x.rjust(w) for x, w in zip(line[1:], widths[1:], strict=False))
        return "  ".join([line[0].ljust(widths[0]), *rest])

    return "\n".join(map(spaced, [header, *lines]))


def theory_table(rows: list[Row], theory: dict[str, Any]) -> str:
    """The physics in words and a table."""
    speeds = theory["bandwidth"]
    best = max(filter(None, speeds.values()))
    gigabytes = {k: f"{v / 1e9:.1f} GB/s" if v else "no compiler" for k, v in speeds.items()}
    machine = theory["machine"]
    lines = []
    for row, reads in zip(rows, theory["rows"], strict=True):
        if "error" in reads:
            lines.append([*named(row), reads["error"]])
            continue
        most = ceiling(row, reads, best)
        weights, cache = (reads[name] / MIB for name in ("weight_bytes", "cache_read_bytes"))
        lines.append(
            [*named(row), f"{weights:.1f}", f"{cache:.1f}", f"{1000 * row.batch / most:.2f}", f"{most:.1f}"]
        )
    head = [*LISTS, "weights MiB", "cache MiB", "ms/step", "tokens/s"]
    return (
        f"{machine['device']}, {machine['threads']} threads, torch {machine['torch']}, {theory['dtype']}\n"
        f"a large matrix-vector product reads {gigabytes['eager']}, compiled {gigabytes['compiled']}; "
        f"at {best / 1e9:.1f} GB/s what a step must read takes\n{aligned(head, lines)}"
    )


def result_table(results: list[dict[str, Any]]) -> str:
    lines = []
    for r in results:
        if "error" in r:
            lines.append([*named(r), f"failed: {r['error']}"])
            continue
        first, prefill = r["first_token"], r["prefill_per_second"]
        ids = "-" if r["eager_hash"] is None else "same"
        lines.append([
            *named(r),
            "-" if first is None else f"{first:.3f}",
            "-" if prefill is None else f"{prefill:.0f}",
            f"{1000 * r['step']:.2f} ({1000 * r['step_low']:.2f}, {1000 * r['step_high']:.2f})",
            f"{r['tokens_per_second']:.1f}",
            f"{100 * r['share']:.0f} %",
            f"{r['cache_bytes'] / MIB:.1f}",
            f"{r['peak_bytes'] / MIB:.0f}",
            ids if r["differs_at"] is None else f"differ at {r['differs_at']}",
        ])  # fmt: skip
    head = [
        *LISTS, "ttft s", "prefill tok/s", "decode ms/step (range)", "tokens/s", "of ceiling", "cache MiB",
        "peak MiB", "ids",
    ]  # fmt: skip
    return aligned(head, lines)


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Time per step and bytes of the cache against the context, a line for each policy, budget and batch."""
    several = len({r["batch"] for r in results}) > 1
    curves: dict[str, list[dict[str, Any]]] = {}
    for r in results:
        if "error" not in r:
            budget = "" if r["budget"] is None else f" {r['budget']}"
            batch = f", batch {r['batch']}" if several else ""
            curves.setdefault(f"{r['policy']}{budget}{batch}", []).append(r)
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for i, (label, points) in enumerate(curves.items()):
        points = sorted(points, key=lambda r: r["context"])
        style = dict(color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], linewidth=2)
        x = [r["context"] for r in points]
        left.plot(x, [1000 * r["step"] for r in points], label=label, **style)
        right.plot(x, [r["cache_bytes"] / MIB for r in points], **style)
    for axes, title in ((left, "decode, ms per step"), (right, "cache, MiB")):
        axes.set_title(title, fontsize=13)
        axes.set_xlabel("context, tokens", fontsize=12)
        axes.set_ylim(0, 1.1 * axes.dataLim.y1)
        axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=4, fontsize=11)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    settings = Settings(**{f.name: getattr(args, f.name) for f in fields(Settings)})
    try:
        rows = all_rows(args)
        theory = child("physics", settings, rows)
    except (ValueError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(theory_table(rows, theory), end="\n\n", flush=True)
    results = measure_all(settings, rows, theory)
    print(result_table(results))
    if args.plot and any("error" not in r for r in results):
        draw(results, args.plot)
        print(f"drawn to {args.plot}")
    asked = asdict(settings) | {name: getattr(args, name) for name in LISTS}
    about = {name: theory[name] for name in ("machine", "dtype", "bandwidth")}
    print(json.dumps(dict(settings=asked, **about, rows=results)))
    return 1 if any("error" in r for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
