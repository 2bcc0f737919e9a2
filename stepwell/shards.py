"""Where in its shard each tensor lies.

Of stepwell's own shards the rank's record tells it: tensors lie back to back in the order that the record
lists, and their sizes follow from the skeleton. So a restore parses no safetensors header (of 20,000 tensors
that takes as long as reading some 200 MB), and a small read needs nothing but the record. Of foreign files
the header is all there is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from stepwell.errors import FormatError
from stepwell.format.records import ShardRecord
from stepwell.format.safetensors import Header
from stepwell.ranges import Array
from stepwell.reading import Crcs
from stepwell.state.skeleton import Leaf
from stepwell.tiers.base import ShardKey, Tier


@dataclass(frozen=True, slots=True)
class Layout:
    """The labels of a shard, and the file offsets where each one's bytes begin and end."""

    labels: dict[str, int]  # label -> its place in `begins` and `ends`
    begins: Array
    ends: Array
    data_start: int  # the bytes before it are the header

    def span(self, label: str) -> tuple[int, int]:
        at = self.labels[label]
        return int(self.begins[at]), int(self.ends[at])

    def overlapping(self, begin: int, end: int) -> list[str]:
        """The labels that have bytes in [begin, end)."""
        inside = np.flatnonzero((self.begins < np.uint64(end)) & (self.ends > np.uint64(begin)))
        names = list(self.labels)
        return [names[at] for at in inside]


@dataclass(slots=True)
class OpenShard:
    """A shard that can be read: where it is, and what is in it."""

    key: ShardKey
    size: int
    tiers: list[Tier]  # nearest first
    layout: Layout
    crcs: Crcs | None
    cached_as: Hashable = None  # how an arena knows it; None: by its key


def recorded_layout(shard: ShardRecord, leaves: Sequence[Leaf]) -> Layout:
    """From a rank's record; `leaves` are the skeleton's. Raises FormatError if they do not fit the file."""
    order = np.frombuffer(shard.leaves, dtype="<u4")
    if len(order) and int(order.max()) >= len(leaves):
        raise FormatError("the record lists tensors that its skeleton does not have", path=shard.file)
    inside = [leaves[at] for at in order.tolist()]
    sizes = [prod(leaf.shape) * leaf.dtype.itemsize for leaf in inside]
    ends = np.cumsum(np.array([shard.data_start, *sizes], dtype=np.uint64))
    labels = {leaf.label: at for at, leaf in enumerate(inside)}
    if int(ends[-1]) != shard.size or len(labels) != len(inside):
        raise FormatError("the record's tensors do not fit its shard", path=shard.file)
    return Layout(labels, ends[:-1], ends[1:], shard.data_start)


def header_layout(header: Header) -> Layout:
    """From the header of any safetensors file."""
    entries = header.entries.values()
    return Layout(
        {entry.label: at for at, entry in enumerate(entries)},
        np.array([entry.begin for entry in entries], dtype=np.uint64),
        np.array([entry.end for entry in entries], dtype=np.uint64),
        header.data_start,
    )
