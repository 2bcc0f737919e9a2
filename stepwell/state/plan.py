"""From a state's structure to its shard files: names, order, headers, offsets. No pointer is in a plan.

Planning 20,000 tensors costs more than copying them, so plans are kept by structure and used again as long as
names, dtypes, shapes, placement and ties stay the same.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
import torch

from stepwell.format.collecting import paused
from stepwell.format.safetensors import encode_header
from stepwell.state.alias import Aliases, Array, Places, Tie, own_strides
from stepwell.state.classes import class_name
from stepwell.state.dtypes import NAME, STORED, stored_as
from stepwell.state.skeleton import VERSION
from stepwell.state.structure import Structure
from stepwell.state.whereabouts import HOST

#: parts below this many bytes share the shard "extra"
EXTRA_BYTES = 1 << 20
#: parts whose header would be larger are split; well below the format's limit, readers parse headers whole
HEADER_SPLIT_BYTES = 64_000_000
#: a file's note of ties is left out beyond this: headers are limited, and the record has every tie
TIES_BYTES_MAX = 16_000_000
MODEL = "model"
T = TypeVar("T")
Leaves = Places
_STEM = re.compile(r"[A-Za-z0-9_-]{1,64}")
_TAKEN = re.compile(r"extra|.*-\d{5,}-of-\d{5,}", re.IGNORECASE)


class Kinds(NamedTuple):
    """Of a range of a file: the numbers of its pieces, those of them that must be made first, and where they lie."""

    pieces: slice
    lazy: frozenset[int]
    gpus: tuple[int, ...]
    on_host: bool  # some bytes are in no GPU's memory


@dataclass(frozen=True, eq=False)
class ShardPlan:
    """One file: its header, its length, and where each piece begins. Piece 0 is the header."""

    file: str
    header: bytes
    size: int
    offsets: Array
    leaves: Leaves  # leaf of each piece but the first
    lazy: Leaves  # pieces whose leaf must be made contiguous, or fetched, first
    device: Leaves  # pieces in a GPU's memory
    gpus: Leaves  # the GPU of each of those
    _kinds: dict[tuple[int, int], Kinds] = field(default_factory=dict)  # ranges that were asked for: chunks, mostly

    def kinds(self, start: int, stop: int) -> Kinds:
        """What kinds of memory the bytes [start, stop) of the file lie in."""
        found = self._kinds.get((start, stop))
        if found is None:
            pieces = self.pieces_in(start, stop)
            gpu = slice(*np.searchsorted(self.device, (pieces.start, pieces.stop)).tolist())
            lazy = slice(*np.searchsorted(self.lazy, (pieces.start, pieces.stop)).tolist())
            found = self._kinds[start, stop] = Kinds(
                pieces=pieces,
                lazy=frozenset(self.lazy[lazy].tolist()),
                gpus=tuple(np.unique(self.gpus[gpu]).tolist()),
                on_host=pieces.stop - pieces.start > gpu.stop - gpu.start,
            )
        return found

    def pieces_in(self, start: int, stop: int) -> slice:
        """The numbers of the pieces that have bytes in [start, stop) of the file."""
        if start >= stop:
            return slice(0, 0)
        first = int(np.searchsorted(self.offsets, np.uint64(start), side="right")) - 1
        return slice(first, int(np.searchsorted(self.offsets, np.uint64(stop), side="left")))

    def leaves_in(self, start: int, stop: int) -> Leaves:
        """The leaves that have bytes in [start, stop) of the file."""
        pieces = self.pieces_in(start, stop)
        return self.leaves[max(pieces.start - 1, 0) : max(pieces.stop - 1, 0)]


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything about a checkpoint of this structure, except plain values and addresses."""

    structure: Structure
    aliases: Aliases
    labels: list[str]
    shards: list[ShardPlan]
    parts: dict[str, list[str]]
    part_bytes: dict[str, int]  # a tie counts where it is stored
    sidecars: dict[str, bytes]
    nbytes: int
    clones: list[int]  # stored leaves that are cloned on their GPU, because they are not contiguous there

    @property
    def head(self) -> dict[str, Any]:
        """The skeleton without its table of leaves and its tree."""
        return {
            "version": VERSION,
            "rank": self.structure.rank,
            "world": self.structure.world,
            "parts": [span.part for span in self.structure.spans],
            "groups": list(self.aliases.groups),
        }

    @property
    def rows(self) -> list[list[Any]]:
        """The skeleton's table of leaves."""
        return _rows(self.structure, self.aliases, self.labels)

    @cached_property
    def gpus(self) -> list[int]:
        """The GPUs whose memory is copied."""
        return sorted({int(gpu) for shard in self.shards for gpu in shard.gpus})

    @cached_property
    def encoded_rows(self) -> msgspec.Raw:
        """`rows` as JSON. Made when first asked for: by then bytes are moving already, and nobody waits for it."""
        with paused():
            return msgspec.Raw(msgspec.json.encode(self.rows))


