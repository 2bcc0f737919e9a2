"""What a save is: the order given to the writer, and the handle that the caller holds."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import operator
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stepwell.clock import Clock
from stepwell.cover import Cover
from stepwell.errors import ConfigError, NotPlanned, SaveFailed, SaveSkipped, StepwellError, StoreClosed, WaitTimeout
from stepwell.jobs import Job
from stepwell.native import Mark
from stepwell.state import Snapshot
from stepwell.tiers.base import Tier, TierInfo
from stepwell.units import format_duration
from stepwell.waiting import done_within

#: what a thread that is told to go on needs until it asks for the interpreter
HAND_OVER_S = 1e-4


@dataclass(frozen=True, slots=True)
class SaveReport:
    """What a save did. Seconds count from the call of save()."""

    step: int
    checkpoint: str | None  # the folder's name, once it is known
    bytes: int
    blocked_seconds: float
    tier_seconds: dict[str, float]
    error: str | None


@dataclass(slots=True)
class Order:
    """All that the writer needs to know of one save; made by the calling thread."""

    call: int
    step: int
    job: Job
    snapshot: Snapshot
    metrics: dict[str, float | str | None]
    tags: list[str]
    files: dict[str, bytes]
    began: float  # monotonic
    made: float  # wall
    capture_seconds: float
    rewind_to: int | None  # this save starts a new timeline after that step
    let_go: Callable[[], None] = lambda: None  # of the state's memory, once all is copied
    cover: Cover | None = None  # what of it is copied after save() has returned
    marks: Mapping[int, Mark] = field(default_factory=dict)  # of each GPU: copies from there come after it
    line: int = 0  # saves of one line go on from each other; a restore or a rewind begins another


class Save:
    """One save on its way through the tiers: `wait`, `done`, `await`, `report`."""

    def __init__(self, order: Order, tiers: Sequence[Tier]) -> None:
        self.step = order.step
        self._order: Order | None = order  # holds the state's tensors until they are copied
        self._pid = os.getpid()
        self._bytes = order.snapshot.nbytes
        self.part_bytes = dict(order.snapshot.part_bytes)
        self.parts = tuple(self.part_bytes)
        self._began = order.began
        self._infos: dict[str, TierInfo] = {tier.info.name: tier.info for tier in tiers}
        #: of each tier: None once it is committed there, or why it is not
        self._futures: dict[str, concurrent.futures.Future[StepwellError | None]] = {
            name: concurrent.futures.Future() for name in self._infos
        }
        self.captured: concurrent.futures.Future[None] = concurrent.futures.Future()  # save() may return
        self.copied: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.cover = order.cover  # until all is copied
        self._waited_for = False  # by save()
        self._returns_at_once = order.cover is not None and not order.cover.urgent
        self.running: asyncio.Task[None] | None = None  # the writer's work on it; for the event loop
        self.blocked_seconds = 0.0
        self.checkpoint: str | None = None
        #: the store's newest step and the one to rewind to before this save; taken up again if it fails
        self.line_before: tuple[int | None, int | None] | None = None
        self.interrupted = False  # by Ctrl-C, which has told the caller already
        self.held: bool | None = None  # it stays in host memory until a policy sends it down; None: not decided yet
        self._seconds: dict[str, float] = {}
        self._failure: BaseException | None = None
        self._troubles: dict[str, BaseException] = {}  # tier -> what keeps it from getting there so far
        self.on_end: Callable[[int, BaseException | None], None] = lambda step, error: None
        self.on_held: Callable[[], None] = lambda: None

    # -- for the caller ------------------------------------------------------------------

    def wait(self, tier: str | None = None, *, survives: str | None = None, timeout: float | None = None) -> Save:
        """Blocks until the checkpoint is committed on `tier`; returns the save itself.

        Without `tier`: on the nearest tier that survives at least `survives` ("process", "reboot" or
        "node-loss"; default "reboot", or the safest there is). Raises SaveFailed, with the cause chained,
        if this save failed; NotPlanned if it will not get there; WaitTimeout after `timeout` seconds, while the
        save goes on; StoreClosed in a forked child. A tier that fails is tried again: a later wait may succeed.
        """
        name = self._choose(tier, survives)
        self._check_process()
        future = self._futures[name]
        if not done_within(future, timeout):
            raise WaitTimeout(
                f"the save was not on this tier within {timeout} s",
                todo="It goes on; wait again",
                step=self.step,
                tier=name,
            )
        if (why_not := future.result()) is not None:
            raise _again(why_not)
        return self

    def done(self, tier: str | None = None) -> bool:
        """Whether the checkpoint is committed on `tier` (default as in `wait`). Raises nothing but
        ConfigError for an unknown tier; a failed save is not done."""
        return self._is_on(self._choose(tier, None))

    def __await__(self) -> Generator[Any, None, Save]:
        self._check_process()
        yield from self._arrives(self._choose(None, None)).__await__()
        return self

    async def wait_everywhere(self) -> None:
        """Returns once the save is on every tier that it goes to. Raises what `wait` raises, but no NotPlanned."""
        for name in self._infos:
            with contextlib.suppress(NotPlanned):
                await self._arrives(name)

    def report(self) -> SaveReport:
        """Bytes and times so far."""
        error = None if self.error is None else str(self.error)
        return SaveReport(self.step, self.checkpoint, self._bytes, self.blocked_seconds, dict(self._seconds), error)

    def __repr__(self) -> str:
        where = [name for name in self._infos if self._is_on(name)]
        state = f"failed: {self._failure}" if self._failure else f"on {', '.join(where) or 'no tier yet'}"
        return f"<Save of step {self.step}, {self._bytes} bytes, {state}>"

    def _is_on(self, tier: str) -> bool:
        future = self._futures[tier]
        return future.done() and future.result() is None

    async def _arrives(self, tier: str) -> None:
        """As `wait`, on an event loop. Cancelling it leaves all other waits alone, and the loop may end before."""
        loop = asyncio.get_running_loop()
        future, ended = self._futures[tier], asyncio.Event()

        def wake(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits any more
                loop.call_soon_threadsafe(ended.set)

        future.add_done_callback(wake)
        await ended.wait()
        if (why_not := future.result()) is not None:
            raise _again(why_not)

    def _check_process(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed(
                "this save was called in the parent of this forked process",
                todo="Wait for it there: here nobody would hear of its end",
                step=self.step,
            )

    def _choose(self, tier: str | None, survives: str | None) -> str:
        if tier is not None:
            if tier not in self._infos:
                raise ConfigError(f"there is no tier {tier!r}", todo=f"The tiers are {', '.join(self._infos)}")
            return tier
        levels = ("nothing", "process", "reboot", "node-loss")
        if survives is not None and survives not in levels[1:]:
            raise ConfigError(f"survives={survives!r}", todo=f"Use one of {', '.join(levels[1:])}")
        strengths = {name: levels.index(info.survives) for name, info in self._infos.items()}
        wanted = levels.index(survives) if survives else min(levels.index("reboot"), max(strengths.values()))
        for name, strength in strengths.items():
            if strength >= wanted:
                return name
        raise ConfigError(f"no tier survives {survives}", todo=f"The tiers are {', '.join(self._infos)}")

    @property
    def settled(self) -> bool:
        """Whether nothing is left to wait for."""
        return all(future.done() for future in self._futures.values())

    @property
    def began(self) -> float:
        """When save() was called, in monotonic seconds."""
        return self._began

    @property
    def nbytes(self) -> int:
        return self._bytes

    # -- for the store and the writer ------------------------------------------------------

    def captured_within(self, seconds: float) -> bool:
        """Blocks until the state may change again, as far as no guard covers it, at most so long; whether it may."""
        if self._returns_at_once:
            return True
        self._waited_for = True
        return done_within(self.captured, seconds)

    def abandon(self) -> None:
        """Ends the writer's work on it. For the event loop."""
        if self.running is not None:
            self.running.cancel()

    def take_order(self) -> Order:
        """The order, once; the save itself keeps nothing of the state."""
        order, self._order = self._order, None
        assert order is not None
        return order

    def mark_captured(self) -> None:
        if not self.captured.done():
            self.captured.set_result(None)
            if self._waited_for:  # else it would get the interpreter when this thread has been asked for it for 5 ms
                time.sleep(HAND_OVER_S)

    def mark_copied(self) -> None:
        """Nothing of the state is needed any more: all is copied, or the save has failed."""
        cover, self.cover = self.cover, None
        if cover is not None:
            if self._failure is None and (error := cover.copied()) is not None:
                self.fail(error)
            cover.end()
        self.mark_captured()
        if not self.copied.done():
            self.copied.set_result(None)

    def mark_committed(self, tier: str, now: float) -> None:
        """Ends the waits on `tier`, also those that have been told of a failure: it was tried again."""
        self._seconds[tier] = now - self._began
        self._troubles.pop(tier, None)
        self._settle(tier, None)

    def mark_held(self) -> None:
        """It is in host memory, and goes no further now."""
        self.on_held()

    def mark_durable(self) -> None:
        """The first storage tier has it."""
        self._failure = None  # it was faster than whoever gave it up
        self.on_end(self.step, None)

    def planned(self, tier: str) -> None:
        """It goes to a tier after all."""
        if self._is_not_planned(tier):
            self._futures[tier] = concurrent.futures.Future()

    def not_planned(self, tier: str, why: NotPlanned) -> None:
        """Ends the waits on a tier that the checkpoint will not get to."""
        if not self._is_on(tier):
            self._settle(tier, why)

    def fail(self, error: BaseException, tiers: Sequence[str] | None = None) -> None:
        """Ends the waits on `tiers` with SaveFailed from `error`; without `tiers` the save itself has failed.

        Of errors of the save itself the first one counts.
        """
        _forget_frames(error)
        if tiers is None:
            if self._failure is not None:
                return
            self._failure = error
            self._order = None
            self.on_end(self.step, error)
            self.mark_copied()
        for name in self._infos if tiers is None else tiers:
            if not (self._is_on(name) if tiers is not None else self._is_not_planned(name)):
                todo = "" if tiers or getattr(error, "todo", "") else _TODO
                failed = SaveFailed(
                    f"the save failed: {error}", todo=todo, step=self.step, tier=name if tiers else None
                )
                failed.__cause__ = self._troubles[name] = error
                self._settle(name, failed)

    def _settle(self, tier: str, why_not: StepwellError | None) -> None:
        if self._futures[tier].done():
            self._futures[tier] = concurrent.futures.Future()
        self._futures[tier].set_result(why_not)

    def _is_not_planned(self, tier: str) -> bool:
        future = self._futures[tier]
        return future.done() and isinstance(future.result(), NotPlanned)

    @property
    def error(self) -> BaseException | None:
        """Why the save failed, or does not get on to one of its tiers so far."""
        return self._failure or next(iter(self._troubles.values()), None)

    @property
    def failed(self) -> bool:
        """Whether it has failed as a whole: there is no such checkpoint."""
        return self._failure is not None


