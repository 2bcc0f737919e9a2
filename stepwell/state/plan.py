"""From a state's structure to its shard files: names, order, headers, offsets. No pointer is in a plan.

Planning 20,000 tensors costs more than copying them, so plans are kept by structure and used again as long as
names, dtypes, shapes, placement and ties stay the same.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from threading import Lock
from typing import Any

import msgspec
import numpy as np
import torch

from stepwell.format.safetensors import encode_header
from stepwell.state.alias import Aliases, Array, own_strides
from stepwell.state.classes import class_name
from stepwell.state.dtypes import NAME, stored_as

#: parts below this many bytes share the shard "extra"
EXTRA_BYTES = 1 << 20
#: parts whose header would be larger are split; well below the format's limit, readers parse headers whole
HEADER_SPLIT_BYTES = 64_000_000
#: plans kept; a trainer has one, an evaluation loop beside it perhaps another
PLANS_MAX = 8
MODEL = "model"
_STEM = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TAKEN = re.compile(r"extra|.*-\d{5,}-of-\d{5,}", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Span:
    """One part: its name and the range of its leaves."""

    part: str
    first: int
    stop: int


@dataclass(frozen=True)
class Structure:
    """All of a state that a plan depends on. Hashable and compared by value."""

    names: tuple[str, ...]
    spans: tuple[Span, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[torch.Size, ...]
    classes: tuple[type, ...]
    grads: tuple[bool, ...]
    lazy: tuple[tuple[int, tuple[int, ...]], ...]  # leaves that cannot be read where they are: index, strides
    subclasses: tuple[tuple[int, str], ...]
    replicated: frozenset[int]
    rank: int
    world: int
    header_split_bytes: int


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """One file: its header, its length, and where each piece begins. Piece 0 is the header."""

    file: str
    header: bytes
    size: int
    offsets: Array
    leaves: np.ndarray[Any, np.dtype[np.intp]]  # leaf of each piece but the first
    lazy: np.ndarray[Any, np.dtype[np.intp]]  # pieces whose leaf must be made contiguous, or fetched, first


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything about a checkpoint of this structure, except plain values and addresses."""

    shards: list[ShardPlan]
    parts: dict[str, list[str]]
    part_bytes: dict[str, int]  # a tie counts where it is stored
    rows: list[list[Any]]  # the skeleton's table of leaves
    groups: list[int]
    sidecars: dict[str, bytes]
    nbytes: int


