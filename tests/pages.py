"""Markdown pages as tests read them: fenced blocks, and how those in Python are run.

    python -m tests.pages docs/extending.md

runs a page in a process of its own, as its kernels need: TRITON_INTERPRET=1 counts before Triton is imported.
"""

import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, each after as many empty lines as stand before it on the page.

    So errors name the page's own lines, and Triton finds the source of a kernel there.
    """
    text = page.read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in found]


def prose(page: Path) -> str:
    """What stands outside of fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def run(page: Path, block: str, names: dict[str, Any]) -> None:
    """Run one block of a page; it finds and leaves its variables in `names`."""
    names.setdefault("__name__", page.stem)
    exec(compile(block, str(page), "exec"), names)


def run_all(page: Path) -> None:
    """Run a page's Python from top to bottom, as one program."""
    names: dict[str, Any] = {}
    for block in blocks(page, "python"):
        run(page, block, names)


if __name__ == "__main__":
    run_all(Path(sys.argv[1]))
