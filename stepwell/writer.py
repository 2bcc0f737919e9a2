"""The writing side of a store: saves, flushes, repairs, and what policies ask for. Lives on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from stepwell.backoff import Backoff
from stepwell.chain import Chain, reserve
from stepwell.errors import CheckpointGone, NotPlanned, RunBusy, StepwellError, StoreClosed, TierError, TierFull
from stepwell.flushing import Flusher, Goal
from stepwell.format.names import Attempt, rank_file
from stepwell.format.records import RankRecord, ShardRecord
from stepwell.jobs import Job
from stepwell.mending import Bad, Mender
from stepwell.ownership import Ownership
from stepwell.policies.base import Committed, Opened, Policy
from stepwell.reader import read_record
from stepwell.reading import Healing, Reading
from stepwell.savework import Saver
from stepwell.saving import Save
from stepwell.steering import Steering
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey, Tier
from stepwell.tiers.host import Priority
from stepwell.units import format_bytes, format_duration

log = logging.getLogger("stepwell")

#: between two looks whether a copy that is being deleted is gone
BUSY_LOOK_S = 0.05


class RunWriter:
    """One run's writer. The epoch is taken by the first save."""

    def __init__(self, chain: Chain, policies: Sequence[Policy] = (), rng: random.Random | None = None) -> None:
        """rng: the randomness of pauses; passed in for tests and simulation."""
        self._chain = chain
        self._background: set[asyncio.Task[Any]] = set()
        self._saving: dict[asyncio.Task[Any], Save] = {}
        self._opened: asyncio.Task[None] | None = None
        rng = rng or random.Random()
        self.owner = Ownership(chain)
        self.saver = Saver(chain, self.owner, self._keep)
        self.saver.on_named = lambda save, attempt: self._keep(self._foresee(save, attempt))
        self._newest: tuple[Save, Attempt] | None = None  # the newest save that became durable
        self.flushers = {
            tier.info.name: Flusher(tier, partial(self._flush_once, tier), chain.clock, Backoff(rng))
            for tier in chain.storage
        }
        self.steering = Steering(chain, policies, self.flushers, self._keep)
        self.steering.may_drop, self.steering.before_drop = self._may_drop, self._before_drop
        self._below = [tier.info.name for tier in chain.storage[1:]]
        self._mender = Mender(chain, self.owner, self.steering.busy)

    # -- saves ---------------------------------------------------------------------------

    async def save(self, save: Save) -> None:
        """Carries a save out on every tier. Never raises: what goes wrong is the save's own."""
        task = asyncio.current_task()
        assert task is not None
        self._saving[task] = save
        task.add_done_callback(lambda done: self._saving.pop(done))
        try:
            attempt = await self.saver.save(save)
        except asyncio.CancelledError:
            save.fail(StepwellError("the save was abandoned", step=save.step))
            raise
        except StepwellError as error:
            log.error("saving step %d failed: %s", save.step, error)
            save.fail(error)
            return
        except Exception as error:
            log.exception("saving step %d failed", save.step)
            save.fail(error)
            return
        self._tell_room(save)
        save.mark_durable()
        self._newest = save, attempt
        try:
            await self._after_takeover()
            await self.steering.on(Committed(attempt.folder, self._chain.first.info.name))
            await self._follow(save, attempt)
        except asyncio.CancelledError:
            save.fail(StoreClosed("the store was closed before the checkpoint was there"), self._below)
            raise
        except Exception as error:  # the checkpoint is safe; what follows from it is not
            log.exception("deciding on step %d failed", save.step)
            save.fail(error, self._below)

    async def skip(self, save: Save, blocked_s: float | None) -> None:
        """Ends a save whose `save()` has blocked for so long, or was interrupted (None), and says so."""
        if blocked_s is None:
            save.interrupted = True
            save.fail(StepwellError("save() was interrupted", step=save.step))
            return
        first, arena = self._chain.first.info.name, self._chain.mover.arena
        why = "this process could not take the run over"
        if self.owner.taken:
            ways = [edge.statistics() for edge in self._chain.mover.edges.all() if edge.target == first]
            oldest_s = max((way.oldest_s for way in ways), default=0.0)
            why = (
                f"{format_bytes(sum(way.in_flight_bytes for way in ways))} are on their way to {first}, the oldest for "
                f"{format_duration(oldest_s)}; host memory is {format_bytes(arena.capacity_bytes)}"
            )
        log.error("step %d was skipped: save() blocked for %s: %s", save.step, format_duration(blocked_s), why)
        what = f"a checkpoint of {format_bytes(save.nbytes)} was skipped: save() blocked for block_timeout"
        todo = "The next save is tried again"
        save.fail(StepwellError(f"{what} ({format_duration(blocked_s)}): {why}", todo=todo, step=save.step))

    def give_up(self, call: int, job: Job, why: BaseException) -> None:
        """A save() call that raised makes no checkpoint: the other ranks must not wait for this one's part."""
        if job.world > 1:
            self.saver.give_up(call, job, why)

    async def _follow(self, save: Save, attempt: Attempt) -> None:
        """Ties the save's waits to the flushes that policies have asked for."""
        for tier in self._chain.storage[1:]:
            name, flusher = tier.info.name, self.flushers[tier.info.name]
            goal = next((g for g in flusher.goals if g.attempt == attempt and g.parts is None), None)
            if goal is not None:
                save.planned(name)
                goal.done.add_done_callback(partial(self._flushed, save, name))
                self._keep(self._report(save, goal, name))
            elif await self._has(attempt, tier, None):
                save.mark_committed(name, self._chain.clock.monotonic())
            else:
                self._not_planned(save, name)

    def _not_planned(self, save: Save, tier: str) -> None:
        todo = f"store.flush({save.step}, to={tier!r}) does"
        save.not_planned(
            tier, NotPlanned("no policy sends this step there", todo=todo, step=save.step, tier=tier)
        )  # fmt: skip

    async def _foresee(self, save: Save, attempt: Attempt) -> None:
        """Ends waits that would be in vain before the first tier has the checkpoint."""
        try:
            planned = await self.steering.foresee(attempt, save.nbytes)
        except Exception as error:  # it is decided, and said, when the checkpoint is there
            log.debug("cannot foresee where step %d goes: %s", save.step, error)
            return
        for name in self._below:
            if name not in planned and attempt not in self._chain.catalog.holdings:
                self._not_planned(save, name)

    def _flushed(self, save: Save, tier: str, done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is None:
            save.mark_committed(tier, self._chain.clock.monotonic())
        else:
            save.fail(error, [tier])

    async def _report(self, save: Save, goal: Goal, tier: str) -> None:
        """Tells those who wait when the flush has failed often enough; it is still tried again."""
        await goal.told.wait()
        if not goal.done.done() and goal.error is not None:
            save.fail(goal.error, [tier])

    def _tell_room(self, save: Save) -> None:
        """Once a process: how large a checkpoint is, and how many more there is room for."""
        if self._newest is not None or not self.owner.job.leader:
            return
        first = self._chain.first
        free = first.usage().free_bytes
        room = ""
        if free is not None and save.nbytes:
            room = f"; {free // save.nbytes} more of this size fit there ({format_bytes(free)} free)"
        log.info("step %d is on %s: %s%s", save.step, first.info.name, format_bytes(save.nbytes), room)

    async def _after_takeover(self) -> None:
        """What earlier processes left undone is decided once, and the rest of their debris is removed."""
        if self._opened is None:
            self._opened = self._keep(self._open_up())
        await asyncio.shield(self._opened)

    async def _open_up(self) -> None:
        await self.steering.on(Opened())
        self._keep(self._mender.mend())
        if self.owner.job.leader:
            self._keep(self.owner.clean(self.steering.busy, lambda: self.steering.promised))

    def _may_drop(self, tier: str) -> bool:
        """Of all ranks that see the tier, the lowest deletes there."""
        return self.owner.committer.covered(self._chain.named(tier))[0] == self.owner.job.rank

    async def _before_drop(self, tier: Tier, attempt: Attempt) -> None:
        await self.owner.writership.require(tier, attempt.step)

    # -- flushes -------------------------------------------------------------------------

    async def flush(self, attempt: Attempt, tier: Tier, job: Job, parts: Sequence[str] | None = None) -> None:
        """Copies this rank's part of a checkpoint to a tier and commits it there, before all others.

        parts: only those (the copy is partial); default all. What is committed there already stays.
        """
        await self.owner.take(job)
        await self._after_takeover()
        if not await self._has(attempt, tier, parts):
            await self.flushers[tier.info.name].want(attempt, parts, Priority.RESTORE).wait()

    async def lift(self, attempt: Attempt, tier: Tier, job: Job) -> None:
        """Copies this rank's part of a checkpoint up to a storage tier and commits it there, when there is time."""
        await self.owner.take(job)
        await self._after_takeover()
        if not await self._has(attempt, tier, None):
            await self.flushers[tier.info.name].want(attempt, None, Priority.PREFETCH).wait()

    async def _has(self, attempt: Attempt, tier: Tier, parts: Sequence[str] | None) -> bool:
        """Whether these parts (None: all) are committed there."""
        if not any(h.tier is tier for h in self._chain.catalog.holdings.get(attempt, [])):
            return False
        absent = set((await self._chain.catalog.manifest(attempt, tier)).absent)
        return not (absent if parts is None else absent & set(parts))

    async def _flush_once(self, tier: Tier, goal: Goal) -> None:
        """One try. What it has written stays for the next, unless the tier is full."""
        chain, attempt = self._chain, goal.attempt
        while (attempt.folder, tier.info.name) in self.steering.busy:  # what is left of an earlier try is being removed
            await chain.clock.sleep(BUSY_LOOK_S)
        await self.owner.writership.require(tier, attempt.step)  # else the next writer's files would be in our hands
        healing = Healing()
        record, data = await read_record(chain.catalog, attempt, self.owner.job.rank, healing)
        wanted = set(record.parts if goal.parts is None else goal.parts) & set(record.parts)
        if any(h.tier is tier for h in chain.catalog.holdings.get(attempt, [])):
            there = set(record.parts) - set((await chain.catalog.manifest(attempt, tier)).absent)
            if wanted <= there:
                return
            wanted |= there
            await self._make_way(
                attempt, tier, [s for s in record.shards if any(s.file in record.parts[p] for p in there)]
            )
        files = {file for part in wanted for file in record.parts[part]}
        key = CheckpointKey(chain.run, attempt.folder)
        shards = [shard for shard in record.shards if shard.file in files]
        sizes = [(ShardKey(key, shard.file), shard.size) for shard in shards]
        own = RecordKey(chain.run, f"{attempt.folder}/{rank_file(self.owner.job.rank)}")
        whole = await self._is_whole(tier, own, data, [key for key, _ in sizes], attempt.step)
        reserved = [] if whole else await reserve(tier, sizes, resume=True)
        sources = [h.tier for h in chain.catalog.holdings.get(attempt, [])]
        if chain.first not in sources and tier is not chain.first:
            sources.append(chain.first)  # it has the checkpoint before host memory may lose it
        try:
            for shard, reservation in zip([] if whole else shards, reserved, strict=True):
                reading = Reading(
                    reservation.shard, sources, shard.crcs(), healing, Priority.FLUSH,
                    target=tier.info.name, write_limit=tier.info.write_bytes_per_s,
                )  # fmt: skip
                await chain.mover.copy(reading, tier, shard.size, resumed=reservation.resumed)
            await self._copy_sidecars(tier, sources, attempt, record)
            await self.owner.write_run_record(tier)
            rest = [ShardKey(key, shard.file) for shard in record.shards if shard.file not in files]
            if rest:  # left by an earlier try of all: beside the record a later writer would take them for whole
                await self.owner.writership.require(tier, attempt.step)
                await tier.drop(rest)
            goal.copied.set()
            absent = sorted(set(record.parts) - wanted)
            manifest = await self.owner.committer.publish(tier, attempt, data, reserved, absent=absent)
        except BaseException as error:
            self._keep(self._let_go(tier, attempt, reserved, keep_bytes=_may_go_on(error)))
            raise
        chain.catalog.add(attempt, tier, {shard.file: shard.size for shard in shards}, manifest)
        self._keep(self.steering.on(Committed(attempt.folder, tier.info.name)))

    async def _make_way(self, attempt: Attempt, tier: Tier, shards: Sequence[ShardRecord]) -> None:
        """Removes a partial copy, so that more parts can come: a manifest is never replaced.

        shards: those that it has. Raises CorruptData, before anything is removed, if they are not good elsewhere.
        """
        catalog = self._chain.catalog
        others = [await catalog.manifest(attempt, h.tier) for h in catalog.holdings[attempt] if h.tier is not tier]
        if self.owner.job.world > 1 or all(manifest.absent for manifest in others):
            raise StepwellError(
                "only some parts of the checkpoint are there, and no other tier has all of them for this rank alone",
                todo="Delete the partial copy there, then flush again", step=attempt.step, tier=tier.info.name,
            )  # fmt: skip
        sources = [h.tier for h in catalog.holdings[attempt] if h.tier is not tier]
        for shard in shards:
            key = ShardKey(CheckpointKey(self._chain.run, attempt.folder), shard.file)
            await self._chain.mover.verify(sources, key, shard.size, shard.crcs())
        await self.owner.writership.require(tier, attempt.step)
        catalog.remove(attempt, tier)
        await tier.drop([CheckpointKey(self._chain.run, attempt.folder)])

    async def _is_whole(self, tier: Tier, own: RecordKey, data: bytes, shards: Sequence[ShardKey], step: int) -> bool:
        """Whether an earlier try got as far as the rank's record: then its shards are durable, and stay as they are,
        because its manifest may still be on its way, and a later writer may have taken the attempt for whole."""
        if await tier.fetch(own) != data:
            return False
        try:
            await (await tier.lease(shards)).close()
        except CheckpointGone:  # a deletion that did not get to its end left the record
            await self.owner.writership.require(tier, step)
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
            await self.owner.writership.require(tier, attempt.step)
            for reservation in reserved:
                await tier.abort(reservation)

    # -- repairs -------------------------------------------------------------------------

    def repair(self, bad: Bad, record: RankRecord) -> None:
        """Lets shards that were bad on a tier be written again, once the run is taken over."""
        self._mender.note(bad, record)
        if self.owner.taken:
            self._keep(self._mender.mend())

    # -- the end -------------------------------------------------------------------------

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Holds on to background work until it is done; its errors are logged."""
        task = asyncio.ensure_future(work)
        self._background.add(task)

        def ended(done: asyncio.Task[Any]) -> None:
            self._background.discard(done)
            if not done.cancelled() and (error := done.exception()) is not None:
                log.error("background work failed: %s", error)

        task.add_done_callback(ended)
        return task

    def under_way(self) -> str:
        """What is not where it should be, in words."""
        first = self._chain.first.info.name
        ways = [f"step {save.step} to {first}" for save in self._saving.values()]
        for name, flusher in self.flushers.items():
            if steps := sorted(goal.attempt.step for goal in flusher.goals):
                few = steps if len(steps) <= 4 else [*steps[:2], "…", steps[-1]]
                what = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps ({', '.join(map(str, few))})"
                error = next((goal.error for goal in flusher.goals if goal.error), None)
                ways.append(f"{what} to {name}" + (f": {error}" if error else ""))
        return "; ".join(ways)

    async def finish(self) -> None:
        """Waits for the saves under way and for what policies want of them, the newest first."""
        while self._saving:
            await asyncio.wait(list(self._saving))
        if self.owner.taken:
            await self._after_takeover()
            await self.steering.closing()
            if self._newest is not None:  # it may have to go where it was not planned to go before
                await self._follow(*self._newest)
        for flusher in self.flushers.values():
            await flusher.idle()

    async def close(self, patience_s: float) -> None:
        """Gives up what `finish` has not finished, waits a moment for the rest, then gives the run up."""
        for flusher in self.flushers.values():
            await flusher.close()
        for task in list(self._saving):
            task.cancel()
        if rest := [*self._saving, *self._background]:
            await asyncio.wait(rest, timeout=patience_s)
        # a tier that hangs does not get the last word; the next writer then finds out by itself
        await asyncio.wait([asyncio.ensure_future(self.owner.close())], timeout=patience_s)


def _may_go_on(error: BaseException) -> bool:
    """Whether the next try should find the bytes of this one."""
    return isinstance(error, TierError | asyncio.CancelledError) and not isinstance(error, TierFull)
