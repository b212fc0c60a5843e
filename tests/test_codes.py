"""Packed codes and rotated levels: packing, rounding bounds, and products against what the codes decode to."""

import math

import pytest
import torch
from torch.testing import assert_close

from kernels.codes import dot_tokens
from kernels.pack import WIDTHS, pack, row_words, unpack
from minikv.strategies.kivi import ChannelGrid
from minikv.strategies.rtn import TokenGrid
from minikv.strategies.turbo import LEVELS, RotatedLevels, rotation

SHAPES = [(64, 32), (64, 64), (80, 80), (80, 40), (80, 20), (96, 32), (128, 64), (128, 128)]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize(("d", "group"), SHAPES)
def test_unpacking_gives_back_what_was_packed(bits, d, group):
    codes = torch.randint(0, 2**bits, (2, 3, 5, d), generator=torch.Generator().manual_seed(0))
    words = pack(codes, bits, group)
    assert words.shape[-1] == row_words(d, bits, group)
    # Not a bit wasted where a group fills its words.
    assert words.shape[-1] * 32 == d * bits or group * bits % 32 or bits == 3
    assert torch.equal(unpack(words, bits, group), codes.to(torch.int32))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize(("d", "group"), SHAPES)
@pytest.mark.parametrize("n", [1, 31, 33])
def test_rounding_is_off_by_half_a_step_at_most(bits, symmetric, d, group, n):
    x = noise(1, 2, n, d) * 3 + 1
    codec = TokenGrid(bits, group, symmetric)
    parts = codec.encode(x, {})
    got = codec.decode(parts, {})
    step = parts["scale"].float().repeat_interleave(group, -1)
    half = 2**-11 * x.abs().amax()  # what float16 loses of scale and zero
    assert ((got - x).abs() <= step / 2 + half * 2 ** (bits if symmetric else 1)).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_least_and_greatest_are_met_and_constants_are_finite(bits):
    x = noise(1, 1, 6, 64)
    x[0, 0, 2] = 0.75  # a constant, exact in float16
    x[0, 0, 3] = 0
    got = TokenGrid(bits, 32).decode(TokenGrid(bits, 32).encode(x, {}), {})
    for most in (torch.amin, torch.amax):
        assert_close(
            most(got.unflatten(-1, (2, 32)), -1), most(x.unflatten(-1, (2, 32)), -1), atol=5e-3, rtol=2e-3
        )
    assert torch.equal(got[0, 0, 2:4], x[0, 0, 2:4])


def test_an_outlier_channel_spoils_the_others_per_token_but_not_per_channel():
    """Keys of Qwen2: channel 0 is far from zero; 2 bits, 64 tokens."""
    k = noise(1, 1, 64, 64)
    k[..., 0] += 100
    error = {}
    for name, codec in (("token", TokenGrid(2, 64)), ("channel", ChannelGrid(2))):
        error[name] = float((codec.decode(codec.encode(k, {}), {}) - k)[..., 1:].abs().mean())
    assert error["channel"] < 0.5 < error["token"]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("d", "group"), [(64, 32), (80, 80), (80, 40), (96, 32), (128, 64)])
def test_products_with_codes_are_products_with_what_they_decode_to(bits, d, group, monkeypatch):
    x, q, w = noise(2, 2, 96, d), noise(2, 2, 3, d, seed=1), noise(2, 2, 3, 96, seed=2).softmax(-1)
    codec = TokenGrid(bits, group)
    parts, spans = codec.encode(x, {}), ChannelGrid(bits).encode(x, {})
    decoded, over = codec.decode(parts, {}), ChannelGrid(bits).decode(spans, {})
    for compiling in (False, True):  # the compiler's form is plain tensor code too
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=compiling: value)
        assert_close(codec.dot(q, parts, {}), q @ decoded.mT, atol=3e-4, rtol=1e-4)
        assert_close(codec.mix(w, parts, {}), w @ decoded, atol=2e-5, rtol=1e-4)
        assert_close(ChannelGrid(bits).dot(q, spans, {}), q @ over.mT, atol=3e-4, rtol=1e-4)


