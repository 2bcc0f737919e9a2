"""Which tensors share memory: found with one sort over address ranges, looked at closely only where any do.

Equal memory is stored once. Views that overlap otherwise are stored each with its own values, and remember
their place in a common buffer, so that new tensors share memory again. A test by storage pointer would call all
parameters of a flat buffer shared, though they are disjoint; so ranges of bytes decide.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stepwell.state.dtypes import contiguous_strides

#: a common buffer of overlapping views may be this much larger than what the views hold
SLACK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Tie:
    """The leaf's memory is that of the leaf `of`, seen with other shape and strides perhaps."""

    of: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    same: bool  # the very same tensor object


@dataclass(frozen=True, slots=True)
class Place:
    """The leaf is a view into the common buffer of a group. Strides are in elements, the offset in bytes."""

    group: int
    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Aliases:
    """What is shared; hashable, since it is part of the structure that plans are cached by."""

    ties: tuple[tuple[int, Tie], ...] = ()
    places: tuple[tuple[int, Place], ...] = ()
    groups: tuple[int, ...] = ()  # bytes of each group's buffer


NO_ALIASES = Aliases()
Array = np.ndarray[Any, np.dtype[np.uint64]]
Places = np.ndarray[Any, np.dtype[np.intp]]


def find_aliases(
    tensors: Sequence[torch.Tensor],
    begins: Array,
    extents: Array,
    devices: Sequence[int] = (),
    alone: Container[int] = (),
) -> Aliases:
    """Analyses tensors that lie at addresses `begins` and reach over `extents` bytes (0: no memory).

    devices: a number for the device of each tensor, where they are on several: equal addresses mean nothing then.
    alone: those whose tensor counts as an object of its own, whatever it is.
    """
    used = np.flatnonzero(extents)
    runs: list[Places] = []
    if len(set(devices)) > 1:
        on = np.array(devices, np.intp)[used]
        for device in np.unique(on):
            runs += _touching(used[on == device], begins, extents)
    else:
        runs = _touching(used, begins, extents)
    if not runs:
        return NO_ALIASES
    ties: dict[int, Tie] = {}
    places: dict[int, Place] = {}
    groups: list[int] = []
    for run in runs:
        _analyse(tensors, sorted(run.tolist()), begins, extents, alone, ties, places, groups)
    return Aliases(tuple(sorted(ties.items())), tuple(sorted(places.items())), tuple(groups))


def _touching(used: Places, begins: Array, extents: Array) -> list[Places]:
    """The sets of tensors, out of those, whose ranges touch each other."""
    order = used[np.argsort(begins[used], kind="stable")]
    starts = begins[order]
    ends = np.maximum.accumulate(starts + extents[order])
    joined = starts[1:] < ends[:-1]
    if not joined.any():
        return []
    borders = np.flatnonzero(np.diff(np.concatenate(([False], joined, [False])).astype(np.int8)))
    return [order[first : last + 1] for first, last in borders.reshape(-1, 2)]


def _analyse(
    tensors: Sequence[torch.Tensor],
    members: list[int],
    begins: Array,
    extents: Array,
    alone: Container[int],
    ties: dict[int, Tie],
    places: dict[int, Place],
    groups: list[int],
) -> None:
    """One run of tensors whose ranges touch each other, in the state's order."""
    seen: dict[tuple[object, ...], int] = {}
    distinct: list[int] = []
    for index in members:
        tensor = tensors[index]
        identity = _identity(tensor, int(begins[index]), int(extents[index]))
        known = seen.setdefault(identity, index)
        if known != index:
            same = tensors[known] is tensor and known not in alone and index not in alone
            ties[index] = Tie(known, tuple(tensor.shape), tensor.stride(), same)
        else:
            distinct.append(index)
    if len(distinct) > 1:
        _group(tensors, distinct, begins, extents, places, groups)


def _identity(tensor: torch.Tensor, begin: int, extent: int) -> tuple[object, ...]:
    """Equal for tensors of which one copy of the bytes is enough."""
    marks = (begin, tensor.dtype, tensor.is_conj(), tensor.is_neg())
    if tensor.numel() * tensor.itemsize == extent and is_dense(tensor.shape, tensor.stride()):
        return (*marks, extent)
    return (*marks, tuple(tensor.shape), tensor.stride())


def _group(
    tensors: Sequence[torch.Tensor],
    members: list[int],
    begins: Array,
    extents: Array,
    places: dict[int, Place],
    groups: list[int],
) -> None:
    members = [index for index in members if is_writable(tensors[index].shape, tensors[index].stride())]
    if len(members) < 2:
        return
    base = min(int(begins[index]) for index in members)
    size = max(int(begins[index]) + int(extents[index]) for index in members) - base
    held = sum(tensors[index].nbytes for index in members)
    if size > 2 * held + SLACK_BYTES:
        return  # far apart in a huge storage: sharing is not worth bringing all of it back
    for index in members:
        tensor = tensors[index]
        offset = int(begins[index]) - base
        if offset % tensor.itemsize or tensor.is_conj() or tensor.is_neg():
            continue
        places[index] = Place(len(groups), offset, tensor.stride())
    groups.append(size)


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Every element has memory of its own and there are no gaps: a permuted contiguous tensor."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def is_writable(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """No two elements share memory: each stride leaps over all that smaller strides reach. (Views for which that
    rule is too strict exist; they only lose their sharing.)"""
    reach = 0
    for stride, size in sorted((stride, size) for size, stride in zip(shape, strides, strict=True) if size > 1):
        if stride <= reach:
            return False
        reach += (size - 1) * stride
    return True


def extent_bytes(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> int:
    """Bytes from a tensor's first to behind its last element; 0 if it has none."""
    if 0 in shape:
        return 0
    return (sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) + 1) * itemsize


def own_strides(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...] | None:
    """Strides that a new tensor should have; None for plain row-major ones (also where gaps are given up)."""
    if not is_dense(shape, strides) or 0 in shape:
        return None
    row_major = contiguous_strides(shape)
    same = all(size == 1 or a == b for size, a, b in zip(shape, strides, row_major, strict=True))
    return None if same else tuple(strides)
