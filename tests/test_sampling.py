import pytest
import torch

from minikv.sampling import check_sampling, sample

LOGITS = torch.tensor([[1.0, 60000.0, 3.0]])


def draws(logits, n=4000, **options):
    generator = torch.Generator().manual_seed(0)
    return sample(logits.expand(n, -1), generator=generator, **options)


@pytest.mark.parametrize("temperature", [0, 1e-8, 1e-4, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_small_temperatures_are_finite_and_greedy(temperature, dtype):
    assert sample(LOGITS.to(dtype), temperature).tolist() == [1]


def test_greedy_ties_go_to_the_lowest_id():
    assert sample(torch.tensor([[0.0, 5.0, 5.0, 5.0], [2.0, 2.0, 1.0, 2.0]])).tolist() == [1, 0]


@pytest.mark.parametrize("options", [dict(top_p=0.0), dict(top_k=1)])
def test_the_narrowest_choice_is_greedy(options):
    assert draws(torch.tensor([[0.0, 0.1, 0.05]]), temperature=1.0, **options).unique().tolist() == [1]


def test_samples_follow_the_distribution():
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    share = draws(p.log()[None], n=20000, temperature=1.0).bincount(minlength=4) / 20000
    assert (share - p).abs().max() < 0.015
    sharp = p**2 / (p**2).sum()
    share = draws(p.log()[None], n=20000, temperature=0.5).bincount(minlength=4) / 20000
    assert (share - sharp).abs().max() < 0.015


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, [0]), (0.51, [0, 1]), (0.8, [0, 1]), (0.9, [0, 1, 2])])
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    """The mass before a token decides: at exactly 0.5 the first token is enough."""
    p = torch.tensor([[0.5, 0.3125, 0.125, 0.0625]])
    assert draws(p.log(), temperature=1.0, top_p=top_p).unique().tolist() == kept


def test_top_k_above_the_vocabulary_changes_nothing():
    logits = torch.randn(1, 10, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draws(logits, temperature=1.0, top_k=99), draws(logits, temperature=1.0))
    assert set(draws(logits, temperature=5.0, top_k=3).tolist()) == set(logits[0].topk(3).indices.tolist())


def test_nan_logits_raise():
    with pytest.raises(ValueError, match="NaN"):
        sample(torch.full((1, 4), torch.nan))


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ((-1, 1, 0), "temperature"),
        ((float("nan"), 1, 0), "temperature"),
        ((1, 1.5, 0), "top_p"),
        ((1, 1, -1), "top_k"),
    ],
)
def test_meaningless_settings_are_refused(values, word):
    with pytest.raises(ValueError, match=word):
        check_sampling(*values)


def test_extreme_settings_leave_the_likeliest_token():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert draws(logits, temperature=1.0, top_p=1e-46).unique().tolist() == [1]
    assert len(draws(torch.zeros(1, 5), temperature=1.0, top_k=2).unique()) == 2
    with pytest.raises(ValueError, match="infinite"):
        sample(torch.tensor([[0.0, torch.inf]]), 1.0)
