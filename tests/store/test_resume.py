"""`open(resume=…)`: whether a run must have checkpoints, or must have none. And rewinds by hand, seen by stores."""

from __future__ import annotations

import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Literal

import pytest
import torch

import stepwell
from stepwell import epochs
from stepwell.errors import CheckpointNotFound, ConfigError, RunBusy, StepExists, TierUnavailable
from stepwell.rewinding import rewind
from stepwell.tiers.base import Found
from stepwell.tiers.memory import MemoryTier
from tests.store.scripts import ROOT, Scripts


def state(value: float = 0.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((1000,), float(value))}}


def saved(folder: Path, *steps: int) -> Path:
    with stepwell.open(folder) as store:
        for step in steps:
            store.save(step, state(step)).wait()
    return folder


def config(tmp_path: Path) -> Path:
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir(exist_ok=True)
    file = tmp_path / "tiers.toml"
    file.write_text(
        "".join(f'[[tier]]\nname = "{name}"\ndriver = "file"\npath = "{tmp_path / name}"\n' for name in ("nvme", "pfs"))
    )
    return file


# -- resume --------------------------------------------------------------------------------


def test_must_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoint.*run run.*resume='allow'") as caught:
        stepwell.open(tmp_path / "run", resume="must")
    assert caught.value.where["path"] == str(tmp_path / "run") and not (tmp_path / "run").exists()
    saved(tmp_path / "run", 1)
    modes: tuple[Literal["w", "r"], ...] = ("w", "r")
    for mode in modes:
        with stepwell.open(tmp_path / "run", mode=mode, resume="must") as store:
            assert store.restore(state()) is not None


