"""What can be set on a store, validated once when it is opened."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields, replace
from typing import Any

from stepwell.errors import ConfigError

#: in place of any longer time, infinity included: threads cannot wait for much more
LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class Settings:
    """A field's comment is its documentation; times are in seconds."""

    block_timeout: float = 120.0  # the longest that save() blocks before it gives this checkpoint up
    exit_timeout: float = 600.0  # the longest that close() or leaving the interpreter waits for the newest save
    max_unsaved: float = 3600.0  # save() raises once nothing has become durable for so long
    rank_timeout_seconds: float = 600.0  # the longest that one rank waits for another's part
    open_number: int = 0  # how many stores of this run this process has opened before

    def __post_init__(self) -> None:
        for name in ("block_timeout", "exit_timeout", "max_unsaved", "rank_timeout_seconds"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= LONGEST_S:
                raise ConfigError(f"{name}={value!r}", todo=f"Give a number of seconds above 0, at most {LONGEST_S:g}")

    def override(self, values: dict[str, Any]) -> Settings:
        """These settings with some changed. Raises ConfigError for a name that does not exist."""
        known = [field.name for field in fields(self) if field.name != "open_number"]
        for name in values:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}"
                raise ConfigError(f"there is no setting {name!r}", todo=hint)
        return replace(self, **values)
