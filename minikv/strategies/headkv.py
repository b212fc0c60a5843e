"""HeadKV: heads that retrieve and reason get more of the budget, in every layer. arXiv:2410.19258, section 3.

Scores of all heads are measured once per model on another text; scripts/measure_heads.py measures ours. Of a
head's budget b beyond what it is guarded, 1/beta goes into a pool of the whole model, and the pool to the
heads in proportion to their scores (section 3.2). With N heads in all and scores that sum to 1,

    capacity[h] = guarded + b * (1 - 1/beta + N * score[h] / beta)

Deviations: the paper rounds each head down; here the totals are exact, by largest remainder, first over the
layers and then over the heads of each. So a layer's total is a multiple of its number of heads. The paper's
scores are per query head and its code gives a KV head its group's mean; our file holds KV heads.
"""

import json
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from minikv.axes import HeadSplit, LayerSplit

Table = tuple[tuple[float, ...], ...]  # a score per KV head, in each layer


@dataclass(frozen=True)
class HeadKV(HeadSplit, LayerSplit):
    """Fills two axes. scores: a file, see `read_scores`; guarded: tokens every head has ahead of all shares."""

    scores: str = "heads.json"
    beta: float = 1.5
    guarded: int = 36

    uniform = False

    def __post_init__(self):
        if self.beta < 1:
            raise ValueError(f"headkv: beta is 1 (all by score) or more (evenly), not {self.beta}")
        if self.guarded < 0:
            raise ValueError(f"headkv: guarded is 0 tokens or more, not {self.guarded}")
        object.__setattr__(self, "table", read_scores(self.scores))

    def weights(self) -> list[list[float]]:
        """What each head gets of the budget beyond `guarded`; the mean over the model is 1."""
        mean = sum(map(sum, self.table)) / sum(map(len, self.table))
        return [[1 - 1 / self.beta + score / (mean * self.beta) for score in row] for row in self.table]

    def split(self, scores: Tensor, budget: int, layer: int) -> Tensor:
        """A layer's budget over its heads."""
        batch, heads, _ = scores.shape
        check_shape(self.scores, self.table, layer, heads)
        guarded = min(self.guarded, budget)
        shares = in_proportion(heads * (budget - guarded), self.weights()[layer])
        return torch.tensor(shares, device=scores.device).add(guarded).expand(batch, heads)

    def split_layers(self, budget: int, n_layers: int) -> list[int]:
        """The model's budget over its layers."""
        if len(self.table) != n_layers:
            raise ValueError(f"{self.scores} scores {len(self.table)} layers, the model has {n_layers}")
        guarded = min(self.guarded, budget)
        shares = in_proportion(n_layers * (budget - guarded), [sum(row) for row in self.weights()])
        return [guarded + share for share in shares]


def in_proportion(total: int, weights: list[float]) -> list[int]:
    """Whole numbers in proportion to the weights that sum to exactly `total`."""
    return whole([total * weight / sum(weights) for weight in weights], total)


def whole(shares: list[float], total: int) -> list[int]:
    """Shares rounded down, then the largest remainders up, the earlier first, until they sum to `total`."""
    floors = [int(share) for share in shares]
    order = sorted(range(len(shares)), key=lambda i: floors[i] - shares[i])
    for i in order[: total - sum(floors)]:
        floors[i] += 1
    return floors


def read_scores(path: str) -> Table:
    """Head scores from a JSON file, as scripts/measure_heads.py writes it:

        {"model": "smollm2-135m", "n_layers": 30, "n_kv_heads": 3, "how": "in words",
         "scores": [[0.1, 0.7, 0.2], ...]}

    One row per layer, one number of 0 or more per KV head; only their ratios count. Raises FileNotFoundError
    or ValueError, in one line that names the file.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(
            f"there is no file {path} of head scores; scripts/measure_heads.py writes one"
        )
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        table = tuple(tuple(map(float, row)) for row in data["scores"])
        shape = (data["n_layers"], data["n_kv_heads"])
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not a file of head scores: {type(error).__name__} {error}") from error
    if shape != (len(table), len(table[0]) if table else 0) or len({len(row) for row in table}) > 1:
        rows = ", ".join(sorted({str(len(row)) for row in table})) or "no"
        raise ValueError(
            f"{path} announces {shape[0]} x {shape[1]} head scores and holds {len(table)} rows of {rows}"
        )
    flat = [score for row in table for score in row]
    if not all(isfinite(score) and score >= 0 for score in flat) or not sum(flat):
        raise ValueError(f"{path} holds head scores that are negative, not finite or all zero")
    return table


def check_shape(path: str, table: Table, layer: int, heads: int) -> None:
    if layer >= len(table) or heads != len(table[0]):
        raise ValueError(
            f"{path} scores {len(table)} layers of {len(table[0])} KV heads; the model's layer {layer} has {heads}"
        )
