"""Saves that fail: who is told, what is freed, and that saving goes on afterwards."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell.clock import SystemClock
from stepwell.errors import SaveFailed, StepExists, TierFull, WaitTimeout
from stepwell.settings import Settings
from stepwell.store import CheckpointStore
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault
from tests.mounts import tmpfs
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state, steps

pytestmark = pytest.mark.usefixtures("short_pauses")


# -- who is told ---------------------------------------------------------------------------------


def test_B6_the_first_failure_comes_out_at_wait_and_at_the_next_save_and_saving_goes_on(tmp_path: Path) -> None:
    tier = disk(tmp_path, [Fault("reserve", 1, errno=errno.EIO)])
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        save = store.save(1, state())
        for _ in range(2):
            with pytest.raises(SaveFailed, match=r"cannot reserve \(injected\).*step 1") as caught:
                save.wait()
        assert isinstance(caught.value.__cause__, stepwell.errors.TierError)
        assert not save.done() and save.report().error is not None
        assert "failed" in repr(save)
        with pytest.raises(SaveFailed, match=r"first save of this process failed.*injected.*step 1"):
            store.save(2, state())
        store.save(1, state()).wait()  # the same step may be tried again
        store.save(2, state()).wait()
        assert store.status().saves_failed == 1


def test_B6_the_newest_failure_comes_out_at_close(tmp_path: Path) -> None:
    store = stepwell.open(run="run", tiers=[host(), disk(tmp_path, [Fault("reserve", 2, errno=errno.EIO)])])
    store.save(1, state()).wait()
    store.save(2, state())
    with pytest.raises(SaveFailed, match="injected.*step 2"):
        store.close()
    with pytest.raises(stepwell.StoreClosed):
        store.save(3, state())


def test_a_later_failure_warns_and_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with stepwell.open(run="run", tiers=[host(), disk(tmp_path, [Fault("reserve", 2, times=2)])]) as store:
        store.save(1, state()).wait()
        for step in (2, 3):
            with pytest.raises(SaveFailed):
                store.save(step, state()).wait()
        store.save(4, state()).wait()
        status = store.status()
        assert status.saves_failed == 2 and status.last_error is not None and "injected" in status.last_error
        assert status.tier("disk").health == "up" and "injected" in str(status.tier("disk").last_error)
        assert steps(store, "disk") == [1, 4]
    assert "saving step 2 failed" in caplog.text


def test_a_folder_removed_under_a_save_is_named(tmp_path: Path) -> None:
    """Case B6: and the manager saves again once the folder is back."""
    (tmp_path / "disk").mkdir()
    with stepwell.open(run="run", tiers=[host(), FileTier(tmp_path / "disk", name="disk", scope="shared")]) as store:
        store.save(1, state()).wait()
        os.rename(tmp_path / "disk", tmp_path / "away")
        with pytest.raises(SaveFailed, match=str(tmp_path / "disk")):
            store.save(2, state()).wait()
        assert store.status().tier("disk").health == "failing"
        os.rename(tmp_path / "away", tmp_path / "disk")
        store.save(3, state()).wait()
        assert steps(store, "disk") == [1, 3]


def test_reads_raise_no_error_of_a_save(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=[host(), disk(tmp_path, [Fault("reserve", 2)])]) as store:
        store.save(1, state(1.0)).wait()
        store.save(2, state(2.0))
        target = state(0.0)
        found = store.restore(target)
        assert found is not None and found.step == 1 and bool((target["model"]["w"] == 1).all())
        store.save(2, state(2.0)).wait()


def test_a_failed_save_after_a_rewind_leaves_the_rewind_to_the_next(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=[host(), disk(tmp_path, [Fault("reserve", 3)])]) as store:
        for step in (10, 20):
            store.save(step, state(step)).wait()
        store.rewind(10)
        with pytest.raises(SaveFailed):
            store.save(15, state()).wait()
        store.save(15, state()).wait()
        assert [c.step for c in store.checkpoints()] == [10, 15]
        with pytest.raises(StepExists):
            store.save(15, state())


class Clock(SystemClock):
    """The machine's, with hands that can be put forward."""

    forward = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.forward


def test_max_unsaved_makes_save_raise_and_saving_goes_on(tmp_path: Path) -> None:
    clock = Clock()
    plan = [Fault("reserve", 2, times=2)]
    store = CheckpointStore("run", [host(), disk(tmp_path, plan)], "w", Settings(max_unsaved=100), clock=clock)
    store.save(1, state()).wait()
    clock.forward += 1000  # nothing was saved meanwhile: all that was saved is durable
    with pytest.raises(SaveFailed):
        store.save(2, state()).wait()
    clock.forward += 101
    with pytest.raises(SaveFailed, match=r"nothing has become durable for 1 min 41 s \(max_unsaved is 1 min 40 s\)"):
        store.save(3, state())
    eventually(lambda: store.status().saves_failed == 2)
    with pytest.raises(SaveFailed, match="2 saves failed, 1 are under way.*injected"):
        store.save(4, state())  # it is tried all the same, and succeeds
    eventually(lambda: store.status().unsaved_seconds == 0)
    store.save(5, state()).wait()
    store.close()


