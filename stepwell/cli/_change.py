"""`stepwell cp` and `stepwell rm`: the commands that change something."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import typer

from stepwell.cli._output import clean, console, print_json, progress, show_table, table
from stepwell.copying import copy
from stepwell.deleting import Doomed, check_newest, delete, plan_deletion
from stepwell.units import format_bytes, format_duration


def cp(ref: str, dest: str, json: bool) -> None:
    began = time.monotonic()
    with progress("copying") as bar:
        copies = copy(ref, dest, bar)
    seconds = time.monotonic() - began
    if json:
        documents = [
            {"source": c.source, "step": c.step, "path": c.path, "name": c.path.name, "bytes": c.size_bytes}
            for c in copies
        ]
        print_json({"copied": documents, "bytes": sum(c.size_bytes for c in copies), "seconds": seconds})
        return
    for one in copies:
        console().print(f"{clean(one.source)} -> {clean(one.path)}, {format_bytes(one.size_bytes)}")
    console().print(f"copied and durable in {format_duration(seconds)}")


def rm(refs: list[str], json: bool, *, dry_run: bool, force: bool, yes: bool) -> None:
    plan = plan_deletion(refs)
    check_newest(plan, force)
    if dry_run or not plan:
        _tell(plan, json, dry_run=dry_run)
        return
    if not yes and on_terminal():
        size = format_bytes(sum(doomed.size_bytes for doomed in plan))
        for doomed in plan:
            typer.echo(clean(doomed.path), err=True)
        many = "this checkpoint" if len(plan) == 1 else f"these {len(plan)} checkpoints"
        typer.confirm(f"Delete {many}, {size}, for good?", abort=True, err=True)
    gone: list[Doomed] = []
    delete(refs, force=force, on_deleted=gone.append)
    _tell(gone, json, dry_run=False)


def on_terminal() -> bool:
    """Whether there is somebody who can be asked."""
    return sys.stdin.isatty()


def _tell(plan: Sequence[Doomed], json: bool, *, dry_run: bool) -> None:
    size = sum(doomed.size_bytes for doomed in plan)
    if json:
        print_json({"dry_run": dry_run, "deleted": [_document(doomed) for doomed in plan], "bytes": size})
        return
    if not plan:
        console().print("no checkpoint matches: nothing was deleted")
        return
    shown = table("step", "tier", "size", "folder", right=("step", "size"))
    for doomed in plan:
        kind = "" if doomed.committed else " (never committed)"
        shown.add_row(str(doomed.step), doomed.tier, format_bytes(doomed.size_bytes), clean(doomed.path) + kind)
    show_table(shown)
    what = "would be deleted" if dry_run else "deleted"
    console().print(f"{len(plan)} {what}, {format_bytes(size)}")


def _document(doomed: Doomed) -> dict[str, Any]:
    return {
        "step": doomed.step,
        "name": doomed.name,
        "tier": doomed.tier,
        "path": doomed.path,
        "bytes": doomed.size_bytes,
        "newest": doomed.newest,
        "committed": doomed.committed,
    }
