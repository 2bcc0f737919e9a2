"""A checkpoint as users see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from stepwell.errors import ConfigError
from stepwell.format.names import Attempt
from stepwell.format.records import Manifest


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One committed checkpoint, and, where `restore` returned it, how it was read."""

    step: int
    name: str  # its folder
    run: str
    parts: dict[str, int]  # bytes of each
    world: int
    metrics: dict[str, float]
    tags: tuple[str, ...]
    parent: str | None
    timeline: int
    made: float  # seconds since 1970, by the writer's clock
    tiers: tuple[str, ...]  # that hold a commit that can be read, nearest first
    complete_on: tuple[str, ...]  # those of them that hold every part
    abandoned: bool = False  # a rewind left it behind
    kept: bool = False  # retention never deletes it
    skipped: dict[int, str] = field(default_factory=dict)  # newer steps that restore passed over, and why
    sources: dict[str, int] = field(default_factory=dict)  # tier -> bytes that were read from it
    healed: tuple[str, ...] = ()  # files with bad bytes that another tier had good
    missing: tuple[str, ...] = ()  # keys of the state that the checkpoint does not have
    unexpected: tuple[str, ...] = ()  # keys of the checkpoint that the state does not have

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(self.parts.values())


def check_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float | str | None]:
    """Metrics as they are stored: numbers (NaN and infinities as text, JSON has none) by name. Raises ConfigError."""
    kept: dict[str, float | str | None] = {}
    for name, value in (metrics or {}).items():
        if not isinstance(name, str):
            raise ConfigError(f"a metric's name must be a string, not {name!r}")
        try:
            number = float(value)
        except Exception:  # tensors and arrays of several numbers have errors of their own
            raise ConfigError(f"metric {name!r} is not a number: {value!r}") from None
        finite = number == number and abs(number) != float("inf")
        kept[name] = number if finite else repr(number)
    return kept


def numbers(stored: Mapping[str, float | str | None]) -> dict[str, float]:
    """Metrics as they are read. Raises ValueError for text that is no number."""
    return {name: float("nan") if value is None else float(value) for name, value in stored.items()}


def from_manifest(
    run: str, manifest: Manifest, tiers: list[str], complete_on: list[str], abandoned: bool
) -> Checkpoint:
    attempt = Attempt.parse(manifest.attempt)
    assert attempt is not None
    return Checkpoint(
        step=manifest.step,
        name=manifest.attempt,
        run=run,
        parts=dict(manifest.parts),
        world=manifest.world,
        metrics=numbers(manifest.metrics),
        tags=tuple(manifest.tags),
        parent=manifest.parent,
        timeline=manifest.timeline,
        made=manifest.made,
        tiers=tuple(tiers),
        complete_on=tuple(complete_on),
        abandoned=abandoned,
    )
