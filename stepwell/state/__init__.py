"""State and shards: what a training job holds, as safetensors files and back."""

from stepwell.state import cupy as _cupy  # noqa: F401  registers providers, as the next four do
from stepwell.state import distributed as _distributed  # noqa: F401
from stepwell.state import modules as _modules  # noqa: F401
from stepwell.state import optim as _optim  # noqa: F401
from stepwell.state import quantised as _quantised  # noqa: F401
from stepwell.state.assign import assign
from stepwell.state.build import build
from stepwell.state.cache import PlanCache
from stepwell.state.capture import Snapshot, capture
from stepwell.state.placement import Fill, Placement
from stepwell.state.plan import ShardPlan
from stepwell.state.providers import Context, PerRank, Provider, Replicated, register_provider
from stepwell.state.rng import RNG
from stepwell.state.skeleton import TensorLeaf, foreign, tensors
from stepwell.state.source import ShardSource

__all__ = [
    "RNG",
    "Context",
    "Fill",
    "PerRank",
    "Placement",
    "PlanCache",
    "Provider",
    "Replicated",
    "ShardPlan",
    "ShardSource",
    "Snapshot",
    "TensorLeaf",
    "assign",
    "build",
    "capture",
    "foreign",
    "register_provider",
    "tensors",
]
