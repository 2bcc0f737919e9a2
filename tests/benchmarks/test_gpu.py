"""The GPU benchmarks on the CPU, with everything tiny, so that they are known to work before they see a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import __main__ as gpu
from benchmarks.gpu.bench import TINY, Bench
from benchmarks.gpu.device import Device
from benchmarks.gpu.disk import forget
from benchmarks.gpu.loop import block, percentile
from benchmarks.gpu.model import Training

ROOT = Path(__file__).resolve().parents[2]


def measured(tmp_path: Path, name: str) -> dict[str, dict[str, Any]]:
    """One measurement in this process: its records by name. It leaves nothing on the disk, and writes a table."""
    disk, out = tmp_path / "disk", tmp_path / "out.jsonl"
    assert gpu.main(["--dir", str(disk), "--out", str(out), "--only", name, "--small", "--device", "cpu"]) == 0
    assert not list(disk.iterdir())
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert all(record["measurement"] == name and record["device"] == "cpu" for record in found)
    records = {record["name"]: record for record in found if "name" in record}
    table = out.with_suffix(".md").read_text()
    assert all(f"| {name} | {what} |" in table for what in records)
    return records


def test_ceilings_are_those_of_the_best_ways_that_were_tried(tmp_path: Path) -> None:
    records = measured(tmp_path, "ceilings")
    assert records.keys() == {"plain d2h", "plain h2d", "plain d2d", "disk write", "disk read"}
    assert all(record["value"] > 0 for record in records.values())
    for name in ("disk write", "disk read"):
        tried = records[name]["tried"]
        assert f"{name.split()[1]} {records[name]['way']}" == max(tried, key=tried.get)


def test_snapshots_of_large_and_small_tensors_are_timed_between_plain_copies(tmp_path: Path) -> None:
    records = measured(tmp_path, "snapshot")
    for tensors, count, bar in (("large", 4, ">= 0.95"), ("small", 100, ">= 0.8")):
        for guard in ("without guard", "with guard"):
            record = records[f"{tensors} tensors: save() {guard} until copied / plain copy"]
            assert record["bar"] == bar and record["tensors"] == count
            assert len(record["samples"]) == TINY.saves and min(record["seconds"]) > 0
            plain = [size * 1e9 for size in record["plain_gb_s"]]
            rates = [record["bytes"] / seconds for seconds in record["seconds"]]
            assert record["samples"] == pytest.approx([rate / other for rate, other in zip(rates, plain, strict=True)])


@pytest.mark.slow
def test_a_training_loop_is_timed_with_and_without_checkpoints(tmp_path: Path) -> None:
    records = measured(tmp_path, "training")
    bars = {name: record["bar"] for name, record in records.items() if record["bar"]}
    assert bars == {
        "to host every iteration / no checkpoint, mean": "<= 1.015",
        "to host every iteration / no checkpoint, p99": "<= 1.05",
        "save() with guard, in the caller": "<= 1",
        "extra memory of the device, without the driver's tables": "<= 64",
        "to the disk at an interval / no checkpoint, mean": "<= 1.03",
        "short iteration: stall - (copy - forward - backward)": "<= 5",
        "no guard: save() / (bytes / plain copy)": "<= 1.1",
    }
    without, lazily = (records[f"iteration, {how}"] for how in ("no checkpoint", "to host, every iteration"))
    assert len(without["samples"]) == len(lazily["samples"]) == TINY.blocks * (TINY.block - 2)
    assert records["to host every iteration / no checkpoint, mean"]["value"] == lazily["value"] / without["value"]


def test_restores_are_checked_and_compared(tmp_path: Path) -> None:
    records = measured(tmp_path, "restore")
    bars = {name: record["bar"] for name, record in records.items()}
    assert bars == {
        "from host memory: restore / plain copy": ">= 0.8",
        "cold: restore's seconds / (bytes / the disk's rate)": "<= 1.08",
    }


@pytest.mark.slow
def test_a_killed_training_goes_on_bit_by_bit(tmp_path: Path) -> None:
    [record] = measured(tmp_path, "resume").values()
    assert record["value"] == 0
    assert 0 < record["resumed_from"] <= record["killed_at"] < record["steps"]


@pytest.mark.slow
def test_peers_are_measured_in_a_process_of_their_own(tmp_path: Path) -> None:
    """With another measurement beside them, so that there are two processes."""
    options = ["--only", "ceilings", "peers", "--small", "--device", "cpu"]
    places = ["--dir", tmp_path / "disk", "--out", tmp_path / "out.jsonl"]
    command = [sys.executable, "-m", "benchmarks.gpu", *options, *map(str, places)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert not [record for record in found if record.get("note", "").startswith(("failed", "cut short"))]
    blocked = {record["name"] for record in found if record.get("name", "").endswith(": blocked")}
    assert blocked >= {
        "stepwell, guard: blocked",
        "stepwell, no guard: blocked",
        "DCP async_save, thread, pinned and kept: blocked",
        "torch.save: blocked",
        "DCP async_save, process, pinned and kept: blocked",
        "DCP async_save, thread: blocked",
    }
    loads = {record["name"] for record in found if record.get("name", "").endswith(": cold load")}
    assert {name.split(",")[0] for name in loads} == {"stepwell", "DCP async_save", "torch.save: cold load"}
    assert "| compared | blocked: stepwell, no guard / DCP async_save, " in done.stdout


def test_what_is_deleted_meanwhile_need_not_be_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older checkpoint, while a newer one's files are made durable."""
    (tmp_path / "older").mkdir()
    for name in ("first", "second"):
        (tmp_path / "older" / name).write_bytes(b"x")
    fsync = os.fsync

    def deletes(descriptor: int) -> None:
        fsync(descriptor)
        shutil.rmtree(tmp_path / "older", ignore_errors=True)

    monkeypatch.setattr(os, "fsync", deletes)
    forget(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_what_fails_is_noted_and_the_rest_goes_on(tmp_path: Path) -> None:
    """Where no record can be written nothing is measured; the run says so by its code."""
    options = ["--only", "ceilings", "snapshot", "--small", "--device", "nonsense"]
    assert gpu.main(["--dir", str(tmp_path), "--out", str(tmp_path / "out.jsonl"), *options]) == 1
    notes = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [note["measurement"] for note in notes] == ["ceilings", "snapshot"]
    assert all(note["note"].startswith("cut short: it ended with") for note in notes)
    assert "- snapshot: cut short" in (tmp_path / "out.md").read_text()


def test_what_there_is_no_time_for_is_left_out_and_noted(tmp_path: Path) -> None:
    bench = Bench("training", Device("cpu"), tmp_path, tmp_path / "out.jsonl", TINY, until=time.time() + 50)
    assert bench.has_time_for(20, "this") and not bench.records
    assert not bench.has_time_for(100, "that")
    assert bench.records[0]["note"].startswith("left out: that; it needs about 100 s")


def test_a_block_saves_where_it_should_and_counts_what_it_should() -> None:
    training, saved = Training(Device("cpu"), TINY.shape, batch=2), []
    times = block(training, 6, lambda: saved.append(training.step), every=3, warm=2)
    assert saved == [1, 4]
    assert len(times.iterations) == len(times.passes) == 4 and len(times.in_caller) == 1
    assert all(0 < passes < whole for passes, whole in zip(times.passes, times.iterations, strict=True))
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0 and percentile([3.0, 1.0, 2.0], 99) == 3.0


def test_the_state_is_of_the_model_and_its_optimizer_and_its_tokens_depend_on_the_step_alone() -> None:
    one, other = (Training(Device("cpu"), TINY.shape, batch=2, seed=3) for _ in range(2))
    losses = []
    for training in (one, other):
        losses.append([float(training.forward_backward()) for _ in range(2)])
        training.update()
    assert losses[0] == losses[1]
    parameters = sum(parameter.nbytes for parameter in one.model.parameters())
    count = len(list(one.model.parameters()))
    assert one.state_bytes() == 3 * parameters + 4 * count  # AdamW's two moments, and a count of steps each
    assert sum(1 for _ in one.tensors()) == 4 * count
