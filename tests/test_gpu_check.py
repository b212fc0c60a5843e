"""scripts/gpu_check.py as far as a CPU can show it: its arithmetic, its filling and decoding, what it says and when."""

import json
import os
import subprocess
import sys
from pathlib import Path
from time import perf_counter

import pytest
import torch

from minikv import CompressedKVCache
from minikv.physics import cache_bytes, weight_bytes
from minikv.step import step
from scripts import gpu_check, gpu_kernels
from scripts.gpu_check import PIECE, POLICIES, ROOM, STEPS, WARMUP, Case, Clock, all_cases, parse_args
from scripts.gpu_kernels import Check
from tests.conftest import make_toy

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def toy():
    return make_toy(max_position=4096)


def rows(model, case: Case, modes=("eager",), seconds: float = 100.0) -> list[dict]:
    return list(gpu_check.measure(model, case, list(modes), 1e9, Clock(seconds)))


def test_without_a_gpu_it_is_one_line_and_exit_code_2():
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "gpu_check.py"],
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        cwd="/",
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.count("\n") == 1 and "no GPU" in run.stderr


def test_caches_that_drop_serve_all_contexts_and_the_others_one_each():
    cases = all_cases(parse_args(["--context", "100", "200", "--batch", "2"]))
    whole, dropping = ([c for c in cases if (c.budget is None) is holds] for holds in (True, False))
    assert {(c.policy, c.contexts) for c in dropping} == {
        (text, (100, 200)) for text in ("snapkv", "adakv", "snapkv+int4")
    }
    assert [(c.policy, c.contexts) for c in whole] == [
        (text, (n,)) for n in (100, 200) for text in ("full", "int4")
    ]
    assert {c.batch for c in cases} == {2}


@pytest.mark.parametrize(
    ("flags", "word"),
    [(["--policy", "snapvk"], "snapkv"), (["--budget", "8"], "36"), (["--batch", "0"], "--batch")],
)
def test_mistakes_are_told_before_anything_runs(flags, word, capsys):
    with pytest.raises((ValueError, SystemExit)) as error:
        all_cases(parse_args(flags))
    assert word in f"{error.value} {capsys.readouterr().err}"


@pytest.mark.parametrize("policy", POLICIES)
def test_a_filled_cache_has_seen_the_context_and_keeps_what_the_policy_says(policy, toy):
    drops = policy not in ("full", "int4")
    case = Case(policy, 64 if drops else None, 2, (300,))
    cache = case.cache(toy)
    gpu_check.fill(toy, cache, 300, 128 if drops else case.piece(300))
    assert cache.seen.tolist() == [300, 300]
    for layer in range(2):
        held = [len(head) for row in cache.kept(layer) for head in row]
        assert sum(held) == (64 if drops else 300) * len(held)


def test_decoding_feeds_the_likeliest_token_at_the_next_position(toy):
    cache = CompressedKVCache.for_model(toy, "full", context=64)
    gpu_check.decode(toy, cache, step, 5)
    with torch.no_grad():
        ids = [0]
        for _ in range(4):
            ids.append(int(toy(torch.tensor([ids]))[0, -1].argmax()))
        other = CompressedKVCache.for_model(toy, "full", context=64)
        for token in ids:
            toy(torch.tensor([[token]]), None, other)
    assert cache.seen.tolist() == [5]
    assert torch.equal(cache.layers[0].fresh_k, other.layers[0].fresh_k)


def test_a_row_has_speed_bytes_and_their_share_of_the_bandwidth(toy):
    case = Case("snapkv", 64, 2, (300, 400))
    first, second = rows(toy, case)
    assert [row["context"] for row in (first, second)] == [300, 400]
    assert first["tokens_per_second"] == pytest.approx(2 / first["step_seconds"])
    assert first["share_of_copy"] == pytest.approx(first["bytes_per_step"] / first["step_seconds"] / 1e9)
    middle = WARMUP + STEPS // 2
    read = weight_bytes(toy, 2) + cache_bytes(case.cache(toy), 300, middle)
    assert first["bytes_per_step"] == second["bytes_per_step"] == read


def test_every_mode_fits_into_the_room_so_that_no_timed_step_compresses():
    assert len(gpu_check.MODES) * (WARMUP + STEPS + 1) < ROOM


def test_a_compiled_step_reads_whole_buffers_and_an_eager_one_what_is_filled(toy, monkeypatch):
    static = []

    def watched(model, cache, run, context, bandwidth, mode):
        static.append((mode, cache.rows.static))
        return {}

    monkeypatch.setattr(gpu_check, "measure_mode", watched)
    assert len(rows(toy, Case("snapkv", 64, 1, (100, 200)), ("eager", "compiled"))) == 4
    assert static == [("eager", False), ("compiled", True)] * 2


