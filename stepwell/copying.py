"""Copy: a committed checkpoint into another folder, every block verified on the way, committed last.

Into a folder that no writer holds or has held, the checkpoint goes as it is: the same files under the same name.
Into a run that has had a writer it goes as a save of that run would: the next epoch is taken, so that nobody else
writes meanwhile, and the copy is named, and its records are sealed, as a save of that epoch; otherwise later
writers would take it for one that came too late.
"""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from stepwell import native
from stepwell.catalog import Catalog
from stepwell.changing import has_writers, require_writable, taken_over
from stepwell.errors import CheckpointGone, CheckpointNotFound, ConfigError, CorruptData, StepExists, StepwellError
from stepwell.format.names import MANIFEST, Attempt, rank_file
from stepwell.format.records import FileRecord, Manifest, RankRecord, ShardRecord, decode, encode
from stepwell.mover import Mover
from stepwell.places import Named, NoProgress, Progress, Ref, look_up, mover, opened, run_whole
from stepwell.plainfiles import copy_plain, plain_files, plain_target
from stepwell.putting import write
from stepwell.ranges import Read
from stepwell.reading import Healing, Reading
from stepwell.tiers._folders import remove_if_empty, sync_folder
from stepwell.tiers.base import CheckpointKey, ChunkIO, RecordKey, Refused, Reservation, ShardKey, Tier, tier_error
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import Priority

_ONLY_WHOLE = "Only a whole checkpoint is copied: see stepwell verify"


@dataclass(frozen=True, slots=True)
class Copied:
    """One copy that was made, and committed where it is a checkpoint of ours."""

    source: str  # name of its folder
    step: int | None
    path: Path
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Rank:
    """One rank's part of what is to be written."""

    record: RankRecord
    data: bytes  # the record as it was committed
    shards: list[tuple[ShardRecord, ShardKey, list[Tier]]]  # each with the tiers that have it whole


@dataclass(frozen=True, slots=True)
class _Load:
    """What is to be written of one checkpoint."""

    attempt: Attempt
    manifest: Manifest
    data: bytes | None  # the manifest as it was committed; None if no tier alone holds the checkpoint complete
    ranks: dict[int, _Rank]
    sidecars: dict[str, bytes]

    @property
    def size_bytes(self) -> int:
        shards = sum(shard.size for rank in self.ranks.values() for shard, _, _ in rank.shards)
        return shards + sum(map(len, self.sidecars.values()))


def copy(
    ref: Ref,
    target: str | os.PathLike[str],
    progress: Progress | None = None,
    on_copied: Callable[[Copied], None] = lambda _: None,
) -> list[Copied]:
    """Copies what `ref` means into the folder `target`, under its own name; makes the folder if its parent is there.

    One checkpoint (of a run without `@`: the newest), a range, or a plain folder of safetensors files or one of
    its files. When it returns, the copies are durable. Nothing that is there is replaced, and a copy that fails
    or is interrupted leaves nothing behind; those of a range that were made before stay. Raises StepExists if a
    copy's place or its step in the run is taken; CorruptData if a block is bad on every tier of the source;
    RunBusy if `target` is a run that somebody writes; ConfigError if only another tier of it can tell that;
    TierFull and other TierErrors.

    on_copied: is told of each copy as soon as it is durable, on the event loop.
    """
    named = look_up(ref)
    place = Path(target).expanduser().absolute()
    progress = progress or NoProgress()
    with _target(place):
        if named.place.kind == "plain":
            return [_copy_plain(named, place, progress)]
        return run_whole(_copy(named, place, progress, on_copied))


@contextmanager
def _target(place: Path) -> Iterator[None]:
    """Makes the folder; if nothing gets into it, it is removed again."""
    if not place.name:
        raise ConfigError("a copy does not go into the root of the file system", todo="Name a folder in it")
    if Attempt.parse(place.name):
        raise ConfigError("a copy does not go into another checkpoint", todo="Name its run", path=str(place))
    try:
        _make_folder(place)
        made = True
    except FileExistsError:
        made = False
        if not place.is_dir():
            raise ConfigError("it is a file, not a folder", todo="Name a folder", path=str(place)) from None
    except FileNotFoundError:
        raise ConfigError(
            f"its parent does not exist: {place.parent}", todo="Make it first, or mend the path", path=str(place)
        ) from None
    except OSError as error:
        raise tier_error(error.errno or errno.EIO, "cannot make the folder", path=str(place)) from error
    try:
        yield
    except BaseException:
        if made:
            remove_if_empty(str(place))
        raise


