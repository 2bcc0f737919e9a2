"""Flushes: each tier has a queue of checkpoints that must get there, and works through it by itself.

A tier that fails is tried again, with pauses that grow, for as long as the store is open; the checkpoint is
safe on the tier above meanwhile, and no other tier waits. What a try has written stays there, and the next
one goes on from it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from stepwell.backoff import Backoff
from stepwell.clock import Clock
from stepwell.errors import NotPlanned, StepwellError, StoreClosed, TierError
from stepwell.format.names import Attempt
from stepwell.tiers.base import Tier
from stepwell.tiers.host import Priority

log = logging.getLogger("stepwell")

#: after so many failed tries whoever waits for the flush is told; it is still tried again
TELL_AFTER = 3
#: the pause after a try that could not read what it should copy
UNREAD_S = 1.0
#: the pause after a try that lets another flush pass, which may not be known here yet
PASS_S = 0.1
#: commits that may wait for other ranks while the next checkpoint is copied already; ranks may be at different
#: checkpoints when the order changes, and would wait for each other if one had to be finished first
COMMITS_MAX = 64


class OutOfTurn(Exception):
    """A try lets another flush of the same checkpoint pass."""


@dataclass(eq=False, slots=True)
class Goal:
    """A checkpoint that must get to a tier."""

    attempt: Attempt
    parts: tuple[str, ...] | None
    priority: Priority
    done: asyncio.Future[None] = field(repr=False)
    tries: int = 0
    error: StepwellError | None = None
    running: bool = False
    copied: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # only the commit is left
    aside: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # its try holds up no other goal
    told: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # failed often enough, or done
    place: int = 0  # a lower one goes first, before any priority: while the store is drained
    held: bool = False  # not to be begun
    lets_pass: bool = False  # the other flushes of the checkpoint go first, whatever their places
    back: asyncio.Event = field(default_factory=asyncio.Event, repr=False)  # it was taken back while it runs
    asks: set[str] = field(default_factory=set)  # what has asked for it, by names that all ranks know
    alone: bool = False  # asked for because memory alone had it; ranks may see that differently
    left_bytes: int | None = None  # of this rank's part, not there yet; None: no try has got so far
    moving: asyncio.Task[None] | None = field(default=None, repr=False)  # the try that copies bytes now

    def begin(self, size_bytes: int) -> None:
        """The try that runs copies so many bytes from now on; until they are there it may be broken off."""
        self.left_bytes, self.moving = size_bytes, asyncio.current_task()

    def there(self, size_bytes: int) -> None:
        """So many bytes of them are on the tier."""
        self.left_bytes = max(0, (self.left_bytes or 0) - size_bytes)

    async def wait(self) -> None:
        """Returns when it is there; raises once it has failed for good or TELL_AFTER times."""
        await self.told.wait()
        if self.done.done():
            self.done.result()
        elif self.error is not None:
            raise self.error


#: copies a checkpoint to the tier and commits it there
FlushOnce = Callable[[Goal], Awaitable[None]]


class Flusher:
    """One tier's queue. Lives on the event loop."""

    def __init__(self, tier: Tier, flush_once: FlushOnce, clock: Clock, backoff: Backoff) -> None:
        self.tier = tier
        self._flush_once, self._clock, self._backoff = flush_once, clock, backoff
        self._goals: list[Goal] = []  # all that are not done, in the order in which they will be tried
        self._running: set[asyncio.Task[None]] = set()
        self._worker: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._closed = False
        self.last_error: StepwellError | None = None
        self.next_try_at = 0.0  # monotonic; in the past unless the tier has failed
        self.on_done: Callable[[Goal], object] = lambda goal: None  # a goal is reached, or was given up
        self.on_failed: Callable[[Goal, StepwellError], object] = lambda goal, error: None  # a try of one

    def want(self, attempt: Attempt, parts: Sequence[str] | None = None, priority: Priority = Priority.FLUSH) -> Goal:
        """Puts a checkpoint into the queue, or finds it there; a higher priority moves it forward."""
        if self._closed:
            raise StoreClosed("the store is being closed", step=attempt.step, tier=self.tier.info.name)
        wanted = None if parts is None else tuple(sorted(parts))
        goal = next((g for g in self._goals if (g.attempt, g.parts) == (attempt, wanted) and not g.back.is_set()), None)
        if goal is None:
            goal = Goal(attempt, wanted, priority, asyncio.get_running_loop().create_future())
            goal.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, whoever waits
            self._goals.append(goal)
        goal.priority = min(goal.priority, priority)
        if goal.told.is_set():  # it has failed often; whoever asks again waits for new tries, the first of them now
            goal.tries, self.next_try_at = 0, 0.0
            goal.told.clear()
        self._goals.sort(key=lambda g: g.priority)  # stable: first come, first served
        self._wake.set()
        if self._worker is None:
            self._worker = asyncio.ensure_future(self._work())
        return goal

    def want_alone(self, attempt: Attempt) -> None:
        """As `want`, of what memory alone has: once it is on another tier it need not come here."""
        self.want(attempt).alone = True

    def cancel(self, attempt: Attempt, reason: str) -> bool:
        """Takes a checkpoint out of the queue again; False if it is not in it, if its bytes are moving already, or if
        somebody waits for it (`store.flush`)."""
        goals = [goal for goal in self._goals if goal.attempt == attempt]
        if not goals or any(goal.running or goal.priority < Priority.FLUSH for goal in goals):
            return False
        for goal in goals:
            self.take_out(goal, reason)
        return True

    def take_back(self, attempt: Attempt, reason: str) -> None:
        """As `cancel`, but what runs is broken off, too: all ranks do that. What somebody waits for stays."""
        for goal in self.goals:
            if goal.attempt == attempt and goal.priority >= Priority.FLUSH:
                if goal.running:
                    goal.back.set()
                else:
                    self.take_out(goal, reason)

    def take_out(self, goal: Goal, reason: str) -> None:
        """Takes one goal out of the queue; nothing if it runs or is done."""
        if goal.running or goal not in self._goals:
            return
        step, name = goal.attempt.step, self.tier.info.name
        todo = f"store.flush({step}, to={name!r}) does"
        self._finish(goal, NotPlanned(f"it was not flushed: {reason}", todo=todo, step=step, tier=name))

    def hurry(self) -> None:
        """Newest first from now on, and at once: the store is being closed or drained."""
        self._goals.sort(key=lambda g: (g.priority, -g.attempt.step))
        self._backoff.succeeded()
        self.next_try_at = 0.0
        for goal in self._goals:
            goal.tries = 0
            if not goal.done.done():
                goal.told.clear()
        self._wake.set()

    def arrange(self, order: Sequence[Goal], held: Sequence[Goal] = ()) -> None:
        """Until it is arranged anew `order` goes first, in that order, and nothing of `held` is begun.

        A try that copies while an earlier one waits is broken off; what it has written stays.
        """
        for goal in self._goals:
            goal.place = order.index(goal) - len(order) if goal in order else 0
            goal.held = goal in held
        waiting = [goal for goal in self._goals if not (goal.running or goal.held or goal.lets_pass)]
        first = min((goal.place for goal in waiting), default=0)
        for goal in self._goals:
            if goal.moving is not None and not goal.copied.is_set() and (goal.held or first < goal.place):
                goal.moving.cancel()
        self._wake.set()

    @property
    def goals(self) -> list[Goal]:
        return list(self._goals)

    @property
    def failing(self) -> bool:
        """Whether the last try failed and the next one is being waited for."""
        return self._backoff.failures > 0

    async def _work(self) -> None:
        while True:
            goal = self._next()
            if goal is None or len(self._running) >= COMMITS_MAX:
                await self._woken()
                continue
            pause = self.next_try_at - self._clock.monotonic()
            if pause > 0:
                await self._pause(pause)
                continue
            goal.running, goal.lets_pass = True, False
            goal.copied.clear()
            goal.aside.clear()
            task = asyncio.ensure_future(self._try(goal))
            self._running.add(task)
            task.add_done_callback(self._ended)
            await goal.aside.wait()

    def _next(self) -> Goal | None:
        """The most urgent that can be tried: of equals the one with fewest tries, else the first. What somebody asked
        for by hand goes before others once: if it fails, it must not keep them away. Two goals of one checkpoint would
        share its files: one waits for the other."""
        running = {goal.attempt for goal in self._goals if goal.running}
        first = {goal.attempt for goal in self._goals if not goal.lets_pass}
        passing = {g.attempt: g.place for g in self._goals if g.lets_pass and g.attempt in first}
        waiting = [
            goal
            for goal in self._goals
            if goal.attempt not in running
            and (goal.attempt in passing or not goal.held)  # another rank has begun with it
            and not (goal.lets_pass and goal.attempt in passing)
        ]

        def turn(goal: Goal) -> tuple[int, Priority, int]:
            place = min(goal.place, passing.get(goal.attempt, 0))
            return place, max(goal.priority, Priority.FLUSH) if goal.tries else goal.priority, goal.tries

        return min(waiting, key=turn, default=None)

    async def _woken(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    async def _pause(self, seconds: float) -> None:
        """Until then, or until something makes it worth trying earlier."""
        self._wake.clear()  # here, not in the task: it begins later, and must not miss what happens until then
        sleeping = asyncio.ensure_future(self._clock.sleep(seconds))
        waking = asyncio.ensure_future(self._wake.wait())
        try:
            await asyncio.wait([sleeping, waking], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()
            waking.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        self._wake.set()

    async def _try(self, goal: Goal) -> None:
        name = self.tier.info.name
        try:
            await self._flush_once(goal)
        except OutOfTurn:
            goal.lets_pass = True
            self.next_try_at = self._clock.monotonic() + PASS_S
        except TierError as error:
            self._failed(goal, error)
        except (StoreClosed, NotPlanned) as error:  # another rank's, which has no more part in this; or it need not be
            log.info("step %d does not get to %s: %s", goal.attempt.step, name, error)
            self._finish(goal, error)
        except StepwellError as error:
            if error.retry and goal.tries + 1 < TELL_AFTER:
                self._unread(goal, error)
            else:  # trying again would not help: say so
                log.error("step %d does not get to %s: %s", goal.attempt.step, name, error)
                self.last_error = goal.error = error
                self._finish(goal, error)
        except Exception as error:
            log.exception("step %d does not get to %s", goal.attempt.step, name)
            self._finish(goal, error)
        else:
            self._backoff.succeeded()
            self._finish(goal, None)
        finally:
            goal.running, goal.moving = False, None
            goal.copied.set()
            goal.aside.set()

    def _failed(self, goal: Goal, error: TierError) -> None:
        # a tier that does not answer has failed all that wait for it; any other error is this checkpoint's own
        for each in [g for g in self._goals if not g.running] if error.retry else []:
            self._note(each, error)
        self._note(goal, error)
        self.on_failed(goal, error)
        self.last_error = error
        pause = self._backoff.failed()
        self.next_try_at = self._clock.monotonic() + pause
        log.warning(
            "flushing step %d to %s failed (try %d, again in %.1f s): %s",
            goal.attempt.step, self.tier.info.name, goal.tries, pause, error,
        )  # fmt: skip

    def _unread(self, goal: Goal, error: StepwellError) -> None:
        """Where it is now it could not be read. That is no fault of this tier, so others hardly wait for it; and it may
        never pass, so it is not tried for ever."""
        goal.tries += 1
        goal.error = error
        self.on_failed(goal, error)
        self.next_try_at = self._clock.monotonic() + UNREAD_S
        log.warning("flushing step %d to %s is tried again: %s", goal.attempt.step, self.tier.info.name, error)

    def _note(self, goal: Goal, error: TierError) -> None:
        goal.tries += 1
        goal.error = error
        if goal.tries >= TELL_AFTER:
            goal.told.set()
        if self._backoff.failures >= TELL_AFTER:  # it is the tier: the others would fare no better
            for other in self._goals:
                other.error = other.error or error
                other.told.set()

    def _finish(self, goal: Goal, error: Exception | None) -> None:
        self._goals.remove(goal)
        if error is None:
            goal.done.set_result(None)
        else:
            goal.done.set_exception(error)
        goal.told.set()
        self.on_done(goal)

    async def idle(self) -> None:
        """Returns once every checkpoint is there, or it or the tier has failed TELL_AFTER times since `hurry`."""
        while waiting := [goal for goal in self._goals if not goal.told.is_set()]:
            await waiting[0].told.wait()

    async def close(self) -> None:
        """Gives up what is not there; tries under way are cancelled."""
        self._closed = True
        tasks = [task for task in (self._worker, *self._running) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for goal in self._goals:
            if not goal.done.done():
                why = f": {goal.error}" if goal.error else ""
                goal.done.set_exception(
                    StoreClosed(
                        f"the store was closed before the checkpoint was there{why}",
                        todo="The next store that opens this run goes on with it",
                        step=goal.attempt.step,
                        tier=self.tier.info.name,
                    )
                )
            goal.told.set()
        self._goals.clear()

    def __repr__(self) -> str:
        return f"<Flusher to {self.tier.info.name}: {len(self._goals)} checkpoints to go>"
