"""Pictures of an evaluation: quality against bytes and tokens, needle heat maps, where policies keep."""

import re
from pathlib import Path
from statistics import mean

import matplotlib
import numpy as np

from scripts.bench import COLOURS, MARKERS
from scripts.evaluation.metrics import METRICS
from scripts.evaluation.results import MIB, Row, amount, grouped, interval
from scripts.evaluation.tasks import find_task

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

PANELS = 6  # heat maps side by side


def draw_all(rows: list[Row], directory: Path) -> list[Path]:
    """Pictures of every task, length and protocol, as PNG files in the directory; gives their paths."""
    drawn = []
    rows = with_step_seconds(rows)
    for (task, protocol), part in grouped(rows, "task", "protocol").items():
        if task == "cost":
            continue
        stem = re.sub(r"\W+", "-", Path(task).stem) + ("" if protocol == "none" else f"-{protocol}")
        for (tokens,), same in grouped(part, "tokens").items():
            here = f"{stem}-{tokens}"
            drawn += [
                quality(same, "nbytes", directory / f"{here}-bytes.png"),
                quality(same, "kept", directory / f"{here}-tokens.png"),
            ]
            timed = [row for row in same if "step_ms" in row]
            if timed:
                drawn.append(quality(timed, "step_ms", directory / f"{here}-time.png"))
            dropped = [row for row in same if min(row["kept_where"]) < 1]
            if dropped:
                drawn.append(kept_map(dropped, directory / f"{here}-kept.png"))
        if all(row["depth"] is not None for row in part):
            drawn.append(needles(part, directory / f"{stem}-needles.png"))
    return drawn


def with_step_seconds(rows: list[Row]) -> list[Row]:
    """Rows with the milliseconds of a decode step, where the task `cost` has measured that policy and amount."""

    def plan(row: Row) -> tuple:
        return row["policy"], row["budget"], row["kv_bytes"]

    found = {plan(row): 1e3 * row["metrics"]["step"] for row in rows if row["task"] == "cost"}
    return [{**row, "step_ms": found[plan(row)]} if plan(row) in found else row for row in rows]


def title(rows: list[Row]) -> str:
    first = rows[0]
    length = f"{first['tokens']}+{first['new']}" if first["new"] else f"{first['tokens']}"
    asked = "" if first["protocol"] == "none" else f", question-{first['protocol']}"
    name = Path(first["task"]).stem
    return f"{name}, {length} tokens{asked}\n{Path(first['model']).name}, n = {len(grouped(rows, 'sample'))}"


SIZES = {
    "nbytes": "cache, MiB (allocated)",
    "kept": "tokens kept per KV head",
    "step_ms": "compiled decode step, ms",
}


def quality(rows: list[Row], size: str, path: Path) -> Path:
    """The task's first figure against one of SIZES: a line for each policy, bars of 95 %."""
    column = find_task(rows[0]["task"]).columns[0]
    metric, scale = METRICS[column], MIB if size == "nbytes" else 1
    by_policy = grouped(rows, "policy")
    # High enough for the legend.
    figure, axes = pyplot.subplots(figsize=(8, max(4.8, 0.22 * len(by_policy) + 0.5)), layout="constrained")
    for i, ((policy,), mine) in enumerate(by_policy.items()):
        points = sorted(point(same, size, column) for same in grouped(mine, "budget", "kv_bytes").values())
        x, y, low, high = map(np.array, zip(*points, strict=True))
        if policy == "full":
            axes.axhline(y[0], color="0.35", linestyle="--", label="full cache", zorder=1)
            if size != "kept":
                axes.plot(x[0] / scale, y[0], marker="|", markersize=14, color="0.35")
            continue
        style = dict(color=COLOURS[(i - 1) % len(COLOURS)], marker=MARKERS[(i - 1) % len(MARKERS)])
        dash = "-" if i <= len(COLOURS) else ":"
        axes.errorbar(
            x / scale,
            y,
            np.array([y - low, high - y]),
            label=policy,
            linestyle=dash,
            capsize=3,
            markersize=7,
            **style,
        )
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1, 2, 3, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(SIZES[size], fontsize=12)
    axes.set_ylabel(f"{metric.label} ({'less' if metric.less_is_better else 'more'} is better)", fontsize=12)
    axes.set_title(title(rows), fontsize=12)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside right upper", fontsize=10)
    return saved(figure, path)


def point(rows: list[Row], size: str, column: str) -> tuple[float, float, float, float]:
    """Mean size, and the figure with its interval."""
    shown = METRICS[column].shown
    middle, low, high = interval([row["metrics"][column] for row in rows])
    return mean(row[size] for row in rows), shown(middle), shown(low), shown(high)


def needles(rows: list[Row], path: Path) -> Path:
    """Heat maps of the task's first figure over depth and length, one for each policy and amount."""
    column = find_task(rows[0]["task"]).columns[0]
    lengths, depths = (sorted({row[name] for row in rows}) for name in ("tokens", "depth"))
    panels = grouped(rows, "policy", "budget", "kv_bytes")
    n_rows = -(-len(panels) // PANELS)
    n_columns = min(PANELS, len(panels))
    figure, grid = pyplot.subplots(
        n_rows,
        n_columns,
        figsize=(1.6 + 1.6 * n_columns, 1.2 + 1.4 * n_rows),
        squeeze=False,
        layout="constrained",
    )
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for i, (axes, ((policy, *_), mine)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
        cells = np.full((len(depths), len(lengths)), np.nan)
        for (tokens, depth), same in grouped(mine, "tokens", "depth").items():
            cells[depths.index(depth), lengths.index(tokens)] = mean(row["metrics"][column] for row in same)
        image = axes.imshow(cells, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        # A panel is narrower than the name of a policy with its options, so they have lines of their own.
        axes.set_title(f"{policy}, {amount(mine[0])}".replace("(", "\n("), fontsize=9)
        axes.set_xticks(range(len(lengths)), lengths)
        axes.set_yticks(
            range(len(depths)), [f"{100 * depth:g} %" for depth in depths] if i % PANELS == 0 else []
        )
    figure.suptitle(f"{Path(rows[0]['task']).stem}, question-{rows[0]['protocol']}", fontsize=12)
    figure.supxlabel("context, tokens", fontsize=11)
    figure.supylabel("depth of the answer", fontsize=11)
    figure.colorbar(image, ax=grid, label=METRICS[column].label, shrink=0.9)
    return saved(figure, path)


def kept_map(rows: list[Row], path: Path) -> Path:
    """A strip for each policy and amount: the share of heads that hold each stretch of the prompt."""
    strips = {
        f"{policy}, {amount(same[0])}": np.mean([row["kept_where"] for row in same], 0)
        for (policy, *_), same in grouped(rows, "policy", "budget", "kv_bytes").items()
    }
    figure, axes = pyplot.subplots(figsize=(8, 1.4 + 0.28 * len(strips)), layout="constrained")
    image = axes.imshow(
        np.stack(list(strips.values())),
        cmap="cividis",
        vmin=0,
        vmax=1,
        aspect="auto",
        extent=(0, 100, len(strips), 0),
    )
    axes.set_yticks(np.arange(len(strips)) + 0.5, list(strips))
    axes.hlines(range(1, len(strips)), 0, 100, color="white", linewidth=1)
    axes.set_xlabel("place in the prompt, %", fontsize=11)
    axes.set_title(f"kept after the prompt: {title(rows)}", fontsize=11)
    figure.colorbar(image, ax=axes, label="share of heads")
    return saved(figure, path)


def saved(figure: pyplot.Figure, path: Path) -> Path:
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
    return path
