"""The writing side of a store: saves, flushes, repairs, and what policies ask for. Lives on the event loop."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from stepwell.backoff import Backoff
from stepwell.chain import Chain, reserve
from stepwell.errors import CheckpointGone, NotPlanned, StepwellError, TierError, TierFull
from stepwell.flushing import Flusher, Goal
from stepwell.format.names import Attempt, rank_file
from stepwell.format.records import RankRecord
from stepwell.jobs import Job
from stepwell.mending import Bad, Mender
from stepwell.mover import Healing, Reading
from stepwell.ownership import Ownership
from stepwell.policies.base import Committed, Opened, Policy
from stepwell.reader import read_record
from stepwell.savework import Saver
from stepwell.saving import Save
from stepwell.steering import Steering
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey, Tier
from stepwell.tiers.host import Priority

log = logging.getLogger("stepwell")


class RunWriter:
    """One run's writer. The epoch is taken by the first save."""

    def __init__(self, chain: Chain, policies: Sequence[Policy] = (), rng: random.Random | None = None) -> None:
        """rng: the randomness of pauses; passed in for tests and simulation."""
        self._chain = chain
        self._background: set[asyncio.Task[Any]] = set()
        self._saving: set[asyncio.Task[Any]] = set()
        self._opened: asyncio.Task[None] | None = None
        rng = rng or random.Random()
        self.owner = Ownership(chain)
        self.saver = Saver(chain, self.owner, self._keep)
        self.flushers = {
            tier.info.name: Flusher(tier, partial(self._flush_once, tier), chain.clock, Backoff(rng))
            for tier in chain.storage
        }
        self.steering = Steering(chain, policies, self.flushers, self._keep)
        self.steering.may_drop = self._may_drop
        self._mender = Mender(chain)

    # -- saves ---------------------------------------------------------------------------

    async def save(self, save: Save) -> None:
        """Carries a save out on every tier. Never raises: what goes wrong is the save's own."""
        task = asyncio.current_task()
        assert task is not None
        self._saving.add(task)
        task.add_done_callback(self._saving.discard)
        try:
            attempt = await self.saver.save(save)
        except asyncio.CancelledError:
            save.fail(StepwellError("the save was abandoned", step=save.step))
            raise
        except Exception as error:
            log.error("saving step %d failed: %s", save.step, error)
            save.fail(error)
            return
        save.mark_durable()
        try:
            await self._after_takeover()
            await self.steering.on(Committed(attempt.folder, self._chain.first.info.name))
            self._follow(save, attempt)
        except Exception as error:  # the checkpoint is safe; what follows from it is not
            log.exception("deciding on step %d failed", save.step)
            save.fail(error, list(self.flushers))

    def _follow(self, save: Save, attempt: Attempt) -> None:
        """Ties the save's waits to the flushes that policies have asked for."""
        for tier in self._chain.storage[1:]:
            name, flusher = tier.info.name, self.flushers[tier.info.name]
            goal = next((g for g in flusher.goals if g.attempt == attempt), None)
            if goal is not None:
                self._keep(self._report(save, goal, name))
            elif any(h.tier.info.name == name for h in self._chain.catalog.holdings.get(attempt, [])):
                save.mark_committed(name, self._chain.clock.monotonic())
            else:
                save.not_planned(
                    name,
                    NotPlanned(
                        "no policy sends this step there",
                        todo=f"store.flush({save.step}, to={name!r}) does",
                        step=save.step,
                        tier=name,
                    ),
                )

    async def _report(self, save: Save, goal: Goal, tier: str) -> None:
        try:
            await goal.wait()
        except StepwellError as error:
            save.fail(error, [tier])
        await asyncio.wait([goal.done])
        if goal.done.exception() is None:
            save.mark_committed(tier, self._chain.clock.monotonic())

    async def _after_takeover(self) -> None:
        """What earlier processes left undone is decided once, and the rest of their debris is removed."""
        if self._opened is None:
            self._opened = self._keep(self._open_up())
        await asyncio.shield(self._opened)

    async def _open_up(self) -> None:
        await self.steering.on(Opened())
        self._keep(self._mender.mend())
        if self.owner.job.leader:
            wanted = [(goal.attempt, name) for name, flusher in self.flushers.items() for goal in flusher.goals]
            self._keep(self.owner.clean(wanted))

    def _may_drop(self, tier: str) -> bool:
        """Of all ranks that see the tier, the lowest deletes there."""
        return self.owner.committer.covered(self._chain.named(tier))[0] == self.owner.job.rank

    # -- flushes -------------------------------------------------------------------------

    async def flush(self, attempt: Attempt, tier: Tier, job: Job, parts: Sequence[str] | None = None) -> None:
        """Copies this rank's part of a checkpoint to a tier and commits it there, before all others.

        parts: only those (the copy is partial); default all. What is committed there already stays.
        """
        await self.owner.take(job)
        await self._after_takeover()
        if any(h.tier is tier for h in self._chain.catalog.holdings[attempt]):
            return
        await self.flushers[tier.info.name].want(attempt, parts, Priority.RESTORE).wait()

    async def lift(self, attempt: Attempt, tier: Tier, job: Job) -> None:
        """Copies this rank's part of a checkpoint up to a storage tier and commits it there, when there is time."""
        await self.owner.take(job)
        await self._after_takeover()
        if not any(h.tier is tier for h in self._chain.catalog.holdings[attempt]):
            await self.flushers[tier.info.name].want(attempt, None, Priority.PREFETCH).wait()

    async def _flush_once(self, tier: Tier, goal: Goal) -> None:
        """One try. What it has written stays for the next, unless the tier is full."""
        chain, attempt = self._chain, goal.attempt
        held = chain.catalog.holdings.get(attempt, [])
        if any(h.tier is tier for h in held):
            return
        healing = Healing()
        record, data = await read_record(chain.catalog, attempt, self.owner.job.rank, healing)
        wanted = set(record.parts if goal.parts is None else goal.parts) & set(record.parts)
        files = {file for part in wanted for file in record.parts[part]}
        key = CheckpointKey(chain.run, attempt.folder)
        shards = [shard for shard in record.shards if shard.file in files]
        sizes = [(ShardKey(key, shard.file), shard.size) for shard in shards]
        own = RecordKey(chain.run, f"{attempt.folder}/{rank_file(self.owner.job.rank)}")
        whole = await self._is_whole(tier, own, data, [key for key, _ in sizes])
        reserved = [] if whole else await reserve(tier, sizes, resume=True)
        sources = [h.tier for h in held]
        try:
            for shard, reservation in zip([] if whole else shards, reserved, strict=True):
                reading = Reading(
                    reservation.shard, sources, shard.crcs(), healing, Priority.FLUSH,
                    target=tier.info.name, limit=tier.info.write_bytes_per_s,
                )  # fmt: skip
                await chain.mover.copy(reading, tier, shard.size, resumed=reservation.resumed)
            await self._copy_sidecars(tier, sources, attempt, record)
            await self.owner.write_run_record(tier)
            goal.copied.set()
            absent = sorted(set(record.parts) - wanted)
            manifest = await self.owner.committer.publish(tier, attempt, data, reserved, absent=absent)
        except BaseException as error:
            self._keep(self._let_go(tier, reserved, keep_bytes=_may_go_on(error)))
            raise
        chain.catalog.add(attempt, tier, {shard.file: shard.size for shard in shards}, manifest)
        self._keep(self.steering.on(Committed(attempt.folder, tier.info.name)))

    async def _is_whole(self, tier: Tier, own: RecordKey, data: bytes, shards: Sequence[ShardKey]) -> bool:
        """Whether an earlier try got as far as the rank's record: then its shards are durable, and stay as they are,
        because its manifest may still be on its way, and a later writer may have taken the attempt for whole."""
        if await tier.fetch(own) != data:
            return False
        try:
            await (await tier.lease(shards)).close()
        except CheckpointGone:  # a deletion that did not get to its end left the record
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

    async def _let_go(self, tier: Tier, reserved: Sequence[Reservation], keep_bytes: bool) -> None:
        await self._chain.mover.settled([reservation.shard for reservation in reserved])
        if not keep_bytes:
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

    async def finish(self) -> None:
        """Waits for the saves under way and for what policies want of them, the newest first."""
        while self._saving:
            await asyncio.wait(list(self._saving))
        if self.owner.taken:
            await self._after_takeover()
            await self.steering.closing()
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
