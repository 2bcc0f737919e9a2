"""Prefetches at work: chunks come up into the arena, the most urgent first, chunk by chunk.

What comes next is decided anew at each chunk (`stepwell.lineup`), so a more urgent prefetch, a restore that reads a
chunk itself, or one that uses it up and makes room takes effect at once. A chunk is read once, whoever else wants it.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial

from stepwell.edges import BACKGROUND_BYTES, BACKGROUND_SHARE
from stepwell.errors import CheckpointGone, StepwellError, StoreClosed, TierFull
from stepwell.hostmem import host_budget_bytes, local_ranks
from stepwell.lineup import Entry, Key, Lineup, Request
from stepwell.mover import Mover
from stepwell.prefetching import Prefetch
from stepwell.ranges import Read
from stepwell.reading import Caller, Healing, Reading
from stepwell.tiers.host import HostTier, Priority
from stepwell.units import format_bytes
from stepwell.wanted import Item, Wanted, distinct

log = logging.getLogger("stepwell")

#: references whose shards are open at a time; each holds files, and leases that keep retention away
OPEN_MAX = 4
#: how long what is less urgent waits for a reference that is being opened: a tier may hang
OPEN_S = 1.0


class _Source:
    """The open shards of a reference, for as long as chunks of it come."""

    def __init__(self, item: Item, changed: Callable[[], object]) -> None:
        self.item, self._changed = item, changed
        self.shards: Mapping[Hashable, Wanted] = {}
        self.caller = Caller()
        self.opened = self.closed = False
        self.error: BaseException | None = None
        self._left = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._late_at = loop.time() + OPEN_S
        loop.call_at(self._late_at, changed)
        self._task = asyncio.ensure_future(self._hold())

    async def _hold(self) -> None:
        try:
            async with self.item.open() as shards:
                self.shards = {shard.name: shard for shard in shards}
                if not self.shards.keys() >= set(self.item.names):
                    raise CheckpointGone(f"{self.item.label} has been replaced since the prefetch was asked for")
                self.opened = True
                self._changed()
                await self._left.wait()
                await self.caller.settled()
        except Exception as error:
            self.error = error
        finally:
            self.closed = True
            self._changed()

    @property
    def soon(self) -> bool:
        """Whether it is worth waiting for."""
        return (
            not (self.opened or self.closed or self._left.is_set())
            and asyncio.get_running_loop().time() < self._late_at
        )

    def close(self) -> None:
        """Once what is on its way has ended; a tier may hang. Idempotent."""
        if self._left.is_set():
            return
        self.opened = False
        self._left.set()
        if not self.shards:
            self._task.cancel()


class Lifter:
    """Brings chunks into one host tier. Lives on the event loop."""

    def __init__(self, mover: Mover, host: HostTier) -> None:
        self.mover, self.host, self._arena = mover, host, host.arena
        self.lineup = Lineup(host.arena)
        self._moving: dict[Key, asyncio.Task[None] | None] = {}  # None: somebody else brings the chunk
        self._moves_of: dict[Request, set[asyncio.Task[None]]] = {}
        self._ends: dict[Request, asyncio.Future[None]] = {}
        self._sources: dict[Item, _Source] = {}
        self._lanes: Counter[str] = Counter()  # tier -> chunks on their way from there
        self._changed = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None
        self._closed = False
        self.on_lost: Callable[[Hashable], object] = lambda shard: None  # told of each shard that loses chunks
        mover.on_used = self._used
        self._arena.outranks = self.lineup.outranks
        self._arena.on_room = self._wake
        self._before = self._arena.on_evicted
        self._arena.on_evicted = self._lost

    @property
    def is_served(self) -> bool:
        """Whether another process's memory is what chunks are brought into."""
        return self.mover.neighbour is not None

    # -- from outside --------------------------------------------------------------------

    def fit(self, items: Sequence[Item], max_bytes: int | None) -> tuple[list[tuple[Item, int]], int]:
        """Of a list, the longest beginning whose chunks are together no more than `max_bytes`: each reference with the
        number of its chunks; and the bytes that are left out. Raises TierFull for a reference that cannot be kept."""
        known: set[Key] = set()
        taken: list[tuple[Item, int]] = []
        used_bytes = left_out_bytes = 0
        for item in items:
            count = 0
            for at, number, length in item.chunks:
                new = (item.names[at], number) not in known
                if left_out_bytes or (new and max_bytes is not None and used_bytes + length > max_bytes):
                    left_out_bytes += length
                    continue
                known.add((item.names[at], number))
                used_bytes += length * new
                count += 1
            if count or not item.chunks:
                taken.append((item, count))
        if self.host.grows:
            self.host.grow(host_budget_bytes(used_bytes, local_ranks()))
        for item, count in [] if self.is_served else taken:
            self.check_room(item, item.chunks[:count])
        return taken, left_out_bytes

    def check_room(self, item: Item, chunks: Sequence[tuple[int, int, int]]) -> None:
        """Raises TierFull, with the numbers, if these can never be kept together beside what is pinned."""
        arena = self._arena
        keys = {arena.key(item.names[at], number) for at, number, _ in chunks}
        pinned = len(arena.pinned.keys() - keys)
        if len(keys) + pinned > arena.kept_max:
            beside = f", {format_bytes(pinned * arena.slot_bytes)} of it pinned" if pinned else ""
            raise TierFull(
                f"{item.label}: {format_bytes(sum(length for _, _, length in chunks))} do not fit into the host tier, "
                f"which keeps {format_bytes(arena.kept_max * arena.slot_bytes)}{beside}",
                todo="Give the host tier more memory, prefetch less (parts, keys, max_bytes), or unpin something",
                tier=self.host.info.name,
            )

    async def bring(self, handle: Prefetch, wanted: Sequence[tuple[Item, int]]) -> None:
        """Returns once all of a list is here, or was used meanwhile. Raises what kept a chunk from coming.

        What does not fit waits until chunks of earlier entries have been used.
        """
        if self._closed:
            raise _closed()
        request = Request(handle, wanted)
        end = self._ends[request] = asyncio.get_running_loop().create_future()
        self._moves_of[request] = set()
        self._arena.expect(sum(distinct([item for item, _ in wanted]).values()))
        self.lineup.add(request)
        self._start()
        try:
            await end
        finally:
            self._forget(request, done=end.done() and not end.cancelled() and end.exception() is None)

    def _forget(self, request: Request, *, done: bool) -> None:
        del self._ends[request]
        for task in self._moves_of.pop(request):
            task.cancel()  # it goes on if it has begun: then its memory is the kernel's
        self.lineup.end(request, done=done)
        self._wake()

    def close(self) -> None:
        """Ends all prefetches: they raise StoreClosed."""
        self._closed = True
        for request in list(self._ends):
            self._fail(request, _closed())
        for source in self._sources.values():
            source.close()
        self._wake()

    # -- what happens --------------------------------------------------------------------

    def _used(self, reading: Reading, number: int) -> None:
        if self.lineup.used(reading.known_as, number, reading.caller):
            self._wake()

    def _lost(self, shard: Hashable) -> None:
        self._before(shard)
        if self.lineup.lost(shard):
            self._wake()
        self.on_lost(shard)

    def _wake(self) -> None:
        if self._worker is not None:
            self._changed.set()

    def _start(self) -> None:
        if self._worker is None:
            self._worker = asyncio.ensure_future(self._work())
        self._changed.set()

    def _fail(self, request: Request, error: BaseException) -> None:
        end = self._ends.get(request)
        if end is not None and not end.done():
            end.set_exception(error)

    # -- work ----------------------------------------------------------------------------

    async def _work(self) -> None:
        try:
            while self._ends or self._sources:
                self._changed.clear()
                self._look()
                await self._changed.wait()
        except Exception as error:
            log.exception("prefetching failed")
            for request in list(self._ends):
                self._fail(request, error)
        finally:
            self._worker = None

    def _look(self) -> None:
        """Starts all that may be started now."""
        for item, source in list(self._sources.items()):
            if source.closed:
                del self._sources[item]
                if source.error is not None:
                    for request in [each for each in self.lineup.live if item in each.uses]:
                        self._fail(request, source.error)
        needed: set[Item] = set()
        waiting: set[Request] = set()
        while (next_one := self._next(needed, waiting)) is not None:
            self._move(*next_one)
        for request in list(self.lineup.live):
            end = self._ends[request]
            if not end.done() and not self._moves_of[request] and self.lineup.complete(request):
                end.set_result(None)
            idle = request in waiting and not self._moves_of[request]
            request.handle.wait_for_room(request.left_bytes if idle else 0)
        if any(source.soon for source in self._sources.values()):
            return  # what else is needed was not looked at
        for item, source in self._sources.items():
            if item not in needed and not any(name in item.names for name, _ in self._moving):
                source.close()

    def _next(self, needed: set[Item], waiting: set[Request]) -> tuple[Entry, int, _Source] | None:
        """The next chunk that may come, if there is one. Opens what must be open for that.

        needed: gets the references that must be open or stay so. waiting: the prefetches that wait for room.
        """
        ahead = max(1, min(BACKGROUND_BYTES, self._arena.capacity_bytes // BACKGROUND_SHARE) // self._arena.slot_bytes)
        for entry, index in self.lineup.candidates(self._moving):
            request, item = entry.request, entry.item
            if self._ends[request].done() or self._closed:
                continue
            needed.add(item)
            if not (self.is_served or self.lineup.may_come(entry, self._unplaced())):
                waiting.add(request)
                continue
            source = self._sources.get(item)
            if source is None and len(self._sources) < OPEN_MAX:
                source = self._sources[item] = _Source(item, self._wake)
            if source is not None and source.soon:
                return None
            if source is None or not source.opened:
                continue
            name, number = entry.key(index)
            if (arrival := self._arena.arrival(name, number)) is not None:  # a restore brings it, or another store
                self._moving[name, number] = None
                arrival.add_done_callback(partial(self._arrived, (name, number)))
                return self._next(needed, waiting)
            if self._lanes[self._lane(source.shards[name])] < ahead:
                return entry, index, source
        return None

    def _lane(self, shard: Wanted) -> str:
        return next((tier.info.name for tier in shard.tiers if tier is not self.host), "")

    def _unplaced(self) -> int:
        """Chunks on their way that have no slot yet."""
        arena = self._arena
        return sum(not arena.has(*key) and arena.arrival(*key) is None for key in self._moving)

    def _arrived(self, key: Key, _: object) -> None:
        del self._moving[key]
        self._wake()

    def _move(self, entry: Entry, index: int, source: _Source) -> None:
        name, number = key = entry.key(index)
        shard, request = source.shards[name], entry.request
        lane = self._lane(shard)
        self._lanes[lane] += 1
        task = self._moving[key] = asyncio.ensure_future(
            self._bring(shard, number, entry.item.chunks[index][2], source.caller)
        )
        self._moves_of[request].add(task)

        def ended(done: asyncio.Task[None]) -> None:
            self._lanes[lane] -= 1
            self._moves_of.get(request, set()).discard(done)
            self._arrived(key, done)
            if not done.cancelled() and (error := done.exception()) is not None:
                self._fail(request, error)

        task.add_done_callback(ended)

    async def _bring(self, shard: Wanted, number: int, length: int, caller: Caller) -> None:
        reading = Reading(
            shard.key, shard.tiers, shard.crcs, Healing(), Priority.PREFETCH, target=self.host.info.name,
            cached_as=shard.cached_as, caller=caller, size=shard.size,
        )  # fmt: skip
        await self.mover.get(reading, [Read(number * self._arena.slot_bytes, length)], kept=True)
        if self.is_served and not self._arena.has(shard.name, number):
            self.lineup.elsewhere.add((shard.name, number))


def _closed() -> StepwellError:
    return StoreClosed("the store was closed before everything was there")
