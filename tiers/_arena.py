"""The host arena: page-aligned slots of memory, one chunk long, through which all bytes pass.

It is staging pool and cache in one. A slot is *passing* while a chunk goes through it, or *kept*: then it
holds a chunk of a shard until that is dropped or evicted. A kept chunk that exists nowhere else is *dirty*
and never evicted; once another tier has committed it, it is clean and goes when room is needed, in the order
that the eviction policy says. One that *comes* with a prefetch under way makes room only for what is more
urgent: what the prefetch brings next must not push out what it has just brought. Kept slots leave a part of the
arena free for staging, so a full cache can block neither a flush nor a restore.

Memory is mapped in slices and made ready (populated) in the background as far as it is asked for; a slot is
handed out as soon as it is ready. It is not registered with the tiers' rings: with huge pages that made no
measurable difference (docs/architecture.md).
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from stepwell.errors import StepwellError, TierFull, TierUnavailable
from stepwell.native import Region
from stepwell.tiers._index import Index
from stepwell.tiers._slices import READY_SLOTS, Memory, Slices
from stepwell.tiers.base import CHUNK_BYTES, Chunk, EvictionPolicy, not_open

#: the part of an arena that kept chunks leave free, at least two slots and at most this many bytes
STAGING_SHARE, STAGING_BYTES_MAX = 8, 256 << 20
SLOTS_MIN = 4


class Priority(IntEnum):
    """Who is served first when slots or an edge are short."""

    RESTORE = 0
    SNAPSHOT = 1
    FLUSH = 2
    PREFETCH = 3


@dataclass(eq=False, slots=True)
class Slot:
    """One chunk's worth of memory. `users` hold it; `chunk` is what it keeps."""

    index: int
    address: int
    users: int = 0
    kept: bool = False
    chunk: Chunk | None = None
    filled: bool = False
    dirty: bool = False
    coming: bool = False

    @property
    def clean(self) -> bool:
        return self.filled and not self.dirty


@dataclass(order=True, slots=True)
class _Waiter:
    priority: int
    number: int
    kept: bool = field(compare=False)
    future: asyncio.Future[Slot] = field(compare=False)


