"""What the pages under docs say: their Python runs, their names exist, and every method has its place."""

import ast
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest

from minikv.policy import AXES, METHODS, STORES, STRATEGIES, Policy
from tests.pages import ROOT, blocks, prose, run_all

PAGES = sorted((ROOT / "docs").rglob("*.md"))
OF_AXIS = {axis: ROOT / "docs" / "axes" / f"{axis}.md" for axis in AXES}
EXAMPLES = [page for page in PAGES if blocks(page, "python")]
INTERPRETED = ROOT / "docs" / "extending.md"  # has a Triton kernel


def name(page: Path) -> str:
    return str(page.relative_to(ROOT / "docs"))


def text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def axes_of_kind(kind: type) -> list[str]:
    return [axis for axis, base in AXES.items() if issubclass(kind, base)]


# Examples.


@pytest.mark.parametrize("page", [page for page in EXAMPLES if page != INTERPRETED], ids=name)
def test_the_python_of_a_page_runs(page):
    run_all(page)


def test_extending_runs_from_top_to_bottom_in_tritons_interpreter():
    """The interpreter must be chosen before Triton is imported, hence a process of its own."""
    pytest.importorskip("triton", reason="Triton exists for Linux only")
    command = [sys.executable, "-m", "tests.pages", str(INTERPRETED)]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


def test_every_axis_and_every_thing_to_add_has_an_example():
    assert set(OF_AXIS.values()) == {page for page in PAGES if page.parent.name == "axes"} <= {*EXAMPLES}
    sections = text(INTERPRETED).split("\n## ")[1:]
    assert [section.splitlines()[0] for section in sections] == [
        "A model",
        "A strategy",
        "A store",
        "A kernel",
    ]
    assert all("\n```python\n" in section for section in sections)


# Names.


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_functions_and_links_of_a_page_exist(page):
    """Code is named `folder/file.py` or `folder/file.py:name`."""
    for path, dotted in re.findall(r"\b((?:\w+/)+\w+\.py)\b(?::([A-Za-z_][\w.]*\w))?", text(page)):
        assert (ROOT / path).is_file(), path
        assert not dotted or defines(ROOT / path, dotted), f"{path}:{dotted}"
    for target in re.findall(r"\]\(([^)#:]+)\)", prose(page)):
        assert (page.parent / target).exists(), target


def defines(path: Path, dotted: str) -> bool:
    """Whether a file holds the function, class, method or constant."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    for part in dotted.split("."):
        named = {part: node for node in body for part in names_of(node)}
        if part not in named:
            return False
        body = getattr(named[part], "body", [])
    return True


def names_of(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def test_a_name_that_is_not_there_is_noticed():
    policy = ROOT / "minikv" / "policy.py"
    assert defines(policy, "Policy.select") and defines(policy, "METHODS")
    assert not defines(policy, "Policy.choose") and not defines(policy, "select")


# Methods.


@pytest.mark.parametrize(
    ("method", "axis"), [(method, axis) for method, kind in STRATEGIES.items() for axis in axes_of_kind(kind)]
)
def test_a_strategy_has_a_section_with_all_its_options_and_its_file(method, axis):
    """On the page of each axis it fills, headed by its name with the defaults as `Policy.parse` reads them."""
    kind = STRATEGIES[method]
    options = ", ".join(f"{field.name}={field.default}" for field in fields(kind))
    heading = f"### `{method}({options})`" if options else f"### `{method}`"
    sections = {section.splitlines()[0]: section for section in re.split(r"\n(?=##)", text(OF_AXIS[axis]))}
    assert heading in sections
    file = kind.__module__.rpartition(".")[2] + ".py"
    assert file in sections[heading] or method in ("full", "stride")  # part of axes.py; told with `random`


def test_every_strategy_file_and_every_published_name_is_on_a_page():
    pages = "".join(map(text, OF_AXIS.values()))
    modules = {path.name for path in (ROOT / "minikv" / "strategies").glob("*.py")} - {"__init__.py"}
    assert all(f"[{module}]" in pages for module in modules)
    assert {*METHODS, *STORES} <= set(re.findall(r"`(\w+)", pages))


def test_papers_are_those_of_the_strategies():
    source = "".join(path.read_text() for path in (ROOT / "minikv" / "strategies").glob("*.py"))
    cited = {
        number for page in OF_AXIS.values() for number in re.findall(r"arXiv:(\d{4}\.\d{5})", text(page))
    }
    assert len(cited) >= 15 and cited <= set(re.findall(r"arXiv:(\d{4}\.\d{5})", source))


ROW = re.compile(r"^\| `([^`]+)`(?: with `every=(\d+)`)? \| ", re.MULTILINE)
REFUSED = [
    (policy, every)
    for page in OF_AXIS.values()
    for policy, every in ROW.findall(text(page).partition("## Refused")[2])
]


@pytest.mark.parametrize(("policy", "every"), REFUSED)
def test_what_a_page_says_is_refused_is(policy, every):
    if every:
        policy = Policy.parse(policy)  # this much is well
        with pytest.raises(ValueError):
            replace(policy, every=int(every))
    else:
        with pytest.raises(ValueError):
            Policy.parse(policy)


def test_other_policies_that_a_page_names_are_understood():
    """Names joined by `+` in code marks, tables of what is refused apart."""
    known, found = {*STRATEGIES, *STORES}, 0
    for page in PAGES:
        for policy in re.findall(r"`([a-z][^`\n]*\+[^`\n]*)`", ROW.sub("", prose(page))):
            if {re.sub(r"\(.*", "", word) for word in policy.split("+")} <= known:
                Policy.parse(policy)
                found += 1
    assert found >= 10
