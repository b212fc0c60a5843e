"""The command line as a user meets it: exit codes, streams, one-line errors."""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from scripts import inspect_cache
from scripts.chat import main

ROOT = Path(__file__).resolve().parents[1]


@dataclass
class Run:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def chat(capsys, monkeypatch):
    """Run the script's main in this process: no second start of Python and torch."""

    def run(*arguments: object, stdin: str = "") -> Run:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            code = main([str(a) for a in arguments])
        except SystemExit as stop:  # argparse
            code = stop.code
        return Run(code, *capsys.readouterr())

    return run


def process(*arguments: object, **environment: str) -> subprocess.CompletedProcess:
    """Run the script as a user does, from another folder."""
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "chat.py", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
        cwd="/",
    )


def test_one_shot_prints_the_answer_alone(toy_dir):
    run = process("--model", toy_dir, "--prompt", "hello", "--temperature", 0, "--max-new-tokens", 5)
    assert run.returncode == 0
    assert run.stderr == ""
    assert run.stdout.endswith("\n")


def test_stats_go_to_standard_error_and_show_the_budget(toy_dir, tmp_path, chat):
    document = tmp_path / "long.txt"
    document.write_text("the quick brown fox " * 8)
    run = chat(
        "--model", toy_dir, "--prompt-file", document, "--prompt", "why?", "--budget", 40, "--room", 8,
        "--max-new-tokens", 9, "--stats",
    )  # fmt: skip
    assert run.returncode == 0
    for word in ("prompt", "prefill", "first token", "tokens/s", "cache", "full cache", "kept"):
        assert word in run.stderr
    kept = float(run.stderr.split("kept ")[1].split()[0])
    assert 40 <= kept < 48


def test_a_budget_in_bytes_and_a_store_alone(toy_dir, chat):
    flags = ("--model", toy_dir, "--prompt", "the quick brown fox " * 20, "--room", 8, "--max-new-tokens", 5)
    kept = []
    for more in (["--policy", "snapkv(window=8)+int4", "--kv-bytes", "30KiB"], ["--policy", "int4"]):
        run = chat(*flags, *more, "--stats")
        assert run.returncode == 0, run.stderr
        kept.append(float(run.stderr.split("kept ")[1].split()[0]))
    assert kept[0] < kept[1] == int(run.stderr.split(" seen")[0].split()[-1])


def test_standard_input_is_a_prompt_too(toy_dir, chat):
    flags = ("--model", toy_dir, "--temperature", 0, "--max-new-tokens", 5)
    assert chat(*flags, stdin="hello").stdout == chat(*flags, "--prompt", "hello").stdout


def test_the_same_seed_repeats_the_answer(toy_dir, chat):
    flags = ("--model", toy_dir, "--prompt", "hello", "--temperature", 2, "--seed", 5, "--max-new-tokens", 9)
    assert chat(*flags).stdout == chat(*flags).stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--budget", "8"], ["8", "36"]),
        (["--budget", "many"], ["--budget", "many"]),
        (["--budget", "64", "--policy", "snapvk"], ["snapvk", "snapkv"]),
        (["--policy", "snapkv"], ["--budget"]),
        (["--kv-bytes", "lots"], ["lots", "64MiB"]),
        (["--kv-bytes", "1MiB", "--budget", "64"], ["1MiB", "64"]),
        (["--kv-bytes", "2KiB"], ["2,048", "36 tokens"]),
        (["--temperature", "-1"], ["temperature"]),
        (["--dtype", "int3"], ["int3", "bfloat16"]),
        (["--context", "9999"], ["9999", "256"]),
        (["--prompt", "word " * 300], ["256"]),
        (["--prompt", "  "], ["empty"]),
        (["--prompt-file", "nowhere.txt"], ["nowhere.txt"]),
        (["--room", "0"], ["room"]),
        (["--nonsense"], ["--nonsense"]),
    ],
)
def test_bad_flags_cost_one_line_and_exit_code_2(flags, words, toy_dir, chat):
    base = [] if "--prompt" in flags or "--prompt-file" in flags else ["--prompt", "hi"]
    run = chat("--model", toy_dir, "--max-new-tokens", "3", *base, *flags)
    assert run.returncode == 2
    assert all(word in run.stderr.splitlines()[-1] for word in words), run.stderr
    assert run.stdout == ""