def _make_folder(place: Path) -> None:
    """Durably; FileExistsError, if anything is there."""
    place.mkdir()
    try:
        sync_folder(str(place.parent))
    except OSError:
        remove_if_empty(str(place))
        raise


def _copy_plain(named: Named, target: Path, progress: Progress) -> Copied:
    folder, only = named.place.folder, named.place.file
    place = plain_target(folder, only, target)
    size = sum(plain_files(folder, only).values())
    progress.expect(size)
    for written in copy_plain(folder, only, target):
        progress.moved(written)
    return Copied(only or folder.name, None, place, size)


async def _copy(named: Named, target: Path, progress: Progress, on_copied: Callable[[Copied], None]) -> list[Copied]:
    async with opened(named) as run:
        chosen = run.chosen
        if named.place.kind == "run" and not named.place.selected:
            chosen = run.catalog.newest_first()[:1]
        if len(chosen) > 1:  # of a step that was saved again, the one that counts
            current = run.catalog.newest_first()
            chosen = [attempt for attempt in chosen if attempt in current]
        if not chosen:
            raise CheckpointNotFound("there is no checkpoint to copy", path=str(named.place.folder))
        if target in [Path(tier.info.detail.get("path", ""), run.run) for tier in run.tiers]:
            raise ConfigError("the copy would go where the checkpoint is", todo="Name another folder", path=str(target))
        loads = []
        for attempt in chosen:
            async with _still_there(run.catalog, attempt):
                loads.append(await _load(run.catalog, attempt))
        progress.expect(sum(load.size_bytes for load in loads))
        async with _into(target) as home:
            for load in loads:
                home.check_free(load)
            done = []
            for load in loads:
                async with _still_there(run.catalog, load.attempt):
                    done.append(await home.put(load, progress))
                on_copied(done[-1])
            return done


@asynccontextmanager
async def _still_there(catalog: Catalog, attempt: Attempt) -> AsyncIterator[None]:
    """While something is read: bytes that were deleted meanwhile are not bad, but gone. Raises CheckpointGone then."""
    try:
        yield
    except (CorruptData, CheckpointNotFound) as error:
        if not await _is_gone(catalog, attempt):
            raise
        what, todo = "the checkpoint was deleted while it was copied", "Copy another one"
        raise CheckpointGone(what, todo=todo, path=attempt.folder) from error


async def _is_gone(catalog: Catalog, attempt: Attempt) -> bool:
    record = RecordKey(catalog.run, f"{attempt.folder}/{MANIFEST}")
    try:
        return all([await holding.tier.fetch(record) is None for holding in catalog.holdings[attempt]])
    except StepwellError:
        return False


async def _load(catalog: Catalog, attempt: Attempt) -> _Load:
    """Reads all records, each from the nearest tier where it is the one that was committed."""
    manifest, data = await catalog.manifest(attempt), None
    for holding in catalog.holdings[attempt]:
        with suppress(StepwellError):  # another tier's may be good
            there = await catalog.manifest(attempt, holding.tier)
            if there.complete:
                data = await holding.tier.fetch(RecordKey(catalog.run, f"{attempt.folder}/{MANIFEST}"))
                manifest = there
                break
    ranks = {}
    for rank in range(manifest.world):
        record, sealed = await _record(catalog, attempt, rank)
        ranks[rank] = _Rank(record, sealed, [_shard(catalog, attempt, shard) for shard in record.shards])
    sidecars = {name: await _sidecar(catalog, attempt, name, file) for name, file in manifest.files.items()}
    return _Load(attempt, manifest, data, ranks, sidecars)


