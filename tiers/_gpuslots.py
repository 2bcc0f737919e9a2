"""The arena of a GPU tier: slots of device memory, each taken from the device by itself, so that each can go back."""

from __future__ import annotations

import asyncio
import errno
import heapq
import itertools
import threading
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stepwell.native import PieceMap
from stepwell.tiers._arena import Arena
from stepwell.tiers._index import name_of
from stepwell.tiers._slots import Slot
from stepwell.tiers.base import EvictionPolicy

#: slots that are taken before the event loop hears of them
TAKEN_TOGETHER = 16


class GpuSlots:
    """Takes the memory of slots from a device, and gives it back, on threads of its own: the driver may let who asks
    wait until the device has done all that it was given."""

    def __init__(
        self,
        slot_bytes: int,
        take: Callable[[int], int],
        give: Callable[[int], object],
        on_ready: Callable[[dict[int, int]], None],
        on_short: Callable[[OSError], None],
    ) -> None:
        """take: the address of so many bytes; raises OSError if there are none. give: takes an address back."""
        self._slot_bytes, self._take, self._give = slot_bytes, take, give
        self._on_ready, self._on_short = on_ready, on_short
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._addresses: dict[int, int] = {}  # of the slots that are there, by number
        self._spare: list[int] = []  # numbers of slots that have gone back, a heap
        self._next = 0  # the smallest number that no slot has had
        self._wanted = 0
        self._working = 0  # threads
        self._going = 0  # slots whose memory is on its way back
        self._preparing = self._closed = False

    def prepare_up_to(self, count: int) -> None:
        """Sees to it that so many slots are ready, or are being made so."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._wanted = max(self._wanted, count)
            if self._preparing or self._closed or self._wanted <= len(self._addresses):
                return
            self._preparing = True
        self._start(self._prepare)

    def _prepare(self) -> None:
        failure: OSError | None = None
        while failure is None and (numbers := self._numbers()):
            ready: dict[int, int] = {}
            for number in numbers:
                try:
                    ready[number] = self._take(self._slot_bytes)
                except OSError as error:
                    failure = error
                    break
            with self._lock:
                self._addresses |= ready
                for number in numbers[len(ready) :]:
                    heapq.heappush(self._spare, number)
                if failure is not None:
                    self._preparing, self._wanted = False, len(self._addresses)
            if ready:
                self._tell(self._on_ready, ready)
        if failure is not None:
            self._tell(self._on_short, failure)

    def _numbers(self) -> list[int]:
        """Of the slots that are taken next; none: it is done."""
        with self._lock:
            count = 0 if self._closed else min(TAKEN_TOGETHER, self._wanted - len(self._addresses))
            if count <= 0:
                self._preparing = False
                return []
            found = [heapq.heappop(self._spare) for _ in range(min(count, len(self._spare)))]
            new = count - len(found)
            found += range(self._next, self._next + new)
            self._next += new
            return found

    def give_back(self, numbers: Collection[int]) -> None:
        """Gives the memory of these slots back, which nobody uses, in the background."""
        with self._lock:
            addresses = [self._addresses.pop(number) for number in numbers]
            self._wanted = len(self._addresses)
            for number in numbers:
                heapq.heappush(self._spare, number)
            self._going += len(addresses)
        if addresses:
            self._start(lambda: self._give_all(addresses))

    def _give_all(self, addresses: Sequence[int]) -> None:
        for address in addresses:
            self._give(address)
            with self._lock:
                self._going -= 1

    @property
    def going_bytes(self) -> int:
        """Memory that is on its way back: the device does not have it yet."""
        return self._going * self._slot_bytes

    def lost(self, number: int) -> None:
        """The memory of a slot was taken away."""
        with self._lock:
            del self._addresses[number]
            self._wanted = len(self._addresses)
            heapq.heappush(self._spare, number)

    def _start(self, work: Callable[[], object]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._working -= 1

        with self._lock:
            self._working += 1
        try:
            threading.Thread(target=run, name="stepwell-gpu-memory", daemon=True).start()
        except RuntimeError:  # the interpreter is being left: Python 3.12 starts no thread then
            run()

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits any more
            pass

    def pin(self, pin: Callable[[int, int], bool], unpin: Callable[[int], object]) -> None:
        """Device memory is what copies go to as it is."""

    def unpin(self) -> None:
        pass

    def is_settled(self, address: int) -> bool:
        return True

    def view(self, number: int, length: int) -> memoryview:
        raise TypeError("the host cannot look at device memory")

    def stop(self) -> bool:
        """Takes no memory any more; False while a thread still works."""
        with self._lock:
            self._closed = True
            return not self._working

    def close(self) -> None:
        """Gives all back. Nobody uses it, and `stop` has said True. Idempotent."""
        addresses, self._addresses = list(self._addresses.values()), {}
        for address in addresses:
            self._give(address)


class Lender(Protocol):
    """Who may take memory away at once when the device's other user is about to fail for want of it."""

    def lend(self, addresses: Sequence[int]) -> None:
        """From now on it may take these."""

    def take_back(self, addresses: Sequence[int]) -> list[bool]:
        """From now on it may not; False for those that it has taken, which are not there any more."""