def test_a_compiled_product_is_the_eager_one():
    """Through the real backend, three bits (two planes) with a last word that is partly empty."""
    x, q = noise(1, 2, 64, 40), noise(1, 2, 2, 40, seed=1)
    codec = TokenGrid(3, 20)
    parts = codec.encode(x, {})
    got = torch.compile(dot_tokens, fullgraph=True)(q, parts["words"], parts["scale"], parts["zero"], 3, 20)
    assert_close(got, q @ codec.decode(parts, {}).mT, atol=3e-4, rtol=1e-4)


# Rotated levels.


@pytest.mark.parametrize("bits", LEVELS)
def test_levels_are_the_means_of_their_cells_and_lose_what_is_published(bits):
    """Lloyd-Max of N(0, 1): each level is the conditional mean between the midpoints to its neighbours."""
    half = torch.tensor(LEVELS[bits], dtype=torch.float64)
    levels = torch.cat((-half.flip(0), half))
    edges = torch.cat((torch.tensor([-torch.inf]), (levels[1:] + levels[:-1]) / 2, torch.tensor([torch.inf])))

    def density(x):
        return (-(x**2) / 2).exp() / math.sqrt(2 * math.pi)

    def below(x):
        return (1 + torch.erf(x / math.sqrt(2))) / 2

    mass = below(edges[1:]) - below(edges[:-1])
    assert_close((density(edges[:-1]) - density(edges[1:])) / mass, levels, atol=2e-6, rtol=0)
    error = 1 - float((mass * levels**2).sum())
    assert error == pytest.approx({1: 0.363380, 2: 0.117482, 3: 0.034548, 4: 0.009501}[bits], abs=1e-5)


@pytest.mark.parametrize("d", [64, 80, 96, 128, 256])
def test_rotations_are_orthogonal_and_the_same_for_a_seed(d):
    for kind in ("haar", "hadamard") if d & (d - 1) == 0 else ("haar",):
        turn = rotation(kind, d, 3)
        assert_close(turn @ turn.mT, torch.eye(d), atol=1e-5, rtol=0)
        assert torch.equal(turn, rotation(kind, d, 3)) and not torch.equal(turn, rotation(kind, d, 4))


def turbo(bits: int, d: int = 128, **options) -> tuple[RotatedLevels, dict]:
    codec = RotatedLevels(bits, 0, **options)
    return codec, codec.constants(d, torch.device("cpu"))


