"""The figures of an evaluation, by hand or against a few plain lines."""

from math import exp, log, sqrt
from types import SimpleNamespace

import pytest
import torch

from minikv import METHODS, CompressedKVCache
from minikv.generate import prefill
from models.transformer import causal_attention
from scripts.evaluation import answers
from scripts.evaluation.files import without_middle
from scripts.evaluation.measure import heads, what_is_kept
from scripts.evaluation.metrics import METRICS, compare, run_length
from scripts.evaluation.perturbation import Note, lost_attention
from scripts.evaluation.results import amount, figure, interval, tables, with_better_heads
from scripts.evaluation.samples import Forced, Sample
from tests.conftest import small

# Predictions.

FULL = torch.tensor([[0.5, 0.25, 0.25], [0.8, 0.1, 0.1]]).log()
OTHER = torch.tensor([[0.25, 0.5, 0.25], [0.8, 0.1, 0.1]]).log() + 7  # a constant changes no probability


def test_compare_by_hand():
    found = compare(FULL, OTHER, torch.tensor([1, 2]))
    kl = 0.5 * log(2) - 0.25 * log(2)
    assert found["kl"] == pytest.approx(kl / 2, abs=1e-6)
    assert found["kl_p95"] == pytest.approx(0.95 * kl, abs=1e-6)  # between the two tokens, linearly
    assert found["agreement"] == 0.5
    assert found["nll"] == pytest.approx(-(log(0.5) + log(0.1)) / 2, abs=1e-6)
    assert (found["accuracy"], found["exact"]) == (0.5, 0.0)
    assert compare(FULL, OTHER, torch.tensor([1, 0]))["exact"] == 1.0


def test_the_full_cache_against_itself_is_exactly_nothing():
    logits = torch.randn(20, 50, generator=torch.Generator().manual_seed(0))
    found = compare(logits, logits, logits.argmax(-1))
    assert (found["kl"], found["kl_p95"], found["agreement"], found["exact"]) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("kept", "end", "length"),
    [([], 9, 0), ([3], 9, 1), ([0, 1, 2, 3], 9, 4), ([0, 1, 5, 6, 7, 9], 9, 2.5), ([0, 2, 8, 9], 8, 1)],
)
def test_run_length_counts_tokens_per_run_outside_the_window(kept, end, length):
    assert run_length(kept, end) == length


# Texts.


@pytest.mark.parametrize(
    ("judge", "text", "reference", "score"),
    [
        (
            answers.f1,
            "The cat sat.",
            "a cat",
            2 / 3,
        ),  # articles and full stops do not count: 1 of 2 and 1 of 1
        (answers.f1, "cat cat", "cat dog cat bird", 2 * 2 / 6),
        (answers.f1, "dog", "cat", 0),
        (answers.f1, "", "cat", 0),
        (answers.rouge_l, "the cat on the mat", "the cat lay on a mat", 2 * 4 / 11),
        (answers.rouge_l, "b a", "a b", 0.5),
        (answers.rouge_l, "!", "a b", 0),
        (answers.edit_similarity, "abcd", "abd", 6 / 7),  # one deletion, lengths 4 and 3
        (answers.edit_similarity, "\n# a comment\n```python\nx = 1\ny = 2", "x = 1", 1),
        (answers.edit_similarity, "# nothing else", "x", 0),
        (answers.share_of_numbers, "5 or 6, I say 5", "5", 2 / 3),
        (answers.share_of_numbers, "none", "5", 0),
        (answers.share_of_paragraph_numbers, "Paragraph 15", "Paragraph 15", 1),
        (answers.share_of_paragraph_numbers, "Paragraph 1", "Paragraph 15", 0),
        (answers.mentions, "It is BLUE-7.", "blue-7", 1),
        (answers.mentions, "It is blue", "blue-7", 0),
    ],
)
def test_answers_by_hand(judge, text, reference, score):
    assert judge(text, reference) == pytest.approx(score, abs=1e-9)


