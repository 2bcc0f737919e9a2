"""The host arena: page-aligned slots of memory, one chunk long, through which all bytes pass.

It is staging pool and cache in one. A slot is *passing* while a chunk goes through it, or *kept*: then it
holds a chunk of a shard until that is dropped or evicted. A kept chunk that exists nowhere else is *dirty*
and never evicted; once another tier has committed it, it is clean and goes when room is needed, in the order
that the eviction policy says. One that is *pinned* stays whatever happens. Kept slots leave a part of the arena free
for staging, so a full cache can block neither a flush nor a restore.

Memory is mapped in slices and made ready (populated) in the background as far as it is asked for; a slot is
handed out as soon as it is ready. It is not registered with the tiers' rings: with huge pages that made no
measurable difference (docs/architecture.md).
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator

from stepwell.errors import StepwellError
from stepwell.native import Region
from stepwell.native._objects import untracked
from stepwell.tiers._index import Index, OwnIndex, name_of
from stepwell.tiers._sizes import Sizes
from stepwell.tiers._slices import READY_SLOTS, Memory, Slices, SlotMemory
from stepwell.tiers._slots import Priority, Slot, Waiter, closed, no_memory
from stepwell.tiers.base import CHUNK_BYTES, Chunk, EvictionPolicy

SLOTS_MIN = 4


class Arena(Sizes):
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
        self.keep_limit = None
        self.evicted_bytes = 0
        self.eviction = eviction
        self.on_evicted = on_evicted
        self._index: Index = OwnIndex(self.count)
        self._background = background
        self._memory = self._slices(memory)
        self._slots: list[Slot] = []  # those that are ready
        self._free: deque[Slot] = deque()
        self._cached: dict[str, dict[int, Slot]] = {}  # name of shard -> number of chunk -> slot
        self._shards: dict[str, Hashable] = {}  # the keys behind those names, as far as they are known here
        self._by_key: dict[Hashable, Slot] = {}
        self._kept = 0
        self.in_use = 0  # slots that somebody works with now
        self._clean = 0  # slots whose chunk is whole and clean
        self._idle = 0  # of these, the ones that nobody works with: without one, no victim is looked for
        self.pinned: Counter[Hashable] = Counter()  # keys of chunks that stay once they are here
        #: whether a chunk that was read on demand, by its key, is worth pushing out another one
        self.outranks: Callable[[Hashable, Chunk], bool] = lambda key, other: True
        self.on_room: Callable[[], object] = lambda: None  # told when there may be more room than before
        self._waiting: list[Waiter] = []
        self._numbers = itertools.count()
        self._is_short = False  # the system had less memory than the capacity
        self._registering = False
        self._pins: asyncio.Future[None] | None = None  # done once more memory is registered
        self._closed = False

    def _slices(self, memory: Callable[[int], Memory]) -> SlotMemory:
        """What they tell after others have taken their place is not heard any more."""
        made = Slices(
            self.slot_bytes, memory, self._background,
            lambda addresses: self._made_ready(addresses) if self._memory is made else None,
            lambda error: self._short(error) if self._memory is made else None,
        )  # fmt: skip
        made.on_pinned = self._told_of_pins
        return made

    # -- size ----------------------------------------------------------------------------

    def grow(self, capacity_bytes: int) -> None:
        """Raises the capacity; memory is made ready when it is needed. Never shrinks."""
        count = capacity_bytes // self.slot_bytes
        if count > self.count:
            self.count, self._is_short = count, False
            self._index.grow(count)
            self._serve()
            self._prepare_for_waiting()

    async def register(self, pin: Callable[[int, int], bool], unpin: Callable[[int], object]) -> None:
        """Has `pin(address, bytes)` called for all memory that is ready, before this returns, and for what is made
        ready later, before it is handed out; `unpin(address)` at the end, if it was true."""
        self._registering = True
        try:
            await asyncio.get_running_loop().run_in_executor(None, self._memory.pin, pin, unpin)
        finally:
            self._registering = False
            self._told_of_pins()

    async def registered(self, address: int) -> None:
        """Returns once the memory there has been registered, while `register` runs."""
        while self._registering and not self._memory.is_settled(address):
            self._pins = self._pins or asyncio.get_running_loop().create_future()
            await asyncio.wait([self._pins])

    def _told_of_pins(self) -> None:
        pins, self._pins = self._pins, None
        if pins is not None:
            pins.set_result(None)

    def unregister(self) -> None:
        """Takes `register` back."""
        self._memory.unpin()

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

    def _made_ready(self, addresses: dict[int, int]) -> None:
        if self._closed:
            return
        slots = [Slot(number, address) for number, address in addresses.items()]
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
                self._refuse(waiter, no_memory(str(error)))
        self._serve()

    def _refuse(self, waiter: Waiter, error: StepwellError) -> None:
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
            raise closed()
        if not self._waiting and (slot := self._take(priority, kept)) is not None:
            return slot
        waiter = Waiter(priority, next(self._numbers), kept, asyncio.get_running_loop().create_future())
        bisect.insort(self._waiting, waiter)
        self._serve()
        if kept and self._is_short and not waiter.future.done():
            self._waiting.remove(waiter)
            raise no_memory("it has less than was asked for")
        self._prepare_for_waiting()
        try:
            return await waiter.future
        except asyncio.CancelledError:
            if waiter in self._waiting:
                self._waiting.remove(waiter)
            if waiter.future.done() and not waiter.future.cancelled() and waiter.future.exception() is None:
                self.release(waiter.future.result())
            raise

    def take_now(self, priority: Priority, *, kept: bool = False) -> Slot | None:
        """As `acquire`, if nobody has to wait for that."""
        return None if self._closed or self._waiting else self._take(priority, kept)

    def _take(self, priority: int, kept: bool) -> Slot | None:
        if kept and self._kept >= self.kept_max and not (self._evict() or self._let_pass(priority)):
            return None
        if not self._free and not (len(self._slots) >= self.count and self._evict()):
            return None
        slot = self._free.popleft()
        slot.users, slot.kept = 1, kept
        self.in_use += 1
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
        self.on_room()

    def hold(self, slot: Slot) -> None:
        """One user more: it is neither freed nor evicted until it is released as often."""
        self.in_use += slot.users == 0
        self._idle -= slot.idle
        slot.users += 1

    def release(self, slot: Slot) -> None:
        """One user less. A slot that keeps a chunk stays as it is; any other becomes free."""
        assert slot.users > 0
        slot.users -= 1
        self.in_use -= slot.users == 0
        self._idle += slot.idle
        if slot.users == 0 and slot.chunk is None:
            self._put_back(slot)
        if slot.users == 0:
            self._serve()

    def _put_back(self, slot: Slot) -> None:
        self._kept -= slot.kept
        slot.kept = slot.filled = slot.dirty = False
        self._free.appendleft(slot)  # the one used last is warm

    def keep(self, slot: Slot, shard: Hashable, number: int) -> bool:
        """Lets a slot that only passes keep this chunk, if there is room or a chunk that it `outranks` may go."""
        assert not slot.kept and slot.users > 0
        if self._kept >= self.kept_max and not self._evict(self.key(shard, number)):
            return False
        slot.kept = True
        self._kept += 1
        return True

    # -- chunks --------------------------------------------------------------------------

    def key(self, shard: Hashable, number: int) -> tuple[str, int]:
        """How the eviction policy knows a chunk: alike in every process that knows the shard by this key."""
        return (name_of(shard), number)

    def _of(self, shard: Hashable) -> dict[int, Slot]:
        """The shard's chunks that are here or on their way, by number."""
        return self._cached.get(name_of(shard), {})

    def generation(self, slot: Slot) -> int:
        """Tells this filling of the slot from all others."""
        return self._index.generation_of(slot.index)

    def going(self, count: int) -> list[Chunk] | None:
        """The chunks that would go for `count` more that are kept, first to go first; None if that is too many."""
        short = self._kept + count - self.kept_max
        if short <= 0:
            return []
        found = list(itertools.islice(self._victims(short * self.slot_bytes), short)) if self._idle else []
        return found if len(found) == short else None

    def pin(self, shard: Hashable, numbers: Iterable[int], times: int = 1) -> None:
        """These chunks stay once they are here. times: -1 takes it back."""
        for key in (self.key(shard, number) for number in numbers):
            self.pinned[key] += times
            if not self.pinned[key]:
                del self.pinned[key]
        self._serve()

    def place(
        self, slot: Slot, shard: Hashable, number: int, length: int, *, clean: bool = False, fetch_s: float = 0.0
    ) -> bool:
        """Says what a kept slot is being filled with. It is dirty until `clean` says otherwise, unless it comes from
        another tier (clean). fetch_s: the seconds that fetching it again would take; 0.0: not known.

        False if the chunk is here or on its way already: the slot then only passes.
        """
        assert slot.kept and slot.chunk is None
        name = name_of(shard)
        if number in self._cached.get(name, ()):
            slot.kept = False
            self._kept -= 1
            self._serve()
            return False
        slot.chunk = untracked(Chunk((name, number), name, number, self.slot_bytes, fetch_s))
        slot.dirty = not clean
        self._cached.setdefault(name, {})[number] = slot
        self._shards.setdefault(name, shard)
        self._by_key[slot.chunk.key] = slot
        self._index.filling(slot.index, name, number, length, dirty=slot.dirty)
        return True

    def filled(self, slot: Slot) -> None:
        """Its bytes are there, and good. Idempotent; nothing for a slot that only passes."""
        if slot.chunk is not None and not slot.filled:
            slot.filled = True
            self._clean += slot.clean
            self._idle += slot.idle
            self._index.filled(slot.index)
            self.eviction.entered(slot.chunk)
            slot.tell()

    def arrival(self, shard: Hashable, number: int) -> asyncio.Future[None] | None:
        """If this chunk is on its way here: what is done once it is here, or will not come."""
        slot = self._of(shard).get(number)
        if slot is None or slot.filled:
            return None
        slot.arrival = slot.arrival or asyncio.get_running_loop().create_future()
        return slot.arrival

    def find(self, shard: Hashable, number: int, *, used: bool = True) -> Slot | None:
        """The slot that holds this chunk, held once for the caller; None if it is not here (any more). used: somebody
        wants its bytes, so that it is worth keeping; a flush, say, does not."""
        slot = self._of(shard).get(number)
        if slot is None or not slot.filled:
            return None
        assert slot.chunk is not None
        if used:
            self.eviction.used(slot.chunk)
        self.hold(slot)
        return slot

    def has(self, shard: Hashable, number: int) -> bool:
        """Whether this chunk is here whole."""
        slot = self._of(shard).get(number)
        return slot is not None and slot.filled

    def is_held(self, shard: Hashable, number: int) -> bool:
        """Whether this chunk is here and somebody works with it."""
        slot = self._of(shard).get(number)
        return slot is not None and slot.users > 0

    def taken(self, shard: Hashable) -> int:
        """How many slots chunks of the shard have, also those on their way."""
        return len(self._of(shard))

    def chunks(self, shard: Hashable) -> set[int]:
        """The numbers of the shard's chunks that are here whole."""
        return {number for number, slot in self._of(shard).items() if slot.filled}

    def shards(self) -> list[Hashable]:
        """The keys of all shards that have chunks here; names of those whose key is not known."""
        return [self._shards.get(name, name) for name in self._cached]

    def clean(self, shard: Hashable) -> None:
        """Another tier has committed the shard: its chunks may be evicted."""
        for slot in self._of(shard).values():
            if slot.filled and slot.dirty:
                self._clean += 1
                self._idle += slot.users == 0
            slot.dirty = False
            self._index.clean(slot.index)
        self._serve()

    def drop(self, shard: Hashable) -> None:
        """Forgets the shard's chunks; slots in use become free when they are released."""
        for slot in list(self._of(shard).values()):
            self.forget(slot)
        self._serve()

    def forget(self, slot: Slot) -> None:
        """Takes a chunk out of the cache; its slot becomes free when nobody uses it."""
        self._idle -= slot.idle
        chunk, slot.chunk = slot.chunk, None
        assert chunk is not None
        name = str(chunk.shard)
        held = self._cached[name]
        del held[chunk.index], self._by_key[chunk.key]
        if not held:
            del self._cached[name]
            self._shards.pop(name, None)
        if slot.filled:
            self._clean -= slot.clean
            self.eviction.left(chunk)
        self._index.free(slot.index)
        slot.tell()
        if slot.users == 0:
            self._put_back(slot)

    def _evict(self, for_key: Hashable | None = None) -> bool:
        """Frees one slot of a clean chunk; False if there is none that may go, or `for_key` is not worth the first."""
        if not self._idle:
            return False
        for chunk in self._victims(self.slot_bytes):
            if for_key is not None and not self.outranks(for_key, chunk):
                return False
            self._push_out(chunk)
            return True
        return False

    def _let_pass(self, priority: int) -> bool:
        """Frees no slot, but the room of a clean chunk that somebody works with: it leaves the cache, and its slot
        only passes from now on. Else a flush that hangs would keep room that was promised to a save."""
        if not self._free or priority >= Priority.PREFETCH or self._clean == self._idle:
            return False
        for chunk in self._victims(self.slot_bytes, in_use=True):
            slot = self._by_key[chunk.key]
            self._push_out(chunk)
            slot.kept = False
            self._kept -= 1
            return True
        return False

    def _push_out(self, chunk: Chunk) -> None:
        shard = self._shards.get(str(chunk.shard), chunk.shard)
        self.forget(self._by_key[chunk.key])
        self.evicted_bytes += self.slot_bytes
        self.on_evicted(shard)

    def _victims(self, needed_bytes: int, *, in_use: bool = False) -> Iterator[Chunk]:
        def may_go(chunk: Chunk) -> bool:
            slot = self._by_key.get(chunk.key)
            return slot is not None and slot.clean and (slot.users > 0) is in_use and chunk.key not in self.pinned

        return self.eviction.victims(needed_bytes, may_go)

    # -- the end -------------------------------------------------------------------------

    def view(self, slot: Slot, length: int) -> memoryview:
        """The first `length` bytes of a slot."""
        return self._memory.view(slot.index, length)

    def close(self) -> bool:
        """Gives the memory back; False, and nothing is freed, while slots are in use. Who waits for one gets
        TierUnavailable. Idempotent."""
        self._closed = True
        for waiter in list(self._waiting):
            self._refuse(waiter, closed())
        if not self._memory.stop() or self.in_use:
            return False
        self._memory.close()
        self._slots.clear()
        self._free.clear()
        self._cached.clear()  # a reader that still knows this arena must not find chunks whose memory is gone
        return True

    def __repr__(self) -> str:
        return f"<Arena of {self.count} slots of {self.slot_bytes} bytes: {self._kept} kept, {self.in_use} in use>"
