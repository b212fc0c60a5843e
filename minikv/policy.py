"""A policy: one choice per axis. How it selects survivors, how it is written as text, and METHODS."""

import ast
import difflib
import re
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import get_origin, get_type_hints

import torch
from torch import Tensor

from minikv.axes import Full, HeadSplit, LayerSplit, Refiner, Scorer, Store, rank
from minikv.seen import Seen
from minikv.strategies.adakv import AdaKV
from minikv.strategies.andpro import AnDPro
from minikv.strategies.criticalkv import CriticalKV
from minikv.strategies.duoattention import DuoAttention
from minikv.strategies.expected_attention import ExpectedAttention
from minikv.strategies.fastgen import FastGen
from minikv.strategies.h2o import H2O
from minikv.strategies.hashevict import HashEvict
from minikv.strategies.headkv import HeadKV
from minikv.strategies.keydiff import KeyDiff
from minikv.strategies.kivi import KIVI
from minikv.strategies.kvzip import KVzip
from minikv.strategies.l2norm import L2Norm
from minikv.strategies.mikv import MiKV
from minikv.strategies.pyramidkv import PyramidKV
from minikv.strategies.random_control import Random, Stride
from minikv.strategies.rtn import RTN
from minikv.strategies.scissorhands import Scissorhands
from minikv.strategies.snapkv import SnapKV
from minikv.strategies.streaming import StreamingLLM
from minikv.strategies.tova import TOVA
from minikv.strategies.turbo import Turbo


@dataclass(frozen=True)
class Policy:
    """One choice per axis. Budgets are tokens per KV head per layer, on average.

    every: None: compress after each prompt and whenever the room for fresh tokens is full; 0: after
        prompts only, as in the papers of the SnapKV family; 1: drop a token in each step; n: every n steps.
    sinks, recent: the first and the last tokens of the sequence, never dropped, inside the budget;
        `recent` below 1 is a share of the budget.
    """

    score: Scorer
    refine: Refiner = Refiner()
    heads: HeadSplit = HeadSplit()
    layers: LayerSplit = LayerSplit()
    store: Store = Store()
    every: int | None = None
    sinks: int = 4
    recent: int | float = 32

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
        if self.refine.needs_attention and not self.score.attention_scores:
            raise ValueError(
                f"{self.refine} weighs attention, and {self.score} scores by something else; use it with "
                "snapkv, h2o or tova"
            )
        if not self.heads.uniform and self.every == 1:
            raise ValueError(
                f"{self.heads} gives heads different lengths, which is decided for many tokens at a time; "
                "use every=16 or more, every=0 or every=None"
            )
        if self.refine != Refiner() and self.every == 1:
            raise ValueError(
                f"{self.refine} chooses among many tokens, and every=1 drops a single one; use every=16 or more, "
                "every=0 or every=None"
            )
        if (
            self.every is not None
            and 0 < self.every < self.store.span
            or (self.every == 1 and self.store.tiers_by_score)
        ):
            raise ValueError(
                f"{self.store} moves tokens to codes {self.store.span} at a time or by rank, so single slots "
                f"cannot be replaced; use every={max(self.store.span, 16)} or more, or store=RTN(k=4, v=4)"
            )
        if self.every == 0 and self.store.span > 1 and not self.drops:
            raise ValueError(
                f"{self.store} codes each {self.store.span} tokens as they come; leave every out"
            )
        if not self.heads.uniform and self.store.tiers_by_score:
            raise ValueError(
                f"{self.store} and {self.heads} both divide by score; use rtn, kivi or turbo with it, or heads of "
                "one length"
            )
        if not self.heads.uniform and self.score.shifts_sinks:
            raise ValueError(f"{self.score} needs heads of one length, {self.heads} splits them; drop one")

    @property
    def drops(self) -> bool:
        """Tokens are dropped at all; if not, a budget is a capacity."""
        return self.score.drops and not self.store.holds_all

    def recent_tokens(self, budget: int) -> int:
        """How many of the last tokens are never dropped."""
        recent = int(self.recent * budget) if 0 < self.recent < 1 else int(self.recent)
        # Of heads with different lengths each must hold at least what is kept exact.
        exact = 0 if self.heads.uniform or not self.store.coded else self.store.residual + self.store.span - 1
        return max(recent, self.score.keeps_window, exact)

    def check_budget(self, budget: int) -> None:
        """Raises ValueError if a layer's budget cannot hold what is never dropped."""
        recent = self.recent_tokens(budget)
        if self.drops and budget < self.sinks + recent:
            raise ValueError(
                f"a budget of {budget} tokens cannot hold {self.sinks} sinks + {recent} recent tokens = "
                f"{self.sinks + recent}; raise the budget or lower sinks or recent"
            )

    def guard(self, scores: Tensor, seen: Seen, budget: int) -> Tensor:
        """Protected candidates rank above every score, empty ones below: `[B, H, n]`."""
        limits = torch.finfo(scores.dtype)
        protected = (seen.pos < self.sinks) | seen.recent(self.recent_tokens(budget))
        scores = scores.clamp(limits.min, limits.max).masked_fill(protected, torch.inf)
        return scores.masked_fill(~seen.valid, -torch.inf)

    def select(self, seen: Seen, budget: int, layer: int = 0) -> Tensor:
        """Which candidates survive, bool `[B, H, n]`: `budget` per head on average, or all if fewer.

        Refining comes after the heads are given their budgets, as the papers have it. Ties keep the
        lower position.
        """
        scores = self.guard(self.score.score(seen), seen, budget)
        budgets = self.heads.split(scores, budget, layer)
        scores = self.guard(self.refine.refine(scores, budgets, seen), seen, budget)
        wins = rank(scores) < budgets[..., None]
        fits = (seen.valid.sum(-1) <= budget).all(-1)  # [B] rows that need not drop anything
        return (wins | fits[:, None, None]) & seen.valid

    @staticmethod
    def parse(text: str) -> "Policy":
        """`"snapkv(window=16)"`: names of METHODS or strategies joined by `+`, each filling one axis.

        A per-step method that is joined with what needs many tokens at a time (a refiner, heads of different
        lengths, some stores) drops whenever the room is full instead. Raises ValueError naming the word that is
        unknown, malformed or given twice for one axis.
        """
        parts = [_parse_part(word.strip()) for word in text.split("+")]
        chosen: dict[str, object] = {}
        named: dict[str, str] = {}
        for name, strategy in parts:
            for axis in axes_of(strategy):
                if axis in chosen:
                    raise ValueError(
                        f"policy {text!r}: {named[axis]!r} and {name!r} both choose the {axis} axis; keep one"
                    )
                chosen[axis], named[axis] = strategy, name
        # A single name is the published method; of several, the scorer brings its guards and trigger.
        base = METHODS.get(parts[0][0]) if len(parts) == 1 else None
        if base is None and list(chosen) == ["store"]:
            base = alone(chosen["store"])
        base = base or METHODS[named.get("score", "snapkv")]
        heads, store = chosen.get("heads", base.heads), chosen.get("store", base.store)
        if base.every == 1 and not (heads.uniform and one_at_a_time(store) and "refine" not in chosen):
            chosen["every"] = None
        return replace(base, **chosen)


