"""Live values of a restore: what they hold, and new values put in the same containers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from stepwell.state.encode import join
from stepwell.state.providers import PerRank, Replicated, provider_for


def real_instead(value: torch.Tensor, meta: torch.Tensor) -> torch.Tensor:
    """The tensor that takes the place of one without data."""
    plain = value.detach().to(meta.dtype)
    if isinstance(meta, torch.nn.Parameter):
        return torch.nn.Parameter(plain, requires_grad=meta.requires_grad)
    return plain.requires_grad_(meta.requires_grad) if meta.requires_grad else plain


def flat_slots(target: dict[Any, Any], name: str) -> Iterator[tuple[str, dict[Any, Any], Any]]:
    """(dotted name, dict, key) of every place inside nested dicts."""
    for key, value in target.items():
        if isinstance(value, dict) and value:
            yield from flat_slots(value, join(name, key))
        else:
            yield join(name, key), target, key


def is_plain(value: Any) -> bool:
    """There is no tensor and no object inside."""
    if isinstance(value, dict):
        return all(map(is_plain, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, torch.Tensor | Replicated | PerRank):
        return False
    return value is None or provider_for(type(value)) is None


def has_array(value: Any) -> bool:
    """There is a NumPy array inside."""
    if isinstance(value, np.ndarray):
        return True
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(map(has_array, items))


def replaced(target: Any, value: Any) -> Any:
    """`value`, in the same dicts and lists as `target` as far as they are of the same type."""
    if type(target) is not type(value):
        return value
    if isinstance(target, dict):
        entries = {key: replaced(target[key], item) if key in target else item for key, item in value.items()}
        target.clear()
        target.update(entries)
        return target
    if isinstance(target, list):
        both = len(target)
        target[:] = [replaced(target[at], item) if at < both else item for at, item in enumerate(value)]
        return target
    if isinstance(target, np.ndarray) and (target.shape, target.dtype) == (value.shape, value.dtype):
        if target.flags.writeable:
            target[...] = value
            return target
    return value
