"""The reading side: opens a checkpoint's records, and fills tensors from whichever tiers hold good bytes."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import msgspec
import numpy as np

from stepwell import native
from stepwell.catalog import Catalog, Holding
from stepwell.errors import (
    CheckpointGone,
    CheckpointNotFound,
    CorruptData,
    StepwellError,
    TierError,
    TierUnavailable,
    WorldChanged,
)
from stepwell.format.collecting import paused
from stepwell.format.names import MANIFEST, Attempt, rank_file
from stepwell.format.records import RankRecord, ShardRecord, decode
from stepwell.mover import Mover
from stepwell.native import Mark, PieceMap
from stepwell.ranges import Array, piece_map, plan_reads
from stepwell.reading import Caller, Healing, Reading
from stepwell.shards import Layout, OpenShard, recorded_layout
from stepwell.state import Fill
from stepwell.state.alias import Places
from stepwell.state.skeleton import Skeleton, read_skeleton
from stepwell.state.whereabouts import HOST, places_of
from stepwell.tiers.base import CheckpointKey, ChunkIO, Lease, RecordKey, ShardKey, Tier
from stepwell.tiers.host import Priority
from stepwell.unpacking import unpack

#: how long a tier may keep a restore waiting that another tier can serve
LATE_S = 2.0
NO_MARKS: Mapping[int, Mark] = MappingProxyType({})


@dataclass(slots=True, kw_only=True)
class OpenShards:
    """Shards that can be read together. `step` is None for files that are no checkpoint of ours."""

    step: int | None
    shards: list[OpenShard]
    healing: Healing = field(default_factory=Healing)
    caller: Caller = field(default_factory=Caller)


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard whose file is open on the tiers that have it whole, nearest first."""

    key: ShardKey
    shard: ShardRecord
    tiers: list[Tier]


@dataclass(slots=True, kw_only=True)
class OpenCheckpoint(OpenShards):
    """A checkpoint whose records have been read and checked. Close it to give its files back."""

    attempt: Attempt
    record: RankRecord
    catalog: Catalog
    held: list[HeldShard] = field(default_factory=list)
    leases: list[Lease] = field(default_factory=list)
    cached_as: dict[ShardKey, Hashable] = field(default_factory=dict)  # where an arena has them under another name

    def read(self) -> Skeleton:
        """Reads the skeleton and lays out the shards. Takes a while for many tensors: not on the event loop."""
        with paused():
            skeleton = read_skeleton(msgspec.json.decode(self.record.skeleton), f"rank record of step {self.step}")
            self.shards = [
                OpenShard(
                    h.key,
                    h.shard.size,
                    h.tiers,
                    recorded_layout(h.shard, skeleton.leaves),
                    h.shard.crcs(),
                    self.cached_as.get(h.key),
                )  # fmt: skip
                for h in self.held
            ]
        return skeleton

    async def close(self) -> None:
        """Gives the leases back, once reads that were left behind (a timeout) have ended."""
        try:
            await self.caller.settled()
        finally:
            leases, self.leases = self.leases, []
            await _give_back(self.catalog, self.attempt, leases)


async def open_checkpoint(
    catalog: Catalog, attempt: Attempt, rank: int, world: int, parts: Collection[str] | None = None
) -> OpenCheckpoint:
    """Reads and checks the rank's record, and opens the shards that `parts` (default all) lie in.

    Raises StepwellError if no tier has them good: CorruptData names file, key and step; CheckpointGone if it was
    deleted meanwhile.
    """
    leases: list[Lease] = []
    catalog.begin_reading(attempt)  # from before the first look, so that retention leaves what is found
    try:
        try:
            return await _open(catalog, attempt, rank, world, parts, leases)
        except CorruptData as error:
            if not error.retry:
                raise
        await catalog.refresh()
        return await _open(catalog, attempt, rank, world, parts, leases)
    except BaseException:
        await _give_back(catalog, attempt, leases)
        raise


async def _give_back(catalog: Catalog, attempt: Attempt, leases: Sequence[Lease]) -> None:
    try:
        await asyncio.gather(*(lease.close() for lease in leases))
    finally:
        catalog.end_reading(attempt)


