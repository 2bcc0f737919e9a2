"""What simulated trainers do: restore, save step after step, wait or not, rewind, flush by hand, and leave."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from stepwell.errors import CheckpointNotFound, NoGoodCheckpoint, StepwellError
from stepwell.format.names import Attempt
from tests.sim.model import Broken, Saved
from tests.sim.process import Process, Restored

if TYPE_CHECKING:
    from tests.sim.world import World

#: what leaving a process may take, as by default
EXIT_S = 600.0


class Training:
    """The main coroutines of processes in a world, and what must be true of what they see."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def train(self, process: Process) -> None:
        """Some steps."""
        rng = process.rng
        pauses = (0.0, 0.005, 0.02) if rng.random() < 0.4 else (0.0, 0.01, 0.5, 20.0)
        await process.start()
        try:
            step = await self.go_on(process)
            for _ in range(rng.randint(1, 8)):
                step += rng.randint(1, 3)
                saved = await self.save(process, step)
                self._world.fetching.maybe(process)
                if rng.random() < 0.3:
                    await process.wait_durable(saved)
                if rng.random() < 0.1:
                    await self._flush(process)
                if self._world.alone and rng.random() < 0.15:
                    await self._world.memory_alone.drain(process)
                if rng.random() < 0.15:
                    await self._note(process)
                if rng.random() < 0.15:
                    step = self._rewind(process, step)
                await asyncio.sleep(rng.choice(pauses))
                if rng.random() < 0.1:
                    step = await self.go_on(process)
            if rng.random() < 0.5:
                await asyncio.sleep(rng.random() * 200)
        finally:
            await process.close(rng.choice((5.0, EXIT_S)))

    async def go_on(self, process: Process) -> int:
        """Restores, after its own saves have come to an end; the step to go on from."""
        for saved in process.saves:
            await process.wait_durable(saved)
        known = set(self._world.invariants.committed())
        late, mine = self._world.invariants.passed_over(), self._world.memory_alone.newest(process)
        try:
            restored = await process.restore()
        except NoGoodCheckpoint:  # somebody looked, and lets it go on without
            self._world.note("nothing good", process.pid)
            return process.last_step
        self.check_restored(process, restored, known)
        self._world.memory_alone.check_restored(process, restored, mine)
        knows = not process.catalog.absent  # else the list of what counts may be on a tier that does not answer
        if restored and knows and restored.attempt in late and not self._world.invariants.counts(restored.attempt):
            raise Broken(f"{process} restored {restored.attempt.folder}, which a takeover had passed over")
        return 0 if restored is None else restored.attempt.step

    async def _flush(self, process: Process) -> None:
        """Some checkpoint, or a part of one, goes down by hand."""
        attempts = sorted(process.catalog.holdings)
        lower = process.chain.storage[0 if self._world.alone else 1 :]
        if not attempts or not lower:
            return
        attempt, tier = process.rng.choice(attempts), process.rng.choice(lower)
        parts = process.rng.choice((None, ["model"]))
        self._world.note("flush", process.pid, attempt.folder, tier.info.name, parts)
        with contextlib.suppress(StepwellError, TimeoutError):
            async with asyncio.timeout(100.0):
                await process.writer.flush(attempt, tier, process.job, parts)

    async def _note(self, process: Process) -> None:
        """The writer itself notes something of a checkpoint."""
        if process.catalog.holdings:
            attempt = process.rng.choice(sorted(process.catalog.holdings))
            await self._world.evaluating.note(process, attempt)
            await process.writer.noted(attempt)

    def _rewind(self, process: Process, step: int) -> int:
        steps = sorted({attempt.step for attempt in process.catalog.holdings})
        if not steps:
            return step
        to = process.rng.choice(steps)
        try:
            process.rewind(to)
        except CheckpointNotFound:
            return step
        self._world.note("rewind", process.pid, to)
        return to

    async def save(self, process: Process, step: int) -> Saved:
        saved, snapshot = process.save(next(self._world.numbers), step)
        self._world.model.saves.append(saved)
        self._world.note("save", process.pid, saved.number, step)
        await process.carry_out(saved, snapshot)
        return saved

    def check_restored(self, process: Process, restored: Restored | None, known: set[Attempt]) -> None:
        """What was restored is right. known: what counted when the restore began."""
        if restored is None:
            known &= set(self._world.invariants.committed())  # what was not durable may have gone with its node
            if known:
                raise Broken(f"{process} found nothing, but there is {max(known).folder}")
            self._world.note("restored", process.pid, None)
            return
        self._world.note("restored", process.pid, restored.attempt.folder, sorted(restored.skipped))
        saved = self._world.model.find(restored.attempt.folder)
        if saved is None:
            raise Broken(f"{process} restored {restored.attempt.folder}, which nobody saved")
        if restored.tokens != saved.tokens:
            raise Broken(f"{process} restored other bytes than those of {saved}")
