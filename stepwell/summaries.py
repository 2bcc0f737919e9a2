"""The runs below a folder, each in a few words: where it stands, and who writes it."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from stepwell.catalog import Catalog
from stepwell.describing import describe_all
from stepwell.epochs import describe_self, judge
from stepwell.errors import CheckpointNotFound, StepwellError
from stepwell.format.names import epoch_file
from stepwell.format.records import Beat, EpochRecord, decode
from stepwell.jobs import Job, LocalStore
from stepwell.listing import find_folders
from stepwell.places import run_whole
from stepwell.tiers.base import RecordKey, Tier
from stepwell.tiers.file import FileTier

log = logging.getLogger("stepwell")


@dataclass(frozen=True, slots=True)
class LastWriter:
    """Who wrote a run last."""

    user: str
    host: str
    pid: int
    job: str | None  # of the scheduler
    alive: bool | None  # False: it has closed the run, or is dead; None: that cannot be seen from this machine


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A run, as its folder tells."""

    name: str
    path: Path
    newest_step: int | None  # of the current timeline
    checkpoints: int  # that are committed, abandoned ones included
    size_bytes: int  # of all files of checkpoints and of unfinished saves
    writer: LastWriter | None  # None: nobody has written it yet, or that is noted on another tier
    metrics: dict[str, float]  # of the newest checkpoint


def runs(root: str | os.PathLike[str]) -> list[RunSummary]:
    """The runs in a folder and up to three levels below it, itself included, by path; one listing for each.

    What cannot be read is left out with a warning. Nothing is written. Raises CheckpointNotFound if there is no such
    folder.
    """
    folder = Path(root).expanduser().absolute()
    try:
        found = [path for kind, path, _ in find_folders(folder) if kind == "run"]
    except OSError as error:
        raise CheckpointNotFound(f"the folder cannot be read: {error.strerror}", path=str(folder)) from error
    return run_whole(_summaries(found))


async def _summaries(found: Sequence[Path]) -> list[RunSummary]:
    tiers: dict[Path, Tier] = {}
    made: list[RunSummary] = []
    try:
        for path in found:
            try:
                if path.parent not in tiers:
                    tiers[path.parent] = await _opened(path.parent)
                made.append(await _summary(path, tiers[path.parent]))
            except StepwellError as error:
                log.warning("run %s is left out: %s", path, error)
    finally:
        for tier in tiers.values():
            await tier.close()
    return made


async def _opened(root: Path) -> Tier:
    # only small records are read: nothing of the disk needs to be probed for that
    tier = FileTier(root, read_only=True, engine="threads", direct=False, reading="buffered")
    await tier.start()
    return tier


async def _summary(path: Path, tier: Tier) -> RunSummary:
    catalog = Catalog(path.name, [tier])
    await catalog.refresh()
    catalog.require_all_tiers("the run cannot be listed")
    newest = await describe_all(catalog, catalog.newest_first()[:1])
    held = sum(sum(holding.files.values()) for holdings in catalog.holdings.values() for holding in holdings)
    return RunSummary(
        name=path.name,
        path=path,
        newest_step=next((attempt.step for attempt in catalog.newest_first()), None),
        checkpoints=len(catalog.holdings),
        size_bytes=held + sum(debris.size_bytes for debris in catalog.debris),
        writer=await _writer(path.name, tier, catalog.epochs.get(tier.info.name, [])),
        metrics=newest[0].metrics if newest else {},
    )


async def _writer(run: str, tier: Tier, epochs: Sequence[int]) -> LastWriter | None:
    for epoch in reversed(epochs):
        data = await tier.fetch(RecordKey(run, epoch_file(epoch)))
        beat = await tier.fetch(RecordKey(run, epoch_file(epoch, "beat")))
        try:
            if data is not None:
                last = decode(data, EpochRecord)
                return LastWriter(last.user, last.host, last.pid, last.job, _alive(last, _beat(beat)))
        except StepwellError:  # never whole: it died while it took the run
            continue
    return None


def _beat(data: bytes | None) -> Beat | None:
    try:
        return None if data is None else decode(data, Beat)
    except StepwellError:
        return None


def _alive(last: EpochRecord, beat: Beat | None) -> bool | None:
    me = describe_self(Job(0, 1, LocalStore(), None, 0), 0.0)
    verdict = judge(last, beat, me)
    if verdict == "take":
        return False
    here = me.boot != "" and (last.boot, last.pid_space, last.host) == (me.boot, me.pid_space, me.host)
    return True if verdict == "busy" or here else None
