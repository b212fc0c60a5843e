"""Triton kernels beside attention: equal to their twins, part of a compiled graph, machine code without spills."""

from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from torch import Tensor

from kernels import triton_gather, triton_hashes, triton_quantize, triton_received
from tests.ahead import ARCHS, check, in_graph, recorded, run_interpreted

pytestmark = pytest.mark.gpu_kernels


def test_every_kernel_equals_its_twin_in_the_interpreter():
    run_interpreted("tests/interpreted_tools.py")


def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def attention(d: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k = zeros(1, 2, 4, 64, d, dtype=dtype), zeros(1, 2, 128, d, dtype=dtype)
    return q, zeros(1, 64, dtype=torch.int64), k, zeros(1, 2, 128, dtype=torch.int32)


Call = Callable[[], object]
ONCE = torch.arange(8)[None, None]  # positions, an index or codes

# What is launched, by name. The head size is no constant of `received`: one code serves all.
CALLS: dict[str, tuple[ModuleType, Call]] = {
    "received": (triton_received, lambda: triton_received.received(*attention(128, torch.bfloat16), 100)),
    "received fp32": (triton_received, lambda: triton_received.received(*attention(64, torch.float32), 100)),
    "largest": (triton_received, lambda: triton_received.largest(*attention(128, torch.bfloat16), None)),
    "3 bits of tokens, symmetric": (
        triton_quantize,
        lambda: triton_quantize.quantize_tokens(zeros(9, 64, 64), 3, 64, True),
    ),
    "4 bits of tokens": (
        triton_quantize,
        lambda: triton_quantize.quantize_tokens(zeros(9, 64, 128), 4, 32, False),
    ),
    "8 bits of tokens": (
        triton_quantize,
        lambda: triton_quantize.quantize_tokens(zeros(9, 64, 256), 8, 32, False),
    ),
    "2 bits of channels": (
        triton_quantize,
        lambda: triton_quantize.quantize_channels(zeros(9, 64, 128), 2, 32),
    ),
    "4 bits of channels": (
        triton_quantize,
        lambda: triton_quantize.quantize_channels(zeros(9, 64, 256), 4, 32),
    ),
    "64 signs": (
        triton_hashes,
        lambda: triton_hashes.sign_codes(zeros(9, 256), zeros(256, 64, dtype=torch.float32)),
    ),
    "distances": (triton_hashes, lambda: triton_hashes.distances(ONCE, ONCE[:, :, :4], 16)),
    "gather": (
        triton_gather,
        lambda: triton_gather.gather(zeros(1, 1, 8, 128), zeros(1, 1, 8, 128), ONCE.int(), ONCE),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_machine_code_for_every_gpu_spills_nothing_and_fits(name, monkeypatch):
    module, call = CALLS[name]
    # On a GPU models run in 16 bits; of the same kernel in float32 two architectures are proof enough.
    check(recorded(monkeypatch, module, call), name, (80, 90) if "fp32" in name else ARCHS)


@pytest.mark.parametrize("name", CALLS)
def test_a_compiled_graph_holds_the_kernels_themselves(name):
    """No graph break, and the ops are opened up: the compiler sees every launch, and that it only reads its inputs."""
    launches = in_graph(CALLS[name][1])
    assert launches
    for launch in launches:
        written = set(launch.kwargs["tensors_to_clone"])
        assert not {"q_ptr", "k_ptr", "x_ptr", "pos_ptr", "codes_ptr"} & written
