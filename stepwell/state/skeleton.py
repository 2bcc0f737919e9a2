"""The skeleton of a state: the typed tree that a rank's record carries, read with distrust.

    {"version": 1, "rank": 0, "world": 1,
     "parts": [name, …],                in the order of the tree's entries
     "groups": [bytes, …],              buffers that overlapping views share
     "tensors": [row, …],               one a leaf: [label, dtype, shape] or [label, dtype, shape, notes]
     "tree": node}                      see `values`; ["t", n] is leaf n

notes: class, grad (requires it), strides (dense, not row-major), of (same memory as that leaf), same (the very
same object), in ([group, offset in bytes, strides]).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import torch

from stepwell.errors import FormatError
from stepwell.format.safetensors import TensorEntry
from stepwell.state.alias import extent_bytes, is_dense, is_writable
from stepwell.state.dtypes import DTYPE, NAME, loaded_as, nbytes, stored_as
from stepwell.state.nodes import check_node, leaf_keys
from stepwell.state.values import Node

VERSION = 1
_SIZE_MAX = 2**62


@dataclass(frozen=True, slots=True)
class TensorLeaf:
    """One stored tensor, for listings: its dtype's torch name, shape, dotted key inside its part, and part."""

    label: str
    dtype: str
    shape: tuple[int, ...]
    key: str
    part: str

    @property
    def nbytes(self) -> int:
        return nbytes(DTYPE[self.dtype], self.shape)


class Notes(msgspec.Struct, rename={"cls": "class", "place": "in"}, forbid_unknown_fields=True):
    """What a row says beyond label, dtype and shape."""

    cls: str | None = None
    grad: bool = False
    strides: tuple[int, ...] | None = None
    of: int | None = None
    same: bool = False
    place: tuple[int, int, tuple[int, ...]] | None = None


_NO_NOTES = Notes()


class Leaf(NamedTuple):
    """One leaf of the tree. `label` names the stored bytes, also for a leaf that shares another's."""

    label: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    notes: Notes


@dataclass(frozen=True, slots=True)
class Skeleton:
    """A skeleton that was checked: nothing in its leaves points outside what it describes."""

    rank: int
    world: int
    parts: dict[str, tuple[Node, Node]]  # name -> (key, value)
    leaves: list[Leaf]
    groups: list[int]
    tree: Node


def part_names(keys: Iterable[Any]) -> list[str]:
    """A unique name for each part. Names are text, top-level keys may be anything."""
    out: list[str] = []
    for key in keys:
        name = str(key).encode("utf-8", "backslashreplace").decode()
        unique, number = name, 1
        while unique in out:
            number += 1
            unique = f"{name}#{number}"
        out.append(unique)
    return out


