"""`stepwell cp`, `stepwell rm` and `stepwell rewind`: the commands that change which checkpoints there are."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import typer

from stepwell import rewinding
from stepwell.cli._output import clean, console, error_document, fields_of, print_json, progress, show_table, table
from stepwell.copying import Copied, copy
from stepwell.deleting import Doomed, Which, check_newest, delete, plan_deletion
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


def rm(refs: list[str], json: bool, *, dry_run: bool, force: bool, which: Which, yes: bool) -> None:
    if dry_run:
        plan = plan_deletion(refs, which)
        check_newest(plan, force)
        _tell(plan, json, dry_run=True)
        return
    doomed: list[Doomed] = []
    gone: list[Doomed] = []

    def before(plan: Sequence[Doomed]) -> None:
        doomed.extend(plan)
        if plan and not yes and on_terminal():
            _ask(plan)

    try:
        delete(refs, force=force, which=which, before=before, on_deleted=gone.append)
    except typer.Abort:
        raise
    except KeyboardInterrupt:
        if not doomed:
            raise
        what = f"interrupted; {len(gone)} of {len(doomed)} are deleted, and what is left of one more is no checkpoint"
        error = KeyboardInterrupt(f"{what}: see stepwell ls")
        _tell(gone, json, dry_run=False, error=error)
        raise error from None
    except Exception as error:
        if doomed:
            _tell(gone, json, dry_run=False, error=error)
        raise
    _tell(gone, json, dry_run=False)


def _ask(plan: Sequence[Doomed]) -> None:
    """Raises Abort if the answer is no."""
    size = format_bytes(sum(doomed.size_bytes for doomed in plan))
    for doomed in plan:
        typer.echo(clean(doomed.path), err=True)
    many = "this checkpoint" if len(plan) == 1 else f"these {len(plan)} checkpoints"
    typer.confirm(f"Delete {many}, {size}, for good?", abort=True, err=True)


def rewind(ref: str, json: bool) -> None:
    done = rewinding.rewind(ref)
    if json:
        left = [{"step": step, "name": name} for step, name in done.abandoned]
        print_json({"run": done.run, "step": done.step, "name": done.name, "abandoned": left})
        return
    left_behind = "nothing is left behind"
    if done.abandoned:
        steps = [step for step, _ in done.abandoned]
        many = f"{len(steps)} checkpoints, steps {steps[0]} to {steps[-1]}, are"
        left_behind = f"{many if len(steps) > 1 else f'step {steps[0]} is'} abandoned, not deleted"
    console().print(f"run {clean(done.run)} goes on from step {done.step}; {left_behind}")


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
    ruled = any(doomed.why for doomed in plan)
    shown = table("step", "tier", "size", "folder", *(["why"] if ruled else []), right=("step", "size"))
    for doomed in plan:
        kind = "" if doomed.committed else " (never committed)"
        row = [str(doomed.step), doomed.tier, format_bytes(doomed.size_bytes), clean(doomed.path) + kind]
        shown.add_row(*row, *([clean(doomed.why)] if ruled else []))
    show_table(shown)
    what = "would be deleted" if dry_run else "deleted"
    console().print(f"{len(plan)} {what}, {format_bytes(size)}")
