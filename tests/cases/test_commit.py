"""Cases C1 to C22: what a kill, a full disk, a copy, another run and a wrong clock leave; order and paths."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.clock import SystemClock
from stepwell.errors import SaveFailed, StepExists, TierFull
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from tests.cases.helpers import ROOT, only_step
from tests.mounts import tmpfs


def state(value: float) -> dict[str, Any]:
    return {"w": torch.full((300_000,), float(value))}


def value_of(run: Path | str) -> float:
    """What a load gives; every element of the tensor must agree."""
    [value] = stepwell.load(run)["w"].unique().tolist()
    return float(value)


def save_steps(run: Path, *steps: int, **metrics: list[float]) -> None:
    with stepwell.open(run) as store:
        for n, step in enumerate(steps):
            store.save(step, state(step), metrics={name: values[n] for name, values in metrics.items()}).wait()


def chain(folder: Path) -> list[Tier]:
    return [FileTier(folder / name, name=name) for name in ("near", "far")]


@pytest.mark.slow
@pytest.mark.parametrize("way", ["save", "replace", "retain"])
def test_C1_C3_C8_a_kill_at_any_file_operation_leaves_the_old_or_the_new(tmp_path: Path, way: str) -> None:
    """Of a save, its flush and the replacing of a step; random moments: tests/store/test_kill.py."""
    command = [sys.executable, "-m", "tests.cases.kill_points", way, str(tmp_path), "8"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["kills"] == result["points"] >= 6 and result["operations"] > 20


def test_C4_steps_are_numbers_and_nan_is_never_best(tmp_path: Path) -> None:
    nan = float("nan")
    steps = [800, 900, 1000, 1200, 9900, 9999, 10_000, 10_100]
    save_steps(tmp_path / "run", *steps, loss=[0.5, 0.1, nan, 0.1, 0.7, nan, 0.3, nan])
    with stepwell.open(tmp_path / "run", mode="r") as store:
        assert [checkpoint.step for checkpoint in store.checkpoints()] == steps
        newest = store.latest()
        assert newest is not None and newest.step == 10_100
    assert value_of(f"{tmp_path}/run@best:loss") == 1200  # of equals the newer
    assert value_of(f"{tmp_path}/run@best:max:loss") == 9900


def test_C5_a_new_run_cannot_hide_in_an_old_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, 500, 600, 700)
    before = sorted(run.iterdir())
    with stepwell.open(run) as store:
        with pytest.raises(StepExists, match="700"):
            store.save(100, state(100))
        assert sorted(run.iterdir()) == before
        store.rewind(500)  # or it says that it starts from there: then order is by timeline
        store.save(510, state(510)).wait()
        store.save(520, state(520)).wait()
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [500, 510, 520]
    assert value_of(run) == 520 and value_of(f"{run}@700") == 700


def test_C6_times_say_nothing_about_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    wall = SystemClock.wall
    with stepwell.open(run) as store:
        for step, ahead_s in ((1, 0), (2, -3600), (3, -7200), (4, 10)):
            monkeypatch.setattr(SystemClock, "wall", lambda self, by=ahead_s: wall(self) + by)
            store.save(step, state(step)).wait()
    monkeypatch.setattr(SystemClock, "wall", wall)
    for n, path in enumerate(sorted(run.rglob("*"), reverse=True)):
        os.utime(path, (1e9 + n, 1e9 + n))
    shutil.copytree(run, tmp_path / "copy", copy_function=shutil.copyfile)
    for folder in (run, tmp_path / "copy"):
        with stepwell.open(folder) as store:
            assert [checkpoint.step for checkpoint in store.checkpoints()] == [1, 2, 3, 4]
            target = state(0)
            assert store.restore(target) is not None and target["w"][0] == 4
            store.save(5, state(5)).wait()
        assert value_of(folder) == 5


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", 64) as folder:
        yield folder


def test_C10_a_full_disk_says_so_keeps_the_old_and_takes_the_next(small_disk: Path) -> None:
    old, large = {"w": torch.full((5_000_000,), 1.0)}, {"w": torch.full((25_000_000,), 2.0)}
    with stepwell.open(small_disk / "run") as store:
        store.save(1, old).wait()
        free = os.statvfs(small_disk).f_bavail
        with pytest.raises(SaveFailed) as caught:
            store.save(2, large).wait()
        cause = caught.value.__cause__
        assert isinstance(cause, TierFull)
        where: dict[str, Any] = {**cause.where, **caught.value.where}
        assert where["needed_bytes"] > 100_000_000 > 50_000_000 > where["free_bytes"] > 0 and where["tier"] == "disk"
        assert str(small_disk) in str(caught.value), "the path"
        assert os.statvfs(small_disk).f_bavail == free and store.debris() == []
        assert torch.equal(stepwell.load(small_disk / "run")["w"], old["w"])
        shutil.rmtree(only_step(small_disk / "run"))  # by hand: room
        store.save(3, {"w": torch.full((14_000_000,), 3.0)}).wait()
    assert value_of(small_disk / "run") == 3


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_C11_a_quota_or_a_full_target_is_a_full_disk_although_space_looks_ample(tmp_path: Path, number: int) -> None:
    """The error comes from a write; from fsync and close: tests/tiers/test_disk_full.py."""
    tier = FileTier(tmp_path, name="disk")
    with stepwell.open(tiers=[tier], run="run") as store:
        store.save(1, state(1)).wait()
        tier._medium.writer.engine.inject_faults(every=1, error=number)
        with pytest.raises(SaveFailed) as caught:
            store.save(2, state(2)).wait()
        assert isinstance(caught.value.__cause__, TierFull) and errno.errorcode[number] in str(caught.value)
        assert "enough" not in str(caught.value)
        tier._medium.writer.engine.inject_faults()
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [1] and store.debris() == []
        store.save(3, state(3)).wait()
    assert value_of(tmp_path / "run") == 3


def test_C14_the_newest_is_found_after_a_move_a_copy_and_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "real")
    with stepwell.open(tmp_path / "root" / "run") as store:
        for step in (1, 2):
            store.save(step, state(step)).wait()
    run = tmp_path / "real" / "run"
    assert not [path for path in run.rglob("*") if path.is_symlink()]
    assert sum(path.stat().st_size for path in run.rglob("*.safetensors")) < 2.1 * 300_000 * 4  # each written once
    subprocess.run(["cp", "-r", run, tmp_path / "copy"], check=True)
    shutil.move(run, tmp_path / "moved")
    for folder in (tmp_path / "copy", tmp_path / "moved"):
        assert value_of(folder) == 2 and value_of(f"{folder}@latest") == 2
        with stepwell.open(folder) as store:
            target = state(0)
            assert store.restore(target) is not None and target["w"][0] == 2
            store.save(3, state(3)).wait()
        assert value_of(folder) == 3


def test_C15_a_read_only_mount_loads(small_disk: Path) -> None:
    save_steps(small_disk / "run", 1, 2)
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    run = small_disk / "run"
    assert value_of(run) == 2 and value_of(only_step(run, 1)) == 1
    for opened in (stepwell.open(run), stepwell.open(run, mode="r")):
        with opened as store:
            target = state(0)
            assert store.restore(target, 1) is not None and target["w"][0] == 1
    with pytest.raises(SaveFailed, match="(?i)read-only"), stepwell.open(run) as store:
        store.save(3, state(3)).wait()


def test_C16_folders_that_are_missing_or_removed_by_hand_stop_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with stepwell.open(tiers=[FileTier(tmp_path, name="disk")], run="run") as store:
        assert store.checkpoints() == [] and store.restore(state(0)) is None
        for step in (1, 2, 3):
            store.save(step, state(step)).wait()
        shutil.rmtree(only_step(run, 1))
        shutil.rmtree(only_step(run, 3))
        assert [checkpoint.step for checkpoint in store.checkpoints()] == [2]
        store.save(4, state(4)).wait()
        target = state(0)
        assert store.restore(target) is not None and target["w"][0] == 4
        assert store.restore(target, 2) is not None and target["w"][0] == 2
    assert value_of(run) == 4


def test_C17_a_resumed_run_goes_on_and_overwrites_nothing(tmp_path: Path) -> None:
    run = tmp_path / "run"
    save_steps(run, *range(6))
    before = {path: path.read_bytes() for path in run.glob("step-*/*")}
    with stepwell.open(run) as store:
        found = store.restore(state(0))
        assert found is not None and found.step == 5
        with pytest.raises(StepExists):
            store.save(5, state(-5))
        store.save(found.step + 1, state(6)).wait()
        assert [checkpoint.step for checkpoint in store.checkpoints()] == list(range(7))
    assert {path: path.read_bytes() for path in before} == before


def test_C18_a_near_copy_of_what_was_replaced_on_the_shared_tier_is_not_used(tmp_path: Path) -> None:
    with stepwell.open(tiers=chain(tmp_path), run="run") as store:
        store.save(1, state(1)).wait("far")
        store.save(2, state(2)).wait("far")
    with stepwell.open(tmp_path / "far" / "run") as store:  # a job on another node: it sees only the shared tier
        store.rewind(1)
        store.save(2, state(2.5)).wait()
    with stepwell.open(tiers=chain(tmp_path), run="run", mode="r") as store:
        target = state(0)
        found = store.restore(target)
        assert found is not None and found.step == 2 and bool((target["w"] == 2.5).all())
        assert list(found.sources) == ["far"]


@pytest.mark.parametrize("name", ["model", "manifest"])
def test_C19_a_bad_near_copy_is_detected_named_and_passed_over(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with stepwell.open(tiers=chain(tmp_path), run="run") as store:
        store.save(1, {"model": state(1)}).wait("far")
    path = only_step(tmp_path / "near" / "run") / {"model": "model.safetensors", "manifest": "manifest.json"}[name]
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)
    with stepwell.open(tiers=chain(tmp_path), run="run") as store:
        target = {"model": state(0)}
        found = store.restore(target)
        assert found is not None and bool((target["model"]["w"] == 1).all())
        if name == "model":
            assert found.healed == ("model.safetensors on near",) and found.sources["far"] > 0
        else:
            assert "tier near" in caplog.text and "manifest.json" in caplog.text
        store.save(2, {"model": state(2)}).wait("far")
        assert store.restore(target, 1) is not None
    if name == "model":  # the bad copy was replaced, and a note says so
        assert path.read_bytes() != bytes(damaged) and list(path.parent.glob("repair-*.json"))


@pytest.mark.parametrize("name", ["user@host", "run@3", "a=b c", "[x]*?", "{1}", "ünï", "-dash", "x" * 143])
def test_C22_runs_of_any_name_are_only_names(tmp_path: Path, name: str) -> None:
    """Parents of any name, '~' and relative paths: tests/store/test_load.py."""
    for target in (tmp_path / name, f"{tmp_path}/{name}/"):
        with stepwell.open(target) as store:
            assert store.run == name
            found = store.restore(state(0))
            step = found.step + 1 if found else 1
            store.save(step, state(step)).wait()
    assert value_of(tmp_path / name) == value_of(f"{tmp_path / name}@2") == value_of(f"{tmp_path / name}@latest") == 2
    assert value_of(f"{tmp_path / name}@1") == 1
    assert [path.name for path in tmp_path.iterdir()] == [name]
