"""Triton kernels against their plain twins, in Triton's interpreter; tests/test_triton_tools.py runs this file.

The interpreter must be chosen before Triton is imported, hence a process of its own. It multiplies bfloat16 as if
it were integers, so float16 stands for both.
"""

import pytest
import torch
from torch import Tensor

from kernels import hashes, quantize, received, triton_gather, triton_hashes, triton_quantize, triton_received
from minikv.pool import Tokens, places
from scripts import gpu_kernels

BITS = (1, 2, 3, 4, 8)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(found: tuple[Tensor | None, ...], wanted: tuple[Tensor | None, ...]) -> None:
    """Bit for bit: words are no numbers."""
    for ours, theirs in zip(found, wanted, strict=True):
        if theirs is None:
            assert ours is None
            continue
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        same = torch.int32 if theirs.dtype == torch.float32 else theirs.dtype
        assert torch.equal(ours.view(same), theirs.view(same))


# batch, KV heads, group, queries, keys, head size, window, dtype
ATTENTION = [
    (1, 2, 3, 40, 70, 16, None, torch.float32),
    (2, 1, 7, 37, 103, 64, 9, torch.float16),
    (1, 2, 1, 65, 65, 80, 30, torch.float32),
    (1, 3, 2, 1, 4, 128, None, torch.float16),
]


@pytest.mark.parametrize(
    ("batch", "heads", "group", "length", "n", "d", "window", "dtype"), ATTENTION, ids=lambda x: str(x)
)
def test_received_and_largest(batch, heads, group, length, n, d, window, dtype):
    """Queries in the model's own layout; past slots empty here and there; the last row ends in two of padding."""
    q = normal(batch, length, heads * group, d, dtype=dtype).transpose(1, 2).unflatten(1, (heads, group))
    k = normal(batch, heads, n, d, dtype=dtype, seed=1)
    pos = torch.arange(n, dtype=torch.int32).repeat(batch, heads, 1)
    pos[:, 0, 1 : n - length : 5] = -1
    q_pos = torch.arange(n - length, n).repeat(batch, 1)
    if length > 2:
        q_pos[-1, -2:] = pos[-1, :, -2:] = -1
    arguments = (q, q_pos, k, pos, window)
    for name in ("received", "largest"):
        ours, theirs = (getattr(module, name)(*arguments) for module in (triton_received, received))
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-6)


def test_a_slot_without_token_receives_nothing_and_one_query_gives_one_in_all():
    pos = torch.tensor([[[0, -1, 2, 3]]], dtype=torch.int32)
    q, k = normal(1, 1, 1, 1, 16), normal(1, 1, 4, 16)
    found = triton_received.received(q, torch.tensor([[3]]), k, pos, None)[0, 0]
    assert found[1] == 0
    assert found.sum().item() == pytest.approx(1, abs=1e-6)


def numbers(*shape: int, dtype: torch.dtype) -> Tensor:
    """With a constant vector, a constant channel, and one range too wide for the scale's float16."""
    x = normal(*shape, dtype=dtype)
    x[0, 1] = x[1, :, 1] = 3
    if dtype == torch.float32:
        x[1, 2] *= 1e6
    return x


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", BITS[1:])
def test_codes_of_tokens_are_the_same_bits(bits, symmetric):
    sizes = [
        (16, 16, torch.float16),
        (32, 64, torch.float32),
        (80, 80, torch.bfloat16),
        (24, 48, torch.float32),
    ]
    for group, d, dtype in sizes:
        x = numbers(2, 5, d, dtype=dtype)
        ours, theirs = (m.quantize_tokens(x, bits, group, symmetric) for m in (triton_quantize, quantize))
        equal(ours, theirs)


@pytest.mark.parametrize("bits", BITS)
def test_codes_of_channels_are_the_same_bits(bits):
    for span, d, dtype in [(32, 64, torch.float32), (24, 80, torch.bfloat16), (5, 16, torch.float16)]:
        x = numbers(2, 3 * span, d, dtype=dtype)
        ours, theirs = (m.quantize_channels(x, bits, span) for m in (triton_quantize, quantize))
        equal(ours, theirs)


def test_half_a_step_rounds_to_the_even_code():
    """Steps of 2 from 0 to 30: every odd number lies between two codes."""
    x = torch.arange(32.0).clamp(max=30)[None]
    words, scale, zero = triton_quantize.quantize_tokens(x, 4, 32, False)
    assert (scale.item(), zero.item()) == (2, 0)
    codes = [int(words.view(torch.int32)[0, c % 4]) >> (c // 4 * 4) & 15 for c in range(32)]
    assert codes == [round(c / 2) for c in range(31)] + [15]


@pytest.mark.parametrize("bits", [1, 16, 17, 33, 64])
def test_sign_codes_and_their_distances(bits):
    directions = hashes.gaussian(80, bits, seed=3, device=torch.device("cpu"))
    x = normal(2, 3, 45, 80)
    codes, probes = (
        hashes.sign_codes(x, directions),
        hashes.sign_codes(normal(2, 3, 4, 80, seed=1), directions),
    )
    assert torch.equal(triton_hashes.sign_codes(x, directions), codes)
    for dtype in (torch.int16, torch.int32, torch.int64):
        if bits <= torch.iinfo(dtype).bits:
            narrow = codes.to(dtype)
            assert torch.equal(
                triton_hashes.distances(narrow, probes, bits), hashes.distances(narrow, probes, bits)
            )


def test_distances_count_the_bits_that_differ():
    codes = torch.tensor([[[0, -1, 2**62, 5]]])
    found = triton_hashes.distances(codes, torch.tensor([[[0, 1]]]), 64)
    assert found.tolist() == [[[0 + 1, 64 + 63, 1 + 2, 2 + 1]]]


@pytest.mark.parametrize(("slots", "dtype"), [(33, torch.float32), (60, torch.bfloat16)])
def test_survivors_move_together_and_in_order(slots, dtype):
    """Keys as the model lays them out, one position for all heads, and more slots than survivors."""
    k, v = normal(2, 50, 3, 80, dtype=dtype).transpose(1, 2), normal(2, 3, 50, 80, dtype=dtype, seed=1)
    pos = torch.arange(50, dtype=torch.int32).expand(2, 3, 50)
    survives = torch.rand(2, 3, 50, generator=torch.Generator().manual_seed(2)) < 0.5
    index, filled = places(survives, slots)
    wanted = Tokens(k, v, pos).gather(index)
    found = triton_gather.gather(k, v, pos, index)
    for ours, theirs in zip(found, (wanted.k, wanted.v, wanted.pos), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    kept = [p for p, stays in zip(found[2][0, 1].tolist(), filled[0, 1].tolist(), strict=True) if stays]
    assert kept == torch.arange(50)[survives[0, 1]].tolist()[:slots]


def test_the_gpu_check_finds_kernels_and_twins_equal():
    """A few of its checks, as it would run them; attention has tests of its own."""
    checks = gpu_kernels.all_checks(torch.device("cpu"), torch.float16, 64)
    assert len({check.name for check in checks}) == len(checks)
    wanted = (
        "attend raw raw D=64 G=1",
        "received D=64 G=1 window=None",
        "codes of channels, 4 bits",
        "gather",
    )
    for check in checks:
        if check.name in wanted:
            assert gpu_kernels.run(check)["ok"], check.name
