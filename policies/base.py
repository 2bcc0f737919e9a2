"""What a policy sees and what it answers.

A policy is pure and synchronous: it is told of an event, looks at a read-only view, and returns moves, each
with its reason. It does no I/O and has no clock of its own. Whatever it answers, the core checks every move
against the promises that it has given (`stepwell.promises`) before anything is moved or deleted.

Eviction is another kind of question, asked of one tier and chunk by chunk, so it has an interface of its own:
an `EvictionPolicy` is told of every chunk that enters, is used or leaves, and ranks what should go first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stepwell.tiers.base import Chunk, EvictionPolicy, Scope, Survives

__all__ = [
    "CheckpointView", "Chunk", "Closing", "Committed", "Drop", "Event", "EvictionPolicy", "Flush", "Move", "Opened",
    "Policy", "TierView", "View",
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
    metrics: Mapping[str, float] = field(default_factory=dict)
    made: float = 0.0  # seconds since 1970, of the saving machine; for people, never for order


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


@dataclass(frozen=True, slots=True)
class View:
    """What is where, now. Tiers nearest first; checkpoints in the order in which they were saved."""

    now: float  # monotonic seconds
    tiers: tuple[TierView, ...]
    checkpoints: tuple[CheckpointView, ...]
    promised: frozenset[tuple[str, str]] = frozenset()  # (checkpoint, tier): flushes that are decided, not done

    def on(self, tier: str) -> list[CheckpointView]:
        """The complete checkpoints on a tier that count: not abandoned, lowest step first."""
        found = [c for c in self.checkpoints if tier in c.complete_on and not c.abandoned]
        return sorted(found, key=lambda c: c.step)


@dataclass(frozen=True, slots=True)
class Opened:
    """The run was taken over by this process; what earlier ones left undone can be decided now."""


@dataclass(frozen=True, slots=True)
class Committed:
    """A checkpoint has become complete, or as complete as it was asked for, on a tier."""

    checkpoint: str
    tier: str


@dataclass(frozen=True, slots=True)
class Closing:
    """The store is being closed: what must still get down?"""


Event = Opened | Committed | Closing


@dataclass(frozen=True, slots=True)
class Flush:
    """Copy a checkpoint down to a tier. parts: None for all of it."""

    checkpoint: str
    tier: str
    reason: str
    parts: tuple[str, ...] | None = None


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete a checkpoint's copy on a tier."""

    checkpoint: str
    tier: str
    reason: str


Move = Flush | Drop


class Policy(Protocol):
    """Decides what goes down or is deleted. One object for each rule of each tier."""

    def decide(self, event: Event, view: View) -> Sequence[Move]:
        """The moves that follow from an event. May repeat what it said before: moves under way are known."""
        ...
