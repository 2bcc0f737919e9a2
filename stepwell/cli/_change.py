"""`stepwell cp` and `stepwell rm`: the commands that change something."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import typer

from stepwell.cli._output import clean, console, error_document, fields_of, print_json, progress, show_table, table
from stepwell.copying import Copied, copy
from stepwell.deleting import Doomed, check_newest, delete, plan_deletion
from stepwell.units import format_bytes, format_duration


def cp(ref: str, dest: str, json: bool) -> None:
    began = time.monotonic()
    copies: list[Copied] = []
    try:
        with progress("copying") as bar:
            copies = copy(ref, dest, bar, on_copied=copies.append)
    except (KeyboardInterrupt, Exception) as error:
        _tell_copied(copies, json, time.monotonic() - began, error)
        raise
    _tell_copied(copies, json, time.monotonic() - began)


def _tell_copied(copies: Sequence[Copied], json: bool, seconds: float, error: BaseException | None = None) -> None:
    """Also of a command that failed or was interrupted midway: copies of a range that were made before stay."""
    if json:
        made = [{**fields_of(one), "name": one.path.name} for one in copies]
        document = {"copied": made, "bytes": sum(c.size_bytes for c in copies), "seconds": seconds}
        print_json(document if error is None else {**document, **error_document(error)})
        return
    for one in copies:
        console().print(f"{clean(one.source)} -> {clean(one.path)}, {format_bytes(one.size_bytes)}")
    if error is None:
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
    try:
        delete(refs, force=force, on_deleted=gone.append)
    except KeyboardInterrupt:
        what = f"interrupted; {len(gone)} of {len(plan)} are deleted, and what is left of one more is no checkpoint"
        error = KeyboardInterrupt(f"{what}: see stepwell ls")
        _tell(gone, json, dry_run=False, error=error)
        raise error from None
    except Exception as error:
        _tell(gone, json, dry_run=False, error=error)
        raise
    _tell(gone, json, dry_run=False)


def on_terminal() -> bool:
    """Whether there is somebody who can be asked."""
    return sys.stdin.isatty()


def _tell(plan: Sequence[Doomed], json: bool, *, dry_run: bool, error: BaseException | None = None) -> None:
    """Also of a command that failed or was interrupted midway: what is gone is gone."""
    size = sum(doomed.size_bytes for doomed in plan)
    if json:
        deleted = [{**fields_of(doomed), "newest": bool(doomed.newest)} for doomed in plan]
        document = {"dry_run": dry_run, "deleted": deleted, "bytes": size}
        print_json(document if error is None else {**document, **error_document(error)})
        return
    if not plan and error is not None:
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
