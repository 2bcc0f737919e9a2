"""The commit protocol: rank records, then one manifest, published by the leader and never replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec

from stepwell import native
from stepwell.catalog import Catalog, Holding
from stepwell.epochs import Writership, describe_self
from stepwell.errors import CheckpointGone, CorruptData, SaveFailed, StepwellError, StoreClosed
from stepwell.format.names import GROWING, MANIFEST, Attempt, is_grown, rank_file, rank_of
from stepwell.format.records import Draft, Growing, Manifest, RankRecord, ShardRecord, decode, encode
from stepwell.jobs import GivenUp, Job, wait_for
from stepwell.saving import Order
from stepwell.shardjob import ShardJob
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey, Tier

log = logging.getLogger("stepwell")


def rank_record(order: Order, attempt: Attempt, jobs: Sequence[ShardJob], draft: Draft) -> bytes:
    """This rank's record, once every block has been copied and checksummed."""
    shards = [
        ShardRecord(
            file=job.key.name,
            size=job.size,
            data_start=len(shard.header),
            leaves=shard.leaves.astype("<u4").tobytes(),
            blocks=job.crcs.astype("<u4").tobytes(),
        )
        for job, shard in zip(jobs, order.snapshot.shards, strict=True)
    ]
    record = RankRecord(
        step=order.step,
        attempt=attempt.folder,
        rank=order.job.rank,
        world=order.job.world,
        parts=order.snapshot.parts,
        part_bytes=order.snapshot.part_bytes,
        shards=shards,
        draft=draft,
        skeleton=msgspec.Raw(order.snapshot.encoded_skeleton()),
    )
    return encode(record)


def manifest_of(attempt: Attempt, records: dict[int, bytes], absent: Sequence[str] = ()) -> Manifest:
    """The commit record that follows from the ranks' records; the lowest rank's draft speaks for all."""
    ranks = {rank: decode(data, RankRecord, rank=rank, step=attempt.step) for rank, data in sorted(records.items())}
    first = next(iter(ranks.values()))
    parts: dict[str, int] = {}
    for record in ranks.values():
        if record.attempt != attempt.folder:
            raise CorruptData("a rank's record belongs to another attempt", step=attempt.step, rank=record.rank)
        for part, size in record.part_bytes.items():
            if part not in absent:
                parts[part] = parts.get(part, 0) + size
    draft = first.draft
    return Manifest(
        run_id=draft.run_id,
        step=attempt.step,
        attempt=attempt.folder,
        world=first.world,
        parts=parts,
        absent=list(absent),
        covers=list(ranks),
        digests=[native.crc32c(records[rank]) for rank in ranks],
        files=draft.files,
        metrics=draft.metrics,
        tags=draft.tags,
        parent=draft.parent,
        timeline=draft.timeline,
        rewinds=draft.rewinds,
        made=draft.made,
        seconds=draft.seconds,
    )


#: between two looks for a record that was announced and is not there
AGAIN_S = 0.25


