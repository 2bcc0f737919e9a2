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

from stepwell.native._kernels import GATHER, PIECES_MAX, SCATTER, SOURCE

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
