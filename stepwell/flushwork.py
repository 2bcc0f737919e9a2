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
from stepwell.flushing import Goal, OutOfTurn
from stepwell.flushturns import FlushTurns
from stepwell.format.names import GROWING, MANIFEST, Attempt, grown_file, rank_file
from stepwell.format.records import Growing, Manifest, RankRecord, decode, encode
from stepwell.jobs import wait_for
from stepwell.ownership import Ownership, group_of
from stepwell.reader import read_record
from stepwell.reading import Caller, Healing, Reading
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey, Tier
from stepwell.tiers.host import Priority

#: between two looks whether a copy that is being deleted is gone, and whether another rank is at another flush
BUSY_LOOK_S, TURN_LOOK_S = 0.05, 0.25


class FlushWork:
    """Carries out the flushes of one run. Lives on the event loop."""

    def __init__(self, chain: Chain, owner: Ownership, deleter: Deleter, keep: Keep) -> None:
        self._chain, self._owner, self._deleter, self._keep = chain, owner, deleter, keep
        self.being_saved: Callable[[], Collection[tuple[str, str]]] = tuple  # (checkpoint, tier) of saves under way
        #: (checkpoint, tier) -> files that tries have announced to the rank that commits them: it may do so at any time
        self._given: dict[tuple[Attempt, str], set[str]] = {}
        self._turns = FlushTurns(chain, owner)
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

        Raises NotPlanned if the job's leader has taken the flush back meanwhile; OutOfTurn.
        """
        return await self._once(tier, goal) if self._owner.job.world == 1 else await self._with_others(tier, goal)

    async def _with_others(self, tier: Tier, goal: Goal) -> Manifest | None:
        """A try, until another rank says that it is not to be done, cannot be, or that another one goes first."""
        if self._turns.leads(tier):
            with self._turns.taken(tier, goal):
                return await self._unless(tier, goal, self._refused)
        ended, looks = self._turns.ended(tier, goal), 0

        def passes(tier: Tier, goal: Goal) -> Exception | None:
            """At a second look: at the first one the manifest of the try that has ended may just have come."""
            nonlocal looks
            over = self._turns.ended(tier, goal) > ended
            looks = looks + 1 if over or self._turns.crosses(tier, goal) else 0
            if looks < 2:
                return None
            why = self._turns.why(tier, goal) if over else ""
            return _cannot(why, goal, tier) if why else OutOfTurn()

        return await self._unless(tier, goal, passes)

    def _refused(self, tier: Tier, goal: Goal) -> Exception | None:
        why = self._turns.refused(tier, goal)
        return None if why is None else _cannot(why, goal, tier)

    async def _unless(self, tier: Tier, goal: Goal, ends: Callable[[Tier, Goal], Exception | None]) -> Manifest | None:
        work = asyncio.ensure_future(self._once(tier, goal))
        told = asyncio.ensure_future(goal.back.wait())
        try:
            while not work.done():
                await asyncio.wait([work, told], timeout=TURN_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                error = ends(tier, goal)
                if not work.done() and (goal.back.is_set() or error is not None):
                    work.cancel()
                    await asyncio.wait([work])
                    if goal.back.is_set():
                        await self.forget(goal.attempt, tier)
                        what = "rank 0 has taken the flush back"
                        raise NotPlanned(what, step=goal.attempt.step, tier=tier.info.name)
                    assert error is not None
                    raise error
            return work.result()
        finally:
            work.cancel()
            told.cancel()

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
        record, data = await read_record(chain.catalog, attempt, rank, Healing())
        if await self._is_committed(attempt, tier, record):
            return
        key = CheckpointKey(chain.run, attempt.folder)
        growing = await self._growing(attempt, tier, record, data)
        kept = record.files_of(set(record.parts).difference(growing.absent)) if growing is not None else set()
        shards = [ShardKey(key, shard.file) for shard in record.shards if shard.file not in kept]
        await chain.mover.settled(shards)
        await self._owner.writership.require(tier, attempt.step)
        self._given.pop((attempt, tier.info.name), None)
        if growing is not None:  # what was there before counts again
            await tier.drop([self._record(attempt, grown_file(rank)), *shards])
            await self._commit_again(attempt, tier, record)
        elif self._owner.job.world == 1:
            await tier.drop([key])  # a manifest that was to make way goes first
        else:
            await tier.drop([self._record(attempt, rank_file(rank)), *shards])

    async def _commit_again(self, attempt: Attempt, tier: Tier, record: RankRecord) -> None:
        committer = self._owner.committer
        if committer.covered(tier)[0] == self._owner.job.rank:
            manifest = await committer.commit_again(tier, attempt)
            if manifest is not None:
                files = record.files_of(manifest.parts)
                sizes = {shard.file: shard.size for shard in record.shards if shard.file in files}
                self._chain.catalog.add(attempt, tier, sizes, manifest)

    async def _once(self, tier: Tier, goal: Goal) -> Manifest | None:
        """This rank's part of it."""
        try:
            return await self._flush(tier, goal)
        except (CheckpointNotFound, CorruptData) as error:
            if self._chain.catalog.absent:
                await self._chain.catalog.refresh()  # who did not answer the last scan may have what was not found
                error.retry = True
            elif not error.retry and not self._turns.leads(tier):
                self._turns.refuse(tier, goal, error)
            raise

    async def _flush(self, tier: Tier, goal: Goal) -> Manifest | None:
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
            await self._make_way(goal, tier, record, there)
        elif there := self._clearing.get((attempt, tier.info.name), set()):  # the last try got no further
            await self._clear(attempt, tier, record, there)
        growing = await self._growing(attempt, tier, record, data)
        kept: set[str] = set()  # files that are there, durable
        if growing is not None:  # this try has made way for it, or an earlier one
            there = set(record.parts).difference(growing.absent)
            wanted, kept = wanted | there, record.files_of(there)
        files = record.files_of(wanted)
        key = CheckpointKey(chain.run, attempt.folder)
        shards = [shard for shard in record.shards if shard.file in files]
        missing = [shard for shard in shards if shard.file not in kept]
        sizes = [(ShardKey(key, shard.file), shard.size) for shard in missing]
        copy = (attempt, tier.info.name)
        if copy in self._moving:
            await self._moving[copy].settled()  # chunks of a try that was broken off
        caller = self._moving[copy] = Caller()
        whole = growing is None and await self._is_whole(tier, attempt, data, [key for key, _ in sizes])
        reserved = [] if whole else await self._reserve(tier, attempt.step, sizes)
        sources = [h.tier for h in chain.catalog.holdings.get(attempt, [])]
        # memory may lose it meanwhile, but not before one of the others has it
        sources += [other for other in chain.storage if other is not tier and other not in sources]
        try:
            goal.begin(sum(reservation.size_bytes for reservation in reserved))
            for shard, reservation in zip([] if whole else missing, reserved, strict=True):
                reading = Reading(
                    reservation.shard, sources, shard.crcs(), healing, Priority.FLUSH,
                    target=tier.info.name, write_limit=tier.info.write_bytes_per_s, caller=caller,
                )  # fmt: skip
                await chain.mover.copy(reading, tier, shard.size, resumed=reservation.resumed, on_there=goal.there)
            await self._copy_sidecars(tier, sources, attempt, record)
            await self._owner.write_run_record(tier)
            given = self._given.setdefault(copy, set())
            rest = [ShardKey(key, s.file) for s in record.shards if s.file not in files and s.file not in given]
            if rest:  # left by an earlier try of all: beside the record a later writer would take them for whole
                await self._owner.writership.require(tier, attempt.step)
                await tier.drop(rest)
            goal.copied.set()
            goal.aside.set()
            absent = sorted(set(record.parts) - wanted)
            if growing is not None:
                await self._add(tier, attempt, absent, reserved)
                reserved = []
            manifest = await self._owner.committer.publish(
                tier, attempt, data, reserved, absent=absent, on_announced=lambda: given.update(files)
            )
        except BaseException as error:
            self._keep(self._let_go(tier, attempt, reserved, keep_bytes=_may_go_on(error)))
            raise
        del self._moving[copy]
        self._given.pop(copy, None)
        chain.catalog.add(attempt, tier, {shard.file: shard.size for shard in shards}, manifest)
        if growing is not None:
            await self._end_growth(attempt, tier)
        if chain.host is not None and tier in chain.storage and not absent:
            for shard in shards:  # memory need not keep it any more; of some parts it still has the whole alone
                chain.host.arena.clean(ShardKey(key, shard.file))
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
        data = await tier.fetch(self._record(attempt, MANIFEST))
        if data is None or any((d.attempt, d.tier, d.late) == (attempt, name, True) for d in catalog.debris):
            return False
        try:
            manifest = decode(data, Manifest, step=attempt.step, tier=name)
        except StepwellError:  # it commits nothing
            return False
        await self._make_durable(attempt, tier, data)
        there = record.files_of(set(record.parts) - set(manifest.absent))
        catalog.add(attempt, tier, {shard.file: shard.size for shard in record.shards if shard.file in there}, manifest)
        return True

    def _record(self, attempt: Attempt, name: str) -> RecordKey:
        return RecordKey(self._chain.run, f"{attempt.folder}/{name}")

    async def _growing(self, attempt: Attempt, tier: Tier, record: RankRecord, data: bytes) -> Growing | None:
        """What is said of a copy that has made way to one of more parts, while neither is committed. It has this rank's
        record (data: its bytes) and the shards that it had before."""
        told = await tier.fetch(self._record(attempt, GROWING))
        if told is None:
            return None
        key = CheckpointKey(self._chain.run, attempt.folder)
        try:
            growing = decode(told, Growing, step=attempt.step, tier=tier.info.name)
        except StepwellError:  # then nothing is known of what is there, and all is copied anew
            await self._owner.writership.require(tier, attempt.step)
            await tier.drop([self._record(attempt, rank_file(self._owner.job.rank))])
            return None
        files = record.files_of(set(record.parts).difference(growing.absent))
        whole = await self._is_whole(tier, attempt, data, [ShardKey(key, file) for file in sorted(files)])
        return growing if whole else None

    async def _make_durable(self, attempt: Attempt, tier: Tier, manifest: bytes) -> None:
        await self._owner.writership.require(tier, attempt.step)
        await tier.commit(self._record(attempt, MANIFEST), manifest)

    async def confirm(self, attempt: Attempt, tier: Tier) -> None:
        """Sees to it that a commit which the catalog knows is durable: another process may have been killed, or may
        still wait to hear, between the moment when others could see it and that. Raises RunBusy, CheckpointGone."""
        copy = attempt, tier.info.name
        if copy in self._chain.catalog.confirmed:
            return
        data = await tier.fetch(self._record(attempt, MANIFEST))
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

    async def _make_way(self, goal: Goal, tier: Tier, record: RankRecord, there: set[str]) -> None:
        """Ends the commit of a copy of some parts (there), so that more can come: a manifest is never replaced.

        Raises CorruptData, before anything is removed, if what it has is not good elsewhere; with several ranks each
        looks at its own shards, and the lowest removes.
        """
        catalog, job, attempt = self._chain.catalog, self._owner.job, goal.attempt
        manifests = await catalog.manifests(attempt)
        if not any(not m.absent and job.rank in m.covers for other, m in manifests if other is not tier):
            raise CheckpointNotFound(
                "only some parts of the checkpoint are there, and no other tier has all of them",
                todo="Delete the partial copy there, then flush again", step=attempt.step, tier=tier.info.name,
            )  # fmt: skip
        sources = [h.tier for h in catalog.holdings.get(attempt, []) if h.tier is not tier]
        files = record.files_of(there)
        for shard in (shard for shard in record.shards if shard.file in files):
            key = ShardKey(CheckpointKey(self._chain.run, attempt.folder), shard.file)
            await self._chain.mover.verify(sources, key, shard.size, shard.crcs())
        covered = self._owner.committer.covered(tier)
        prefix, patience_s = self._way(attempt, tier, record, there), self._chain.settings.rank_timeout_seconds
        if len(covered) > 1:
            goal.aside.set()  # another rank may be at another checkpoint, and wait for this one there
        if job.rank == covered[0]:
            for rank in covered[1:]:
                await wait_for(job.store, f"{prefix}/{rank}", patience_s, f"rank {rank}'s look at step {attempt.step}")
            await self._clear(attempt, tier, record, there)
        else:
            job.store.put(f"{prefix}/{job.rank}", b"1")
            what = f"the removal of the partial copy of step {attempt.step} by rank {covered[0]}"
            await wait_for(job.store, f"{prefix}/made", patience_s, what)
            catalog.remove(attempt, tier)

    async def _clear(self, attempt: Attempt, tier: Tier, record: RankRecord, there: set[str]) -> None:
        """Removes the manifest of a copy. Its shards stay, to go on from, and the records, from which the next writer
        commits it again if this one gets no further: the marker GROWING, which means nothing beside a manifest, says
        what it had. It also tells other processes that the checkpoint is worth waiting for."""
        job = self._owner.job
        growing = Growing(absent=sorted(set(record.parts) - there), made=self._chain.clock.wall())
        await self._owner.writership.require(tier, attempt.step)
        if (attempt, tier.info.name) not in self._clearing:  # else the manifest may be gone, and the marker must stay
            await self._drop_markers(attempt, tier, self._owner.committer.covered(tier))  # of an earlier growth
        await tier.commit(self._record(attempt, GROWING), encode(growing))
        await self._owner.writership.require(tier, attempt.step)
        self._clearing[attempt, tier.info.name] = there
        self._chain.catalog.remove(attempt, tier)
        await tier.drop([self._record(attempt, MANIFEST)])
        del self._clearing[attempt, tier.info.name]
        job.store.put(f"{self._way(attempt, tier, record, there)}/made", b"1")

    def _way(self, attempt: Attempt, tier: Tier, record: RankRecord, there: set[str]) -> str:
        absent = "+".join(sorted(set(record.parts) - there))
        return f"{group_of(self._chain, self._owner.job)}/{attempt.folder}/{tier.info.name}/way-from-all-but-{absent}"

    async def _add(self, tier: Tier, attempt: Attempt, absent: list[str], added: Sequence[Reservation]) -> None:
        """Makes what this rank adds to a copy durable. Its record is there already, and must not go for that."""
        place = self._record(attempt, grown_file(self._owner.job.rank))
        await self._owner.writership.require(tier, attempt.step)
        await tier.drop([place])  # of a try that got as far, or of an earlier growth
        if not await tier.commit(place, encode(Growing(absent=absent, made=self._chain.clock.wall())), shards=added):
            raise CorruptData("another process writes this attempt", path=str(place), tier=tier.info.name)

    async def _end_growth(self, attempt: Attempt, tier: Tier) -> None:
        """Its markers mean nothing any more, and may stay if they must."""
        rank, covered = self._owner.job.rank, self._owner.committer.covered(tier)
        with contextlib.suppress(TierError):
            if rank == covered[0]:
                await self._drop_markers(attempt, tier, covered)

    async def _drop_markers(self, attempt: Attempt, tier: Tier, ranks: Sequence[int]) -> None:
        await tier.drop([self._record(attempt, name) for name in (GROWING, *map(grown_file, ranks))])

    async def _is_whole(self, tier: Tier, attempt: Attempt, data: bytes, shards: Sequence[ShardKey]) -> bool:
        """Whether an earlier try got as far as the rank's record: then its shards are durable, and stay as they are,
        because its manifest may still be on its way, and a later writer may have taken the attempt for whole."""
        own = self._record(attempt, rank_file(self._owner.job.rank))
        if await tier.fetch(own) != data:
            return False
        try:
            await (await tier.lease(shards)).close()
        except CheckpointGone:  # a deletion that did not get to its end left the record
            await self._owner.writership.require(tier, attempt.step)
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


def _cannot(why: str, goal: Goal, tier: Tier) -> CheckpointGone:
    return CheckpointGone(f"another rank cannot flush its part: {why}", step=goal.attempt.step, tier=tier.info.name)


def _may_go_on(error: BaseException) -> bool:
    """Whether the next try should find the bytes of this one."""
    if isinstance(error, CorruptData):
        return error.retry
    return isinstance(error, TierError | asyncio.CancelledError) and not isinstance(error, TierFull)
