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
#: of that, what reads that pass through the arena take even if kept chunks are pushed out for it; the rest only
#: while slots are free. No less than what must be queued natively
PUSHING_BYTES = 64 << 20
#: how late the event loop may be for a limited edge without loss of rate: it catches up so much
LATE_S = 0.1
#: an operation that takes longer is reported as stuck: any disk moves its whole queue in less
STUCK_S = 20.0

#: ends of edges that are no tiers: the state's memory, an arena that keeps nothing, checksums only, another process
STATE, STAGING, VERIFY, NEIGHBOUR = "state", "staging", "verify", "neighbour"


@dataclass(frozen=True, slots=True)
class EdgeStatistics:
    """Counts of one edge so far, and what is on it now."""

    source: str
    target: str
    queued: int  # operations that wait for their turn
    in_flight_bytes: int
    moved_bytes: int
    failed: int
    bytes_per_s: float  # while something moved or waited, its limit counted in; 0.0: nothing yet
    oldest_s: float  # how long the oldest operation in flight has taken; 0.0: there is none


_numbers = itertools.count()  # of all that waits, on whichever edge, in the order in which it came


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

    def give_back(self) -> None:
        """As `leave`, for a turn that was not used after all. Idempotent."""
        if self._number >= 0:
            self._edge._leave(self._number, self.size_bytes, None)
            self._number = -1

    def __enter__(self) -> Turn:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave(kind is None)


class Pace:
    """A limit in bytes a second that all edges to a tier, or all edges from it, keep together, the most urgent of
    what waits on any of them first."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self.free_at = 0.0  # when all that was let through has passed
        self._waiting: set[Edge] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._woken = False  # what is let through now would have gone at `free_at`, had the loop been on time

    def take(self, edge: Edge, size_bytes: int, now: float) -> bool:
        """Lets bytes through at `now`; False if they must wait: the edge is asked again when it is their turn."""
        if self._timer is not None or self.free_at > now:
            self._waiting.add(edge)
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_at(self.free_at, self._wake)
            return False
        self.free_at = max(self.free_at, now - LATE_S if self._woken else now) + size_bytes / self.bytes_per_s
        return True

    def _wake(self) -> None:
        self._timer, self._woken = None, True
        waiting, self._waiting = sorted(self._waiting, key=Edge.first), set()
        for edge in waiting:
            edge.admit()
        self._woken = False


class Edge:
    """Lets operations of one direction through, the most urgent first. Lives on the event loop."""

    def __init__(self, source: str, target: str, bound_bytes: Callable[[int], int], pace: Pace | None = None) -> None:
        """bound_bytes: asked each time, with the bytes in flight, because an arena grows and fills."""
        self.source, self.target = source, target
        self._bound_bytes, self._pace = bound_bytes, pace
        self._queue: list[_Waiter] = []
        self._in_flight_bytes = 0
        self._since: dict[int, float] = {}  # operation in flight -> when it began
        self._moved_bytes = self._failed = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None  # None: nothing waits or moves
        self._passed_at = 0.0  # when what was let through has passed at the rate of the limit

    async def enter(self, size_bytes: int, priority: Priority) -> Turn:
        """Waits until the edge has room for an operation; it is in flight until the turn is left."""
        loop = asyncio.get_running_loop()
        waiter = _Waiter(priority, next(_numbers), size_bytes, loop.create_future())
        heapq.heappush(self._queue, waiter)
        if self._busy_since is None:
            self._busy_since = max(loop.time(), self._passed_at)
        self.admit()
        try:
            await waiter.future
        except asyncio.CancelledError:
            if waiter.future.done() and not waiter.future.cancelled():
                self._leave(waiter.number, size_bytes, False)
            else:
                if waiter in self._queue:
                    self._queue.remove(waiter)
                    heapq.heapify(self._queue)
                self.admit()  # what comes after it may be smaller
            raise
        return Turn(self, waiter.number, size_bytes)

    def first(self) -> tuple[int, int]:
        """The place among all edges of what waits first here: its priority, then when it came."""
        return (self._queue[0].priority, self._queue[0].number) if self._queue else (len(Priority), 0)

    def admit(self) -> None:
        """Lets through what there is room for."""
        now = asyncio.get_running_loop().time()
        while self._queue:
            waiter = self._queue[0]
            if waiter.future.done():  # cancelled, and its task has not run since
                heapq.heappop(self._queue)
                continue
            in_flight = self._in_flight_bytes
            if in_flight and in_flight + waiter.size_bytes > self._bound_bytes(in_flight):
                return
            if self._pace is not None:
                if not self._pace.take(self, waiter.size_bytes, now):
                    return
                self._passed_at = self._pace.free_at
            heapq.heappop(self._queue)
            self._in_flight_bytes += waiter.size_bytes
            self._since[waiter.number] = now
            waiter.future.set_result(None)
        if not self._since and self._busy_since is not None:
            self._busy_s += max(now, self._passed_at) - self._busy_since
            self._busy_since = None

    def _leave(self, number: int, size_bytes: int, moved: bool | None) -> None:
        self._in_flight_bytes -= size_bytes
        self._moved_bytes += size_bytes if moved else 0
        self._failed += moved is False
        del self._since[number]
        self.admit()

    def statistics(self) -> EdgeStatistics:
        now = asyncio.get_running_loop().time()
        busy = self._busy_s + (max(0.0, now - self._busy_since) if self._busy_since is not None else 0.0)
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
        self, source: str, target: str, *, background: bool, sparing: bool = False,
        write_limit: float | None = None, read_limit: float | None = None,
    ) -> Edge:  # fmt: skip
        """The edge from `source` to `target`; the other arguments are taken when it is made.

        sparing: what moves there passes through slots, and is not worth the chunks that the arena keeps.
        write_limit: bytes a second into `target`, on all edges that have this limit together; read_limit: out of
        `source`, likewise. An edge has one of them at most.
        """
        edge = self._edges.get((source, target))
        if edge is None:
            pace = self._pace(target, "write", write_limit) or self._pace(source, "read", read_limit)
            foreground = self._sparing_bytes if sparing else self._foreground_bytes
            edge = Edge(source, target, self._background_bytes if background else foreground, pace)
            self._edges[source, target] = edge
        return edge

    def _pace(self, tier: str, direction: str, limit: float | None) -> Pace | None:
        return None if limit is None else self._paces.setdefault((tier, direction), Pace(limit))

    def _foreground_bytes(self, in_flight: int) -> int:
        return min(EDGE_BYTES, self._arena.beside_staging * self._arena.slot_bytes)

    def _sparing_bytes(self, in_flight: int) -> int:
        return min(self._foreground_bytes(in_flight), max(PUSHING_BYTES, in_flight + self._arena.free_bytes))

    def _background_bytes(self, in_flight: int) -> int:
        return min(BACKGROUND_BYTES, self._arena.capacity_bytes // BACKGROUND_SHARE)

    def all(self) -> list[Edge]:
        return list(self._edges.values())
