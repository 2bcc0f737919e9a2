"""Places: runs and folders opened for one task, without a store: to list, verify, copy or delete.

A run is opened by its folder, as the one tier `disk`, or by its name on the storage tiers of a config file.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stepwell import refs
from stepwell.catalog import Catalog, Holding
from stepwell.config import Config, find_config, load_config
from stepwell.describing import describe_all
from stepwell.errors import CheckpointNotFound, ConfigError, FormatError, StepwellError
from stepwell.format.names import EPOCHS, MANIFEST, RUN_FILE, Attempt
from stepwell.format.records import Manifest, decode
from stepwell.mover import Mover
from stepwell.runtime import Runtime
from stepwell.tiers.base import RecordKey, Tier
from stepwell.tiers.file import FileTier

T = TypeVar("T")
Ref = str | os.PathLike[str]


class Progress(Protocol):
    """Is told how far a long task has come. Called on the event loop: it must return at once."""

    def expect(self, size_bytes: int) -> None:
        """So many bytes more will be moved."""

    def moved(self, size_bytes: int) -> None:
        """So many bytes of them have been."""


class NoProgress:
    """Tells nobody."""

    def expect(self, size_bytes: int) -> None:
        pass

    def moved(self, size_bytes: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Named:
    """A reference, looked up: what it stands for, and on which tiers of a config, if it named a run there."""

    text: str
    place: refs.Place
    config: Config | None = None


@dataclass(frozen=True, slots=True)
class Opened:
    """A run whose tiers are started and scanned, and which of its checkpoints a reference means."""

    named: Named
    run: str
    catalog: Catalog
    chosen: list[Attempt]  # by rising step; empty for a run that has none and was not asked for one

    @property
    def tiers(self) -> list[Tier]:
        return self.catalog.tiers


def look_up(ref: Ref, config: Config | None = None) -> Named:
    """Finds what a reference names: a path, or, if there is none, a run on the config's tiers.

    config: else that of STEPWELL_CONFIG or the site. Raises CheckpointNotFound, FormatError, ConfigError.
    """
    text = os.fspath(ref)
    try:
        return Named(text, refs.find(ref))
    except CheckpointNotFound as missing:
        name, _, select = text.rpartition("@") if "@" in text else (text, "", "")
        if os.sep in name or not name or name.startswith((".", "~")):
            raise
        config = config or site_config()
        if config is None:
            raise
        roots = [Path(tier.path) for tier in config.tiers if tier.path is not None]
        if not any((root / name).is_dir() for root in roots):
            where = ", ".join(str(root) for root in roots)
            raise CheckpointNotFound(
                f"{missing.what}, and no run {name!r} on the tiers of {config.file}: {where}", todo=missing.todo
            ) from None
        at = next(root for root in reversed(roots) if (root / name).is_dir())
        return Named(text, refs.Place("run", at / name, select or "latest", selected=bool(select)), config)


def site_config() -> Config | None:
    """The config file of STEPWELL_CONFIG or of the site, if there is one."""
    path = find_config()
    return load_config(path) if path is not None else None


def storage_tiers(config: Config, *, read_only: bool) -> list[Tier]:
    """The config's tiers that outlive a process, nearest first, not started."""
    from stepwell.building import build

    run = config.run or "any"  # the drivers are the same for every run
    tiers = build(config, run=run, mode="r" if read_only else "w", storage_only=True).tiers
    return [tier for tier in tiers if tier.info.scope != "process"]


def mover() -> Mover:
    """A mover whose arena only stages. The only place here that makes one."""
    runtime = Runtime.get()
    return Mover(runtime.copier, runtime.staging())


def run_whole(work: Coroutine[Any, Any, T]) -> T:
    """Runs `work` on the loop thread. An interrupt cancels it and waits until it has cleaned up after itself."""
    runtime = Runtime.get()
    tasks: list[asyncio.Task[Any]] = []

    async def held() -> T:
        task = asyncio.current_task()
        assert task is not None
        tasks.append(task)
        return await work

    future = runtime.start(held())
    try:
        return future.result()
    except KeyboardInterrupt:
        runtime.loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
        try:
            future.exception()
        except BaseException as ended:  # cancelled, as it should be; or interrupted again
            raise KeyboardInterrupt from ended
        raise


