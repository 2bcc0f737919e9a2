"""Policies at work: events go in, moves come out, and those that no promise forbids are carried out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from stepwell.chain import Chain, Keep
from stepwell.errors import StepwellError
from stepwell.flushing import Flusher, Goal
from stepwell.format.names import Attempt
from stepwell.policies.base import (
    CheckpointView,
    Closing,
    Drop,
    Event,
    Flush,
    Move,
    Policy,
    TierView,
    View,
)
from stepwell.promises import refusal
from stepwell.tiers.base import CheckpointKey
from stepwell.timeline import abandoned

log = logging.getLogger("stepwell")


class Steering:
    """Asks the policies of one run. Lives on the event loop."""

    def __init__(self, chain: Chain, policies: Sequence[Policy], flushers: dict[str, Flusher], keep: Keep) -> None:
        self._chain, self._policies, self.flushers, self._keep = chain, policies, flushers, keep
        self._dropping: set[tuple[str, str]] = set()
        self.may_drop: Callable[[str], bool] = lambda tier: True  # whether this rank deletes on that tier

    async def on(self, event: Event) -> list[Goal]:
        """Tells the policies; returns the flushes that follow."""
        if not self._policies:
            return []
        view = await self.view()
        goals: list[Goal] = []
        for policy in self._policies:
            for move in policy.decide(event, view):
                goals += self._carry_out(move, replace(view, promised=self.promised))  # also what was decided just now
        return goals

    def _carry_out(self, move: Move, view: View) -> Iterable[Goal]:
        why_not = refusal(move, view, self._leased())
        if why_not is not None:
            log.debug("%s is not done: %s", move, why_not)
            return
        if isinstance(move, Flush):
            if (move.checkpoint, move.tier) in self._dropping:
                return  # it is asked for again at the next event
            attempt = Attempt.parse(move.checkpoint)
            assert attempt is not None
            yield self.flushers[move.tier].want(attempt, move.parts)
        elif self.may_drop(move.tier) and (move.checkpoint, move.tier) not in self._dropping:
            self._dropping.add((move.checkpoint, move.tier))
            self._keep(self._drop(move))

    async def _drop(self, move: Drop) -> None:
        chain = self._chain
        attempt = Attempt.parse(move.checkpoint)
        assert attempt is not None
        try:
            log.info("deleting step %d from %s: %s", attempt.step, move.tier, move.reason)
            chain.catalog.remove(attempt, chain.named(move.tier))
            await chain.named(move.tier).drop([CheckpointKey(chain.run, move.checkpoint)])
        except StepwellError as error:  # it is debris now, or is found again by the next scan; training goes on
            log.warning("deleting step %d from %s failed: %s", attempt.step, move.tier, error)
        finally:
            self._dropping.discard((move.checkpoint, move.tier))

    def _leased(self) -> frozenset[str]:
        return frozenset(attempt.folder for attempt, readers in self._chain.catalog.reading.items() if readers)

    async def view(self) -> View:
        """What is where, as policies see it."""
        catalog = self._chain.catalog
        checkpoints = []
        for attempt in sorted(catalog.holdings):
            complete: set[str] = set()
            partial: set[str] = set()
            tags: tuple[str, ...] = ()
            metrics: dict[str, float] = {}
            size, made = 0, 0.0
            for holding in list(catalog.holdings.get(attempt, [])):
                name = holding.tier.info.name
                try:
                    manifest = await catalog.manifest(attempt, holding.tier)
                except StepwellError as error:
                    log.warning("%s", error)
                    continue
                (complete if manifest.complete else partial).add(name)
                size, made, tags = max(size, manifest.size), manifest.made, tuple(manifest.tags)
                metrics = {k: v for k, v in manifest.metrics.items() if isinstance(v, float)}
            checkpoints.append(
                CheckpointView(
                    attempt.folder, attempt.step, size, frozenset(complete), frozenset(partial),
                    abandoned=abandoned(attempt, catalog.rewinds), tags=tags, metrics=metrics, made=made,
                )
            )  # fmt: skip
        tiers = tuple(self._tier(tier) for tier in self._chain.tiers)
        return View(self._chain.clock.monotonic(), tiers, tuple(checkpoints), self.promised)

    def _tier(self, tier: Any) -> TierView:
        info, usage = tier.info, tier.usage()
        flusher = self.flushers.get(info.name)
        return TierView(
            info.name, info.scope, info.survives, info.capacity_bytes, usage.physical_bytes, usage.free_bytes,
            healthy=flusher is None or not flusher.failing,
        )  # fmt: skip

    @property
    def promised(self) -> frozenset[tuple[str, str]]:
        """(checkpoint, tier) of all flushes that are decided and not done."""
        return frozenset((goal.attempt.folder, name) for name, f in self.flushers.items() for goal in f.goals)

    async def closing(self) -> None:
        """Asks what must still get down, and lets the queues hurry."""
        for goal in await self.on(Closing()):
            log.debug("%s must get down before the store is closed", goal)
        for flusher in self.flushers.values():
            flusher.hurry()
