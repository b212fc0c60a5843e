#!/usr/bin/env python3
"""What compression costs in quality: policies x budgets x tasks, against the full cache.

    python scripts/eval.py --policy random snapkv h2o int4 --budget 128 512 --task text facts --n 10 --out rows.jsonl
    python scripts/eval.py --policy mikv h2o int4 kivi2 --kv-bytes int4 25% --task lines --protocol aware agnostic
    python scripts/eval.py --quick --plot pictures

The full cache is always measured too: it is the reference. Rows are JSON lines with every setting, the cache's own
bytes and the tokens it kept; those that --out already holds are not measured again. A table follows, with means
over samples and 95 % intervals (percentile bootstrap, 2000 resamples of the samples). The same seed gives the same
rows, seconds apart.

Tasks: text (continuation of natural text, in one chunk), long (the same, step by step), heads (attention lost
and outputs moved, head by head), cost (seconds to read a prompt and of a compiled step; leave the machine alone),
induction (quoting a text), facts, lines, passkey, variables, table (made from the seed), and longbench:FILE.jsonl,
ruler:FILE.jsonl (your files). --protocol aware compresses with the question in sight, agnostic before it is asked.
"""

import argparse
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from models import load_model, load_tokenizer
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from scripts.command_line import Parser
from scripts.evaluation.caches import FULL, CacheMaker, Plan, Settings, all_plans
from scripts.evaluation.measure import read_prompt, what_is_kept
from scripts.evaluation.plots import draw_all
from scripts.evaluation.results import Log, Row, differences, identity, tables
from scripts.evaluation.samples import PROTOCOLS, Order, Sample
from scripts.evaluation.tasks import Task, find_task

