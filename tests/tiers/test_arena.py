"""The arena beside a simple model of it, and its ends: cancelled waiters, memory that is not to be had, closing."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from stepwell.errors import TierFull, TierUnavailable
from stepwell.policies.evict import LRU
from stepwell.tiers._arena import Arena
from stepwell.tiers._index import Index, SlotState
from stepwell.tiers._slots import Priority, Slot

SLOT_BYTES = 4096
SHARDS = ("a", "b", "c")


class Memory:
    """Addresses without bytes; the system has so much of it in all."""

    def __init__(self, limit_bytes: int = 1 << 40) -> None:
        self.left_bytes, self.closed, self.maps = limit_bytes, 0, 0

    def make(self, size: int) -> Memory:
        self.maps += 1
        return self

    address = 1 << 20

    def populate(self, offset: int, length: int) -> None:
        if length > self.left_bytes:
            raise OSError(errno.ENOMEM, "no memory")
        self.left_bytes -= length

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        raise AssertionError("nobody looks at these bytes")

    def close(self) -> None:
        self.closed += 1


def arena_of(slots: int, memory: Memory | None = None, **options: Any) -> Arena:
    memory = memory or Memory()
    return Arena(slots * SLOT_BYTES, LRU(), slot_bytes=SLOT_BYTES, memory=memory.make, background=False, **options)


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


async def turns(count: int = 4) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class ArenaMachine(RuleBasedStateMachine):
    """Everything that can be done to an arena, in any order. The model knows who holds what, and what is clean."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.capacity = 6
        self.evicted: list[object] = []
        self.arena = arena_of(self.capacity, on_evicted=self.evicted.append)
        self.arena._index = Index(self.arena.count)
        self.held: list[Slot] = []  # one entry a hold
        self.placed: dict[tuple[str, int], Slot] = {}
        self.whole: set[tuple[str, int]] = set()
        self.clean_chunks: set[tuple[str, int]] = set()
        self.waiting: list[tuple[Priority, int, asyncio.Task[Slot]]] = []
        self.asked = 0
        self.order: list[tuple[Priority, int]] = []  # of those that were served after they had to wait

    def turn(self) -> None:
        self.loop.run_until_complete(turns())
        served = [each for each in self.waiting if each[2].done()]
        self.waiting = [each for each in self.waiting if not each[2].done()]
        for _, _, task in served:
            self.held.append(task.result())
        self.notice_evictions()

    def notice_evictions(self) -> None:
        for key in list(self.placed):
            slot = self.placed[key]
            if slot.chunk is None or slot.chunk.key != self.arena.key(*key):
                assert key in self.whole and key in self.clean_chunks, f"{key} was evicted while dirty"
                assert key[0] in self.evicted
                self.forget(key)

    def forget(self, key: tuple[str, int]) -> None:
        del self.placed[key]
        self.whole.discard(key)
        self.clean_chunks.discard(key)

    @rule(priority=st.sampled_from(list(Priority)), kept=st.booleans())
    def acquire(self, priority: Priority, kept: bool) -> None:
        used = {id(slot) for slot in self.held}
        before = {key for key, slot in self.placed.items() if id(slot) in used}
        task = self.loop.create_task(self.arena.acquire(priority, kept=kept))
        self.waiting.append((priority, self.asked, task))
        self.asked += 1
        self.turn()
        # for one that stays, one in use may leave the cache: its slot stays with its users
        assert kept or before <= set(self.placed), "a chunk in use was evicted"

    @rule(shard=st.sampled_from(SHARDS), number=st.integers(0, 9), clean=st.booleans())
    def keep(self, shard: str, number: int, clean: bool) -> None:
        if self.waiting or (shard, number) in self.placed:
            return
        self.acquire(Priority.SNAPSHOT, True)
        if self.waiting:
            [(_, _, task)] = self.waiting
            self.waiting.clear()
            task.cancel()
            self.turn()
            return
        slot = self.held.pop()
        assert self.arena.place(slot, shard, number, 100)
        self.placed[shard, number] = slot
        self.arena.filled(slot)
        self.whole.add((shard, number))
        self.arena.release(slot)
        if clean:
            self.clean(shard)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(entry)
        entry[2].cancel()
        self.loop.run_until_complete(asyncio.wait([entry[2]]))
        self.turn()

    def bare(self) -> list[Slot]:
        return [slot for slot in self.held if slot.kept and slot.chunk is None and slot.users == 1]

    @precondition(lambda self: self.bare())
    @rule(data=st.data(), shard=st.sampled_from(SHARDS), number=st.integers(0, 3))
    def place(self, data: st.DataObject, shard: str, number: int) -> None:
        slot = data.draw(st.sampled_from(self.bare()))
        if slot in self.dropped():
            return
        new = self.arena.place(slot, shard, number, 100)
        assert new == ((shard, number) not in self.placed) and (new or not slot.kept)
        if new:
            self.placed[shard, number] = slot
        self.turn()

    def dropped(self) -> list[Slot]:
        """Kept slots in use whose chunk was dropped: filled once, they are not placed again."""
        return [slot for slot in self.held if slot.filled and slot.chunk is None]

    def filling(self) -> list[tuple[str, int]]:
        return [key for key in self.placed if key not in self.whole]

    @precondition(lambda self: self.filling())
    @rule(data=st.data())
    def filled(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(self.filling()))
        self.arena.filled(self.placed[key])
        self.whole.add(key)
        self.turn()

    @rule(shard=st.sampled_from(SHARDS), number=st.integers(0, 3))
    def find(self, shard: str, number: int) -> None:
        slot = self.arena.find(shard, number)
        assert (slot is not None) == ((shard, number) in self.whole) == self.arena.has(shard, number)
        if slot is not None:
            assert slot is self.placed[shard, number]
            self.held.append(slot)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.held))
        key = next((key for key, placed in self.placed.items() if placed is slot), None)
        if key is not None and key not in self.whole and self.held.count(slot) == 1:
            self.arena.forget(slot)  # who could not fill it gives it up
            self.forget(key)
        self.held.remove(slot)
        self.arena.release(slot)
        self.turn()

    @rule(shard=st.sampled_from(SHARDS))
    def clean(self, shard: str) -> None:
        self.clean_chunks |= {key for key in self.placed if key[0] == shard}
        self.arena.clean(shard)
        self.turn()

    @rule(shard=st.sampled_from(SHARDS))
    def drop(self, shard: str) -> None:
        for key in [key for key in self.placed if key[0] == shard]:
            self.forget(key)
        self.arena.drop(shard)
        self.turn()

    @precondition(lambda self: self.capacity < 16)
    @rule(more=st.integers(1, 3))
    def grow(self, more: int) -> None:
        self.capacity += more
        self.loop.call_soon(self.arena.grow, self.capacity * SLOT_BYTES)
        self.turn()

    @rule(slots=st.integers(0, 20))
    def expect(self, slots: int) -> None:
        async def expected() -> None:
            self.arena.expect(slots * SLOT_BYTES)

        self.loop.run_until_complete(expected())

    @invariant()
    def the_budget_holds(self) -> None:
        assert self.arena.capacity_bytes == self.capacity * SLOT_BYTES
        assert self.arena.ready_bytes <= self.arena.capacity_bytes
        assert self.arena.cached_bytes <= self.arena.kept_max * SLOT_BYTES
        clean, idle = len(self.whole & self.clean_chunks), sum(slot.idle for slot in self.arena._slots)
        assert (self.arena._clean, self.arena._idle) == (clean, idle)

    @invariant()
    def no_slot_is_in_two_places(self) -> None:
        free = list(self.arena._free)
        used = {id(slot): slot for slot in self.held}
        cached = {id(slot): slot for slot in self.placed.values()}
        assert len({id(slot) for slot in free}) == len(free)
        assert not {id(slot) for slot in free} & (set(used) | set(cached))
        assert len(cached) == len(self.placed)
        everything = {id(slot) for slot in free} | set(used) | set(cached)
        assert len(everything) * SLOT_BYTES == self.arena.ready_bytes, "a slot was lost"
        assert len({slot.address for slot in (*free, *used.values(), *cached.values())}) == len(everything)
        for slot in used.values():
            assert slot.users == self.held.count(slot)

    @invariant()
    def the_index_says_the_same(self) -> None:
        for slot in self.arena._free:
            assert self.arena._index.state(slot.index) == SlotState.FREE
        for key, slot in self.placed.items():
            wanted = SlotState.FILLED if key in self.whole else SlotState.FILLING
            assert self.arena._index.state(slot.index) == wanted
            assert self.arena._index.rows[slot.index]["chunk"] == key[1]
        for shard in SHARDS:
            assert self.arena.chunks(shard) == {number for name, number in self.whole if name == shard}

    @invariant()
    def nobody_waits_for_what_is_there(self) -> None:
        if not self.waiting:
            return
        ready = bool(self.arena._free) or self.arena.ready_bytes < self.arena.capacity_bytes
        in_use = {id(slot) for slot in self.held}
        may_go = [
            k for k, slot in self.placed.items() if k in self.whole & self.clean_chunks and id(slot) not in in_use
        ]
        assert not may_go, "somebody waits although a chunk could be evicted"
        if ready:  # then all who wait want a kept one, and as many are kept as may be
            assert self.arena.cached_bytes == self.arena.kept_max * SLOT_BYTES

    def teardown(self) -> None:
        for _, _, task in self.waiting:
            task.cancel()
        if self.waiting:
            self.loop.run_until_complete(asyncio.wait([task for _, _, task in self.waiting]))
        self.waiting = []
        for shard in SHARDS:
            self.drop(shard)
        while self.held:
            self.arena.release(self.held.pop())
        assert self.arena.cached_bytes == 0 and self.arena.in_use == 0
        assert len(self.arena._free) * SLOT_BYTES == self.arena.ready_bytes
        assert self.arena.close() and self.arena.close()
        self.loop.close()


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


