"""Rows of an evaluation: a file that can be continued, means with intervals, and tables."""

import json
from pathlib import Path
from statistics import mean
from typing import Any, TextIO

import numpy as np

from scripts.evaluation.metrics import METRICS
from scripts.evaluation.tasks import find_task

Row = dict[str, Any]

# A row with the same of these is the same measurement.
IDENTITY = (
    "model", "quantize", "dtype", "device", "task", "text", "tokens", "new", "seed", "sample", "protocol", "policy",
    "budget", "kv_bytes", "room", "every", "sinks", "recent",
)  # fmt: skip
RESAMPLES = 2000
MIB = 2**20


def identity(row: Row) -> str:
    return json.dumps([row[name] for name in IDENTITY])


class Log:
    """Rows by what they measure, those of an earlier run among them. Each new one is written at once."""

    def __init__(self, path: Path | None, stdout: TextIO):
        """Rows go to the end of the file, or to `stdout`. Raises ValueError for a file of something else."""
        self.path, self.stdout = path, stdout
        self.rows: dict[str, Row] = {}
        if path is not None and path.exists():
            self.rows = {identity(row): row for row in self.read(path)}

    @staticmethod
    def read(path: Path) -> list[Row]:
        """All whole rows; a last line that an interrupted run left unfinished is cut off."""
        *lines, rest = path.read_text(encoding="utf-8").split("\n")
        if rest:
            path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                row = json.loads(line)
                identity(row)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {number} is no row of this evaluation; give another --out"
                ) from error
            rows.append(row)
        return rows

    def add(self, row: Row) -> None:
        self.rows[identity(row)] = row
        line = json.dumps(row) + "\n"
        if self.path is None:
            self.stdout.write(line)
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line)


def interval(values: list[float], seed: int = 0) -> tuple[float, float, float]:
    """Mean, and the 2.5 and 97.5 percentiles of the means of resampled values (percentile bootstrap)."""
    x = np.array(values)
    draws = np.random.default_rng(seed).integers(0, len(x), (RESAMPLES, len(x)))
    low, high = np.quantile(x[draws].mean(1), (0.025, 0.975))
    return float(x.mean()), float(low), float(high)


def grouped(rows: list[Row], *names: str) -> dict[tuple, list[Row]]:
    """Rows by their values of some fields, in the order of their first appearance."""
    groups: dict[tuple, list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in names), []).append(row)
    return groups


def amount(row: Row) -> str:
    """How much was asked for: `256`, `25%`, `8MiB`, `25% of bytes`, `as int4`, or `all`."""
    size = row["kv_bytes"]
    if size is None:
        return row["budget"] or "all"
    if size.endswith("%"):
        return f"{size} of bytes"
    return size if size[:1].isdigit() else f"as {size}"


def with_better_heads(rows: list[Row]) -> tuple[list[Row], str | None]:
    """Rows with the share of heads in which a policy moves the output less than the first one does, and its name.

    Compared are rows of the same sample and the same budget, for all but that first policy and the full cache.
    """
    base = next(
        (row["policy"] for row in rows if row["policy"] != "full" and "per_head" in row["metrics"]), None
    )

    def place(row: Row) -> tuple:
        return tuple(row[name] for name in ("task", "tokens", "sample", "budget", "kv_bytes"))

    bases = {place(row): row["metrics"]["per_head"] for row in rows if row["policy"] == base}
    found = []
    for row in rows:
        theirs = bases.get(place(row))
        if theirs is None or row["policy"] == base:
            found.append(row)
            continue
        pairs = [
            (mine, other)
            for layer, there in zip(row["metrics"]["per_head"], theirs, strict=True)
            for mine, other in zip(layer, there, strict=True)
        ]
        share = mean(mine < other for mine, other in pairs)
        found.append({**row, "metrics": {**row["metrics"], "better_heads": share}})
    return found, base


