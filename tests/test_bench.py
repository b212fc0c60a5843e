"""scripts/bench.py: its arithmetic by hand, and one run over a toy."""

import json
from argparse import Namespace
from dataclasses import asdict
from itertools import accumulate, count

import pytest
import torch

from minikv import CompressedKVCache, generate, physics
from minikv.physics import cache_bytes, weight_bytes
from minikv.step import step
from models.load import load_model
from scripts import bench, bench_peers, bench_row, bench_steps
from scripts.bench_row import Row, Settings, decode, digest, fill_randomly, first_difference, measure
from tests.conftest import make_toy

FLAGS = ["--policy", "full", "snapkv", "--budget", "64", "128", "--context", "10", "20", "--batch", "2"]


def settings(**changes) -> Settings:
    plain = dict(
        model="", random_weights=None, quantize=None, dtype="float32", device="cpu", compile=False,
        fill="prefill", new_tokens=4, repeat=2, warmup=1, room=8, every=None,
    )  # fmt: skip
    return Settings(**{**plain, **changes})


def test_lists_make_every_combination_once_and_the_full_cache_has_no_budget():
    rows = bench.all_rows(bench.parse_args(FLAGS))
    assert len(rows) == len(set(rows)) == 6
    assert {(r.policy, r.budget) for r in rows} == {("full", None), ("snapkv", 64), ("snapkv", 128)}
    assert {r.context for r in rows} == {10, 20} and {r.batch for r in rows} == {2}


def stored(args: Namespace, path) -> list[str]:
    names = [*asdict(settings()), *bench.LISTS]
    line = json.dumps({"settings": {name: getattr(args, name) for name in names}})
    path.write_text(f"some table\n{line}\n")
    return ["--from-json", str(path)]


def test_a_run_is_repeated_from_its_output_and_flags_have_the_last_word(tmp_path):
    args = bench.parse_args([*FLAGS, "--compile", "--room", "32"])
    again = bench.parse_args(stored(args, tmp_path / "run.txt"))
    assert vars(again) == vars(args) | {"from_json": tmp_path / "run.txt"}
    changed = bench.parse_args([*stored(args, tmp_path / "run.txt"), "--no-compile", "--batch", "1", "8"])
    assert (changed.compile, changed.batch, changed.room) == (False, [1, 8], 32)


def test_settings_of_another_version_are_refused_by_name(tmp_path, capsys):
    (tmp_path / "old.json").write_text('{"settings": {"model": "x", "threads": 2}}')
    with pytest.raises(SystemExit, match="2"):
        bench.parse_args(["--from-json", str(tmp_path / "old.json")])
    assert "threads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--repeat", "0"], "--repeat"),
        (["--warmup", "0"], "--warmup"),
        (["--budget", "64", "0"], "--budget"),
        (["--plot", "nowhere/speed.png"], "nowhere"),
        (["--plot", "speed.txt"], ".png"),
        (["--from-json", "nowhere.json"], "nowhere.json"),
        (["--from-json", __file__], "test_bench.py"),
        (["--policy", "snapvk"], "snapkv"),
    ],
)
def test_mistakes_are_found_before_anything_runs(flags, word, capsys):
    try:
        code = bench.main(flags)
    except SystemExit as stop:  # argparse
        code = stop.code
    captured = capsys.readouterr()
    assert (code, captured.out, len(captured.err.splitlines())) == (2, "", 1)
    assert word in captured.err


def test_weights_read_per_step():
    layer = (4 + 2 + 2) * 16 * 48 + 4 * 16 * 48 + 3 * 80 * 48 + 2 * 48  # q k v, output, MLP, two norms
    frequencies = 16 // 2
    others = 2 * layer + 48 + 320 * 48 + frequencies  # layers, last norm, head
    assert weight_bytes(make_toy(tied=True)) == 4 * others
    assert weight_bytes(make_toy(tied=False)) == 4 * (others + 48)  # and one row of the embedding
    assert weight_bytes(make_toy(tied=False), batch=3) == 4 * (others + 3 * 48)


KEPT = 2 * 16 * 4 + 4  # a key, a value and a position
FRESH = 2 * 16 * 4  # positions of fresh tokens are shared by all heads and layers


@pytest.mark.parametrize(
    ("policy", "prompt", "generated", "kept", "fresh"),
    [
        ("snapkv", 100, 0, 40, 0),
        ("snapkv", 100, 3, 40, 3),
        ("snapkv", 20, 3, 20, 3),
        ("snapkv", 20, 19, 36, 3),  # the room of 8 has been moved to kept twice
        ("full", 20, 11, 28, 3),
        ("tova", 100, 3, 40, 0),  # drops in each step
    ],
)
def test_cache_read_per_step(policy, prompt, generated, kept, fresh, toy):
    cache = CompressedKVCache.for_model(toy, policy, budget=40, room=8, batch=3, context=64)
    layers, heads, batch = 2, 2, 3
    expected = layers * heads * batch * (kept * KEPT + fresh * FRESH)
    assert cache_bytes(cache, prompt, generated) == expected


