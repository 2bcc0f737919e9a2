"""Virtual time: asyncio event loops that run in steps, and can be stopped dead between any two of them.

Every simulated process has a `SimLoop` of its own, as a real one has; a `Timeline` runs all of them, one
callback at a time, and moves its clock to the next timer when nothing is ready. Which process goes on next is
drawn from the seed. Within a loop callbacks run in the order in which they were scheduled, because asyncio
promises that: interleavings vary by what the tiers take, as they do in the world.
(Alternative considered: asyncio's own loop with a selector that never waits; then all processes share one loop,
and none of them can be paused or killed alone.)
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import math
import random
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from types import CoroutineType
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

#: how often a killed coroutine may answer its end with another await before it counts as wrong
_CLOSES_MAX = 64
#: started tasks that are remembered before the ended ones among them are forgotten
_TASKS_PRUNE = 256


class Stuck(AssertionError):
    """Nothing is left to happen, and what was waited for has not come."""


class Timeline:
    """One clock and the events of all loops, in order."""

    def __init__(self, rng: random.Random) -> None:
        self.now = 0.0
        self.events = 0  # callbacks that have run
        self.after_event: Callable[[SimLoop], None] = lambda loop: None
        self._rng = rng
        self._loops: list[SimLoop] = []
        self._timers: list[tuple[float, int, asyncio.TimerHandle, SimLoop]] = []
        self._numbers = itertools.count()

    def new_loop(self, name: str) -> SimLoop:
        loop = SimLoop(self, name)  # type: ignore[abstract]  # it has what asyncio's tasks and futures ask for
        self._loops.append(loop)
        return loop

    def add_timer(self, when: float, handle: asyncio.TimerHandle, loop: SimLoop) -> None:
        heapq.heappush(self._timers, (when, next(self._numbers), handle, loop))

    def step(self) -> bool:
        """Runs one callback; False if nothing is left to happen."""
        ready = [loop for loop in self._loops if loop.ready]
        while not ready:
            if not self._timers:
                return False
            self._advance()
            ready = [loop for loop in self._loops if loop.ready]
        loop = ready[0] if len(ready) == 1 else self._rng.choice(ready)
        self.events += 1
        loop.run_next()
        self.after_event(loop)
        return True

    def _advance(self) -> None:
        """Moves the clock to the next timer, and makes all that are due then ready."""
        self.now = max(self.now, self._timers[0][0])
        while self._timers and self._timers[0][0] <= self.now:
            _, _, handle, loop = heapq.heappop(self._timers)
            if not handle.cancelled() and not loop.dead:
                loop.push(handle)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Steps until `done`. Raises Stuck if the events run out before."""
        while not done():
            if not self.step():
                raise Stuck(f"nothing is left to happen at {self.now:.3f} s")

    def forget(self, loop: SimLoop) -> None:
        self._loops.remove(loop)


class SimLoop(asyncio.AbstractEventLoop):
    """One process's event loop. It has no threads, no sockets, and no time of its own."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.name = name
        self.dead = False
        self.errors: list[dict[str, Any]] = []  # what nobody handled
        self.paused_until = 0.0
        self._timeline = timeline
        self._ready: deque[asyncio.Handle] = deque()
        self._tasks: list[asyncio.Task[Any]] = []

    def __repr__(self) -> str:
        return f"<SimLoop {self.name}: {len(self._ready)} ready{', dead' if self.dead else ''}>"

    # -- for the timeline ----------------------------------------------------------------------------

    @property
    def ready(self) -> bool:
        return bool(self._ready) and self._timeline.now >= self.paused_until

    def push(self, handle: asyncio.Handle) -> None:
        self._ready.append(handle)

    def run_next(self) -> None:
        handle = self._ready.popleft()
        if handle.cancelled():
            return
        before, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self)  # as `running` does; this is the hottest line of a simulation
        sys.set_asyncgen_hooks(finalizer=self._let_go)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Makes this the loop that asyncio's functions find."""
        before, hooks = asyncio._get_running_loop(), sys.get_asyncgen_hooks()
        asyncio._set_running_loop(self)
        sys.set_asyncgen_hooks(finalizer=self._let_go)
        try:
            yield
        finally:
            asyncio._set_running_loop(before)
            sys.set_asyncgen_hooks(*hooks)

    def _let_go(self, generator: AsyncGenerator[Any, Any]) -> None:
        """Nobody has an asynchronous generator any more that is not at its end: what it awaits ends with it. (asyncio's
        loop has a task for that, which would change histories.)"""
        inner = getattr(generator, "ag_await", None)
        if self.dead and isinstance(inner, CoroutineType):
            _close(inner)
            return
        with contextlib.suppress(BaseException):
            generator.aclose().send(None)

    def pause(self, seconds: float) -> None:
        """The process stands still (a SIGSTOP, a machine that swaps), and its timers with it."""
        self.paused_until = self._timeline.now + seconds
        self._timeline.add_timer(
            self.paused_until, asyncio.TimerHandle(self.paused_until, lambda: None, (), self), self
        )

    def kill(self) -> None:
        """Nothing of this loop ever runs again, and what its tasks were doing is forgotten without warnings.

        Its coroutines have to be closed, so their `finally` blocks do run, now: against tiers that must be dead
        already, and on a loop that schedules nothing.
        """
        self.dead = True
        self._ready.clear()
        with contextlib.suppress(ValueError):
            self._timeline.forget(self)
        with self.running():
            while self._tasks:  # a `finally` may start more
                _bury(self._tasks.pop())

    # -- for asyncio ---------------------------------------------------------------------------------

    def time(self) -> float:
        return self._timeline.now

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self.dead

    def is_closed(self) -> bool:
        return self.dead

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if not self.dead:
            self._ready.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        when = self.time() + delay
        if delay > 0:  # however little: who sleeps until some moment must not stay just before it for ever
            when = max(when, math.nextafter(self.time(), math.inf))
        return self.call_at(when, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        if not self.dead:
            self._timeline.add_timer(when, handle, self)
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # the timeline drops it when its time has come

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, T] | Generator[Any, None, T], **kwargs: Any) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.Task(coro, loop=self, **kwargs)
        if len(self._tasks) >= _TASKS_PRUNE:
            self._tasks = [each for each in self._tasks if not each.done()]
        self._tasks.append(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self.errors.append(context)

    def run_in_executor(self, executor: Any, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        raise AssertionError(f"a simulated process has no threads to run {func} on")


def _bury(task: asyncio.Task[Any]) -> None:
    if task.done():
        return
    coro = task.get_coro()
    assert coro is not None
    _close(coro)


def _close(coro: Coroutine[Any, Any, Any] | Generator[Any, Any, Any]) -> None:
    for _ in range(_CLOSES_MAX):
        try:
            coro.close()
            return
        except RuntimeError:  # it awaits in a `finally`: close that, too
            continue
        except BaseException:  # a dead tier's answer, or the end of the process itself
            return
    raise AssertionError(f"{coro} does not end")
