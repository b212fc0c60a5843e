"""Head budgets from a file of head scores, and the script that measures them."""

import json
import math
import random
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from minikv.policy import Policy
from minikv.seen import Seen
from minikv.strategies.duoattention import DuoAttention
from minikv.strategies.headkv import HeadKV, in_proportion, read_scores
from minikv.strategies.snapkv import SnapKV
from models.transformer import causal_attention
from scripts.measure_heads import main, measure

TABLE = [
    [0.1, 0.9, 0.0, 0.3],
    [0.2, 0.2, 0.2, 0.2],
    [0.8, 0.05, 0.7, 0.6],
    [0.0, 0.0, 0.0, 0.01],
    [0.5, 0.1, 0.4, 0.15],
]
LAYERS, HEADS = 5, 4


def write(path: Path, table=TABLE, **changes) -> str:
    shape = {"n_layers": len(table), "n_kv_heads": len(table[0])}
    path.write_text(json.dumps({"model": "toy", "how": "by hand", "scores": table, **shape, **changes}))
    return str(path)


@pytest.fixture
def file(tmp_path) -> str:
    return write(tmp_path / "heads.json")


def budgets(heads, budget: int, layer: int) -> list[int]:
    given = heads.split(torch.zeros(3, HEADS, 9), budget, layer)
    assert given.dtype == torch.int64
    assert given.shape == (3, HEADS)
    assert (given == given[:1]).all()
    return given[0].tolist()


def test_whole_numbers_in_proportion_are_exact_in_sum_and_within_one():
    chance = random.Random(0)
    for _ in range(300):
        weights = [chance.choice((0.0, chance.random(), 1.0)) for _ in range(chance.randint(1, 40))]
        weights[0] += 0.1
        total = chance.randint(0, 5000)
        parts = in_proportion(total, weights)
        assert sum(parts) == total
        assert all(abs(part - total * w / sum(weights)) < 1 for part, w in zip(parts, weights, strict=True))
    # The largest remainder is rounded up; among equals the first.
    assert in_proportion(5, [1, 1, 1]) == [2, 2, 1]
    assert in_proportion(10, [0.24, 0.27, 0.49]) == [2, 3, 5]


@pytest.mark.parametrize("beta", [1, 1.01, 1.5, 10])
@pytest.mark.parametrize("budget", [36, 37, 64, 131, 512])
def test_headkv_gives_each_head_the_papers_capacity_and_the_model_its_exact_total(file, beta, budget):
    """Section 3.2: m = b - b/beta, capacity[h] = score[h] * (b/beta * L * H) + m + w, with scores summing to 1."""
    method = HeadKV(file, beta=beta)
    layers = method.split_layers(budget, LAYERS)
    assert sum(layers) == budget * LAYERS
    total = sum(map(sum, TABLE))
    for layer, row in enumerate(TABLE):
        given = budgets(method, layers[layer], layer)
        assert sum(given) == HEADS * layers[layer]
        for score, n in zip(row, given, strict=True):
            pool = (budget - 36) / beta * LAYERS * HEADS
            paper = score / total * pool + (budget - 36) * (1 - 1 / beta) + 36
            # One token from rounding within the layer, and this head's share of the layer's own rounding.
            assert abs(n - paper) < 1 + HEADS
            assert n >= 36


def test_headkv_orders_heads_by_score_over_the_whole_model(file):
    method = HeadKV(file)
    layers = method.split_layers(300, LAYERS)
    given = [n for layer in range(LAYERS) for n in budgets(method, layers[layer], layer)]
    flat = [score for row in TABLE for score in row]
    by_score = sorted(range(len(flat)), key=lambda i: flat[i])
    for low, high in zip(by_score, by_score[1:], strict=False):
        assert given[low] <= given[high] + HEADS
    assert given[1] == max(given)


def test_headkv_with_equal_scores_or_a_large_beta_is_even(tmp_path, file):
    even = HeadKV(write(tmp_path / "even.json", [[0.3] * HEADS] * LAYERS))
    assert even.split_layers(100, LAYERS) == [100] * LAYERS
    assert budgets(even, 100, 2) == [100] * HEADS
    assert HeadKV(file, beta=1e9).split_layers(100, LAYERS) == [100] * LAYERS


def test_headkv_can_follow_another_layer_split(file):
    """As the heads axis alone it shares whatever a layer has."""
    method = HeadKV(file)
    for budget in (10, 36, 50, 99):
        assert sum(budgets(method, budget, 0)) == HEADS * budget
    assert budgets(method, 10, 0) == [10] * HEADS


