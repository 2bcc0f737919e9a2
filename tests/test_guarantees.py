"""docs/guarantees.md against the tests: each line names some, and all of them exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "guarantees.md"
_NAMED = re.compile(r"\[(test_\w+)\]\((\S+?)\)")


def named_in(path: Path) -> set[str]:
    """The names of a file's functions, those in classes included."""
    nodes = ast.walk(ast.parse(path.read_text()))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_test_that_is_named_exists() -> None:
    named = _NAMED.findall(PAGE.read_text())
    missing = [f"{name} in {path}" for name, path in named if name not in named_in((PAGE.parent / path).resolve())]
    assert missing == []
    assert len(named) > 50


def test_every_guarantee_names_a_test() -> None:
    page = PAGE.read_text()
    tables = page[page.index("## A process ends") : page.index("## What is not guaranteed")]
    lines = [line for line in tables.splitlines() if line.startswith("|") and "---" not in line]
    without = [line for line in lines if not _NAMED.search(line) and not line.startswith("| what happens |")]
    assert without == []
    assert len(lines) > 30
