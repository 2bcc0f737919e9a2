"""What simulated trainers bring up before they ask for it: checkpoints, to memory or to a nearer disk, and pins.

Only histories that are asked to (`World(seed, ahead=True)`) have any of it, so that others stay what they were. In half
of those the newest checkpoint also comes up by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from stepwell.errors import StepwellError
from stepwell.prefetching import Prefetch, Urgency
from stepwell.tiers.base import Tier
from stepwell.wanted import Choice
from tests.sim.model import Broken
from tests.sim.process import Process

if TYPE_CHECKING:
    from tests.sim.world import World

PARTS = (None, None, ["model"], ["model", "optimizer"])


class Fetching:
    """Of all processes of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.done = 0  # prefetches that came to a good end

    def maybe(self, process: Process) -> None:
        """Sometimes begins a prefetch or a pin, which goes on beside what the process does, until it is cancelled, has
        ended, or the process closes."""
        rng, ahead = process.rng, process.writer.ahead
        steps = sorted({attempt.step for attempt in process.catalog.holdings})
        if not self._world.ahead or not steps or rng.random() < 0.5:
            return
        some = [rng.choice(steps) for _ in range(rng.choice((1, 1, 2, 4)))]
        if ahead.pins is not None and rng.random() < 0.15:
            self._begin(process, self._pin(process, some[0]))
            return
        tier = rng.choice(process.tiers[:-1]) if len(process.tiers) > 1 else process.tiers[0]
        self._begin(process, self._prefetch(process, some, tier))

    def _begin(self, process: Process, work: Coroutine[Any, Any, None]) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and isinstance(error := task.exception(), Exception):
                process.broken = process.broken or error

        task = process.loop.create_task(work)
        task.add_done_callback(ended)
        if process.rng.random() < 0.3:
            process.loop.call_later(process.rng.choice((0.0, 0.01, 1.0, 30.0)), task.cancel)

    async def _prefetch(self, process: Process, steps: Sequence[int], tier: Tier) -> None:
        rng = process.rng
        handle = Prefetch(Urgency.of(rng.choice((0, 0, 1, 5)), None))
        choice = Choice.of(rng.choice(PARTS), "*")
        limit = rng.choice((None, None, 3 << 20))
        self._world.note("prefetch", process.pid, steps, tier.info.name, choice.parts, limit)
        try:
            await process.writer.ahead.bring(steps, tier, handle, choice, limit, process.job)
        except StepwellError as error:
            self._world.note("not prefetched", process.pid, type(error).__name__)
            return
        progress = handle.progress
        if progress.done_bytes != progress.total_bytes:
            raise Broken(f"{process}: a prefetch has ended, and {progress} are there")
        self.done += 1
        self._world.note("prefetched", process.pid, progress.total_bytes)

    async def _pin(self, process: Process, step: int) -> None:
        ahead = process.writer.ahead
        assert ahead.pins is not None and process.host is not None
        self._world.note("pin", process.pid, step)
        try:
            item = await ahead.item(step, Choice(), process.job)
            handle = ahead.pins.add(step, item)
        except StepwellError as error:
            self._world.note("not pinned", process.pid, type(error).__name__)
            return
        try:
            await ahead.lift_items([item], handle)
        except BaseException as error:
            ahead.pins.give_up(item)
            if not isinstance(error, StepwellError):
                raise
            self._world.note("not pinned", process.pid, type(error).__name__)
            return
        arena = process.host.arena
        missing = [number for at, number, _ in item.chunks if not arena.has(item.names[at], number)]
        if missing:
            raise Broken(f"{process}: step {step} is pinned, and chunks {missing} of it are not in memory")
        self.done += 1
        await asyncio.sleep(process.rng.choice((0.1, 10.0, 1000.0)))
        with contextlib.suppress(StepwellError):
            ahead.pins.remove(step)