def make_plan(structure: Structure, aliases: Aliases) -> Plan:
    """Plans the shards."""
    tied = dict(aliases.ties)
    table = _Table(structure, _labels(structure, tied))
    strides = dict(structure.lazy)
    same = {leaf: tie.of for leaf, tie in aliases.ties if not _seen_otherwise(structure, strides, leaf, tie)}
    sizes = structure.sizes
    file_of = np.zeros(len(sizes), np.intp)
    files: list[str] = []
    shards: list[ShardPlan] = []
    sidecars: dict[str, bytes] = {}
    for part, stem, leaves in _groups(structure, tied):
        chunks = _split(leaves, table, structure.header_split_bytes)
        for number, chunk in enumerate(chunks, 1):
            file_of[chunk] = len(files)
            files.append(_file_name(stem, number, len(chunks), structure.rank, structure.world))
            shards.append(_shard(files[-1], part, chunk, table, structure, same))
        if len(chunks) > 1 and part == MODEL and structure.world == 1:
            weights = {table.labels[leaf]: files[file_of[leaf]] for leaf in leaves.tolist()}
            index = {"metadata": {"total_size": int(sizes[leaves].sum())}, "weight_map": weights}
            sidecars["model.safetensors.index.json"] = msgspec.json.format(msgspec.json.encode(index))
    owners = np.arange(len(sizes))
    for leaf, tie in tied.items():
        owners[leaf] = tie.of
    own = sizes.copy()
    own[list(tied)] = 0
    return Plan(
        structure=structure,
        aliases=aliases,
        labels=table.labels,
        shards=shards,
        parts={
            span.part: [files[number] for number in _in_order(file_of[owners[span.first : span.stop]])]
            for span in structure.spans
        },
        part_bytes={span.part: int(own[span.first : span.stop].sum()) for span in structure.spans},
        sidecars=sidecars,
        nbytes=sum(shard.size for shard in shards),
        clones=[leaf for leaf, _ in structure.lazy if structure.gpus[leaf] != HOST and own[leaf]],
    )


def _in_order(numbers: Leaves) -> list[int]:
    """Each number once, in the order of their first places."""
    found, first = np.unique(numbers, return_index=True)
    return [int(found[at]) for at in np.argsort(first)]


def _groups(structure: Structure, tied: Mapping[int, Tie]) -> list[tuple[str, str, Leaves]]:
    """(part, file stem, leaves) of each set of files; small parts together in "extra"."""
    out: list[tuple[str, str, Leaves]] = []
    extra: list[Leaves] = []
    stems: set[str] = set()
    stored = np.ones(len(structure.names), np.bool_)
    stored[list(tied)] = False
    for span in structure.spans:
        leaves = span.first + np.flatnonzero(stored[span.first : span.stop])
        if not leaves.size:
            continue
        if span.part != MODEL and structure.sizes[leaves].sum() < EXTRA_BYTES:
            extra.append(leaves)
            continue
        stem = file_stem(span.part)
        if stem.lower() in stems:  # file systems that ignore case
            stem = _digested(span.part)
        stems.add(stem.lower())
        out.append((span.part, stem, leaves))
    return [*out, ("extra", "extra", np.concatenate(extra))] if extra else out


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


def _labels(structure: Structure, tied: Mapping[int, Tie]) -> list[str]:
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


def _unique(labels: list[str], tied: Mapping[int, Tie]) -> list[str]:
    if not all(map(str.isascii, labels)):
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


class _Table:
    """What headers say of each leaf, by columns: rows of 20,000 leaves would cost more than all else here."""

    def __init__(self, structure: Structure, labels: list[str]) -> None:
        self.labels = labels
        self.dtypes: list[str] = list(map(STORED.get, structure.dtypes))  # type: ignore[arg-type]  # mended below
        self.shapes: list[tuple[int, ...]] = list(structure.shapes)
        if None in self.dtypes:
            for leaf, dtype in enumerate(structure.dtypes):
                self.dtypes[leaf], self.shapes[leaf] = stored_as(dtype, structure.shapes[leaf])
        longest, deepest = max(map(len, labels), default=0), max(map(len, self.shapes), default=0)
        self.row_bytes_max = 13 * longest + 48 * deepest + 256  # of a header; escapes are long


