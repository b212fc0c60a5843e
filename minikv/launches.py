"""What inductor's code runs on a CPU, kernel by kernel, so that it can be run again without the rest of that code.

The code of a graph allocates buffers, calls its kernels, and lets the buffers go. A step's tensors never move, so
its buffers need not either: once it has run, the kernels with the tensors they were given are all there is to do.
That saves 2 to 4 ms of a step of 135M weights on two cores. Layers run one after the other, so those that
share code share its buffers.
"""

from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, SimpleNamespace

import torch
from torch import Tensor

Run = Callable[[list[Tensor]], Sequence[Tensor]]  # compiled code: inputs, a list that it empties -> outputs

KERNEL = "cpp_fused"  # what the names of inductor's CPU kernels begin with
LIBRARY = "extern_kernels"  # whose products write to an `out`
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm"}
ALLOCATE = "empty_strided_cpu"
# All else that code may name which does nothing but call kernels.
DTYPES = {str(x).removeprefix("torch.") for x in vars(torch).values() if isinstance(x, torch.dtype)}
HARMLESS = {"clear", "torch", "reinterpret_tensor", ALLOCATE, LIBRARY} | PRODUCTS | DTYPES


class Recorder:
    """Runs compiled code and notes its launches."""

    def __init__(self):
        self.buffers: dict[FunctionType, list[Tensor]] = {}  # of each code, in the order it asks for them
        self.launches: list[Callable[[], object]] = []

    def run(self, run: Run, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Its outputs, to which the launches noted here write whenever they are called."""
        code = getattr(run, "__func__", run)
        names = set(code.__code__.co_names) if isinstance(code, FunctionType) else set()
        kernels = {name for name in names if name.startswith(KERNEL)}
        if not kernels or names - kernels - HARMLESS:
            return self.run_whole(run, inputs)
        module = code.__globals__
        own = {name: module[name] for name in (*kernels, ALLOCATE, LIBRARY)}
        module.update({name: self.noting(own[name]) for name in kernels})
        products = {name: self.noting(getattr(own[LIBRARY], name)) for name in names & PRODUCTS}
        module[LIBRARY] = SimpleNamespace(**products)
        first = code not in self.buffers
        buffers = iter(self.buffers.setdefault(code, []))

        def allocate(*how: object) -> Tensor:
            if not first:
                return next(buffers)
            self.buffers[code].append(own[ALLOCATE](*how))
            return self.buffers[code][-1]

        module[ALLOCATE] = allocate
        try:
            outputs = run(list(inputs))
        finally:
            module.update(own)
        if outputs:  # no other run may write to them
            del self.buffers[code]
        return outputs

    def noting(self, kernel: Callable[..., object]) -> Callable[..., object]:
        def note(*args: object, **named: object) -> object:
            self.launches.append(partial(kernel, *args, **named))
            return kernel(*args, **named)

        return note

    def run_whole(self, run: Run, inputs: list[Tensor]) -> Sequence[Tensor]:
        """Code that does something else too is one launch, which brings its outputs to where they were."""
        inputs = list(inputs)
        outputs = run(list(inputs))

        def again() -> None:
            for old, new in zip(outputs, run(list(inputs)), strict=True):
                old.copy_(new)

        self.launches.append(again)
        return outputs
