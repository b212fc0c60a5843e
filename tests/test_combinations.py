"""Every scorer with every refiner and split: it works, or is refused with a sentence."""

import itertools

import pytest
import torch

from minikv import METHODS, CompressedKVCache, Policy
from minikv.axes import Scorer
from minikv.policy import STRATEGIES
from tests.conftest import small

SCORERS = [name for name, kind in STRATEGIES.items() if issubclass(kind, Scorer)]
REST = [
    "+".join(p) for p in itertools.product(("", "criticalkv"), ("", "adakv"), ("", "pyramidkv")) if any(p)
]


@pytest.mark.parametrize("scorer", SCORERS)
def test_a_scorer_joins_every_other_axis_or_says_why_not(scorer, toy):
    ids = torch.randint(0, 320, (1, 40), generator=torch.Generator().manual_seed(0))
    worked = 0
    for rest in REST:
        text = "+".join(filter(None, [scorer, *rest.split("+")]))
        try:
            policy = small(Policy.parse(text), None)
        except ValueError as error:
            refused = str(error)
            assert len(refused) > 30 and "\n" not in refused
            continue
        cache = CompressedKVCache.for_model(toy, policy, budget=16, room=4, context=64)
        for piece in ids.split([25, 1, 1, 1, 1, 5, 1, 1, 4], 1):
            assert toy(piece, None, cache).isfinite().all(), text
        fresh = int((cache.rows.fresh_pos >= 0).sum())
        if policy.score.drops:
            assert sum(len(h) for h in cache.kept(0)[0]) <= 2 * (cache.budgets[0] + fresh), text
        worked += 1
    assert worked >= (1 if scorer == "fastgen" else 3)  # FastGen splits heads itself


def test_the_combination_of_the_issue_is_what_its_parts_say():
    policy = Policy.parse("snapkv(window=32)+criticalkv+adakv+pyramidkv")
    assert policy.score == METHODS["snapkv"].score
    assert policy.refine == METHODS["criticalkv"].refine
    assert policy.heads == METHODS["adakv"].heads
    assert policy.layers == METHODS["pyramidkv"].layers
    assert Policy.parse("pyramidkv+adakv+criticalkv+snapkv") == policy
