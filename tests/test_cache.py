"""The cache against two truths: the model without a cache, and a full cache that hides what was dropped."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch.testing import assert_close

from kernels.attend import Plain, step_attention
from minikv import METHODS, CompressedKVCache, generate
from minikv.axes import HeadSplit
from tests.conftest import RAW, make_toy, small, small_or_none
from tests.oracle import MaskedDense

# Prompt, answer, a short turn, a turn of one token, a long turn: every way tokens can come.
PIECES = [20, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 2, 1, 1, 12, 1, 1, 1, 1, 1]


def tokens(rows: int, length: int = sum(PIECES)) -> torch.Tensor:
    return torch.randint(0, 320, (rows, length), generator=torch.Generator().manual_seed(7))


def feed(model, cache, ids, pieces=PIECES):
    """Logits of all tokens fed piece by piece."""
    starts = [sum(pieces[:i]) for i in range(len(pieces))]
    return torch.cat([model(ids[:, a : a + n], None, cache) for a, n in zip(starts, pieces, strict=True)], 1)


COMBINATIONS = [
    pytest.param(small(policy, every), id=f"{name}-every-{every}")
    for name, policy in RAW.items()
    for every in (None, 0, 1, 3)
    if small_or_none(policy, every) is not None
]


@pytest.mark.parametrize("policy", COMBINATIONS)
@pytest.mark.parametrize("windows", [(), (7, None)], ids=["full", "windowed"])
def test_a_budget_that_covers_the_context_changes_nothing(policy, windows):
    """Dropping nothing must cost nothing: prompt, steps, later turns, two rows."""
    model, ids = make_toy(windows=windows), tokens(2)
    # A pyramid's last layer gets a twentieth of the budget.
    cache = CompressedKVCache.for_model(model, policy, budget=1000, batch=2, room=4)
    assert_close(feed(model, cache, ids), model(ids), atol=1e-4, rtol=1e-4)
    assert cache.seen.tolist() == [sum(PIECES)] * 2


@pytest.mark.parametrize("policy", COMBINATIONS)
@pytest.mark.parametrize("windows", [(), (7, None)], ids=["full", "windowed"])
def test_after_dropping_logits_equal_a_full_cache_that_hides_the_dropped(policy, windows):
    model, ids = make_toy(windows=windows), tokens(2)
    cache = CompressedKVCache.for_model(model, policy, budget=12, batch=2, room=4)
    truth = MaskedDense(model, cache)
    start = 0
    before = policy.score.before and policy.every == 1
    for n in [1] * sum(PIECES) if before else PIECES:
        piece, pos = ids[:, start : start + n], cache.seen[:, None] + torch.arange(n)
        if before:  # what is dropped in a step is not seen in it any more
            got = model(piece, None, cache)
            want = model(piece, pos, truth)
        else:
            want = model(piece, pos, truth)
            got = model(piece, None, cache)
        assert_close(got, want, atol=1e-4, rtol=1e-4)
        start += n


def test_a_prompt_taken_token_by_token_inside_each_layer_equals_single_steps(toy):
    """HashEvict drops ahead of each token, also in a prompt."""
    policy, ids = small(METHODS["hashevict"], 1), tokens(2)
    at_once, single = (CompressedKVCache.for_model(toy, policy, budget=12, batch=2) for _ in range(2))
    got = feed(toy, at_once, ids, [30, 1, 7, 14])
    want = feed(toy, single, ids, [1] * 52)
    assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert at_once.kept(0) == single.kept(0) and at_once.kept(1) == single.kept(1)


@pytest.mark.parametrize("policy", COMBINATIONS)
def test_rows_of_unequal_length_are_what_each_would_be_alone(policy, toy):
    """Prompts of 30 and 9 tokens, then steps, then a turn for one row while the other rests."""
    ids = tokens(2)
    both = CompressedKVCache.for_model(toy, policy, budget=12, batch=2, room=4)
    alone = [CompressedKVCache.for_model(toy, policy, budget=12, room=4) for _ in range(2)]
    seen = [0, 0]
    for lengths in [(30, 9), (1, 1), (1, 1), (5, 0), (1, 0), (1, 0), (1, 1), (3, 6), (1, 1), (0, 2)]:
        width = max(lengths)
        pos = torch.full((2, width), -1)
        piece = torch.zeros(2, width, dtype=torch.int64)
        for row, n in enumerate(lengths):
            pos[row, :n] = torch.arange(seen[row], seen[row] + n)
            piece[row, :n] = ids[row, seen[row] : seen[row] + n]
        got = toy(piece, pos, both)
        for row, n in enumerate(lengths):
            if n:
                # The same way in: a chunk of which only one token is real is still a chunk.
                padded = pos[row : row + 1]
                want = toy(piece[row : row + 1], padded, alone[row])
                assert_close(got[row, :n], want[0, :n], atol=1e-4, rtol=1e-4)
            seen[row] += n
            for layer in range(2):
                assert both.kept(layer)[row] == alone[row].kept(layer)[0]
    assert both.seen.tolist() == seen


def test_left_padding_is_read_by_position_too(toy):
    ids = tokens(1, 10)
    pos = torch.tensor([[-1, -1, -1, *range(10)]])
    cache = CompressedKVCache.for_model(toy, "full", context=64)
    got = toy(torch.cat((torch.zeros(1, 3, dtype=torch.int64), ids), 1), pos, cache)
    assert_close(got[:, 3:], toy(ids), atol=1e-4, rtol=1e-4)
    assert got.isfinite().all()


def test_a_resting_row_stays_as_it_is(toy):
    cache = CompressedKVCache.for_model(
        toy, replace(small(METHODS["snapkv"], None), recent=2), budget=40, batch=2, room=4
    )
    feed(toy, cache, tokens(2), [20, 1, 1])
    before = cache.kept(0)[1]
    ids, pos = tokens(2, 30), torch.full((2, 30), -1)
    pos[0] = torch.arange(22, 52)
    toy(ids, pos, cache)
    for p in range(52, 60):
        toy(ids[:, :1], torch.tensor([[p], [-1]]), cache)
    assert cache.kept(0)[1] == before
    assert cache.seen.tolist() == [60, 22]


@pytest.mark.parametrize("policy", COMBINATIONS)
def test_kept_positions_are_sorted_guarded_and_exactly_the_budget(policy, toy):
    cache = CompressedKVCache.for_model(toy, policy, budget=12, room=4, context=64)
    ids, seen = tokens(1), 0
    for n in PIECES:
        toy(ids[:, seen : seen + n], None, cache)
        seen += n
        fresh = int((cache.rows.fresh_pos >= 0).sum())
        for layer, budget in enumerate(cache.budgets):
            heads = cache.kept(layer)[0]
            recent = policy.recent_tokens(budget)
            guards = {*range(min(policy.sinks, seen)), *range(max(seen - recent, 0), seen)}
            for head in heads:
                assert head == sorted(set(head)) and 0 <= head[0] and head[-1] < seen
                assert guards <= set(head)
            total = sum(len(head) for head in heads)
            most = min(seen, budget + fresh)
            if "fastgen" in str(policy).lower():  # its heads may ask for less
                assert total <= 2 * most
            else:
                assert total == 2 * most


@pytest.mark.parametrize("policy", COMBINATIONS)
def test_a_reset_cache_is_like_a_new_one(policy, toy):
    used = CompressedKVCache.for_model(toy, policy, budget=12, room=4)
    feed(toy, used, tokens(1))
    used.reset()
    fresh = CompressedKVCache.for_model(toy, policy, budget=12, room=4)
    assert used.nbytes == fresh.nbytes
    for (name, a), (_, b) in zip(used.named_buffers(), fresh.named_buffers(), strict=True):
        assert torch.equal(a, b), name
    ids = tokens(1)[:, 3:]
    pieces = [15, 1, 1, 1, 1, 1, 4]
    assert torch.equal(feed(toy, used, ids, pieces), feed(toy, fresh, ids, pieces))


def test_memory_is_the_budget_and_the_room_and_little_else(toy):
    """Keys and values of budget + room slots, one int32 position per kept slot, a ring of queries."""
    cache = CompressedKVCache.for_model(toy, "streaming", budget=64, room=32)
    slots = 2 * 2 * (64 + 1) * 2 * 16 * 4  # layers, heads, slots, k and v, head size, bytes
    assert slots < cache.nbytes < 1.06 * slots
    before = cache.nbytes
    feed(toy, cache, tokens(1, 200), [200])
    assert cache.nbytes == before
    held = sum(b.untyped_storage().nbytes() for b in cache.buffers())
    assert held == cache.nbytes


def test_no_tensor_of_the_prompts_length_outlives_the_prompt(toy):
    """A view into the uncompressed keys would keep all of them alive."""
    cache = CompressedKVCache.for_model(toy, "snapkv", budget=48)
    feed(toy, cache, tokens(1, 300), [300])
    for name, buffer in cache.named_buffers():
        assert 300 not in buffer.shape, name
        assert buffer.untyped_storage().nbytes() == buffer.numel() * buffer.element_size(), name


def test_without_compression_in_decode_the_room_grows_and_shrinks_back(toy):
    cache = CompressedKVCache.for_model(toy, "snapkv", budget=40, room=4)
    cache = CompressedKVCache.for_model(toy, replace(cache.policy, every=0), budget=40, room=4)
    small = cache.nbytes
    feed(toy, cache, tokens(1, 90), [60, *[1] * 30])
    assert cache.nbytes > small
    assert all(len(head) == 70 for head in cache.kept(0)[0])
    cache.reset()
    assert cache.nbytes == small


def test_a_query_that_sees_nothing_gives_zeros_not_nan(toy):
    cache = CompressedKVCache.for_model(toy, "snapkv", budget=40, batch=2)
    pos = torch.tensor([[0, 1, 2], [-1, -1, -1]])
    assert toy(tokens(2, 3), pos, cache).isfinite().all()
    assert toy(tokens(2, 1), torch.tensor([[3], [-1]]), cache).isfinite().all()
    assert cache.kept(0)[1] == [[], []]


def test_half_precision_scores_do_not_overflow(toy):
    """Queries and keys of magnitude 60 have a dot product beyond float16's range."""
    from minikv.seen import Seen
    from minikv.strategies.snapkv import SnapKV

    generator = torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, 50, 128, generator=generator).sign().mul(60)
    q = k[:, :, None, -4:].clone()
    pos = torch.arange(50)[None, None]
    for dtype in (torch.float16, torch.float32):
        seen = Seen(q.to(dtype), pos[:, 0, -4:], [k.to(dtype)], [k.to(dtype)], pos, torch.tensor([49]))
        scores = SnapKV(window=4, kernel=1).score(seen)
        assert not scores.isnan().any()
    assert scores.argmax() >= 46


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(policy="snapkv", budget=8), ["8", "36"]),
        (dict(policy="snapkv", budget=0), ["budget", "0"]),
        (dict(policy="full", context=1000), ["1000", "512"]),
        (dict(policy="full", room=0), ["room", "0"]),
        (dict(policy="full", batch=0), ["batch", "0"]),
    ],
)
def test_numbers_that_cannot_work_are_refused_with_the_numbers(arguments, words, toy):
    with pytest.raises(ValueError) as error:
        CompressedKVCache.for_model(toy, **arguments)
    assert all(word in str(error.value) for word in words)


