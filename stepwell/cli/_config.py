"""`stepwell config check` and `stepwell config schema`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from stepwell.cli._doctor import document_of, print_findings
from stepwell.cli._output import clean, console, print_json, say, show_table, table
from stepwell.inspecting import Inspection, Value, inspect
from stepwell.reference import json_schema


def check(file: Path, json: bool, *, probe: bool) -> None:
    seen = inspect(file, probe=probe)
    if json:
        print_json(_document(seen))
    else:
        _print(seen)
    if not seen.good:
        say("error: the file is valid, but not everything that it names works here; see above")
        raise typer.Exit(1)


def schema() -> None:
    print_json(json_schema())


def _document(seen: Inspection) -> dict[str, Any]:
    told: dict[str, Any] = {
        "file": seen.config.file,
        "good": seen.good,
        "values": [{"key": v.key, "value": v.value, "text": v.text, "source": v.source} for v in seen.values],
    }
    if seen.found is not None:
        told["machine"] = document_of(seen.found.machine)
        told["paths"] = {path: document_of(findings) for path, findings in seen.found.paths.items()}
    return told


def _print(seen: Inspection) -> None:
    config = seen.config
    _print_values("settings", [value for value in seen.values if not value.key.startswith("tier[")], config.file)
    for i, tier in enumerate(config.tiers):
        console().print()
        title = f"tier {tier.name} ({tier.driver})"
        _print_values(title, [value for value in seen.values if value.key.startswith(f"tier[{i}].")], config.file)
    if seen.found is None:
        return
    for title, findings in [("machine", seen.found.machine), *seen.found.paths.items()]:
        console().print()
        print_findings(title, findings)


def _print_values(title: str, values: list[Value], file: str) -> None:
    console().print(Text(clean(title), style="bold underline"))
    made = table("key", "value", "from")
    for value in values:
        source = f"{Path(file).name}:{value.key}" if value.source == "file" else value.source
        made.add_row(value.key.rpartition(".")[2], clean(value.text), clean(source))
    show_table(made)
