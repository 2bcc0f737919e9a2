"""stepwell: a storage hierarchy for model state, GPU memory to parallel file system."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stepwell.checkpoint import Checkpoint
from stepwell.errors import (
    CheckpointGone,
    CheckpointNotFound,
    ConfigError,
    CorruptData,
    FormatError,
    KeyMismatch,
    NoGoodCheckpoint,
    NotPlanned,
    PickleRefused,
    RunBusy,
    SaveFailed,
    SaveSkipped,
    StateError,
    StepExists,
    StepwellError,
    StoreClosed,
    TierError,
    TierFull,
    TierUnavailable,
    WaitTimeout,
    WorldChanged,
)

if TYPE_CHECKING:
    from stepwell.draining import DrainReport
    from stepwell.loading import load
    from stepwell.opening import open
    from stepwell.prefetching import Prefetch
    from stepwell.saving import Save, SaveReport
    from stepwell.state import RNG, PerRank, Replicated, register_provider
    from stepwell.status import StoreStatus
    from stepwell.store import CheckpointStore
    from stepwell.summaries import RunSummary, runs

__version__ = "0.1.0"

#: what needs torch is imported when it is first used: listing and verifying files on the command line need none
_LATER = {
    "CheckpointStore": "stepwell.store",
    "DrainReport": "stepwell.draining",
    "PerRank": "stepwell.state",
    "Prefetch": "stepwell.prefetching",
    "RNG": "stepwell.state",
    "Replicated": "stepwell.state",
    "RunSummary": "stepwell.summaries",
    "Save": "stepwell.saving",
    "SaveReport": "stepwell.saving",
    "StoreStatus": "stepwell.status",
    "load": "stepwell.loading",
    "open": "stepwell.opening",
    "register_provider": "stepwell.state",
    "runs": "stepwell.summaries",
}

__all__ = [
    "RNG",
    "Checkpoint",
    "CheckpointGone",
    "CheckpointNotFound",
    "CheckpointStore",
    "ConfigError",
    "CorruptData",
    "DrainReport",
    "FormatError",
    "KeyMismatch",
    "NoGoodCheckpoint",
    "NotPlanned",
    "PerRank",
    "PickleRefused",
    "Prefetch",
    "Replicated",
    "RunBusy",
    "RunSummary",
    "Save",
    "SaveFailed",
    "SaveReport",
    "SaveSkipped",
    "StateError",
    "StepExists",
    "StepwellError",
    "StoreClosed",
    "StoreStatus",
    "TierError",
    "TierFull",
    "TierUnavailable",
    "WaitTimeout",
    "WorldChanged",
    "load",
    "open",
    "register_provider",
    "runs",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'stepwell' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