@pytest.mark.parametrize("sparsity", [0, 0.25, 0.5, 0.8, 1])
@pytest.mark.parametrize("budget", [20, 64, 131])
def test_duoattention_streams_the_lowest_heads_and_shares_the_rest(file, sparsity, budget):
    method = DuoAttention(file, sparsity=sparsity)
    flat = sorted((score, layer, head) for layer, row in enumerate(TABLE) for head, score in enumerate(row))
    streaming = {(layer, head) for _, layer, head in flat[: int(sparsity * len(flat))]}
    for layer in range(LAYERS):
        given = budgets(method, budget, layer)
        assert sum(given) == HEADS * budget
        slim = [head for head in range(HEADS) if (layer, head) in streaming]
        if len(slim) == HEADS:
            assert given == [budget] * HEADS
            continue
        assert [given[head] for head in slim] == [min(36, budget)] * len(slim)
        others = [given[head] for head in range(HEADS) if head not in slim]
        assert max(others) - min(others) <= 1
        assert min(others) >= budget


def test_a_streaming_head_holds_exactly_sinks_and_recent(file):
    policy = Policy(SnapKV(8), heads=DuoAttention(file, stream=12), sinks=4, recent=8)
    g = torch.Generator().manual_seed(0)
    k = torch.randn(1, HEADS, 200, 8, generator=g)
    q = torch.randn(1, HEADS, 2, 8, 8, generator=g)
    pos = torch.arange(200).expand(1, HEADS, 200)
    keep = policy.select(Seen(q, pos[:, 0, -8:], [k], [k], pos, torch.tensor([199])), 40, 0)
    assert keep.sum(-1).tolist() == [[12, 68, 12, 68]]
    assert keep[0, 0].nonzero()[:, 0].tolist() == [0, 1, 2, 3, *range(192, 200)]


def test_both_are_ragged_and_show_their_file_but_not_its_content(file):
    assert not HeadKV(file).uniform
    assert not DuoAttention(file).uniform
    assert HeadKV(file) == HeadKV(scores=file)
    assert repr(HeadKV(file, beta=2)) == f"HeadKV(scores={file!r}, beta=2, guarded=36)"


# The file.


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["not a file of head scores", "JSONDecodeError"]),
        ("[1, 2]", ["not a file of head scores"]),
        ('{"n_layers": 1, "n_kv_heads": 1}', ["'scores'"]),
        ('{"n_layers": 1, "n_kv_heads": 1, "scores": [["a"]]}', ["'a'"]),
        ('{"n_layers": 1, "n_kv_heads": 1, "scores": [3]}', ["not a file of head scores"]),
        ('{"n_layers": 3, "n_kv_heads": 2, "scores": [[1, 2], [3, 4]]}', ["3 x 2", "2 rows of 2"]),
        ('{"n_layers": 2, "n_kv_heads": 2, "scores": [[1, 2], [3]]}', ["2 x 2", "2 rows of 1, 2"]),
        ('{"n_layers": 0, "n_kv_heads": 0, "scores": []}', ["all zero"]),
        ('{"n_layers": 1, "n_kv_heads": 2, "scores": [[0, 0]]}', ["all zero"]),
        ('{"n_layers": 1, "n_kv_heads": 2, "scores": [[-1, 2]]}', ["negative"]),
        ('{"n_layers": 1, "n_kv_heads": 2, "scores": [[NaN, 2]]}', ["not finite"]),
    ],
)
@pytest.mark.parametrize("method", [HeadKV, DuoAttention])
def test_a_file_that_is_no_table_of_scores_is_refused_in_one_line(tmp_path, method, text, words):
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError) as error:
        method(str(path))
    assert all(word in str(error.value) for word in [str(path), *words]), error.value
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named_with_what_writes_one(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.json.*measure_heads"):
        HeadKV(str(tmp_path / "nowhere.json"))


def test_a_file_of_another_model_is_refused_with_both_shapes(file):
    with pytest.raises(ValueError, match="heads.json scores 5 layers, the model has 30"):
        HeadKV(file).split_layers(64, 30)
    for method in (HeadKV(file), DuoAttention(file)):
        with pytest.raises(ValueError, match="5 layers of 4 KV heads; the model's layer 0 has 3"):
            method.split(torch.zeros(1, 3, 9), 64, 0)
        with pytest.raises(ValueError, match="5 layers of 4 KV heads; the model's layer 7 has 4"):
            method.split(torch.zeros(1, 4, 9), 64, 7)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda file: HeadKV(file, beta=0.9), "beta is 1 .* not 0.9"),
        (lambda file: HeadKV(file, guarded=-1), "guarded is 0 tokens or more, not -1"),
        (lambda file: DuoAttention(file, sparsity=2), "from 0 to 1, not 2"),
        (lambda file: DuoAttention(file, stream=0), "at least 1 token, not 0"),
    ],
)
def test_hyper_parameters_that_cannot_be_are_refused(file, make, words):
    with pytest.raises(ValueError, match=words):
        make(file)