def test_a_model_that_is_not_here_names_the_next_command(tmp_path, chat, monkeypatch):
    monkeypatch.setenv("MINIKV_HOME", str(tmp_path))
    run = chat("--model", "llama3-8b", "--prompt", "hi")
    assert (run.returncode, run.stdout) == (2, "")
    assert len(run.stderr.splitlines()) == 1
    assert "download.py llama3-8b" in run.stderr and str(tmp_path) in run.stderr
    assert "llama3-8b" in chat("--model", "lama3-8b", "--prompt", "hi").stderr


def test_without_a_compiler_the_steps_run_eagerly_with_one_warning(toy_dir, tmp_path, chat):
    """torch.compile is lazy: it fails in the first step, not where it is asked for."""
    nowhere = {"PATH": "/nonexistent", "CXX": "/nonexistent", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    flags = ("--model", toy_dir, "--prompt", "hi", "--temperature", 0, "--max-new-tokens", 3)
    run = process(*flags, "--compile", **nowhere)
    assert run.returncode == 0, run.stderr
    assert "Traceback" not in run.stderr
    assert run.stderr.count("warning") == 1
    assert run.stdout == chat(*flags).stdout


def interactive(toy_dir, lines: list[str], *flags: object) -> str:
    """A conversation through a terminal: standard input has to be one."""
    code = (
        "import pty, sys, os\n"
        "pid, fd = pty.fork()\n"
        "if pid == 0: os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
        "os.write(fd, sys.argv[1].encode())\n"
        "out = b''\n"
        "while True:\n"
        "    try: data = os.read(fd, 4096)\n"
        "    except OSError: break\n"
        "    if not data: break\n"
        "    out += data\n"
        "sys.stdout.buffer.write(out)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
    )
    typed = "".join(line + "\n" for line in lines)
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            code,
            typed,
            ROOT / "scripts" / "chat.py",
            "--model",
            toy_dir,
            *map(str, flags),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stdout
    assert "Traceback" not in run.stdout
    return run.stdout


def test_the_interactive_commands(toy_dir, tmp_path):
    saved, document = tmp_path / "talk.json", tmp_path / "doc.txt"
    document.write_text("a document")
    lines = [
        "/help", "hello", "/stats", f"/file {document} what is it?", f"/save {saved}", "/nonsense", "/save",
        "/file nowhere.txt", "/system be brief", "hi", "/reset", "/quit",
    ]  # fmt: skip
    out = interactive(toy_dir, lines, "--max-new-tokens", 4, "--temperature", 0)
    for words in (
        "forget the conversation",
        "prefill",
        "unknown command /nonsense",
        "/save needs",
        "nowhere.txt",
    ):
        assert words in out, words
    talk = json.loads(saved.read_text())
    assert [m["role"] for m in talk] == ["user", "assistant"] * 2
    assert talk[2]["content"] == "a document\n\nwhat is it?"


def test_a_document_is_compressed_once_and_asked_again(toy_dir, tmp_path, chat):
    document, file = tmp_path / "long.txt", tmp_path / "report.cache"
    document.write_text("the quick brown fox " * 8)
    flags = ("--model", toy_dir, "--temperature", 0, "--max-new-tokens", 4)
    first = chat(*flags, "--prompt-file", document, "--budget", 40, "--policy", "adakv", "--save-cache", file)
    assert first.returncode == 0 and file.is_file()
    again = chat(*flags, "--load-cache", file, "--prompt", "and?", "--stats")
    assert again.returncode == 0
    assert int(again.stderr.split("prompt ")[1].split()[0]) < 40  # the document is not read again
    broken = chat(*flags, "--load-cache", document, "--prompt", "and?")
    assert (broken.returncode, len(broken.stderr.splitlines())) == (2, 1)


def test_what_a_policy_keeps_can_be_seen(toy_dir, tmp_path, capsys):
    document, picture = tmp_path / "long.txt", tmp_path / "kept.png"
    document.write_text("the quick brown fox " * 8)
    flags = ["--model", str(toy_dir), "--prompt-file", str(document), "--budget", "40"]
    assert inspect_cache.main([*flags, "--policy", "snapkv+adakv", "--out", str(picture), "--text"]) == 0
    out = capsys.readouterr().out
    assert "40 of" in out and "quick" in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert inspect_cache.main([*flags, "--policy", "nonsense", "--text"]) == 2