_TODO = "Checkpoints from before are untouched, and saving goes on: mend the cause, and save again"


def _again(error: StepwellError) -> StepwellError:
    """A new one for each who waits: one that is raised twice collects the frames, and so the tensors, of both."""
    fresh = type(error)(error.what, todo=error.todo, **error.where)
    fresh.__cause__ = error.__cause__
    return fresh


def _forget_frames(error: BaseException | None) -> None:
    """Errors are kept; the state's tensors, which the frames of their tracebacks hold, must not be."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class SaveRecord:
    """How the saves of one store have gone, and what the next calls must be told of it. Any thread."""

    def __init__(self, clock: Clock, max_unsaved_s: float) -> None:
        self._clock, self._max_unsaved_s = clock, max_unsaved_s
        self._lock = threading.RLock()  # a signal handler may save while the thread that it interrupts holds it
        self._under_way: list[float] = []  # when each save began that has not ended, in that order
        self._in_memory: list[float] = []  # when each save began that stays there, and is newer than any durable one
        self._unsaved_since: float | None = None  # when the oldest save began after the last durable one
        self._durable = 0
        self._untold: tuple[int, BaseException] | None = None  # the first save's failure: the next call raises it
        self.failed = 0
        self.skipped = 0  # given up because of on_pressure
        self.last_error: BaseException | None = None

    def began(self, save: Save) -> None:
        now = self._clock.monotonic()
        save.on_end = lambda step, error: self._ended(now, save, error)  # first: Ctrl-C may come at any line
        save.on_held = lambda: self._held(now)
        with self._lock:
            self._under_way.append(now)
            if self._unsaved_since is None:
                self._unsaved_since = now

    def _held(self, began: float) -> None:
        """Nothing has become durable by it."""
        with self._lock:
            if began in self._under_way:
                self._under_way.remove(began)
                self._in_memory.append(began)

    def _ended(self, began: float, save: Save, error: BaseException | None) -> None:
        with self._lock:
            if began in self._under_way:
                self._under_way.remove(began)
            if error is None:
                self._durable += 1
                if self._untold is not None and self._untold[0] == save.step:
                    self._untold = None  # it was faster than whoever gave it up
                self._in_memory = [each for each in self._in_memory if each > began]
                self._unsaved_since = min((*self._under_way, *self._in_memory), default=None)
                return
            self.last_error = error
            if isinstance(error, SaveSkipped):
                self.skipped += 1
                return
            self.failed += 1
            if not self._durable and not save.interrupted:
                self._untold = (save.step, error)

    @property
    def unsaved_seconds(self) -> float:
        """How long nothing that was saved has become durable; 0.0 if everything is."""
        with self._lock:
            return 0.0 if self._unsaved_since is None else self._clock.monotonic() - self._unsaved_since

    def check_first(self) -> None:
        """Raises SaveFailed, once, if a save failed before any has succeeded."""
        with self._lock:
            untold, self._untold = self._untold, None
        if untold is not None:
            raise SaveFailed(
                f"the first save of this process failed: {untold[1]}",
                todo="Mend the cause; the next save is tried again",
                step=untold[0],
            ) from untold[1]

    def check_unsaved(self) -> None:
        """Raises SaveFailed as long as nothing has become durable for too long."""
        unsaved_s = self.unsaved_seconds
        if unsaved_s <= self._max_unsaved_s:
            return
        why = "none of them has ended" if self.last_error is None else f"the last error: {self.last_error}"
        raise SaveFailed(
            f"nothing has become durable for {format_duration(unsaved_s)} (max_unsaved is "
            f"{format_duration(self._max_unsaved_s)}); {self.failed} saves failed, {len(self._under_way)} are under "
            f"way; {why}",
            todo="This save goes on all the same; mend the cause, or raise max_unsaved",
        ) from self.last_error


@dataclass(slots=True)
class Turns:
    """Lets saves commit in the order in which they were called, however long each takes."""

    _last: asyncio.Future[None] | None = field(default=None)

    def take(self) -> tuple[asyncio.Future[None] | None, asyncio.Future[None]]:
        """(what to wait for, what to resolve when done)."""
        before, mine = self._last, asyncio.get_running_loop().create_future()
        self._last = mine
        return before, mine


def check_step(step: object) -> int:
    """A step as it is stored: any integer from 0, of whatever class."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]  # asked here
    except Exception:  # whatever its class raises
        number = -1
    if number < 0 or isinstance(step, bool):
        raise ConfigError(f"a step is an integer from 0, not {step!r}")
    return number
