"""A policy: one choice per axis. How it selects survivors, how it is written as text, and METHODS."""

import ast
import difflib
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from minikv.axes import Codec, Full, HeadSplit, LayerSplit, Refiner, Scorer
from minikv.seen import Seen
from minikv.strategies.snapkv import SnapKV
from minikv.strategies.streaming import StreamingLLM


@dataclass(frozen=True)
class Policy:
    """One choice per axis. Budgets are tokens per KV head per layer, on average.

    every: None: compress after each prompt and whenever the room for fresh tokens is full; 0: after
        prompts only, as in the papers of the SnapKV family; 1: drop a token in each step; n: every n steps.
    sinks, recent: the first and the last tokens of the sequence, never dropped, inside the budget.
    """

    score: Scorer
    refine: Refiner = Refiner()
    heads: HeadSplit = HeadSplit()
    layers: LayerSplit = LayerSplit()
    store: Codec = Codec()
    every: int | None = None
    sinks: int = 4
    recent: int = 32

    def __post_init__(self):
        for name in ("sinks", "recent", "every"):
            value = getattr(self, name)
            if not (value is None and name == "every") and value < 0:
                raise ValueError(f"{name} must be 0 or more, not {value}")
        window = self.score.n_queries
        if self.every and self.every < window:
            raise ValueError(
                f"every={self.every} is shorter than the {window} queries {self.score} looks at; use "
                f"every={window} or more, or a smaller window"
            )

    @property
    def guarded(self) -> int:
        """Tokens per head that are never dropped."""
        return self.sinks + max(self.recent, self.score.n_queries)

    def check_budget(self, budget: int) -> None:
        if self.score.drops and budget < self.guarded:
            recent = max(self.recent, self.score.n_queries)
            raise ValueError(
                f"a budget of {budget} tokens cannot hold {self.sinks} sinks + {recent} recent tokens = "
                f"{self.guarded}; raise the budget or lower sinks or recent"
            )

    def guard(self, scores: Tensor, seen: Seen) -> Tensor:
        """Protected candidates rank above every score, empty ones below: `[B, H, n]`."""
        limits = torch.finfo(scores.dtype)
        protected = (seen.pos < self.sinks) | (seen.pos > seen.last[:, None, None] - self.recent)
        scores = scores.clamp(limits.min, limits.max).masked_fill(protected, torch.inf)
        return scores.masked_fill(seen.pos < 0, -torch.inf)

    def select(self, seen: Seen, budget: int) -> Tensor:
        """Which candidates survive, bool `[B, H, n]`: `budget` per head on average, or all if fewer.

        Refining comes after the heads are given their budgets, as the papers have it. Ties keep the
        lower position.
        """
        scores = self.guard(self.score.score(seen), seen)
        budgets = self.heads.split(scores, budget)
        scores = self.guard(self.refine.refine(scores, budgets, seen), seen)
        return (rank(scores) < budgets[..., None]) & (seen.pos >= 0)

    @staticmethod
    def parse(text: str) -> "Policy":
        """`"snapkv(window=16)"`: names of METHODS or strategies joined by `+`, each filling one axis.

        Raises ValueError naming the word that is unknown, malformed or given twice for one axis.
        """
        parts = [_parse_part(word.strip()) for word in text.split("+")]
        taken: dict[str, str] = {}
        for name, strategy in parts:
            axis = axis_of(strategy)
            if axis in taken:
                raise ValueError(
                    f"policy {text!r}: {taken[axis]!r} and {name!r} both choose the {axis} axis; keep one"
                )
            taken[axis] = name
        chosen = {axis_of(strategy): strategy for _, strategy in parts}
        base = METHODS.get(parts[0][0]) if len(parts) == 1 else None
        base = base or METHODS[taken.get("score", "snapkv")]
        return replace(base, **chosen)


def rank(scores: Tensor) -> Tensor:
    """Place of each candidate in descending order, 0 is best; equal scores keep their order. `[B, H, n]`."""
    order = scores.argsort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[-1], device=scores.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


AXES = {"score": Scorer, "refine": Refiner, "heads": HeadSplit, "layers": LayerSplit, "store": Codec}


def axis_of(strategy: object) -> str:
    return next(axis for axis, kind in AXES.items() if isinstance(strategy, kind))


# What a name means in a policy's text.
STRATEGIES: dict[str, type] = {
    "full": Full,
    "streaming": StreamingLLM,
    "snapkv": SnapKV,
}

# Published methods with their papers' defaults.
METHODS: dict[str, Policy] = {
    "full": Policy(Full()),
    "streaming": Policy(StreamingLLM(), every=1),
    "snapkv": Policy(SnapKV()),
}


def _parse_part(word: str) -> tuple[str, object]:
    """`"snapkv(window=16)"` -> `("snapkv", SnapKV(window=16))`."""
    name, bracket, rest = word.partition("(")
    name = name.strip().lower()
    if name not in STRATEGIES:
        close = difflib.get_close_matches(name, STRATEGIES, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown policy {name!r}; {hint}known are {', '.join(STRATEGIES)}")
    kind = STRATEGIES[name]
    if not bracket:
        return name, kind()
    if not rest.endswith(")"):
        raise ValueError(f"policy {word!r} lacks its closing bracket")
    known = [f.name for f in fields(kind)]
    arguments = {}
    for pair in filter(None, (p.strip() for p in rest[:-1].split(","))):
        key, equals, value = (side.strip() for side in pair.partition("="))
        if not equals or key not in known:
            takes = ", ".join(known) or "no keywords"
            raise ValueError(f"policy {word!r}: {pair!r} is not understood; {name} takes {takes}")
        try:
            arguments[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            arguments[key] = value  # a bare word, as in pool=avg
    return name, kind(**arguments)