# Measuring.


class Recorder:
    """Keeps the queries and keys of every layer."""

    def __init__(self, config):
        self.config, self.seen = config, []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, pos: Tensor) -> Tensor:
        self.seen.append((q[0].double(), k[0].double()))
        return causal_attention(q, k, v, self.config.window(layer))


def far_attention(
    config, q: Tensor, k: Tensor, layer: int, head: int, w: int, sinks: int, recent: int
) -> float:
    """Mean attention of the last w queries to what is neither sink nor recent, in plain loops."""
    group, n, total = q.shape[0] // k.shape[0], k.shape[1], 0.0
    window = config.window(layer) or n
    for g in range(head * group, (head + 1) * group):
        for t in range(n - w, n):
            weights = {
                x: math.exp(float(q[g, t] @ k[head, x]) / math.sqrt(q.shape[-1]))
                for x in range(max(t - window + 1, 0), t + 1)
            }
            far = sum(weight for x, weight in weights.items() if x >= sinks and x <= t - recent)
            total += far / sum(weights.values()) / (group * w)
    return total


@pytest.mark.parametrize("name", ["toy", "windowed_toy"])
def test_a_score_is_the_attention_beyond_sinks_and_recent(name, request):
    model = request.getfixturevalue(name)
    ids = torch.randint(0, 300, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    scores = measure(model, ids, n_queries=6, sinks=4, recent=5)
    recorder = Recorder(model.config)
    model.hidden(torch.tensor([ids]), torch.arange(48)[None], recorder)
    for layer, (q, k) in enumerate(recorder.seen):
        want = [far_attention(model.config, q, k, layer, head, 6, 4, 5) for head in range(len(k))]
        assert scores[layer] == pytest.approx(want, rel=1e-4)
    assert 0 < scores[1][0] < 1


def run(capsys, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_script_writes_what_the_policies_read(toy_dir, tmp_path, capsys):
    arguments = ("--model", toy_dir, "--tokens", 200, "--queries", 40)
    out = tmp_path / "heads.json"
    code, said, _ = run(capsys, *arguments, "--out", out)
    assert code == 0
    assert "last 40 of 200 tokens" in said
    data = json.loads(out.read_text())
    assert (data["n_layers"], data["n_kv_heads"], data["model"]) == (2, 2, str(toy_dir))
    table = read_scores(str(out))
    assert len(table) == 2 and all(0 < score < 1 for row in table for score in row)
    assert sum(HeadKV(str(out)).split_layers(64, 2)) == 128
    again = tmp_path / "again.json"
    assert run(capsys, *arguments, "--out", again)[0] == 0
    assert again.read_text() == out.read_text()


def test_the_script_measures_on_a_text_of_ones_own(toy_dir, tmp_path, capsys):
    text = tmp_path / "words.txt"
    text.write_text("the quick brown fox says hello to the world. " * 20)
    out = tmp_path / "own.json"
    code, said, _ = run(
        capsys, "--model", toy_dir, "--text", text, "--tokens", 150, "--queries", 30, "--out", out
    )
    assert code == 0
    assert "last 30 of 150 tokens (words.txt)" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tokens", 60, "--queries", 40), "60 tokens .* 4 sinks and 32 recent .* at least 77"),
        (("--tokens", 0), "--tokens 0"),
        (("--queries", 0), "--queries 0"),
        (("--recent", -1, "--tokens", 200), "--recent -1"),
        (("--tokens", 300, "--queries", 64), "300 tokens .* limit of 256"),
        (("--tokens", 1_000_000), "built-in text has .* use --text"),
        (("--text", "nowhere.txt"), "nowhere.txt"),
        (("--tokens", 200, "--out", "no/such/folder/heads.json"), "no/such/folder"),
    ],
)
def test_the_script_refuses_in_one_line(toy_dir, tmp_path, monkeypatch, capsys, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, said, error = run(capsys, "--model", toy_dir, *arguments)
    assert (code, said, error.count("\n")) == (2, "", 1)
    assert re.search(words, error), error
