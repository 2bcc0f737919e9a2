"""Where the memory lies that a capture looks at, so that the processor can fetch it before it is needed.

Training leaves nothing of a state's objects in the processor's caches, and each tensor or module leads to five and more
pieces of memory, one after the other. Hints are addresses only, which nobody follows: they may have become wrong.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

_LINE_BYTES = 64
#: about what each takes of memory: CPython's objects and torch's, of which more costs little and less does no harm
_OBJECT_BYTES, _DICT_BYTES, _ENTRY_BYTES = 40, 48, 16
_TENSOR_BYTES, _STORAGE_BYTES, _GRADIENTS_BYTES, _VERSION_BYTES = 208, 112, 160, 24
_SIZE_BYTES = 32  # of a container, up to its size
_FIELDS_BYTES = 32  # in front of an object: where its attributes are
_VALUES = 3  # of each dict of tensors, these are hinted at


class Hints(NamedTuple):
    """`each` words for every object, in the order in which they are looked at; see `native/_objects.pyi`."""

    words: bytes = b""
    each: int = 1


NO_HINTS = Hints()


def _lines(address: int, size_bytes: int) -> int:
    more = (address % _LINE_BYTES + size_bytes - 1) // _LINE_BYTES
    return address // _LINE_BYTES * _LINE_BYTES | min(more, _LINE_BYTES - 1)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_uint64 * count).from_address(address))


def _packed(each: Iterable[Sequence[int]]) -> Hints:
    words = np.array(list(each), np.uint64)
    return Hints(words.tobytes(), words.shape[1]) if words.size else NO_HINTS


def of_tensors(tensors: Sequence[torch.Tensor]) -> Hints:
    """Nothing for tensors of an unusual kind."""
    try:
        return _packed(map(_tensor, tensors))
    except (AttributeError, RuntimeError):
        return NO_HINTS


def _tensor(tensor: torch.Tensor) -> Sequence[int]:
    inside = tensor._cdata
    gradients, version = _words(inside, 6)[4:]
    return (
        _lines(id(tensor), _OBJECT_BYTES),
        _lines(inside, _TENSOR_BYTES),
        _lines(tensor.untyped_storage()._cdata, _STORAGE_BYTES),
        _lines(gradients, _GRADIENTS_BYTES),
        _lines(version, _VERSION_BYTES),
    )


def _dict(entries: Mapping[Any, Any]) -> Sequence[int]:
    if not isinstance(entries, dict):
        return 0, 0, 0
    keys, values = _words(id(entries), _DICT_BYTES // 8)[4:]
    count = len(entries)
    return (
        _lines(id(entries), _DICT_BYTES),
        _lines(keys, (count + 3) * _ENTRY_BYTES) if count else 0,
        _lines(values, count * 8) if count else 0,
    )


def _values(entries: Mapping[Any, Any]) -> Sequence[int]:
    found = [_lines(id(value), _OBJECT_BYTES) for value in entries.values()][:_VALUES]
    return [*found, *[0] * (_VALUES - len(found))]


def of_modules(root: torch.nn.Module, held: Sequence[str], noted: Sequence[str], levels_max: int) -> Hints:
    """held: attributes whose entries are looked at. noted: those of which only the size is. Nothing for modules of an
    unusual kind, or with more levels, as one inside itself has."""
    try:
        return _of_levels(root, held, noted, levels_max)
    except (AttributeError, KeyError):
        return NO_HINTS


def _of_levels(root: torch.nn.Module, held: Sequence[str], noted: Sequence[str], levels_max: int) -> Hints:
    found: list[Sequence[int]] = []
    level = [root]
    for _ in range(levels_max):
        for module in level:
            inside = module.__dict__
            own, _, values = _dict(inside)  # its keys are those of its class
            words = [_lines(id(module) - _FIELDS_BYTES, _FIELDS_BYTES + _OBJECT_BYTES), own, values]
            for name in held:
                words += _dict(inside[name])[:2]
            words += [_lines(id(inside[name]), _SIZE_BYTES) for name in noted]
            found.append([*words, *_values(module._parameters)])
        level = [child for module in level for child in module._modules.values() if child is not None]
        if not level:
            return _packed(found)
    return NO_HINTS


def of_entries(outer: Mapping[Any, Mapping[Any, Any]]) -> Hints:
    """Of a dict of dicts."""
    found: list[Sequence[int]] = []
    for key, entries in outer.items():
        found.append([_lines(id(key), _OBJECT_BYTES), *_dict(entries), *_values(entries)])
    return _packed(found)
