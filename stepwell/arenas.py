"""The shared arenas of this machine: what is there, whose it is, and how it is freed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from stepwell.config import Config, find_config, load_config
from stepwell.errors import ConfigError, FormatError, StepwellError
from stepwell.talking import TALK, Hello, Welcome, connected, hear_owner, pack, streams
from stepwell.tiers import _shm as shm

#: how long an owner has to say how many use its arena; one that stands still does not hold up a listing
ASK_S = 0.5


@dataclass(frozen=True, slots=True)
class SharedArena:
    """One arena that is there. What cannot be read of it is None."""

    name: str
    path: Path
    alive: bool  # whether a process owns it now
    run: str | None
    pid: int | None  # of the owner, or of the last one
    host: str | None
    user: str | None
    since: float | None  # seconds since 1970
    capacity_bytes: int | None
    size_bytes: int  # of memory that it takes now
    checkpoints: tuple[str, ...]  # committed in it
    clients: int | None  # other processes that use it; None: nobody answers


def roots_of(given: str | os.PathLike[str] | None, config: Config | None = None) -> list[Path]:
    """Where arenas are looked for: `given`, else /dev/shm and where the config file puts host tiers. config: else that
    of STEPWELL_CONFIG or the site."""
    if given is not None:
        return [Path(given).expanduser().absolute()]
    roots = [shm.ROOT]
    if config is None and (file := find_config()) is not None:
        config = load_config(file)
    if config is not None:
        roots += [Path(tier.path) for tier in config.tiers if tier.driver == "host" and tier.path]
    return list(dict.fromkeys(roots))


def listed(roots: Sequence[Path]) -> list[SharedArena]:
    """This user's arenas. Raises TierUnavailable for a folder of shared memory that cannot be trusted."""
    return [_described(found) for root in roots for found in shm.arenas(root)]


def checkpoints_of(run: str, tier_roots: Sequence[Path], roots: Sequence[Path]) -> dict[str, str]:
    """Step folder -> arena, for all that a run has in shared memory here. tier_roots: of its storage tiers, the last
    among them, which tells runs of one name apart. What cannot be looked at is left out."""
    here: dict[str, str] = {}
    for root in roots:
        with contextlib.suppress(StepwellError, OSError):
            for found in shm.arenas(root):
                tier, _, rest = found.name.partition(".")
                rank = rest.removeprefix(f"{run[: shm.RUN_CHARS]}.").partition(".")[0]
                if not rank.isdecimal():
                    continue
                names = [shm.arena_name(tier, run, int(rank), os.path.realpath(place)) for place in tier_roots]
                if found.owner is not None and found.owner.run == run and found.name in names:
                    here |= dict.fromkeys(_checkpoints(found.folder), found.name)
    return here


def _described(found: shm.Found) -> SharedArena:
    owner = found.owner
    return SharedArena(
        name=found.name,
        path=found.folder,
        alive=found.alive,
        run=owner.run if owner else None,
        pid=owner.pid if owner else None,
        host=owner.host if owner else None,
        user=owner.user if owner else None,
        since=owner.since if owner else None,
        capacity_bytes=owner.capacity_bytes if owner else None,
        size_bytes=found.size_bytes,
        checkpoints=_checkpoints(found.folder),
        clients=asyncio.run(_clients(found.folder)) if found.alive else None,
    )


def _checkpoints(folder: Path) -> tuple[str, ...]:
    """The step folders that a manifest commits. The owner may add and remove some meanwhile."""
    names = set()
    with contextlib.suppress(OSError):
        for path in (folder / shm.RECORDS).iterdir():
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
                attempt, _, record = json.loads(path.read_bytes().partition(b"\n")[0])["name"].rpartition("/")
                if record.startswith("manifest"):
                    names.add(attempt)
    return tuple(sorted(names))


async def _clients(folder: Path) -> int | None:
    try:
        async with asyncio.timeout(ASK_S):
            reader, writer = await streams(await connected(folder))
            try:
                writer.write(pack([Hello(TALK, os.getpid())]))
                answer = await hear_owner(reader)
            finally:
                writer.transport.abort()
    except (OSError, FormatError):
        return None
    return answer.clients if isinstance(answer, Welcome) else None


def chosen(names: Sequence[str], roots: Sequence[Path], *, dead: bool) -> list[SharedArena]:
    """The arenas that `free` is asked for: those of these names; with `dead`, only such (of all, without names) as
    have no owner. Raises ConfigError if there is none of a name, or if nothing says which."""
    if not names and not dead:
        raise ConfigError("nothing says which arenas", todo="Give names, as `stepwell host ls` shows them, or --dead")
    found = listed(roots)
    for name in names:
        if all(name != arena.name for arena in found):
            where = ", ".join(str(shm.user_folder(root)) for root in roots)
            raise ConfigError(f"there is no arena {name!r}", todo="See `stepwell host ls`", path=where)
    return [arena for arena in found if (not names or arena.name in names) and not (dead and arena.alive)]


def free(arenas: Sequence[SharedArena], on_freed: Callable[[SharedArena], object] = lambda arena: None) -> None:
    """Removes arenas; on_freed is told of each. Raises TierError (EBUSY), with its pid, at one that has an owner."""
    for arena in arenas:
        shm.remove(arena.path)
        on_freed(arena)