def _shard(catalog: Catalog, attempt: Attempt, shard: ShardRecord) -> tuple[ShardRecord, ShardKey, list[Tier]]:
    held = catalog.holdings[attempt]
    tiers = [holding.tier for holding in held if holding.files.get(shard.file) == shard.size]
    if not tiers:
        sizes = {size for holding in held if (size := holding.files.get(shard.file)) is not None}
        what = f"has {min(sizes)} bytes instead of {shard.size}" if sizes else "is missing"
        raise CorruptData(f"a shard {what}", todo=_ONLY_WHOLE, path=f"{attempt.folder}/{shard.file}")
    return shard, ShardKey(CheckpointKey(catalog.run, attempt.folder), shard.file), tiers


async def _record(catalog: Catalog, attempt: Attempt, rank: int) -> tuple[RankRecord, bytes]:
    name = f"{attempt.folder}/{rank_file(rank)}"
    why = "it is on no tier"
    for holding in catalog.holdings[attempt]:
        try:
            manifest = await catalog.manifest(attempt, holding.tier)
            data = await holding.tier.fetch(RecordKey(catalog.run, name)) if rank in manifest.covers else None
            if data is not None:
                if native.crc32c(data) != manifest.digests[manifest.covers.index(rank)]:
                    raise CorruptData("it is not the one that was committed", tier=holding.tier.info.name)
                return decode(data, RankRecord), data
        except StepwellError as error:
            why = str(error)
    raise CorruptData(f"the record of rank {rank} cannot be used: {why}", todo=_ONLY_WHOLE, path=name)


async def _sidecar(catalog: Catalog, attempt: Attempt, name: str, file: FileRecord) -> bytes:
    path = f"{attempt.folder}/{name}"
    for holding in catalog.holdings[attempt]:
        with suppress(StepwellError):  # another tier's may be good
            data = await holding.tier.fetch(RecordKey(catalog.run, path))
            if data is not None and len(data) == file.size and native.crc32c(data) == file.crc:
                return data
    raise CorruptData("a sidecar file is missing or damaged", todo=_ONLY_WHOLE, path=path)


# -- the other side ----------------------------------------------------------------------


@asynccontextmanager
async def _into(target: Path) -> AsyncIterator[_Home]:
    """Opens the folder that copies go into; a run is taken over for as long."""
    tier = FileTier(target.parent, name="copy")
    await tier.start()
    try:
        require_writable(tier)
        catalog = Catalog(target.name, [tier])
        await catalog.refresh()
        catalog.require_all_tiers("the folder cannot be listed")
        if not has_writers(target.name, [tier]):
            yield _Home(target, tier, catalog, None)
            return
        async with taken_over(catalog, tier) as epoch:
            yield _Home(target, tier, catalog, epoch)
    finally:
        await tier.close()


