"""What a user is told: who has the run, why no checkpoint is good, and which tier did not answer."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell import jobs
from stepwell.errors import (
    CheckpointNotFound,
    NoGoodCheckpoint,
    RunBusy,
    SaveFailed,
    StepwellError,
    TierUnavailable,
)
from stepwell.tiers.base import Found, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.pfs import PfsTier
from stepwell.tiers.wrap import Fault
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state, steps

# -- who has the run -----------------------------------------------------------------------------


@pytest.mark.parametrize("job", ["4711", None])
def test_a_busy_run_names_user_host_pid_and_job_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str | None
) -> None:
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    if job is not None:
        monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setattr(jobs, "_scheduled", jobs._scheduled.__wrapped__)  # another test may have asked before
    with stepwell.open(tmp_path / "run") as holder:
        holder.save(1, state()).wait()
        second = stepwell.open(tmp_path / "run")
        found = second.restore(state())
        assert found is not None and found.step == 1
        with pytest.raises(SaveFailed) as caught:
            second.save(2, state()).wait()
        assert isinstance(caught.value.__cause__, RunBusy)
        told = str(caught.value)
        who = f"user {getpass.getuser()}, host {socket.gethostname()}, pid {os.getpid()}"
        assert (f"{who}, job {job}" if job else f"{who} (") in told, told
        assert ("job" in told.replace(str(tmp_path), "")) == (job is not None)
        for words in ("run run", "step 2", "Stop it, or save under another run name", "mode='r'"):
            assert words in told, told
        with pytest.raises(SaveFailed, match=f"{who}"):  # it is the first save of this store's process, too
            second.close()
        holder.save(2, state()).wait()  # who holds it is not disturbed
        assert steps(holder, "disk") == [1, 2]


# -- why no checkpoint is good -------------------------------------------------------------------


def cut_shard(folder: Path) -> None:
    shard = folder / "model.safetensors"
    os.truncate(shard, shard.stat().st_size - 1)


def lose_record(folder: Path) -> None:
    (folder / "rank-00000.json").unlink()


def spoil_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes()[:-20])


def flip_bit(folder: Path) -> None:
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


#: what is done to a checkpoint, and what the reason must name
SPOILED: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (cut_shard, ("model.safetensors",)),
    (lose_record, ("rank-00000.json",)),
    (spoil_manifest, ("manifest.json",)),
    (flip_bit, ("model.safetensors", "checksum")),
]


def test_no_good_checkpoint_gives_the_reason_of_each_step(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with stepwell.open(run) as store:
        for step in range(1, 5):
            store.save(step, state(step)).wait()
    for step, (spoil, _) in enumerate(SPOILED, 1):
        [folder] = run.glob(f"step-{step:09d}.*")
        spoil(folder)
    before = sorted(run.rglob("*"))
    with stepwell.open(run, mode="r") as store:
        with pytest.raises(NoGoodCheckpoint) as caught:
            store.restore(state(0))
        told = str(caught.value)
        assert told.startswith("none of the 4 checkpoints can be used: step 4: ") and "run run" in told
        assert "Nothing was deleted; restore(step=…) tries one of them alone" in told
        assert list(caught.value.reasons) == [4, 3, 2, 1]
        for step, (_, names) in enumerate(SPOILED, 1):
            reason = caught.value.reasons[step]
            assert f"step {step}: {reason}" in told
            assert all(name in reason for name in names), reason
            with pytest.raises(StepwellError) as alone:
                store.restore(state(0), step)
            assert names[0] in str(alone.value) and f"step {step}" in str(alone.value)
    assert sorted(run.rglob("*")) == before


# -- what did not answer -------------------------------------------------------------------------


class Half(FileTier):
    """Its listing breaks off after the first entry."""

    async def scan(self, run: str) -> AsyncIterator[Found]:
        async for found in super().scan(run):
            yield found
            break
        raise TierUnavailable("the listing broke off", tier=self.info.name)


def gone_root(folder: Path) -> Tier:
    """A shared place that was unmounted: its root is not there."""
    tier = PfsTier(folder / "far", name="far", reading="direct")
    shutil.rmtree(folder / "far")
    return tier


def bare_mount_point(folder: Path) -> Tier:
    """A shared place that was unmounted: its root is there, and empty."""
    shutil.rmtree(folder / "far")
    (folder / "far").mkdir()
    return PfsTier(folder / "far", name="far", reading="direct")


def broken_listing(folder: Path) -> Tier:
    return Half(folder / "far", name="far", reading="direct")


AWAY: dict[str, Callable[[Path], Tier]] = {
    "its root is gone": gone_root,
    "its mount point is bare": bare_mount_point,
    "its listing breaks off": broken_listing,
}


def shared(folder: Path, name: str) -> Tier:
    (folder / name).mkdir(exist_ok=True)
    return PfsTier(folder / name, name=name, reading="direct")


@pytest.mark.parametrize("mode", ["w", "r"])
@pytest.mark.parametrize("way", AWAY)
def test_no_tier_that_is_away_is_taken_for_one_that_is_empty(tmp_path: Path, way: str, mode: Any) -> None:
    """The run is on the far tier alone; a node that comes new has nothing near."""
    with stepwell.open(run="run", tiers=[shared(tmp_path, "far")]) as store:
        store.save(1, state()).wait()
    near = shared(tmp_path, "near")
    with pytest.raises(TierUnavailable, match="far") as caught:
        with stepwell.open(run="run", tiers=[near, AWAY[way](tmp_path)], mode=mode) as store:
            answer = store.restore(state(0))
            pytest.fail(f"it was answered with {answer}")
    assert not isinstance(caught.value, CheckpointNotFound) and str(caught.value)


def test_only_when_every_tier_has_answered_there_is_nothing(tmp_path: Path) -> None:
    far = disk(tmp_path, name="far")
    with stepwell.open(run="run", tiers=[host(), disk(tmp_path, name="near"), far]) as store:
        assert store.restore(state(0)) is None
        with pytest.raises(CheckpointNotFound, match="there is no checkpoint of step 3.*The run has none yet"):
            store.restore(state(0), 3)


def test_a_tier_that_lists_and_cannot_be_read_hides_no_good_copy(tmp_path: Path) -> None:
    def tiers() -> tuple[Any, Any]:
        return disk(tmp_path, name="near"), disk(tmp_path, name="far")

    for step in (1, 2):  # the second writer leaves a list of what it found
        with stepwell.open(run="run", tiers=tiers()) as store:
            store.save(step, state()).wait()
    near, far = tiers()
    with stepwell.open(run="run", tiers=[near, far], mode="r") as store:
        far.plan = [Fault("fetch", 1, times=ALWAYS)]
        found = store.restore(state(0))
        assert found is not None and found.step == 2
        assert store.status().tier("far").health == "absent"


@pytest.mark.parametrize("operation", ["fetch", "read"])
def test_a_commit_that_is_seen_and_cannot_be_read_is_not_nothing(tmp_path: Path, operation: Any) -> None:
    with stepwell.open(run="run", tiers=[disk(tmp_path)]) as store:
        store.save(1, state()).wait()
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[tier], mode="r") as store:
        tier.plan = [Fault(operation, 1, times=ALWAYS)]
        with pytest.raises(TierUnavailable if operation == "fetch" else NoGoodCheckpoint, match="injected"):
            store.restore(state(0))
        tier.plan = []
        found = store.restore(state(0))
        assert found is not None and found.step == 1


def test_a_tier_that_hangs_is_waited_for_and_not_taken_for_empty(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=[disk(tmp_path)]) as store:
        store.save(1, state()).wait()
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[tier], mode="r") as store:
        tier.plan = [Fault("fetch", 1, "stall", times=ALWAYS)]
        with pytest.raises(stepwell.WaitTimeout, match="restore"):
            store.restore(state(0), timeout=0.3)
        eventually(lambda: bool(tier.hit))
        release(tier)
        found = store.restore(state(0))
        assert found is not None and found.step == 1
