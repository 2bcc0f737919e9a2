"""Edges: who goes first, how much is in flight, how fast, and what a stuck one costs the others."""

from __future__ import annotations

import asyncio

import pytest

from stepwell.edges import BACKGROUND_SHARE, EDGE_BYTES, LATE_S, Edge, Edges, Pace
from stepwell.policies.evict import LRU
from stepwell.tiers.host import Arena, Priority
from tests.core.virtual import on_virtual_time, turns

MIB = 1 << 20


def edge(bound: int = 100, limit: float | None = None) -> Edge:
    return Edge("a", "b", lambda: bound, None if limit is None else Pace(limit))


def test_the_most_urgent_goes_first_and_equals_in_turn() -> None:
    async def scenario() -> None:
        way, order = edge(10), []

        async def move(name: str, priority: Priority) -> None:
            with await way.enter(10, priority):
                order.append(name)
                await asyncio.sleep(1)

        first = await way.enter(10, Priority.PREFETCH)
        asked = [("p", Priority.PREFETCH), ("f1", Priority.FLUSH), ("s", Priority.SNAPSHOT), ("f2", Priority.FLUSH)]
        tasks = [asyncio.ensure_future(move(*each)) for each in (*asked, ("r", Priority.RESTORE))]
        await turns()
        assert order == [] and way.statistics().queued == 5
        first.leave(True)
        await asyncio.wait(tasks)
        assert order == ["r", "s", "f1", "f2", "p"]

    on_virtual_time(scenario)


def test_never_more_than_the_bound_is_in_flight_but_for_one_that_is_larger() -> None:
    async def scenario() -> None:
        way = edge(100)
        most = alone = 0

        async def move(size: int) -> None:
            nonlocal most, alone
            with await way.enter(size, Priority.FLUSH):
                now = way.statistics().in_flight_bytes
                if size > 100:
                    assert now == size
                    alone += 1
                else:
                    most = max(most, now)
                await asyncio.sleep(1)

        await asyncio.gather(*(move(size) for size in (40, 40, 40, 250, 60, 40, 300, 1, 99, 100)))
        assert most == 100 and alone == 2
        assert way.statistics().in_flight_bytes == way.statistics().queued == 0

    on_virtual_time(scenario)


@pytest.mark.parametrize("size", [1, 997, 64 << 10])
def test_the_rate_is_kept_within_two_percent(size: int) -> None:
    async def scenario() -> None:
        way = edge(1 << 30, limit=1000.0 * size)

        async def move() -> None:
            with await way.enter(size, Priority.FLUSH):
                await asyncio.sleep(0.003)

        loop = asyncio.get_running_loop()
        await asyncio.sleep(100)  # what was not used before is not saved up
        began = loop.time()
        await asyncio.gather(*(move() for _ in range(2000)))
        assert 2000 / (loop.time() - began) == pytest.approx(1000, rel=0.02)

    on_virtual_time(scenario)


def test_a_loop_that_is_late_catches_up_but_not_after_a_pause() -> None:
    pace = Pace(1000.0)
    pace.take(10, 5.0, waited=False)
    assert pace.free_at == pytest.approx(5.01)
    pace.take(10, 5.02, waited=True)  # 10 ms late: as if it had been on time
    assert pace.free_at == pytest.approx(5.02)
    pace.take(10, 9.0, waited=True)  # very late: a little only
    assert pace.free_at == pytest.approx(9.0 - LATE_S + 0.01)
    pace.take(10, 20.0, waited=False)
    assert pace.free_at == pytest.approx(20.01)


def test_all_edges_into_a_tier_keep_its_limit_together() -> None:
    async def scenario() -> None:
        edges = Edges(Arena(256 * MIB, LRU(), background=False))
        ways = [edges.between(source, "pfs", background=True, write_limit=1000.0) for source in ("host", "nvme")]
        reading = edges.between("pfs", "state", background=False, read_limit=4000.0)

        async def move(way: Edge) -> None:
            for _ in range(20):
                with await way.enter(100, Priority.FLUSH):
                    pass

        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(move(way) for way in ways))
        assert loop.time() - began == pytest.approx(3.9)
        began = loop.time()
        await move(reading)
        assert loop.time() - began == pytest.approx(19 * 100 / 4000)

    on_virtual_time(scenario)


