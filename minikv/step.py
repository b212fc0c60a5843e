"""One decode step, eager or compiled. Its shapes never change: what moves is in buffers."""

import sys
from collections.abc import Callable
from types import FunctionType

import torch
from torch import Tensor, nn

from minikv.cache import CompressedKVCache

Step = Callable[[nn.Module, CompressedKVCache, Tensor, Tensor], Tensor]


def step(model: nn.Module, cache: CompressedKVCache, token: Tensor, pos: Tensor) -> Tensor:
    """Feed one token per row: token, pos `[B, 1]` (-1 rests) -> logits `[B, V]`.

    Tensor code only. The caller sees to `cache.reserve` before and `cache.settle` after.
    """
    cache.place(token, pos)
    x = model.hidden(token, pos, cache)
    cache.advance(pos)
    return model.logits(x)[:, 0]


class CompiledStep:
    """`step` through torch.compile: one graph for a cache's life, whatever its state.

    The cache is read in whole buffers from here on, so that shapes stay. Where there is no working
    compiler the first call says so once, and the steps run eagerly.
    """

    def __init__(self, cache: CompressedKVCache):
        cache.rows.static = True
        on_gpu = cache.rows.seen.is_cuda
        # A code object of its own: torch compiles at most eight variants of one, and each cache shape is one.
        self.own = FunctionType(step.__code__.replace(co_name=f"step_{id(self)}"), step.__globals__)
        self.run: Step = torch.compile(
            self.own, fullgraph=True, dynamic=False, mode="reduce-overhead" if on_gpu else None
        )
        self.proven = False

    def __call__(self, model: nn.Module, cache: CompressedKVCache, token: Tensor, pos: Tensor) -> Tensor:
        if self.proven:
            return self.run(model, cache, token, pos).clone()
        try:
            logits = self.run(model, cache, token, pos).clone()
        except torch._inductor.exc.InductorError as error:
            # Compilation comes before anything runs, so nothing has been written yet.
            reason = str(error).strip().splitlines()[0]
            print(f"warning: torch.compile does not work here ({reason}); going on without", file=sys.stderr)
            self.run = step
            cache.rows.static = False
            logits = self.run(model, cache, token, pos)
        self.proven = True
        return logits