class PlanCache:
    """The plans of the last few structures. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._plans: OrderedDict[tuple[Structure, Aliases], Plan] = OrderedDict()

    def plan(self, key: tuple[Structure, Aliases], make: Callable[[], Plan]) -> Plan:
        """The plan kept for this key, or a new one."""
        with self._lock:
            found = self._plans.get(key)
            if found is not None:
                self._plans.move_to_end(key)
                return found
        made = make()
        with self._lock:
            self._plans[key] = made
            while len(self._plans) > PLANS_MAX:
                self._plans.popitem(last=False)
        return made


def make_plan(structure: Structure, aliases: Aliases, sizes: Sequence[int]) -> Plan:
    """Plans shards for leaves of `sizes` bytes each."""
    tied = dict(aliases.ties)
    labels = _labels(structure, tied)
    files: dict[int, str] = {}
    shards: list[ShardPlan] = []
    sidecars: dict[str, bytes] = {}
    stored = [stored_as(dtype, shape) for dtype, shape in zip(structure.dtypes, structure.shapes, strict=True)]
    for part, stem, leaves in _groups(structure, tied, sizes):
        chunks = _split(leaves, labels, stored, structure.header_split_bytes)
        for number, chunk in enumerate(chunks, 1):
            name = _file_name(stem, number, len(chunks), structure.rank, structure.world)
            shards.append(_shard(name, part, chunk, labels, stored, sizes, structure))
            files.update(dict.fromkeys(chunk, name))
        if len(chunks) > 1 and part == MODEL and structure.world == 1:
            total = sum(sizes[leaf] for leaf in leaves)
            index = {"metadata": {"total_size": total}, "weight_map": {labels[leaf]: files[leaf] for leaf in leaves}}
            sidecars["model.safetensors.index.json"] = msgspec.json.format(msgspec.json.encode(index))
    return Plan(
        shards=shards,
        parts={span.part: _files_of(span, tied, files) for span in structure.spans},
        part_bytes={
            span.part: sum(sizes[leaf] for leaf in range(span.first, span.stop) if leaf not in tied)
            for span in structure.spans
        },
        rows=_rows(structure, aliases, labels),
        groups=list(aliases.groups),
        sidecars=sidecars,
        nbytes=sum(shard.size for shard in shards),
    )


def _files_of(span: Span, tied: dict[int, Any], files: dict[int, str]) -> list[str]:
    owners = (tied[leaf].of if leaf in tied else leaf for leaf in range(span.first, span.stop))
    return list(dict.fromkeys(files[leaf] for leaf in owners))


def _groups(structure: Structure, tied: dict[int, Any], sizes: Sequence[int]) -> list[tuple[str, str, list[int]]]:
    """(part, file stem, leaves) of each set of files; small parts together in "extra"."""
    out: list[tuple[str, str, list[int]]] = []
    extra: list[int] = []
    stems: set[str] = set()
    for span in structure.spans:
        leaves = [leaf for leaf in range(span.first, span.stop) if leaf not in tied]
        if not leaves:
            continue
        if span.part != MODEL and sum(sizes[leaf] for leaf in leaves) < EXTRA_BYTES:
            extra += leaves
            continue
        stem = file_stem(span.part)
        if stem.lower() in stems:  # file systems that ignore case
            stem = _digested(span.part)
        stems.add(stem.lower())
        out.append((span.part, stem, leaves))
    return [*out, ("extra", "extra", extra)] if extra else out


def file_stem(part: str) -> str:
    """A file name for a part: its own name if that is harmless."""
    return part if _STEM.fullmatch(part) and not _TAKEN.fullmatch(part) else _digested(part)


def _digested(part: str) -> str:
    slug = re.sub(r"[^A-Za-z0-9_]+", "-", part)[:32].strip("-") or "part"
    return f"{slug}-{blake2b(part.encode('utf-8', 'surrogatepass'), digest_size=5).hexdigest()}"


def _file_name(stem: str, number: int, count: int, rank: int, world: int) -> str:
    piece = f"-{number:05d}-of-{count:05d}" if count > 1 else ""
    place = f".rank{rank:05d}-of-{world:05d}" if world > 1 else ""
    return f"{stem}{piece}{place}.safetensors"


def _labels(structure: Structure, tied: dict[int, Any]) -> list[str]:
    """The unique name of each leaf in its file; leaves that store nothing have one, too, which nobody sees."""
    labels: list[str] = []
    for span in structure.spans:
        names = structure.names[span.first : span.stop]
        cut = len(span.part) + 1
        if span.part == MODEL:
            labels += [name[cut:] or name for name in names]
        elif structure.world == 1:
            labels += names
        else:
            own = f"{span.part}.rank{structure.rank:05d}."
            labels += [
                name if leaf in structure.replicated else own + name[cut:]
                for leaf, name in enumerate(names, span.first)
            ]
    return _unique(labels, tied)


def _unique(labels: list[str], tied: dict[int, Any]) -> list[str]:
    try:
        "\n".join(labels).encode()
    except UnicodeEncodeError:
        labels = [label.encode("utf-8", "backslashreplace").decode() for label in labels]
    taken = set(labels)
    if len(taken) == len(labels) and "__metadata__" not in taken:
        return labels
    used = {"__metadata__"}
    out: list[str] = []
    for leaf, label in enumerate(labels):
        unique, number = label, 1
        while unique in used or (number > 1 and unique in taken):
            number += 1
            unique = f"{label}#{number}"
        if leaf not in tied:
            used.add(unique)
        out.append(unique)
    return out


Stored = tuple[str, tuple[int, ...]]


def _split(leaves: list[int], labels: Sequence[str], stored: Sequence[Stored], limit: int) -> list[list[int]]:
    """Runs of leaves, in the state's order, each with a header below the limit."""
    longest = max(len(labels[leaf]) for leaf in leaves)
    deepest = max(len(stored[leaf][1]) for leaf in leaves)
    if (13 * longest + 48 * deepest + 256) * len(leaves) <= limit:
        return [leaves]
    chunks: list[list[int]] = [[]]
    room = limit
    for leaf in leaves:
        text = msgspec.json.encode(labels[leaf])  # once as a key, once more escaped inside __metadata__
        need = len(text) + len(msgspec.json.encode(text.decode())) + 48 * len(stored[leaf][1]) + 128
        if need > room and chunks[-1]:
            chunks.append([])
            room = limit
        chunks[-1].append(leaf)
        room -= need
    return chunks


