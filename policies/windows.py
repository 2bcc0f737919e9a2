"""Windows of steps or of seconds: a rule that thins out takes the first checkpoint of each.

A window is k steps long (`step // k`), never a modulo: saves at odd steps, at the ends of epochs or by the clock
are all thinned out evenly, and none falls through.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from stepwell.errors import ConfigError
from stepwell.policies.base import CheckpointView

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))


def of_steps(line: Sequence[CheckpointView], steps: int) -> dict[str, int]:
    """Name of each checkpoint -> its window."""
    return {c.name: c.step // steps for c in line}


def of_seconds(line: Sequence[CheckpointView], seconds: float) -> dict[str, int]:
    """Name of each checkpoint -> its window, counted along the line.

    line: all checkpoints that count, lowest step first. A clock that was set back or forward only begins a new
    window: numbers never fall, so that no later checkpoint seems to belong to a window that has passed.
    """
    found: dict[str, int] = {}
    number, before = -1, None
    for c in line:
        now = math.floor(c.made / seconds)
        if now != before:
            number, before = number + 1, now
        found[c.name] = number
    return found


def firsts(found: Sequence[CheckpointView], windows: dict[str, int]) -> set[str]:
    """Names of the first ones of each window. found: lowest step first."""
    first: dict[int, str] = {}
    for c in found:
        first.setdefault(windows[c.name], c.name)
    return set(first.values())


def check_steps(steps: object, tier: str) -> None:
    """Raises ConfigError if it is not an integer above 0."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"every_steps={steps!r} for tier {tier}", todo="Give how many steps a window has, at least 1")


def check_seconds(name: str, seconds: object, tier: str) -> None:
    """Raises ConfigError if it is not a finite number above 0."""
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not (number and math.isfinite(seconds) and seconds > 0):  # type: ignore[arg-type, operator]
        raise ConfigError(f"{name}={seconds!r} for tier {tier}", todo="Give a number of seconds above 0")


def spoken(seconds: float) -> str:
    """A time span as people write it: "10 min"."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds % size == 0), (1, "s"))
    return f"{seconds / size:g} {unit}"
