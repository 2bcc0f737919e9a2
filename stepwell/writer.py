"""The writing side of a store: saves, flushes, repairs, and what policies ask for. Lives on the event loop."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from stepwell.ahead import Ahead
from stepwell.backoff import Backoff
from stepwell.chain import Chain
from stepwell.decisions import Decisions
from stepwell.deletion import Deleter
from stepwell.errors import SaveSkipped, StepwellError, StoreClosed
from stepwell.events import EventLog, LogKeeper
from stepwell.flushing import Flusher, Goal
from stepwell.flushwork import FlushWork
from stepwell.format.names import Attempt
from stepwell.format.records import RankRecord
from stepwell.jobs import Job
from stepwell.memoryonly import MemoryOnly
from stepwell.mending import Bad, Mender
from stepwell.ownership import Ownership
from stepwell.policies.base import Cancel, Closing, Committed, Found, Noted, Opened, Policy
from stepwell.policies.flush import DropBacklog
from stepwell.rescuing import rescue
from stepwell.room import Room
from stepwell.savework import Saver
from stepwell.saving import Save
from stepwell.steering import Steering
from stepwell.tiers.base import Tier
from stepwell.tiers.host import Priority
from stepwell.tying import Ties
from stepwell.units import format_bytes, format_duration
from stepwell.verification import Verifier

log = logging.getLogger("stepwell")


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
        self.saver.on_named = lambda save, attempt: self._keep(self.ties.foresee(save, attempt))
        self._newest: tuple[Save, Attempt] | None = None  # the newest save that got where it goes first
        self.flushers = {
            tier.info.name: Flusher(tier, partial(self._flush_once, tier), chain.clock, Backoff(rng))
            for tier in chain.storage
        }
        self.busy: set[tuple[str, str]] = set()  # (checkpoint, tier) of copies that are being deleted or repaired
        self.events = EventLog(chain.clock)
        self._mender = Mender(chain, self.owner, self.busy)
        self.deleter = Deleter(chain, self.owner, self.events, self._keep, self.busy)
        verifier = Verifier(chain, self._mender, self.events)
        if chain.settings.on_pressure == "newest-wins":
            policies = [DropBacklog(), *policies]  # before what retains, which may only then let go
        self.steering = Steering(chain, policies, self.flushers, self.deleter, verifier, self._keep)
        room = Room(chain, self.owner, self.deleter, self.steering, self.saver.holding)
        self.steering.may_drop = room.may_drop
        self.steering.views.saving = lambda: bool(self.saver.under_way)
        self.events.outlook = self.steering.outlook
        self.saver.room.make_room, self.saver.room.may_free = room.make, room.may_free
        self.saver.room.times_freed = lambda: self.deleter.times_freed
        for flusher in self.flushers.values():
            flusher.on_done = self._goal_done
            flusher.on_failed = partial(self._tried, flusher)
        self.work = FlushWork(chain, self.owner, self.deleter, self._keep)
        self.decisions = Decisions(chain, self.owner, self.steering.told)
        self.decisions.saving, self.decisions.committed = self._under_way, self._saved
        self.steering.wanted, self.steering.cancelled = self.decisions.tell, self._taken_back
        self.steering.in_step = self.decisions.in_step
        self.ties = Ties(chain, self.steering, self.work, self._keep)
        self._log_keeper = LogKeeper(self.events, chain.run, chain.authority, chain.clock)
        self._log_keeping: asyncio.Task[None] | None = None
        self.ahead = Ahead(chain, self.lift)
        if self.ahead.lifter is not None:
            self.steering.bring, self.ahead.lifter.on_lost = self._bring, self.steering.lost
        self._found_by: Job | None = None
        self._rescuing: asyncio.Task[None] | None = None
        self.owner.on_taken = self._taken
        chain.catalog.was_read = self._was_read
        self.memory = MemoryOnly(chain, self.owner, self.steering, lambda: self._saving.values())
        self.saver.room.may_hold = chain.option(chain.first).by_rules and chain.host is not None
        self.saver.goes_down, self.saver.room.let_older_go = self.steering.goes_down, self.memory.let_older_go
        self.saver.all_have = self.memory.all_have
        self.work.being_saved = self.saver.going_down
        if self.saver.room.may_hold:
            self.steering.views.being_saved = self.saver.going_down

    # -- saves ---------------------------------------------------------------------------

    def begin(self, save: Save) -> None:
        """Begins to carry a save out."""
        save.running = asyncio.ensure_future(self.save(save))

    async def save(self, save: Save) -> None:
        """Carries a save out on every tier. Never raises: what goes wrong is the save's own."""
        task = asyncio.current_task()
        assert task is not None
        self._saving[task] = save
        task.add_done_callback(self._ended)
        try:
            attempt = await self.saver.save(save)
        except asyncio.CancelledError:
            save.fail(StepwellError("the save was abandoned", step=save.step))
            raise
        except StepwellError as error:
            skipped = isinstance(error, SaveSkipped)
            if skipped:
                log.warning("step %d was skipped: %s", save.step, error)
            else:
                log.error("saving step %d failed: %s", save.step, error)
            self.events.add("skipped" if skipped else "failed", save.step, reason=str(error))
            save.fail(error)
            self._take_back(save)
            return
        except Exception as error:
            log.exception("saving step %d failed", save.step)
            save.fail(error)
            self._take_back(save)
            return
        there = self._chain.tiers[0] if save.held else self._chain.first
        if save.held:
            save.mark_held()
        else:
            self._tell_room(save)
            save.mark_durable()
        took = self._chain.clock.monotonic() - save.began
        self.events.add("saved", attempt, there.info.name, size_bytes=save.nbytes, seconds=took)
        if self._newest is None or self._newest[1] < attempt:  # one that stays in memory is faster than one before it
            self._newest = save, attempt
        try:
            await self._after_takeover()
            try:
                await self.steering.on(Committed(attempt.folder, there.info.name))
            finally:
                self.decisions.tell_saved(attempt.folder)
            await self.ties.follow(save, attempt)
            await self.steering.look_for_idle()
        except asyncio.CancelledError:
            save.fail(StoreClosed("the store was closed before the checkpoint was there"), self.ties.below)
            raise
        except Exception as error:  # the checkpoint is safe; what follows from it is not
            log.exception("deciding on step %d failed", save.step)
            save.fail(error, self.ties.below)

    def _take_back(self, save: Save) -> None:
        """A save that all ranks have given up: memory may have had it on this one before, and policies wanted it."""
        attempt = Attempt.parse(save.checkpoint or "")
        if attempt is None or not self.owner.taken or self.owner.job.world == 1 or not self.owner.job.leader:
            return
        for name, flusher in self.flushers.items():
            if any(goal.attempt == attempt for goal in flusher.goals):
                flusher.take_back(attempt, "its save was given up")
                self.decisions.tell(Cancel(attempt.folder, name, "its save was given up"))

    async def skip(self, save: Save, blocked_s: float | None, waits: str = "save()") -> None:
        """Ends a save whose `save()`, or what else waits for its copies, has blocked for so long, or was interrupted
        (None), and says so."""
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
        log.error("step %d was skipped: %s blocked for %s: %s", save.step, waits, format_duration(blocked_s), why)
        self.events.add("skipped", save.step, reason=f"{waits} blocked for {format_duration(blocked_s)}: {why}")
        what = f"a checkpoint of {format_bytes(save.nbytes)} was skipped: {waits} blocked for block_timeout"
        todo = "The next save is tried again"
        save.fail(StepwellError(f"{what} ({format_duration(blocked_s)}): {why}", todo=todo, step=save.step))

    def give_up(self, call: int, job: Job, why: BaseException) -> None:
        """A save() call that raised makes no checkpoint: the other ranks must not wait for this one's part."""
        if job.world > 1:
            self.saver.give_up(call, job, why)

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
        rescuing = self._rescuing or self._keep(self._rescue())
        self.steering.decides = self.owner.job.leader
        self.decisions.begin()
        await self.steering.on(Opened())
        self._keep(self._mender.mend())
        if self.owner.job.leader:
            self._keep(self._clean(rescuing))
            self._log_keeping = asyncio.ensure_future(self._log_keeper.keep(self.owner.writership.epoch))

    def _taken(self) -> None:
        """What an earlier process left in memory alone cannot wait until a save is there: it takes that save's room."""
        if self._chain.host is not None and self._chain.host.info.survives != "nothing":
            self._rescuing = self._keep(self._rescue())

    async def _rescue(self) -> None:
        for attempt in await rescue(self._chain, self.owner, self.flushers[self._chain.first.info.name]):
            self.events.add("planned", attempt, self._chain.first.info.name, "it was left in memory alone")

    async def _clean(self, rescuing: asyncio.Task[None]) -> None:
        await asyncio.wait([rescuing])  # what is left of it on the first tier is gone on from
        await self.owner.clean(self.busy, lambda: self.steering.promised, self.deleter.waits)

    # -- flushes -------------------------------------------------------------------------

    async def flush(self, attempt: Attempt, tier: Tier, job: Job, parts: Sequence[str] | None = None) -> None:
        """Copies this rank's part of a checkpoint to a tier and commits it there, before all others.

        parts: only those (the copy is partial); default all. What is committed there already stays.
        """
        await self.owner.take(job)
        await self._after_takeover()
        goal = await self.work.asked(tier, attempt, parts, self.flushers[tier.info.name])
        if goal is not None:
            await goal.wait()
        if self._newest is not None and self._newest[0].held and self._newest[1] == attempt:
            await self.ties.follow(*self._newest)

    async def lift(
        self, attempt: Attempt, tier: Tier, job: Job, parts: Sequence[str] | None,
        on_goal: Callable[[Goal], object] = lambda goal: None,
    ) -> None:  # fmt: skip
        """Copies this rank's part of a checkpoint up to a storage tier and commits it there, when there is time."""
        await self.owner.take(job)
        await self._after_takeover()
        if not await self.work.has(attempt, tier, parts):
            flusher = self.flushers[tier.info.name]
            goal = flusher.want(attempt, parts, Priority.PREFETCH)
            on_goal(goal)
            try:
                await goal.wait()
            except asyncio.CancelledError:
                if goal.priority is Priority.PREFETCH:
                    flusher.take_out(goal, "its prefetch was cancelled")
                raise

    async def look_ahead(self, job: Job) -> None:
        """The store was opened: asks policies what to bring up. Takes nothing over."""
        self._found_by = job
        await self._chain.catalog.refresh()
        await self.steering.look_ahead(Found())

    async def _bring(self, attempt: Attempt, parts: Sequence[str] | None) -> int:
        job = self.owner.job if self.owner.taken else self._found_by
        assert job is not None
        return await self.ahead.bring_own(attempt, parts, job)

    async def _flush_once(self, tier: Tier, goal: Goal) -> None:
        began = self._chain.clock.monotonic()
        manifest = await self.work.once(tier, goal)
        if manifest is not None:
            took = self._chain.clock.monotonic() - began
            self.events.add("flushed", goal.attempt, tier.info.name, size_bytes=manifest.size, seconds=took)
            self.steering.soon(Committed(goal.attempt.folder, tier.info.name))

    def _tried(self, flusher: Flusher, goal: Goal, error: StepwellError) -> None:
        self.events.add("failed", goal.attempt, flusher.tier.info.name, str(error))

    def _goal_done(self, goal: Goal) -> None:
        self._tidy_memory()
        if goal.done.exception() is None:  # else what waits for idle tiers would ask for it again at once, for ever
            self._keep(self.steering.look_for_idle())

    def _taken_back(self, move: Cancel) -> None:
        self.decisions.tell(move)
        attempt = Attempt.parse(move.checkpoint)
        assert attempt is not None
        self._keep(self.work.forget(attempt, self._chain.named(move.tier)))

    def _was_read(self, attempt: Attempt) -> None:
        if self._opened is not None and self._opened.done():
            self.steering.was_read(attempt)

    async def noted(self, attempt: Attempt) -> None:
        """Metrics, tags or keeps of a checkpoint were changed by this process."""
        if not self.owner.taken:
            return
        if self._chain.catalog.notes.kept(attempt) and self.memory.is_alone(attempt) and self.owner.job.world == 1:
            self.flushers[self._chain.first.info.name].want(attempt)  # else it would end with this process
        await self.steering.on(Noted(attempt.folder))

    def _ended(self, task: asyncio.Task[None]) -> None:
        save = self._saving.pop(task)
        self.saver.holding.discard(save)
        if save.checkpoint is not None:
            self.decisions.ended(save.checkpoint)
        self.deleter.note_freed()  # or it will be, by what this save has made superfluous
        self._tidy_memory()

    def _under_way(self) -> list[str]:
        return [save.checkpoint for save in self._saving.values() if save.checkpoint is not None]

    def _saved(self) -> list[str]:
        """Of these, what is where it goes first."""
        chain, found = self._chain, []
        for save in self._saving.values():
            attempt, there = Attempt.parse(save.checkpoint or ""), chain.host if save.held else chain.first
            if attempt is not None and there is not None and chain.catalog.known_manifest(attempt, there) is not None:
                found.append(attempt.folder)
        return found

    def _tidy_memory(self) -> None:
        if self.saver.room.may_hold:
            self._keep(self.memory.let_older_go())

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
        await self.closing()
        absent = self._chain.catalog.absent
        if self.owner.taken and any(tier.info.name in absent for tier in self._chain.storage[:-1]):
            looking = self._keep(self._close_again())
            await self._idle()
            await asyncio.wait([looking])
        await self._idle()

    async def _close_again(self) -> None:
        """A tier above the last did not answer the last scan: what it has may have to get down."""
        await self._chain.catalog.refresh()
        await self.closing()

    async def _idle(self) -> None:
        for flusher in self.flushers.values():
            await flusher.idle()

    @property
    def saving(self) -> dict[asyncio.Task[Any], Save]:
        """The saves under way, by the tasks that carry them out."""
        return dict(self._saving)

    async def closing(self) -> None:
        """Asks the policies what must get down before the end, and lets the queues hurry."""
        if self.owner.taken:
            self.deleter.hurry_all()
            await self._after_takeover()
            if self.saver.room.may_hold and (newest := self.memory.newest()) is not None:
                self.flushers[self._chain.first.info.name].want_alone(newest)  # near, and so there first
            await self._close_as_one()
            if self._newest is not None:  # it may have to go where it was not planned to go before
                await self.ties.follow(*self._newest)

    async def _close_as_one(self) -> None:
        newest = next(iter(self._chain.catalog.newest_first()), None)
        if self.decisions.follows and newest is not None and await self.steering.would_flush(Closing()):
            await self.decisions.closing(newest)
        await self.steering.closing()
        if newest is not None:
            self.decisions.tell_closing(newest.folder)

    async def close(self, patience_s: float) -> None:
        """Gives up what `finish` has not finished, waits a moment for the rest, then gives the run up."""
        self.ahead.close()
        self._chain.catalog.was_read = lambda attempt: None
        self.decisions.tell_closed()
        self.decisions.close()
        for flusher in self.flushers.values():
            await flusher.close()
        self.deleter.stop()
        if self._log_keeping is not None:
            self._log_keeping.cancel()
            self._keep(self._log_keeper.write(self.owner.writership.epoch))
        for task in list(self._saving):
            task.cancel()
        if rest := [*self._saving, *self._background]:
            await asyncio.wait(rest, timeout=patience_s)
        if self.owner.taken:
            self.owner.committer.leave()
        # a tier that hangs does not get the last word; the next writer then finds out by itself
        await asyncio.wait([asyncio.ensure_future(self.owner.close())], timeout=patience_s)
