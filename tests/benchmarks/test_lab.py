"""The lab's benchmark on a tiny state, so that it cannot rot."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import lab

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_a_round_plays_what_it_has_recorded_and_cleans_up(tmp_path: Path) -> None:
    options = ["--mib", "16", "--saves", "2", "--rounds", "1", "--settings", "busy"]
    places = ["--dir", tmp_path / "disk", "--out", tmp_path / "out.jsonl"]
    command = [sys.executable, "-m", "benchmarks.lab", *options, *map(str, places)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert record["real"].keys() == record["lab"].keys() >= {"blocked", "save to nvme", "save to pfs", "restore"}
    assert "| busy | restore |" in done.stdout
    assert not list((tmp_path / "disk").iterdir())


def test_a_measure_that_is_off_is_marked() -> None:
    record = {"setting": "kept", "load": 0.5, "real": {"blocked": 0.01, "restore": 1.0, "save to pfs": 2.0}}
    lines = lab.table([{**record, "lab": {"blocked": 0.02, "restore": 1.1, "save to pfs": 3.0}}]).splitlines()
    verdicts = {line.split("|")[2].strip(): line.split("|")[6].strip() for line in lines if line.startswith("| kept")}
    assert verdicts == {"blocked": "not throttled", "restore": "good", "save to pfs": "**off**"}