class _Home:
    """A folder that copies go into."""

    def __init__(self, folder: Path, tier: Tier, catalog: Catalog, epoch: int | None) -> None:
        """epoch: that of the run, which was taken over; None for a folder without a writer."""
        self._folder, self._tier, self._catalog, self._epoch = folder, tier, catalog, epoch
        self._mover: Mover = mover()
        self._calls = 0

    async def put(self, load: _Load, progress: Progress) -> Copied:
        """Writes one checkpoint and commits it."""
        attempt, manifest, records = await self._named(load)
        place = self._folder / attempt.folder
        key = CheckpointKey(self._catalog.run, attempt.folder)
        granted: list[Reservation] = []
        self._begin(place)
        try:
            for number, rank in load.ranks.items():
                rooms = [await self._reserve(ShardKey(key, s.file), s.size, granted) for s, _, _ in rank.shards]
                for room, (shard, source, tiers) in zip(rooms, rank.shards, strict=True):
                    await self._move(source, tiers, room.shard, shard, progress)
                await self._commit(key, rank_file(number), records[number], rooms)
            for name, data in load.sidecars.items():
                await self._commit(key, name, data, [])
                progress.moved(len(data))
            await self._commit(key, MANIFEST, manifest, [])
        except BaseException:
            await self._mover.settled([source for rank in load.ranks.values() for _, source, _ in rank.shards])
            await self._undo(key, granted)
            raise
        return Copied(load.attempt.folder, attempt.step, place, load.size_bytes)

    def _begin(self, place: Path) -> None:
        """Makes the copy's folder: what is in it is this copy's alone, so that it may be removed again."""
        try:
            _make_folder(place)
        except FileExistsError:
            raise StepExists(
                "another copy or save of it has come meanwhile; it was left alone",
                todo="See stepwell ls",
                path=str(place),
            ) from None
        except OSError as error:
            raise tier_error(error.errno or errno.EIO, "cannot make the folder", path=str(place)) from error

    async def _named(self, load: _Load) -> tuple[Attempt, bytes, dict[int, bytes]]:
        """The copy's name, manifest and records: as they were, or, in a run, those of a save of this epoch."""
        manifest = msgspec.structs.replace(load.manifest)
        attempt = Attempt.parse(manifest.attempt)
        assert attempt is not None  # checked when it was opened
        records = {number: rank.data for number, rank in load.ranks.items()}
        if self._epoch is None and load.data is not None:
            return attempt, load.data, records
        if self._epoch is not None:
            self._calls += 1
            attempt = Attempt(self._epoch, self._calls, attempt.step)
            manifest.attempt, manifest.parent = attempt.folder, None
            newest = await self._catalog.newest_manifest()
            if newest is not None:
                manifest.run_id, manifest.timeline, manifest.rewinds = newest.run_id, newest.timeline, newest.rewinds
            records = {number: _renamed(rank.record, manifest) for number, rank in load.ranks.items()}
        manifest.parts, manifest.absent = _parts(load), []
        manifest.covers, manifest.digests = list(records), [native.crc32c(data) for data in records.values()]
        return attempt, encode(manifest), records

    def check_free(self, load: _Load) -> None:
        """Raises StepExists if the checkpoint's step or folder is taken."""
        taken = [known for known in self._catalog.newest_first() if known.step == load.manifest.step]
        if taken:
            raise StepExists(
                f"step {load.manifest.step} is there already; nothing was written",
                todo="Name another folder, or delete that checkpoint first",
                path=str(self._folder / taken[0].folder),
            )
        place = self._folder / load.manifest.attempt
        if self._epoch is None and os.path.lexists(place):
            raise StepExists(
                "what is left of another copy or save lies there; nothing was written",
                todo=f"If nobody writes it any more, delete it: stepwell rm '{place}'",
                path=str(place),
            )

    async def _reserve(self, key: ShardKey, size: int, granted: list[Reservation]) -> Reservation:
        answer = await self._tier.reserve(key, size)
        if isinstance(answer, Refused):
            number = {"full": errno.ENOSPC, "read-only": errno.EROFS}.get(answer.reason, errno.EIO)
            raise tier_error(number, f"no room for the copy: {answer.detail}", path=str(self._folder))
        granted.append(answer)
        return answer

    async def _move(
        self, source: ShardKey, tiers: Sequence[Tier], target: ShardKey, shard: ShardRecord, progress: Progress
    ) -> None:
        async def then(read: Read, address: int) -> None:
            await write(self._tier, ChunkIO(target, read.start, read.length, address))
            progress.moved(read.length)

        reading = Reading(source, tiers, shard.crcs(), Healing(), Priority.RESTORE, target=self._tier.info.name)
        await self._mover.get(reading, self._mover.all_of(shard.size), then)

    async def _commit(self, key: CheckpointKey, name: str, data: bytes, shards: list[Reservation]) -> None:
        """Raises StepExists if somebody else wrote the file: nothing is ever replaced."""
        if not await self._tier.commit(RecordKey(key.run, f"{key.attempt}/{name}"), data, shards=shards):
            raise StepExists("somebody else writes there", path=str(self._folder / key.attempt / name))

    async def _undo(self, key: CheckpointKey, granted: list[Reservation]) -> None:
        for room in granted:
            await self._tier.abort(room)
        await self._tier.drop([key])


def _renamed(record: RankRecord, manifest: Manifest) -> bytes:
    """A rank's record for the checkpoint that `manifest` names now."""
    draft = msgspec.structs.replace(
        record.draft, run_id=manifest.run_id, parent=None, timeline=manifest.timeline, rewinds=manifest.rewinds
    )
    return encode(msgspec.structs.replace(record, attempt=manifest.attempt, draft=draft))


def _parts(load: _Load) -> dict[str, int]:
    """Bytes of every part over all ranks."""
    parts: dict[str, int] = {}
    for rank in load.ranks.values():
        for part, size in rank.record.part_bytes.items():
            parts[part] = parts.get(part, 0) + size
    return parts
