"""Which form of a kernel runs: Triton's for tensors of a GPU, its plain twin for all others.

Who needs a kernel that has two forms takes it from here. Triton's interpreter (`TRITON_INTERPRET=1`) runs every
kernel on a CPU, slowly, and so counts as a GPU: tests put whole caches through it. `MINIKV_TRITON=0` keeps to the
plain forms on a GPU, too, of which torch.compile then makes its own kernels.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor

from kernels import gather as plain_gather
from kernels import hashes, quantize, stretches
from kernels import received as attention_received

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Where nothing could run them Triton is not even imported: that takes a second.
WANTED = INTERPRETED or (torch.cuda.is_available() and os.environ.get("MINIKV_TRITON") != "0")
TRITON = WANTED and find_spec("triton") is not None

if TRITON:
    from kernels import triton_attend, triton_gather, triton_hashes, triton_quantize, triton_received


def by_triton(x: Tensor) -> bool:
    return TRITON and (x.is_cuda or INTERPRETED)


def attend(
    q: Tensor,
    parts: Sequence[stretches.Stretch],
    q_pos: Tensor,
    window: int | None,
    want_p: bool = False,
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """See `kernels.stretches.attend`."""
    return (triton_attend if by_triton(q) else stretches).attend(q, parts, q_pos, window, want_p)


def gather(k: Tensor, v: Tensor, pos: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.gather.gather`."""
    return (triton_gather if by_triton(k) else plain_gather).gather(k, v, pos, index)


def received(
    q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None, solid: bool = False
) -> Tensor:
    """See `kernels.received.received`."""
    if by_triton(q):
        return triton_received.received(q, q_pos, k, pos, window)
    return attention_received.received(q, q_pos, k, pos, window, solid)


def largest(q: Tensor, q_pos: Tensor, k: Tensor, pos: Tensor, window: int | None) -> Tensor:
    """See `kernels.received.largest`."""
    form = triton_received if by_triton(q) else attention_received
    return form.largest(q, q_pos, k, pos, window)


def sign_codes(x: Tensor, directions: Tensor) -> Tensor:
    """See `kernels.hashes.sign_codes`."""
    return (triton_hashes if by_triton(x) else hashes).sign_codes(x, directions)


def distances(codes: Tensor, probes: Tensor, bits: int) -> Tensor:
    """See `kernels.hashes.distances`."""
    return (triton_hashes if by_triton(codes) else hashes).distances(codes, probes, bits)


def quantize_tokens(
    x: Tensor, bits: int, group: int, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See `kernels.quantize.quantize_tokens`."""
    return (triton_quantize if by_triton(x) else quantize).quantize_tokens(x, bits, group, symmetric)


def quantize_channels(x: Tensor, bits: int, span: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `kernels.quantize.quantize_channels`."""
    return (triton_quantize if by_triton(x) else quantize).quantize_channels(x, bits, span)
