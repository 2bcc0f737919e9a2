"""What can be set on a store, validated once when it is opened."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from stepwell.errors import ConfigError
from stepwell.units import parse_duration

#: in place of any longer time, infinity included: threads cannot wait for much more
LONGEST_S = 1e9
ON_PRESSURE = ("block", "skip", "newest-wins")
_TIMES = ("block_timeout", "exit_timeout", "max_unsaved", "rank_timeout_seconds")


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What the core is told of one tier, beside what its driver knows."""

    delete_grace_s: float | None = None  # how long a deleted checkpoint's files stay; None: by the tier's scope
    verify_after_flush: Literal["size", "digest"] | None = None  # before the last copy above it may go
    by_rules: bool = False  # policies say what goes there; of the first storage tier: else each save does


@dataclass(frozen=True, slots=True)
class Settings:
    """A field's comment is its documentation; times are in seconds."""

    block_timeout: float = 120.0  # the longest that save() blocks before it gives this checkpoint up
    exit_timeout: float = 600.0  # the longest that close() or leaving the interpreter waits for the newest save
    max_unsaved: float = 3600.0  # save() raises once nothing has become durable for so long
    rank_timeout_seconds: float = 600.0  # the longest that one rank waits for another's part
    on_pressure: str = "block"  # while the first storage tier has no room: "block", "skip" or "newest-wins"
    trace: str | None = None  # a file for what this process saves, restores and prefetches, and when
    open_number: int = 0  # how many stores of this run this process has opened before

    def __post_init__(self) -> None:
        if self.on_pressure not in ON_PRESSURE:
            todo = f"Choose one of {', '.join(map(repr, ON_PRESSURE))}"
            raise ConfigError(f"on_pressure={self.on_pressure!r}", todo=todo)
        if self.trace is not None and (not isinstance(self.trace, str) or not self.trace or "\0" in self.trace):
            raise ConfigError(f"trace={self.trace!r}", todo="Name a file, such as 'trace.jsonl'")
        for name in _TIMES:
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LONGEST_S:
                raise ConfigError(f"{name}={value!r}", todo=f"Give a number of seconds above 0, at most {LONGEST_S:g}")

    def override(self, values: Mapping[str, Any]) -> Settings:
        """These settings with some changed; times may be written as in a config file, such as '2min'.

        Raises ConfigError for a name that does not exist, and for what is not a time.
        """
        known = [field.name for field in fields(self) if field.name != "open_number"]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}"
                raise ConfigError(f"there is no setting {name!r}", todo=hint)
        return replace(self, **{name: _read(name, value) for name, value in values.items()})


def _read(name: str, value: Any) -> Any:
    if name not in _TIMES or not isinstance(value, str):
        return value
    try:
        return parse_duration(value)
    except ConfigError as error:
        raise ConfigError(f"{name}={value!r}: {error.what}", todo=error.todo) from None
