"""What a policy sees and what it answers.

A policy is pure and synchronous: it is told of an event, looks at a read-only view, and returns moves, each
with its reason. It does no I/O and has no clock of its own. Whatever it answers, the core checks every move
against the promises that it has given (`stepwell.promises`) before anything is moved or deleted.

Eviction is another kind of question, asked of one tier and chunk by chunk, so it has an interface of its own:
an `EvictionPolicy` is told of every chunk that enters, is used or leaves, and ranks what should go first.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepwell.tiers.base import Chunk, EvictionPolicy, Scope, Survives

__all__ = [
    "Cancel", "CheckpointView", "Chunk", "Closing", "Committed", "Drop", "Event", "Evicted", "EvictionPolicy", "Flush",
    "Found", "Idle", "Move", "Noted", "Opened", "Policy", "Prefetch", "Pressure", "Read", "TierView", "View",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One committed checkpoint of the run, and where it is."""

    name: str  # of its folder; unique in the run
    step: int
    size_bytes: int
    complete_on: frozenset[str]  # names of tiers
    partial_on: frozenset[str] = frozenset()
    abandoned: bool = False  # a rewind left it behind: never counted by retention
    kept: bool = False  # never deleted by retention
    tags: tuple[str, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)  # finite ones only
    made: float = 0.0  # seconds since 1970, of the saving machine; for windows of time and ages, never for order
    parts: frozenset[str] = frozenset()  # names of all of its parts
    parts_on: Mapping[str, frozenset[str]] = field(default_factory=dict)  # tier -> those that are there

    def has(self, tier: str, parts: Collection[str] | None = None) -> bool:
        """Whether these parts (None: all of it) are on a tier."""
        if tier in self.complete_on or not parts:
            return tier in self.complete_on
        return self.parts_on.get(tier, frozenset()).issuperset(parts)


@dataclass(frozen=True, slots=True)
class TierView:
    """One tier, as its books say."""

    name: str
    scope: Scope
    survives: Survives
    capacity_bytes: int | None
    used_bytes: int
    free_bytes: int | None
    healthy: bool = True
    queued_bytes: int = 0  # waiting to be written there
    idle: bool = False  # nothing is on its way there, and no save is under way
    evicts: bool = False  # chunks leave it when room is needed: nothing can count on a copy there

    @property
    def lasting(self) -> bool:
        """Whether what is there stays until it is deleted."""
        return self.survives != "nothing" and not self.evicts


@dataclass(frozen=True, slots=True)
class View:
    """What is where, now. Tiers nearest first; checkpoints in the order in which they were saved."""

    now: float  # monotonic seconds
    tiers: tuple[TierView, ...]
    checkpoints: tuple[CheckpointView, ...]
    promised: Mapping[tuple[str, str], frozenset[str] | None] = field(default_factory=dict)
    """(checkpoint, tier) of the flushes that are decided and not done -> the parts that must get there; None: all."""
    running: frozenset[tuple[str, str]] = frozenset()  # those of them whose bytes are moving now
    wall: float = 0.0  # seconds since 1970, of this machine; for ages only
    brought: frozenset[tuple[str, str]] = frozenset()
    """(checkpoint, tier) of what policies have had prefetched: on its way there, or there without being committed."""

    def line(self) -> list[CheckpointView]:
        """The checkpoints that count: not abandoned, lowest step first; of equal steps the one saved first."""
        return sorted((c for c in self.checkpoints if not c.abandoned), key=lambda c: c.step)

    def on(self, tier: str) -> list[CheckpointView]:
        """The complete checkpoints on a tier that count, lowest step first."""
        return [c for c in self.line() if tier in c.complete_on]

    def order(self) -> dict[str, tuple[int, int]]:
        """Name of a checkpoint -> what it is compared by: its step, and of equal steps the later save is newer."""
        return {c.name: (c.step, i) for i, c in enumerate(self.checkpoints)}

    def coming(self, checkpoint: CheckpointView, tier: str, parts: Collection[str] | None = None) -> bool:
        """Whether these parts (None: all of it) of a checkpoint are on a tier, or promised there."""
        if checkpoint.has(tier, parts):
            return True
        promised = self.promised.get((checkpoint.name, tier), frozenset())
        return promised is None or (bool(parts) and promised.issuperset(parts or ()))

    def overtaken(self, checkpoint: CheckpointView, tier: str) -> bool:
        """Whether what is promised of a checkpoint on a tier is there, or promised there, of a newer one that counts.
        For an abandoned checkpoint any one that counts will do."""
        parts, order = self.promised[checkpoint.name, tier], self.order()
        return any(
            (checkpoint.abandoned or order[other.name] > order[checkpoint.name]) and self.coming(other, tier, parts)
            for other in self.line()
            if other.name != checkpoint.name
        )


@dataclass(frozen=True, slots=True)
class Found:
    """A store was opened, for reading or writing, and has found what there is. Only prefetches can follow."""


@dataclass(frozen=True, slots=True)
class Evicted:
    """Of a checkpoint that was prefetched, a part had to give way. Only prefetches can follow."""

    checkpoint: str
    tier: str


@dataclass(frozen=True, slots=True)
class Opened:
    """The run was taken over by this process; what earlier ones left undone can be decided now."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint has become complete, or as complete as it was asked for, on a tier."""

    checkpoint: str
    tier: str


@dataclass(frozen=True, slots=True)
class Idle:
    """A tier has just become idle."""

    tier: str


@dataclass(frozen=True, slots=True)
class Noted:
    """Metrics, tags or the keep of a checkpoint were changed."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Read:
    """Nobody in this process reads a checkpoint any more, a copy of which could not go because of that."""

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Pressure:
    """A save needs room on a tier and does not get it. Only with on_pressure = "newest-wins"."""

    tier: str


@dataclass(frozen=True, slots=True)
class Closing:
    """The store is being closed: what must still get down?"""


Event = Found | Evicted | Opened | Committed | Idle | Noted | Read | Pressure | Closing


@dataclass(frozen=True, slots=True)
class Flush:
    """Copy a checkpoint down to a tier. parts: None for all of it. policy: who says so, for people."""

    checkpoint: str
    tier: str
    reason: str
    parts: tuple[str, ...] | None = None
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete a checkpoint's copy on a tier. policy: who says so, for people."""

    checkpoint: str
    tier: str
    reason: str
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Cancel:
    """Take back a flush that is promised and does not run yet. policy: who says so, for people."""

    checkpoint: str
    tier: str
    reason: str
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Bring a checkpoint up to host memory. parts: None for all of it. policy: who says so, for people."""

    checkpoint: str
    tier: str
    reason: str
    parts: tuple[str, ...] | None = None
    policy: str = ""


Move = Flush | Drop | Cancel | Prefetch


class Policy(Protocol):
    """Decides what goes down, what is taken back, what is deleted, what comes up. One object for each rule of a tier.

    One that prefetches has an attribute `looks_ahead`, which is true: it alone hears of `Found` and `Evicted`.
    """

    def decide(self, event: Event, view: View) -> Sequence[Move]:
        """The moves that follow from an event. May repeat what it said before: moves under way are known."""
        ...
