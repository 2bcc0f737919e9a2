"""The benchmarks on tiny sizes, so that they cannot rot."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ceiling, fio, peers, report
from benchmarks.slice_read import measure_slice

ROOT = Path(__file__).resolve().parents[2]

needs_fio = pytest.mark.skipif(not fio.available(), reason="fio is not installed: `make bench` installs it")
needs_harness = pytest.mark.skipif(not peers.available(), reason="the peers' harness is not there: set STEPWELL_PEERS")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="the harness runs as root only")


def run(*arguments: str | Path) -> str:
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "STEPWELL_KEEP_CACHES": "1"}  # tests beside this one need theirs
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@needs_fio
@needs_harness
@needs_root
def test_the_ceiling_measures_tiny_states(tmp_path: Path) -> None:
    out, choice, table = tmp_path / "out.jsonl", tmp_path / "choice.json", tmp_path / "table.md"
    options: list[str | Path] = [
        "--dir",
        tmp_path,
        "--out",
        out,
        "--choice",
        choice,
        "--table",
        table,
        "--workloads",
        "tiny",
    ]
    options += [
        "--pilots",
        "1",
        "--pilot-mib",
        "8",
        "--settings",
        "2",
        "--rounds",
        "1",
        "--repeats",
        "0",
        "--slice-mib",
        "8",
    ]
    run("-m", "benchmarks.ceiling", *options)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert {record["phase"] for record in records} == {"save", "restore", "slice"}
    for record in records[:-1]:
        middle = sum(record["ratio_fio"]) / 2
        assert record["ratio"] == pytest.approx(record["product"]["gb_s"] / middle)
    assert records[-1]["read_bytes"] < records[-1]["tensor_bytes"]
    assert "tiny save" in table.read_text()
    assert json.loads(choice.read_text()).keys() == {"write", "read"}
    assert not list(tmp_path.glob("ceiling-*"))  # it cleans up


@pytest.mark.slow
@needs_harness
@needs_root
def test_stepwell_passes_the_harness_gate_on_tiny_states(tmp_path: Path) -> None:
    """The state changes as soon as save() has returned, and what is restored must be what it was before."""
    out = tmp_path / "runs.jsonl"
    options: list[str | Path] = ["--dir", tmp_path / "scratch", "--out", out, "--peers", "stepwell"]
    options += ["--workloads", "tiny", "tiny-rank-2"]
    options += ["--rounds", "1", "--no-fio", "--quiet-wait", "0", "--retries", "0", "--verify", "--mutate"]
    run(ROOT / "benchmarks" / "peers" / "run.py", "measure", *options)
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record.get("error") for record in records] == [None] * 4
    assert [record["correct"] for record in records if record["phase"] == "restore"] == [True, True]


def test_a_slice_reads_little_of_a_large_tensor(tmp_path: Path) -> None:
    found = measure_slice(tmp_path, 64 << 20)
    assert found["read_bytes"] <= (2 << 20) + found["record_bytes"]


def test_rounds_whose_fio_runs_differ_are_repeated() -> None:
    speeds = iter([1.0, 2.0, 2.0, 1.0, 1.1, 1.05, 1.0])  # the last of a round is the first of the next

    def run_fio() -> dict[str, float]:
        return {"gb_s": next(speeds)}

    done = list(ceiling.rounds("save", 1, 2, run_fio, lambda: {"gb_s": 0.9}))
    assert [record["ratio_calm"] for record in done] == [False, True]
    assert done[1]["ratio"] == pytest.approx(0.9 / 1.05)
    assert done[1]["control"] == pytest.approx(1.05 / 1.05)


def test_rounds_come_to_an_end_on_a_busy_machine() -> None:
    speeds = iter([1.0, 2.0] * 100)
    done = list(ceiling.rounds("save", 2, 1, lambda: {"gb_s": next(speeds)}, lambda: {"gb_s": 1.0}))
    assert len(done) == 2 * (1 + 1)
    assert not any(record["ratio_calm"] for record in done)


def test_the_table_shows_medians_of_calm_rounds_only() -> None:
    def record(ratio: float, calm: bool) -> dict[str, object]:
        product = {"gb_s": ratio, "bytes": 10**9, "cpu_s": 0.5, "blocking_s": 0.1, "files": 3, "files_bytes": 10**9}
        figures = {"ratio": ratio, "ratio_calm": calm, "control": 1.0, "control_calm": calm}
        return {"workload": "w", "phase": "save", "setting": "s", "product": product, **figures}

    [row] = [line for line in report.table([record(0.9, True), record(0.1, False)]).splitlines() if "w save" in line]
    assert "| 0.900 |" in row
    assert "| 2, 1 |" in row


@pytest.mark.parametrize("name", ["ceiling", "draining", "eviction", "gpu.__main__", "lab"])
def test_that_lines_cannot_go_to_a_folder_is_said_at_once(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        importlib.import_module(f"benchmarks.{name}").main(["--out", str(tmp_path)])
    assert f"argument --out: {tmp_path} is a folder; give a file" in capsys.readouterr().err
