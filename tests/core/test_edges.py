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
    return Edge("a", "b", lambda in_flight: bound, None if limit is None else Pace(limit))


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
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        pace = Pace(1000.0)
        way = Edge("a", "b", lambda in_flight: 1 << 30, pace)
        began = loop.time()
        await way.enter(10, Priority.FLUSH)
        waiting = asyncio.ensure_future(way.enter(10, Priority.FLUSH))
        await turns()
        pace.free_at -= 0.01  # the loop is 10 ms late when it comes to that: as if it had been on time
        await waiting
        assert pace.free_at == pytest.approx(began + 0.01)
        await way.enter(10, Priority.FLUSH)
        waiting = asyncio.ensure_future(way.enter(10, Priority.FLUSH))
        await turns()
        pace.free_at -= 5  # very late: a little only
        await waiting
        assert pace.free_at == pytest.approx(loop.time() - LATE_S + 0.01)
        await asyncio.sleep(10)
        await way.enter(10, Priority.FLUSH)
        assert pace.free_at == pytest.approx(loop.time() + 0.01)

    on_virtual_time(scenario)


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


def test_the_most_urgent_on_any_edge_goes_first_when_a_limit_is_shared() -> None:
    """A restore does not share the rate of a tier with a prefetch: that waits."""

    async def scenario() -> None:
        edges, order = Edges(Arena(256 * MIB, LRU(), background=False)), []
        up = edges.between("pfs", "host", background=True, read_limit=100.0)
        back = edges.between("pfs", "state", background=False, read_limit=100.0)
        more = edges.between("pfs", "nvme", background=True, read_limit=100.0)

        async def move(way: Edge, priority: Priority, count: int) -> None:
            for _ in range(count):
                with await way.enter(100, priority):
                    order.append(way.target)
                    await asyncio.sleep(0.001)

        async def later() -> None:
            await asyncio.sleep(4.5)
            await asyncio.gather(*(move(back, Priority.RESTORE, 3) for _ in range(3)))

        loop = asyncio.get_running_loop()
        began = loop.time()
        await asyncio.gather(*(move(way, Priority.PREFETCH, 2) for way in (up, more, up, more)), later())
        assert order[:5].count("host") == 3 and order[5:14] == ["state"] * 9
        assert sorted(order[14:]) == ["host", "nvme", "nvme"]
        assert loop.time() - began == pytest.approx(16.001)  # 17 operations of a second, the first at once

    on_virtual_time(scenario)


@pytest.mark.parametrize("in_flight", [1, 1000])
@pytest.mark.parametrize("urgent", [False, True])
def test_the_rate_that_is_told_is_the_one_that_the_limit_allows(in_flight: int, urgent: bool) -> None:
    async def scenario() -> None:
        way = edge(100 * in_flight, limit=1000.0)

        async def move() -> None:
            with await way.enter(100, Priority.FLUSH):
                await asyncio.sleep(0.001)

        await move()
        assert way.statistics().bytes_per_s == pytest.approx(1000.0)
        await asyncio.sleep(50)
        for count in (1, 2, 30):
            if urgent:
                await asyncio.gather(*(move() for _ in range(count)))
            else:
                for _ in range(count):
                    await move()
            assert way.statistics().bytes_per_s == pytest.approx(1000.0, rel=0.02)
            await asyncio.sleep(50)  # idle time does not count
        tasks = [asyncio.ensure_future(move()) for _ in range(50)]
        await asyncio.sleep(2.05)
        assert way.statistics().bytes_per_s == pytest.approx(1000.0, rel=0.05) and way.statistics().queued > 20
        await asyncio.wait(tasks)

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
        assert way._bound_bytes(0) == arena.kept_max * arena.slot_bytes == 16 * MIB
        arena.grow(1 << 30)
        assert way._bound_bytes(0) == EDGE_BYTES

    asyncio.run(scenario())