def test_misuse_is_named(toy):
    cache = CompressedKVCache.for_model(toy, "full", context=16)
    toy(tokens(1, 10), None, cache)
    with pytest.raises(ValueError, match="17 tokens do not fit into a context of 16"):
        toy(tokens(1, 7), None, cache)
    with pytest.raises(ValueError, match="positions go back"):
        toy(tokens(1, 2), torch.tensor([[3, 4]]), cache)
    with pytest.raises(ValueError, match="positions go back"):
        toy(tokens(1, 3), torch.tensor([[10, 12, 11]]), cache)
    with pytest.raises(ValueError, match="at least one token"):
        toy(tokens(1, 0), None, cache)
    with pytest.raises(ValueError, match="1 rows, the tokens have 2"):
        toy(tokens(2, 2), None, cache)
    assert cache.seen.tolist() == [10]


def test_no_layer_is_larger_than_the_context(toy):
    cache = CompressedKVCache.for_model(toy, "snapkv", budget=10**8)
    assert max(cache.budgets) == 512


def test_a_saved_cache_goes_on_like_the_one_it_was(toy, tmp_path):
    """Every method, in the middle of things; a full cache file is whole or not there."""
    ids = tokens(1)
    for name, method in METHODS.items():
        policy = small(method, method.every)
        budget = 12 if policy.drops else 64
        cache = CompressedKVCache.for_model(toy, policy, budget=budget, room=4, context=64)
        feed(toy, cache, ids, [20, 1, 1])
        cache.save(tmp_path / "cache.safetensors", note={"name": name})
        again = CompressedKVCache.load(tmp_path / "cache.safetensors", toy)
        assert (again.policy, again.note, again.nbytes) == (policy, {"name": name}, cache.nbytes)
        rest = ids[:, 22:]
        assert torch.equal(feed(toy, again, rest, [1, 5, 1]), feed(toy, cache, rest, [1, 5, 1]))
    assert [p.name for p in tmp_path.iterdir()] == ["cache.safetensors"]