def test_never_refuses_a_run_that_has_one(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run", resume="never") as store:
        store.save(7, state()).wait()
    with pytest.raises(ConfigError, match="up to step 7.*run of its own"):
        stepwell.open(tmp_path / "run", resume="never")
    with stepwell.open(tmp_path / "run") as store:  # the refused one left nothing behind
        store.save(8, state()).wait()


def test_resume_with_a_config_file_looks_at_every_tier(tmp_path: Path) -> None:
    file = config(tmp_path)
    with pytest.raises(CheckpointNotFound, match="resume='must'"):
        stepwell.open(file, run="a", resume="must")
    with stepwell.open(file, run="a", policies=[], resume="never") as store:
        store.save(1, state()).wait("nvme")
    stepwell.open(file, run="a", resume="must").close()
    with pytest.raises(ConfigError, match="resume='never'"):
        stepwell.open(file, run="a", resume="never")


class Stuck(MemoryTier):
    """Cannot be listed."""

    def scan(self, run: str) -> AsyncIterator[Found]:
        raise TierUnavailable("it hangs")


@pytest.mark.parametrize("resume", ["must", "never"])
def test_a_tier_that_does_not_answer_may_have_one(resume: str) -> None:
    with pytest.raises(TierUnavailable, match="far: it hangs"):
        stepwell.open(tiers=[MemoryTier("near"), Stuck("far")], run="run", resume=resume)  # type: ignore[arg-type]


def test_what_resume_can_be() -> None:
    with pytest.raises(ConfigError, match="'allow', 'must' or 'never'"):
        stepwell.open("ckpts/run", resume="maybe")  # type: ignore[arg-type]


@pytest.mark.parametrize("resume", ["allow", "must"])
def test_saving_at_or_below_a_step_that_is_there_is_refused(tmp_path: Path, resume: str) -> None:
    saved(tmp_path / "run", 5)
    with stepwell.open(tmp_path / "run", resume=resume) as store:  # type: ignore[arg-type]
        for step in (4, 5):
            with pytest.raises(StepExists):
                store.save(step, state())
        store.save(6, state()).wait()


# -- rewinds by hand -----------------------------------------------------------------------


def test_a_rewind_by_hand_holds_without_a_save(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", 1, 2, 3, 4)
    done = rewind(f"{run}@2")
    assert (done.run, done.step, [step for step, _ in done.abandoned]) == ("run", 2, [3, 4])
    for _ in range(2):  # whoever opens it, and however often nothing is saved
        with stepwell.open(run) as store:
            target = state()
            found = store.restore(target)
            assert found is not None and found.step == 2 and not found.skipped
            assert [c.step for c in store.checkpoints()] == [1, 2]
            assert [c.step for c in store.checkpoints(abandoned=True) if c.abandoned] == [3, 4]
    assert stepwell.load(f"{run}@4")["model"]["w"][0] == 4.0
    with stepwell.open(run) as store:
        with pytest.raises(StepExists):
            store.save(2, state())
        store.save(3, state(33)).wait()
        newest = store.latest()
        assert newest is not None and newest.timeline == 1 and newest.parent == done.name
    rewind(f"{run}@1")
    with stepwell.open(run) as store:
        assert [c.step for c in store.checkpoints()] == [1]
        store.save(2, state(22)).wait()
        newest = store.latest()
        assert newest is not None and newest.timeline == 2
    with stepwell.open(run, mode="r") as reader:
        assert [(c.step, c.timeline) for c in reader.checkpoints()] == [(1, 0), (2, 2)]
        assert len(reader.checkpoints(abandoned=True)) == 6


def test_an_open_reader_sees_a_rewind_by_hand(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", 1, 2)
    with stepwell.open(run, mode="r") as reader:
        assert (found := reader.restore(state())) is not None and found.step == 2
        rewind(f"{run}@1")
        assert (found := reader.restore(state())) is not None and found.step == 1


def test_a_rewind_of_a_run_on_several_tiers_counts_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config(tmp_path)
    with stepwell.open(file, run="a") as store:
        for step in (1, 2):
            store.save(step, state(step)).wait("pfs")
    with stepwell.open(file, run="a", policies=[]) as store:
        store.save(3, state(3)).wait("nvme")
    with pytest.raises(ConfigError, match="last tier"):
        rewind(f"{tmp_path / 'nvme' / 'a'}@1")
    monkeypatch.setenv("STEPWELL_CONFIG", str(file))
    assert [step for step, _ in rewind("a@1").abandoned] == [2, 3]
    with stepwell.open(file, run="a") as store:
        assert (found := store.restore(state())) is not None and found.step == 1
        store.save(2, state(22)).wait("pfs")
    with stepwell.open(file, run="a", mode="r") as store:
        target = state()
        assert (found := store.restore(target)) is not None and found.step == 2 and target["model"]["w"][0] == 22.0


SAVES_AND_DIES = """
import os, signal, sys, torch, stepwell
store = stepwell.open(sys.argv[1])
state = {"model": {"w": torch.zeros(1000)}}
found = store.restore(state)
print(found.step)
if sys.argv[2] == "before":
    os.kill(os.getpid(), signal.SIGKILL)
from stepwell.commit import Committer
async def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "records":
    Committer._put_manifest = die
else:
    Committer._put_record = die
store.save(found.step + 1, state).wait()
"""


@pytest.mark.parametrize("when", ["before", "shards", "records"])
def test_a_kill_between_a_rewind_and_the_next_save_resurrects_nothing(
    tmp_path: Path, scripts: Scripts, when: str
) -> None:
    run = saved(tmp_path / "run", 1, 2, 3)
    rewind(f"{run}@1")
    for _ in range(2):
        ended = scripts.run(SAVES_AND_DIES, run, when)
        assert ended.status == -signal.SIGKILL, ended.err
    with stepwell.open(run) as store:
        expected = 2 if when == "records" else 1  # all but the manifest was there: the next writer commits it
        assert [c.step for c in store.checkpoints()][-1] <= expected
        store.restore(state())
        store.save(5, state(5)).wait()
        line = store.checkpoints()
        assert not {c.name for c in line} & {f"step-{step:09d}.1-{step}" for step in (2, 3)}
        assert [c.step for c in store.checkpoints(abandoned=True) if c.abandoned][-2:] == [2, 3]


HOLDS = """
import sys, torch, stepwell
from stepwell import epochs
epochs.BEAT_S = 0.05
with stepwell.open(sys.argv[1]) as store:
    store.save(9, {"model": {"w": torch.zeros(1000)}}).wait()
    print("saved", flush=True)
    sys.stdin.read()
"""


def test_a_live_writer_is_not_rewound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "LOOK_S", 0.05)
    run = saved(tmp_path / "run", 1, 2)
    with Popen([sys.executable, "-c", HOLDS, run], cwd=ROOT, stdin=PIPE, stdout=PIPE) as writer:
        assert writer.stdout is not None and writer.stdout.readline() == b"saved\n"
        with pytest.raises(RunBusy, match=f"pid {writer.pid}"):
            rewind(f"{run}@1")
        writer.kill()
    rewind(f"{run}@1")  # of a dead one it is taken at once
    with stepwell.open(run, mode="r") as store:
        assert [c.step for c in store.checkpoints()] == [1]


def test_what_cannot_be_rewound_to(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", 1, 2, 3)
    rewind(f"{run}@2")
    with pytest.raises(ConfigError, match="step 3 was abandoned"):
        rewind(f"{run}@3")
    with pytest.raises(CheckpointNotFound, match="no checkpoint of step 7"):
        rewind(f"{run}@7")
    for ref in (run, next(run.glob("step-000000001.*"))):
        with pytest.raises(ConfigError, match="where to rewind to"):
            rewind(ref)
    with pytest.raises(ConfigError, match="means 2 checkpoints"):
        rewind(f"{run}@1..2")


def test_step_folders_that_were_copied_can_be_rewound(tmp_path: Path) -> None:
    run, copied = saved(tmp_path / "run", 1, 2), tmp_path / "copy"
    with stepwell.open(run) as store:
        store.restore(state())
        store.save(3, state()).wait()  # epoch 2
    copied.mkdir()
    for folder in run.glob("step-*"):
        shutil.copytree(folder, copied / folder.name)
    rewind(f"{copied}@1")
    with stepwell.open(copied) as store:
        assert (found := store.restore(state())) is not None and found.step == 1
        store.save(2, state(22)).wait()
        assert [c.step for c in store.checkpoints()] == [1, 2]


def test_a_damaged_rewind_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = saved(tmp_path / "run", 1, 2)
    rewind(f"{run}@1")
    [record] = run.glob("epochs/*.rewind.json")
    record.write_bytes(record.read_bytes().replace(b'"to": 1', b'"to": 0'))
    with stepwell.open(run, mode="r") as store:
        assert [c.step for c in store.checkpoints()] == [1, 2]
    assert "counts again" in caplog.text and record.name in caplog.text
