"""What comes next, decided on a real arena without any I/O: the order of requests, and Belady's optimum."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.prefetching import optimum_bytes
from stepwell.lineup import Lineup, Request
from stepwell.pinning import PIN_PRIORITY
from stepwell.policies.evict import LRU
from stepwell.policies.s3fifo import S3FIFO
from stepwell.prefetching import Prefetch, Urgency
from stepwell.reading import Caller
from stepwell.tiers.host import Arena, Priority
from stepwell.wanted import Item

PAGE = 4096
MIB = 1 << 20


def item(name: str, chunks: int) -> Item:
    def never() -> Any:
        raise AssertionError("nothing is opened here")

    return Item(name, (name,), tuple((0, number, PAGE) for number in range(chunks)), never)


class Bench:
    """An arena, a lineup, and what a lifter and loads would do, one chunk after the other."""

    def __init__(self, count: int, eviction: Any = None) -> None:
        self.arena = Arena(count * PAGE, eviction or LRU(), slot_bytes=PAGE, background=False)
        self.lineup = Lineup(self.arena)
        self.arena.outranks = self.lineup.outranks
        self.arena.on_evicted = self.lineup.lost
        self.moved = 0
        self.brought: list[str] = []

    def ask(self, items: Iterable[Item], priority: int = 0, deadline: float | None = None) -> Request:
        request = Request(Prefetch(Urgency.of(priority, deadline)), [(each, len(each.chunks)) for each in items])
        self.lineup.add(request)
        return request

    def pin(self, wanted: Item) -> Request:
        self.arena.pin(wanted.names[0], [number for _, number, _ in wanted.chunks])
        request = Request(Prefetch(Urgency.of(PIN_PRIORITY, None), pinned=True), [(wanted, len(wanted.chunks))])
        self.lineup.add(request)
        return request

    async def bring_one(self) -> bool:
        for entry, index in self.lineup.candidates(()):
            if self.lineup.may_come(entry, 0):
                name, number = entry.key(index)
                slot = await self.arena.acquire(Priority.PREFETCH, kept=True)
                assert self.arena.place(slot, name, number, PAGE, clean=True)
                self.arena.filled(slot)
                self.arena.release(slot)
                self.moved += 1
                self.brought.append(str(name))
                return True
        return False

    async def bring(self) -> None:
        for _ in range(2 * self.arena.count):
            if not await self.bring_one():
                return
        raise AssertionError("chunks push each other out without an end")

    async def load_at_once(self, wanted: Item) -> None:
        """As `load`, but all that is here is held until the end, and what may come meanwhile comes."""
        caller, name = Caller(), wanted.names[0]
        held = []
        for _, number, _ in wanted.chunks:
            if (slot := self.arena.find(name, number)) is not None:
                self.lineup.used(name, number, caller)
                held.append(slot)
        await self.bring()
        for slot in held:
            self.arena.release(slot)
        here = self.arena.chunks(name)
        await self.load(wanted, caller, [number for _, number, _ in wanted.chunks if number not in here])

    async def load(self, wanted: Item, caller: Caller | None = None, numbers: Iterable[int] | None = None) -> None:
        caller, name = caller or Caller(), wanted.names[0]
        for number in [number for _, number, _ in wanted.chunks] if numbers is None else numbers:
            slot = self.arena.find(name, number)
            self.lineup.used(name, number, caller)
            if slot is None:
                self.moved += 1
                slot = await self.arena.acquire(Priority.RESTORE)
                if self.arena.keep(slot, name, number):
                    self.arena.place(slot, name, number, PAGE, clean=True)
                    self.arena.filled(slot)
            self.arena.release(slot)

    def close(self) -> None:
        assert self.arena.in_use == 0 and self.arena._kept <= self.arena.kept_max
        assert self.arena.close()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    picks=st.lists(st.integers(0, 5), min_size=1, max_size=14),
    count=st.integers(8, 24),
    ahead=st.sampled_from([0, 3, 1000]),
    eviction=st.sampled_from([LRU, S3FIFO]),
)
def test_a_known_sequence_moves_as_little_as_possible(
    sizes: Sequence[int], picks: Sequence[int], count: int, ahead: int, eviction: type[Any]
) -> None:
    """ahead: how many chunks can come before each load. However fast that is, at most one chunk more for each load
    comes than the optimum, which knows in which order chunks of one load are used."""

    async def scenario() -> None:
        bench = Bench(count, eviction())
        items = [item(f"model-{number}", size) for number, size in enumerate(sizes)]
        order = [pick % len(items) for pick in picks]
        bench.ask([items[number] for number in order])
        for number in order:
            for _ in range(ahead):
                if not await bench.bring_one():
                    break
            await bench.load(items[number])
        least = optimum_bytes([size * MIB for size in sizes], order, bench.arena.kept_max) // MIB
        assert least <= bench.moved <= least + len(order)
        bench.close()

    asyncio.run(scenario())


@settings(max_examples=30, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 12), min_size=2, max_size=6),
    picks=st.lists(st.integers(0, 5), min_size=1, max_size=14),
    count=st.integers(8, 24),
    scale=st.sampled_from([1, 20]),
)
def test_what_a_load_still_holds_is_no_room_however_much_that_is(
    sizes: Sequence[int], picks: Sequence[int], count: int, scale: int
) -> None:
    async def scenario() -> None:
        bench = Bench(count * scale)
        items = [item(f"model-{number}", size * scale) for number, size in enumerate(sizes)]
        order = [pick % len(items) for pick in picks]
        bench.ask([items[number] for number in order])
        await bench.bring()
        for number in order:
            await bench.load_at_once(items[number])
            await bench.bring()
        least = optimum_bytes([size * scale * MIB for size in sizes], order, bench.arena.kept_max) // MIB
        assert least <= bench.moved <= least + len(order)
        bench.close()

    asyncio.run(scenario())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from([None, 10.0, 1000.0])), min_size=1, max_size=6))
def test_the_more_urgent_comes_first_then_the_earlier_deadline_then_the_older(
    asked: Sequence[tuple[int, float | None]],
) -> None:
    async def scenario() -> None:
        bench = Bench(64)
        for number, (priority, deadline) in enumerate(asked):
            bench.ask([item(str(number), 3)], priority, deadline)
        await bench.bring()
        order = sorted(range(len(asked)), key=lambda n: (-asked[n][0], asked[n][1] or 1e9, n))
        assert bench.brought == [str(number) for number in order for _ in range(3)]
        assert all(bench.lineup.complete(request) for request in bench.lineup.live)
        bench.close()

    asyncio.run(scenario())


def test_a_running_one_gives_way_at_once_and_what_it_has_brought_makes_room() -> None:
    async def scenario() -> None:
        bench = Bench(16)  # 14 may stay
        low = bench.ask([item("low", 14)])
        for _ in range(10):
            assert await bench.bring_one()
        high = bench.ask([item("high", 6)], priority=1)
        await bench.bring()
        assert bench.lineup.complete(high) and not bench.lineup.complete(low)
        assert bench.brought == ["low"] * 10 + ["high"] * 6
        assert bench.arena.chunks("low") == set(range(8)) and bench.arena.chunks("high") == set(range(6))
        bench.close()

    asyncio.run(scenario())


def test_one_that_is_over_gives_way_to_newer_ones_the_oldest_first() -> None:
    async def scenario() -> None:
        bench = Bench(16)
        for name in ("one", "two"):
            request = bench.ask([item(name, 7)])
            await bench.bring()
            bench.lineup.end(request, done=True)
        bench.ask([item("three", 5)])
        await bench.bring()
        here = {name: len(bench.arena.chunks(name)) for name in ("one", "two", "three")}
        assert here == {"one": 2, "two": 7, "three": 5}
        bench.close()

    asyncio.run(scenario())


def test_what_was_announced_is_not_pushed_out_by_what_is_only_read() -> None:
    async def scenario() -> None:
        bench = Bench(16)
        wanted = item("wanted", 10)
        bench.lineup.end(bench.ask([wanted]), done=False)
        bench.ask([wanted])
        await bench.bring()
        await bench.load(item("scan", 30))
        assert len(bench.arena.chunks("wanted")) == 10
        await bench.load(wanted)
        await bench.load(item("other", 30))
        assert len(bench.arena.chunks("wanted")) < 10
        bench.close()

    asyncio.run(scenario())


def test_who_loads_in_another_order_or_only_a_part_holds_up_nothing() -> None:
    async def scenario() -> None:
        bench = Bench(16)
        a, b, c, d = (item(name, 6) for name in "abcd")
        request = bench.ask([a, b, c, d])
        await bench.bring()
        await bench.load(b)  # a is passed over: it goes to the end
        await bench.bring()
        assert [entry.item for entry in request.open_entries()] == [c, d, a]
        assert len(bench.arena.chunks("c")) == 6
        await bench.load(Item("c", ("c",), c.chunks[:2], c.open))  # a part of it is all that is wanted
        assert len(next(request.open_entries()).left) == 4
        await bench.load(d)
        await bench.bring()
        assert [entry.item for entry in request.open_entries()] == [a]
        assert bench.lineup.complete(request)
        bench.close()

    asyncio.run(scenario())


def test_one_use_in_several_pieces_is_one_use() -> None:
    async def scenario() -> None:
        bench = Bench(16)
        a = item("a", 3)
        request = bench.ask([a, a])
        await bench.bring()
        one, other = Caller(), Caller()
        assert bench.lineup.used("a", 0, one) and not bench.lineup.used("a", 0, one)
        assert [len(entry.left) for entry in request.open_entries()] == [2, 3]
        assert bench.lineup.used("a", 0, other)
        assert not bench.lineup.used("a", 0, Caller())
        bench.close()

    asyncio.run(scenario())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["bring", "load", "load a part", "scan"]), max_size=12), st.booleans())
def test_no_use_of_what_is_pinned_stands_for_having_it_here(turns: Sequence[str], listed: bool) -> None:
    """Others may read it, before it has come, or when it has; lists that name it, too, go on by that."""

    async def scenario() -> None:
        bench = Bench(16)  # 14 may stay
        wanted = item("wanted", 4)
        request = bench.ask([wanted, item("next", 3)]) if listed else None
        pin, loads = bench.pin(wanted), 0
        for turn in turns:
            if turn == "bring":
                await bench.bring_one()
            elif turn == "scan":
                await bench.load(item("scan", 30))
            else:
                loads += turn == "load"
                await bench.load(wanted, numbers=None if turn == "load" else [0])
            list(bench.lineup.candidates(()))  # as one who looks for more
            assert bench.lineup.complete(pin) == (len(bench.arena.chunks("wanted")) == 4)
        if request is not None and loads:
            assert wanted not in [entry.item for entry in request.open_entries()]
        await bench.bring()
        bench.lineup.end(pin, done=True)
        await bench.load(item("scan", 30))
        assert bench.arena.chunks("wanted") == {0, 1, 2, 3}
        bench.close()

    asyncio.run(scenario())