async def _open(
    catalog: Catalog, attempt: Attempt, rank: int, world: int, parts: Collection[str] | None, leases: list[Lease]
) -> OpenCheckpoint:
    manifest = await catalog.manifest(attempt)
    if manifest.world != world:
        raise WorldChanged(
            f"the checkpoint was saved by {manifest.world} ranks, this job has {world}",
            todo="Restore with the same number of ranks",
            run=catalog.run,
            step=attempt.step,
        )
    healing = Healing()
    record, _ = await read_record(catalog, attempt, rank, healing)
    holdings = list(catalog.holdings.get(attempt, []))
    opened = OpenCheckpoint(
        step=attempt.step, attempt=attempt, record=record, shards=[], healing=healing, catalog=catalog, leases=leases
    )
    wanted = {file for part, files in record.parts.items() if parts is None or part in parts for file in files}
    opening = [
        _open_shard(catalog, attempt, shard, holdings, opened) for shard in record.shards if shard.file in wanted
    ]
    for answer in await asyncio.gather(*opening, return_exceptions=True):
        if isinstance(answer, BaseException):
            raise answer
        opened.held.append(answer)
    return opened


async def read_record(catalog: Catalog, attempt: Attempt, rank: int, healing: Healing) -> tuple[RankRecord, bytes]:
    """The rank's record and its bytes, from the nearest tier where it is the one that was committed."""
    name = f"{attempt.folder}/{rank_file(rank)}"
    wrong: list[str] = []
    again = False
    holdings = list(catalog.holdings.get(attempt, []))
    gone = not holdings
    for holding in holdings:
        tier = holding.tier.info.name
        try:
            manifest = await catalog.manifest(attempt, holding.tier)
            if rank not in manifest.covers:
                continue
            data = await holding.tier.fetch(RecordKey(catalog.run, name))
            if data is None:
                if await holding.tier.fetch(RecordKey(catalog.run, f"{attempt.folder}/{MANIFEST}")) is None:
                    gone = True
                    continue
                missing = CorruptData("the file is missing", path=name, tier=tier)
                missing.retry = True  # a copy of some parts may have made way in between, and one of all have come
                raise missing
            record = decode(data, RankRecord, path=name, step=attempt.step, tier=tier)
            if native.crc32c(data) != manifest.digests[manifest.covers.index(rank)]:
                raise CorruptData(
                    "the record is not the one that was committed", path=name, step=attempt.step, tier=tier
                )
            return record, data
        except CheckpointNotFound:  # its manifest went since the last scan
            gone = True
        except StepwellError as error:
            wrong.append(f"{tier}: {error}")
            again = again or error.retry or isinstance(error, TierError)
    if gone and not wrong:
        raise _gone(catalog, attempt)
    corrupt = CorruptData(
        f"no tier has a good record of rank {rank}: {'; '.join(wrong)}", path=name, run=catalog.run, step=attempt.step
    )
    corrupt.retry = again
    raise corrupt


def _gone(catalog: Catalog, attempt: Attempt) -> CheckpointGone:
    return CheckpointGone(
        "the checkpoint was deleted meanwhile", todo="Take another one", run=catalog.run, step=attempt.step
    )