POLICIES = "random streaming h2o snapkv adakv criticalkv andpro int4 kivi2 mikv".split()
QUICK: dict[str, Any] = dict(
    policy="random streaming snapkv mikv".split(), budget=["128"], task=["text", "facts"], n=4, tokens=[512], new=64
)  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    summary, details = __doc__.split("\n", 1)
    parser = Parser(description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2-135m", help="as in chat.py (smollm2-135m)")
    add("--quantize", help="int8 or int4 weights")
    add("--dtype", help="as in chat.py")
    add("--device", help="as in chat.py")
    add(
        "--policy",
        nargs="+",
        default=POLICIES,
        help=f"as in chat.py; full is always among them ({' '.join(POLICIES)})",
    )
    add("--budget", nargs="+", default=[], help="tokens per KV head, or a share such as 25%% (256)")
    add(
        "--kv-bytes",
        nargs="+",
        default=[],
        help="8MiB, a share of full (25%%), or as much as a store takes (int4)",
    )
    add("--task", nargs="+", default=["text", "lines", "facts"], help="see below (text lines facts)")
    add(
        "--protocol", nargs="+", choices=PROTOCOLS, default=["aware"], help="when a question is asked (aware)"
    )
    add("--tokens", nargs="+", type=int, help="lengths of the context (each task has its own)")
    add("--new", type=int, help="length of a continuation of text (256; long 512, heads 128)")
    add("--text", type=Path, metavar="FILE", help="natural text (default: Python's language reference)")
    add("--n", type=int, default=10, help="samples of each task (10)")
    add("--seed", type=int, default=0, help="of the samples (0)")
    add("--room", type=int, default=64, help="fresh tokens between two compressions (64)")
    add("--every", type=int, help="compress every N tokens, 0: only after prompts (the policy's own)")
    add("--sinks", type=int, help="first tokens never dropped (the policy's own)")
    add("--recent", type=int, help="last tokens never dropped (the policy's own)")
    add("--out", type=Path, metavar="FILE", help="JSON lines, continued if it exists (standard output)")
    add("--against", metavar="POLICY", help="also print each figure minus this policy's, sample by sample")
    add("--plot", type=Path, metavar="DIR", help="write pictures there")
    add("--quick", action="store_true", help="few policies, small samples: a look in minutes")
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.quick:
        parser.set_defaults(**QUICK)
        args = parser.parse_args(argv)
    if not args.budget and not args.kv_bytes:
        args.budget = ["256"]
    if args.against is not None and args.against not in args.policy:
        parser.error(f"--against {args.against}: it is not among the policies")
    for name, least in dict(n=1, new=2, room=1).items():
        value = getattr(args, name)
        if value is not None and value < least:
            parser.error(f"--{name} must be at least {least}, not {value}")
    if args.tokens and min(args.tokens) < 2:
        parser.error(f"--tokens must be at least 2, not {min(args.tokens)}")
    return args


@dataclass(frozen=True)
class Job:
    """One sample under one protocol, and what all its rows have in common."""

    task: Task
    sample: Sample
    protocol: str
    common: Row

    def row(self, plan: Plan) -> Row:
        return {**self.common, **asdict(plan)}


def jobs(args: argparse.Namespace, tok: Tokenizer, about: Row, limit: int) -> Iterator[Job]:
    """Every sample of every task. Raises ValueError where one does not fit into the model's `limit`."""
    for name in dict.fromkeys(args.task):
        task = find_task(name)
        for tokens in args.tokens or [min(task.tokens, limit)]:
            new = (args.new or task.new) if task.new else 0
            samples = task.make(tok, Order(args.n, args.seed, tokens, new, args.text))
            longest = max(sample.n_tokens for sample in samples)
            if longest > limit:
                raise ValueError(
                    f"task {name} has samples of {longest} tokens, the model takes {limit}; lower --tokens"
                )
            for protocol in dict.fromkeys(args.protocol) if task.asks else ["none"]:
                for index, sample in enumerate(samples):
                    here = dict(
                        task=name, tokens=tokens, new=new, sample=index, protocol=protocol, depth=sample.depth
                    )
                    yield Job(task, sample, protocol, {**about, **here})


def measure(
    job: Job, plans: list[Plan], model: Transformer, tok: Tokenizer, maker: CacheMaker
) -> Iterator[Row]:
    """A row for each plan. Where a plan cannot work for the sample, `error` tells why."""
    caches = {FULL: maker.make(FULL, job.sample.n_tokens)}
    for plan in plans:
        if plan == FULL:
            continue
        try:
            caches[plan] = maker.make(plan, job.sample.n_tokens)
        except ValueError as error:
            yield {**job.row(plan), "error": str(error)}
    held = list(caches.values())
    ends = read_prompt(model, held, job.sample.prompt(job.protocol))
    kept = [what_is_kept(cache, model.config.n_layers) for cache in held]
    found = job.task.measure(model, tok, job.sample, held, ends)
    n_prompt = len(job.sample.context) + len(job.sample.question)
    for (plan, cache), (n_kept, where), metrics in zip(caches.items(), kept, found, strict=True):
        size = dict(nbytes=cache.nbytes, budget_tokens=mean(cache.budgets), prompt_tokens=n_prompt)
        if plan in plans:
            yield {**job.row(plan), **size, "kept": n_kept, "kept_where": where, "metrics": metrics}


def settings_of(args: argparse.Namespace, model: Transformer, shared: Settings) -> Row:
    """What all rows have in common."""
    weight = model.norm.weight
    return dict(
        model=args.model,
        quantize=args.quantize,
        dtype=str(weight.dtype),
        device=str(weight.device),
        torch=torch.__version__,
        threads=torch.get_num_threads(),
        text=str(args.text or f"pydoc_data of Python {platform.python_version()}"),
        seed=args.seed,
        **asdict(shared),
    )


def evaluate(args: argparse.Namespace, log: Log) -> list[Row]:
    """All rows that the arguments ask for, measured now or earlier; where that failed they have an `error`."""
    plans = all_plans(args.policy, args.budget, args.kv_bytes)
    for name in args.task:
        find_task(name)
    tok = load_tokenizer(args.model)
    model = load_model(args.model, args.device, args.dtype, quantize=args.quantize)
    shared = Settings(args.room, args.every, args.sinks, args.recent)
    maker = CacheMaker(model, tok, shared)
    todo = list(jobs(args, tok, settings_of(args, model, shared), model.config.max_position))
    rows: dict[str, Row] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        bar = progress.add_task("", total=len(todo) * len(plans))
        for job in todo:
            progress.update(bar, description=f"{job.common['task']} {job.common['sample']}")
            asked = {identity(job.row(plan)): plan for plan in plans}
            missing = [plan for key, plan in asked.items() if key not in log.rows]
            found = {
                identity(row): row for row in (measure(job, missing, model, tok, maker) if missing else ())
            }
            for row in found.values():
                if "error" not in row:
                    log.add(row)
            rows |= {key: found.get(key) or log.rows[key] for key in asked}
            progress.advance(bar, len(plans))
    return list(rows.values())


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    try:
        if args.plot is not None:
            args.plot.mkdir(parents=True, exist_ok=True)
        rows = evaluate(args, Log(args.out, sys.stdout))
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    left_out = [
        f"left out of {row['task']}, {row['policy']}: {row['error']}" for row in rows if "error" in row
    ]
    for said in dict.fromkeys(left_out):
        print(said, file=sys.stderr)
    measured = [row for row in rows if "error" not in row]
    if left_out and all(row["policy"] == "full" for row in measured):
        return 2
    print(tables(measured))
    if args.against is not None:
        print(f"\n{differences(measured, args.against)}")
    if args.plot is not None:
        for path in draw_all(measured, args.plot):
            print(f"drawn: {path}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
