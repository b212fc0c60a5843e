"""Attention of one token in Triton's interpreter against its twin; tests/test_triton_attend.py runs this file.

The interpreter must be chosen before Triton is imported, hence a process of its own. It multiplies bfloat16 as if
it were integers, so float16 stands for both.
"""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from kernels import triton_attend
from kernels.pack import row_words
from kernels.stretches import Side, Stretch, attend, channel_grid, level_table, raw, token_grid

HEADS, SPAN, BLOCK = 2, 32, 16
NOW = torch.tensor([[50], [23]])  # positions of the tokens that attend, in two rows

# How keys and values are stored: grids per token, about 0, per channel; levels; a number is bits.
PAIRS = [
    ("raw", "raw"), ("token8", "token4"), ("token4", "token2"), ("token3", "token8"), ("token2", "token3"),
    ("symmetric4", "symmetric8"), ("symmetric3", "symmetric2"), ("channel2", "token2"), ("channel4", "token4"),
    ("channel3", "token3"), ("level4", "level3"), ("level1", "level2"), ("raw", "token4"), ("token4", "raw"),
]  # fmt: skip


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def stored(kind: str, lead: tuple[int, ...], n: int, d: int, dtype: torch.dtype, seed: int) -> Side:
    """n random slots, cut out of a longer buffer; slots of anything packed are neighbours in memory."""
    longer = n + SPAN

    def numbers(width: int, size: float, seed: int) -> Tensor:
        return (normal(*lead, width, longer, seed=seed) * size).half().mT[..., :n, :]

    def words(bits: int, group: int) -> Tensor:
        shape, generator = (*lead, row_words(d, bits, group), longer), torch.Generator().manual_seed(seed)
        bits32 = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32, generator=generator)
        return bits32.view(torch.float32).mT[..., :n, :]

    if kind == "raw":
        return raw(normal(*lead, longer, d, seed=seed, dtype=dtype)[..., :n, :])
    name, bits = kind[:-1], int(kind[-1])
    group = 32 if d % 32 == 0 else d
    if name == "level":
        return level_table(words(bits, d), numbers(1, 0.25, seed), normal(2**bits, seed=seed), bits, d)
    if name == "channel":
        step, zero = (normal(*lead, longer // SPAN, d, seed=seed + i).half() for i in (1, 2))
        return channel_grid(words(bits, d), step[..., : n // SPAN, :], zero[..., : n // SPAN, :], bits, SPAN)
    step = numbers(d // group, 2.0**-bits, seed + 1)
    zero = None if name == "symmetric" else numbers(d // group, 1, seed + 2)
    return token_grid(words(bits, group), step, zero, bits, group)


def positions(*shape: int, seed: int = 0) -> Tensor:
    """Some empty, some later than the token that attends."""
    return torch.randint(-1, 60, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def of_heads(
    k: str, v: str, n: int, d: int, dtype: torch.dtype = torch.float32, seed: int = 0,
    batch: int = 1, heads: int = HEADS,
) -> Stretch:  # fmt: skip
    lead = (batch, heads)
    sides = [stored(kind, lead, n, d, dtype, seed + 10 * i) for i, kind in enumerate((k, v), 1)]
    return Stretch(*sides, positions(*lead, n, seed=seed))


def of_pool(
    k: str, v: str, owner: list[list[int]], d: int, block: int = BLOCK, dtype: torch.dtype = torch.float32
) -> Stretch:
    batch, n = len(owner), len(owner[0]) * block
    sides = [stored(kind, (batch,), n, d, dtype, 10 * i) for i, kind in enumerate((k, v), 1)]
    return Stretch(*sides, positions(batch, n), torch.tensor(owner))


def agree(
    q: Tensor, parts: list[Stretch], window: int | None = None, close: float = 1e-5
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    now = NOW[: len(q)]
    wanted, found = (f(q, parts, now, window, True) for f in (attend, triton_attend.attend))
    assert_close(found, wanted, atol=close, rtol=close)
    return found


@pytest.mark.parametrize(("k", "v"), PAIRS)
def test_every_store_with_fresh_tokens_behind_it(k, v):
    n = 64 if "channel" in k else 37
    agree(normal(1, HEADS, 3, 64), [of_heads(k, v, n, 64), of_heads("raw", "raw", 5, 64, seed=9)], 30)


@pytest.mark.parametrize(
    ("d", "k", "v"),
    [(80, "token3", "token4"), (80, "channel4", "level3"), (96, "raw", "token8"), (256, "level3", "token2")],
)
def test_head_sizes_of_all_kinds(d, k, v):
    agree(normal(1, HEADS, 2, d), [of_heads(k, v, 32, d)])


@pytest.mark.parametrize("group", [1, 7, 9])
@pytest.mark.parametrize("window", [None, 9])
def test_any_number_of_query_heads_and_a_window(group, window):
    agree(normal(1, HEADS, group, 64), [of_heads("raw", "raw", 70, 64)], window)


@pytest.mark.parametrize(
    ("k", "v", "block", "window"),
    [("raw", "raw", 16, 9), ("token8", "token4", 16, None), ("channel4", "level3", 32, None)],
)
def test_a_pool_whose_heads_own_different_numbers_of_blocks(k, v, block, window):
    """Several heads within the slots of one program, one head over several programs, and one without a block."""
    owner = [[0, 0, 1, 3, 3, 3], [2, 2, 2, 2, 2, 3]]
    parts = [of_pool(k, v, owner, 64, block), of_heads("raw", "raw", 3, 64, seed=5, batch=2, heads=4)]
    agree(normal(2, 4, 2, 64), parts, window)


def test_two_pools_and_an_exact_tier():
    owners = [[0, 0, 0, 1, 1], [1, 1, 0, 0, 0]], [[0, 1, 1], [1, 1, 1]]
    parts = [of_pool("raw", "raw", owners[0], 64), of_pool("token2", "token2", owners[1], 64)]
    agree(normal(2, HEADS, 3, 64), [of_heads("raw", "raw", 4, 64, batch=2), *parts])


@pytest.mark.parametrize("pool", [False, True])
def test_programs_of_several_tiles_and_heads_of_many_partial_sums(pool, monkeypatch):
    monkeypatch.setattr(
        triton_attend, "PROGRAMS", 4 if pool else 100
    )  # sizes beyond which a program gets more
    q = normal(1, HEADS, 2, 256)
    if pool:
        agree(q, [of_pool("raw", "token4", [[0] * 9 + [1] * 12], 256)])
    else:
        agree(q, [of_heads("raw", "token4", 280, 256)])


def test_own_queries_a_bias_and_values_kept_apart():
    """Stored rotated and less an offset, for the caller to rotate back."""
    q, other = normal(1, HEADS, 3, 64), normal(1, HEADS, 3, 64, seed=1)
    level = of_heads("level3", "level4", 20, 64)._replace(
        q=other, bias=normal(1, HEADS, 3, seed=2), turned=True
    )
    _, turned, _ = agree(q, [level, of_heads("raw", "raw", 9, 64, seed=3)])
    assert turned.any()


def test_probabilities_are_given_only_if_asked():
    q, part = normal(1, HEADS, 3, 64), of_heads("raw", "raw", 20, 64)
    y, turned, p = triton_attend.attend(q, [part], NOW[:1], None)
    assert_close(y, triton_attend.attend(q, [part], NOW[:1], None, True)[0], atol=0, rtol=0)
    assert turned is None and p == []


def test_rows_at_rest_and_stretches_without_slots_give_zeros():
    q, empty = normal(2, HEADS, 3, 64), of_heads("raw", "raw", 0, 64, batch=2)
    parts = [empty, of_heads("token4", "token4", 20, 64, batch=2)]
    y, _, p = triton_attend.attend(q, parts, torch.tensor([[50], [-1]]), None, True)
    assert y[0].any() and not y[1].any() and not p[1][1].any()
    assert p[0].shape == (2, HEADS, 3, 0)
    assert not triton_attend.attend(q, [empty], NOW, None)[0].any()


def test_what_is_not_seen_may_hold_anything():
    part = of_heads("raw", "raw", 20, 64)
    hidden = (part.pos < 0)[..., None]
    k, v = (raw(side.data.masked_fill(hidden, float("nan"))) for side in (part.k, part.v))
    q = normal(1, HEADS, 3, 64)
    found = triton_attend.attend(q, [part._replace(k=k, v=v)], NOW[:1], None)[0]
    assert_close(found, triton_attend.attend(q, [part], NOW[:1], None)[0], atol=0, rtol=0)


def test_positions_shared_by_heads_and_sixteen_bits():
    part = of_heads("raw", "raw", 20, 64, torch.float16)
    part = part._replace(pos=part.pos[:, :1].long().expand(-1, HEADS, -1))
    agree(normal(1, HEADS, 4, 64, dtype=torch.float16), [part], close=2e-3)


def test_sizes_the_kernel_has_no_code_for_are_refused():
    q, part = normal(1, HEADS, 3, 64), of_heads("raw", "raw", 3, 64)
    with pytest.raises(ValueError, match="4 stretches"):
        triton_attend.attend(q, [part] * 4, NOW[:1], None)
    with pytest.raises(ValueError, match="block of 24 slots"):
        triton_attend.attend(q, [of_pool("raw", "raw", [[0, 1]], 64, 24)], NOW[:1], None)
    grid = stored("token4", (1, HEADS), 3, 64, torch.float32, 0)
    with pytest.raises(ValueError, match="strides"):
        triton_attend.attend(q, [part._replace(k=grid._replace(zero=grid.zero.contiguous()))], NOW[:1], None)