async def _open_shard(
    catalog: Catalog, attempt: Attempt, shard: ShardRecord, holdings: Sequence[Holding], opened: OpenCheckpoint
) -> HeldShard:
    """Leases the shard on every tier that has it whole; one that does not answer is left for the end."""
    key = ShardKey(CheckpointKey(catalog.run, attempt.folder), shard.file)
    whole: list[Holding] = []
    for holding in holdings:
        size = holding.files.get(shard.file)
        if size is not None and size != shard.size:
            opened.healing.bad[holding.tier.info.name, key] = f"the file has {size} bytes instead of {shard.size}"
        else:
            whole.append(holding)
    leased: list[Tier] = []
    late: list[Tier] = []
    refused: list[tuple[Tier, StepwellError]] = []
    for holding, lease in zip(whole, await _leases([holding.tier for holding in whole], key), strict=True):
        if isinstance(lease, Lease):
            opened.leases.append(lease)
            leased.append(holding.tier)
        elif lease is None or isinstance(lease, TierUnavailable):
            late.append(holding.tier)  # nothing is known of its bytes
        else:
            refused.append((holding.tier, lease))
    for tier, error in refused:
        if not isinstance(error, CheckpointGone) and await _should_hold(
            catalog, attempt, tier, opened.record, shard.file
        ):
            opened.healing.bad[tier.info.name, key] = f"the file is missing: {error}"
    tiers = leased + late
    if not tiers:
        wrong = "; ".join(f"{name}: {what}" for (name, k), what in opened.healing.bad.items() if k == key)
        if not wrong and (not holdings or any(isinstance(error, CheckpointGone) for _, error in refused)):
            raise _gone(catalog, attempt)
        what = f"no tier has {shard.file} whole: {wrong or 'it is on none'}"
        catalog.require_all_tiers(what)
        corrupt = CorruptData(
            what, path=str(key), step=attempt.step, key=", ".join(sorted(_parts_of(opened.record, shard.file)))
        )
        corrupt.retry = not wrong  # a whole copy may have come since, or while one tier was listed after the other
        raise corrupt
    return HeldShard(key, shard, tiers)


async def _should_hold(catalog: Catalog, attempt: Attempt, tier: Tier, record: RankRecord, file: str) -> bool:
    """Whether the copy on `tier` has the parts that lie in the file. Not if its manifest cannot be read: other copies
    must not suffer from that."""
    try:
        manifest = await catalog.manifest(attempt, tier)
    except StepwellError:
        return False
    return not set(manifest.absent) & _parts_of(record, file)


async def _leases(tiers: Sequence[Tier], key: ShardKey) -> list[Lease | StepwellError | None]:
    """A lease or an error for each tier. Once one has answered, the others get only a moment: None for the late."""
    asking = [asyncio.ensure_future(tier.lease([key])) for tier in tiers]
    waiting: set[asyncio.Future[Lease]] = set(asking)
    try:
        while waiting and not any(ask.done() and ask.exception() is None for ask in asking):
            _, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if waiting:
            _, waiting = await asyncio.wait(waiting, timeout=LATE_S)
    except asyncio.CancelledError:
        for each in asking:
            each.add_done_callback(_close_late)
        raise
    for late in waiting:
        late.add_done_callback(_close_late)
    answers: list[Lease | StepwellError | None] = []
    for ask in asking:
        error = ask.exception() if ask.done() else None
        if error is not None and not isinstance(error, StepwellError):
            raise error
        answers.append(error or (ask.result() if ask.done() else None))
    return answers


def _close_late(late: asyncio.Future[Lease]) -> None:
    if not late.cancelled() and late.exception() is None:
        asyncio.ensure_future(late.result().close())


def _parts_of(record: RankRecord, file: str) -> set[str]:
    return {part for part, files in record.parts.items() if file in files}


async def read_bytes(mover: Mover, tier: Tier, key: ShardKey, length: int) -> bytes:
    """The first `length` bytes of a shard, unchecked."""
    data = bytearray()
    slot = await mover.arena.acquire(Priority.RESTORE)
    try:
        while len(data) < length:
            part = min(mover.arena.slot_bytes, length - len(data))
            [result] = await tier.read([ChunkIO(key, len(data), part, slot.address)])
            if result.error is not None:
                raise result.error
            data += mover.arena.view(slot, part)
    finally:
        mover.arena.release(slot)
    return bytes(data)