def _shard(
    name: str,
    part: str,
    leaves: list[int],
    labels: Sequence[str],
    stored: Sequence[Stored],
    sizes: Sequence[int],
    structure: Structure,
) -> ShardPlan:
    dtypes = structure.dtypes
    width = {dtype: -dtype.itemsize for dtype in set(dtypes)}
    ordered = sorted(leaves, key=lambda leaf: width[dtypes[leaf]])  # stable: then the state's order
    zeros = [{"saved_offsets": [0] * dimensions} for dimensions in range(65)]  # shared: whole tensors begin at zero
    offsets_of = {labels[leaf]: zeros[len(stored[leaf][1])] for leaf in ordered}
    metadata = {
        "format": "pt",
        "stepwell": "1",
        "part": part.encode("utf-8", "backslashreplace").decode(),
        "DCP_SHARDING_INFO": msgspec.json.encode(offsets_of).decode(),
    }
    header = encode_header([(labels[leaf], *stored[leaf], sizes[leaf]) for leaf in ordered], metadata)
    filled = [leaf for leaf in ordered if sizes[leaf]]
    lengths = np.array([0, len(header), *(sizes[leaf] for leaf in filled)], dtype=np.uint64)
    offsets = np.cumsum(lengths, dtype=np.uint64)
    lazy = {leaf for leaf, _ in structure.lazy}
    return ShardPlan(
        file=name,
        header=header,
        size=int(offsets[-1]),
        offsets=offsets,
        leaves=np.array(filled, dtype=np.intp),
        lazy=np.array([piece for piece, leaf in enumerate(filled, 1) if leaf in lazy], dtype=np.intp),
    )


def _rows(structure: Structure, aliases: Aliases, labels: Sequence[str]) -> list[list[Any]]:
    """The skeleton's leaves: label, dtype, shape and, where there is more to say, a map of it."""
    rows: list[list[Any]] = [
        [label, NAME[dtype], shape]
        for label, dtype, shape in zip(labels, structure.dtypes, structure.shapes, strict=True)
    ]
    notes: dict[int, dict[str, Any]] = {}
    for leaf, (cls, grad) in enumerate(zip(structure.classes, structure.grads, strict=True)):
        if cls is not torch.Tensor or grad:
            note = notes.setdefault(leaf, {})
            if cls is not torch.Tensor:
                note["class"] = class_name(cls)
            if grad:
                note["grad"] = True
    for leaf, cls_name in structure.subclasses:
        notes.setdefault(leaf, {})["class"] = cls_name
    true_strides = dict(structure.lazy)
    for leaf, strides in structure.lazy:
        own = own_strides(structure.shapes[leaf], strides)
        if own is not None:
            notes.setdefault(leaf, {})["strides"] = own
    for leaf, tie in aliases.ties:
        note = notes.setdefault(leaf, {})
        note.pop("strides", None)
        note["of"] = tie.of
        if tie.same:
            note["same"] = True
        rows[leaf][0] = labels[tie.of]
        if tie.shape != structure.shapes[tie.of] or tie.strides != true_strides.get(tie.of, tie.strides):
            note["strides"] = tie.strides
        elif leaf in true_strides and tie.of not in true_strides:
            note["strides"] = tie.strides
    for leaf, place in aliases.places:
        notes.setdefault(leaf, {})["in"] = [place.group, place.offset, place.strides]
    for leaf, note in notes.items():
        rows[leaf].append(note)
    return rows
