"""What a cache costs: bytes held, and the largest tensor while a prompt is compressed."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minikv import METHODS, CompressedKVCache
from minikv.generate import prefill
from tests.conftest import make_toy


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor that any operation returns."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.numel = max(self.numel, x.untyped_storage().nbytes() // x.element_size())
        return out


@pytest.fixture(scope="module")
def long_toy():
    return make_toy(max_position=4096)


def largest(model, policy, n: int) -> int:
    cache = CompressedKVCache.for_model(model, policy, budget=96, context=4096 if policy.score.drops else n)
    with Largest() as mode, torch.no_grad():
        prefill(model, [[i % 300 for i in range(n)]], cache)
    return mode.numel


@pytest.mark.parametrize("name", METHODS)
def test_no_tensor_grows_with_the_square_of_the_prompt(name, long_toy):
    # HashEvict takes a prompt token by token, which is slow to watch.
    lengths = (128, 256) if name == "hashevict" else (512, 1024)
    small, big = (largest(long_toy, METHODS[name], n) for n in lengths)
    assert big < 2.3 * small


def heads_bytes(model, budget: int, room: int) -> int:
    """Keys and values of budget + room slots in every head of every layer."""
    config = model.config
    return 2 * config.n_layers * config.n_kv_heads * (budget + room) * config.head_dim * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("full", "scissorhands")])
def test_the_real_models_cache_is_budget_and_room_within_six_percent(name, real_model):
    """Positions, statistics, remembered queries and the pool's spare slots included."""
    cache = CompressedKVCache.for_model(real_model, METHODS[name], budget=512, room=256)
    room = METHODS[name].every or 256
    assert cache.nbytes < 1.06 * heads_bytes(real_model, 512, room)


@pytest.mark.slow
def test_scissorhands_pays_for_its_history(real_model):
    """400 votes are 50 bytes per token, a tenth of this model's 512 bytes of keys and values."""
    cache = CompressedKVCache.for_model(real_model, "scissorhands", budget=512)
    assert 1.06 < cache.nbytes / heads_bytes(real_model, 512, 1) < 1.13