@pytest.mark.parametrize("bits", LEVELS)
@pytest.mark.parametrize("d", [64, 80])
def test_products_with_levels_are_products_with_what_they_decode_to(bits, d, monkeypatch):
    codec, fixed = turbo(bits, d)
    q, w = noise(2, 2, 3, d, seed=1), noise(2, 2, 3, 40, seed=2).softmax(-1)
    parts = codec.encode(noise(2, 2, 40, d), fixed)
    decoded = codec.decode(parts, fixed)
    for compiling in (False, True):
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda value=compiling: value)
        assert_close(codec.dot(q, parts, fixed), q @ decoded.mT, atol=3e-4, rtol=1e-4)
        assert_close(codec.mix(w, parts, fixed), w @ decoded, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_rotated_levels_lose_the_share_of_the_table(bits):
    codec, fixed = turbo(bits)
    x = noise(1, 1, 2000, 128) * 5
    parts = codec.encode(x, fixed)
    got = codec.decode(parts, fixed)
    # MSE on the sphere at D = 128; keeping the norm instead of the least error costs a little at one bit.
    share = float(((got - x) ** 2).sum() / (x**2).sum())
    assert share == pytest.approx({1: 0.403, 2: 0.1189, 3: 0.0342, 4: 0.00917}[bits], rel=0.03)
    assert_close(got.norm(dim=-1), x.norm(dim=-1), rtol=1e-3, atol=0)
    double = codec.encode(2 * x, fixed)
    assert torch.equal(double["words"].view(torch.int32), parts["words"].view(torch.int32))
    again = codec.encode(got, fixed)
    assert torch.equal(again["words"].view(torch.int32), parts["words"].view(torch.int32))


def test_the_unbiased_scale_is_exact_along_the_vector_and_the_plain_one_shrinks():
    x = noise(1, 1, 2000, 128)
    along = {}
    for scale in ("unbiased", "plain"):
        codec, fixed = turbo(2, scale=scale)
        got = codec.decode(codec.encode(x, fixed), fixed)
        along[scale] = (got * x).sum(-1) / (x * x).sum(-1)
    assert_close(along["unbiased"], torch.ones(1, 1, 2000), atol=1e-3, rtol=0)
    assert float(along["plain"].mean()) == pytest.approx(1 - 0.1160, abs=0.002)


@pytest.mark.parametrize("x", ["one-hot", "constant", "two outliers", "zero"])
def test_hard_vectors_cost_no_more_than_random_ones(x):
    vector = {
        "one-hot": torch.eye(64)[5],
        "constant": torch.ones(64) + 0.1 * noise(64),
        "two outliers": noise(64) * torch.where(torch.arange(64) % 32 == 3, 20.0, 1.0),
        "zero": torch.zeros(64),
    }[x].expand(1, 1, 1, 64)
    losses = []
    for seed in range(40):
        codec = RotatedLevels(3, seed)
        fixed = codec.constants(64, torch.device("cpu"))
        got = codec.decode(codec.encode(vector, fixed), fixed)
        losses.append(float(((got - vector) ** 2).sum()))
    assert sum(losses) / 40 <= 1.2 * 0.0346 * float((vector**2).sum())
    assert all(map(math.isfinite, losses))


@pytest.mark.parametrize("sign", [False, True])
def test_queries_are_turned_once_and_outputs_turned_back_once(sign):
    codec, fixed = turbo(3, 80, sign=sign, centred=True)
    x, q, w = noise(2, 2, 40, 80) + 4, noise(2, 2, 3, 80, seed=1), noise(2, 2, 3, 40, seed=2).softmax(-1)
    fixed |= codec.fit(x, torch.ones(2, 2, 40, dtype=torch.bool), None)
    parts = codec.encode(x, fixed)
    decoded = codec.decode(parts, fixed)
    assert_close(codec.dot(q, parts, fixed), q @ decoded.mT, atol=1e-3, rtol=1e-4)
    assert_close(codec.mix(w, parts, fixed), w @ decoded, atol=1e-4, rtol=1e-4)


def test_taking_the_mean_off_rescues_keys_with_a_large_common_offset():
    """Ten standard deviations, as a key bias gives: the error of logits that softmax sees, with and without."""
    k, q = noise(1, 1, 500, 64) + 10 * noise(64, seed=3), noise(1, 1, 8, 64, seed=1)
    errors = []
    for centred in (True, False):
        codec, fixed = turbo(4, 64, centred=centred)
        if centred:
            fixed |= codec.fit(k, torch.ones(1, 1, 500, dtype=torch.bool), None)
        error = codec.dot(q, codec.encode(k, fixed), fixed) - q @ k.mT
        errors.append(float((error - error.mean(-1, keepdim=True)).std()))
    assert errors[0] < 0.15 * errors[1]


def test_the_sign_bit_is_unbiased_and_costs_variance():
    """The paper's inner-product form against all bits in the levels, 3 bits in all, over 60 rotations."""
    x, q = noise(1, 1, 200, 64), noise(1, 1, 1, 64, seed=1)
    x, q = x / x.norm(dim=-1, keepdim=True), q / q.norm()
    found = {}
    for sign in (True, False):
        errors = []
        for seed in range(60):
            codec = RotatedLevels(3, 3 * seed, scale="plain" if sign else "unbiased", sign=sign)
            fixed = codec.constants(64, torch.device("cpu"))
            errors.append(codec.dot(q, codec.encode(x, fixed), fixed) - q @ x.mT)
        errors = torch.stack(errors)
        found[sign] = 64 * float(errors.var(0).mean())
        slope = float((errors.mean(0) * (q @ x.mT)).sum() / ((q @ x.mT) ** 2).sum())
        assert abs(slope) < 0.02  # no shrinking along the query
    # (pi / 2 - 1) times the error of 2-bit levels against that of 3-bit levels.
    assert found[True] == pytest.approx(0.067, rel=0.2)
    assert found[False] == pytest.approx(0.0358, rel=0.2)
