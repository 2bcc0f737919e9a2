"""Policies at work: events go in, moves come out, and those that no promise forbids are carried out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from stepwell.chain import Chain, Keep
from stepwell.errors import StepwellError
from stepwell.flushing import Flusher, Goal
from stepwell.format.names import Attempt
from stepwell.policies.base import (
    CheckpointView,
    Closing,
    Committed,
    Drop,
    Event,
    Flush,
    Move,
    Policy,
    TierView,
    View,
)
from stepwell.promises import refusal
from stepwell.tiers.base import CheckpointKey, Tier
from stepwell.timeline import abandoned

log = logging.getLogger("stepwell")


class Steering:
    """Asks the policies of one run. Lives on the event loop."""

    def __init__(self, chain: Chain, policies: Sequence[Policy], flushers: dict[str, Flusher], keep: Keep) -> None:
        self._chain, self._policies, self.flushers, self._keep = chain, policies, flushers, keep
        self.busy: set[tuple[str, str]] = set()  # (checkpoint, tier) of copies that are being deleted or repaired
        self.may_drop: Callable[[str], bool] = lambda tier: True  # whether this rank deletes on that tier
        self.before_drop: Callable[[Tier, Attempt], Awaitable[None]] | None = None  # raises if it must not be done
        if chain.host is not None:
            chain.host.on_uncommitted = self._evicted

    async def on(self, event: Event) -> list[Goal]:
        """Tells the policies; returns the flushes that follow."""
        if not self._policies:
            return []
        view = await self.view()
        goals: list[Goal] = []
        for policy in self._policies:
            for move in policy.decide(event, view):
                view = self._facts()  # each move is judged by what those before it, of whomever, have changed
                goals += self._carry_out(move, view)
        return goals

    async def foresee(self, attempt: Attempt, size_bytes: int) -> set[str]:
        """The tiers that a checkpoint will be sent to once it is committed on the first one."""
        view, first = await self.view(), self._chain.first.info.name
        there = CheckpointView(attempt.folder, attempt.step, size_bytes, frozenset([first]))
        view = replace(view, checkpoints=(*view.checkpoints, there))
        moves = [move for policy in self._policies for move in policy.decide(Committed(attempt.folder, first), view)]
        return {
            move.tier
            for move in moves
            if isinstance(move, Flush) and move.checkpoint == attempt.folder and not move.parts
        }

    def _carry_out(self, move: Move, view: View) -> Iterable[Goal]:
        why_not = refusal(move, view, self._leased())
        if why_not is not None:
            log.debug("%s is not done: %s", move, why_not)
            return
        if (move.checkpoint, move.tier) in self.busy:
            return  # it is asked for again at the next event
        if isinstance(move, Flush):
            attempt = Attempt.parse(move.checkpoint)
            assert attempt is not None
            yield self.flushers[move.tier].want(attempt, move.parts)
        elif self.may_drop(move.tier):
            attempt = Attempt.parse(move.checkpoint)
            assert attempt is not None
            self.busy.add((move.checkpoint, move.tier))
            self._chain.catalog.remove(attempt, self._chain.named(move.tier))  # the next move must not count on it
            self._keep(self._drop(move, attempt))

    async def _drop(self, move: Drop, attempt: Attempt) -> None:
        chain, tier = self._chain, self._chain.named(move.tier)
        try:
            if self.before_drop is not None:
                await self.before_drop(tier, attempt)
            log.info("deleting step %d from %s: %s", attempt.step, move.tier, move.reason)
            with chain.catalog.deleting(attempt, tier):
                await tier.drop([CheckpointKey(chain.run, move.checkpoint)])
        except StepwellError as error:  # it is debris now, or is found again by the next scan; training goes on
            log.warning("deleting step %d from %s failed: %s", attempt.step, move.tier, error)
        finally:
            self.busy.discard((move.checkpoint, move.tier))

    def _evicted(self, checkpoint: CheckpointKey) -> None:
        """Host memory has lost a part of it: nothing may count on that copy any more."""
        attempt, host = Attempt.parse(checkpoint.attempt), self._chain.host
        if checkpoint.run == self._chain.run and attempt is not None and host is not None:
            self._chain.catalog.remove(attempt, host)

    def _leased(self) -> frozenset[str]:
        return frozenset(attempt.folder for attempt, readers in self._chain.catalog.reading.items() if readers)

    async def view(self) -> View:
        """What is where, as policies see it."""
        catalog = self._chain.catalog
        unknown = [
            (attempt, holding.tier)
            for attempt, held in catalog.holdings.items()
            for holding in held
            if catalog.known_manifest(attempt, holding.tier) is None
        ]
        # all at once: a tier that does not answer costs the time of one call, not of one for each checkpoint
        asked = (catalog.manifest(attempt, tier) for attempt, tier in unknown)
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, StepwellError):
                log.warning("%s", answer)
            elif isinstance(answer, BaseException):
                raise answer
        return self._facts()

    def _facts(self) -> View:
        """The view now, of all whose manifests have been read. Without a pause nothing in it can be out of date."""
        checkpoints = tuple(self._checkpoint(attempt) for attempt in sorted(self._chain.catalog.holdings))
        tiers = tuple(self._tier(tier) for tier in self._chain.tiers)
        return View(self._chain.clock.monotonic(), tiers, checkpoints, self.promised)

    def _checkpoint(self, attempt: Attempt) -> CheckpointView:
        catalog = self._chain.catalog
        held = [(h.tier.info.name, catalog.known_manifest(attempt, h.tier)) for h in catalog.holdings[attempt]]
        known = {name: manifest for name, manifest in held if manifest is not None}
        last = list(known.values())[-1:]
        return CheckpointView(
            attempt.folder,
            attempt.step,
            max((manifest.size for manifest in known.values()), default=0),
            frozenset(name for name, manifest in known.items() if manifest.complete),
            frozenset(name for name, manifest in known.items() if not manifest.complete),
            abandoned=abandoned(attempt, catalog.rewinds),
            tags=tuple(last[0].tags) if last else (),
            metrics={k: v for k, v in last[0].metrics.items() if isinstance(v, float)} if last else {},
            made=last[0].made if last else 0.0,
        )

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
