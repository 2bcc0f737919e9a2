"""The simulation's own ground: virtual time, pauses, and processes that end between two awaits."""

from __future__ import annotations

import asyncio
import gc
import random

import pytest

from stepwell.lab.loop import SimLoop, Stuck, Timeline


def timeline() -> tuple[Timeline, SimLoop]:
    time = Timeline(random.Random(1))
    return time, time.new_loop("one")


def start(loop: SimLoop, work: object) -> asyncio.Task[object]:
    with loop.running():
        return loop.create_task(work)  # type: ignore[arg-type]


def test_a_day_passes_at_once() -> None:
    time, loop = timeline()
    task = start(loop, asyncio.sleep(86_400, "done"))
    time.run_until(task.done)
    assert task.result() == "done" and time.now == 86_400


def test_timeouts_and_waits_work() -> None:
    time, loop = timeline()

    async def main() -> list[object]:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        done, late = await asyncio.wait(
            [loop.create_task(asyncio.sleep(1)), loop.create_task(asyncio.sleep(9))], timeout=3
        )
        return [len(done), len(late), loop.time()]

    task = start(loop, main())
    time.run_until(task.done)
    assert task.result() == [1, 1, 8.0]


def test_what_never_comes_is_told() -> None:
    time, loop = timeline()
    task = start(loop, asyncio.Event().wait())
    with pytest.raises(Stuck):
        time.run_until(task.done)
    loop.kill()


def test_a_paused_process_stands_still_and_others_go_on() -> None:
    time, one = timeline()
    two = time.new_loop("two")
    slow, fast = start(one, asyncio.sleep(1)), start(two, asyncio.sleep(2))
    time.step()
    one.pause(60)
    time.run_until(fast.done)
    assert time.now == 2 and not slow.done()
    time.run_until(slow.done)
    assert time.now == 60


def test_a_killed_process_does_nothing_more_and_leaves_no_warnings() -> None:
    """filterwarnings = error: a pending task or a coroutine that was never awaited would fail this."""
    time, loop = timeline()
    done: list[str] = []

    async def tidy() -> None:
        done.append("started by a finally")

    async def stubborn() -> None:
        try:
            await asyncio.sleep(10)
            done.append("slept")
        finally:
            loop.create_task(tidy())
            try:
                await asyncio.sleep(1)
            finally:
                await asyncio.sleep(1)
            done.append("cleaned up")

    async def parent() -> None:
        await asyncio.gather(stubborn(), stubborn())

    start(loop, parent())
    for _ in range(3):
        time.step()
    loop.kill()
    assert not time.step() and done == []
    gc.collect()


def test_interleavings_differ_between_seeds() -> None:
    def order(seed: int) -> str:
        time = Timeline(random.Random(seed))
        seen: list[str] = []

        async def tick(name: str) -> None:
            for _ in range(10):
                seen.append(name)
                await asyncio.sleep(0)

        tasks = [start(time.new_loop(name), tick(name)) for name in "ab"]
        time.run_until(lambda: all(task.done() for task in tasks))
        return "".join(seen)

    assert order(1) == order(1)
    assert len({order(seed) for seed in range(5)}) == 5