# -- waiting -----------------------------------------------------------------------------------------


def test_the_most_urgent_is_served_first_and_equals_in_turn() -> None:
    async def scenario() -> None:
        arena = arena_of(4)
        held = [await arena.acquire(Priority.FLUSH) for _ in range(4)]
        served: list[str] = []

        async def wait(name: str, priority: Priority) -> None:
            slot = await arena.acquire(priority)
            served.append(name)
            arena.release(slot)

        order = [("p", Priority.PREFETCH), ("f1", Priority.FLUSH), ("s", Priority.SNAPSHOT), ("f2", Priority.FLUSH)]
        tasks = [asyncio.ensure_future(wait(*each)) for each in (*order, ("r", Priority.RESTORE))]
        await turns()
        assert not served
        arena.release(held.pop())
        await asyncio.wait(tasks)
        assert served == ["r", "s", "f1", "f2", "p"]

    run(scenario)


def test_one_who_waits_to_keep_holds_up_nobody() -> None:
    async def scenario() -> None:
        arena = arena_of(4)
        kept = [await arena.acquire(Priority.SNAPSHOT, kept=True) for _ in range(arena.kept_max)]
        waiting = asyncio.ensure_future(arena.acquire(Priority.RESTORE, kept=True))
        await turns()
        passing = [await arena.acquire(Priority.PREFETCH) for _ in range(4 - arena.kept_max)]
        assert not waiting.done()
        arena.release(kept.pop())
        assert (await waiting).kept
        assert len(passing) == 2

    run(scenario)


