"""StreamingLLM with positions in the cache: against the definition, and far past the trained length."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from minikv import METHODS, CompressedKVCache, Policy, generate
from minikv.strategies.streaming import StreamingLLM
from tests.conftest import make_toy
from tests.oracle import MaskedDense
from tests.test_cache import PIECES, tokens


class Renumbered(MaskedDense):
    """The paper's definition: keys are turned to their place in the cache, and so is the query."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        out, turn = torch.zeros_like(q), self.model.rope.turn
        self.k[layer][0][:, pos[0]], self.v[layer][0][:, pos[0]] = k[0], v[0]
        for head in range(k.shape[1]):
            for i, at in enumerate(pos[0].tolist()):
                sees = self.held[layer][0][head] + [p for p in pos[0].tolist() if p <= at]
                keys = self.k[layer][0, head, sees][None, None]
                keys = turn(keys, torch.arange(len(sees))[None] - torch.tensor(sees)[None])[0, 0]
                for g in (2 * head, 2 * head + 1):
                    query = turn(q[:, g : g + 1, i : i + 1], torch.tensor([[len(sees) - 1 - at]]))[0, 0, 0]
                    out[0, g, i] = (keys @ query / 4).softmax(0) @ self.v[layer][0, head, sees]
        return out


def policy(every: int | None) -> Policy:
    return Policy(StreamingLLM(shift_sinks=True), every=every, sinks=2, recent=4)


@pytest.mark.parametrize("every", [None, 0, 1, 3])
def test_shifting_the_sinks_equals_renumbering_the_whole_cache(every, toy):
    ids, start = tokens(1), 0
    cache = CompressedKVCache.for_model(toy, policy(every), budget=12, room=4)
    truth = Renumbered(toy, cache)
    for n in PIECES:
        piece = ids[:, start : start + n]
        want = toy(piece, None, truth)
        assert_close(toy(piece, None, cache), want, atol=1e-4, rtol=1e-4)
        start += n


def test_text_goes_on_past_the_trained_length_within_the_budget():
    model = make_toy(max_position=64)
    cache = CompressedKVCache.for_model(model, policy(None), budget=24, room=8)
    out = generate(model, [5] * 20, cache, max_new_tokens=1000, ignore_eos=True)
    assert len(out.ids) == 1000
    assert cache.seen.tolist() == [1019]
    assert max(len(head) for head in cache.kept(1)[0]) < 24 + 8


def test_without_the_shift_the_models_limit_holds():
    model = make_toy(max_position=64)
    cache = CompressedKVCache.for_model(model, replace(METHODS["streaming"], every=None), budget=40)
    assert len(generate(model, [5] * 60, cache, max_new_tokens=99, ignore_eos=True).ids) == 4
