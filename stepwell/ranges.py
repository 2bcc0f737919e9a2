"""The range planner: which blocks of a shard must be read for the bytes that are wanted.

Plain functions over numpy arrays. Wanted bytes come as runs (file offset, length, destination address);
they are rounded out to checksum blocks, because only a whole block can be verified, and blocks that touch
are merged into reads of at most one chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from stepwell.native import BLOCK_BYTES, PieceMap

Array = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True, slots=True)
class Read:
    """One read of a shard; `start` is a multiple of BLOCK_BYTES."""

    start: int
    length: int


def plan_reads(starts: Array, lengths: Array, size: int, chunk_bytes: int) -> list[Read]:
    """Reads that cover the runs [start, start + length) of a file of `size` bytes, in file order.

    Every read begins at a block border and ends at one or at the file's end, none is longer than
    `chunk_bytes` or crosses a multiple of it, and no block is read twice.
    """
    assert chunk_bytes % BLOCK_BYTES == 0
    keep = lengths > 0
    if not keep.any():
        return []
    first = (starts[keep] // np.uint64(BLOCK_BYTES)).astype(np.int64)
    last = ((starts[keep] + lengths[keep] - np.uint64(1)) // np.uint64(BLOCK_BYTES)).astype(np.int64)
    blocks = math.ceil(size / BLOCK_BYTES)
    assert int(last.max()) < blocks, "a run lies past the end of its shard"
    # how many runs cover each block, by counting where they begin and end
    steps = np.zeros(blocks + 1, dtype=np.int64)
    np.add.at(steps, first, 1)
    np.add.at(steps, last + 1, -1)
    wanted = np.flatnonzero(np.cumsum(steps[:-1]) > 0)
    per_chunk = chunk_bytes // BLOCK_BYTES
    border = np.flatnonzero((np.diff(wanted) > 1) | (wanted[1:] // per_chunk != wanted[:-1] // per_chunk)) + 1
    reads = []
    for group in np.split(wanted, border):
        start = int(group[0]) * BLOCK_BYTES
        reads.append(Read(start, min((int(group[-1]) + 1) * BLOCK_BYTES, size) - start))
    return reads


def piece_map(starts: Array, lengths: Array, addresses: Array, size: int, keep: object = None) -> PieceMap:
    """A piece map of the whole file from runs that do not overlap: what lies between is a hole."""
    used = np.flatnonzero(lengths > 0)
    order = used[np.argsort(starts[used], kind="stable")]
    starts, lengths, addresses = starts[order], lengths[order], addresses[order]
    ends = starts + lengths
    if len(starts) and (int(ends[-1]) > size or (starts[1:] < ends[:-1]).any()):
        raise ValueError("runs overlap or reach past the end of the file")
    # alternate hole, run, hole, run ... hole; empty pieces are allowed and cost nothing
    offsets = np.empty(2 * len(starts) + 2, dtype=np.uint64)
    offsets[0], offsets[-1] = 0, size
    offsets[1:-1:2], offsets[2:-1:2] = starts, ends
    targets = np.zeros(2 * len(starts) + 1, dtype=np.uint64)
    targets[1::2] = addresses
    return PieceMap(offsets, targets, keep)


def slice_runs(shape: Sequence[int], item_bytes: int, index: Sequence[slice]) -> tuple[list[int], Array, int]:
    """Where a slice of a row-major tensor lies.

    index: one slice of step 1 for each of the first dimensions. Returns the slice's shape, the offset in
    bytes of each contiguous run relative to the tensor's first byte (in the slice's own row-major order),
    and the length in bytes that all runs have.
    """
    bounds = [slice(*s.indices(n)) for s, n in zip(index, shape, strict=False)]
    bounds += [slice(0, n, 1) for n in shape[len(bounds) :]]
    if any(s.step != 1 for s in bounds):
        raise ValueError("only slices of step 1 can be read")
    part = [max(0, s.stop - s.start) for s in bounds]
    if 0 in part:
        return part, np.zeros(0, dtype=np.uint64), 0
    # dimensions from `inner` on are whole: they make one run together with the dimension before them
    inner = len(shape)
    while inner > 0 and part[inner - 1] == shape[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)
    strides = [item_bytes * math.prod(shape[i + 1 :]) for i in range(len(shape))]
    run_bytes = item_bytes * math.prod(part[inner:])
    offsets = np.array([bounds[inner].start * strides[inner] if shape else 0], dtype=np.uint64)
    for i in range(inner - 1, -1, -1):
        along = (np.arange(bounds[i].start, bounds[i].stop, dtype=np.uint64)) * np.uint64(strides[i])
        offsets = (along[:, None] + offsets[None, :]).ravel()
    return part, offsets, run_bytes