def test_naming_several_classes_divides_the_score():
    classes = ["city", "state", "city other"]
    assert answers.classification("a city", "city", classes) == 1
    assert answers.classification("city or state", "city", classes) == 0.5
    assert answers.classification("a state", "city", classes) == 0
    # `city` lies within the right name, so it is not another answer.
    assert answers.classification("city other", "city other", classes) == 1


def test_a_long_context_loses_its_middle():
    assert without_middle(list(range(10)), 5) == [0, 1, 2, 8, 9]
    assert without_middle([1, 2], 5) == [1, 2]


# Heads.


def test_lost_attention_by_hand():
    mass = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.4, 0.3, 0.2, 0.1]])
    note = Note(*[torch.empty(0)] * 4, mass=mass)
    assert lost_attention(note, [[0, 1, 2, 3], [0, 1, 2, 3]]) == 0
    assert lost_attention(note, [[0, 3], [0, 1]]) == pytest.approx((0.5 + 0.3) / 2)


class Eyes:
    """No cache: plain causal attention, and what it was asked in each layer."""

    def __init__(self):
        self.layers = []

    def attend(self, layer, q, k, v, pos):
        self.layers.append((q[0], k[0], v[0]))
        return causal_attention(q, k, v, None)


def by_plain_attention(model, ids, n_prompt, kept):
    """Per query head: |o - o'| / |o| after W_O, and lost attention, from one forward and dense matrices."""
    eyes, n = Eyes(), len(ids)
    model.hidden(torch.tensor([ids]), torch.arange(n)[None], eyes)
    causal = torch.arange(n) <= torch.arange(n_prompt, n)[:, None]  # [T, n]
    moved, lost = [], []
    for layer, (q, k, v) in enumerate(eyes.layers):
        wo = model.layers[layer].attention.wo.weight
        for head in range(len(q)):
            owner = head // (len(q) // len(k))
            holds = torch.ones(n, dtype=torch.bool)
            holds[:n_prompt] = torch.isin(torch.arange(n_prompt), torch.tensor(kept[layer][owner]))
            logits = q[head, n_prompt:] @ k[owner].T / sqrt(k.shape[-1])
            p = logits.masked_fill(~causal, -torch.inf).softmax(-1)
            p_held = logits.masked_fill(~(causal & holds), -torch.inf).softmax(-1)
            columns = wo[:, head * k.shape[-1] : (head + 1) * k.shape[-1]]
            o, o_held = (p @ v[owner] @ columns.T for p in (p, p_held))
            moved.append(float((o - o_held).abs().sum() / o.abs().sum()))
            lost.append(float(p[:, ~holds].sum(-1).mean()))
    return moved, lost


@pytest.mark.parametrize("method", ["full", "snapkv", "adakv", "h2o", "pyramidkv"])
def test_head_figures_equal_dense_attention_with_the_dropped_tokens_masked(method, toy):
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 300, (60,), generator=generator).tolist()
    context, new = ids[:48], ids[48:]
    caches = [
        CompressedKVCache.for_model(toy, policy, budget=16, room=16)
        for policy in ("full", small(METHODS[method], None))
    ]
    with torch.no_grad():
        ends = [prefill(toy, [context], cache) for cache in caches]
        kept = [caches[1].kept(layer)[0] for layer in range(2)]
        sample = Sample(context, [], Forced(new, [True] * len(new), one_by_one=False))
        full, found = heads(toy, SimpleNamespace(), sample, caches, ends)
        moved, lost = by_plain_attention(toy, ids, len(context), kept)
    assert (full["attention_loss"], full["perturbation"]) == (0, 0)
    assert [x for layer in found["per_head"] for x in layer] == pytest.approx(moved, abs=2e-5)
    assert found["perturbation"] == pytest.approx(sum(moved) / len(moved), abs=1e-5)
    assert found["attention_loss"] == pytest.approx(sum(lost) / len(lost), abs=1e-5)
    assert method == "full" or found["attention_loss"] > 0.01


