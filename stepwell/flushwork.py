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
    StoreClosed,
    TierError,
    TierFull,
    WaitTimeout,
)
from stepwell.flushing import Flusher, Goal, OutOfTurn
from stepwell.flushturns import READ_S, FlushTurns, cannot
from stepwell.format.names import MANIFEST, Attempt, grown_file, rank_file
from stepwell.format.records import Growing, Manifest, RankRecord, decode
from stepwell.growth import Growth
from stepwell.ownership import Ownership
from stepwell.reader import read_record
from stepwell.reading import Caller, Healing, Reading
from stepwell.tiers.base import CheckpointKey, Reservation, ShardKey, Tier
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
        self._growth = Growth(chain, owner)
        self._moving: dict[tuple[Attempt, str], Caller] = {}  # (checkpoint, tier) -> what the last try has begun

    async def has(self, attempt: Attempt, tier: Tier, parts: Sequence[str] | None) -> bool:
        """Whether these parts (None: all) are committed there."""
        if not any(h.tier is tier for h in self._chain.catalog.holdings.get(attempt, [])):
            return False
        absent = set((await self._chain.catalog.manifest(attempt, tier)).absent)
        return not (absent if parts is None else absent & set(parts))

    async def asked(self, tier: Tier, attempt: Attempt, parts: Sequence[str] | None, flusher: Flusher) -> Goal | None:
        """A flush by hand, for which every rank asks: its goal, before all others; None if it is there already. The
        rank that leads says which, because it deletes on the tier, too. Raises WaitTimeout, CheckpointGone,
        StoreClosed."""
        turns, copy = self._turns, (attempt.folder, tier.info.name)
        if not turns.leads(tier):
            ask = await turns.answered(tier, attempt, parts)
            if ask is None:
                return None
            goal = flusher.want(attempt, parts, Priority.RESTORE)
            goal.asks.add(ask)
            return goal
        with turns.answering(tier, attempt, parts) as (ask, answer):
            if await self.has(attempt, tier, parts):
                answer(True)
                return None
            goal = flusher.want(attempt, parts, Priority.RESTORE)  # from now on it is promised
            goal.asks.add(ask)
            while copy in self._deleter.busy:
                await self._chain.clock.sleep(BUSY_LOOK_S)
            answer(False)
        return goal

    async def once(self, tier: Tier, goal: Goal) -> Manifest | None:
        """One try. What it has written stays for the next, unless the tier is full. None if it was there already.

        Raises NotPlanned if the job's leader has taken the flush back meanwhile; OutOfTurn.
        """
        return await self._once(tier, goal) if self._owner.job.world == 1 else await self._with_others(tier, goal)

    async def _with_others(self, tier: Tier, goal: Goal) -> Manifest | None:
        """A try, until another rank says that it is not to be done, cannot be, or that another one goes first."""
        if self._turns.leads(tier):
            with self._turns.ending(tier, goal):
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
            return cannot(why, goal.attempt, tier) if why else OutOfTurn()

        return await self._unless(tier, goal, passes)

    def _refused(self, tier: Tier, goal: Goal) -> Exception | None:
        why = self._turns.refused(tier, goal)
        return None if why is None else cannot(why, goal.attempt, tier)

    async def _unless(self, tier: Tier, goal: Goal, ends: Callable[[Tier, Goal], Exception | None]) -> Manifest | None:
        work = asyncio.ensure_future(self._once(tier, goal))
        told, needless = asyncio.ensure_future(goal.back.wait()), 0
        try:
            while not work.done():
                await asyncio.wait([work, told], timeout=TURN_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                error = ends(tier, goal)
                needless = needless + 1 if self._is_needless(tier, goal) else 0
                back = goal.back.is_set() or needless > 1  # all ranks see it by now
                if not work.done() and (back or error is not None):
                    work.cancel()
                    await asyncio.wait([work])
                    if back:
                        raise await self._not_done(tier, goal)
                    assert error is not None
                    raise error
            if isinstance(work.exception(), StoreClosed) and self._is_needless(tier, goal):
                raise await self._not_done(tier, goal)
            return work.result()
        finally:
            work.cancel()
            told.cancel()

    async def _not_done(self, tier: Tier, goal: Goal) -> NotPlanned:
        """The try is over, and nothing of it stays: the reason."""
        await self.forget(goal.attempt, tier)
        what = "rank 0 has taken the flush back" if goal.back.is_set() else "it is on another tier by now"
        return NotPlanned(what, step=goal.attempt.step, tier=tier.info.name)

    def _is_needless(self, tier: Tier, goal: Goal) -> bool:
        """Whether it was asked for because memory alone had the checkpoint, and another tier has it now. Another rank,
        which looked earlier or later, may not have asked, and no part of its comes. Where the rank that leads is at
        it, that one says so."""
        if not goal.alone or goal.asks or not (self._turns.leads(tier) or self._turns.begun(tier, goal) is None):
            return False
        catalog, others = self._chain.catalog, [other for other in self._chain.storage if other is not tier]
        known = [catalog.known_manifest(goal.attempt, other) for other in others]
        return any(manifest is not None and manifest.complete for manifest in known)

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
            await tier.drop([self._chain.record(attempt, grown_file(rank)), *shards])
            await self._commit_again(attempt, tier, record)
        elif self._owner.job.world == 1:
            await tier.drop([key])  # a manifest that was to make way goes first
        else:
            await tier.drop([self._chain.record(attempt, rank_file(rank)), *shards])

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
        turn = self._turns.begin(tier, goal) if self._turns.leads(tier) else None
        healing = Healing()
        record, data = await read_record(chain.catalog, attempt, self._owner.job.rank, healing)
        wanted = set(record.parts if goal.parts is None else goal.parts) & set(record.parts)
        if turn is None and (self._turns.leader(tier) != 0 or await self._is_committed(attempt, tier, record)):
            # it may still be removed: where rank 0 does that, it decides on no flush meanwhile
            turn = await self._begun(tier, goal, record, wanted)
            if turn is None:
                return None
        if await self._is_committed(attempt, tier, record):
            there = set(record.parts) - set((await chain.catalog.manifest(attempt, tier)).absent)
            if wanted <= there:
                await self.confirm(attempt, tier)
                return None
            if turn is None:  # it has just come
                raise OutOfTurn
            wanted |= there
            await self._growth.make_way(goal, tier, record, there, turn)
        elif there := self._growth.clearing.get((attempt, tier.info.name), set()):  # the last try got no further
            await self._growth.clear(attempt, tier, record, there, turn)
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
                await self._growth.add(tier, attempt, absent, reserved)
                reserved = []
            turn = await self._begun(tier, goal, record, wanted) if turn is None else turn
            if turn is None:  # it was committed with what an earlier try had announced, or is gone again
                self._given.pop(copy, None)
                self._keep(self._let_go(tier, attempt, reserved, keep_bytes=False))
                return None
            manifest = await self._owner.committer.publish(
                tier, attempt, data, reserved, absent, turn, on_announced=lambda: given.update(files)
            )
        except BaseException as error:
            self._keep(self._let_go(tier, attempt, reserved, keep_bytes=_may_go_on(error)))
            raise
        del self._moving[copy]
        self._given.pop(copy, None)
        chain.catalog.add(attempt, tier, {shard.file: shard.size for shard in shards}, manifest)
        if growing is not None:
            await self._growth.end(attempt, tier)
        if chain.host is not None and tier in chain.storage and not absent:
            for shard in shards:  # memory need not keep it any more; of some parts it still has the whole alone
                chain.host.arena.clean(ShardKey(key, shard.file))
        return manifest

    async def _begun(self, tier: Tier, goal: Goal, record: RankRecord, wanted: set[str]) -> int | None:
        """Returns the number of the try that the rank that leads is at, once it is at this flush; None if it has ended
        it without this rank's part. Raises WaitTimeout; CheckpointGone if it has failed there for good; StoreClosed."""
        goal.aside.set()  # that rank may be at another checkpoint, and wait for this one there
        attempt, patience_s = goal.attempt, self._chain.settings.rank_timeout_seconds
        until = self._chain.clock.monotonic() + patience_s
        while (turn := self._turns.begun(tier, goal)) is None:
            failed, committed = self._turns.over(tier, goal), await self._is_committed(attempt, tier, record)
            if failed:
                raise cannot(failed, attempt, tier)
            if failed is not None:
                return None
            if not goal.asks and committed:  # who leads need not be at it at all
                manifest = await self._chain.catalog.manifest(attempt, tier)
                if wanted.isdisjoint(manifest.absent):
                    return None
            leader = self._turns.leader(tier)
            if self._owner.committer.has_left(leader):
                raise StoreClosed(f"rank {leader} has closed its store", step=attempt.step, tier=tier.info.name)
            if self._chain.clock.monotonic() > until:
                what = f"rank {leader}'s turn to flush it did not come within {patience_s:.0f} s"
                todo = "Flush by hand on all ranks, and see whether that one is alive"
                raise WaitTimeout(what, todo=todo, step=attempt.step, tier=tier.info.name)
            await self._chain.clock.sleep(READ_S)
        return turn

    def _is_known(self, attempt: Attempt, tier: Tier) -> bool:
        return any(h.tier is tier for h in self._chain.catalog.holdings.get(attempt, []))

    async def _is_committed(self, attempt: Attempt, tier: Tier, record: RankRecord) -> bool:
        """Whether a commit of it counts on the tier. Of a tier that did not answer the last scan the catalog knows
        nothing, and of one whose answer to a commit was lost it does not know that; what is whole there must not be
        taken for what a broken try has left."""
        catalog, name = self._chain.catalog, tier.info.name
        if self._is_known(attempt, tier):
            if self._turns.leads(tier) or await tier.fetch(self._chain.record(attempt, MANIFEST)) is not None:
                return True
            catalog.remove(attempt, tier)  # the rank that leads has deleted it
        if (attempt, name) in self._growth.clearing:
            return False  # what is there was to make way
        data = await tier.fetch(self._chain.record(attempt, MANIFEST))
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

    async def _growing(self, attempt: Attempt, tier: Tier, record: RankRecord, data: bytes) -> Growing | None:
        """What a copy had that has made way, if this rank's record (data: its bytes) and shards of that are there."""
        growing = await self._growth.told(attempt, tier)
        if growing is None:
            return None
        key = CheckpointKey(self._chain.run, attempt.folder)
        files = record.files_of(set(record.parts).difference(growing.absent))
        whole = await self._is_whole(tier, attempt, data, [ShardKey(key, file) for file in sorted(files)])
        return growing if whole else None

    async def _make_durable(self, attempt: Attempt, tier: Tier, manifest: bytes) -> None:
        await self._owner.writership.require(tier, attempt.step)
        await tier.commit(self._chain.record(attempt, MANIFEST), manifest)

    async def confirm(self, attempt: Attempt, tier: Tier) -> None:
        """Sees to it that a commit which the catalog knows is durable: another process may have been killed, or may
        still wait to hear, between the moment when others could see it and that. Raises RunBusy, CheckpointGone."""
        copy = attempt, tier.info.name
        if copy in self._chain.catalog.confirmed:
            return
        data = await tier.fetch(self._chain.record(attempt, MANIFEST))
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

    async def _is_whole(self, tier: Tier, attempt: Attempt, data: bytes, shards: Sequence[ShardKey]) -> bool:
        """Whether an earlier try got as far as the rank's record: then its shards are durable, and stay as they are,
        because its manifest may still be on its way, and a later writer may have taken the attempt for whole."""
        own = self._chain.record(attempt, rank_file(self._owner.job.rank))
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
            place = self._chain.record(attempt, file)
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
