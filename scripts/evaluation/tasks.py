"""All tasks by name: what makes their samples, how these are measured, and which figures are told."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from models.tokenizer import Tokenizer
from scripts.evaluation import files, natural, retrieval
from scripts.evaluation.measure import Measure, cost, forced, free, heads
from scripts.evaluation.samples import Order, Sample

ANSWER = ("accuracy", "exact", "nll", "kl")
TEXT = ("kl", "kl_p95", "agreement", "nll")


@dataclass(frozen=True)
class Task:
    """tokens, new: the lengths where the command line gives none. columns: names in METRICS, the first is drawn.

    told: what the table of all tasks together has of it, if not the first column.
    """

    make: Callable[[Tokenizer, Order], list[Sample]]
    measure: Measure
    columns: tuple[str, ...]
    tokens: int = 1000
    new: int = 0
    asks: bool = True
    told: tuple[str, ...] = ()


def asking(build: retrieval.Builder, tokens: int = 1000) -> Task:
    return Task(retrieval.made_by(build), forced, ANSWER, tokens)


TASKS = {
    "text": Task(natural.continuation, forced, TEXT, 2048, 256, asks=False),
    "long": Task(natural.decoding, forced, TEXT, 256, 512, asks=False),
    "heads": Task(
        natural.continuation,
        heads,
        ("perturbation", "better_heads", "attention_loss", "run_length"),
        2048,
        128,
        asks=False,
    ),
    "cost": Task(
        natural.one_prompt,
        cost,
        ("step", "prefill", "steps_of_full", "prefills_of_full"),
        2048,
        64,
        asks=False,
        told=("steps_of_full", "prefills_of_full"),
    ),
    "facts": asking(retrieval.fact),
    "lines": asking(retrieval.line, 500),
    "passkey": asking(retrieval.passkey),
    "variables": asking(retrieval.variable),
    "table": asking(retrieval.table, 500),
    "induction": Task(natural.quotation, forced, ANSWER),
}
FILES = {"longbench": files.longbench, "ruler": files.ruler}


def find_task(name: str) -> Task:
    """A task of TASKS, or of a file, as in `longbench:hotpotqa.jsonl`. Raises ValueError or FileNotFoundError."""
    if name in TASKS:
        return TASKS[name]
    kind, colon, path = name.partition(":")
    if kind not in FILES or not colon:
        raise ValueError(
            f"unknown task {name!r}; known are {', '.join(TASKS)}, and {', '.join(f'{k}:FILE.jsonl' for k in FILES)}"
        )
    if not Path(path).is_file():
        raise FileNotFoundError(f"task {name!r}: there is no file {path}")
    return Task(FILES[kind](Path(path)), free, ("score",), 8192)
