"""`stepwell ls`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from stepwell import listing, refs
from stepwell.checkpoint import Checkpoint
from stepwell.cli._output import clean, console, fields_of, print_json, show_table, table, tell, text_of
from stepwell.errors import CheckpointNotFound, StepwellError
from stepwell.listing import Here, RunListing
from stepwell.places import look_up, run_whole, site_config
from stepwell.units import format_bytes, format_duration

#: metrics that are shown of each checkpoint; the others are in `show` and in JSON
METRICS_SHOWN = 3


def run(paths: list[str], json: bool) -> None:
    """What can be listed is; ends with exit code 1 if something cannot."""
    listed: list[Listed] = []
    failed: dict[str, StepwellError | OSError] = {}
    asked = paths or _here()
    for path in asked:
        try:
            listed.append(_list(path))
        except (StepwellError, OSError) as error:
            if len(asked) == 1:
                raise
            failed[path] = error
    if json:
        errors = [{"ref": ref, "error": text_of(why)} for ref, why in failed.items()]
        print_json({"listed": [_document(one) for one in listed], "failed": errors})
    else:
        for number, one in enumerate(listed):
            if number:
                console().print()
            _print(one, titled=len(asked) > 1)
    for why in failed.values():
        tell(why)
    if failed:
        raise typer.Exit(1)


def _here() -> list[str]:
    config = site_config()
    return [str(root) for root in listing.config_roots(config)] if config is not None else ["."]


Listed = RunListing | tuple[Path, list[Here]]


def _list(path: str) -> Listed:
    folder = Path(path).expanduser().absolute()
    if folder.is_dir() and refs.kind_of(folder.name, os.listdir(folder)) in (None, "plain"):
        return folder, list(listing.find_here(folder))
    named = look_up(path)
    if named.place.kind == "plain":
        raise CheckpointNotFound("a single file is no run", todo="See stepwell show", path=str(folder))
    return run_whole(listing.list_run(named))


# -- JSON --------------------------------------------------------------------------------


def _document(one: Listed) -> dict[str, Any]:
    if isinstance(one, tuple):
        folder, found = one
        return {"kind": "folder", "path": folder, "found": [fields_of(here) for here in found]}
    return {
        "kind": "run",
        "run": one.run,
        "path": one.folder,
        "tiers": one.tiers,
        "checkpoints": [checkpoint_document(checkpoint) for checkpoint in one.checkpoints],
        "unreadable": [{"name": name, "why": why} for name, why in one.unreadable.items()],
        "debris": debris_documents(one.debris),
        "absent": one.absent,
        "in_memory": one.in_memory,
    }


def checkpoint_document(checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "step": checkpoint.step,
        "name": checkpoint.name,
        "made": checkpoint.made,
        "bytes": checkpoint.size,
        "parts": checkpoint.parts,
        "world": checkpoint.world,
        "tiers": checkpoint.tiers,
        "complete_on": checkpoint.complete_on,
        "state": state_of(checkpoint),
        "abandoned": checkpoint.abandoned,
        "kept": checkpoint.kept,
        "tags": checkpoint.tags,
        "metrics": checkpoint.metrics,
        "parent": checkpoint.parent,
        "timeline": checkpoint.timeline,
    }


def debris_documents(debris: list[Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": d.attempt.folder,
            "step": d.attempt.step,
            "tier": d.tier,
            "bytes": d.size_bytes,
            "late": d.late,
            "deleted": d.deleted,
        }
        for d in debris
    ]


# -- people ------------------------------------------------------------------------------


def state_of(checkpoint: Checkpoint) -> str:
    if checkpoint.abandoned:
        return "abandoned"
    return "complete" if checkpoint.complete_on else "partial"


def age(at: float | None) -> str:
    """How long ago, in words; a clock that is behind makes it "now"."""
    if at is None:
        return "-"
    seconds = time.time() - at
    return "now" if seconds < 1 else format_duration(seconds)


def _print(one: Listed, *, titled: bool) -> None:
    if isinstance(one, tuple):
        _print_found(*one, titled=titled)
    else:
        _print_run(one, titled=titled)


def _print_found(folder: Path, found: list[Here], *, titled: bool) -> None:
    if titled:
        console().print(Text(clean(folder), style="bold"))
    if not found:
        console().print(f"no run and no safetensors files under {clean(folder)}")
        return
    shown = table("name", "kind", "checkpoints", "newest step", "age", "size", right=("checkpoints", "newest step"))
    for here in found:
        name = os.path.relpath(here.path, folder)
        count = f"{here.checkpoints}" + (f" + {here.unfinished} unfinished" if here.unfinished else "")
        shown.add_row(
            clean(folder.name if name == "." else name),
            here.kind,
            count if here.kind == "run" else "-",
            "-" if here.newest_step is None else str(here.newest_step),
            age(here.newest_at),
            format_bytes(here.size_bytes),
        )
    show_table(shown)


def _print_run(one: RunListing, *, titled: bool) -> None:
    out = console()
    if titled:
        out.print(Text(clean(one.folder), style="bold"))
    if not (one.checkpoints or one.unreadable):
        what = f"no checkpoint that matches @{one.asked}" if one.asked else "no checkpoint"
        out.print(clean(f"run {one.run} has {what}"))
    else:
        show_table(_checkpoints(one))
    for tier, why in one.absent.items():
        out.print(Text(f"tier {tier} does not answer: {clean(why)}", style="red"))
    for name, why in one.unreadable.items():
        out.print(Text(f"{clean(name)}: unreadable, {clean(why)}", style="red"))
    for name, arena in one.in_memory.items():
        out.print(f"{clean(name)}: in shared memory alone, {clean(arena)} (stepwell host ls)")
    for left in one.debris:
        why = "committed too late, by a writer that had lost the run" if left.late else "never committed"
        if left.deleted:
            why = "deleted; its files stay for a while for those who are reading them"
        size = format_bytes(left.size_bytes)
        out.print(Text(f"{clean(left.attempt.folder)} on {left.tier}: debris, {size}, {why}", style="dim"))


def _checkpoints(one: RunListing) -> Any:
    names = list(dict.fromkeys(name for c in one.checkpoints for name in c.metrics))[:METRICS_SHOWN]
    keeps = any(checkpoint.kept for checkpoint in one.checkpoints)
    columns = ["step", "age", "size", "parts", "state", "tiers", *(["kept"] if keeps else []), "tags"]
    columns += map(clean, names)
    shown = table(*columns, right=("step", "size"))
    for checkpoint in one.checkpoints:
        tiers = (t if t in checkpoint.complete_on else f"{t} (partial)" for t in checkpoint.tiers)
        metrics = [f"{checkpoint.metrics[name]:.6g}" if name in checkpoint.metrics else "-" for name in names]
        shown.add_row(
            str(checkpoint.step),
            age(checkpoint.made),
            format_bytes(checkpoint.size),
            clean(", ".join(checkpoint.parts)),
            state_of(checkpoint),
            ", ".join(tiers),
            *(["yes" if checkpoint.kept else ""] if keeps else []),
            clean(", ".join(checkpoint.tags)),
            *metrics,
            style="dim" if checkpoint.abandoned else None,
        )
    return shown
