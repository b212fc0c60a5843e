"""One graph for a cache's life: no graph breaks, no recompiles, no buffer that moves."""

import gc
from dataclasses import replace

import pytest
import torch

from minikv import METHODS, CompressedKVCache, generate
from minikv.step import CompiledStep, step
from tests.conftest import make_toy, small


def trigger(name: str):
    return small(METHODS[name], METHODS[name].every)


class Counter:
    """A backend that counts graphs and runs them eagerly."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, examples, noted):
        self.graphs += 1
        run = noted(lambda tensors: graph(*tensors))
        return lambda *tensors: run(list(tensors))


@pytest.fixture
def counter() -> Counter:
    torch._dynamo.reset()
    return Counter()


def talk(model, cache, run) -> list[list[int]]:
    """Prompts and answers of many lengths, in turns, with a reset between."""
    answers = []
    for length, new in [(5, 4), (30, 9), (1, 6), (17, 12)]:
        answers.append(
            generate(
                model, list(range(20, 20 + length)), cache, max_new_tokens=new, ignore_eos=True, step=run
            ).ids
        )
    cache.reset()
    answers.append(generate(model, [9] * 50, cache, max_new_tokens=5, ignore_eos=True, step=run).ids)
    return answers


@pytest.mark.parametrize("name", METHODS)
def test_one_graph_whatever_the_prompt_the_length_and_the_state(name, toy, counter):
    """One for each kind of layer, that is, and one at either end."""
    budget = 12 if METHODS[name].drops else 128
    cache = CompressedKVCache.for_model(toy, trigger(name), budget=budget, room=4, context=128)
    eager = talk(toy, cache, step)
    cache.reset()
    places = {name: buffer.data_ptr() for name, buffer in cache.named_buffers()}
    assert talk(toy, cache, CompiledStep(cache, backend=counter)) == eager
    assert counter.graphs == 2 + len({layer.kind for layer in cache.layers})
    assert {name: buffer.data_ptr() for name, buffer in cache.named_buffers()} == places


def test_layers_of_a_kind_share_a_graph(counter):
    model = make_toy(n_layers=12, windows=(7, 7, *[None] * 10))
    cache = CompressedKVCache.for_model(model, "pyramidkv", budget=200, room=4)
    assert len({layer.kind for layer in cache.layers}) > 8  # as many as torch compiles of one function
    ids = generate(model, [9] * 50, cache, max_new_tokens=6, ignore_eos=True).ids
    cache.reset()
    run = CompiledStep(cache, backend=counter)
    assert generate(model, [9] * 50, cache, max_new_tokens=6, ignore_eos=True, step=run).ids == ids
    assert counter.graphs == 2 + len({layer.kind for layer in cache.layers}) < 2 + 12


def test_more_caches_than_torch_compiles_variants_of_one_function(toy, counter):
    """Eight variants per code object are the limit, and a cache of another size is another variant."""
    for budget in range(40, 50):
        cache = CompressedKVCache.for_model(toy, "l2", budget=budget, room=4)
        run = CompiledStep(cache, backend=counter)
        generate(toy, [5] * 60, cache, max_new_tokens=3, ignore_eos=True, step=run)
    assert counter.graphs == 10 * 3


def test_a_cache_that_grows_is_recorded_again(toy, counter):
    cache = CompressedKVCache.for_model(toy, replace(METHODS["snapkv"], every=0), budget=40, room=4)
    run = CompiledStep(cache, backend=counter)
    for _ in range(2):
        for new, blocks in ((3, 1), (9, 3)):
            ids = generate(toy, [5] * 9, cache, max_new_tokens=new, ignore_eos=True).ids
            assert cache.rows.room == 4 * blocks
            cache.reset()
            assert generate(toy, [5] * 9, cache, max_new_tokens=new, ignore_eos=True, step=run).ids == ids
            cache.reset()
    assert counter.graphs == 2 * 2 + 1  # what comes after the layers does not look at them


def live_tensors() -> int:
    gc.collect()
    return sum(type(found) is torch.Tensor for found in gc.get_objects())


def test_two_hundred_prompts_compile_once_and_leave_nothing_behind(toy, counter):
    cache = CompressedKVCache.for_model(toy, trigger("snapkv"), budget=12, room=4)
    run, counts = CompiledStep(cache, backend=counter), []
    for i in range(200):
        generate(toy, [5] * (1 + i % 67), cache, max_new_tokens=1 + i % 7, ignore_eos=True, step=run)
        if i % 50 == 49:
            counts.append(live_tensors())
        cache.reset()
    assert counter.graphs == 3
    assert len(set(counts)) == 1, counts


def test_sampling_settings_do_not_compile_anything_new(toy, counter):
    cache = CompressedKVCache.for_model(toy, trigger("snapkv"), budget=12, room=4)
    run = CompiledStep(cache, backend=counter)
    for temperature in (0.0, 0.5, 2.0):
        generate(toy, [5] * 9, cache, max_new_tokens=4, temperature=temperature, ignore_eos=True, step=run)
    assert counter.graphs == 3


def test_logits_of_a_step_stay_valid_after_the_next(toy):
    cache = CompressedKVCache.for_model(toy, "full", context=64)
    toy(torch.tensor([[1, 2, 3]]), None, cache)
    first = step(toy, cache, torch.tensor([[4]]), torch.tensor([[3]]))
    copy = first.clone()
    step(toy, cache, torch.tensor([[5]]), torch.tensor([[4]]))
    assert torch.equal(first, copy)