@dataclass(slots=True, eq=False)
class Whole:
    """All of a shard, as long as none of its chunks goes."""

    slots: list[Slot]  # in the order of their chunks
    size_bytes: int
    map: PieceMap | None = None  # of its bytes, once somebody has asked for it


class GpuArena(Arena):
    """Slots of device memory, all of which may keep chunks: nothing is staged there.

    What nobody works with, and another tier has, too, is lent: it may be gone without a word. Whoever asks for it then
    finds that it is not here; `sweep` finds out for all of it.
    """

    def __init__(
        self, capacity_bytes: int, eviction: EvictionPolicy, *, slot_bytes: int, take: Callable[[int], int],
        give: Callable[[int], object], lender: Lender,
    ) -> None:  # fmt: skip
        """take, give: see `GpuSlots`."""
        self._take_memory, self._give_memory, self._lender = take, give, lender
        self._lent: dict[int, Slot] = {}  # by address
        self._wholes: dict[str, Whole] = {}  # name of shard -> what was held of it last
        super().__init__(capacity_bytes, eviction, slot_bytes=slot_bytes)
        self._full = self.count

    def _slices(self, memory: object) -> GpuSlots:
        self._own = GpuSlots(self.slot_bytes, self._take_memory, self._give_memory, self._made_ready, self._short)
        return self._own

    @property
    def beside_staging(self) -> int:
        return self.count

    # -- size ----------------------------------------------------------------------------

    def resize(self, capacity_bytes: int) -> None:
        """Says what its capacity is, before it is used."""
        self.grow(capacity_bytes)
        self._full = self.count

    def whole_again(self) -> None:
        """Lets it take its capacity once more, after the device was short of memory."""
        self.grow(self._full * self.slot_bytes)

    def give_back(self, size_bytes: int) -> int:
        """Gives memory back to the device, with what is on its way there at least so much if so much may go, and takes
        it no more before `whole_again`. Returns the bytes, without the latter."""
        gone: list[Slot] = []
        short_bytes = size_bytes - self._own.going_bytes
        while len(gone) * self.slot_bytes < short_bytes and (self._free or self._evict()):
            slot = self._free.popleft()
            if self._is_ours(slot):
                gone.append(slot)
        self._forget_memory(gone)
        self._own.give_back([slot.index for slot in gone])
        return len(gone) * self.slot_bytes

    def sweep(self) -> int:
        """Finds out what of the memory that was lent is gone. Returns the bytes."""
        lent = list(self._lent.values())
        there = self._lender.take_back([slot.address for slot in lent])
        gone = [slot for slot, ours in zip(lent, there, strict=True) if not ours]
        self._lender.lend([slot.address for slot, ours in zip(lent, there, strict=True) if ours])
        self._lost(gone)
        return len(gone) * self.slot_bytes

    def _lend(self, slots: Sequence[Slot]) -> None:
        """Those that nobody works with, and that may go."""
        new = {
            s.address: s for s in slots if s.users == 0 and not s.dirty and s.address and s.address not in self._lent
        }
        if new and not self._closed:
            self._lender.lend(list(new))
            self._lent |= new

    def _is_ours(self, slot: Slot) -> bool:
        """Takes a slot back before it is used. False: its memory is gone, and so is the slot."""
        if self._lent.pop(slot.address, None) is None:
            return True
        [there] = self._lender.take_back([slot.address])
        if not there:
            self._lost([slot])
        return there

    def _lost(self, slots: Sequence[Slot]) -> None:
        """Their memory was taken away."""
        for slot in slots:
            self._lent.pop(slot.address, None)
            slot.address = 0  # first of all: who hears of one of them must not get or lend another one
        for slot in slots:
            if slot.chunk is not None:
                self._push_out(slot.chunk)
            if slot in self._free:
                self._free.remove(slot)
        self._forget_memory(slots)
        for slot in slots:
            self._own.lost(slot.index)

    def _put_back(self, slot: Slot) -> None:
        super()._put_back(slot)
        if not slot.address:
            self._free.remove(slot)

    def _forget_memory(self, slots: Sequence[Slot]) -> None:
        for slot in slots:
            self._slots.remove(slot)
        self.count = max(1, len(self._slots))
        self._is_short = self.count < self._full
        if self._waiting:  # later: this may be in the middle of serving them
            asyncio.get_running_loop().call_soon(self._refuse_waiting)

    def _refuse_waiting(self) -> None:
        """Those who wait for memory that is not being taken any more."""
        if self._is_short:
            self._short(OSError(errno.ENOMEM, "what it had went back to the device"))

    # -- slots ---------------------------------------------------------------------------

    def make_room(self, count: int) -> None:
        """Pushes out, all at once, what has to go so that so many slots more can be kept."""
        short = self._kept + count - self.kept_max
        if short > 0 and self._idle:
            for chunk in list(itertools.islice(self._victims(short * self.slot_bytes), short)):
                self._push_out(chunk)

    def _take(self, priority: int, kept: bool) -> Slot | None:
        while (slot := super()._take(priority, kept)) is not None:
            if slot.address not in self._lent:
                return slot
            del self._lent[slot.address]
            [there] = self._lender.take_back([slot.address])
            if there:
                return slot
            self.in_use -= 1
            self._kept -= slot.kept
            slot.users, slot.kept = 0, False
            self._lost([slot])
        return None

    def _made_ready(self, addresses: dict[int, int]) -> None:
        super()._made_ready(addresses)
        self._lend(list(self._free))

    def find(self, shard: Hashable, number: int, *, used: bool = True) -> Slot | None:
        slot = self._of(shard).get(number)
        if slot is not None and not self._is_ours(slot):
            return None
        return super().find(shard, number, used=used)

    def hold_all(self, shard: Hashable, size_bytes: int) -> Whole | None:
        """All chunks of a shard of so many bytes, held once for the caller; None if not all are here. Says nothing to
        the eviction policy."""
        whole = self._whole(shard, size_bytes)
        if whole is None or not self._are_ours(whole.slots):
            return None
        new = [slot for slot in whole.slots if slot.users == 0]
        self.in_use += len(new)
        self._idle -= sum(not slot.dirty for slot in new)  # all are filled
        for slot in whole.slots:
            slot.users += 1
        return whole

    def _whole(self, shard: Hashable, size_bytes: int) -> Whole | None:
        name, here, count = name_of(shard), self._of(shard), -(-size_bytes // self.slot_bytes)
        known = self._wholes.get(name)
        if known is not None and known.size_bytes == size_bytes:
            return known
        slots = [slot for number in range(count) if (slot := here.get(number)) is not None and slot.filled]
        if len(slots) < count:
            return None
        made = self._wholes[name] = Whole(slots, size_bytes)
        return made

    def _are_ours(self, slots: Sequence[Slot]) -> bool:
        """`_is_ours` for many, of which none is taken back if not all are there."""
        lent = [slot for slot in slots if self._lent.pop(slot.address, None) is not None]
        there = self._lender.take_back([slot.address for slot in lent]) if lent else []
        if all(there):
            return True
        self._lost([slot for slot, ours in zip(lent, there, strict=True) if not ours])
        self._lend([slot for slot, ours in zip(lent, there, strict=True) if ours])
        return False

    def release(self, slot: Slot) -> None:
        super().release(slot)
        self._lend([slot])

    def release_all(self, slots: Sequence[Slot]) -> None:
        """`release` of each of these, no two of which are the same, with one look at who waits."""
        assert all(slot.users > 0 for slot in slots)
        for slot in slots:
            slot.users -= 1
        unused = [slot for slot in slots if slot.users == 0]
        self.in_use -= len(unused)
        for slot in unused:
            if slot.chunk is None:
                self._put_back(slot)
            else:
                self._idle += slot.filled and not slot.dirty
        self._serve()
        self._lend(unused)

    def clean(self, shard: Hashable) -> None:
        slots = list(self._of(shard).values())
        super().clean(shard)
        self._lend(slots)

    def forget(self, slot: Slot) -> None:
        if slot.chunk is not None:
            self._wholes.pop(str(slot.chunk.shard), None)
        super().forget(slot)
        self._lend([slot])

    def close(self) -> bool:
        self._closed = True
        self._wholes.clear()
        lent, self._lent = list(self._lent.values()), {}
        there = self._lender.take_back([slot.address for slot in lent]) if lent else []
        for slot, ours in zip(lent, there, strict=True):
            if not ours:
                self._own.lost(slot.index)
        return super().close()