class Arena:
    """Slots of `slot_bytes`, up to `capacity_bytes` together. Used on one event loop, `start`ed there."""

    def __init__(
        self,
        capacity_bytes: int,
        eviction: EvictionPolicy,
        *,
        slot_bytes: int = CHUNK_BYTES,
        memory: Callable[[int], Memory] = Region,
        background: bool = True,
        on_evicted: Callable[[Hashable], object] = lambda shard: None,
    ) -> None:
        """background: memory is made ready by a thread of its own. on_evicted: told of each shard that loses a
        chunk to eviction."""
        assert slot_bytes % 4096 == 0
        self.slot_bytes = slot_bytes
        self.count = max(SLOTS_MIN, capacity_bytes // slot_bytes)
        self.keep_limit: int | None = (
            None  # the most slots that may be kept, if it is less than what is not for staging
        )
        self.evicted_bytes = 0
        self._eviction = eviction
        self.on_evicted = on_evicted
        self._index = Index(self.count)
        self._memory = Slices(slot_bytes, memory, background, self._made_ready, self._short)
        self._slots: list[Slot] = []  # those that are ready
        self._free: deque[Slot] = deque()
        self._cached: dict[Hashable, dict[int, Slot]] = {}  # shard -> number of chunk -> slot
        self._by_key: dict[Hashable, Slot] = {}
        self._kept = 0
        self._clean = 0  # slots whose chunk is whole and clean: without one, no victim is looked for
        self._coming = 0  # those of them that come with a prefetch
        self._waiting: list[_Waiter] = []
        self._numbers = itertools.count()
        self._is_short = False  # the system had less memory than the capacity
        self._closed = False

    # -- size ----------------------------------------------------------------------------

    @property
    def capacity_bytes(self) -> int:
        return self.count * self.slot_bytes

    @property
    def beside_staging(self) -> int:
        """Slots that are not always there for staging."""
        return self.count - min(max(2, self.count // STAGING_SHARE), STAGING_BYTES_MAX // self.slot_bytes)

    @property
    def kept_max(self) -> int:
        """The most slots that may be kept."""
        return self.beside_staging if self.keep_limit is None else min(self.beside_staging, self.keep_limit)

    @property
    def ready_bytes(self) -> int:
        """Memory that has been taken from the system."""
        return len(self._slots) * self.slot_bytes

    @property
    def in_use(self) -> int:
        """Slots that somebody works with now."""
        return sum(slot.users > 0 for slot in self._slots)

    @property
    def cached_bytes(self) -> int:
        return self._kept * self.slot_bytes

    @property
    def free_bytes(self) -> int:
        """What can be had without pushing out a chunk."""
        return (self.count - len(self._slots) + len(self._free)) * self.slot_bytes

    @property
    def keepable_bytes(self) -> int:
        """What can be kept more without waiting until something was written down."""
        return max(0, self.kept_max - self._kept + self._clean) * self.slot_bytes

    def grow(self, capacity_bytes: int) -> None:
        """Raises the capacity; memory is made ready when it is needed. Never shrinks."""
        count = capacity_bytes // self.slot_bytes
        if count > self.count:
            self.count, self._is_short = count, False
            self._index.grow(count)
            self._serve()
            self._prepare_for_waiting()

    def expect(self, size_bytes: int) -> None:
        """Makes memory ready for this many bytes more than are in use, in the background."""
        busy = len(self._slots) - len(self._free)
        self._prepare_up_to(busy + -(-size_bytes // self.slot_bytes))

    def _prepare_up_to(self, count: int) -> None:
        if not self._closed:
            self._memory.prepare_up_to(min(count, self.count))

    def _prepare_for_waiting(self) -> None:
        if self._waiting:
            self._prepare_up_to(len(self._slots) + len(self._waiting) - len(self._free))

    def _made_ready(self, first: int, addresses: list[int]) -> None:
        if self._closed:
            return
        slots = [Slot(first + i, address) for i, address in enumerate(addresses)]
        self._slots += slots
        self.count = max(self.count, len(self._slots))  # they were wanted before the system ran short
        self._free.extend(slots)
        self._serve()
        if self._waiting:
            self._prepare_up_to(len(self._slots) + READY_SLOTS)

    def _short(self, error: OSError) -> None:
        """The system has no more memory: the arena stays as large as it is, and promises nothing more."""
        self.count, self._is_short = max(len(self._slots), 1), True
        for waiter in list(self._waiting):
            if waiter.kept or not self._slots:
                self._refuse(waiter, _no_memory(str(error)))
        self._serve()

    def _refuse(self, waiter: _Waiter, error: StepwellError) -> None:
        self._waiting.remove(waiter)
        if not waiter.future.done():
            waiter.future.set_exception(error)

    # -- slots ---------------------------------------------------------------------------

    async def acquire(self, priority: Priority, *, kept: bool = False) -> Slot:
        """A free slot, held once for the caller, as soon as there is one. kept: for a chunk that stays.

        Raises TierFull if the system gives no memory at all, or, for a kept one, less than the capacity: then
        there may never be one, because those who wait for it keep the others. TierUnavailable once closed.
        """
        if self._closed:
            raise _closed()
        if not self._waiting and (slot := self._take(priority, kept)) is not None:
            return slot
        waiter = _Waiter(priority, next(self._numbers), kept, asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, waiter)
        self._serve()
        if kept and self._is_short and not waiter.future.done():
            self._waiting.remove(waiter)
            raise _no_memory("it has less than was asked for")
        self._prepare_for_waiting()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.release(waiter.future.result())
            raise

    def _take(self, priority: int, kept: bool) -> Slot | None:
        if kept and self._kept >= self.kept_max and not (self._evict(priority) or self._let_pass(priority)):
            return None
        if not self._free and not (len(self._slots) >= self.count and self._evict(priority)):
            return None
        slot = self._free.popleft()
        slot.users, slot.kept = 1, kept
        self._kept += kept
        return slot

    def _serve(self) -> None:
        """Gives slots to those who wait, the most urgent first; one who waits for a kept slot holds up no other."""
        for waiter in list(self._waiting):
            if waiter.future.done():
                self._waiting.remove(waiter)
            elif (slot := self._take(waiter.priority, waiter.kept)) is not None:
                self._waiting.remove(waiter)
                waiter.future.set_result(slot)

    def hold(self, slot: Slot) -> None:
        """One user more: it is neither freed nor evicted until it is released as often."""
        slot.users += 1

    def release(self, slot: Slot) -> None:
        """One user less. A slot that keeps a chunk stays as it is; any other becomes free."""
        assert slot.users > 0
        slot.users -= 1
        if slot.users == 0 and slot.chunk is None:
            self._put_back(slot)
        if slot.users == 0:
            self._serve()

    def _put_back(self, slot: Slot) -> None:
        self._kept -= slot.kept
        slot.kept = slot.filled = slot.dirty = slot.coming = False
        self._free.appendleft(slot)  # the one used last is warm

    # -- chunks --------------------------------------------------------------------------

    def place(self, slot: Slot, shard: Hashable, number: int, length: int, *, coming: bool = False) -> bool:
        """Says what a kept slot is being filled with. It is dirty until `clean` says otherwise; or, if it comes from
        another tier, clean, and only more urgent chunks push it out until `arrived` is called.

        False if the chunk is here or on its way already: the slot then only passes.
        """
        assert slot.kept and slot.chunk is None
        if number in self._cached.get(shard, {}):
            slot.kept = False
            self._kept -= 1
            return False
        slot.chunk = Chunk((shard, number), shard, number, self.slot_bytes)
        slot.dirty, slot.coming = not coming, coming
        self._cached.setdefault(shard, {})[number] = slot
        self._by_key[slot.chunk.key] = slot
        self._index.filling(slot.index, shard, number, length)
        return True

    def filled(self, slot: Slot) -> None:
        """Its bytes are there, and good. Idempotent; nothing for a slot that only passes."""
        if slot.chunk is not None and not slot.filled:
            slot.filled = True
            self._clean += slot.clean
            self._coming += slot.coming
            self._index.filled(slot.index)
            self._eviction.entered(slot.chunk)

    def find(self, shard: Hashable, number: int) -> Slot | None:
        """The slot that holds this chunk, held once for the caller; None if it is not here (any more)."""
        slot = self._cached.get(shard, {}).get(number)
        if slot is None or not slot.filled:
            return None
        assert slot.chunk is not None
        self._eviction.used(slot.chunk)
        slot.users += 1
        return slot

    def has(self, shard: Hashable, number: int) -> bool:
        """Whether this chunk is here whole."""
        slot = self._cached.get(shard, {}).get(number)
        return slot is not None and slot.filled

    def chunks(self, shard: Hashable) -> set[int]:
        """The numbers of the shard's chunks that are here whole."""
        return {number for number, slot in self._cached.get(shard, {}).items() if slot.filled}

    def shards(self) -> list[Hashable]:
        return list(self._cached)

    def clean(self, shard: Hashable) -> None:
        """Another tier has committed the shard: its chunks may be evicted."""
        for slot in self._cached.get(shard, {}).values():
            self._clean += slot.filled and slot.dirty
            slot.dirty = False
        self._serve()

    def arrived(self, shard: Hashable) -> None:
        """The prefetch that brought chunks of the shard is over: whatever needs room may push them out."""
        for slot in self._cached.get(shard, {}).values():
            self._coming -= slot.filled and slot.coming
            slot.coming = False
        self._serve()

    def drop(self, shard: Hashable) -> None:
        """Forgets the shard's chunks; slots in use become free when they are released."""
        for slot in list(self._cached.get(shard, {}).values()):
            self.forget(slot)
        self._serve()

    def forget(self, slot: Slot) -> None:
        """Takes a chunk out of the cache; its slot becomes free when nobody uses it."""
        chunk, slot.chunk = slot.chunk, None
        assert chunk is not None
        held = self._cached[chunk.shard]
        del held[chunk.index], self._by_key[chunk.key]
        if not held:
            del self._cached[chunk.shard]
        if slot.filled:
            self._clean -= slot.clean
            self._coming -= slot.coming
            self._eviction.left(chunk)
        self._index.free(slot.index)
        if slot.users == 0:
            self._put_back(slot)

    def _evict(self, priority: int) -> bool:
        """Frees one slot of a clean chunk; False if there is none that may go for this."""
        spare_coming = priority >= Priority.PREFETCH
        if self._clean <= (self._coming if spare_coming else 0):
            return False
        for chunk in self._victims(self.slot_bytes, spare_coming):
            self._push_out(chunk)
            return True
        return False

    def _let_pass(self, priority: int) -> bool:
        """Frees no slot, but the room of a clean chunk that somebody works with: it leaves the cache, and its slot
        only passes from now on. Else a flush that hangs would keep room that was promised to a save."""
        if not self._free:
            return False
        for chunk in self._victims(self.slot_bytes, priority >= Priority.PREFETCH, in_use=True):
            slot = self._by_key[chunk.key]
            self._push_out(chunk)
            slot.kept = False
            self._kept -= 1
            return True
        return False

    def _push_out(self, chunk: Chunk) -> None:
        self.forget(self._by_key[chunk.key])
        self.evicted_bytes += self.slot_bytes
        self.on_evicted(chunk.shard)

    def _victims(self, needed_bytes: int, spare_coming: bool, *, in_use: bool = False) -> Iterator[Chunk]:
        def may_go(chunk: Chunk) -> bool:
            slot = self._by_key.get(chunk.key)
            if slot is None or not slot.clean or (slot.users > 0) is not in_use:
                return False
            return not (slot.coming and spare_coming)

        return self._eviction.victims(needed_bytes, may_go)

    # -- the end -------------------------------------------------------------------------

    def view(self, slot: Slot, length: int) -> memoryview:
        """The first `length` bytes of a slot."""
        return self._memory.view(slot.index, length)

    def close(self) -> bool:
        """Gives the memory back; False, and nothing is freed, while slots are in use. Who waits for one gets
        TierUnavailable. Idempotent."""
        self._closed = True
        for waiter in list(self._waiting):
            self._refuse(waiter, _closed())
        if not self._memory.stop() or self.in_use:
            return False
        self._memory.close()
        self._slots.clear()
        self._free.clear()
        self._cached.clear()  # a reader that still knows this arena must not find chunks whose memory is gone
        return True

    def __repr__(self) -> str:
        return f"<Arena of {self.count} slots of {self.slot_bytes} bytes: {self._kept} kept, {self.in_use} in use>"


def _no_memory(why: str) -> TierFull:
    return TierFull(f"the host arena got no memory: {why}", todo="Free memory or give it less")


def _closed() -> TierUnavailable:
    return not_open("host", "closed")
