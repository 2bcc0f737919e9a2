"""A prefetch as users hold it, and the order among several of them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from stepwell.errors import ConfigError, StoreClosed, WaitTimeout
from stepwell.units import format_bytes, format_duration, parse_duration
from stepwell.waiting import done_within

log = logging.getLogger("stepwell")

_numbers = itertools.count()  # of all prefetches, in the order in which they came


@dataclass(frozen=True, order=True, slots=True)
class Urgency:
    """What prefetches are compared by: the lowest goes first."""

    below: int  # minus the priority
    deadline_at: float  # monotonic seconds; inf: none
    number: int

    @classmethod
    def of(cls, priority: int, deadline: str | float | None) -> Urgency:
        """deadline: seconds from now, or a time such as "30s". Raises ConfigError."""
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ConfigError(f"priority={priority!r}", todo="Give a whole number; higher ones go first")
        at = math.inf if deadline is None else time.monotonic() + parse_duration(deadline)
        return cls(-priority, at, next(_numbers))


@dataclass(frozen=True, slots=True)
class PrefetchProgress:
    """How far a prefetch is. What was used meanwhile counts as done."""

    done_bytes: int
    total_bytes: int  # of each reference of the list, also where one occurs twice
    seconds: float
    seconds_left: float | None  # at the rate so far; None: nothing has come yet
    waiting_bytes: int = 0  # will come once there is room: when earlier references of the list have been used
    left_out_bytes: int = 0  # past `max_bytes`: will not come
    on_time: bool | None = None  # whether the deadline was met, or will be at the rate so far; None: there is none


class Moving(Protocol):
    """A copy under way to a storage tier."""

    left_bytes: int | None  # that are not there yet; None: it has not begun


class Prefetch:
    """A prefetch under way: `wait`, `done`, `cancel`, `await`, `progress`, `late`."""

    def __init__(self, urgency: Urgency | None = None, *, pinned: bool = False) -> None:
        """pinned: what it brings is pinned, so that no use of it stands for having it there."""
        self.urgency, self.pinned = urgency or Urgency.of(0, None), pinned
        self._began = time.monotonic()
        self._ended: float | None = None
        self._done_bytes = self._total_bytes = self._waiting_bytes = self._left_out_bytes = 0
        self._under_way: Callable[[], int] = lambda: 0  # bytes of what is not wholly there
        self._future: Future[None] = Future()

    def wait(self, timeout: float | None = None) -> Prefetch:
        """Blocks until everything is there, or was used meanwhile. Raises what went wrong; WaitTimeout after `timeout`
        seconds, while it goes on; StoreClosed if it was cancelled, or the store was closed before."""
        if not done_within(self._future, timeout):
            waits = f", {format_bytes(self._waiting_bytes)} of it for room" if self._waiting_bytes else ""
            raise WaitTimeout(f"the prefetch took longer than {timeout} s{waits}", todo="It goes on; wait again")
        try:
            self._future.result()
        except CancelledError:
            raise StoreClosed("the prefetch was cancelled") from None
        return self

    def done(self) -> bool:
        """Whether everything is there."""
        return self._future.done() and not self._future.cancelled() and self._future.exception() is None

    def cancel(self) -> None:
        """Stops it; what has come stays until its room is needed."""
        self._future.cancel()

    def __await__(self) -> Generator[Any, None, Prefetch]:
        """As `wait`. Whoever stops awaiting it leaves it going on: only `cancel` ends it."""
        yield from self._arrives().__await__()
        return self

    async def _arrives(self) -> None:
        ending = asyncio.wrap_future(self._future)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            if not self._future.cancelled():  # it is the caller that was cancelled
                raise
            raise StoreClosed("the prefetch was cancelled") from None

    @property
    def late(self) -> bool:
        """Whether its deadline has passed before everything was there."""
        return (self._ended or time.monotonic()) > self.urgency.deadline_at

    @property
    def progress(self) -> PrefetchProgress:
        """Bytes and times now."""
        now = self._ended or time.monotonic()
        seconds, done_bytes = now - self._began, self._done_bytes + self._under_way()
        left = 0.0 if self.done() else None
        if done_bytes and left is None:
            left = seconds / done_bytes * (self._total_bytes - done_bytes)
        on_time: bool | None = None
        if self.urgency.deadline_at < math.inf:
            on_time = not self.late and (left is None or now + left <= self.urgency.deadline_at)
        return PrefetchProgress(
            done_bytes, self._total_bytes, seconds, left, self._waiting_bytes, self._left_out_bytes, on_time
        )

    def __repr__(self) -> str:
        return f"<Prefetch: {self._done_bytes} of {self._total_bytes} bytes{', done' if self.done() else ''}>"

    # -- for the store -------------------------------------------------------------------

    def follow(self, future: Future[None]) -> None:
        """Takes over how `future` ends; cancelling one cancels the other."""
        self._future = future
        future.add_done_callback(self._note_end)

    def _note_end(self, _: Future[None]) -> None:
        self._ended = time.monotonic()
        self._waiting_bytes = 0

    def expect(self, size_bytes: int, left_out_bytes: int = 0) -> None:
        self._total_bytes += size_bytes
        self._left_out_bytes += left_out_bytes

    def moved(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes

    @contextmanager
    def watching(self, size_bytes: int) -> Iterator[Callable[[Moving], object]]:
        """While a checkpoint is copied to a storage tier: call what this gives with each try of it."""
        tries: list[Moving] = []

        def there() -> int:
            left = tries[-1].left_bytes if tries else None
            return 0 if left is None else max(0, size_bytes - left)

        self._under_way = there
        try:
            yield tries.append
            self.moved(size_bytes)
        finally:
            self._under_way = lambda: 0

    def wait_for_room(self, size_bytes: int) -> None:
        """So much has to wait until there is room for it."""
        self._waiting_bytes = size_bytes

    async def warn_when_late(self) -> None:
        """Says so once if the deadline passes; cancelled by whoever carries the prefetch out, when that has ended."""
        if self.urgency.deadline_at < math.inf:
            await asyncio.sleep(max(0.0, self.urgency.deadline_at - time.monotonic()))
            log.warning(
                "a prefetch has missed its deadline of %s: %s of %s are there",
                format_duration(self.urgency.deadline_at - self._began),
                format_bytes(self._done_bytes),
                format_bytes(self._total_bytes),
            )