def test_what_there_is_no_time_for_is_named(toy):
    late = rows(toy, Case("full", None, 1, (50,)), seconds=0)
    assert [row["skipped"] for row in late] == ["no time left"]
    clock = Clock(100)
    clock.learn(Case("full", None, 1, ()), context=10, seconds=100.0)
    (slow,) = gpu_check.measure(toy, Case("full", None, 2, (50,)), ["eager"], 1e9, clock)
    assert "5000 s" in slow["skipped"]


def test_a_fill_in_pieces_costs_less(toy):
    assert Case("full", None, 2, ()).pairs(8 * PIECE) == 8 * Case("snapkv", 64, 2, ()).pairs(8 * PIECE)


def test_what_does_not_fit_is_named_and_the_next_one_measured(toy, monkeypatch):
    real = gpu_check.fill

    def fill(model, cache, context, piece):
        if context == 400:
            raise torch.OutOfMemoryError("no memory")
        real(model, cache, context, piece)

    monkeypatch.setattr(gpu_check, "fill", fill)
    large, small = rows(toy, Case("snapkv", 64, 1, (400, 300)))
    assert "memory" in large["skipped"]
    assert small["step_seconds"] > 0


def test_an_error_of_one_mode_is_its_own(toy, monkeypatch):
    def broken(model, cache, token, pos):
        raise RuntimeError("called a synchronizing CUDA operation\nand more")

    monkeypatch.setattr(gpu_check, "make_step", lambda mode, cache: broken if mode == "graphs" else step)
    graphs, eager = rows(toy, Case("full", None, 1, (50,)), ("graphs", "eager"))
    assert graphs["error"] == "called a synchronizing CUDA operation"
    assert "error" not in eager


def test_graphs_that_are_off_are_an_error(toy, monkeypatch):
    monkeypatch.setattr(gpu_check, "make_step", lambda mode, cache: step)
    (row,) = rows(toy, Case("full", None, 1, (50,)), ("graphs",))
    assert "CUDA graphs are off" in row["error"]
    assert row["error"] in gpu_check.line(row)


def test_copies_count_reading_and_writing():
    begun = perf_counter()
    speed = gpu_check.copy_bandwidth(torch.device("cpu"), repeat=2)
    # Two copies took part of this time, and moved twice the bytes each.
    assert speed >= 2 * 2 * gpu_check.COPIED_BYTES["cpu"] / (perf_counter() - begun)


def test_the_last_line_and_the_file_are_one_json_and_a_wrong_kernel_is_exit_code_1(
    toy, monkeypatch, tmp_path, capsys
):
    """With a toy on the CPU in the GPU's place."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(gpu_check, "random_model", lambda *_: toy)
    flags = [
        "--policy",
        "adakv",
        "full",
        "--context",
        "100",
        "--batch",
        "1",
        "--budget",
        "64",
        "--mode",
        "eager",
    ]
    for change, code in ((0, 0), (1, 1)):
        check = Check("a kernel", lambda x, change=change: (x + change, None), one, (torch.ones(3),), 0)
        monkeypatch.setattr(gpu_kernels, "all_checks", lambda *_, check=check: [check])
        assert gpu_check.main([*flags, "--out", str(tmp_path / "out.json")]) == code
        printed = capsys.readouterr().out.strip().splitlines()
        found = json.loads(printed[-1])
        assert found == json.loads((tmp_path / "out.json").read_text())
        assert [row["policy"] for row in found["rows"]] == ["adakv", "full"]
        assert all(row["tokens_per_second"] > 0 for row in found["rows"])
        assert found["kernels"][0]["ok"] is (code == 0)
        assert any("adakv" in text and "tokens/s" in text for text in printed)


def one(x):
    return x, None


@pytest.mark.parametrize(
    ("other", "tolerance", "ok"),
    [
        (lambda x: (x, None), 0, True),
        (lambda x: (x * 1.001, None), 0, False),
        (lambda x: (x * 1.001, None), 0.01, True),
        (lambda x: (x * 1.1, None), 0.01, False),
        (lambda x: (x * float("nan"), None), 0.01, False),
        (lambda x: (x.double(), None), 0.01, False),
        (lambda x: 1 / 0, 0.01, False),
    ],
)
def test_a_kernel_that_differs_from_its_twin_or_fails_is_wrong(other, tolerance, ok):
    found = gpu_kernels.run(Check("x", other, one, (torch.ones(3),), tolerance))
    assert found["ok"] is ok
    assert ("ok" if ok else "WRONG") in gpu_kernels.line(found)