def test_a_chunk_in_use_gives_up_its_room_when_it_is_clean() -> None:
    """A flush that hangs holds slots, not what a save was promised."""

    async def scenario() -> None:
        gone: list[object] = []
        arena = arena_of(4, on_evicted=gone.append)
        for number in range(arena.kept_max):
            slot = await arena.acquire(Priority.SNAPSHOT, kept=True)
            arena.place(slot, "old", number, 10)
            arena.filled(slot)
            arena.release(slot)
        flushed = [arena.find("old", number) for number in range(arena.kept_max)]  # in the hands of a flush
        waiting = asyncio.ensure_future(arena.acquire(Priority.SNAPSHOT, kept=True))
        await turns()
        assert not waiting.done() and not gone  # dirty: nobody else has it
        arena.clean("old")
        new = await waiting
        assert new not in flushed and gone == ["old"] and len(arena.chunks("old")) == arena.kept_max - 1
        assert arena.cached_bytes == arena.kept_max * arena.slot_bytes
        for held in (*flushed, new):
            assert held is not None
            arena.release(held)
        free = [await arena.acquire(Priority.FLUSH) for _ in range(4 - len(arena.chunks("old")))]
        assert len({slot.index for slot in free}) == len(free)

    run(scenario)


@pytest.mark.parametrize("count", range(4))
def test_a_waiter_cancelled_at_any_moment_loses_no_slot(count: int) -> None:
    async def scenario() -> None:
        arena = arena_of(4)
        held = [await arena.acquire(Priority.FLUSH) for _ in range(4)]
        waiting = asyncio.ensure_future(arena.acquire(Priority.FLUSH))
        await turns(1)
        arena.release(held.pop())  # the slot is the waiter's from here, who may not know yet
        await turns(count)
        gone = waiting.cancel()
        await asyncio.wait([waiting])
        if gone and waiting.cancelled():
            held.append(await asyncio.wait_for(arena.acquire(Priority.FLUSH), 1))
        else:
            held.append(waiting.result())
        assert arena.in_use == 4

    run(scenario)


