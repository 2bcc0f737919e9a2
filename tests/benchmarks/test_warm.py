"""The benchmark of restores from shared memory, on a small state."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import fio, warm


@pytest.mark.slow
@pytest.mark.skipif(not fio.available(), reason="fio is not installed")
def test_a_killed_process_is_restored_from_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEPWELL_KEEP_CACHES", "1")
    [record] = warm.run(tmp_path, 32 << 20, 1)
    assert record["bytes"] == 32 << 20 and record["ratio"] > 0
    assert f"| {record['gb_s']:.2f} |" in warm.table([record])