def read_skeleton(raw: Mapping[str, Any], path: object = None) -> Skeleton:
    """Checks a decoded skeleton; raises FormatError for anything that does not add up."""
    try:
        return _read(raw)
    except FormatError:
        raise
    except (KeyError, TypeError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise FormatError(
            f"The skeleton of the state is damaged ({type(error).__name__}: {error})", path=path
        ) from error


def checked_skeleton(skeleton: Skeleton | Mapping[str, Any]) -> Skeleton:
    """The skeleton, read unless that was done before."""
    return skeleton if isinstance(skeleton, Skeleton) else read_skeleton(skeleton)


def _read(raw: Mapping[str, Any]) -> Skeleton:
    if raw["version"] != VERSION:
        raise FormatError(
            f"The skeleton has version {raw['version']!r}, this stepwell reads {VERSION}", todo="Use a newer stepwell"
        )
    groups = msgspec.convert(raw["groups"], list[int])
    leaves = [_leaf(row) for row in raw["tensors"]]
    _check_sharing(leaves, groups)
    tree = raw["tree"]
    names = msgspec.convert(raw["parts"], list[str])
    if tree[0] != "d" or len(tree) != 1 + 2 * len(names) or len(set(names)) != len(names):
        raise ValueError("its parts do not fit its tree")
    check_node(tree, len(leaves))
    parts = {name: (tree[1 + 2 * index], tree[2 + 2 * index]) for index, name in enumerate(names)}
    return Skeleton(int(raw["rank"]), int(raw["world"]), parts, leaves, groups, tree)


def _leaf(row: Sequence[Any]) -> Leaf:
    label, dtype_name, shape = row[:3]
    dtype = DTYPE.get(dtype_name)
    if dtype is None:
        raise FormatError(f"The dtype {dtype_name!r} is unknown to this torch", tensor=label, todo="Use a newer torch")
    shape = tuple(shape)
    size = 16  # bytes, at most, of an element
    for length in shape:
        if type(length) is not int or length < 0:
            raise ValueError(f"impossible shape of {label!r}")
        size *= length or 1
    if type(label) is not str or size > _SIZE_MAX or len(shape) > 64 or len(row) > 4:
        raise ValueError(f"impossible tensor {label!r}")
    if len(row) == 3:
        return Leaf(label, dtype, shape, _NO_NOTES)
    notes = msgspec.convert(row[3], Notes)
    for strides in (notes.strides, notes.place[2] if notes.place else None):
        if strides is not None and (len(strides) != len(shape) or any(not 0 <= item < _SIZE_MAX for item in strides)):
            raise ValueError(f"impossible strides of {label!r}")
    return Leaf(label, dtype, shape, notes)


def _check_sharing(leaves: Sequence[Leaf], groups: Sequence[int]) -> None:
    held = [0] * len(groups)
    labels: set[str] = set()
    for index, leaf in enumerate(leaves):
        notes = leaf.notes
        if notes.of is None:
            if leaf.label in labels:
                raise ValueError(f"two tensors have the label {leaf.label!r}")
            labels.add(leaf.label)
            if notes.strides is not None and not is_dense(leaf.shape, notes.strides):
                raise ValueError(f"impossible strides of {leaf.label!r}")
        else:
            _check_tie(leaves, index, leaf)
        if notes.place is not None:
            group, offset, strides = notes.place
            if not 0 <= group < len(groups) or offset < 0 or offset % leaf.dtype.itemsize:
                raise ValueError(f"impossible place of {leaf.label!r}")
            if offset + extent_bytes(leaf.shape, strides, leaf.dtype.itemsize) > groups[group]:
                raise ValueError(f"{leaf.label!r} reaches out of its buffer")
            if not is_writable(leaf.shape, strides):
                raise ValueError(f"{leaf.label!r} overlaps itself")
            held[group] += nbytes(leaf.dtype, leaf.shape)
    for size, members in zip(groups, held, strict=True):
        if not 0 < size <= 2 * members + (1 << 21):
            raise ValueError("a buffer of shared memory is larger than its tensors")


def _check_tie(leaves: Sequence[Leaf], index: int, leaf: Leaf) -> None:
    of = leaf.notes.of
    if of is None or not 0 <= of < index or leaves[of].notes.of is not None:
        raise ValueError(f"{leaf.label!r} is tied to nothing")
    base = leaves[of]
    if base.label != leaf.label or base.dtype != leaf.dtype or leaf.notes.place is not None:
        raise ValueError(f"{leaf.label!r} is tied to another kind of tensor")
    if leaf.notes.strides is None:
        if leaf.shape != base.shape:
            raise ValueError(f"{leaf.label!r} is tied to a tensor of another shape")
    elif not is_dense(leaf.shape, leaf.notes.strides) or nbytes(leaf.dtype, leaf.shape) != nbytes(
        base.dtype, base.shape
    ):
        raise ValueError(f"{leaf.label!r} reaches out of the tensor it is tied to")


def foreign(entries: Mapping[str, TensorEntry], part: str = "model") -> dict[str, Any]:
    """A skeleton for safetensors files that stepwell did not write: one part, a flat dict of tensors."""
    rows: list[list[Any]] = []
    for label, entry in entries.items():
        dtype, shape = loaded_as(entry.dtype, entry.shape, entry.end - entry.begin)
        rows.append([label, NAME[dtype], shape])
    tree = {label: ["t", index] for index, label in enumerate(entries)}
    return {
        "version": VERSION,
        "rank": 0,
        "world": 1,
        "parts": [part],
        "groups": [],
        "tensors": rows,
        "tree": ["d", part, tree],
    }


def tensors(skeleton: Skeleton | Mapping[str, Any]) -> dict[str, TensorLeaf]:
    """label -> what is stored under it, under its first key, in the state's order."""
    checked = checked_skeleton(skeleton)
    out: dict[str, TensorLeaf] = {}
    for part, (_, node) in checked.parts.items():
        for key, index in leaf_keys(node, ""):
            leaf = checked.leaves[index]
            if leaf.label not in out:
                base = leaf if leaf.notes.of is None else checked.leaves[leaf.notes.of]
                out[leaf.label] = TensorLeaf(leaf.label, NAME[base.dtype], base.shape, key, part)
    return out


def stored_form(leaf: TensorLeaf) -> tuple[str, tuple[int, ...]]:
    """safetensors dtype and shape that the file's header must give for this label."""
    return stored_as(DTYPE[leaf.dtype], leaf.shape)
