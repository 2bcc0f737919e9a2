"""One flush, carried out: this rank's part of a checkpoint, from whichever tiers have it, to a tier and its commit."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection, Sequence

from stepwell.chain import Chain, Keep, reserve
from stepwell.deletion import Deleter
from stepwell.errors import (
    CheckpointGone,
    CheckpointNotFound,
    CorruptData,
    NotPlanned,
    RunBusy,
    StepwellError,
    TierError,
    TierFull,
)
from stepwell.flushing import Goal
from stepwell.format.names import GROWING, MANIFEST, Attempt, rank_file
from stepwell.format.records import Growing, Manifest, RankRecord, ShardRecord, decode, encode
from stepwell.groups import either
from stepwell.jobs import wait_for
from stepwell.ownership import Ownership, group_of
from stepwell.reader import read_record
from stepwell.reading import Caller, Healing, Reading
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey, Tier
from stepwell.tiers.host import Priority

#: between two looks whether a copy that is being deleted is gone
BUSY_LOOK_S = 0.05


class FlushWork:
    """Carries out the flushes of one run. Lives on the event loop."""

    def __init__(self, chain: Chain, owner: Ownership, deleter: Deleter, keep: Keep) -> None:
        self._chain, self._owner, self._deleter, self._keep = chain, owner, deleter, keep
        self.being_saved: Callable[[], Collection[tuple[str, str]]] = tuple  # (checkpoint, tier) of saves under way
        self._clearing: dict[tuple[Attempt, str], set[str]] = {}  # copies that were to make way -> the parts they had
        self._moving: dict[tuple[Attempt, str], Caller] = {}  # (checkpoint, tier) -> what the last try has begun

    async def has(self, attempt: Attempt, tier: Tier, parts: Sequence[str] | None) -> bool:
        """Whether these parts (None: all) are committed there."""
        if not any(h.tier is tier for h in self._chain.catalog.holdings.get(attempt, [])):
            return False
        absent = set((await self._chain.catalog.manifest(attempt, tier)).absent)
        return not (absent if parts is None else absent & set(parts))

    async def once(self, tier: Tier, goal: Goal) -> Manifest | None:
        """One try. What it has written stays for the next, unless the tier is full. None if it was there already.

        Raises NotPlanned if the job's leader has taken the flush back meanwhile.
        """
        try:
            if self._owner.job.leader:
                return await self._once(tier, goal)
            return await self._unless_taken_back(tier, goal)
        except (CheckpointNotFound, CorruptData) as error:
            if self._chain.catalog.absent:
                await self._chain.catalog.refresh()  # who did not answer the last scan may have what was not found
                error.retry = True
            raise

    async def _unless_taken_back(self, tier: Tier, goal: Goal) -> Manifest | None:
        work = asyncio.ensure_future(self._once(tier, goal))
        try:
            await either(work, goal.back)
            if not goal.back.is_set() or work.done():
                return work.result()
            work.cancel()
            await asyncio.wait([work])
            await self.forget(goal.attempt, tier)
            raise NotPlanned("rank 0 has taken the flush back", step=goal.attempt.step, tier=tier.info.name)
        except asyncio.CancelledError:
            work.cancel()
            raise

    async def forget(self, attempt: Attempt, tier: Tier) -> None:
        """Frees what this rank's tries of a flush have left on a tier that does not get the checkpoint."""
        copy = (attempt.folder, tier.info.name)
        if copy in self._deleter.busy or self._is_known(attempt, tier):
            return
        self._deleter.busy.add(copy)
        try:
            await self._forget(attempt, tier)
        finally:
            self._deleter.busy.discard(copy)

    async def _forget(self, attempt: Attempt, tier: Tier) -> None:
        chain, rank = self._chain, self._owner.job.rank
        if await self._deleter.waits(attempt, tier):
            return
        record, _ = await read_record(chain.catalog, attempt, rank, Healing())
        if await self._is_committed(attempt, tier, record):
            return
        key = CheckpointKey(chain.run, attempt.folder)
        shards = [ShardKey(key, shard.file) for shard in record.shards]
        await chain.mover.settled(shards)
        await self._owner.writership.require(tier, attempt.step)
        if self._owner.job.world == 1:
            await tier.drop([key])  # a manifest that was to make way goes first
        else:
            names = (rank_file(rank), GROWING)
            await tier.drop([*(RecordKey(chain.run, f"{attempt.folder}/{name}") for name in names), *shards])

    async def _once(self, tier: Tier, goal: Goal) -> Manifest | None:
        chain, attempt = self._chain, goal.attempt
        place = (attempt.folder, tier.info.name)
        # what is left of an earlier try is being removed, or its own save is still writing there
        while place in self._deleter.busy or place in self.being_saved():
            await chain.clock.sleep(BUSY_LOOK_S)
        await self._deleter.spare(attempt, tier)  # of a lost run the next writer's files would be in our hands
        healing = Healing()
        record, data = await read_record(chain.catalog, attempt, self._owner.job.rank, healing)
        wanted = set(record.parts if goal.parts is None else goal.parts) & set(record.parts)
        if await self._is_committed(attempt, tier, record):
            there = set(record.parts) - set((await chain.catalog.manifest(attempt, tier)).absent)
            if wanted <= there:
                await self.confirm(attempt, tier)
                return None
            wanted |= there
            await self._make_way(
                attempt, tier, there, [s for s in record.shards if any(s.file in record.parts[p] for p in there)]
            )
        elif there := self._clearing.get((attempt, tier.info.name), set()):  # the last try got no further
            wanted |= there
            await self._clear(attempt, tier, there)
        files = {file for part in wanted for file in record.parts[part]}
        key = CheckpointKey(chain.run, attempt.folder)
        shards = [shard for shard in record.shards if shard.file in files]
        sizes = [(ShardKey(key, shard.file), shard.size) for shard in shards]
        own = RecordKey(chain.run, f"{attempt.folder}/{rank_file(self._owner.job.rank)}")
        copy = (attempt, tier.info.name)
        if copy in self._moving:
            await self._moving[copy].settled()  # chunks of a try that was broken off
        caller = self._moving[copy] = Caller()
        whole = await self._is_whole(tier, own, data, [key for key, _ in sizes], attempt.step)
        reserved = [] if whole else await self._reserve(tier, attempt.step, sizes)
        sources = [h.tier for h in chain.catalog.holdings.get(attempt, [])]
        # memory may lose it meanwhile, but not before one of the others has it
        sources += [other for other in chain.storage if other is not tier and other not in sources]
        try:
            goal.begin(sum(reservation.size_bytes for reservation in reserved))
            for shard, reservation in zip([] if whole else shards, reserved, strict=True):
                reading = Reading(
                    reservation.shard, sources, shard.crcs(), healing, Priority.FLUSH,
                    target=tier.info.name, write_limit=tier.info.write_bytes_per_s, caller=caller,
                )  # fmt: skip
                await chain.mover.copy(reading, tier, shard.size, resumed=reservation.resumed, on_there=goal.there)
            await self._copy_sidecars(tier, sources, attempt, record)
            await self._owner.write_run_record(tier)
            rest = [ShardKey(key, shard.file) for shard in record.shards if shard.file not in files]
            if rest:  # left by an earlier try of all: beside the record a later writer would take them for whole
                await self._owner.writership.require(tier, attempt.step)
                await tier.drop(rest)
            goal.copied.set()
            absent = sorted(set(record.parts) - wanted)
            manifest = await self._owner.committer.publish(tier, attempt, data, reserved, absent=absent)
        except BaseException as error:
            self._keep(self._let_go(tier, attempt, reserved, keep_bytes=_may_go_on(error)))
            raise
        del self._moving[copy]
        chain.catalog.add(attempt, tier, {shard.file: shard.size for shard in shards}, manifest)
        if chain.host is not None and tier in chain.storage and not absent:
            for shard_key, _ in sizes:  # memory need not keep it any more; of some parts it still has the whole alone
                chain.host.arena.clean(shard_key)
        return manifest

    def _is_known(self, attempt: Attempt, tier: Tier) -> bool:
        return any(h.tier is tier for h in self._chain.catalog.holdings.get(attempt, []))

    async def _is_committed(self, attempt: Attempt, tier: Tier, record: RankRecord) -> bool:
        """Whether a commit of it counts on the tier. Of a tier that did not answer the last scan the catalog knows
        nothing, and of one whose answer to a commit was lost it does not know that; what is whole there must not be
        taken for what a broken try has left."""
        catalog, name = self._chain.catalog, tier.info.name
        if self._is_known(attempt, tier):
            return True
        if (attempt, name) in self._clearing:
            return False  # what is there was to make way
        data = await tier.fetch(self._manifest(attempt))
        if data is None or any((d.attempt, d.tier, d.late) == (attempt, name, True) for d in catalog.debris):
            return False
        try:
            manifest = decode(data, Manifest, step=attempt.step, tier=name)
        except StepwellError:  # it commits nothing
            return False
        await self._make_durable(attempt, tier, data)
        there = {file for part in set(record.parts) - set(manifest.absent) for file in record.parts[part]}
        catalog.add(attempt, tier, {shard.file: shard.size for shard in record.shards if shard.file in there}, manifest)
        return True

    def _manifest(self, attempt: Attempt) -> RecordKey:
        return RecordKey(self._chain.run, f"{attempt.folder}/{MANIFEST}")

    async def _make_durable(self, attempt: Attempt, tier: Tier, manifest: bytes) -> None:
        await self._owner.writership.require(tier, attempt.step)
        await tier.commit(self._manifest(attempt), manifest)

    async def confirm(self, attempt: Attempt, tier: Tier) -> None:
        """Sees to it that a commit which the catalog knows is durable: another process may have been killed, or may
        still wait to hear, between the moment when others could see it and that. Raises RunBusy, CheckpointGone."""
        copy = attempt, tier.info.name
        if copy in self._chain.catalog.confirmed:
            return
        data = await tier.fetch(self._manifest(attempt))
        if data is None:
            raise CheckpointGone("its manifest is gone", step=attempt.step, tier=tier.info.name)
        await self._make_durable(attempt, tier, data)
        self._chain.catalog.confirmed.add(copy)

    async def _reserve(self, tier: Tier, step: int, sizes: Sequence[tuple[ShardKey, int]]) -> list[Reservation]:
        async def ours() -> bool:
            try:
                await self._owner.writership.require(tier, step)
            except StepwellError:
                return False
            return True

        try:
            return await reserve(tier, sizes, resume=True, ours=ours)
        except TierFull:
            self._deleter.hurry(tier)  # the next try finds what that has freed
            raise

    async def _make_way(self, attempt: Attempt, tier: Tier, there: set[str], shards: Sequence[ShardRecord]) -> None:
        """Ends the commit of a partial copy, so that more parts can come: a manifest is never replaced.

        shards: those of this rank that it has. Raises CorruptData, before anything is removed, if they are not good
        elsewhere; with several ranks each looks at its own, and the lowest removes.
        """
        catalog, job = self._chain.catalog, self._owner.job
        manifests = await catalog.manifests(attempt)
        if not any(not m.absent and job.rank in m.covers for other, m in manifests if other is not tier):
            raise CheckpointNotFound(
                "only some parts of the checkpoint are there, and no other tier has all of them",
                todo="Delete the partial copy there, then flush again", step=attempt.step, tier=tier.info.name,
            )  # fmt: skip
        sources = [h.tier for h in catalog.holdings.get(attempt, []) if h.tier is not tier]
        for shard in shards:
            key = ShardKey(CheckpointKey(self._chain.run, attempt.folder), shard.file)
            await self._chain.mover.verify(sources, key, shard.size, shard.crcs())
        covered = self._owner.committer.covered(tier)
        prefix, patience_s = self._way(attempt, tier), self._chain.settings.rank_timeout_seconds
        if job.rank == covered[0]:
            for rank in covered[1:]:
                await wait_for(job.store, f"{prefix}/{rank}", patience_s, f"rank {rank}'s look at step {attempt.step}")
            await self._clear(attempt, tier, there)
        else:
            job.store.put(f"{prefix}/{job.rank}", b"1")
            what = f"the removal of the partial copy of step {attempt.step} by rank {covered[0]}"
            await wait_for(job.store, f"{prefix}/made", patience_s, what)
            catalog.remove(attempt, tier)

    async def _clear(self, attempt: Attempt, tier: Tier, there: set[str]) -> None:
        """Removes what commits a copy, on no more of which anything may count; its shards stay, to go on from.

        Until the new copy is committed other processes may find the checkpoint nowhere: the marker GROWING, which means
        nothing beside a manifest, tells them that it is worth waiting for."""
        copy, job = (attempt, tier.info.name), self._owner.job
        await self._owner.writership.require(tier, attempt.step)
        marker = Growing(parts=sorted(there), made=self._chain.clock.wall())
        await tier.commit(RecordKey(self._chain.run, f"{attempt.folder}/{GROWING}"), encode(marker))
        await self._owner.writership.require(tier, attempt.step)
        self._clearing[copy] = there
        self._chain.catalog.remove(attempt, tier)
        names = [MANIFEST, *(rank_file(rank) for rank in self._owner.committer.covered(tier))]
        await tier.drop([RecordKey(self._chain.run, f"{attempt.folder}/{name}") for name in names])
        del self._clearing[copy]
        job.store.put(f"{self._way(attempt, tier)}/made", b"1")

    def _way(self, attempt: Attempt, tier: Tier) -> str:
        return f"{group_of(self._chain, self._owner.job)}/{attempt.folder}/{tier.info.name}/way"

    async def _is_whole(self, tier: Tier, own: RecordKey, data: bytes, shards: Sequence[ShardKey], step: int) -> bool:
        """Whether an earlier try got as far as the rank's record: then its shards are durable, and stay as they are,
        because its manifest may still be on its way, and a later writer may have taken the attempt for whole."""
        if await tier.fetch(own) != data:
            return False
        try:
            await (await tier.lease(shards)).close()
        except CheckpointGone:  # a deletion that did not get to its end left the record
            await self._owner.writership.require(tier, step)
            await tier.drop([own])
            return False
        return True

    async def _copy_sidecars(self, tier: Tier, sources: Sequence[Tier], attempt: Attempt, record: RankRecord) -> None:
        for file in record.draft.files:
            place = RecordKey(self._chain.run, f"{attempt.folder}/{file}")
            for source in sources:
                if (data := await source.fetch(place)) is not None:
                    await tier.commit(place, data)
                    break

    async def _let_go(self, tier: Tier, attempt: Attempt, reserved: Sequence[Reservation], keep_bytes: bool) -> None:
        await self._chain.mover.settled([reservation.shard for reservation in reserved])
        if keep_bytes:
            return
        with contextlib.suppress(RunBusy):  # they are in the next writer's hands, which may have committed them
            await self._owner.writership.require(tier, attempt.step)
            for reservation in reserved:
                await tier.abort(reservation)


def _may_go_on(error: BaseException) -> bool:
    """Whether the next try should find the bytes of this one."""
    if isinstance(error, CorruptData):
        return error.retry
    return isinstance(error, TierError | asyncio.CancelledError) and not isinstance(error, TierFull)
