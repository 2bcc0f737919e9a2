"""Ties the waits of a save to the flushes that policies ask for. Lives on the event loop."""

from __future__ import annotations

import asyncio
import logging
from functools import partial

from stepwell.chain import Chain, Keep
from stepwell.errors import NotPlanned, StepwellError
from stepwell.flushing import Goal
from stepwell.flushwork import FlushWork
from stepwell.format.names import Attempt
from stepwell.saving import Save
from stepwell.steering import Steering

log = logging.getLogger("stepwell")


class Ties:
    """Of one run's saves."""

    def __init__(self, chain: Chain, steering: Steering, work: FlushWork, keep: Keep) -> None:
        self._chain, self._steering, self._work, self._keep = chain, steering, work, keep
        self.below = [tier.info.name for tier in chain.storage[1:]]

    async def follow(self, save: Save, attempt: Attempt) -> None:
        """Ties the save's waits to the flushes that policies have asked for."""
        for tier in self._chain.storage[0 if save.held else 1 :]:
            name, flusher = tier.info.name, self._steering.flushers[tier.info.name]
            goal = next((g for g in flusher.goals if g.attempt == attempt and g.parts is None), None)
            if goal is not None:
                save.planned(name)
                goal.done.add_done_callback(partial(self._flushed, save, name))
                self._keep(self._report(save, goal, name))
            elif await self._work.has(attempt, tier, None):
                try:
                    await self._work.confirm(attempt, tier)
                except StepwellError as error:
                    save.fail(error, [name])
                else:
                    save.mark_committed(name, self._chain.clock.monotonic())
                    if save.held:
                        save.mark_durable()
            else:
                self._not_planned(save, name)

    def _not_planned(self, save: Save, tier: str) -> None:
        todo = f"store.flush({save.step}, to={tier!r}) does"
        save.not_planned(
            tier, NotPlanned("no policy sends this step there", todo=todo, step=save.step, tier=tier)
        )  # fmt: skip

    async def foresee(self, save: Save, attempt: Attempt) -> None:
        """Ends waits that would be in vain before the first tier has the checkpoint."""
        try:
            planned = await self._steering.foresee(attempt, save.nbytes, save.parts)
        except Exception as error:  # it is decided, and said, when the checkpoint is there
            log.debug("cannot foresee where step %d goes: %s", save.step, error)
            return
        there = self._chain.tiers[0] if save.held else self._chain.first
        if self._chain.catalog.known_manifest(attempt, there) is not None:
            return  # `follow` says it, or has
        for name in self.below:
            if name not in planned:
                self._not_planned(save, name)

    def _flushed(self, save: Save, tier: str, done: asyncio.Future[None]) -> None:
        if (error := done.exception()) is None:
            save.mark_committed(tier, self._chain.clock.monotonic())
            if save.held:
                save.mark_durable()
        elif isinstance(error, NotPlanned):
            save.not_planned(tier, error)
        else:
            save.fail(error, [tier])

    async def _report(self, save: Save, goal: Goal, tier: str) -> None:
        """Tells those who wait when the flush has failed often enough; it is still tried again."""
        await goal.told.wait()
        if not goal.done.done() and goal.error is not None:
            save.fail(goal.error, [tier])