async def fill(
    mover: Mover, opened: OpenShards, fills: Sequence[Fill], marks: Mapping[int, Mark] | None = None
) -> None:
    """Reads every label's bytes into its tensor, all shards and tiers in parallel, verified.

    marks: of each GPU that tensors are on, the moment from which on they may be written. Raises CorruptData naming
    file, keys and step if a block is good on no tier; tensors filled before that keep what they got.
    """
    labels = [f.label for f in fills]
    tensors = [f.tensor for f in fills]
    places = np.array(places_of(tensors, [tensor.is_cpu for tensor in tensors]) or [HOST] * len(tensors), np.intp)
    left = len(labels)
    work = []
    for shard in opened.shards:
        known = shard.layout.labels
        here = [i for i, label in enumerate(labels) if label in known]
        if not here:
            continue
        left -= len(here)
        at = np.array([known[labels[i]] for i in here], np.intp)
        targets = [tensors[i] for i in here]
        starts, lengths = shard.layout.begins[at], shard.layout.ends[at] - shard.layout.begins[at]
        sizes = np.array([tensor.nbytes for tensor in targets], np.uint64)
        for wrong in np.flatnonzero(sizes != lengths)[:1]:
            raise CorruptData(
                "the record and the shard disagree on a tensor's size", key=labels[here[wrong]], path=str(shard.key)
            )
        addresses, on = np.array([tensor.data_ptr() for tensor in targets], np.uint64), places[here]
        if len(here) == len(known) and shard.crcs is not None:  # all of the file: its header is verified, too
            header = shard.layout.data_start
            starts, lengths, addresses = _with(starts, 0), _with(lengths, header), _with(addresses, 0)
            on = np.concatenate([[HOST], on])
        work.append((shard, starts, lengths, addresses, targets, on, marks or {}))
    if left:
        absent = min(set(labels).difference(*(shard.layout.labels for shard in opened.shards)))
        raise CorruptData(f"{left} tensors of the record are in no shard, among them {absent!r}", step=opened.step)
    for result in await asyncio.gather(*(fill_runs(mover, opened, *one) for one in work), return_exceptions=True):
        if isinstance(result, BaseException):
            raise result


def _with(values: Array, first: int) -> Array:
    return np.concatenate([np.array([first], np.uint64), values])


async def fill_runs(
    mover: Mover, opened: OpenShards, shard: OpenShard, starts: Array, lengths: Array, addresses: Array, keep: object,
    places: Places | None = None, marks: Mapping[int, Mark] = NO_MARKS,
) -> None:  # fmt: skip
    """Reads bytes [start, start + length) of a shard to addresses in memory, verified. `keep` owns the memory.

    places: the GPU of each address, or HOST; None: all are in host memory. marks: see `fill`.
    """

    def on(place: int) -> PieceMap:
        there = addresses if places is None else np.where(places == place, addresses, np.uint64(0))
        return piece_map(starts, lengths, there, shard.size, keep)

    gpus = [] if places is None else [place for place in np.unique(places).tolist() if place != HOST]
    pieces = on(HOST) if places is None or HOST in places else None
    gpu_pieces = [(gpu, on(gpu)) for gpu in gpus]
    reading = Reading(
        shard.key, shard.tiers, shard.crcs, opened.healing, Priority.RESTORE, pieces, gpu_pieces, marks,
        cached_as=shard.cached_as, caller=opened.caller, size=shard.size, stays=True,
    )  # fmt: skip
    done = None
    if places is not None and mover.gpu is not None:
        done = await unpack(mover, reading, {gpu: int(lengths[places == gpu].sum()) for gpu in gpus})
    if done is not None and places is not None:  # what goes nowhere was only to be verified
        left = (places != done) & (addresses != 0)
        starts, lengths = starts[left], lengths[left]
        reading = replace(reading, gpu_pieces=[each for each in gpu_pieces if each[0] != done])
    try:
        await mover.get(reading, plan_reads(starts, lengths, shard.size, mover.arena.slot_bytes))
    except CorruptData as error:
        block = error.where.get("block")
        names = _labels_in(shard.layout, block) if isinstance(block, int) else []
        where = {**error.where, "step": opened.step, "key": ", ".join(names) or None}
        raise CorruptData(error.what, todo=error.todo, **where) from error


def _labels_in(layout: Layout, block: int) -> list[str]:
    """The tensors that have bytes in a block, a few of them."""
    begin = block * native.BLOCK_BYTES
    return layout.overlapping(begin, begin + native.BLOCK_BYTES)[:4] or ["the header"]
