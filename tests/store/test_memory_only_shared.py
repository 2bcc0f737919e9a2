"""Saves that no rule sends down, in shared memory: a killed process leaves the newest of them to the next one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.errors import RunBusy
from tests.store.helpers import eventually, sharing, steps
from tests.store.scripts import Scripts

SIZE = 2 << 20

#: saves steps up to the last, keeps some, and is killed; nothing but the first of five goes to the disk
TRAIN = """
import os, signal, torch
config, last, keep = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = stepwell.open(config, run="run")
assert store.tiers[0].owned
found = store.restore({"model": {"w": torch.zeros(2 << 20)}, "step": -1})
for step in range(found.step + 1 if found else 1, last + 1):
    save = store.save(step, {"model": {"w": torch.full((2 << 20,), float(step))}, "step": step}).wait("host")
    if step in (1, 5):
        save.wait("disk")
    else:
        assert save.held and not save.done("disk")
    if step == keep:
        store.pin(step).wait()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with sharing(tmp_path) as file:
        file.write_text(file.read_text() + "flush = { every_steps = 5 }\n")
        yield file


def state(step: int) -> dict[str, object]:
    return {"model": {"w": torch.full((SIZE,), float(step))}, "step": step}


def restored(store: stepwell.CheckpointStore, step: int | None = None) -> tuple[int, set[str]]:
    """The step that is restored, whole, and the tiers that it came from."""
    target = {"model": {"w": torch.zeros(SIZE)}, "step": -1}
    found = store.restore(target, step=step)
    assert found is not None and target["step"] == found.step
    assert bool((target["model"]["w"] == found.step).all())  # type: ignore[index]
    return found.step, set(found.sources)


def killed(scripts: Scripts, config: Path, last: int, pinned: int = 0) -> None:
    done = scripts.run("import sys, stepwell\n" + TRAIN, config, last, pinned)
    assert done.status == -signal.SIGKILL, done.err[-3000:]


def on_disk(config: Path) -> list[int]:
    return sorted(int(path.parent.name[5:14]) for path in config.parent.glob("run/step-*/manifest.json"))


def test_the_next_process_restores_it_and_its_first_save_gets_it_down(scripts: Scripts, config: Path) -> None:
    killed(scripts, config, 8)
    assert on_disk(config) == [1, 5]
    with stepwell.open(config, run="run") as store:
        assert restored(store) == (8, {"host"})
        assert on_disk(config) == [1, 5]  # who only restores has not taken the run over
        save = store.save(9, state(9)).wait("host")
        assert save.held
        eventually(lambda: 8 in steps(store, "disk"))
        assert restored(store) == (9, {"host"})
    assert {1, 5, 8, 9} <= set(on_disk(config)) <= {1, 5, 6, 7, 8, 9}  # 6 and 7 may still have been in memory, too


def test_a_process_that_is_killed_again_and_again_never_goes_back(scripts: Scripts, config: Path) -> None:
    for last in (3, 4, 7):
        killed(scripts, config, last)
        with stepwell.open(config, run="run", mode="r") as store:
            assert restored(store)[0] == last


@pytest.mark.parametrize("how", ["drain", "flush"])
def test_the_next_process_can_get_it_down_without_a_save(scripts: Scripts, config: Path, how: str) -> None:
    killed(scripts, config, 8)
    with stepwell.open(config, run="run") as store:
        assert restored(store) == (8, {"host"})
        if how == "drain":
            report = store.drain("60s")
            assert report.newest == {"disk": 8} and not report.cut
        else:
            store.flush()
        assert {1, 5, 8} <= set(on_disk(config))


def test_a_reader_finds_it_and_leaves_it_in_memory(scripts: Scripts, config: Path) -> None:
    killed(scripts, config, 7)
    for _ in range(2):
        with stepwell.open(config, run="run", mode="r") as store:
            assert restored(store) == (7, {"host"})
    assert on_disk(config) == [1, 5]


def test_what_was_pinned_is_left_beside_the_newest_and_gets_down_with_it(scripts: Scripts, config: Path) -> None:
    """Step 3 was pinned, so both it and step 8 are in memory alone."""
    killed(scripts, config, 8, pinned=3)
    with stepwell.open(config, run="run") as store:
        assert restored(store, 3) == (3, {"host"}) and restored(store) == (8, {"host"})
        store.save(9, state(9)).wait("host")
        eventually(lambda: {3, 8} <= set(steps(store, "disk")))
    assert {1, 3, 5, 8, 9} <= set(on_disk(config))


def test_after_a_rewind_what_was_left_behind_is_never_chosen(scripts: Scripts, config: Path) -> None:
    killed(scripts, config, 8)
    with stepwell.open(config, run="run") as store:
        assert restored(store, 5)[0] == 5
        store.save(6, state(6)).wait("host")
        eventually(lambda: 8 not in steps(store, "host"))
        assert restored(store) == (6, {"host"})
    with stepwell.open(config, run="run") as store:
        assert restored(store) == (6, {"host"}) and 6 in on_disk(config)


@pytest.mark.parametrize("how", ["close", "preempted"])
def test_it_gets_down_when_a_process_that_only_restored_it_ends(scripts: Scripts, config: Path, how: str) -> None:
    """As a job that was killed at its last step, and has nothing more to train."""
    killed(scripts, config, 8)
    with stepwell.open(config, run="run") as store:
        assert restored(store) == (8, {"host"})
        if how == "preempted":
            store.ending.preemption.handle((signal.SIGUSR1,), "60s")
            store.ending.preemption.note(signal.SIGUSR1)
    assert {1, 5, 8} <= set(on_disk(config))
    with stepwell.open(config, run="run") as store:  # nothing is left to be brought down, and nobody takes the run
        epochs = sorted(config.parent.glob("run/epochs/*"))
        assert restored(store)[0] == 8
    assert sorted(config.parent.glob("run/epochs/*")) == epochs


def test_if_another_process_has_the_run_it_stays_and_closing_says_so(
    scripts: Scripts, config: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(scripts, config, 8)
    with stepwell.open(config, run="run") as store:
        assert restored(store) == (8, {"host"})

        async def busy(job: object) -> int:
            raise RunBusy("another writer holds this run")

        monkeypatch.setattr(store._writer.owner, "take", busy)
    assert on_disk(config) == [1, 5] and "what only memory has of run run stays there" in caplog.text