def test_rates_and_the_share_of_the_ceiling():
    row = Row("full", None, context=100, batch=2)
    most = bench.ceiling(row, dict(weight_bytes=900, cache_read_bytes=100), speed=5000.0)
    assert most == 10.0  # five steps per second of two tokens each
    measured = dict(
        step_seconds=[[0.5, 0.5, 0.5, 0.5], [0.4, 0.4, 0.4, 0.8], [0.8, 0.8, 0.8, 0.8]],
        first_token_seconds=[2.0, 6.0, 4.5],
        prefill_seconds=[2.0, 5.0, 4.0],
    )
    found = bench.summary(row, measured, most)
    assert found["step"] == 0.5 and (found["step_low"], found["step_high"]) == (0.4, 0.8)
    assert found["tokens_per_second"] == pytest.approx(4.0)
    assert found["share"] == pytest.approx(0.4)
    assert (found["first_token"], found["prefill_per_second"]) == (4.5, 50.0)


def test_ids_are_compared_step_by_step():
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3, 4]]) is None
    assert first_difference([[1, 2], [3, 4]], [[1, 2], [3, 5]]) == 1
    assert digest([[1, 2], [3, 4]]) != digest([[1, 2], [3, 5]])


def test_measured_ids_are_those_that_generate_gives(toy_dir):
    row = Row("snapkv", 40, context=60, batch=1)
    measured = measure(settings(model=str(toy_dir)), row)
    model = load_model(toy_dir, "cpu")
    ids = torch.randint(model.config.vocab_size, (1, 60), generator=torch.Generator().manual_seed(0))
    cache = CompressedKVCache.for_model(model, "snapkv", budget=40, room=8)
    out = generate(model, ids[0], cache, max_new_tokens=5, ignore_eos=True)
    assert measured["ids_hash"] == digest([[i] for i in out.ids[1:]])
    assert [len(steps) for steps in measured["step_seconds"]] == [4, 4]
    assert len(measured["prefill_seconds"]) == 2
    assert measured["peak_bytes"] >= measured["cache_bytes"] == cache.nbytes


class WrongFromTheThird:
    """Stands in for a compiled step."""

    def __init__(self, cache):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return step(*args) * (-1 if self.calls == 3 else 1)


def test_a_compiled_step_that_errs_is_noticed(toy_dir, monkeypatch):
    row = Row("snapkv", 40, context=60, batch=2)
    monkeypatch.setattr(bench_row, "CompiledStep", lambda cache: step)
    right = measure(settings(model=str(toy_dir), compile=True), row)
    assert right["differs_at"] is None and right["ids_hash"] == right["eager_hash"]
    monkeypatch.setattr(bench_row, "CompiledStep", WrongFromTheThird)
    wrong = measure(settings(model=str(toy_dir), compile=True), row)
    assert wrong["differs_at"] == 2 and wrong["ids_hash"] != right["ids_hash"]
    assert wrong["eager_hash"] == right["eager_hash"]


def test_a_synthetic_fill_is_compressed_as_a_prompt_is(toy):
    cache = CompressedKVCache.for_model(toy, "snapkv", budget=40, room=8, batch=2)
    ids = torch.ones(2, 100, dtype=torch.int64)
    fill_randomly(toy, cache, ids, piece_size=33)  # the last piece is a single token
    assert cache.seen.tolist() == [100, 100]
    held = [head for row in cache.kept(1) for head in row]
    assert [len(set(head)) for head in held] == [41] * 4  # the budget and the last piece
    assert all(head[:4] == [0, 1, 2, 3] and head[-1] == 99 for head in held)
    _, times = decode(toy, cache, step, torch.ones(2, 1, dtype=torch.int64), 9)
    assert len(times) == 9 and cache.seen.tolist() == [109, 109]


