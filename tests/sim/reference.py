"""What must be where, told from the media alone and as simply as possible: a model beside the product's policies."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stepwell.errors import StepwellError
from stepwell.format.names import MANIFEST, Attempt
from stepwell.format.records import Manifest, Note, Rewind, decode
from stepwell.tiers.base import NOTES, RecordKey
from stepwell.timeline import abandoned
from tests.sim.medium import Medium
from tests.sim.rules import Flushing, Retaining

#: tiers that survive more come later
STRENGTH = {"disk": 0, "nvme": 0, "pfs": 1}


@dataclass(frozen=True, slots=True)
class Fact:
    """One checkpoint."""

    attempt: Attempt
    counts: bool  # no rewind left it behind
    parts: frozenset[str]
    there: dict[str, frozenset[str]]  # medium -> the parts that are committed there
    metrics: dict[str, float]
    tags: frozenset[str]
    kept: bool
    made: float

    def has(self, medium: str, parts: Collection[str] | None = None) -> bool:
        """Whether these parts (None: all) are committed there."""
        return medium in self.there and self.there[medium] >= (self.parts if parts is None else set(parts))

    @property
    def order(self) -> tuple[int, Attempt]:
        return self.attempt.step, self.attempt


@functools.lru_cache(maxsize=4096)
def manifest_of(data: bytes) -> Manifest | None:
    """None if it cannot be read."""
    try:
        return decode(data, Manifest)
    except StepwellError:
        return None


@functools.lru_cache(maxsize=4096)
def note_of(data: bytes) -> Note | None:
    try:
        return decode(data, Note)
    except StepwellError:
        return None


def notes_of(medium: Medium, known: Collection[int] | None = None) -> list[Note]:
    """The run's notes, by number. known: only these."""
    found = (note_of(record.data) for key, record in medium.records.items() if key.name.startswith(f"{NOTES}/"))
    notes = [note for note in found if note is not None and (known is None or note.number in known)]
    return sorted(notes, key=lambda note: note.number)


def facts_of(
    committed: dict[Attempt, list[Medium]], run: str, notes: Sequence[Note], rewinds: Sequence[Rewind]
) -> list[Fact]:
    """All that can be read of what is `committed`, in the order of steps; of equal steps the later save is later."""
    found: list[Fact] = []
    for attempt, media in committed.items():
        manifests = {medium.name: _manifest(medium, run, attempt) for medium in media}
        there = {name: manifest for name, manifest in manifests.items() if manifest is not None}
        if not there:
            continue
        one = next(iter(there.values()))
        metrics = {name: value for name, value in one.metrics.items() if isinstance(value, float)}
        tags = dict.fromkeys(one.tags, True)
        keeps: dict[str, bool] = {}
        for note in notes:
            if note.attempt == attempt.folder:
                metrics |= {name: math.nan if value is None else float(value) for name, value in note.metrics.items()}
                tags |= note.tags
                keeps |= {} if note.keep is None else {note.holder: note.keep}
        found.append(
            Fact(
                attempt,
                not abandoned(attempt, rewinds),
                frozenset({*one.parts, *one.absent}),
                {name: frozenset(manifest.parts) for name, manifest in there.items()},
                {name: value for name, value in metrics.items() if math.isfinite(value)},
                frozenset(tag for tag, is_there in tags.items() if is_there),
                any(keeps.values()),
                one.made,
            )
        )
    return sorted(found, key=lambda fact: fact.order)


def _manifest(medium: Medium, run: str, attempt: Attempt) -> Manifest | None:
    """As a writer may have read it before it was garbled."""
    record = medium.records.get(RecordKey(run, f"{attempt.folder}/{MANIFEST}"))
    return None if record is None else manifest_of(record.clean or record.data)


# -- what stays --------------------------------------------------------------------------------------


