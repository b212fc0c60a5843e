"""Kernels compiled for GPUs that are not here: record what a launcher launches, make machine code of it, look at it.

    launches = recorded(monkeypatch, triton_tools, lambda: triton_tools.pack(codes, 4, 32))
    check(launches, "pack 4 bits")

A launcher is called with small CPU tensors and launches through the `wrap_triton` of its module, so what is compiled
is exactly what would run: its constants, block sizes and number of warps. Needs Triton, and not its interpreter, which
`run_interpreted` starts in a process of its own.
"""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ROOT = Path(__file__).resolve().parents[1]

# Shared memory that one program may use, in bytes, by compute capability.
SHARED_LIMIT = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448}
ARCHS = tuple(SHARED_LIMIT)
OPTIONS = ("num_warps", "num_stages")
TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.bool: "i1",
}


def run_interpreted(tests: str) -> None:
    """A file of tests with the kernels interpreted: Triton reads that switch when it is imported."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "--noconftest", tests]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout


@dataclass(frozen=True)
class Launch:
    """A kernel, its arguments by name, and launch options such as `num_warps`."""

    kernel: triton.JITFunction
    args: dict[str, object]
    options: dict[str, int]


@dataclass(frozen=True)
class Usage:
    """What a compiled kernel takes: registers per thread, bytes spilled per thread, shared bytes per program."""

    registers: int
    spilled: int
    shared: int

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.spilled} bytes spilled, {self.shared} bytes shared"


def recorded(monkeypatch: pytest.MonkeyPatch, module: ModuleType, call: Callable[[], object]) -> list[Launch]:
    """The launches that `call` makes through `module.wrap_triton`; none of them runs."""
    found: list[Launch] = []

    class Recorder:
        def __init__(self, kernel: triton.JITFunction):
            self.kernel = kernel

        def __getitem__(self, grid: object) -> Callable[..., None]:
            def launch(*args: object, **named: object) -> None:
                options = {name: named.pop(name) for name in OPTIONS if name in named}
                args = dict(zip(self.kernel.arg_names, args, strict=False)) | named
                assert set(args) == set(self.kernel.arg_names), "a launch names all arguments of its kernel"
                found.append(Launch(self.kernel, args, options))

            return launch

    with monkeypatch.context() as patch:
        patch.setattr(module, "wrap_triton", Recorder)
        call()
    assert found, "nothing was launched"
    return found


def compile_for(launch: Launch, arch: int) -> Usage:
    """Machine code for compute capability `arch` (90: sm_90), specialized as a real launch would be."""
    signature, constants, attributes = {}, {}, {}
    for place, parameter in enumerate(launch.kernel.params):
        value = launch.args[parameter.name]
        kind = "constexpr" if parameter.is_constexpr else kind_of(value)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif kind.startswith("*") or (kind.startswith("i") and value % 16 == 0):
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)
    return usage_of(compiled.asm["cubin"], compiled.metadata.shared)


def kind_of(value: object) -> str:
    """Triton's name for the type of an argument; a 1 and None become part of the code."""
    if isinstance(value, Tensor):
        return "*" + TYPES[value.dtype]
    if value is None or value == 1:
        return "constexpr"
    if isinstance(value, float):
        return "fp32"
    assert isinstance(value, int), f"{value!r} cannot be passed to a kernel"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def usage_of(cubin: bytes, dynamic_shared: int) -> Usage:
    """Read from the machine code. A thread's stack holds nothing but spilled registers: Triton has no arrays."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK|SHARED|LOCAL):(\d+)", text)}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], found["SHARED"] + dynamic_shared)


def check(launches: list[Launch], what: str, archs: tuple[int, ...] = ARCHS) -> None:
    """Compile all for every `arch`, print what they take, and fail on spills or too much shared memory."""
    for launch in launches:
        for arch in archs:
            usage = compile_for(launch, arch)
            line = f"sm_{arch} {launch.kernel.__name__} {what}: {usage}"
            print(line)
            assert usage.spilled == 0 and usage.shared <= SHARED_LIMIT[arch], line


@contextmanager
def as_if_on_a_gpu() -> Iterator[None]:
    """Lets torch read, for a GPU that is not here, which tensors a kernel writes."""
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    triton.runtime.driver.set_active(target)
    try:
        yield
    finally:
        triton.runtime.driver.set_active(None)  # to be found anew when asked for


def in_graph(call: Callable[[], object]) -> list[torch.fx.Node]:
    """Launches in the graph that `torch.compile` would hand to its compiler, after opening up the ops that launch.

    Fails on a graph break. A node's `kwargs["tensors_to_clone"]` names what torch takes for written.
    """
    launches: list[torch.fx.Node] = []

    def compiler(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., list[Tensor]]:
        launches.extend(n for n in graph.graph.nodes if n.target is triton_kernel_wrapper_functional)
        outputs = [n.meta["val"] for n in graph.graph.find_nodes(op="output")[0].args[0]]
        return lambda *_: [torch.empty(x.shape, dtype=x.dtype) for x in outputs]

    torch._dynamo.reset()
    with as_if_on_a_gpu():
        backend = aot_autograd(fw_compiler=compiler)
        torch.compile(call, backend=backend, fullgraph=True, dynamic=False)()
    return launches
