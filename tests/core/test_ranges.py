"""The range planner against plain sets of bytes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stepwell.native import BLOCK_BYTES
from stepwell.ranges import piece_map, plan_reads, slice_runs

CHUNK = 8 * BLOCK_BYTES


def u64(values: list[int]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    return np.array(values, dtype=np.uint64)


@st.composite
def runs(draw: st.DrawFn) -> tuple[list[int], list[int], int]:
    size = draw(st.integers(1, 40 * BLOCK_BYTES))
    count = draw(st.integers(0, 8))
    starts, lengths = [], []
    for _ in range(count):
        start = draw(st.integers(0, size))
        starts.append(start)
        lengths.append(draw(st.integers(0, min(size - start, 3 * BLOCK_BYTES))))
    return starts, lengths, size


@given(runs())
def test_reads_cover_exactly_the_blocks_that_are_needed(case: tuple[list[int], list[int], int]) -> None:
    starts, lengths, size = case
    reads = plan_reads(u64(starts), u64(lengths), size, CHUNK)
    needed = {
        block
        for start, length in zip(starts, lengths, strict=True)
        if length
        for block in range(start // BLOCK_BYTES, math.ceil((start + length) / BLOCK_BYTES))
    }
    read: list[int] = []
    for r in reads:
        assert r.start % BLOCK_BYTES == 0 and 0 < r.length <= CHUNK
        assert r.start // CHUNK == (r.start + r.length - 1) // CHUNK
        assert (r.start + r.length) % BLOCK_BYTES == 0 or r.start + r.length == size
        read += range(r.start // BLOCK_BYTES, math.ceil((r.start + r.length) / BLOCK_BYTES))
    assert read == sorted(needed)


def test_a_slice_of_a_mebibyte_reads_at_most_two_blocks() -> None:
    for offset in (0, 1, 5 * BLOCK_BYTES - 1, BLOCK_BYTES // 2):
        reads = plan_reads(u64([offset]), u64([BLOCK_BYTES]), 1 << 30, CHUNK)
        assert sum(r.length for r in reads) <= 2 * BLOCK_BYTES


def test_runs_that_overlap_are_refused() -> None:
    with pytest.raises(ValueError, match="overlap"):
        piece_map(u64([0, 5]), u64([10, 10]), u64([4096, 8192]), 100)
    with pytest.raises(ValueError, match="past the end"):
        piece_map(u64([95]), u64([10]), u64([4096]), 100)


@given(st.data())
def test_slices_lie_where_torch_says(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    index = []
    for n in shape[: data.draw(st.integers(0, len(shape)))]:
        start = data.draw(st.integers(-n - 1, n + 1))
        index.append(slice(start, data.draw(st.integers(-n - 1, n + 1))))
    part, offsets, length = slice_runs(shape, 4, index)
    raw = tensor.numpy().tobytes()
    got = b"".join(raw[o : o + length] for o in offsets.tolist()) if length else b""
    wanted = tensor[tuple(index)]
    assert list(wanted.shape) == part
    assert got == (wanted.contiguous().numpy().tobytes() if wanted.numel() else b"")


def test_whole_rows_are_one_run() -> None:
    part, offsets, length = slice_runs([100, 10, 4], 2, [slice(10, 20)])
    assert (part, offsets.tolist(), length) == ([10, 10, 4], [10 * 40 * 2], 10 * 40 * 2)


def test_steps_other_than_one_are_refused() -> None:
    with pytest.raises(ValueError, match="step 1"):
        slice_runs([10], 4, [slice(0, 10, 2)])
