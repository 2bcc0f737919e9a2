"""Memory of a GPU tier that goes at any moment: whoever asks for it hears of that, and nobody else is harmed."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
from collections.abc import Callable, Sequence

import pytest

from stepwell.errors import StepwellError, TierFull
from stepwell.policies.evict import LRU
from stepwell.tiers._gpuslots import GpuArena, Whole
from stepwell.tiers._slots import Priority, Slot

SLOT = 4096


class Memory:
    """A device's, some of it lent; every call may come just before or after the tripwire has fired."""

    def __init__(self, rng: random.Random, slots: int = 8, anger: float = 0.0) -> None:
        """slots: how many it has. anger: how likely the wire fires at a call."""
        self.rng, self.slots, self.anger = rng, slots, anger
        self.books: dict[int, str] = {}  # address -> held, lent, or gone and not asked for
        self.spare, self.next = list[int](), SLOT

    def trip(self) -> None:
        for address, state in self.books.items():
            if state == "lent":
                self.books[address] = "gone"
                self.spare.append(address)

    def _maybe_trip(self) -> None:
        if self.rng.random() < self.anger:
            self.trip()

    def take(self, size_bytes: int) -> int:
        self._maybe_trip()
        if sum(state != "gone" for state in self.books.values()) >= self.slots:
            raise OSError(errno.ENOMEM, "no memory")
        address = self.spare.pop() if self.spare and self.rng.random() < 0.7 else self.next
        self.next += SLOT * (address == self.next)
        if address in self.books:
            self.spare.append(address)
            raise OSError(errno.EADDRINUSE, "it was lent, and who lent it has not asked")
        self.books[address] = "held"
        return address

    def give(self, address: int) -> None:
        self._maybe_trip()
        assert self.books.pop(address) != "gone"
        self.spare.append(address)

    def lend(self, addresses: Sequence[int]) -> None:
        assert all(self.books.get(address) in ("held", "lent") for address in addresses)
        self.books.update(dict.fromkeys(addresses, "lent"))
        self._maybe_trip()

    def take_back(self, addresses: Sequence[int]) -> list[bool]:
        self._maybe_trip()
        there = []
        for address in addresses:
            state = self.books.get(address)
            there.append(state in ("held", "lent"))
            if state == "gone":
                del self.books[address]
            elif state is not None:
                self.books[address] = "held"
        self._maybe_trip()
        return there


def arena_of(
    memory: Memory, take: Callable[[int], int] | None = None, give: Callable[[int], object] | None = None
) -> GpuArena:
    return GpuArena(8 * SLOT, LRU(), slot_bytes=SLOT, take=take or memory.take, give=give or memory.give, lender=memory)


def at_once(work: Callable[[], object]) -> None:
    """Instead of on a thread."""
    work()


class User:
    """Does what users of an arena do, in an order of chance."""

    def __init__(self, arena: GpuArena, memory: Memory, rng: random.Random) -> None:
        self.arena, self.memory, self.rng = arena, memory, rng
        self.held, self.groups = list[Slot](), list[Whole]()
        self.waiting: list[asyncio.Task[Slot]] = []

    def one(self) -> None:
        arena, rng, shard, number = self.arena, self.rng, f"shard-{self.rng.randrange(6)}", self.rng.randrange(3)
        what = rng.randrange(13)
        if what <= 2:
            if (slot := arena.take_now(Priority.SNAPSHOT, kept=True)) is not None:
                arena.place(slot, shard, number, SLOT)
                self.held.append(slot)
        elif what <= 4 and self.held:
            self.release(self.held.pop(rng.randrange(len(self.held))), good=rng.random() < 0.8)
        elif what == 5:
            arena.clean(shard)
        elif what == 6:
            arena.drop(shard)
        elif what == 7:
            arena.give_back(rng.randrange(4) * SLOT)
        elif what == 8:
            arena.sweep()
        elif what == 9 and (group := arena.hold_all(shard, rng.randrange(1, 4) * SLOT)) is not None:
            here = [arena._of(shard)[number] for number in range(len(group.slots))]
            assert group.slots == here and all(slot.filled for slot in here)
            self.groups.append(group)
        elif what == 10 and self.groups:
            arena.release_all(self.groups.pop().slots)
        elif what == 11 and (slot := arena.find(shard, number)) is not None:
            self.held.append(slot)
        elif what == 12:
            arena.whole_again()
            self.waiting.append(asyncio.ensure_future(arena.acquire(Priority.SNAPSHOT, kept=True)))

    def release(self, slot: Slot, *, good: bool = True) -> None:
        if slot.chunk is not None and not slot.filled:
            (self.arena.filled if good else self.arena.forget)(slot)
        self.arena.release(slot)

    async def hear(self) -> None:
        await asyncio.sleep(0)
        for task in [task for task in self.waiting if task.done()]:
            self.waiting.remove(task)
            if task.exception() is None:
                self.held.append(task.result())
            else:
                assert isinstance(task.exception(), StepwellError)

    def check(self) -> None:
        arena, books = self.arena, self.memory.books
        used = [*self.held, *(slot for group in self.groups for slot in group.slots)]
        assert all(books.get(slot.address) == "held" for slot in used)
        assert all(books.get(slot.address) == "held" for slot in arena._slots if slot.users or slot.dirty)
        assert len({slot.address for slot in arena._slots}) == len(arena._slots)
        assert arena.in_use == sum(slot.users > 0 for slot in arena._slots)
        assert arena._idle == sum(slot.idle for slot in arena._slots)
        assert arena._kept == sum(slot.kept for slot in arena._slots)
        assert {*arena._free, *arena._lent.values()} <= set(arena._slots)

    async def end(self) -> None:
        for group in self.groups:
            self.arena.release_all(group.slots)
        while self.held or self.waiting:
            for slot in self.held:
                self.release(slot)
            self.held.clear()
            for number in range(6):
                self.arena.clean(f"shard-{number}")
            await self.hear()


