"""The commands `stepwell host ls` and `stepwell host free`, and their options; what they do is in `_arenas`."""

from __future__ import annotations

from typing import Annotated

import typer

from stepwell.cli._output import Json, reported

host_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Look at the shared memory of host tiers, and free it."
)
Root = Annotated[
    str | None, typer.Option("--root", metavar="PATH", help="The shared memory; else /dev/shm and the config's.")
]


@host_app.command("ls")
@reported
def host_ls(root: Root = None, json: Json = False) -> None:
    """List your shared arenas on this machine: whose they are, their size, and what is in them.

    An arena outlives the process that owns it. The next one that opens the same run adopts it; until then its
    memory is taken.

    \b
    Examples:
      stepwell host ls
      stepwell host ls --json
    """
    from stepwell.cli import _arenas

    _arenas.ls(root, json)


@host_app.command("free")
@reported
def host_free(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Arenas, as host ls shows them.")] = None,
    dead: Annotated[bool, typer.Option("--dead", help="Only those without an owner; without a NAME, all.")] = False,
    root: Root = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask, as a terminal is otherwise.")] = False,
    json: Json = False,
) -> None:
    """Give the memory of shared arenas back.

    What was only in memory is gone then. One whose owner lives is refused, with the owner's pid. Processes that
    still read from it keep its memory until they end.

    \b
    Examples:
      stepwell host free --dead
      stepwell host free host.sft.0.1f2e3d4c5b6a --yes
    """
    from stepwell.cli import _arenas

    _arenas.free_some(names or [], root, json, dead=dead, yes=yes)
