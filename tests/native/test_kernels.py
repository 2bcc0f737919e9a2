"""The kernels' source, run thread by thread on the CPU: they need nothing of each other, so that is what a GPU does."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.native._kernels import GATHER, MOVE, PIECES_MAX, RUNS_MAX, SCATTER, SOURCE

#: what the language gives its kernels, and the launch that the engine makes (see crossing.c)
HOST = f"""
struct place {{ unsigned x, y, z; }};
static place blockIdx, threadIdx, blockDim, gridDim;
struct alignas(16) uint4 {{ unsigned x, y, z, w; }};
#define __device__
#define __global__
{SOURCE}
extern "C" void launch(int scatter, unsigned count, const batch *pieces, u8 *stage) {{
    gridDim = {{count, 4, 1}};
    blockDim = {{256, 1, 1}};
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; blockIdx.y++)
            for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
                scatter ? {SCATTER}(*pieces, stage) : {GATHER}(*pieces, stage);
}}
extern "C" void launch_move(unsigned units, const moves *all) {{
    gridDim = {{units, 1, 1}};
    blockDim = {{256, 1, 1}};
    blockIdx.y = 0;
    for (blockIdx.x = 0; blockIdx.x < gridDim.x; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < blockDim.x; threadIdx.x++)
            {MOVE}(*all);
}}
"""
#: a misaligned access, which is an error on a GPU, traps
FLAGS = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
FLAGS += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]


class Batch(ctypes.Structure):
    _fields_ = [
        ("addresses", ctypes.c_uint64 * PIECES_MAX),
        ("offsets", ctypes.c_uint32 * PIECES_MAX),
        ("lengths", ctypes.c_uint32 * PIECES_MAX),
    ]


class Moves(ctypes.Structure):
    _fields_ = [
        ("to", ctypes.c_uint64 * RUNS_MAX),
        ("origin", ctypes.c_uint64 * RUNS_MAX),
        ("lengths", ctypes.c_uint32 * RUNS_MAX),
        ("ends", ctypes.c_uint32 * RUNS_MAX),
        ("count", ctypes.c_uint32),
        ("unit_bytes", ctypes.c_uint32),
    ]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder: Path = tmp_path_factory.mktemp("kernels")
    source, path = folder / "kernels.cc", folder / "kernels.so"
    source.write_text(HOST)
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    subprocess.run([*compiler, *FLAGS, "-o", str(path), str(source)], check=True)
    return ctypes.CDLL(str(path))


def test_a_launch_fits_its_parameters() -> None:
    """All devices take 4096 bytes: the batch, and the address of the stage."""
    assert ctypes.sizeof(Batch) + 8 <= 4096
    assert ctypes.sizeof(Moves) <= 4096


lengths = st.one_of(st.integers(0, 80), st.integers(1000, 1100), st.sampled_from([16_384, 65_535, 65_520]))


@given(
    pieces=st.lists(st.tuples(lengths, st.integers(0, 40)), min_size=1, max_size=20),
    scatter=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_alignment(kernels: ctypes.CDLL, pieces: list[tuple[int, int]], scatter: bool, seed: int) -> None:
    """Pieces anywhere in memory, back to back in the stage; not a byte beside them is touched."""
    rng = np.random.default_rng(seed)
    memory = rng.integers(0, 256, sum(length + gap for length, gap in pieces) + 64, dtype=np.uint8)
    stage = rng.integers(0, 256, sum(length for length, _ in pieces) + 64, dtype=np.uint8)
    expected_memory, expected_stage = memory.copy(), stage.copy()
    batch, at, offset = Batch(), 0, 0
    for index, (length, gap) in enumerate(pieces):
        at += gap
        batch.addresses[index], batch.offsets[index], batch.lengths[index] = memory.ctypes.data + at, offset, length
        if scatter:
            expected_memory[at : at + length] = stage[offset : offset + length]
        else:
            expected_stage[offset : offset + length] = memory[at : at + length]
        at, offset = at + length, offset + length
    kernels.launch(int(scatter), len(pieces), ctypes.byref(batch), ctypes.c_void_p(stage.ctypes.data))
    assert np.array_equal(memory, expected_memory) and np.array_equal(stage, expected_stage)


@given(
    runs=st.lists(
        st.tuples(lengths.filter(bool), st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=RUNS_MAX
    ),
    unit_bytes=st.sampled_from([64, 4096, 65_536]),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_alignment_of_runs(
    kernels: ctypes.CDLL, runs: list[tuple[int, int, int]], unit_bytes: int, seed: int
) -> None:
    """Both sides anywhere; a run is cut into units, whose last one is short."""
    rng = np.random.default_rng(seed)
    origin = rng.integers(0, 256, sum(length + gap for length, gap, _ in runs) + 64, dtype=np.uint8)
    target = rng.integers(0, 256, sum(length + gap for length, _, gap in runs) + 64, dtype=np.uint8)
    kept, expected = origin.copy(), target.copy()
    batch, at, to, units = Moves(count=len(runs), unit_bytes=unit_bytes), 0, 0, 0
    for index, (length, gap, target_gap) in enumerate(runs):
        at, to, units = at + gap, to + target_gap, units + -(-length // unit_bytes)
        batch.origin[index], batch.to[index] = origin.ctypes.data + at, target.ctypes.data + to
        batch.lengths[index], batch.ends[index] = length, units
        expected[to : to + length] = origin[at : at + length]
        at, to = at + length, to + length
    kernels.launch_move(units, ctypes.byref(batch))
    assert np.array_equal(target, expected) and np.array_equal(origin, kept)
