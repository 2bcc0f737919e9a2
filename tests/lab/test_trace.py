"""Traces: recorded by a real store, read with distrust, and the same program in the lab."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell import tracing
from stepwell.errors import ConfigError
from stepwell.inspecting import inspect
from stepwell.jobs import Job, LocalStore
from stepwell.lab import from_files, simulate
from stepwell.lab.trace import duration_s, pauses
from stepwell.tracing import Closed, Event, Loaded, Prefetched, Restored, Saved, Start, chunks_of, read_trace
from tests.lab.helpers import HOST, MEMORY, NVME, SPEEDS, config


def state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((300_000,), value)}, "optimizer": {"m": torch.full((600_000,), value)}}


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    """The trace of a program that saves, prefetches and ends, and of one that restores and goes on."""
    file = tmp_path / "trace.jsonl"
    with stepwell.open(tmp_path / "run", trace=str(file)) as store:
        for step in (1, 2, 3):
            store.save(step, state(float(step)))
        store.prefetch(2).wait()
    with stepwell.open(tmp_path / "run", trace=str(file)) as store:
        store.restore({"model": state(0)["model"]})
        store.save(4, state(4))
    yield file


def test_a_trace_tells_what_the_program_did(recorded: Path) -> None:
    events = read_trace(recorded.read_bytes())
    assert [type(event) for event in events] == [
        Start, Saved, Saved, Saved, Prefetched, Closed, Restored, Saved, Closed
    ]  # fmt: skip
    saved = [event for event in events if isinstance(event, Saved)]
    assert [event.step for event in saved] == [1, 2, 3, 4]
    assert saved[0].parts.keys() == {"model", "optimizer"} and saved[0].parts["optimizer"] == 2_400_000
    restored = next(event for event in events if isinstance(event, Restored))
    assert (restored.step, restored.found, list(restored.parts)) == (None, 3, ["model"])
    assert sum(restored.sources.values()) >= 1_200_000 == restored.parts["model"]
    times = [event.t for event in events[1:] if not isinstance(event, Start)]
    assert times == sorted(times) and times[0] >= 0
    assert all(event.took > 0 for event in events if isinstance(event, Saved | Restored | Closed))


def test_the_lab_plays_a_recorded_trace(recorded: Path, tmp_path: Path) -> None:
    workload = from_files([recorded])
    outcome = simulate(config(tmp_path, HOST, NVME), workload, SPEEDS, memory_bytes=MEMORY)
    assert (outcome.saves.asked, outcome.saves.durable, outcome.restores.count) == (4, 4, 1)
    assert not outcome.trouble and not outcome.restores.failed
    assert outcome.seconds == pytest.approx(duration_s(workload.ranks[0]), rel=0.2, abs=0.1)


def test_the_variable_names_a_file_too_and_the_setting_counts_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.VARIABLE, str(tmp_path / "of-%p.jsonl"))
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, state(1))
    with stepwell.open(tmp_path / "run", trace=str(tmp_path / "own.jsonl")) as store:
        store.save(2, state(2))
    steps = {
        path.name: [event.step for event in read_trace(path.read_bytes()) if isinstance(event, Saved)]
        for path in tmp_path.glob("*.jsonl")
    }
    assert steps == {f"of-{os.getpid()}.jsonl": [1], "own.jsonl": [2]}


def test_loads_are_recorded_with_the_chunks_that_they_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = {"model": {name: torch.zeros(3 << 20) for name in "abcd"}}
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, big)
    monkeypatch.setenv(tracing.VARIABLE, str(tmp_path / "t.jsonl"))
    stepwell.load(tmp_path / "run")
    stepwell.load(tmp_path / "run", keys="model.c")
    recorder = tracing.recorder()
    assert recorder is not None
    recorder.flush()
    whole, some = (event for event in read_trace((tmp_path / "t.jsonl").read_bytes()) if isinstance(event, Loaded))
    assert whole.chunks is None and whole.ref == some.ref == f"{tmp_path / 'run'}@1"
    assert whole.files["model.safetensors"] >= 48 << 20
    assert some.chunks == {"model.safetensors": [(3, 2)]}  # bytes 24 MiB to 36 MiB, after the header
    workload = from_files([tmp_path / "t.jsonl"])
    outcome = simulate(config(tmp_path, HOST, NVME), workload, SPEEDS, memory_bytes=MEMORY)
    assert outcome.loads.count == 2 and not outcome.loads.failed
    assert outcome.loads.sources["nvme"] == whole.files["model.safetensors"]


def test_the_config_file_names_one_and_config_check_tells_which_counts(tmp_path: Path) -> None:
    chosen = config(tmp_path, NVME, head='trace = "own.jsonl"\n')
    assert chosen.settings == {"trace": "own.jsonl"}

    def told(path: str | Path, environ: dict[str, str]) -> tuple[Any, str]:
        values = {value.key: value for value in inspect(path, probe=False, environ=environ).values}
        return values["trace"].value, values["trace"].source

    assert told(chosen.file, {tracing.VARIABLE: "other"}) == ("own.jsonl", "file")
    plain = config(tmp_path, NVME, name="plain.toml").file
    assert told(plain, {tracing.VARIABLE: "other"}) == ("other", "environment")
    assert told(plain, {}) == (None, "default")


def test_each_rank_has_a_file_and_a_restart_appends(tmp_path: Path) -> None:
    file = tmp_path / "t.jsonl"
    for _ in range(2):
        for rank in (0, 1):
            recorder = tracing.Recorder(str(file))
            recorder.add(Closed(t=1.0, took=0.0, run="r"), Job(rank, 2, LocalStore(), None, 0))
            recorder.flush()
    files = sorted(tmp_path.iterdir())
    assert [path.name for path in files] == ["t.rank00000-of-00002.jsonl", "t.rank00001-of-00002.jsonl"]
    workload = from_files(files[::-1])
    assert [[type(event) for event in rank] for rank in workload.ranks] == [[Start, Closed, Start, Closed]] * 2
    assert [rank[0].rank for rank in workload.ranks if isinstance(rank[0], Start)] == [0, 1]


def test_a_trace_that_cannot_be_written_costs_no_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), stepwell.open(tmp_path / "run", trace=str(tmp_path / "no" / "t")) as store:
        store.save(1, state(1)).wait()
    assert "cannot be written" in caplog.text


def test_a_trace_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "TRACE_BYTES_MAX", 1000)
    recorder = tracing.Recorder(str(tmp_path / "t"))
    for _ in range(100):
        recorder.add(Closed(t=1.0, took=0.0, run="r"), Job(0, 1, LocalStore(), None, 0))
    recorder.flush()
    assert 900 < (tmp_path / "t").stat().st_size < 1200


def test_a_forked_child_records_nothing(tmp_path: Path) -> None:
    code = f"""
