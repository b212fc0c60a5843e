"""What the README says can be typed."""

import re
import shlex
from ast import literal_eval

import pytest

from minikv.policy import STORES, STRATEGIES
from models import MODELS
from scripts import bench, bench_prefill, bench_steps, chat, download, inspect_cache, measure_heads
from scripts import eval as evaluation
from tests.pages import ROOT, blocks, run

PAGE = ROOT / "README.md"
README = PAGE.read_text(encoding="utf-8")


def commands() -> list[list[str]]:
    lines = [
        part for block in blocks(PAGE, "bash") for line in block.splitlines() for part in line.split("&&")
    ]
    return [shlex.split(line) for line in lines]


@pytest.mark.parametrize(
    "command", [c for c in commands() if c[:1] == ["python"] and c[1] != "-m"], ids=" ".join
)
def test_every_command_is_understood(command):
    _, script, *flags = command
    parsers = {
        "scripts/chat.py": chat.parse_args,
        "scripts/download.py": download.parse,
        "scripts/inspect_cache.py": inspect_cache.parse_args,
        "scripts/measure_heads.py": measure_heads.parse_args,
        "scripts/bench_prefill.py": bench_prefill.parse_args,
        "scripts/bench.py": bench.parse_args,
        "scripts/bench_steps.py": bench_steps.parse_args,
        "scripts/eval.py": evaluation.parse_args,
    }
    parsers[script](flags)


def test_requirement_files_and_test_command_are_those_of_ci():
    ci = (ROOT / ".ci" / "run").read_text()
    assert ["pip", "install", "-r", "requirements-dev.txt"] in commands()
    assert ["python", "-m", "pytest"] in commands() and "python -m pytest\n" in ci


def test_every_preset_is_listed_and_nothing_else():
    table = README[README.index("## Models") : README.index("`python scripts/download.py --list`")]
    assert set(re.findall(r"`([a-z0-9.-]+-[a-z0-9.-]+)`", table)) == set(MODELS)


@pytest.mark.slow
def test_the_python_examples_run(capsys, smollm2_dir):
    first, strategy = blocks(PAGE, "python")
    run(PAGE, first, {})
    assert "Paris" in capsys.readouterr().out
    run(PAGE, strategy, {})
    positions = literal_eval(capsys.readouterr().out.splitlines()[-1])
    old = [p for p in positions if 4 <= p < positions[-1] - 15]
    assert positions[:4] == [0, 1, 2, 3] and all(p % 2 for p in old)


def test_every_method_has_a_row_and_every_row_a_method():
    table = README[README.index("## Methods") : README.index("`--kv-bytes 64MiB`")]
    names = {
        name
        for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`(\w+)", row)
    }
    assert names == {*STRATEGIES, *STORES}


def test_files_named_in_the_tree_exist():
    tree = README[README.index("## Reading the code") : README.index("## Limits")]
    for folder, name in re.findall(r"^(\w+/)(\w+\.py)", tree, re.MULTILINE):
        assert (ROOT / folder / name).is_file(), folder + name
