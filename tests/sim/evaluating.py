"""What simulated evaluation jobs do, in mode "r": read while training writes and retention deletes, note results, tag,
keep and take keeps back, or watch for what is new."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING

from stepwell.errors import CheckpointGone, CheckpointNotFound, CorruptData, StepwellError, TierError
from stepwell.format.names import Attempt
from stepwell.marking import mark
from stepwell.watching import watch
from tests.sim.model import Broken
from tests.sim.process import RUN, Process
from tests.sim.reference import facts_of
from tests.sim.rules import TAGS

if TYPE_CHECKING:
    from tests.sim.world import World

#: what a note may take, and how long a watcher stays without news
NOTE_S, WATCH_S = 100.0, 60.0


class Evaluating:
    """The main coroutines of reading processes in a world, and what must be true of what they see."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.seen: Counter[str] = Counter()  # how often something was "read", "gone", "noted" or "watched"

    def _note(self, what: str, process: Process, *more: object) -> None:
        self.seen[what] += 1
        self._world.note(what, process.pid, *more)

    async def evaluate(self, process: Process) -> None:
        """Some checkpoints, the newest or any."""
        await process.start()
        try:
            for _ in range(process.rng.randint(4, 12)):
                await asyncio.sleep(process.rng.choice((0.0, 0.01, 0.1, 10.0)))
                await process.catalog.refresh()
                line = process.catalog.newest_first()
                if not line:
                    continue
                attempt = (
                    line[0] if process.rng.random() < 0.4 else process.rng.choice(sorted(process.catalog.holdings))
                )
                await asyncio.sleep(process.rng.choice((0.0, 0.05, 5.0, 20.0)))  # until then it may be deleted
                if process.rng.random() < 0.7:
                    await self.read(process, attempt)
                if process.rng.random() < 0.8:
                    await self.note(process, attempt)
        finally:
            await process.close(1.0)

    async def watch(self, process: Process) -> None:
        """Evaluates what gets to some tier, each once, and notes the result."""
        tier = process.rng.choice(process.chain.storage)
        seen: set[str] = set()
        await process.start()
        try:
            found = watch(process.catalog, tier, after=None, poll_s=2.0, timeout_s=WATCH_S)
            async with contextlib.aclosing(found), asyncio.timeout(400.0):  # type: ignore[type-var]
                async for checkpoint in found:
                    if checkpoint.name in seen or self._world.model.find(checkpoint.name) is None:
                        raise Broken(f"{process} saw {checkpoint.name}, twice or without a save")
                    seen.add(checkpoint.name)
                    self.seen["watched"] += 1
                    attempt = Attempt.parse(checkpoint.name)
                    assert attempt is not None
                    await self.note(process, attempt)
        except (TimeoutError, StepwellError):
            self._note("watch ended", process, len(seen))
        finally:
            await process.close(1.0)

    async def read(self, process: Process, attempt: Attempt) -> None:
        """Either all is right, or an error says why not; never that bytes are bad because some are gone."""
        began, before = process.loop.time(), self._whole_on(attempt)
        try:
            tokens = await process.read(attempt)
        except CheckpointGone:
            self._note("gone", process, attempt.folder)
            return
        except CorruptData as error:
            self._note("bad", process, attempt.folder)
            whole = before & self._whole_on(attempt) or attempt not in self._world.invariants.committed()
            invariants = self._world.invariants
            garbled = attempt.folder in invariants.garbled | invariants.back_again or not invariants.counts(attempt)
            if whole and not garbled and not self._troubled(began):
                raise Broken(f"{process} was told that {attempt.folder} is bad: {error}") from error
            return
        except (TierError, CheckpointNotFound) as error:
            self._note("not read", process, attempt.folder, type(error).__name__)
            return
        saved = self._world.model.find(attempt.folder)
        if saved is None or saved.tokens != tokens:
            raise Broken(f"{process} read other bytes than those of {saved}")
        self._note("read", process, attempt.folder)

    def _whole_on(self, attempt: Attempt) -> set[str]:
        facts = facts_of(self._world.invariants.committed(), RUN, [], [])
        return {medium for fact in facts if fact.attempt == attempt for medium in fact.there if fact.has(medium)}

    def _troubled(self, began: float) -> bool:
        """Whether some tier has failed since then, so that not all copies may have been seen."""
        return any(weather.troubled_at >= began for _, weather in self._world.places.values())

    async def note(self, process: Process, attempt: Attempt) -> None:
        """A result, a tag, a keep or its end."""
        rng = process.rng
        metrics = {"eval": rng.choice((rng.random(), rng.random(), "nan"))} if rng.random() < 0.6 else None
        tags = {rng.choice(TAGS): rng.random() < 0.7} if rng.random() < 0.3 else None
        keep = rng.random() < 0.6 if rng.random() < 0.3 else None
        self._world.note("note", process.pid, attempt.folder, metrics, tags, keep)
        try:
            async with asyncio.timeout(NOTE_S):
                await mark(process.catalog, attempt, metrics=metrics, tags=tags, keep=keep)
        except (StepwellError, TimeoutError) as error:
            self._note("not noted", process, type(error).__name__)
            return
        self._note("noted", process)
