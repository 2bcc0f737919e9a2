"""Edges: the ways between two tiers, each with a queue, a bound and a limit of its own.

A slow edge delays only itself: what waits for it waits in its queue, and it never has more bytes in flight
than its bound, so it cannot take all slots. The state's memory counts as a place, named `state`.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType

from stepwell.tiers.host import Arena, Priority

#: bytes in flight on an edge that somebody waits for; above the 64 MiB or 25 ms of a fast disk's rate that must
#: be queued natively, so that a busy interpreter does not stop it. Never more than what may be kept of the arena
EDGE_BYTES = 256 << 20
#: the same on an edge that works in the background: a stuck one must leave nearly all slots to the others. Of a
#: small arena it takes at most one part in so many
BACKGROUND_BYTES, BACKGROUND_SHARE = 64 << 20, 8
#: how late the event loop may be for a limited edge without loss of rate: it catches up so much
LATE_S = 0.1
#: an operation that takes longer is reported as stuck: any disk moves its whole queue in less
STUCK_S = 20.0

#: ends of edges that are no tiers: the state's memory, an arena that keeps nothing, checksums only
STATE, STAGING, VERIFY = "state", "staging", "verify"


@dataclass(frozen=True, slots=True)
class EdgeStatistics:
    """Counts of one edge so far, and what is on it now."""

    source: str
    target: str
    queued: int  # operations that wait for their turn
    in_flight_bytes: int
    moved_bytes: int
    failed: int
    bytes_per_s: float  # while there was something to move; 0.0: nothing yet
    oldest_s: float  # how long the oldest operation in flight has taken; 0.0: there is none


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    number: int
    size_bytes: int = field(compare=False)
    future: asyncio.Future[None] = field(compare=False)


class Turn:
    """The right to have bytes in flight on an edge, until it is left."""

    __slots__ = ("_edge", "_number", "size_bytes")

    def __init__(self, edge: Edge, number: int, size_bytes: int) -> None:
        self._edge, self._number, self.size_bytes = edge, number, size_bytes

    def leave(self, moved: bool) -> None:
        """Gives the room back. moved: whether the bytes got where they should. Idempotent."""
        if self._number >= 0:
            self._edge._leave(self._number, self.size_bytes, moved)
            self._number = -1

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(kind is None)


class Pace:
    """A limit in bytes a second that all edges to a tier, or all edges from it, keep together."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0  # when all that was let through has passed

    def take(self, size_bytes: int, now: float, waited: bool) -> None:
        """Lets bytes through at `now`. waited: they would have gone at `free_at`, had the loop been on time."""
        begin = max(self.free_at, now - LATE_S) if waited else max(self.free_at, now)
        self.free_at = begin + size_bytes / self.bytes_per_s


class Edge:
    """Lets operations of one direction through, the most urgent first. Lives on the event loop."""

    def __init__(self, source: str, target: str, bound_bytes: Callable[[], int], pace: Pace | None = None) -> None:
        """bound_bytes: asked each time, because an arena may grow."""
        self.source, self.target = source, target
        self._bound_bytes, self._pace = bound_bytes, pace
        self._queue: list[_Waiter] = []
        self._numbers = itertools.count()
        self._in_flight_bytes = 0
        self._since: dict[int, float] = {}  # operation in flight -> when it began
        self._moved_bytes = self._failed = 0
        self._busy_s, self._busy_since = 0.0, 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._paced = False  # the first in the queue waits for nothing but the pace

    async def enter(self, size_bytes: int, priority: Priority) -> Turn:
        """Waits until the edge has room for an operation; it is in flight until the turn is left."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(priority, next(self._numbers), size_bytes, loop.create_future())
        heapq.heappush(self._queue, waiter)
        self._admit()
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self._leave(waiter.number, size_bytes, False)
            else:
                if waiter in self._queue:
                    self._queue.remove(waiter)
                    heapq.heapify(self._queue)
                self._admit()  # what comes after it may be smaller
            raise
        return Turn(self, waiter.number, size_bytes)

    def _admit(self) -> None:
        now = asyncio.get_running_loop().time()
        while self._queue:
            waiter = self._queue[0]
            if waiter.future.done():  # cancelled, and its task has not run since
                heapq.heappop(self._queue)
                continue
            if self._in_flight_bytes and self._in_flight_bytes + waiter.size_bytes > self._bound_bytes():
                return
            if self._pace is not None:
                if self._pace.free_at > now:
                    self._paced = True
                    self._wake_at(self._pace.free_at)
                    return
                self._pace.take(waiter.size_bytes, now, self._paced)
            heapq.heappop(self._queue)
            if not self._since:
                self._busy_since = now
            self._in_flight_bytes += waiter.size_bytes
            self._since[waiter.number] = now
            waiter.future.set_result(None)
        self._paced = False

    def _wake_at(self, when: float) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(when, self._woken)

    def _woken(self) -> None:
        self._timer = None
        self._admit()

    def _leave(self, number: int, size_bytes: int, moved: bool) -> None:
        self._in_flight_bytes -= size_bytes
        self._moved_bytes += size_bytes if moved else 0
        self._failed += not moved
        del self._since[number]
        if not self._since:
            self._busy_s += asyncio.get_running_loop().time() - self._busy_since
        self._admit()

    def statistics(self) -> EdgeStatistics:
        now = asyncio.get_running_loop().time()
        busy = self._busy_s + (now - self._busy_since if self._since else 0.0)
        return EdgeStatistics(
            self.source,
            self.target,
            len(self._queue),
            self._in_flight_bytes,
            self._moved_bytes,
            self._failed,
            self._moved_bytes / busy if busy > 0 else 0.0,
            now - min(self._since.values()) if self._since else 0.0,
        )

    def __repr__(self) -> str:
        return (
            f"<Edge {self.source} -> {self.target}: {len(self._queue)} queued, {self._in_flight_bytes} bytes in flight>"
        )


class Edges:
    """All edges of a mover, made when they are first used."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._edges: dict[tuple[str, str], Edge] = {}
        self._paces: dict[tuple[str, str], Pace] = {}

    def between(
        self, source: str, target: str, *, background: bool, write_limit: float | None = None,
        read_limit: float | None = None,
    ) -> Edge:  # fmt: skip
        """The edge from `source` to `target`; the other arguments are taken when it is made.

        write_limit: bytes a second into `target`, on all edges that have this limit together; read_limit: out of
        `source`, likewise. An edge has one of them at most.
        """
        edge = self._edges.get((source, target))
        if edge is None:
            pace = self._pace(target, "write", write_limit) or self._pace(source, "read", read_limit)
            edge = Edge(source, target, self._background_bytes if background else self._foreground_bytes, pace)
            self._edges[source, target] = edge
        return edge

    def _pace(self, tier: str, direction: str, limit: float | None) -> Pace | None:
        return None if limit is None else self._paces.setdefault((tier, direction), Pace(limit))

    def _foreground_bytes(self) -> int:
        return min(EDGE_BYTES, self._arena.kept_max * self._arena.slot_bytes)

    def _background_bytes(self) -> int:
        return min(BACKGROUND_BYTES, self._arena.capacity_bytes // BACKGROUND_SHARE)

    def all(self) -> list[Edge]:
        return list(self._edges.values())
