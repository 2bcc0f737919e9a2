"""`stepwell.open`: from what the user names to a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from stepwell.errors import ConfigError
from stepwell.format.names import check_run_name
from stepwell.settings import Settings
from stepwell.store import CheckpointStore, count_open
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier


def open(
    target: str | os.PathLike[str] | None = None,
    *,
    run: str | None = None,
    mode: Literal["w", "r"] = "w",
    tiers: Sequence[Tier] | None = None,
    **overrides: Any,
) -> CheckpointStore:
    """Opens the checkpoints of one run.

    target: the run's folder; its last component is the run, its parent must exist. tiers: instead of a
    target, a chain of tier drivers, nearest first, and `run` beside it; saves go to the first and are
    flushed to the others. mode: "w" to save and restore, "r" for readers, which write nothing. Other
    keywords are settings: see `stepwell.settings.Settings`.

    Raises ConfigError for what cannot be right, TierUnavailable if a place is not there.
    """
    if mode not in ("w", "r"):
        raise ConfigError(f"mode={mode!r}", todo="Use 'w' to save and restore, 'r' to read")
    if (target is None) == (tiers is None):
        raise ConfigError("give either the run's folder or tiers", todo="stepwell.open('ckpts/my-run')")
    if target is not None:
        path = Path(target).expanduser().absolute()
        if run is not None:
            raise ConfigError("a folder already names the run", todo=f"Leave out run={run!r}, or open {path / run}")
        run = path.name
        tiers = [FileTier(path.parent, name="disk", read_only=mode == "r")]
        if not path.parent.is_dir():
            raise ConfigError(
                f"the folder of the run's parent does not exist: {path.parent}", todo="Make it first, or mend the path"
            )
    elif run is None:
        raise ConfigError("tiers need a run's name", todo="Give run='my-run'")
    assert tiers is not None
    names = [tier.info.name for tier in tiers]
    if not tiers or len(set(names)) < len(names):
        raise ConfigError(f"every tier needs a name of its own, not {names}" if tiers else "there are no tiers")
    check_run_name(run)
    settings = Settings(open_number=count_open(run)).override(overrides)
    return CheckpointStore(run, tiers, mode, settings)
