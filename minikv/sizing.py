"""Budgets in bytes: what a cache will take, and the most tokens that fit into so many bytes."""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from minikv.cache import DEFAULT_CONTEXT, CompressedKVCache
from minikv.policy import Policy

UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def parse_bytes(text: str) -> int:
    """`"64MiB"` -> 67108864. Raises ValueError for anything but a positive number and a unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]*)", text.strip().lower())
    if not found or found[2] not in UNITS or float(found[1]) <= 0:
        raise ValueError(f"{text!r} is no number of bytes; write it like 64MiB, 1.5GB or 300000")
    return int(float(found[1]) * UNITS[found[2]])


def predict_nbytes(
    model: nn.Module,
    policy: Policy | str,
    budget: int = 512,
    batch: int = 1,
    room: int = 256,
    context: int | None = None,
) -> int:
    """`nbytes` of the cache that `CompressedKVCache.for_model` would make of this, without its memory.

    With `every=0` it is the size before the first answer: fresh then grows. Raises what `for_model` raises.
    """
    return CompressedKVCache.for_model(
        model, policy, budget, batch, room, context, torch.device("meta")
    ).nbytes


def fit_policy(
    model: nn.Module, policy: Policy, nbytes: int, room: int = 256, context: int | None = None
) -> tuple[Policy, int, int | None]:
    """Policy, budget and context of the largest cache for one sequence that takes at most `nbytes`.

    The knob is the budget; of the full cache it is the context; of MiKV, which drops nothing, the share of the
    high tier where a context says how many tokens must fit. Raises ValueError if not even the least fits.
    """
    limit = model.config.max_position
    most = min(context or (DEFAULT_CONTEXT if not policy.drops else limit), limit)

    def size(policy: Policy, budget: int, context: int | None) -> int:
        return predict_nbytes(model, policy, budget, 1, room, context)

    if policy.store.tiers_by_score and not policy.drops and context is not None:

        def with_share(steps: int) -> Policy:
            return replace(policy, store=replace(policy.store, ratio=steps / most))

        share = largest(
            0, most, nbytes, lambda n: size(with_share(n), most, None), "tokens at high precision"
        )
        return with_share(share), most, None
    if not policy.drops and not policy.store.coded:
        return policy, most, largest(1, most, nbytes, lambda n: size(policy, most, n), "tokens of context")
    least = 1 if not policy.drops else least_budget(policy, most)
    budget = largest(least, most, nbytes, lambda n: size(policy, n, None), "tokens of budget")
    return policy, budget, context


def least_budget(policy: Policy, most: int) -> int:
    """The smallest budget that holds what is never dropped; in PyramidKV's smallest layer less would do."""
    return next((n for n in range(1, most) if allows(policy, n)), most)


def allows(policy: Policy, budget: int) -> bool:
    return budget >= policy.sinks + policy.recent_tokens(budget)


def largest(least: int, most: int, nbytes: int, size: Callable[[int], int], what: str) -> int:
    """The largest number in [least, most] whose size is within nbytes, by bisection."""
    smallest = size(least)
    if smallest > nbytes:
        raise ValueError(
            f"{nbytes:,} bytes are too few: already {least} {what} take {smallest:,}; allow more bytes, or a "
            "store of fewer bits, fewer sinks or recent tokens, or less room"
        )
    while least < most:
        middle = (least + most + 1) // 2
        if size(middle) <= nbytes:
            least = middle
        else:
            most = middle - 1
    return least
