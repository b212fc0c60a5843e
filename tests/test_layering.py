"""Who may import whom, and what must not be imported at run time at all."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FORBIDDEN = {"transformers", "tokenizers", "accelerate", "jinja2"}

# Higher numbers may import lower ones of the same package.
LAYERS = {
    "minikv.seen": 0,
    "minikv.axes": 1,
    "minikv.attention": 2,
    "minikv.strategies": 2,
    "minikv.policy": 3,
    "minikv.pool": 3,
    "minikv.rows": 3,
    "minikv.kept": 4,
    "minikv.layer": 5,
    "minikv.cache_file": 5,
    "minikv.cache": 6,
    "minikv.launches": 6,
    "minikv.sizing": 7,
    "minikv.replay": 7,
    "minikv.step": 7,
    "minikv.sampling": 7,
    "minikv.stop": 7,
    "minikv.generate": 8,
    "minikv.chat": 9,
    "minikv": 10,
}


def sources(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """Modules a file imports, wherever in the file it does."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    return found


def module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer(name: str) -> int:
    while name not in LAYERS:
        assert "." in name, f"{name} has no place in LAYERS"
        name = name.rpartition(".")[0]
    return LAYERS[name]


@pytest.mark.parametrize("path", sources("minikv"), ids=module)
def test_minikv_imports_only_what_lies_below(path):
    for name in imports(path):
        assert name.partition(".")[0] not in ("models", "scripts", "tests"), name
        if name.startswith("minikv") and not (
            module(path).startswith("minikv.strategies") and "strategies" in name
        ):
            assert layer(name) < layer(module(path)), f"{module(path)} imports {name}"


@pytest.mark.parametrize("path", sources("models", "kernels"), ids=module)
def test_models_and_kernels_know_nothing_of_the_cache(path):
    below = {"models", "kernels"} if path.is_relative_to(ROOT / "models") else {"kernels"}
    for name in imports(path):
        assert name.partition(".")[0] not in {"minikv", "models", "kernels", "scripts", "tests"} - below, name


@pytest.mark.parametrize("path", sources("minikv", "models", "kernels", "scripts"), ids=module)
def test_imports_stand_at_the_top_and_are_allowed(path):
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            inside = [n for n in ast.walk(node) if isinstance(n, ast.Import | ast.ImportFrom)]
            assert not inside, f"{path.name}:{inside[0].lineno} imports inside {node.name}"
    if path.name != "bench_peers.py":  # measures the others, and is not needed to run anything
        assert not {name.partition(".")[0] for name in imports(path)} & FORBIDDEN


def test_nothing_forbidden_is_loaded_at_run_time():
    """Not even through a dependency."""
    code = "import sys, models, minikv; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {name.partition(".")[0] for name in loaded.stdout.split()} & FORBIDDEN


def test_a_chat_loads_neither_the_compiler_nor_what_reads_gguf_files(toy_dir):
    """Each would take longer than the model."""
    code = (
        "import sys; from scripts import chat; "
        "chat.main(['--model', sys.argv[1], '--prompt', 'hi', '--max-new-tokens', '2']); "
        "assert not {'torch._dynamo', 'gguf', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, toy_dir], cwd=ROOT, capture_output=True, check=True)