@asynccontextmanager
async def opened(named: Named, *, all_tiers: bool = True) -> AsyncIterator[Opened]:
    """Starts the tiers, scans the run, and finds which checkpoints are meant. Nothing is written.

    A run's folder without `@` means all its committed checkpoints, abandoned ones too. all_tiers: one that does
    not answer is an error; else it is in `catalog.absent`. Raises CheckpointNotFound, TierUnavailable.
    """
    async with started(named, read_only=True, all_tiers=all_tiers) as (run, tiers, away):
        catalog = Catalog(run, tiers)
        place = named.place
        if place.kind == "step" and not run:
            chosen = [await renamed_step(catalog, tiers[0], place.folder)]
        else:
            await catalog.refresh()
            catalog.absent |= away
            if all_tiers or len(catalog.absent) == len(tiers) + len(away):
                catalog.require_all_tiers("the run cannot be listed")
            chosen = await _chosen(catalog, place)
        yield Opened(named, run, catalog, chosen)


@asynccontextmanager
async def started(
    named: Named, *, read_only: bool, all_tiers: bool = True
) -> AsyncIterator[tuple[str, list[Tier], dict[str, str]]]:
    """The run's name ("" for a renamed step folder), its started tiers, nearest first, and why others are not there.

    Raises TierUnavailable for a tier that is not there, unless `all_tiers` is False.
    """
    folder = named.place.folder
    tiers: Sequence[Tier]
    if named.config is not None:
        run, tiers = folder.name, storage_tiers(named.config, read_only=read_only)
    else:
        run = folder.name
        if named.place.kind == "step":
            run = folder.parent.name if Attempt.parse(folder.name) else ""
            folder = folder.parent if run else folder
        tiers = [FileTier(folder.parent, name="disk", read_only=read_only)]
    away: dict[str, str] = {}
    try:
        for tier in tiers:
            try:
                await tier.start()
            except StepwellError as error:
                if all_tiers:
                    raise
                away[tier.info.name] = str(error)
        yield run, [tier for tier in tiers if tier.info.name not in away], away
    finally:
        await asyncio.gather(*(tier.close() for tier in tiers))


async def _chosen(catalog: Catalog, place: refs.Place) -> list[Attempt]:
    if place.kind == "step":
        attempt = Attempt.parse(place.folder.name)
        assert attempt is not None
        if attempt not in catalog.holdings:
            raise uncommitted(place.folder, any(d.attempt == attempt and d.late for d in catalog.debris))
        return [attempt]
    everything = sorted(catalog.holdings, key=lambda a: (a.step, a.epoch, a.call))
    if not place.selected:
        return everything
    between = refs.step_range(place.select)
    if between is not None:
        first, last = between
        return [a for a in everything if first <= a.step and (last is None or a.step <= last)]
    if place.select.isdecimal():
        return [catalog.at_step(int(place.select))[0]]
    current = catalog.newest_first()[::-1]
    if place.select == "latest" and current:
        return current[-1:]
    found = await describe_all(catalog, current)
    name = refs.choose(found, place.select, str(place.folder)).name
    return [attempt for attempt in current if attempt.folder == name]


def uncommitted(folder: Path, late: bool) -> CheckpointNotFound:
    """The error for a step folder that does not count."""
    if late:
        what = "its manifest came after its writer had lost the run, so it does not count"
    else:
        what = "this save was never committed: it has no manifest.json"
    return CheckpointNotFound(what, todo="Choose another checkpoint of the run", path=str(folder))


async def renamed_step(catalog: Catalog, tier: Tier, folder: Path) -> Attempt:
    """A step folder that was copied and is called otherwise now, put into the catalog."""
    where = folder / MANIFEST
    data = await tier.fetch(RecordKey("", f"{folder.name}/{MANIFEST}"))
    if data is None:
        raise uncommitted(folder, late=False)
    manifest = decode(data, Manifest, path=str(where))
    named = Attempt.parse(manifest.attempt)
    if named is None:
        raise FormatError(f"the manifest names no checkpoint: {manifest.attempt!r}", path=str(where))
    attempt = replace(named, renamed=folder.name)
    holding = Holding(tier)
    async for found in tier.scan(folder.name):
        if not found.attempt:
            holding.files[found.name] = found.size_bytes
    catalog.holdings[attempt] = [holding]
    return attempt


def only(opened: Opened) -> Attempt:
    """The one checkpoint that is meant. Raises CheckpointNotFound if there is none, ConfigError if several are."""
    if not opened.chosen:
        steps = ", ".join(map(str, sorted({attempt.step for attempt in opened.catalog.holdings})[-8:])) or "none"
        raise CheckpointNotFound(f"no checkpoint matches {opened.named.text}", todo=f"The newest steps are {steps}")
    if len(opened.chosen) != 1:
        found = ", ".join(str(attempt.step) for attempt in opened.chosen[-8:])
        raise ConfigError(
            f"{opened.named.text} means {len(opened.chosen)} checkpoints", todo=f"Name one of the steps: {found}"
        )
    return opened.chosen[0]


def is_run(folder: Path) -> bool:
    """Whether a folder is a run that some writer has held."""
    return (folder / RUN_FILE).exists() or (folder / EPOCHS).is_dir()
