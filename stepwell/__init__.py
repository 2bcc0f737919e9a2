"""stepwell: a storage hierarchy for model state, GPU memory to parallel file system."""

from __future__ import annotations

from stepwell.checkpoint import Checkpoint
from stepwell.errors import (
    CheckpointGone,
    CheckpointNotFound,
    ConfigError,
    CorruptData,
    FormatError,
    KeyMismatch,
    NoGoodCheckpoint,
    PickleRefused,
    RunBusy,
    SaveFailed,
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
from stepwell.loading import load
from stepwell.opening import open
from stepwell.saving import Save, SaveReport
from stepwell.state import RNG, PerRank, Replicated, register_provider
from stepwell.store import CheckpointStore

__version__ = "0.1.0"

__all__ = [
    "RNG",
    "Checkpoint",
    "CheckpointGone",
    "CheckpointNotFound",
    "CheckpointStore",
    "ConfigError",
    "CorruptData",
    "FormatError",
    "KeyMismatch",
    "NoGoodCheckpoint",
    "PerRank",
    "PickleRefused",
    "Replicated",
    "RunBusy",
    "Save",
    "SaveFailed",
    "SaveReport",
    "StateError",
    "StepExists",
    "StepwellError",
    "StoreClosed",
    "TierError",
    "TierFull",
    "TierUnavailable",
    "WaitTimeout",
    "WorldChanged",
    "load",
    "open",
    "register_provider",
]