def test_a_quantized_cache_loses_no_attention_and_still_moves_outputs(toy):
    ids = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    caches = [CompressedKVCache.for_model(toy, policy, budget=64) for policy in ("full", "int4", "int8")]
    with torch.no_grad():
        ends = [prefill(toy, [ids[:48]], cache) for cache in caches]
        sample = Sample(ids[:48], [], Forced(ids[48:], [True] * 12, one_by_one=False))
        _, int4, int8 = heads(toy, SimpleNamespace(), sample, caches, ends)
    assert int4["attention_loss"] == int8["attention_loss"] == 0
    assert 0 < int8["perturbation"] < int4["perturbation"] / 4


def test_what_is_kept_tells_the_mean_and_where(toy):
    cache = CompressedKVCache.for_model(toy, "streaming", budget=40)
    with torch.no_grad():
        prefill(toy, [list(range(3, 131))], cache)  # 128 tokens, two a bin
    n, where = what_is_kept(cache, 2)
    assert n == 40
    assert where == [1] * 2 + [0] * 44 + [1] * 18  # 4 sinks and the last 36


# Means, intervals, tables.


def test_an_interval_of_equal_values_is_a_point_and_of_many_the_normal_one():
    assert interval([2.5] * 7) == (2.5, 2.5, 2.5)
    x = torch.randn(400, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    middle, low, high = interval(x.tolist())
    half = 1.96 * float(x.std()) / 20
    assert middle == pytest.approx(float(x.mean()))
    assert (low, high) == (
        pytest.approx(middle - half, abs=half / 10),
        pytest.approx(middle + half, abs=half / 10),
    )


def row(policy: str, budget: str | None, sample: int, **metrics) -> dict:
    return dict(
        task="heads" if "per_head" in metrics else "text", tokens=8, new=4, protocol="none", policy=policy, budget=budget,
        kv_bytes=None, sample=sample, nbytes=2**20, kept=3.0, metrics=metrics,
    )  # fmt: skip


def test_perplexity_is_the_exponential_of_the_mean():
    rows = [row("full", None, i, nll=nll) for i, nll in enumerate((1.0, 3.0))]
    assert figure(rows, "nll").startswith(f"{exp(2):.{METRICS['nll'].decimals}f} (")
    assert figure(rows[:1], "nll") == f"{exp(1):.2f}"
    assert figure(rows, "kl") == "-"


def test_heads_are_compared_with_the_first_policy_on_the_same_sample_and_budget():
    rows = [
        row("full", None, 0, per_head=[[0, 0], [0, 0]]),
        row("random", "8", 0, per_head=[[4, 4], [4, 4]]),
        row("snapkv", "8", 0, per_head=[[1, 5], [3, 4]]),
        row("snapkv", "16", 0, per_head=[[1, 1], [1, 1]]),  # nothing to compare with
    ]
    found, base = with_better_heads(rows)
    assert base == "random"
    assert [r["metrics"].get("better_heads") for r in found] == [None, None, 0.5, None]


def test_a_table_has_a_line_for_each_policy_and_budget_with_n_and_bytes():
    rows = [
        row(policy, budget, i, kl=0.5, nll=1.0)
        for i in range(3)
        for policy, budget in (("full", None), ("l2", "8"))
    ]
    head, rule, full, l2 = tables(rows).split("\n\n")[1].splitlines()
    cells = [cell.strip() for cell in l2.strip("|").split("|")]
    assert cells[:6] == ["l2", "8", "3", "1.00", "3", "0.500 (0.500, 0.500)"]
    assert full.startswith("| full") and "| all " in full
    assert {len(line) for line in (head, rule, full, l2)} == {len(head)}


@pytest.mark.parametrize(
    ("budget", "kv_bytes", "words"),
    [(None, None, "all"), ("64", None, "64"), ("25%", None, "25%"), (None, "25%", "25% of bytes"),
     (None, "8MiB", "8MiB"), (None, "int4", "as int4")],
)  # fmt: skip
def test_an_amount_says_of_what_it_is(budget, kv_bytes, words):
    assert amount(dict(budget=budget, kv_bytes=kv_bytes)) == words
