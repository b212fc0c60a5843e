"""Whole caches whose kernels run in Triton's interpreter beside plain ones; tests/test_triton_cache.py runs this file."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import dispatch
from minikv import METHODS, CompressedKVCache, Policy
from minikv.generate import prefill
from minikv.step import step
from tests.conftest import make_toy, small

# One of each way to attend, to score and to write.
NAMES = ["streaming", "h2o", "hashevict(prompt=batched)", "kvzip", "adakv"]
NAMES += ["int4", "int2", "int8(symmetric=True)", "kivi2", "turbo4", "turbo(sign=True)", "mikv(high=8,low=3)"]
NAMES += ["snapkv+adakv+kivi", "h2o+adakv+turbo3", "snapkv+mikv"]


@pytest.fixture(scope="module")
def model():
    """Layer 0 has a sliding window of 9 tokens."""
    return make_toy(windows=(9, None))


def told(model, policy: Policy, budget: int) -> tuple[list[Tensor], list]:
    """Logits of two prompts of different lengths, of steps and of a second turn, and what is kept in the end."""
    cache = CompressedKVCache.for_model(model, policy, budget=budget, batch=2, room=2, context=64)
    ids = torch.randint(3, 300, (2, 31), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = [prefill(model, [ids[0, :20].tolist(), ids[1, :17].tolist()], cache)]
        for t in range(20, 23):
            cache.reserve(1)
            logits.append(step(model, cache, ids[:, t, None], cache.seen[:, None]))
            cache.settle()
        logits.append(prefill(model, ids[:, 23:].tolist(), cache))
    return logits, [cache.kept(layer) for layer in range(len(model.layers))]


@pytest.mark.parametrize("name", NAMES)
def test_a_cache_through_kernels_is_the_plain_cache(name, model, monkeypatch):
    policy = Policy.parse(name)
    policy, budget = small(policy, policy.every), 12 if policy.drops else 64
    if policy.store.span > 1:
        budget = 72  # KIVI codes 32 tokens at a time, and keeps up to 31 more
    found = told(model, policy, budget)
    monkeypatch.setattr(dispatch, "TRITON", False)
    wanted = told(model, policy, budget)
    assert found[1] == wanted[1]
    assert_close(found[0], wanted[0], atol=2e-4, rtol=2e-4)


def test_the_kernels_do_run(model, monkeypatch):
    """What the comparison above is worth nothing without."""
    calls, attend = [], dispatch.triton_attend.attend
    monkeypatch.setattr(dispatch.triton_attend, "attend", lambda *given: calls.append(0) or attend(*given))
    told(model, small(METHODS["adakv"], 4), 12)
    assert len(calls) == 2 * 3  # layers, steps
