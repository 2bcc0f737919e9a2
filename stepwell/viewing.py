"""What is where, as policies see it: a read-only view, made of the catalog, the books and the queues."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence

from stepwell.catalog import Catalog
from stepwell.clock import Clock
from stepwell.errors import StepwellError
from stepwell.flushing import Flusher
from stepwell.format.names import Attempt
from stepwell.format.records import Manifest, Rewind
from stepwell.policies.base import CheckpointView, TierView, View
from stepwell.tiers.base import Tier
from stepwell.timeline import abandoned

log = logging.getLogger("stepwell")

#: how long a decision waits for the newest notes; what was read before then counts
NOTES_S = 0.25


#: what a checkpoint's view follows from: manifests by tier, the notes' version, the run's rewinds
_Facts = tuple[dict[str, Manifest], int, list[Rewind]]


class Views:
    """Makes views of one run. Lives on the event loop."""

    def __init__(
        self, catalog: Catalog, tiers: Sequence[Tier], clock: Clock, flushers: Mapping[str, Flusher] | None = None
    ) -> None:
        self._catalog, self._tiers, self._clock, self._flushers = catalog, tiers, clock, flushers or {}
        self._reading: asyncio.Task[None] | None = None  # of notes
        self._made: dict[Attempt, tuple[_Facts, CheckpointView]] = {}
        self.leaving: set[tuple[str, str]] = set()  # (checkpoint, tier) of copies that will be deleted
        self.brought: set[tuple[str, str]] = set()  # (checkpoint, tier) of policies' prefetches
        self.being_saved: Callable[[], Collection[tuple[str, str]]] = tuple  # (checkpoint, tier) of saves on their way
        self.saving: Callable[[], bool] = lambda: False  # whether a save is on its way to the first tier

    async def look(self, *, notes: bool = True) -> View:
        """The view, after reading what is new: manifests, and notes, unless those count that were read before."""
        catalog = self._catalog
        unknown = [
            (attempt, holding.tier)
            for attempt, held in catalog.holdings.items()
            for holding in held
            if catalog.known_manifest(attempt, holding.tier) is None
        ]
        # all at once: a tier that does not answer costs the time of one call, not of one for each checkpoint
        asked = (catalog.manifest(attempt, tier) for attempt, tier in unknown)
        reading = (self._read_notes(), *asked) if notes else asked
        for answer in await asyncio.gather(*reading, return_exceptions=True):
            if isinstance(answer, StepwellError):
                log.warning("%s", answer)
            elif isinstance(answer, BaseException):
                raise answer
        return self.now()

    async def _read_notes(self) -> None:
        if self._reading is not None and not self._reading.done():
            return  # a tier that hangs holds up one decision for a moment, and no more of them
        self._reading = asyncio.ensure_future(self._catalog.notes.refresh())
        self._reading.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.wait([self._reading], timeout=NOTES_S)

    def now(self) -> View:
        """The view of all whose manifests have been read. No pause: nothing in it can be out of date."""
        checkpoints = tuple(self._checkpoint(attempt) for attempt in sorted(self._catalog.holdings))
        if len(self._made) > len(checkpoints):
            self._made = {attempt: made for attempt, made in self._made.items() if attempt in self._catalog.holdings}
        goals = [(name, goal) for name, flusher in self._flushers.items() for goal in flusher.goals]
        saved = self.being_saved()
        promised: dict[tuple[str, str], frozenset[str] | None] = dict.fromkeys(saved)
        for name, goal in goals:
            copy = (goal.attempt.folder, name)
            before = promised.get(copy, frozenset())
            promised[copy] = None if goal.parts is None or before is None else before | frozenset(goal.parts)
        return View(
            now=self._clock.monotonic(),
            wall=self._clock.wall(),
            tiers=tuple(self._tier(tier) for tier in self._tiers),
            checkpoints=checkpoints,
            promised=promised,
            running=frozenset((goal.attempt.folder, name) for name, goal in goals if goal.running).union(saved),
            brought=frozenset(self.brought),
        )

    def _checkpoint(self, attempt: Attempt) -> CheckpointView:
        """Made anew only if something about it has changed: a run may have thousands."""
        catalog, known = self._catalog, {}
        for holding in catalog.holdings[attempt]:
            name = holding.tier.info.name
            manifest = catalog.known_manifest(attempt, holding.tier)
            if manifest is not None and not (self.leaving and (attempt.folder, name) in self.leaving):
                known[name] = manifest
        facts = (known, catalog.notes.version, catalog.rewinds)
        made = self._made.get(attempt)
        if made is None or not _same(made[0], facts):
            self._made[attempt] = made = facts, self._describe(attempt, known)
        return made[1]

    def _describe(self, attempt: Attempt, known: dict[str, Manifest]) -> CheckpointView:
        catalog, notes = self._catalog, self._catalog.notes
        last = next(reversed(known.values()), None)
        # in memory each rank has its own part, and all of them decide alike
        memory = {tier.info.name for tier in self._tiers if tier.info.scope == "process"}
        whole = {name for name, m in known.items() if m.complete or (name in memory and not m.absent)}
        saved = {name: value for name, value in last.metrics.items() if isinstance(value, float)} if last else {}
        return CheckpointView(
            attempt.folder,
            attempt.step,
            max((manifest.size for manifest in known.values()), default=0),
            frozenset(whole),
            frozenset(known.keys() - whole),
            parts=frozenset(part for manifest in known.values() for part in (*manifest.parts, *manifest.absent)),
            parts_on={name: frozenset(manifest.parts) for name, manifest in known.items()},
            abandoned=abandoned(attempt, catalog.rewinds),
            kept=notes.kept(attempt),
            tags=notes.tags(attempt, last.tags if last is not None else ()),
            metrics={k: v for k, v in notes.metrics(attempt, saved).items() if math.isfinite(v)},
            made=last.made if last is not None else 0.0,
        )

    def _tier(self, tier: Tier) -> TierView:
        info, usage = tier.info, tier.usage()
        return TierView(
            info.name, info.scope, info.survives, info.capacity_bytes, usage.physical_bytes, usage.free_bytes,
            healthy=info.name not in self._flushers or not self._flushers[info.name].failing,
            idle=self.idle(info.name), evicts=info.driver in ("gpu", "host"),
        )  # fmt: skip

    def idle(self, tier: str) -> bool:
        """Whether nothing is on its way to a tier, and no save is under way."""
        flusher = self._flushers.get(tier)
        return not self.saving() and (flusher is None or not flusher.goals)


def _same(old: _Facts, new: _Facts) -> bool:
    """Manifests are never changed, only replaced."""
    return (
        old[1] == new[1]
        and old[2] == new[2]
        and len(old[0]) == len(new[0])
        and all(old[0].get(name) is manifest for name, manifest in new[0].items())
    )