def _picked(column: Sequence[T], leaves: Leaves) -> Sequence[T]:
    if len(leaves) == 1:
        return [column[leaves[0]]]
    picked: Sequence[T] = itemgetter(*leaves.tolist())(column)
    return picked


def _split(leaves: Leaves, table: _Table, limit: int) -> list[Leaves]:
    """Runs of leaves, in the state's order, each with a header below the limit."""
    if table.row_bytes_max * len(leaves) <= limit:
        return [leaves]
    starts = [0]
    room = limit
    for at, leaf in enumerate(leaves.tolist()):
        text = msgspec.json.encode(table.labels[leaf])  # once as a key, once more escaped inside __metadata__
        need = len(text) + len(msgspec.json.encode(text.decode())) + 48 * len(table.shapes[leaf]) + 128
        if need > room and at > starts[-1]:
            starts.append(at)
            room = limit
        room -= need
    return np.split(leaves, starts[1:])


def _metadata(
    part: str, labels: Sequence[str], shapes: Sequence[Sequence[int]], ties: dict[str, str]
) -> dict[str, str]:
    """What a file says about itself, for readers that have no record of it."""
    zeros = [{"saved_offsets": [0] * dimensions} for dimensions in range(65)]  # shared: whole tensors begin at zero
    offsets_of = dict(zip(labels, map(zeros.__getitem__, map(len, shapes)), strict=True))
    metadata = {
        "format": "pt",
        "stepwell": "1",
        "part": part.encode("utf-8", "backslashreplace").decode(),
        "DCP_SHARDING_INFO": msgspec.json.encode(offsets_of).decode(),
    }
    encoded = msgspec.json.encode(ties)
    if ties and len(encoded) <= TIES_BYTES_MAX:
        metadata["ties"] = encoded.decode()
    return metadata


def _shard(
    name: str, part: str, leaves: Leaves, table: _Table, structure: Structure, same: dict[int, int]
) -> ShardPlan:
    """same: leaf -> the leaf that it is another name for, no more."""
    widest_first = np.argsort(-structure.widths[leaves].astype(np.int64), kind="stable")  # then the state's order
    leaves = leaves[widest_first]
    labels, shapes = _picked(table.labels, leaves), _picked(table.shapes, leaves)
    sizes = structure.sizes[leaves]
    here = set(leaves.tolist()) if same else ()
    ties = {table.labels[leaf]: table.labels[of] for leaf, of in same.items() if of in here}
    entries = zip(labels, _picked(table.dtypes, leaves), shapes, sizes.tolist(), strict=True)
    header = encode_header(list(entries), _metadata(part, labels, shapes, ties))
    filled = leaves[sizes > 0]
    lengths = np.concatenate((np.array([0, len(header)], np.uint64), structure.sizes[filled]))
    offsets = np.cumsum(lengths, dtype=np.uint64)
    lazy = np.array([leaf for leaf, _ in structure.lazy], np.intp)
    gpus = structure.gpus[filled]
    return ShardPlan(
        file=name,
        header=header,
        size=int(offsets[-1]),
        offsets=offsets,
        leaves=filled,
        lazy=1 + np.flatnonzero(np.isin(filled, lazy) & (gpus == HOST)),
        device=1 + np.flatnonzero(gpus != HOST),
        gpus=gpus[gpus != HOST],
    )


def _seen_otherwise(structure: Structure, strides: Mapping[int, tuple[int, ...]], leaf: int, tie: Tie) -> bool:
    """The leaf has another shape or other strides than the one whose memory it shares. strides: of lazy leaves."""
    if tie.shape != structure.shapes[tie.of] or tie.strides != strides.get(tie.of, tie.strides):
        return True
    return leaf in strides and tie.of not in strides


def _rows(structure: Structure, aliases: Aliases, labels: Sequence[str]) -> list[list[Any]]:
    """The skeleton's leaves: label, dtype, shape and, where there is more to say, a map of it."""
    names = map(NAME.__getitem__, structure.dtypes)
    rows: list[list[Any]] = list(map(list, zip(labels, names, structure.shapes, strict=True)))
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
        if _seen_otherwise(structure, true_strides, leaf, tie):
            note["strides"] = tie.strides
    for leaf, place in aliases.places:
        notes.setdefault(leaf, {})["in"] = [place.group, place.offset, place.strides]
    for leaf, note in notes.items():
        rows[leaf].append(note)
    return rows