@pytest.mark.parametrize("anger", [0.0, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("slots", [3, 8])
def test_the_wire_fires_at_any_moment(anger: float, slots: int) -> None:
    """What is handed out is there, all is counted, nobody waits for ever, and at the end nothing is left over."""

    async def main(seed: int) -> None:
        rng = random.Random(seed)
        memory = Memory(rng, slots, anger)
        arena = arena_of(memory)
        arena._own._start = at_once  # type: ignore[method-assign]  # in an order of ours
        user = User(arena, memory, rng)
        async with asyncio.timeout(30):
            for _ in range(150):
                user.one()
                await user.hear()
                user.check()
            await user.end()
        assert arena.close() and not memory.books

    for seed in range(60):
        asyncio.run(main(seed))


def test_who_waits_for_memory_that_is_not_taken_any_more_hears_of_that() -> None:
    go, taking = threading.Event(), threading.Event()
    memory = Memory(random.Random(0))

    def take(size_bytes: int) -> int:
        if memory.books:
            taking.set()
            assert go.wait(60)
        return memory.take(size_bytes)

    async def main() -> None:
        arena = arena_of(memory, take)
        slot = await arena.acquire(Priority.SNAPSHOT, kept=True)
        waiting = asyncio.ensure_future(arena.acquire(Priority.SNAPSHOT, kept=True))
        while not taking.is_set():
            await asyncio.sleep(0)
        assert arena.give_back(SLOT) == 0  # nothing may go
        with pytest.raises(TierFull):
            await asyncio.wait_for(waiting, 20)
        go.set()
        arena.release(slot)
        while not arena.close():
            await asyncio.sleep(0)

    try:
        asyncio.run(main())
    finally:
        go.set()


def test_an_arena_that_has_all_of_its_memory_is_not_short() -> None:
    """Who wants more than is free then waits for what others release."""

    async def main() -> None:
        arena = arena_of(Memory(random.Random(0)))
        slots = [await arena.acquire(Priority.SNAPSHOT, kept=True) for _ in range(8)]
        assert arena.give_back(SLOT) == 0
        arena.whole_again()
        waiting = asyncio.ensure_future(arena.acquire(Priority.SNAPSHOT, kept=True))
        await asyncio.sleep(0)
        arena.release(slots.pop())
        slots.append(await waiting)
        for slot in slots:
            arena.release(slot)
        while not arena.close():
            await asyncio.sleep(0)

    asyncio.run(main())


def test_memory_that_is_on_its_way_back_counts() -> None:
    """The driver may let it wait until the device has done all that it was given: no more goes meanwhile."""
    go = threading.Event()
    memory = Memory(random.Random(0))

    def give(address: int) -> None:
        assert go.wait(60)
        memory.give(address)

    async def main() -> None:
        arena = arena_of(memory, give=give)
        for slot in [await arena.acquire(Priority.SNAPSHOT) for _ in range(6)]:
            arena.release(slot)
        assert arena.give_back(2 * SLOT) == 2 * SLOT
        assert arena.give_back(2 * SLOT) == 0 and arena.give_back(3 * SLOT) == SLOT
        go.set()
        while not arena._own.stop():
            await asyncio.sleep(0)
        assert arena._own.going_bytes == 0
        assert arena.close()

    try:
        asyncio.run(main())
    finally:
        go.set()
    assert not memory.books