class Committer:
    """Commits attempts for one process of a job."""

    def __init__(self, run: str, job: Job, writership: Writership, group: str, rank_timeout_s: float) -> None:
        """group: begins this store's keys in the job's store; the same on all ranks, used by no other store."""
        self.run, self.job, self.writership = run, job, writership
        self.group, self._timeout_s = group, rank_timeout_s
        self._homes: list[str] = []

    async def meet(self) -> None:
        """Learns which ranks share this node, by the kernel's boot id."""
        store, group = self.job.store, self.group
        store.put(f"{group}/home/{self.job.rank}", (describe_self(self.job, 0.0).boot or "?").encode())
        homes = [
            wait_for(store, f"{group}/home/{rank}", self._timeout_s, f"rank {rank}") for rank in range(self.job.world)
        ]
        self._homes = [home.decode() for home in await asyncio.gather(*homes)]

    def covered(self, tier: Tier) -> list[int]:
        """The ranks whose records lie on `tier` as this process sees it."""
        if tier.info.scope == "process":
            return [self.job.rank]
        mine = self._homes[self.job.rank]
        return [rank for rank, home in enumerate(self._homes) if tier.info.scope == "shared" or home == mine]

    async def publish(
        self, tier: Tier, attempt: Attempt, record: bytes, reserved: Sequence[Reservation], absent: Sequence[str] = (),
        turn: int | None = None, given_up: str | None = None, on_announced: Callable[[], object] = lambda: None,
    ) -> Manifest:  # fmt: skip
        """Makes this rank's shards and record durable, and returns when the manifest is there, too.

        The lowest rank on the tier publishes it, after every other rank there has announced its record.
        turn: the number of the try, the same on all ranks, if the tier may get the checkpoint more than once: what they
        told each other the last time means nothing then. given_up: the key under which a rank says that it gives the
        save up; then it is not published, unless all had announced theirs. on_announced: from then on the lowest rank
        may publish it at any time. Raises RunBusy if another writer has taken the run meanwhile; SaveFailed.
        """
        own = RecordKey(self.run, f"{attempt.folder}/{rank_file(self.job.rank)}")
        await self._put_record(tier, own, record, reserved, attempt.step)
        prefix = self._prefix(tier, attempt, turn, absent)
        covered = self.covered(tier)
        store, leader = self.job.store, covered[0]
        if self.job.rank != leader:
            store.put(f"{prefix}/rank-{self.job.rank}", native.crc32c(record).to_bytes(4, "little"))
            on_announced()
            data = await self.word(
                leader, f"{prefix}/manifest", f"the manifest of step {attempt.step} by rank {leader}"
            )
            if not data:
                raise SaveFailed(f"rank {leader} gave this save up", step=attempt.step, tier=tier.info.name)
            return decode(data, Manifest, step=attempt.step, tier=tier.info.name)
        manifest = manifest_of(attempt, await self._parts(tier, attempt, prefix, record, given_up), absent)
        await self._put_manifest(tier, attempt, manifest)
        store.put(f"{prefix}/manifest", encode(manifest))
        return manifest

    async def word(self, rank: int, key: str, what: str, given_up: str | None = None) -> bytes:
        """What a rank says under a key. given_up: where any rank says that it gives a save up.

        Raises WaitTimeout; SaveFailed if a save is given up; StoreClosed if the rank has closed its store.
        """
        unless = [self._left(rank), *([] if given_up is None else [given_up])]
        try:
            return await wait_for(self.job.store, key, self._timeout_s, what, unless)
        except GivenUp as error:
            if given_up is not None:
                raise SaveFailed(f"another rank gave this save up: {error}") from None
            raise StoreClosed(f"{error}; {what} does not come") from None

    def leave(self) -> None:
        """This rank closes its store: it says nothing more."""
        if self.job.world > 1:
            self._say(self._left(self.job.rank), f"rank {self.job.rank} has closed its store".encode())

    def has_left(self, rank: int) -> bool:
        """Whether it has."""
        return self.job.store.poll(self._left(rank)) is not None

    def _left(self, rank: int) -> str:
        return f"{self.group}/left/{rank}"

    def withdraw(self, tier: Tier, attempt: Attempt) -> None:
        """This rank has given a save up, and publishes it no more: who has announced its part need not wait."""
        if self.job.world > 1 and self.covered(tier)[0] == self.job.rank:
            self._say(f"{self._prefix(tier, attempt)}/manifest", b"")

    def _say(self, key: str, data: bytes) -> None:
        """What others need not hear: at the end the job's store may be gone before us."""
        try:
            self.job.store.put(key, data)
        except Exception as error:
            log.debug("could not tell the other ranks %s: %s", key, error)

    def _prefix(self, tier: Tier, attempt: Attempt, turn: int | None = None, absent: Sequence[str] = ()) -> str:
        home = self._homes[self.job.rank] if tier.info.scope != "shared" else ""
        return f"{self.group}/{attempt.folder}/{tier.info.name}/{home}/{turn}/without-{'+'.join(sorted(absent))}"

    async def _parts(
        self, tier: Tier, attempt: Attempt, prefix: str, record: bytes, given_up: str | None
    ) -> dict[int, bytes]:
        """The records of all ranks on the tier, this one's among them, once they have announced them."""
        records = {self.job.rank: record}
        for rank in self.covered(tier)[1:]:
            what = f"rank {rank}'s part of step {attempt.step}"
            digest = await self.word(rank, f"{prefix}/rank-{rank}", what, given_up)
            theirs = await self._announced(tier, attempt, rank)
            if theirs is None or native.crc32c(theirs) != int.from_bytes(digest, "little"):
                raise CorruptData(
                    "a rank's record is not the one it announced", rank=rank, step=attempt.step, tier=tier.info.name
                )
            records[rank] = theirs
        return records

    async def _announced(self, tier: Tier, attempt: Attempt, rank: int) -> bytes | None:
        """A rank's record; one that is not there was announced by a try that another one of that rank goes on from."""
        for _ in range(int(self._timeout_s / AGAIN_S) + 1):
            record = await tier.fetch(RecordKey(self.run, f"{attempt.folder}/{rank_file(rank)}"))
            if record is not None:
                return record
            await asyncio.sleep(AGAIN_S)
        return None

    async def _put_record(
        self, tier: Tier, own: RecordKey, record: bytes, reserved: Sequence[Reservation], step: int
    ) -> None:
        """This rank's record, with its shards durable before it."""
        if await tier.commit(own, record, shards=reserved):
            return
        if reserved or await tier.fetch(own) != record:
            await self.writership.require(tier, step)
            # an earlier try got as far as the record; since then its shards were reserved and perhaps written again,
            # and a commit that finds its record makes nothing durable. Or the record went bad: it is this rank's alone
            await tier.drop([own])
            if not await tier.commit(own, record, shards=reserved):
                raise CorruptData("another process writes this attempt", path=str(own), tier=tier.info.name)

    async def _put_manifest(self, tier: Tier, attempt: Attempt, manifest: Manifest) -> None:
        await self.writership.require(tier, attempt.step)
        await tier.commit(RecordKey(self.run, f"{attempt.folder}/{MANIFEST}"), encode(manifest))

    async def adopt(self, catalog: Catalog) -> list[tuple[Attempt, str]]:
        """Commits attempts of dead writers that lack nothing but the manifest."""
        adopted = []
        for debris in catalog.debris:
            tier = next(t for t in catalog.tiers if t.info.name == debris.tier)
            if debris.late or debris.attempt.epoch >= self.writership.epoch or tier.info.read_only:
                continue
            try:
                if await self.commit_again(tier, debris.attempt) is not None:
                    adopted.append((debris.attempt, debris.tier))
            except StepwellError:
                continue
        return adopted

    async def commit_again(self, tier: Tier, attempt: Attempt) -> Manifest | None:
        """Commits what lacks nothing but the manifest; None if it lacks more. What was to be added to a copy, and is
        not all there, goes."""
        holding = await self._files(tier, attempt)
        absent = await self._absent(tier, attempt, holding)
        records = await self._whole(tier, attempt, holding, absent)
        if records is None:
            return None
        manifest = manifest_of(attempt, records, absent)
        await self._put_manifest(tier, attempt, manifest)
        decoded = [decode(data, RankRecord) for data in records.values()] if absent else []
        rest = {s.file for r in decoded for s in r.shards if s.file not in r.files_of(manifest.parts)}
        if rest := rest & holding.files.keys():
            await tier.drop([ShardKey(CheckpointKey(self.run, attempt.folder), file) for file in sorted(rest)])
        return manifest

    async def _files(self, tier: Tier, attempt: Attempt) -> Holding:
        holding = Holding(tier)
        async for found in tier.scan(self.run):
            if found.attempt == attempt.folder and found.name:
                holding.files[found.name] = found.size_bytes
        return holding

    async def _absent(self, tier: Tier, attempt: Attempt, holding: Holding) -> list[str]:
        """The parts that it is to lack. Of a copy that made way to one of more parts, these are the old one's until
        what each rank adds is there: before that the size of a file does not tell that its bytes are durable."""
        if GROWING not in holding.files:
            return []
        grown = [name for name in holding.files if is_grown(name)]
        told = grown[0] if grown and len(grown) == len(_ranks(holding.files)) else GROWING
        data = await tier.fetch(RecordKey(self.run, f"{attempt.folder}/{told}"))
        if data is None:
            raise CheckpointGone("somebody else removes it", step=attempt.step, tier=tier.info.name)
        return decode(data, Growing, step=attempt.step, tier=tier.info.name).absent

    async def _whole(
        self, tier: Tier, attempt: Attempt, holding: Holding, absent: Sequence[str]
    ) -> dict[int, bytes] | None:
        """All ranks' records, if they and the files they tell of, but for those of absent parts, are all there."""
        records: dict[int, bytes] = {}
        world = 0
        for rank in _ranks(holding.files):
            data = await tier.fetch(RecordKey(self.run, f"{attempt.folder}/{rank_file(rank)}"))
            if data is None:
                return None
            record = decode(data, RankRecord)
            wanted = record.files_of(set(record.parts).difference(absent))
            if any(holding.files.get(shard.file) != shard.size for shard in record.shards if shard.file in wanted):
                return None
            if any(holding.files.get(name) != file.size for name, file in record.draft.files.items()):
                return None
            records[rank], world = data, record.world
        return records if records and sorted(records) == list(range(world)) else None


def _ranks(names: Iterable[str]) -> list[int]:
    return sorted(rank for name in names if (rank := rank_of(name)) is not None)
