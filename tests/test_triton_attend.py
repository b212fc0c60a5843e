"""Triton attention of one token: equal to its twin, part of a compiled graph, machine code without spills."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from kernels import triton_attend
from kernels.attend import Plain, pool_attention, step_attention
from kernels.stretches import Stretch, attend, raw
from tests.ahead import ARCHS, check, in_graph, recorded, run_interpreted
from tests.interpreted_attend import HEADS, NOW, normal, of_heads, of_pool, positions

pytestmark = pytest.mark.gpu_kernels


def test_every_kernel_equals_its_twin_in_the_interpreter():
    run_interpreted("tests/interpreted_attend.py")


# The twin itself.


@pytest.mark.parametrize("window", [None, 9])
def test_the_twin_is_attention_over_slots_and_over_a_pool(window):
    q = normal(2, HEADS, 3, 64)
    parts = [of_heads("raw", "raw", n, 64, seed=n, batch=2) for n in (20, 5)]
    y, p = step_attention(q, [Plain(s.k.data, s.v.data, s.pos) for s in parts], NOW, window)
    found = attend(q, parts, NOW, window, True)
    assert_close((found[0], found[2]), (y, p))

    pool, fresh = of_pool("raw", "raw", [[0, 0, 1], [1, 1, 1]], 64), parts[1]
    blocks = Plain(*(x.unflatten(1, (3, -1)) for x in (pool.k.data, pool.v.data, pool.pos)))
    others = [Plain(fresh.k.data, fresh.v.data, fresh.pos)]
    y, (*p, p_pool) = pool_attention(q, blocks, pool.owner, others, NOW, window)
    found = attend(q, [pool, fresh], NOW, window, True)
    assert_close((found[0], *found[2]), (y, p_pool, *p))


def test_keys_stored_rotated_and_less_an_offset_attend_as_they_were():
    q, k, v, mean = (normal(1, HEADS, n, 64, seed=n) for n in (3, 20, 21, 1))
    v, fresh, pos = v[:, :, :20], of_heads("raw", "raw", 5, 64, seed=9), positions(1, HEADS, 20)
    turn = nn.init.orthogonal_(torch.empty(64, 64), generator=torch.Generator().manual_seed(0))
    kept = Stretch(
        raw((k - mean) @ turn), raw(v @ turn), pos, q=q @ turn, bias=(q * mean).sum(-1), turned=True
    )
    wanted = attend(q, [Stretch(raw(k), raw(v), pos), fresh], NOW[:1], None, True)
    y, turned, p = attend(q, [kept, fresh], NOW[:1], None, True)
    assert_close((y + turned @ turn.mT, p), (wanted[0], wanted[2]), atol=1e-5, rtol=1e-5)


# Compiled for GPUs.

Call = Callable[[], object]
# Every way of storing, and among them 8, 4, 3 and 2 bits.
STORES = [
    ("raw", "raw"), ("symmetric8", "token4"), ("token3", "token2"), ("channel4", "token4"), ("level4", "level3"),
]  # fmt: skip
OWNER = [[0] * 20 + [1] * 12]


def call(k: str, v: str, d: int, dtype: torch.dtype, pool: bool, want_p: bool) -> Call:
    """Attention over 32 blocks of a pool, or 1,024 slots of each head, before fresh tokens."""
    kept = of_pool(k, v, OWNER, d, 32, dtype) if pool else of_heads(k, v, 1024, d, dtype)
    parts = [kept, of_heads("raw", "raw", 64, d, dtype)]
    q = normal(1, HEADS, 4, d, dtype=dtype)
    return lambda: triton_attend.attend(q, parts, NOW[:1], None, want_p)


# Every store and head size on every architecture in 16 bits; in float32 what is exact there.
CODE = [(k, v, d, torch.bfloat16, ARCHS) for k, v in STORES for d in (64, 128, 256)]
CODE += [(k, v, 128, torch.float32, (80,)) for k, v in STORES[:1]]


@pytest.mark.parametrize(("k", "v", "d", "dtype", "archs"), CODE)
def test_machine_code_spills_nothing_and_fits(k, v, d, dtype, archs, monkeypatch):
    pool, want_p = k in ("raw", "channel4"), k in ("raw", "token3")
    launches = recorded(monkeypatch, triton_attend, call(k, v, d, dtype, pool, want_p))
    check(launches[:1] + launches[2:], f"{k} {v} D={d} {dtype}", archs)


@pytest.mark.parametrize("pool", [False, True])
def test_a_compiled_graph_holds_the_kernels_themselves(pool):
    """No graph break; a launch for each stretch and one that merges, and they write nothing but what is theirs."""
    launches = in_graph(call("token4", "token4", 64, torch.bfloat16, pool, True))
    assert len(launches) == 3
    written = {name for launch in launches for name in launch.kwargs["tensors_to_clone"]}
    assert written == {"tops", "masses", "sums", "logits", "y", "p"}
