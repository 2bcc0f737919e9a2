"""Verify: every byte that a checkpoint's records vouch for is read and checked, and what disagrees is listed.

Nothing is mended here: a writer's restore repairs from another tier, and the next writer removes what killed
saves left. Each tier is checked by itself, so a bad copy shows even where another tier has a good one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from stepwell import native
from stepwell.catalog import Catalog, Debris, Holding
from stepwell.edges import VERIFY
from stepwell.errors import CheckpointNotFound, CorruptData, StepwellError
from stepwell.format.names import (
    DELETED,
    GROWING,
    MANIFEST,
    RUN_FILE,
    Attempt,
    epoch_file,
    is_grown,
    note_file,
    rank_file,
    rank_of,
)
from stepwell.format.records import (
    EpochRecord,
    Manifest,
    Note,
    RankRecord,
    Rewound,
    RunRecord,
    Sealed,
    Seen,
    ShardRecord,
    decode,
)
from stepwell.mover import Mover
from stepwell.places import Named, NoProgress, Opened, Progress, Ref, look_up, mover, opened, run_whole
from stepwell.plainfiles import check_plain
from stepwell.ranges import Read
from stepwell.reading import Crcs, Healing, Reading
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey, Tier
from stepwell.tiers.host import Priority

if TYPE_CHECKING:
    from stepwell.shards import Layout

R = TypeVar("R", bound=Sealed)

#: chunks of one shard that are checked at once; with several shards one after the other enough for any disk
CHUNKS_AT_ONCE = 16
#: tensors that are named for each bad block
TENSORS_NAMED = 4


@dataclass(frozen=True, slots=True)
class Problem:
    """One disagreement between the records and a file."""

    file: str
    what: str
    block: int | None = None  # number of the MiB that is bad
    tensors: Sequence[str] = ()  # some of those that have bytes there


@dataclass(slots=True)
class Verified:
    """What was checked of one checkpoint on one tier, and what is wrong with it."""

    checkpoint: str  # its folder's name
    step: int | None  # None for files that are no checkpoint of ours
    tier: str
    checksums: bool = True  # False: only the structure could be checked
    files: int = 0
    checked_bytes: int = 0
    problems: list[Problem] = field(default_factory=list)
    strangers: list[str] = field(default_factory=list)  # files that no record tells of


@dataclass(slots=True)
class Report:
    """What `verify` found."""

    ref: str
    checked: list[Verified] = field(default_factory=list)
    records: list[Verified] = field(default_factory=list)  # the run's own records on each tier
    debris: list[Debris] = field(default_factory=list)  # no fault: saves that were never committed

    @property
    def problems(self) -> int:
        return sum(len(one.problems) for one in (*self.checked, *self.records))


def verify(ref: Ref, progress: Progress | None = None, report: Report | None = None) -> Report:
    """Checks one checkpoint, a range, or with a run's path the whole run, its own records too. Foreign safetensors
    files carry no checksums: of them only the structure is checked.

    What is wrong is in the report; raises only if there is nothing that could be checked: CheckpointNotFound,
    FormatError, TierUnavailable.

    report: is filled, one checkpoint after the other, so that what was found is known after an interrupt, too.
    """
    named = look_up(ref)
    progress, report = progress or NoProgress(), report or Report(named.text)
    if named.place.kind == "plain":
        folder, only = named.place.folder, named.place.file
        sizes, wrong = check_plain(folder, only)
        problems = [Problem(file, what) for file, what in wrong]
        report.checked.append(Verified(folder.name, None, "disk", False, len(sizes), 0, problems))
    else:
        run_whole(_verify(named, progress, report))
    return report


async def _verify(named: Named, progress: Progress, report: Report) -> None:
    async with opened(named) as run:
        pairs = [(attempt, holding) for attempt in run.chosen for holding in run.catalog.holdings[attempt]]
        if named.place.selected and not pairs:
            raise CheckpointNotFound("no checkpoint matches", todo="See stepwell ls", path=str(named.place.folder))
        for _, holding in pairs:
            progress.expect(sum(holding.files.values()))
        for attempt, holding in pairs:
            checker = _Checker(run, attempt, holding, progress)
            found = await checker.check()
            if not (found.problems and await checker.replaced()):
                report.checked.append(found)
        if named.place.kind == "run" and not named.place.selected:
            report.records = [await _run_records(run, tier) for tier in run.tiers]
            report.debris = sorted(run.catalog.debris, key=lambda d: (d.attempt.step, d.attempt))


async def _run_records(run: Opened, tier: Tier) -> Verified:
    """Checks what says which run this is, who wrote it, and what counts. A heartbeat need not be whole."""
    out = Verified(run.run, None, tier.info.name)
    wanted: dict[str, type[Sealed]] = {RUN_FILE: RunRecord}
    for epoch in run.catalog.epochs.get(tier.info.name, []):
        wanted |= {epoch_file(epoch): EpochRecord, epoch_file(epoch, "seen.json"): Seen}
        wanted[epoch_file(epoch, "rewind.json")] = Rewound
    if tier is run.catalog.notes.tier:
        wanted |= {note_file(number): Note for number in run.catalog.notes.numbers}
    for name, kind in wanted.items():
        try:
            data = await tier.fetch(RecordKey(run.run, name))
            if data is not None:
                out.files += 1
                out.checked_bytes += len(data)
                decode(data, kind)
        except StepwellError as error:
            out.problems.append(Problem(name, error.what))
    return out


class _Checker:
    """Checks one checkpoint on one tier."""

    def __init__(self, run: Opened, attempt: Attempt, holding: Holding, progress: Progress) -> None:
        self._catalog: Catalog = run.catalog
        self._attempt, self._files, self._tier = attempt, holding.files, holding.tier
        self._mover: Mover = mover()
        self._progress = progress
        self._told = 0  # bytes that the progress has heard of
        self._known, self._manifest = {MANIFEST}, b""
        self._out = Verified(attempt.folder, attempt.step, holding.tier.info.name)

    async def check(self) -> Verified:
        manifest, self._manifest = await self._record(MANIFEST, Manifest)
        if manifest is not None:
            if manifest.attempt != self._attempt.folder and self._attempt.renamed is None:
                self._bad(MANIFEST, f"it is that of {manifest.attempt}")
            for name, sidecar in manifest.files.items():
                await self._sidecar(name, sidecar.size, sidecar.crc)
            for rank, digest in zip(manifest.covers, manifest.digests, strict=False):
                await self._rank(rank, digest, manifest)
            self._out.strangers = sorted(name for name in self._files if not self._ours(name))
        self._progress.moved(sum(self._files.values()) - self._told)
        return self._out

    async def replaced(self) -> bool:
        """Whether somebody has deleted the checkpoint since it was looked at, or made a copy of more of its parts: then
        nothing is known to be wrong with it."""
        try:
            now = await self._tier.fetch(RecordKey(self._catalog.run, f"{self._attempt.folder}/{MANIFEST}"))
        except StepwellError:
            return False
        return now is None or (self._manifest != b"" and now != self._manifest)

    def _ours(self, name: str) -> bool:
        markers = name in (DELETED, GROWING) or is_grown(name) or name.startswith("repair-")
        return name in self._known or markers or rank_of(name) is not None

    def _bad(self, file: str, what: str, block: int | None = None, tensors: Sequence[str] = ()) -> None:
        self._out.problems.append(Problem(file, what, block, tensors))

    def _count(self, size: int) -> None:
        self._out.files += 1
        self._counted(size)

    def _counted(self, size: int) -> None:
        self._out.checked_bytes += size
        self._told += size
        self._progress.moved(size)

    async def _fetch(self, name: str) -> bytes | None:
        """The file's bytes; notes what is wrong if there are none."""
        try:
            data = await self._tier.fetch(RecordKey(self._catalog.run, f"{self._attempt.folder}/{name}"))
        except StepwellError as error:
            self._bad(name, f"it cannot be read: {error}")
            return None
        if data is None:
            self._bad(name, "the file is missing")
        else:
            self._count(len(data))
        return data

    async def _record(self, name: str, kind: type[R]) -> tuple[R | None, bytes]:
        """What the file says, and its bytes; of one that could not be read there are none."""
        data = await self._fetch(name)
        try:
            return (decode(data, kind), data) if data is not None else (None, b"")
        except StepwellError as error:
            self._bad(name, error.what)
            return None, data or b""

    async def _sidecar(self, name: str, size: int, crc: int) -> None:
        self._known.add(name)
        data = await self._fetch(name)
        if data is not None and len(data) != size:
            self._bad(name, f"the file has {len(data)} bytes instead of {size}")
        elif data is not None and native.crc32c(data) != crc:
            self._bad(name, "its checksum is wrong")

    async def _rank(self, rank: int, digest: int, manifest: Manifest) -> None:
        name = rank_file(rank)
        record, data = await self._record(name, RankRecord)
        if record is None:
            return
        if native.crc32c(data) != digest:
            self._bad(name, "it is not the record that was committed")
            return
        absent = set(manifest.absent)
        for shard in record.shards:
            parts = {part for part, files in record.parts.items() if shard.file in files}
            self._known.add(shard.file)
            if shard.file in self._files or not parts or parts - absent:
                await self._shard(record, shard)

    # -- shards --------------------------------------------------------------------------

    async def _shard(self, record: RankRecord, shard: ShardRecord) -> None:
        size = self._files.get(shard.file)
        if size is None:
            self._bad(shard.file, "the file is missing")
            return
        if size != shard.size:
            self._bad(shard.file, f"the file has {size} bytes instead of {shard.size}")
            return
        self._out.files += 1
        key = ShardKey(CheckpointKey(self._catalog.run, self._attempt.folder), shard.file)
        try:
            lease = await self._tier.lease([key])
        except StepwellError as error:
            self._bad(shard.file, f"it cannot be opened: {error}")
            return
        try:
            bad = await self._bad_blocks(key, shard)
        finally:
            await self._mover.settled([key])
            await lease.close()
        names = _Names(record, shard)
        for block, what in bad:
            self._bad(shard.file, what, block=block, tensors=names.inside(block) if block is not None else [])

    async def _bad_blocks(self, key: ShardKey, shard: ShardRecord) -> list[tuple[int | None, str]]:
        """(number, what is wrong) of each bad block; the number is None where more than a block is."""
        crcs = shard.crcs()
        if len(crcs) != -(-shard.size // native.BLOCK_BYTES):
            return [(None, "the record's checksums do not fit the file's size")]
        found: list[tuple[int | None, str]] = []
        free = asyncio.Semaphore(CHUNKS_AT_ONCE)

        async def one(chunk: Read) -> None:
            async with free:
                if await self._wrong(key, chunk, crcs) is not None:  # find out which of its blocks, each by itself
                    for block in _blocks(chunk):
                        what = await self._wrong(key, block, crcs)
                        if what is not None:
                            found.append((block.start // native.BLOCK_BYTES, what))
                self._counted(chunk.length)

        await asyncio.gather(*(one(chunk) for chunk in self._mover.all_of(shard.size)))
        return sorted(found, key=lambda bad: bad[0] or 0)

    async def _wrong(self, key: ShardKey, read: Read, crcs: Crcs) -> str | None:
        """What is wrong with these bytes; None if they are good."""
        healing = Healing()
        try:
            await self._mover.get(Reading(key, [self._tier], crcs, healing, Priority.RESTORE, target=VERIFY), [read])
        except CorruptData:
            return "; ".join(healing.bad.values()) or "it cannot be read"
        return None


def _blocks(chunk: Read) -> Iterator[Read]:
    end = chunk.start + chunk.length
    for start in range(chunk.start, end, native.BLOCK_BYTES):
        yield Read(start, min(native.BLOCK_BYTES, end - start))


class _Names:
    """Which tensors lie in which block of a shard. The skeleton is read only if it is asked for."""

    def __init__(self, record: RankRecord, shard: ShardRecord) -> None:
        self._record, self._shard = record, shard
        self._layout: Layout | None = None

    def inside(self, block: int) -> list[str]:
        begin = block * native.BLOCK_BYTES
        try:
            names = self._read().overlapping(begin, begin + native.BLOCK_BYTES)
        except StepwellError:
            return []  # the record is good, so this is a newer or odd skeleton: the block's number must do
        return names[:TENSORS_NAMED] or ["the header"]

    def _read(self) -> Layout:
        if self._layout is None:
            from stepwell.listing import layout_of

            self._layout = layout_of(self._record, self._shard)
        return self._layout
