"""Virtual time for tests: a coroutine runs on a simulated loop, and pauses cost nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from stepwell.lab.loop import Timeline

T = TypeVar("T")


class LoopClock:
    """A clock that shows the time of the loop it is used on."""

    def wall(self) -> float:
        return asyncio.get_running_loop().time()

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def on_virtual_time(scenario: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs `scenario` to its end. Raises stepwell.lab.loop.Stuck if it waits for what never comes."""
    timeline = Timeline(random.Random(0))
    loop = timeline.new_loop("test")
    with loop.running():
        task = loop.create_task(scenario())
    timeline.run_until(task.done)
    assert not loop.errors, loop.errors
    with loop.running():
        return task.result()


async def turns(count: int = 5) -> None:
    """Lets everything that is ready run."""
    for _ in range(count):
        await asyncio.sleep(0)
