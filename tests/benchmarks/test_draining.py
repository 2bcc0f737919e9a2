"""The drain's benchmark on a tiny state, so that it cannot rot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import draining, fio

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not fio.available(), reason="fio is not installed: `make bench` installs it")
def test_a_round_compares_saves_with_and_without_a_drain_and_cleans_up(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    options = ["--mib", "8", "--saves", "2", "--rounds", "1", "--pilots", "1", "--settings", "1"]
    places = ["--dir", tmp_path / "disk", "--tmpfs", tmp_path / "memory", "--out", tmp_path / "out.jsonl"]
    command = [sys.executable, "-m", "benchmarks.draining", *options, *map(str, places)]
    environment = {**os.environ, "STEPWELL_KEEP_CACHES": "1"}  # tests beside this one need theirs
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    speeds = [one["gb_s"] for one in record["without"]]
    assert record["ratio"]["tmpfs"] == pytest.approx(record["tmpfs"]["gb_s"] / (sum(speeds[:2]) / 2))
    assert record["ratio"]["disk"] == pytest.approx(record["disk"]["gb_s"] / (sum(speeds[1:]) / 2))
    assert "| tmpfs |" in done.stdout and "| disk |" in done.stdout
    assert not list((tmp_path / "disk").iterdir()) and not list((tmp_path / "memory").iterdir())


def test_the_bar_on_the_same_disk_leaves_the_drain_its_share() -> None:
    run = {"gb_s": 1.0, "drain_gb_s": 0.2, "busy": True}
    record = {"ceiling_gb_s": 2.0, "without": [run] * 3, "tmpfs": run, "disk": {**run, "busy": False}}
    table = draining.table([{**record, "ratio": {"tmpfs": 1.0, "disk": 1.0}}], rate=200e6)
    [memory, disk] = [line for line in table.splitlines() if line.startswith(("| tmpfs", "| disk"))]
    assert "| 0.950 |" in memory and f"| {0.95 * 0.9:.3f} |" in disk
    assert "in 1 runs the drain had ended" in table