def test_a_strategy_without_a_name_cannot_be_saved(toy, tmp_path):
    @dataclass(frozen=True)
    class Nameless(HeadSplit):
        """Evenly."""

    cache = CompressedKVCache.for_model(toy, replace(METHODS["l2"], heads=Nameless()), budget=40)
    with pytest.raises(ValueError, match="Nameless.* has no name to be found by"):
        cache.save(tmp_path / "cache.safetensors")
    assert not any(tmp_path.iterdir())


def test_a_cache_of_another_model_or_no_cache_is_refused(toy, windowed_toy, tmp_path):
    path = tmp_path / "cache.safetensors"
    CompressedKVCache.for_model(toy, "snapkv", budget=40).save(path)
    with pytest.raises(ValueError, match="another model"):
        CompressedKVCache.load(path, windowed_toy)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ValueError, match="damaged or no saved cache"):
        CompressedKVCache.load(path, toy)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        CompressedKVCache.load(tmp_path / "nowhere", toy)


@pytest.mark.parametrize("name", METHODS)
def test_a_prompt_in_chunks_stays_within_budget_and_chunk(name, toy):
    policy = small(METHODS[name], METHODS[name].every)
    budget = 24 if policy.drops else 512
    cache = CompressedKVCache.for_model(toy, policy, budget=budget, room=4, context=512)
    size = cache.nbytes
    out = generate(toy, tokens(1, 300)[0], cache, max_new_tokens=6, ignore_eos=True, chunk=32)
    assert len(out.ids) == 6
    assert cache.nbytes == size
    if policy.drops:
        assert max(len(h) for h in cache.kept(0)[0]) <= 2 * (24 + 4)


def test_compressing_after_very_many_steps_is_compressing_after_prompts_only(toy):
    ids = tokens(1)
    policy = small(METHODS["snapkv"], 0)
    prompts, rarely = (
        CompressedKVCache.for_model(toy, replace(policy, every=every), budget=12, room=4)
        for every in (0, 1000)
    )
    assert torch.equal(feed(toy, prompts, ids), feed(toy, rarely, ids))
    assert prompts.kept(1) == rarely.kept(1)


def test_the_order_of_slots_does_not_matter_to_attention():
    generator = torch.Generator().manual_seed(0)
    k, v = (torch.randn(1, 2, 20, 16, generator=generator) for _ in range(2))
    q, pos = torch.randn(1, 2, 3, 16, generator=generator), torch.arange(20).expand(1, 2, 20)
    order = torch.randperm(20, generator=generator)
    straight, _ = step_attention(q, [Plain(k, v, pos)], torch.tensor([[19]]), 12)
    mixed, _ = step_attention(
        q, [Plain(k[:, :, order], v[:, :, order], pos[:, :, order])], torch.tensor([[19]]), 12
    )
    assert_close(straight, mixed, atol=1e-6, rtol=1e-5)