# -- memory ------------------------------------------------------------------------------------------


def test_without_any_memory_waiters_are_told_and_later_ones_try_again() -> None:
    async def scenario() -> None:
        memory = Memory(0)
        arena = arena_of(8, memory)
        for priority in (Priority.RESTORE, Priority.PREFETCH):
            with pytest.raises(TierFull, match="no memory"):
                await arena.acquire(priority)
        memory.left_bytes = 8 * SLOT_BYTES
        arena.release(await arena.acquire(Priority.RESTORE))
        assert arena.ready_bytes == SLOT_BYTES <= arena.capacity_bytes

    run(scenario)


def test_with_too_little_memory_passing_goes_on_and_keeping_is_refused() -> None:
    async def scenario() -> None:
        arena = arena_of(16, Memory(5 * SLOT_BYTES))
        arena.expect(16 * SLOT_BYTES)
        assert arena.ready_bytes == arena.capacity_bytes == 5 * SLOT_BYTES
        kept = [await arena.acquire(Priority.SNAPSHOT, kept=True) for _ in range(3)]
        with pytest.raises(TierFull, match="less than was asked for"):
            await arena.acquire(Priority.SNAPSHOT, kept=True)
        held = [await arena.acquire(Priority.FLUSH) for _ in range(2)]
        waiting = asyncio.ensure_future(arena.acquire(Priority.FLUSH))
        await turns()
        arena.release(held.pop())
        assert await waiting not in kept

    run(scenario)


def test_who_waits_to_keep_when_memory_ends_is_told() -> None:
    async def scenario() -> None:
        arena = arena_of(16, Memory(5 * SLOT_BYTES))
        taken = [await arena.acquire(Priority.SNAPSHOT, kept=True) for _ in range(5)]
        with pytest.raises(TierFull):
            await asyncio.wait_for(arena.acquire(Priority.SNAPSHOT, kept=True), 1)
        assert len({slot.address for slot in taken}) == 5 and arena.kept_max == 3

    run(scenario)


def test_memory_may_come_back_and_the_arena_grow_again() -> None:
    async def scenario() -> None:
        memory = Memory(5 * SLOT_BYTES)
        arena = arena_of(100, memory)
        arena.expect(100 * SLOT_BYTES)
        memory.left_bytes = 100 * SLOT_BYTES
        arena.grow(50 * SLOT_BYTES)  # below what the index has rows for
        slots = [await arena.acquire(Priority.SNAPSHOT, kept=True) for _ in range(arena.kept_max)]
        assert len(slots) == 44 and arena.capacity_bytes == 50 * SLOT_BYTES

    run(scenario)


# -- the end -----------------------------------------------------------------------------------------


def test_closing_waits_for_users_and_ends_waiters() -> None:
    async def scenario() -> None:
        memory = Memory()
        arena = arena_of(4, memory)
        held = [await arena.acquire(Priority.FLUSH) for _ in range(4)]
        waiting = asyncio.ensure_future(arena.acquire(Priority.RESTORE))
        await turns()
        assert not arena.close() and memory.closed == 0
        with pytest.raises(TierUnavailable, match="closed"):
            await waiting
        with pytest.raises(TierUnavailable, match="closed"):
            await arena.acquire(Priority.RESTORE)
        for slot in held:
            arena.release(slot)
        assert arena.close() and memory.closed == memory.maps == 1

    run(scenario)
