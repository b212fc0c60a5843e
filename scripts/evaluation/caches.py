"""From what a command line asks for to a cache: policies, budgets in tokens, shares or bytes."""

import re
from dataclasses import dataclass, replace

from minikv import CompressedKVCache, Policy
from minikv.sizing import fit_policy, parse_bytes, predict_nbytes
from models.tokenizer import Tokenizer
from models.transformer import Transformer
from scripts.command_line import with_token_kinds

GRANULE = 64  # capacities are multiples of it, so that samples of nearly one length get caches of one size


@dataclass(frozen=True)
class Plan:
    """A policy and how much it may hold: a budget, bytes, or (None, None) all it needs.

    budget: tokens, or a share of the sample like 25%.
    kv_bytes: 8MiB, a share of the full cache's bytes like 25%, or another policy: as much as that one takes.
    """

    policy: str
    budget: str | None = None
    kv_bytes: str | None = None


FULL = Plan("full")


def all_plans(policies: list[str], budgets: list[str], kv_bytes: list[str]) -> list[Plan]:
    """The full cache first, then every combination; a policy that drops nothing has no budget in tokens.

    Raises ValueError for a policy or an amount that cannot be understood.
    """
    for text in budgets:
        parse_share(text)
    for text in kv_bytes:
        check_bytes(text)
    plans = [FULL]
    for text in policies:
        amounts: list[str | None] = list(budgets)
        if not Policy.parse(text).drops:
            amounts = [None] if budgets else []
        plans += [Plan(text, budget=amount) for amount in amounts]
        plans += [Plan(text, kv_bytes=amount) for amount in kv_bytes if text != "full"]
    return list(dict.fromkeys(plans))


def parse_share(text: str) -> tuple[int, bool]:
    """`"256"` -> (256, False), `"25%"` -> (25, True)."""
    found = re.fullmatch(r"(\d+)(%?)", text)
    if not found or int(found[1]) < 1 or (found[2] and int(found[1]) > 100):
        raise ValueError(f"{text!r} is no amount; write tokens, like 256, or a share, like 25%")
    return int(found[1]), bool(found[2])


def check_bytes(text: str) -> None:
    """Raises ValueError unless it is `8MiB`, `25%` or a policy that holds everything."""
    if text.endswith("%"):
        parse_share(text)
    elif text[:1].isdigit():
        parse_bytes(text)
    elif Policy.parse(text).drops:
        raise ValueError(f"--kv-bytes {text}: {text} has no size of its own; name a store, such as int4")


@dataclass(frozen=True)
class Settings:
    """What all policies share; None leaves a policy its own trigger and guards."""

    room: int
    every: int | None = None
    sinks: int | None = None
    recent: int | None = None


class CacheMaker:
    """Makes the cache of a plan for so many tokens, and remembers what fits into which bytes."""

    def __init__(self, model: Transformer, tok: Tokenizer, settings: Settings):
        self.model, self.tok, self.room = model, tok, settings.room
        named = dict(every=settings.every, sinks=settings.sinks, recent=settings.recent)
        self.changes = {name: value for name, value in named.items() if value is not None}
        self.fits: dict[tuple[Plan, int], tuple[Policy, int, int]] = {}

    def make(self, plan: Plan, n_tokens: int) -> CompressedKVCache:
        """Raises ValueError, in one line, where the plan cannot work for so many tokens."""
        capacity = min(-(-n_tokens // GRANULE) * GRANULE, self.model.config.max_position)
        if (plan, capacity) not in self.fits:
            self.fits[plan, capacity] = self.fit(plan, capacity)
        policy, budget, context = self.fits[plan, capacity]
        return CompressedKVCache.for_model(self.model, policy, budget, room=self.room, context=context)

    def policy(self, text: str) -> Policy:
        policy = with_token_kinds(Policy.parse(text), self.tok)
        # Guards and triggers belong to what drops tokens; a store has its own.
        return replace(policy, **self.changes) if policy.drops else policy

    def fit(self, plan: Plan, capacity: int) -> tuple[Policy, int, int]:
        """Policy, budget and context."""
        policy = self.policy(plan.policy)
        if plan.kv_bytes is not None:
            nbytes = self.nbytes(plan.kv_bytes, capacity)
            policy, budget, context = fit_policy(self.model, policy, nbytes, self.room, capacity)
            held = min(budget, context or budget)
            if not policy.drops and held < capacity:
                raise ValueError(f"{plan.policy} holds {held} of {capacity} tokens in {nbytes:,} bytes")
            return policy, budget, capacity
        if plan.budget is None:
            return policy, capacity, capacity
        amount, share = parse_share(plan.budget)
        budget = max(1, amount * capacity // 100) if share else amount
        policy.check_budget(min(policy.layers.split_layers(budget, self.model.config.n_layers)))
        return policy, budget, capacity

    def nbytes(self, text: str, capacity: int) -> int:
        """Bytes of `8MiB`, of `25%` of the full cache, or of the cache of a policy that holds everything."""
        if text.endswith("%"):
            full = predict_nbytes(self.model, "full", room=self.room, context=capacity)
            return full * parse_share(text)[0] // 100
        if text[:1].isdigit():
            return parse_bytes(text)
        return predict_nbytes(self.model, self.policy(text), capacity, 1, self.room, capacity)