@pytest.mark.parametrize("limit", [None, 10.0])
@pytest.mark.parametrize("count", range(4))
def test_cancelled_at_any_moment_leaves_no_bytes_behind(count: int, limit: float | None) -> None:
    async def scenario() -> None:
        way = edge(10, limit)
        first = await way.enter(10, Priority.FLUSH)
        waiting = asyncio.ensure_future(way.enter(10, Priority.FLUSH))
        other = asyncio.ensure_future(way.enter(1, Priority.PREFETCH))
        await turns(1)
        if count:
            first.leave(True)  # admitted from here, if the pace allows, but it may not know yet
            await turns(count - 1)
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.result().leave(True)
        first.leave(True)
        (await other).leave(True)
        assert way.statistics().queued == way.statistics().in_flight_bytes == 0

    on_virtual_time(scenario)


def test_a_large_one_that_gives_up_lets_smaller_ones_pass() -> None:
    async def scenario() -> None:
        way = edge(10)
        await way.enter(5, Priority.FLUSH)  # never ends
        large = asyncio.ensure_future(way.enter(10, Priority.FLUSH))
        small = asyncio.ensure_future(way.enter(5, Priority.FLUSH))
        await turns()
        assert not small.done()
        large.cancel()
        await small

    on_virtual_time(scenario)


def test_statistics_count_what_was_moved_and_how_long_it_took() -> None:
    async def scenario() -> None:
        way = edge(100)
        assert way.statistics().bytes_per_s == way.statistics().oldest_s == 0.0
        for _ in range(3):
            with await way.enter(50, Priority.FLUSH):
                await asyncio.sleep(2)
            await asyncio.sleep(10)  # idle time does not count
        with pytest.raises(OSError):
            with await way.enter(50, Priority.FLUSH):
                raise OSError
        first = await way.enter(50, Priority.FLUSH)
        await asyncio.sleep(1)
        second = await way.enter(50, Priority.FLUSH)
        waiting = asyncio.ensure_future(way.enter(50, Priority.FLUSH))
        await asyncio.sleep(1)
        seen = way.statistics()
        assert (seen.source, seen.target, seen.queued, seen.in_flight_bytes) == ("a", "b", 1, 100)
        assert (seen.moved_bytes, seen.failed, seen.oldest_s) == (150, 1, 2.0)
        assert seen.bytes_per_s == pytest.approx(150 / 8)
        first.leave(True)
        first.leave(False)  # only the first says what became of it
        second.leave(False)
        (await waiting).leave(True)
        assert (way.statistics().moved_bytes, way.statistics().failed) == (250, 2)

    on_virtual_time(scenario)


def test_a_stuck_background_edge_leaves_nearly_all_of_a_small_arena() -> None:
    async def scenario() -> None:
        arena = Arena(64 << 12, LRU(), slot_bytes=4096, background=False)
        edges = Edges(arena)
        stuck, other = edges.between("nvme", "pfs", background=True), edges.between("nvme", "state", background=False)

        async def flush() -> None:
            await stuck.enter(4096, Priority.FLUSH)
            await arena.acquire(Priority.FLUSH)  # never given back

        tasks = [asyncio.ensure_future(flush()) for _ in range(200)]
        await turns()
        assert arena.in_use == 64 // BACKGROUND_SHARE
        for _ in range(500):
            with await other.enter(4096, Priority.RESTORE):
                arena.release(await arena.acquire(Priority.RESTORE))
        assert sum(task.done() for task in tasks) == arena.in_use == 64 // BACKGROUND_SHARE
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def test_bounds_follow_the_arena_as_it_grows() -> None:
    async def scenario() -> None:
        arena = Arena(32 * MIB, LRU(), background=False)
        way = Edges(arena).between("host", "nvme", background=False)
        assert way._bound_bytes() == arena.kept_max * arena.slot_bytes == 16 * MIB
        arena.grow(1 << 30)
        assert way._bound_bytes() == EDGE_BYTES

    asyncio.run(scenario())
