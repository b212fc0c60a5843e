"""What a cache costs: bytes held, and the largest tensor while a prompt is compressed."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from minikv import METHODS, CompressedKVCache
from minikv.generate import prefill
from tests.conftest import RAW, make_toy


class Live(TorchDispatchMode):
    """Counts the bytes of all storages made while it is on that are still alive, and their peak."""

    def __init__(self, *modules: torch.nn.Module):
        super().__init__()
        held = [x for m in modules for x in (*m.parameters(), *m.buffers())]
        self.before = {x.untyped_storage().data_ptr() for x in held}
        self.now = self.peak = 0
        self.users: dict[int, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.use(x)
        return out

    def use(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        if place in self.before:
            return
        if place not in self.users:
            self.users[place] = 0
            self.now += size
            self.peak = max(self.peak, self.now)
        self.users[place] += 1
        weakref.finalize(x, self.drop, place, size)

    def drop(self, place: int, size: int) -> None:
        self.users[place] -= 1
        if self.users[place] == 0:
            del self.users[place]
            self.now -= size


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
    cache = CompressedKVCache.for_model(
        model, policy, budget=96 if policy.drops else n, context=4096 if policy.drops else n
    )
    with Largest() as mode, torch.no_grad():
        prefill(model, [[i % 300 for i in range(n)]], cache)
    return mode.numel


@pytest.mark.parametrize("name", METHODS)
def test_no_tensor_grows_with_the_square_of_the_prompt(name, long_toy):
    # HashEvict takes a prompt token by token, which is slow to watch.
    lengths = (128, 256) if name == "hashevict" else (512, 1024)
    small, big = (largest(long_toy, METHODS[name], n) for n in lengths)
    assert big < 2.3 * small


def peak(n_layers: int, policy, n: int) -> int:
    model = make_toy(max_position=4096, n_layers=n_layers)
    cache = CompressedKVCache.for_model(model, policy, budget=96 if policy.drops else 640)
    with Live(model, cache) as mode, torch.no_grad():
        prefill(model, [[i % 300 for i in range(n)]], cache)
    return mode.peak


AT_ONCE = [name for name, policy in METHODS.items() if not (policy.score.replays or policy.score.one_by_one)]


@pytest.mark.parametrize("name", AT_ONCE)
def test_a_prompt_holds_one_layers_keys_and_values_at_a_time(name):
    """Six layers more cost not a byte while a prompt is read."""
    assert peak(8, METHODS[name], 600) == peak(2, METHODS[name], 600)


def test_reading_a_prompt_twice_holds_all_layers_as_kvzip_says():
    one_layer = 2 * 2 * 600 * 16 * 4  # k and v, heads, tokens, head size, bytes
    assert peak(8, METHODS["kvzip"], 600) - peak(2, METHODS["kvzip"], 600) >= 6 * one_layer


def heads_bytes(model, budget: int, room: int) -> int:
    """Keys and values of budget + room slots in every head of every layer."""
    config = model.config
    return 2 * config.n_layers * config.n_kv_heads * (budget + room) * config.head_dim * 4


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RAW if name not in ("full", "scissorhands")])
def test_the_real_models_cache_is_budget_and_room_within_six_percent(name, real_model):
    """Positions, statistics, remembered queries and the pool's spare slots included."""
    cache = CompressedKVCache.for_model(real_model, METHODS[name], budget=512, room=256)
    room = METHODS[name].every or 256
    assert cache.nbytes < 1.06 * heads_bytes(real_model, 512, room)


@pytest.mark.slow
def test_scissorhands_pays_for_its_history(real_model):
    """400 votes are 52 bytes per token, a tenth of this model's 512 bytes of keys and values."""
    cache = CompressedKVCache.for_model(real_model, "scissorhands", budget=512)
    assert 1.06 < cache.nbytes / heads_bytes(real_model, 512, 1) < 1.13
