"""Histories in which saves stay in host memory, because the first storage tier takes only what its rules name.

Only those that are asked to (`World(seed, alone=True)`) are so, and others stay what they were. Then processes drain
now and then, and besides what holds for all histories:

- What was said to be in memory, and nothing newer, is what the process restores.
- A drain, or closing in calm weather, leaves the newest of it on the first tier and on the last; what a drain says of
  its end is so.
- Memory never keeps more than it may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stepwell.draining import Drainer, DrainReport
from stepwell.errors import StepwellError
from tests.sim.model import Broken, Saved
from tests.sim.process import Process, Restored

if TYPE_CHECKING:
    from tests.sim.world import World

#: what a drain may take
DRAIN_S = (0.01, 2.0, 60.0, 900.0)
#: one that took more of it may not have come to what it had to do
IN_TIME = 0.9


class Alone:
    """Of all processes of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.drained = 0  # drains that left nothing behind

    def newest(self, process: Process) -> Saved | None:
        """The last save of a process that it was told to have, wherever; none once a later one may have changed the
        line without getting so far."""
        last = process.saves[-1] if process.saves else None
        return last if last is not None and last.told and not last.failed else None

    def check_restored(self, process: Process, restored: Restored | None, newest: Saved | None) -> None:
        """newest: of this process, before it restored."""
        if not self._world.alone or newest is None or process.writer.owner.writership.lost:
            return
        found = None if restored is None else restored.attempt
        passed_over = restored is not None and newest.step in restored.skipped
        if found != newest.attempt and not passed_over and self._is_own(process):
            raise Broken(f"{process} was told that it has {newest}, and restored {found}")

    def _is_own(self, process: Process) -> bool:
        """Whether nobody else has taken the run since."""
        return process.writer.owner.writership.epoch >= self._world.invariants.newest_epoch

    async def drain(self, process: Process) -> None:
        """Drains, as the store does."""
        for saved in process.saves:
            await process.wait_durable(saved)
        newest, limit_s = self.newest(process), process.rng.choice(DRAIN_S)
        self._world.note("drain", process.pid, limit_s)
        try:
            report = await Drainer(process.chain, process.writer).run(limit_s, process.job)
        except StepwellError:  # somebody else has the run, say
            return
        if self._is_own(process) and not process.catalog.absent:
            self._check_report(process, report, newest, limit_s)

    def _check_report(self, process: Process, report: DrainReport, newest: Saved | None, limit_s: float) -> None:
        invariants = self._world.invariants
        committed = {attempt: {m.name for m in media} for attempt, media in invariants.committed().items()}
        for tier, step in report.newest.items():
            if not any(attempt.step == step and tier in there for attempt, there in committed.items()):
                raise Broken(f"{process} was told that step {step} is on {tier}, and it is not")
        attempt = None if newest is None else newest.attempt
        if attempt is None or report.cut or report.seconds > limit_s * IN_TIME:
            return
        self.drained += 1
        if process.chain.authority.info.name not in committed.get(attempt, ()):
            raise Broken(f"{process} was drained, nothing was left behind, and {newest} is on {committed.get(attempt)}")

    def check_closed(self, process: Process) -> None:
        """Of one that had time and calm weather for it."""
        newest = self.newest(process)
        if not self._world.alone or newest is None or newest.attempt is None or not self._is_own(process):
            return
        committed = self._world.invariants.committed().get(newest.attempt, [])
        if self._world.invariants.media[-1] not in committed:
            raise Broken(f"{process} was closed, and {newest} is on {[medium.name for medium in committed]}")

    def check_memory(self, process: Process) -> None:
        """After each event."""
        arena = process.arena
        if arena._kept > arena.kept_max:
            raise Broken(f"{process} keeps {arena._kept} slots of {arena.kept_max} that it may")
