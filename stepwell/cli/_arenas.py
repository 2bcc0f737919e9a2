"""`stepwell host ls` and `stepwell host free`: the shared memory that host tiers have left, or use."""

from __future__ import annotations

import time
from collections.abc import Sequence

import typer

from stepwell.arenas import SharedArena, chosen, free, listed, roots_of
from stepwell.cli._change import on_terminal
from stepwell.cli._output import clean, console, error_document, fields_of, print_json, show_table, table
from stepwell.units import format_bytes, format_duration


def ls(root: str | None, json: bool) -> None:
    found = listed(roots_of(root))
    if json:
        print_json({"arenas": [_document(arena) for arena in found], "bytes": sum(a.size_bytes for a in found)})
        return
    if not found:
        console().print("no host tier shares memory here")
        return
    shown = table("arena", "run", "owner", "size", "capacity", "checkpoints", "used by", right=("size", "capacity"))
    for arena in found:
        shown.add_row(
            clean(arena.name),
            clean(arena.run or "?"),
            _owner(arena),
            format_bytes(arena.size_bytes),
            "?" if arena.capacity_bytes is None else format_bytes(arena.capacity_bytes),
            _checkpoints(arena.checkpoints),
            _clients(arena),
        )
    show_table(shown)
    if dead := [arena for arena in found if not arena.alive]:
        size = format_bytes(sum(arena.size_bytes for arena in dead))
        have = "1 has" if len(dead) == 1 else f"{len(dead)} have"
        console().print(f"{have} no owner any more, {size}: stepwell host free gives it back")


def _document(arena: SharedArena) -> dict[str, object]:
    return {**fields_of(arena), "path": str(arena.path)}


def _owner(arena: SharedArena) -> str:
    if arena.pid is None:
        return "unknown" if arena.alive else "none"
    age = "" if arena.since is None else f", since {format_duration(max(0.0, round(time.time() - arena.since)))}"
    return clean(f"pid {arena.pid} of {arena.user} on {arena.host}{age if arena.alive else ', dead'}")


def _clients(arena: SharedArena) -> str:
    if not arena.alive:
        return "-"
    return "?" if arena.clients is None else "1 other" if arena.clients == 1 else f"{arena.clients} others"


def _checkpoints(names: Sequence[str]) -> str:
    if not names:
        return "none"
    return clean(names[-1]) + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def free_some(names: list[str], root: str | None, json: bool, *, dead: bool, yes: bool) -> None:
    doomed = chosen(names, roots_of(root), dead=dead)
    if doomed and not yes and on_terminal():
        for arena in doomed:
            typer.echo(clean(arena.path), err=True)
        size = format_bytes(sum(arena.size_bytes for arena in doomed))
        many = "this arena" if len(doomed) == 1 else f"these {len(doomed)} arenas"
        typer.confirm(f"Free {many}, {size}, and what is in memory only?", abort=True, err=True)
    gone: list[SharedArena] = []
    try:
        free(doomed, gone.append)
    except Exception as error:
        _tell(gone, json, error)
        raise
    _tell(gone, json)


def _tell(gone: Sequence[SharedArena], json: bool, error: BaseException | None = None) -> None:
    """Also of a command that failed midway: what is gone is gone."""
    size = sum(arena.size_bytes for arena in gone)
    if json:
        document = {"freed": [_document(arena) for arena in gone], "bytes": size}
        print_json(document if error is None else {**document, **error_document(error)})
    elif gone:
        for arena in gone:
            console().print(f"{clean(arena.name)}, {format_bytes(arena.size_bytes)}")
        console().print(f"{len(gone)} freed, {format_bytes(size)}")
    elif error is None:
        console().print("nothing to free")