def tables(rows: list[Row]) -> str:
    """A Markdown table for each task, length and protocol: means over samples with 95 % intervals."""
    parts = []
    for (name, tokens, new, protocol), part in grouped(rows, "task", "tokens", "new", "protocol").items():
        columns = find_task(name).columns
        part, base = with_better_heads(part) if "better_heads" in columns else (part, None)
        length = f"{tokens} + {new} tokens" if new else f"{tokens} tokens"
        asked = "no question" if protocol == "none" else f"question-{protocol}"
        labels = [METRICS[column].label.format(base) for column in columns]
        head = ["policy", "budget", "n", "MiB", "kept", *labels]
        lines = [
            line(*key, group, columns) for key, group in grouped(part, "policy", "budget", "kv_bytes").items()
        ]
        parts.append(f"{name}: {length}, {asked}\n\n{markdown(head, lines)}")
    if len(grouped(rows, "task")) > 1:
        parts.append(f"together\n\n{overview(rows)}")
    return "\n\n".join(parts)


def differences(rows: list[Row], base: str) -> str:
    """Like `tables`, but each figure minus that of the policy `base` on the same sample: intervals of pairs.

    Compared are rows of the same amount.
    """

    def place(row: Row) -> tuple:
        return tuple(
            row[name] for name in ("task", "tokens", "new", "protocol", "sample", "budget", "kv_bytes")
        )

    bases = {place(row): row["metrics"] for row in rows if row["policy"] == base}
    paired = []
    for row in rows:
        theirs = bases.get(place(row))
        if theirs is not None and row["policy"] not in (base, "full"):
            minus = {k: x - theirs[k] for k, x in row["metrics"].items() if isinstance(x, float)}
            paired.append({**row, "metrics": minus})
    parts = []
    for (task, protocol), part in grouped(paired, "task", "protocol").items():
        columns = [name for name in find_task(task).columns if name in part[0]["metrics"]]
        head = ["policy", "budget", "n", *(name.replace("_", " ") for name in columns)]
        lines = [
            [
                same[0]["policy"],
                amount(same[0]),
                str(len(same)),
                *(difference(same, column) for column in columns),
            ]
            for same in grouped(part, "policy", "budget", "kv_bytes").values()
        ]
        asked = "" if protocol == "none" else f", question-{protocol}"
        parts.append(f"{task}{asked}, minus {base} on the same samples\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def difference(rows: list[Row], column: str) -> str:
    middle, low, high = (f"{x:+.3f}" for x in interval([row["metrics"][column] for row in rows]))
    return f"{middle} ({low}, {high})"


def overview(rows: list[Row]) -> str:
    """A line for each policy and amount with the first figures of every task; bytes are those of the first task."""
    tasks = {name: find_task(name) for name in dict.fromkeys(row["task"] for row in rows)}
    columns = [(name, column) for name, task in tasks.items() for column in task.told or task.columns[:1]]
    head = [f"{task}: {METRICS[column].label.format('the first')}" for task, column in columns]
    lines = []
    for (policy, *_), mine in grouped(rows, "policy", "budget", "kv_bytes").items():
        by_task = {task: [row for row in mine if row["task"] == task] for task in tasks}
        sizes = [row["nbytes"] for row in next(iter(by_task.values()))]
        size = f"{mean(sizes) / MIB:.2f}" if sizes else "-"
        figures = [figure(by_task[task], column) for task, column in columns]
        lines.append([policy, amount(mine[0]), size, *figures])
    return markdown(["policy", "budget", "MiB", *head], lines)


def line(
    policy: str, budget: str | None, kv_bytes: str | None, rows: list[Row], columns: tuple[str, ...]
) -> list[str]:
    size, kept = (mean(row[name] for row in rows) for name in ("nbytes", "kept"))
    figures = [figure(rows, column) for column in columns]
    return [policy, amount(rows[0]), str(len(rows)), f"{size / MIB:.2f}", f"{kept:.0f}", *figures]


def figure(rows: list[Row], column: str) -> str:
    """`mean (low, high)`; the mean alone of a single sample, `-` where no row has it."""
    values = [row["metrics"][column] for row in rows if column in row["metrics"]]
    if not values:
        return "-"
    metric = METRICS[column]
    middle, low, high = (f"{metric.shown(x):.{metric.decimals}f}" for x in interval(values))
    return middle if len(values) == 1 else f"{middle} ({low}, {high})"


def markdown(head: list[str], lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    rule = ["-" * width for width in widths]

    def spaced(cells: list[str]) -> str:
        return f"| {' | '.join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))} |"

    return "\n".join(map(spaced, [head, rule, *lines]))