def alone(store: Store) -> Policy:
    """A store that drops nothing. What spans tokens has no exact sinks, so that spans start at position 0."""
    return Policy(Full(), store=store, sinks=0 if store.span > 1 else 4)


def one_at_a_time(store: Store) -> bool:
    """Single tokens can be dropped and replaced."""
    return store.span == 1 and not store.tiers_by_score


def to_text(policy: Policy) -> str:
    """The strategies of a policy as `from_text` reads them; neutral members are left out.

    Raises ValueError for a strategy without a name.
    """
    names = {kind: name for name, kind in STRATEGIES.items()}
    parts = []
    for axis in AXES:
        strategy = getattr(policy, axis)
        if type(strategy) in names:
            values = ", ".join(f"{f.name}={getattr(strategy, f.name)!r}" for f in fields(strategy))
            parts.append(f"{names[type(strategy)]}({values})")
        elif type(strategy) is not AXES[axis]:
            raise ValueError(
                f"{strategy} has no name to be found by; add one to STRATEGIES in minikv/policy.py"
            )
    return "+".join(dict.fromkeys(parts))


def from_text(text: str, **rest: int | float | None) -> Policy:
    """The policy of exactly these strategies, with `every`, `sinks` and `recent` as given."""
    parts = [_parse_part(word) for word in text.split("+")]
    chosen = {axis: strategy for _, strategy in parts for axis in axes_of(strategy)}
    return Policy(**chosen, **rest)


AXES = {"score": Scorer, "refine": Refiner, "heads": HeadSplit, "layers": LayerSplit, "store": Store}


