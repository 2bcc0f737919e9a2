"""The benchmark of processes that load at once, on a small model."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest

from benchmarks.neighbours import measure, save_model, table

MODEL_BYTES = 64 << 20


@pytest.mark.slow
@pytest.mark.parametrize("way", ["restore", "load"])
def test_the_disk_is_read_once_for_all(way: str, tmp_path: Path) -> None:
    rows = save_model(tmp_path, MODEL_BYTES)
    memory = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir="/dev/shm"))
    try:
        record = measure(tmp_path, way, rows, 2, shared=True, memory=memory)
    finally:
        shutil.rmtree(memory)
    assert record["owners"] == 1 and record["model_bytes"] == MODEL_BYTES
    assert record["ratio"] <= 1.1  # 1.02 of a larger model: records and headers weigh more here
    assert f"| {way} | shared | 2 | {record['ratio']:.4f}" in table([record])