def wanted(rules: Retaining, tier: str, facts: Sequence[Fact], wall: float) -> set[Attempt]:
    """What the rules want to stay on the tier, and what stays anyhow: the newest of its kind."""
    line = [fact for fact in facts if fact.counts]
    whole = [fact for fact in line if fact.has(tier)]
    partial = [fact for fact in line if tier in fact.there and not fact.has(tier)]
    stay = {fact.attempt for kind in (whole, partial) for fact in kind if _is_wanted(rules, fact, kind, line, wall)}
    return stay | {fact.attempt for fact in (*whole, *partial) if not _is_covered(fact, tier, line)}


def _is_wanted(rules: Retaining, fact: Fact, kind: Sequence[Fact], line: Sequence[Fact], wall: float) -> bool:
    at = kind.index(fact)
    if rules.last is not None and len(kind) - at <= rules.last:
        return True
    if rules.every_steps is not None:
        window = fact.attempt.step // rules.every_steps
        if not any(other.attempt.step // rules.every_steps == window for other in kind[:at]):
            return True
    if rules.every_s is not None:
        windows = windows_of_seconds(line, rules.every_s)
        if not any(windows[other.attempt] == windows[fact.attempt] for other in kind[:at]):
            return True
    for metric, mode, count in rules.best:
        if metric not in fact.metrics:
            return True
        sign = 1 if mode == "max" else -1
        mine = sign * fact.metrics[metric], at
        theirs = [(sign * other.metrics[metric], i) for i, other in enumerate(kind) if metric in other.metrics]
        if sum(other > mine for other in theirs) < count:
            return True
    if rules.newer_than_s is not None and wall - fact.made < rules.newer_than_s:
        return True
    return bool(fact.tags if rules.tagged is True else fact.tags & set(rules.tagged))


def _is_covered(fact: Fact, tier: str, line: Sequence[Fact]) -> bool:
    """Whether a newer one on the tier has as much, or all that it ever had."""
    newer = [other for other in line if other.order > fact.order]
    return any(other.has(tier) or (not fact.has(tier) and other.has(tier, fact.there[tier])) for other in newer)


def windows_of_seconds(line: Sequence[Fact], seconds: float) -> dict[Attempt, int]:
    """A window begins where the clock shows another one than at the checkpoint before."""
    numbers: dict[Attempt, int] = {}
    for before, fact in zip([None, *line], line, strict=False):
        # not `//`: it is exact, and at a window's border that is another number than what is divided and rounded
        same = before is not None and math.floor(before.made / seconds) == math.floor(fact.made / seconds)
        numbers[fact.attempt] = (numbers[before.attempt] if before is not None else 0) + (not same)
    return numbers


def is_last(fact: Fact, tier: str, facts: Sequence[Fact], leaving: Collection[tuple[str, str]]) -> bool:
    """Whether it is complete on the tier, and nothing newer is there or where as much survives."""
    if not fact.has(tier):
        return False
    for other in facts:
        newer = other.counts and (not fact.counts or other.order > fact.order)
        for medium in other.there if newer else ():
            safe = STRENGTH[medium] >= STRENGTH[tier] and (other.attempt.folder, medium) not in leaving
            if safe and other.has(medium):
                return False
    return True


# -- what goes down ----------------------------------------------------------------------------------


def by_window(rule: Flushing, line: Sequence[Fact]) -> dict[int, list[Fact]]:
    """Window -> the checkpoints in it that are the rule's business, lowest step first."""
    times = windows_of_seconds(line, rule.every_s) if rule.every_s is not None else {}
    found: dict[int, list[Fact]] = {}
    for number, fact in enumerate(line):
        if rule.parts is not None and fact.parts.isdisjoint(rule.parts):
            continue
        window = number
        if rule.every_steps is not None:
            window = fact.attempt.step // rule.every_steps
        elif rule.every_s is not None:
            window = times[fact.attempt]
        found.setdefault(window, []).append(fact)
    return found


def asked_parts(rule: Flushing, fact: Fact) -> frozenset[str] | None:
    """What the rule sends of it; None: all."""
    if rule.parts is None or fact.parts <= set(rule.parts):
        return None
    return fact.parts & set(rule.parts)
