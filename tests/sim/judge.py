"""What writers decide, judged at the moment when they do, by the model in `tests.sim.reference`.

- Retention asks for nothing that a rule of its tier wants, and drops nothing that is kept, being read, needed for a
  flush that was decided, or the newest complete one with nothing newer where as much survives.
- The last copy above one that is to be verified goes only after that was done, and what was verified was right. One
  that has been written anew since was not verified.
- A flush is taken back only if as much of a newer checkpoint is on the tier or promised there, and never after it was
  acknowledged; of a tier that did not answer the last look, nobody knows what is there.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection
from typing import Any

from stepwell.deletion import HURRIED_S
from stepwell.events import Entry
from stepwell.format.names import MANIFEST, Attempt
from stepwell.format.records import Manifest
from stepwell.policies.base import Committed, Drop, Event, Move, View
from stepwell.tiers.base import RecordKey, Tier
from stepwell.timeline import abandoned
from tests.sim.invariants import Invariants
from tests.sim.medium import Medium, Record
from tests.sim.model import Broken
from tests.sim.process import Process
from tests.sim.reference import Fact, facts_of, is_last, notes_of, wanted
from tests.sim.rules import Retaining, Rules


class Judge:
    """Of all writers of a world."""

    def __init__(self, invariants: Invariants, rules: Rules) -> None:
        self.invariants, self._rules = invariants, rules
        self._storage = list(rules)
        self._verified: dict[tuple[Process, str, str], Record | None] = {}  # -> the manifest of what was verified
        #: (process, checkpoint) -> what of others was on tiers, or promised there, when it was decided where it goes
        self._decided: dict[tuple[Process, str], list[tuple[str, Attempt, Collection[str] | None]]] = {}
        self.told: Counter[str] = Counter()  # entries of the event logs, by what they say

    def watch(self, process: Process) -> None:
        writer = process.writer
        steering, deleter = writer.steering, writer.deleter
        carry_out = functools.partial(self._carry_out, process, steering._carry_out)
        steering._carry_out = carry_out  # type: ignore[method-assign]
        steering.on = functools.partial(self._on, process, steering.on)  # type: ignore[method-assign]
        writer.events.listeners.append(functools.partial(self._told, process))
        delete = deleter.delete

        async def watched(attempt: Attempt, tier: Tier, manifest: Manifest | None, reason: str) -> None:
            copy = tier.info.name, attempt.folder
            with self.invariants.noting():
                self._deleting(process, attempt, tier.info.name)
            self.invariants.deleting.add(copy)
            try:
                await delete(attempt, tier, manifest, reason)
            finally:
                self.invariants.deleting.discard(copy)

        deleter.delete = watched  # type: ignore[method-assign]
        spare = deleter.spare

        async def spared(attempt: Attempt, tier: Tier) -> None:
            self.invariants.marked.pop((tier.info.name, attempt.folder), None)  # its files are a flush's again
            await spare(attempt, tier)

        deleter.spare = spared  # type: ignore[method-assign]
        for flusher in writer.flushers.values():
            flusher.cancel = functools.partial(self._cancel, process, flusher, flusher.cancel)  # type: ignore[method-assign]

    def facts(self, process: Process) -> list[Fact]:
        """What the media hold, of notes and rewinds what the process has read."""
        catalog = process.catalog
        notes = notes_of(self.invariants.media[-1], catalog.notes._done)
        return facts_of(self.invariants.committed(), self.invariants.run, notes, catalog.rewinds)

    async def _on(self, process: Process, on: Any, event: Event) -> Any:
        goals = await on(event)
        if isinstance(event, Committed) and (process, event.checkpoint) not in self._decided:
            promised = [(n, goal.attempt, goal.parts) for n, f in process.writer.flushers.items() for goal in f.goals]
            there = [(tier, attempt, tuple(parts)) for (tier, attempt), parts in self.invariants.ever.items()]
            self._decided[process, event.checkpoint] = [*promised, *there]
        return goals

    def came_before(self, process: Process, other: Fact, tier: str, parts: Collection[str] | None, fact: Fact) -> bool:
        """Whether these parts (None: all) of another one were on the tier, or promised there, when it was decided where
        `fact` goes."""
        decided = self._decided.get((process, fact.attempt.folder), [])
        found = [some for name, attempt, some in decided if (name, attempt) == (tier, other.attempt)]
        return None in found or {part for some in found for part in some or ()} >= set(parts or other.parts)

    def _carry_out(self, process: Process, carry_out: Any, move: Move, view: View) -> Any:
        leaving = process.writer.steering.leaving
        before = set(leaving)
        made = carry_out(move, view)
        owner = process.writer.owner
        lost = owner.taken and owner.writership.lost  # each of its drops is refused; it may ask for them by older news
        if isinstance(move, Drop) and leaving - before and not lost:
            with self.invariants.noting():
                self._check_drop(process, move)
        return made

    def _check_drop(self, process: Process, move: Drop) -> None:
        """Retention wants it to go, and no promise forbids that."""
        facts, rules = self.facts(process), self._rules[move.tier].retain or Retaining()
        stay = wanted(rules, move.tier, facts, process.wall)
        fact = next((fact for fact in facts if fact.attempt.folder == move.checkpoint), None)
        if fact is not None and not fact.counts:
            raise Broken(f"{process} lets {move.checkpoint} go from {move.tier}, which a rewind has left behind")
        if fact is not None and move.tier in fact.there and fact.attempt in stay:
            raise Broken(f"{process} lets {move.checkpoint} go from {move.tier}, which {rules} wants")

    def _deleting(self, process: Process, attempt: Attempt, tier: str) -> None:
        facts = self.facts(process)
        fact = next((fact for fact in facts if fact.attempt == attempt), None)
        self.invariants.condemned[tier, attempt.folder] = process
        if fact is None or tier not in fact.there:
            return  # gone with its node, or passed over; or its manifest was garbled since it was read
        what = f"{process} deletes {attempt.folder} from {tier}, "
        if fact.kept:
            raise Broken(what + "which is kept")
        if process.catalog.reading[attempt]:
            raise Broken(what + "which is being read")
        if is_last(fact, tier, facts, process.writer.steering.leaving):
            raise Broken(what + "and nothing newer is where as much survives")
        others = [medium for medium in fact.there if medium != tier]
        for name, parts in self._promised(process, attempt):
            if name != tier and not any(fact.has(other, parts) for other in others):
                raise Broken(what + f"and it must still be flushed to {name}")
        self._check_verified(process, fact, tier, what)

    def _promised(self, process: Process, attempt: Attempt) -> list[tuple[str, tuple[str, ...] | None]]:
        flushers = process.writer.flushers.items()
        return [(name, goal.parts) for name, f in flushers for goal in f.goals if goal.attempt == attempt]

    def _check_verified(self, process: Process, fact: Fact, tier: str, what: str) -> None:
        """Of each lower copy that is to be verified: this one is not the last above it, or that was done."""
        at = self._storage.index(tier)
        for number, below in enumerate(self._storage[at + 1 :], at + 1):
            if any(other in fact.there for other in self._storage[:number] if other != tier):
                continue
            asks = process.knows(fact.attempt, below) and self._rules[below].verify is not None
            copy, now = (process, fact.attempt.folder, below), self._manifest(fact.attempt.folder, below)
            if asks and (copy not in self._verified or (now is not None and self._verified[copy] is not now)):
                raise Broken(what + f"before the copy on {below} was verified")

    def _manifest(self, folder: str, tier: str) -> Record | None:
        """What commits the copy that is there now."""
        medium = next(medium for medium in self.invariants.media if medium.name == tier)
        return medium.records.get(RecordKey(self.invariants.run, f"{folder}/{MANIFEST}"))

    def _told(self, process: Process, entry: Entry) -> None:
        self.told[entry.what] += 1
        if entry.what == "verified":
            with self.invariants.noting():
                manifest = self._manifest(entry.checkpoint, entry.tier)
                self._verified[process, entry.checkpoint, entry.tier] = manifest
                if self._rules[entry.tier].verify == "digest":
                    medium = next(medium for medium in self.invariants.media if medium.name == entry.tier)
                    self._check_digest(entry.checkpoint, medium, process.loop.time() - entry.seconds)

    def _check_digest(self, folder: str, medium: Medium, began: float) -> None:
        for name, block, garbled in self.invariants.bad_in(folder, medium):
            if not garbled or self.invariants.flipped_at.get((medium.name, folder, name, block), began) < began - 1e-3:
                raise Broken(f"{folder} was verified on {medium.name}, and block {block} of {name} is wrong there")

    def _cancel(self, process: Process, flusher: Any, cancel: Any, attempt: Attempt, reason: str) -> bool:
        tier = flusher.tier.info.name
        asked = [parts for name, parts in self._promised(process, attempt) if name == tier]
        done: bool = cancel(attempt, reason)
        if done:
            with self.invariants.noting():
                parts = None if None in asked else frozenset(part for each in asked for part in each or ())
                self._check_cancelled(process, attempt, tier, parts)
        return done

    def _check_cancelled(self, process: Process, attempt: Attempt, tier: str, parts: frozenset[str] | None) -> None:
        facts = self.facts(process)
        what = f"{process} takes the flush of {attempt.folder} to {tier} back, "
        saved = self.invariants.model.find(attempt.folder)
        if saved is not None and tier in saved.acked and tier not in process.catalog.absent:
            raise Broken(what + "although it was acknowledged there")
        known = {fact.attempt: fact for fact in facts}
        goals = process.writer.flushers[tier].goals
        for other in {*known, *(goal.attempt for goal in goals)} - {attempt}:  # some may be in host memory alone
            left = attempt in known and not known[attempt].counts
            if abandoned(other, process.catalog.rewinds) or not (left or (other.step, other) > (attempt.step, attempt)):
                continue
            if other in known and (known[other].has(tier) or (parts is not None and known[other].has(tier, parts))):
                return
            promised = [goal.parts for goal in goals if goal.attempt == other]
            coming = {part for each in promised for part in each or ()}
            if None in promised or (parts is not None and coming >= parts):
                return
        raise Broken(what + "and nothing newer gets there with as much of it")


def least_grace_s(rules: Rules, tier: str) -> float:
    """How long the files of what is deleted stay at least."""
    grace_s = rules[tier].grace_s
    if grace_s is None:
        grace_s = HURRIED_S if tier == "pfs" else 0.0
    return min(grace_s, HURRIED_S)
