"""Random number generators: the global ones together, and torch.Generator objects."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from stepwell.errors import StateError
from stepwell.state.providers import Context, register_provider


class RNG:
    """Stands for the global random states of torch (CPU, and CUDA once it is in use), NumPy and Python.

    They are read when a state is saved and set when it is restored. Per rank.
    """


class RNGProvider:
    """Saves and sets the global generators."""

    name = "rng"

    def to_tree(self, obj: Any, context: Context) -> Any:
        tree: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "numpy": np.random.get_state(),
            "python": random.getstate(),
        }
        if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's
            tree["cuda"] = torch.cuda.get_rng_state_all()
        return tree

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        if existing is None:
            return tree
        torch.set_rng_state(tree["torch"])
        np.random.set_state(tree["numpy"])
        random.setstate(tree["python"])
        if "cuda" in tree and torch.cuda.is_available():
            if len(tree["cuda"]) != torch.cuda.device_count():
                raise StateError(
                    f"The random states of {len(tree['cuda'])} CUDA devices were saved, here are others",
                    key=context.key,
                )
            torch.cuda.set_rng_state_all(tree["cuda"])
        return existing


class GeneratorProvider:
    """torch.Generator."""

    name = "torch-generator"

    def to_tree(self, obj: Any, context: Context) -> Any:
        return {"device": str(obj.device), "state": obj.get_state()}

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        generator = existing if existing is not None else torch.Generator(device=tree["device"])
        generator.set_state(tree["state"])
        return generator


class NumpyGeneratorProvider:
    """numpy.random.Generator; only its bit generator has a state."""

    name = "numpy-generator"

    def to_tree(self, obj: Any, context: Context) -> Any:
        return dict(obj.bit_generator.state)

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        if existing is None:
            kind = getattr(np.random, str(tree["bit_generator"]), None)
            if not (isinstance(kind, type) and issubclass(kind, np.random.BitGenerator)):
                raise StateError(f"NumPy has no bit generator {tree['bit_generator']!r}", key=context.key)
            existing = np.random.Generator(kind())
        existing.bit_generator.state = tree
        return existing


register_provider(RNG, RNGProvider())
register_provider(torch.Generator, GeneratorProvider())
register_provider(np.random.Generator, NumpyGeneratorProvider())
