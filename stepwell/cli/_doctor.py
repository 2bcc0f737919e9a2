"""`stepwell doctor`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from stepwell.cli._output import clean, console, pairs, print_json, show_table
from stepwell.doctor import Finding, examine

_STYLE = {"good": "green", "slow": "yellow", "bad": "red", "plain": ""}


def run(paths: list[str], json: bool) -> None:
    found = examine([Path(path) for path in paths])
    if json:
        print_json(
            {"machine": document_of(found.machine), "paths": {p: document_of(f) for p, f in found.paths.items()}}
        )
        return
    print_findings("machine", found.machine)
    for path, findings in found.paths.items():
        console().print()
        print_findings(path, findings)


def document_of(findings: Sequence[Finding]) -> dict[str, Any]:
    """Findings by their keys, as a document has them."""
    return {f.key: {"value": f.value, "text": f.text, "grade": f.grade, "todo": f.todo} for f in findings}


def print_findings(title: str, findings: Sequence[Finding]) -> None:
    """A title, and a line for each finding."""
    console().print(Text(clean(title), style="bold underline"))
    rows: list[tuple[str, object]] = []
    for f in findings:
        todo = f". {clean(f.todo)}" if f.todo and f.todo not in f.text else ""
        rows.append((f.key.removesuffix("_bytes").replace("_", " "), Text(clean(f.text) + todo, _STYLE[f.grade])))
    show_table(pairs(rows))
