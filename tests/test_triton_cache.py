"""A cache whose kernels are Triton's: equal to the plain one, and a step of it still one graph."""

import pytest
import torch

from kernels import dispatch, triton_attend, triton_gather, triton_hashes, triton_quantize, triton_received
from minikv import CompressedKVCache
from minikv.step import step
from tests.ahead import in_graph, run_interpreted
from tests.conftest import make_toy

pytestmark = pytest.mark.gpu_kernels


def test_caches_of_every_kind_equal_plain_ones_in_the_interpreter():
    run_interpreted("tests/interpreted_cache.py")


@pytest.mark.parametrize(
    ("policy", "launches"),
    [("snapkv+adakv", 3), ("snapkv+turbo", 4), ("hashevict", 5), ("h2o", 3)],
)
def test_a_step_through_kernels_is_one_graph(policy, launches, monkeypatch):
    """Per layer a launch for each stretch and one that merges; HashEvict hashes a key and a query and compares."""
    for module in (triton_attend, triton_gather, triton_hashes, triton_quantize, triton_received):
        monkeypatch.setattr(dispatch, module.__name__.rpartition(".")[2], module, raising=False)
    monkeypatch.setattr(dispatch, "by_triton", lambda x: True)
    model = make_toy()
    cache = CompressedKVCache.for_model(model, policy, budget=64, room=4)
    cache.rows.static = True
    token, pos = torch.zeros(2, 1, 1, dtype=torch.int64)

    @torch.no_grad()
    def call():
        return step(model, cache, token, pos)

    assert len(in_graph(call)) == 2 * launches
