"""One decode step, eager or compiled. Its shapes never change: what moves is in buffers."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from time import perf_counter
from types import FunctionType

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from minikv.cache import CompressedKVCache
from minikv.launches import Recorder, Run
from minikv.layer import Layer
from minikv.rows import Rows

Step = Callable[[nn.Module, CompressedKVCache, Tensor, Tensor], Tensor]
Noted = Callable[[Run], Run]
Backend = Callable[[GraphModule, list[Tensor], Noted], Callable[..., Sequence[Tensor]]]


def step(model: nn.Module, cache: CompressedKVCache, token: Tensor, pos: Tensor) -> Tensor:
    """Feed one token per row: token, pos `[B, 1]` (-1 rests) -> logits `[B, V]`.

    Tensor code only. The caller sees to `cache.reserve` before and `cache.settle` after.
    """
    cache.place(token, pos)
    x = model.hidden(token, pos, cache)
    cache.advance(pos)
    return model.logits(x)[:, 0]


# The same in three pieces, so that one compiled block serves all layers. They share a state `x [B, 1, C]` and
# what rope makes of the positions, which they write in place.


def enter(
    model: nn.Module,
    cache: CompressedKVCache,
    token: Tensor,
    pos: Tensor,
    x: Tensor,
    rope: tuple[Tensor, ...],
) -> None:
    cache.place(token, pos)
    x.copy_(model.embed(token))
    for kept, new in zip(rope, model.rope(pos), strict=True):
        kept.copy_(new)


def through(
    block: nn.Module, layer: Layer, rows: Rows, pos: Tensor, x: Tensor, rope: tuple[Tensor, ...]
) -> None:
    x.copy_(block(x, rope, lambda q, k, v: layer.step(q, k, v, pos, rows)))


def leave(model: nn.Module, cache: CompressedKVCache, pos: Tensor, x: Tensor) -> Tensor:
    cache.advance(pos)
    return model.logits(model.norm(x))[:, 0]


def inductor(graph: GraphModule, examples: list[Tensor], noted: Noted) -> Callable[..., Sequence[Tensor]]:
    """Compile with torch's inductor. What is noted is its code itself, below the wrappers that torch puts around it."""
    # Not imported above: it takes seconds, and who decodes eagerly has no use for it.
    compiler, config = (
        import_module(name) for name in ("torch._inductor.compile_fx", "torch._functorch.config")
    )

    def compile_noted(*args, **kwargs) -> Run:
        return noted(compiler.compile_fx_inner(*args, **kwargs).current_callable)

    # Every tensor keeps its place, so there is no need to look at its strides in each step; and a product and
    # the sum it goes into may be one instruction.
    options = {"size_asserts": False, "cpp.enable_floating_point_contract_flag": "fast"}
    # This cache would hand out wrapped code. Inductor's own, of what it has compiled before, is not affected.
    with config.patch(enable_autograd_cache=False):
        return compiler.compile_fx(graph, examples, inner_compile=compile_noted, config_patches=options)


def to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


class CompiledStep:
    """`step` through torch.compile, made for one cache: a graph for each kind of layer, and one at either end.

    Every tensor a step touches keeps its place, so its first run is recorded as a list of launches, and the
    runs after it are that list again: on a GPU as one CUDA graph. The cache is read in whole buffers from
    here on, so that shapes stay. `note` is told how long compiling took and whether there is a CUDA graph.
    Where there is no working compiler it is told that, and the steps run eagerly.
    """

    def __init__(
        self,
        cache: CompressedKVCache,
        note: Callable[[str], None] = to_stderr,
        backend: Backend = inductor,
        cuda_graph: bool = True,
    ):
        cache.rows.static = True
        self.note, self.backend = note, backend
        self.captures = cuda_graph and cache.rows.seen.is_cuda
        self.works = True
        self.compiled: dict[tuple, Callable] = {}
        self.recorder = Recorder()
        self.graph: torch.cuda.CUDAGraph | None = None
        self.made_for: Tensor | None = None  # a buffer that is another one once the cache has been resized

    def __call__(self, model: nn.Module, cache: CompressedKVCache, token: Tensor, pos: Tensor) -> Tensor:
        if not self.works:
            return step(model, cache, token, pos)
        if self.made_for is not cache.rows.fresh_pos:
            return self.first(model, cache, token, pos)
        self.token.copy_(token)
        self.pos.copy_(pos)
        if self.captures and self.graph is None:
            self.capture()
        if self.graph is None:
            self.replay()
        else:
            self.graph.replay()
        return self.logits.clone()

    def first(self, model: nn.Module, cache: CompressedKVCache, token: Tensor, pos: Tensor) -> Tensor:
        """Compile, or without a compiler run eagerly from now on."""
        begun = perf_counter()
        try:
            logits = self.record(model, cache, token, pos)
        except (torch._dynamo.exc.BackendCompilerFailed, torch._inductor.exc.InductorError) as error:
            if len(self.recorder.launches) > 1:  # layers have changed already
                raise
            reason = str(error).strip().splitlines()[0]
            self.note(f"warning: torch.compile does not work here ({reason}); going on without")
            self.works = cache.rows.static = False
            return step(model, cache, token, pos)
        self.note(f"compiled in {perf_counter() - begun:.1f} s")
        return logits

    def record(self, model: nn.Module, cache: CompressedKVCache, token: Tensor, pos: Tensor) -> Tensor:
        """A step that notes every launch with its tensors."""
        self.recorder, self.graph, self.made_for = Recorder(), None, None
        self.token, self.pos = token.clone(), pos.clone()
        x, rope = model.embed(token).clone(), tuple(part.clone() for part in model.rope(pos))
        self.own(enter)(model, cache, self.token, self.pos, x, rope)
        for block, layer in zip(model.layers, cache.layers, strict=True):
            self.own(through, layer.kind)(block, layer, cache.rows, self.pos, x, rope)
        self.logits = self.own(leave)(model, cache, self.pos, x)
        self.made_for = cache.rows.fresh_pos
        return self.logits.clone()

    def own(self, function: FunctionType, *kind: object) -> Callable:
        """The function compiled for this step alone: torch compiles at most eight variants of a code object."""
        key = (function, *kind)
        if key not in self.compiled:
            name = f"{function.__name__}_{id(self)}_{len(self.compiled)}"
            copy = FunctionType(function.__code__.replace(co_name=name), function.__globals__)
            self.compiled[key] = torch.compile(copy, backend=self.recorded, fullgraph=True, dynamic=False)
        return self.compiled[key]

    def recorded(self, graph: GraphModule, examples: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        return self.backend(graph, examples, self.noted)

    def noted(self, run: Run) -> Run:
        def note_and_run(tensors: list[Tensor]) -> Sequence[Tensor]:
            return self.recorder.run(run, tensors)

        note_and_run._boxed_call = True  # tells torch that it takes a list
        return note_and_run

    def replay(self) -> None:
        for launch in self.recorder.launches:
            launch()

    def capture(self) -> None:
        """Note the launches of a replay as a CUDA graph; nothing runs."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                self.replay()
        except RuntimeError as error:
            self.captures = False
            self.note(f"CUDA graphs are off: {str(error).strip().splitlines()[0]}")
            return
        self.graph = graph
        self.note("CUDA graphs are on: a step is one launch")