def test_a_run_prints_theory_table_and_json(toy_dir, tmp_path, capsys, monkeypatch):
    """Rows in processes of their own; the theory here, to save time. A budget of 8 cannot work."""
    real, speeds, picture = bench.child, dict(eager=2e12, compiled=None), tmp_path / "speed.png"
    monkeypatch.setattr(bench_row, "bandwidth", lambda device, dtype: speeds)

    def child(verb, settings, rows):
        return bench_row.physics(settings, rows) if verb == "physics" else real(verb, settings, rows)

    monkeypatch.setattr(bench, "child", child)
    code = bench.main(
        ["--model", str(toy_dir), "--policy", "snapkv", "--budget", "8", "40", "--context", "60"]
        + ["--new-tokens", "4", "--repeat", "2", "--room", "8", "--device", "cpu", "--plot", str(picture)]
    )
    out = capsys.readouterr().out
    assert code == 1
    assert "reads 2000.0 GB/s, compiled no compiler" in out and "failed: a budget of 8 tokens" in out
    found = json.loads(out.splitlines()[-1])
    failed, worked = found["rows"]
    assert "budget of 8" in failed["error"]
    read = worked["weight_bytes"] + worked["cache_read_bytes"]
    assert worked["share"] == pytest.approx(worked["tokens_per_second"] * read / 2e12)
    assert found["settings"]["budget"] == [8, 40]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_error_of_a_process_is_its_last_line():
    with pytest.raises(RuntimeError, match="^no preset is called 'nothing'") as caught:
        bench.child("measure", settings(random_weights="nothing"), [Row("full", None, 10, 1)])
    assert "\n" not in str(caught.value)


def test_bandwidth_is_bytes_over_the_fastest_time(monkeypatch):
    """A clock that takes a quarter of a second for one of the calls, and a whole one for all others."""
    ticks = accumulate(0.25 if i == 7 else 1.0 for i in count())
    monkeypatch.setattr(physics, "perf_counter", lambda: next(ticks))
    monkeypatch.setattr(physics, "MATRIX_BYTES", {"cpu": 2**16})
    monkeypatch.setattr(torch, "compile", lambda product, **_: product)
    speeds = physics.bandwidth(torch.device("cpu"), torch.bfloat16, repeat=4)
    assert speeds == {"eager": 2**16 / 0.25, "compiled": 2**16}


def test_a_row_that_dies_does_not_stop_the_next(monkeypatch):
    """What a killed process leaves behind is a code and no word."""
    rows = [Row("full", None, 10, 1), Row("full", None, 20, 1)]
    reads = dict(weight_bytes=10, cache_read_bytes=10, cache_bytes=10)
    theory = dict(bandwidth=dict(eager=1e9, compiled=None), rows=[reads, reads])
    measured = dict(
        step_seconds=[[0.1]], first_token_seconds=[], prefill_seconds=[], eager_hash=None, differs_at=None,
        peak_bytes=1,
    )  # fmt: skip

    def child(verb, settings, rows):
        if rows[0].context == 10:
            raise RuntimeError("the process ended with code -9, perhaps out of memory")
        return measured

    monkeypatch.setattr(bench, "child", child)
    first, second = bench.measure_all(settings(), rows, theory)
    assert "-9" in first["error"] and second["step"] == 0.1
    assert "failed: the process ended with code -9" in bench.result_table([first, second])


def test_transformers_decodes_the_same_ids_beside_us(toy_dir, capsys, monkeypatch):
    monkeypatch.setattr(physics, "MATRIX_BYTES", {"cpu": 2**16})
    flags = ["--model", str(toy_dir), "--repeat", "1"]
    assert bench_peers.main(["decode", *flags, "--tokens", "9", "--new-tokens", "5", "--no-compile"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(found["ids"]) == {"minikv", "transformers dynamic", "transformers static"}
    assert len(set(found["ids"].values())) == 1
    assert len(found["bandwidth"]) == 1 and 0 < found["share_of_ceiling"]["minikv"]
    flags_of_methods = ["--no-compile", "--policy", "snapkv", "adakv", "--budget", "48"]
    assert bench_peers.main(["decode", *flags, "--tokens", "90", "--new-tokens", "5", *flags_of_methods]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {f"{who} {method}" for who in ("minikv", "kvpress") for method in ("snapkv", "adakv")} < set(
        found["ids"]
    )
    assert bench_peers.main(["prefill", *flags, "--tokens", "9", "30"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [set(times) for times in found["seconds"].values()] == [{"minikv", "transformers"}] * 2


def test_steps_side_by_side(toy_dir, capsys, monkeypatch):
    monkeypatch.setattr(bench_steps, "CompiledStep", lambda cache: step)
    rows = ["full::40", "snapkv:48:90:3", "adakv+int4:120:130"]
    assert bench_steps.main([*rows, "--model", str(toy_dir), "--steps", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split()[0] for line in lines] == rows
    assert lines[0].endswith(" 1.000")
    assert bench_steps.main(["snapkv:512"]) == 2
    assert "POLICY:BUDGET:CONTEXT" in capsys.readouterr().err