def axes_of(strategy: object) -> list[str]:
    """The axis a strategy fills; FastGen and HeadKV fill two."""
    return [axis for axis, kind in AXES.items() if isinstance(strategy, kind)]


# What a name means in a policy's text.
STRATEGIES: dict[str, type] = {
    "full": Full,
    "streaming": StreamingLLM,
    "h2o": H2O,
    "scissorhands": Scissorhands,
    "tova": TOVA,
    "l2": L2Norm,
    "hashevict": HashEvict,
    "fastgen": FastGen,
    "snapkv": SnapKV,
    "andpro": AnDPro,
    "expectedattention": ExpectedAttention,
    "keydiff": KeyDiff,
    "kvzip": KVzip,
    "random": Random,
    "stride": Stride,
    "criticalkv": CriticalKV,
    "adakv": AdaKV,
    "headkv": HeadKV,
    "duoattention": DuoAttention,
    "pyramidkv": PyramidKV,
    "rtn": RTN,
    "kivi": KIVI,
    "turbo": Turbo,
    "mikv": MiKV,
}

# Stores by their bits, as they are usually named.
STORES: dict[str, Store] = {
    **{f"int{bits}": RTN(k=bits, v=bits) for bits in (8, 4, 2)},
    **{f"kivi{bits}": KIVI(k=bits, v=bits) for bits in (2, 4)},
    **{f"turbo{bits}": Turbo(k=bits, v=bits) for bits in (2, 3, 4)},
}

# Published methods with their papers' defaults. HeadKV and DuoAttention need a file of head scores, so they
# are named in a policy's text.
METHODS: dict[str, Policy] = {
    "full": Policy(Full()),
    "streaming": Policy(StreamingLLM(), every=1),
    "h2o": Policy(H2O(), every=1, sinks=0, recent=0.5),
    "scissorhands": Policy(Scissorhands(), every=1, recent=10),
    "tova": Policy(TOVA(), every=1, sinks=0, recent=0),
    "l2": Policy(L2Norm(), recent=10),
    "hashevict": Policy(HashEvict(), every=1, recent=10),
    "fastgen": Policy(FastGen(), heads=FastGen()),
    "snapkv": Policy(SnapKV()),
    "pyramidkv": Policy(SnapKV(), layers=PyramidKV()),
    "adakv": Policy(SnapKV(), heads=AdaKV()),
    "criticalkv": Policy(SnapKV(), refine=CriticalKV()),
    "andpro": Policy(AnDPro(), heads=AdaKV(floor=0)),
    "expectedattention": Policy(ExpectedAttention()),
    "keydiff": Policy(KeyDiff(), recent=10),
    "kvzip": Policy(KVzip()),
    "random": Policy(Random(), recent=10),
    "stride": Policy(Stride(), recent=10),
    **{name: alone(store) for name, store in STORES.items()},
    "mikv": Policy(H2O(), store=MiKV(), sinks=0, recent=0.5),
}


def _parse_part(word: str) -> tuple[str, object]:
    """`"snapkv(window=16)"` -> `("snapkv", SnapKV(window=16))`."""
    name, bracket, rest = word.partition("(")
    name = name.strip().lower()
    if name not in STRATEGIES and name not in STORES:
        names = [*STRATEGIES, *STORES]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]!r}? " if close else ""
        raise ValueError(f"unknown policy {name!r}; {hint}known are {', '.join(names)}")
    kind = STRATEGIES[name] if name in STRATEGIES else type(STORES[name])
    make = kind if name in STRATEGIES else partial(replace, STORES[name])
    if not bracket:
        return name, make()
    if not rest.endswith(")"):
        raise ValueError(f"policy {word!r} lacks its closing bracket")
    hints = get_type_hints(kind)
    known = {f.name: hints[f.name] for f in fields(kind)}
    arguments: dict[str, object] = {}
    for pair in filter(None, (p.strip() for p in re.split(r",(?![^(]*\))", rest[:-1]))):
        key, equals, text = (side.strip() for side in pair.partition("="))
        if not equals or key not in known or key in arguments:
            takes = ", ".join(known) or "no keywords"
            raise ValueError(f"policy {word!r}: {pair!r} is not understood; {name} takes {takes}, each once")
        try:
            value = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text  # a bare word, as in pool=avg
        wanted = get_origin(known[key]) or known[key]
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"policy {word!r}: {key} is to be {wanted.__name__}, not {text!r}")
        arguments[key] = value
    return name, make(**arguments)