def test_max_unsaved_counts_saves_that_never_end(tmp_path: Path) -> None:
    clock = Clock()
    tier = disk(tmp_path, [Fault("commit", 8, "stall", times=ALWAYS)])
    store = CheckpointStore("run", [host(), tier], "w", Settings(max_unsaved=100), clock=clock)
    store.save(1, state()).wait()
    tier.plan.append(Fault("write", 1, "stall", times=ALWAYS))
    store.save(2, state())
    clock.forward += 200
    with pytest.raises(SaveFailed, match="nothing has become durable.*none of them has ended"):
        store.save(3, state())
    with pytest.raises(WaitTimeout, match="step 2 to disk.*newest checkpoint of run run: step 1 on disk"):
        store.close(timeout=0.1)
    release(tier)


# -- what blocks ---------------------------------------------------------------------------------


def test_a_full_arena_behind_a_stuck_disk_blocks_only_so_long(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    arena, tier = host(16), disk(tmp_path)
    big = state(size=3_000_000)  # 12 MB of the 14 that may be kept
    with stepwell.open(run="run", tiers=[arena, tier], block_timeout=0.3) as store:
        store.save(1, state()).wait()
        tier.plan.append(Fault("write", 1, "stall", times=ALWAYS))
        first = store.save(2, big)  # fills the arena and stays there
        began = time.monotonic()
        skipped = store.save(3, big)
        assert 0.3 <= time.monotonic() - began < 20  # what it waits for never comes
        with pytest.raises(SaveFailed, match=r"11.4 MiB was skipped: save\(\) blocked for block_timeout \(300 ms\)"):
            skipped.wait(timeout=20)
        assert not first.done()
        tier.plan.clear()
        release(tier)
        first.wait()
        store.save(3, big).wait()  # the same step again
        assert steps(store, "disk") == [1, 2, 3]
        eventually(lambda: arena.arena.in_use == 0)
        assert store.debris() == []
    assert "step 3 was skipped: save() blocked for 300 ms" in caplog.text and "on their way to disk" in caplog.text


@pytest.mark.parametrize("operation", ["reserve", "write", "commit"])
def test_a_failed_save_frees_all_that_it_took(tmp_path: Path, operation: Any) -> None:
    arena, tier = host(16), disk(tmp_path)
    with stepwell.open(run="run", tiers=[arena, tier]) as store:
        store.save(1, state(size=2_000_000)).wait()
        before = sorted(path.name for path in (tmp_path / "disk" / "run").iterdir())
        tier.plan = [Fault(operation, 1, times=ALWAYS)]
        with pytest.raises(SaveFailed):
            store.save(2, state(size=2_000_000)).wait()
        tier.plan = []
        eventually(lambda: arena.arena.in_use == 0)
        eventually(lambda: sorted(path.name for path in (tmp_path / "disk" / "run").iterdir()) == before)
        assert arena.usage().in_flight_bytes == 0
        store.save(2, state(size=2_000_000)).wait()


# -- disks that are full -------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", 64) as folder:
        yield folder


def test_C10_a_full_disk_is_said_with_path_and_numbers_and_saving_goes_on(small_disk: Path) -> None:
    with stepwell.open(small_disk / "run") as store:
        store.save(1, state(1.0, 5_000_000)).wait()  # 20 MB
        before = os.statvfs(small_disk).f_bavail
        with pytest.raises(SaveFailed) as caught:
            store.save(2, state(2.0, 25_000_000)).wait()  # 100 MB
        error = caught.value.__cause__
        assert isinstance(error, TierFull)
        assert str(small_disk) in str(error) and "free" in str(error)
        assert error.where["needed_bytes"] >= 100_000_000 and error.where["free_bytes"] <= 46 << 20  # type: ignore[operator]
        assert os.statvfs(small_disk).f_bavail == before and store.debris() == []
        target = state(0.0, 5_000_000)
        found = store.restore(target)
        assert found is not None and found.step == 1 and bool((target["model"]["w"] == 1).all())
        store.save(3, state(3.0, 5_000_000)).wait()
        assert steps(store, "disk") == [1, 3]


def test_C11_a_quota_is_a_full_disk_although_space_looks_ample(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        store.save(1, state()).wait()
        for operation, number in [("write", errno.EDQUOT), ("write", errno.ENOSPC), ("commit", errno.EDQUOT)]:
            tier._counts.clear()
            tier.plan = [Fault(operation, 1, errno=number, times=ALWAYS)]  # type: ignore[arg-type]
            with pytest.raises(SaveFailed) as caught:
                store.save(2, state()).wait()
            assert isinstance(caught.value.__cause__, TierFull)
            assert "enough" not in str(caught.value) and errno.errorcode[number] in str(caught.value)
            tier.plan = []
        eventually(lambda: store.debris() == [])
        store.save(2, state()).wait()
        assert steps(store, "disk") == [1, 2]
