"""What a simulation found, as plain data: the same in --json, in tables and in charts. Times are virtual seconds."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SavesSeen:
    """Of all ranks. blocked: by `save`."""

    asked: int = 0
    durable: int = 0
    skipped: int = 0
    failed: int = 0
    blocked_s: float = 0.0
    blocked_mean_s: float = 0.0
    blocked_max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class SaveSeen:
    """One save of one rank. tiers: seconds from `save` to the commit on each."""

    rank: int
    step: int
    blocked_s: float
    tiers: dict[str, float]


@dataclass(frozen=True, slots=True)
class TierSeen:
    """One tier. committed: whole checkpoints; seconds: from `save` to the commit."""

    name: str
    committed: int = 0
    seconds_mean: float | None = None
    seconds_max: float | None = None
    written_bytes: int = 0
    read_bytes: int = 0
    most_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ReadsSeen:
    """Restores, or loads. sources: bytes by the tier that they came from."""

    count: int = 0
    failed: int = 0
    seconds_mean: float = 0.0
    seconds_max: float = 0.0
    sources: dict[str, int] = field(default_factory=dict)

    @property
    def shares(self) -> dict[str, float]:
        """Of all bytes, the part that came from each tier."""
        total = sum(self.sources.values())
        return {tier: size / total for tier, size in self.sources.items()} if total else {}


@dataclass(frozen=True, slots=True)
class FailureSeen:
    """A failure in the trace. lost_s: of training."""

    level: str
    at_s: float
    lost_s: float
    restore_s: float
    step: int | None  # that came back


@dataclass(frozen=True, slots=True)
class Exposed:
    """What one more failure of a level would cost: lost work, averaged over the run, and the restore at its end.

    per_day_s: with the rate that was given; None: none was. restore_s: None: nothing is left to restore from.
    """

    level: str
    lost_mean_s: float
    lost_max_s: float
    restore_s: float | None
    between_s: float | None
    per_day_s: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One config under one workload."""

    config: str
    workload: str
    ranks: int
    seconds: float  # all of it, closing included
    program_s: float  # what the program itself takes
    saves: SavesSeen
    each: list[SaveSeen]  # in order, rank by rank
    tiers: list[TierSeen]
    edges: dict[str, int]  # "host -> nvme": bytes
    restores: ReadsSeen
    loads: ReadsSeen
    failures: list[FailureSeen]
    exposed: list[Exposed]
    closed: bool  # whether all got down before exit_timeout
    trouble: list[str]  # what went wrong in the simulated program, a few lines

    @property
    def overhead(self) -> float:
        """Of the program's own time, what it waited for saves."""
        return self.saves.blocked_s / self.ranks / self.program_s if self.program_s else 0.0