import os, stepwell, torch
store = stepwell.open({str(tmp_path / "run")!r}, trace={str(tmp_path / "t")!r})
store.save(1, {{"model": {{"w": torch.ones(3)}}}})
child = os.fork()
if not child:
    store._trace.prefetched([1], "host", __import__("stepwell.jobs").jobs.current_job())
    os._exit(0)
os.waitpid(child, 0)
store.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=100)
    assert [type(event) for event in read_trace((tmp_path / "t").read_bytes())] == [Start, Saved, Closed]


def lines(*events: dict[str, object]) -> bytes:
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


START = {"do": "start", "version": 1}
CLOSE = {"do": "close", "t": 3.0, "took": 1.0, "run": "a"}


def test_a_line_that_was_cut_off_at_the_end_is_left_out() -> None:
    assert len(read_trace(lines(START, CLOSE)[:-9])) == 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "does not begin with a start"),
        (b"{}\n", "line 1"),
        (lines(START, {"do": "dance"}, CLOSE), "line 2"),
        (lines(START, {"do": "save", "t": "soon"}, CLOSE), "line 2"),
        (lines(CLOSE), "does not begin with a start"),
        (lines({**START, "version": 9}), "version 9"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path: Path, data: bytes, says: str) -> None:
    file = tmp_path / "t"
    file.write_bytes(data)
    with pytest.raises(ConfigError, match=says):
        from_files([file])


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / name for name in "abc"]
    files[0].write_bytes(lines({**START, "world": 2}))
    files[1].write_bytes(lines({**START, "world": 2}))
    files[2].write_bytes(lines({**START, "rank": 1, "world": 4}))
    with pytest.raises(ConfigError, match="two files are of rank 0"):
        from_files(files[:2])
    with pytest.raises(ConfigError, match=r"\[2, 4\] ranks"):
        from_files([files[0], files[2]])
    assert "1 of 2 ranks" in from_files(files[:1]).notes[0]


def test_of_several_runs_the_one_that_saves_most_is_played(tmp_path: Path) -> None:
    save = {"do": "save", "t": 1.0, "took": 0.0, "step": 1, "parts": {"model": 5}}
    file = tmp_path / "t"
    file.write_bytes(lines(START, {**save, "run": "a"}, {**save, "run": "b"}, {**save, "run": "b", "step": 2}))
    workload = from_files([file])
    assert [event.step for event in workload.ranks[0] if isinstance(event, Saved)] == [1, 2]
    assert "only run b is replayed; left out: a" in workload.notes[0]


def test_pauses_are_the_programs_own_time() -> None:
    events: list[Event] = [
        Start(), Saved(t=5.0, took=2.0, run="r", step=1, parts={}), Saved(t=8.0, took=1.0, run="r", step=2, parts={}),
        Start(after=4.0), Loaded(t=3.0, took=1.0, ref="m", files={}),
    ]  # fmt: skip
    assert pauses(events) == [0.0, 5.0, 1.0, 4.0, 3.0]
    assert duration_s(events) == 13.0


def test_chunks_cover_spans() -> None:
    mib8 = 8 << 20
    assert chunks_of([(0, 5), (mib8 - 1, mib8 + 1), (5 * mib8, 6 * mib8)], 6 * mib8) == [(0, 2), (5, 1)]
    assert chunks_of([], 100) == []
