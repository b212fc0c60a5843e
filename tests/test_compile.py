"""One graph for a cache's life: no graph breaks, no recompiles, no buffer that moves."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from minikv import METHODS, CompressedKVCache, generate
from minikv.step import step
from tests.conftest import small


def trigger(name: str):
    return small(METHODS[name], METHODS[name].every)


class Counted:
    """A compiled step that counts its graphs and runs them eagerly."""

    def __init__(self):
        torch._dynamo.reset()
        self.counter = CompileCounter()
        self.run = torch.compile(step, backend=self.counter, fullgraph=True, dynamic=False)

    def __call__(self, model, cache, token, pos):
        return self.run(model, cache, token, pos)

    @property
    def graphs(self) -> int:
        return self.counter.frame_count


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
def test_one_graph_whatever_the_prompt_the_length_and_the_state(name, toy):
    budget = 12 if METHODS[name].drops else 128
    cache = CompressedKVCache.for_model(toy, trigger(name), budget=budget, room=4, context=128)
    eager = talk(toy, cache, step)
    cache.reset()
    cache.rows.static = True
    places = {name: buffer.data_ptr() for name, buffer in cache.named_buffers()}
    run = Counted()
    assert talk(toy, cache, run) == eager
    assert run.graphs == 1
    assert {name: buffer.data_ptr() for name, buffer in cache.named_buffers()} == places


def test_sampling_settings_do_not_compile_anything_new(toy):
    cache = CompressedKVCache.for_model(toy, trigger("snapkv"), budget=12, room=4)
    cache.rows.static = True
    run = Counted()
    for temperature in (0.0, 0.5, 2.0):
        generate(toy, [5] * 9, cache, max_new_tokens=4, temperature=temperature, ignore_eos=True, step=run)
    assert run.graphs == 1


def test_logits_of_a_step_stay_valid_after_the_next(toy):
    cache = CompressedKVCache.for_model(toy, "full", context=64)
    toy(torch.tensor([[1, 2, 3]]), None, cache)
    first = step(toy, cache, torch.tensor([[4]]), torch.tensor([[3]]))
    copy = first.clone()
    step(toy, cache, torch.tensor([[5]]), torch.tensor([[4]]))
    assert torch.equal(first, copy)
