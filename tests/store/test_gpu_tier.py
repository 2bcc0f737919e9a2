"""What is committed in GPU memory, when, and what becomes of it: on a driver and in memory that stand for a GPU."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.errors import NotPlanned, SaveFailed
from stepwell.gpus import Gpu
from tests.fakecuda import FakeCuda
from tests.store.gpubench import GPU, Bench, Bus, benches, opened
from tests.store.helpers import eventually, sharing


@pytest.fixture
def bench(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with benches(driver, monkeypatch) as made:
        yield made


def _on(store: stepwell.CheckpointStore, tier: str) -> list[int]:
    return [found.step for found in store.checkpoints(tier=tier)]


def _kept(store: stepwell.CheckpointStore) -> tuple[int, int]:
    """Slots with chunks, and slots that somebody uses."""
    assert store.mover.gpu is not None
    arena = store.mover.gpu.arena
    return arena.cached_bytes // arena.slot_bytes, arena.in_use


def test_a_save_is_in_gpu_memory_and_comes_back_from_there(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        bench.add(12)
        bench.update()
        expected = bench.expected()
        save = store.save(1, bench.state()).wait("nvme")
        assert save.done("gpu") and save.done("host")
        bench.update()
        assert bench.check(store, 1, expected)["gpu"] == bench.gpu_bytes
        [found] = store.checkpoints()
        assert set(found.tiers) >= {"gpu", "host", "nvme"} and "gpu" in found.complete_on
    with opened(tmp_path) as store:  # gone with the process
        assert _on(store, "gpu") == [] and "gpu" not in bench.check(store, 1, expected)


def test_what_is_not_on_the_gpu_says_why(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path, gpu="4MiB") as store:
        save = store.save(1, {"model": {"w": torch.ones(5000)}})
        with pytest.raises(NotPlanned, match="nothing of the state is in GPU memory"):
            save.wait("gpu", timeout=20)
        bench.add(1, sizes=(9_000_000,))
        save = store.save(2, bench.state())
        with pytest.raises(NotPlanned, match=r"does not stay in GPU memory: .*bytes needed.*Give the gpu tier more"):
            save.wait("gpu", timeout=20)
        bench.tensors, bench.values = [], []
        bench.add(1, gpu=0)
        bench.add(1, gpu=1)
        with pytest.raises(NotPlanned, match="memory of GPUs 0, 1"):
            store.save(3, bench.state()).wait("gpu", timeout=20)
        bench.tensors, bench.values = bench.tensors[1:], bench.values[1:]
        with pytest.raises(NotPlanned, match="memory of GPU 1, and the tier in that of GPU 0"):
            store.save(4, bench.state()).wait("gpu", timeout=20)


def test_older_ones_make_way_and_nobody_counts_on_them(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path, gpu="8MiB") as store:
        bench.add(3, sizes=(900_000,))  # four slots with what is beside them
        expected = {}
        for step in range(1, 5):
            bench.update()
            expected[step] = bench.expected()
            store.save(step, bench.state()).wait("nvme")
            assert step in _on(store, "gpu")
        assert _on(store, "gpu") == [3, 4]
        assert "gpu" not in bench.check(store, 1, expected[1])
        assert bench.check(store, 3, expected[3])["gpu"] == bench.gpu_bytes


def test_what_is_nowhere_else_is_not_evicted(bench: Bench, tmp_path: Path) -> None:
    """Without host memory, the copy in GPU memory is the only one until a storage tier has it."""
    with opened(tmp_path, gpu="6MiB", host=None) as store:
        bench.add(3, sizes=(900_000,))
        expected = {}
        for step in range(1, 6):
            bench.update()
            expected[step] = bench.expected()
            save = store.save(step, bench.state())
        save.wait("nvme")
        for step, then in expected.items():
            bench.check(store, step, then)
        eventually(lambda: _kept(store)[1] == 0)
        tier = store.mover.gpu
        assert tier is not None and tier.arena.give_back(1 << 30) == 6 << 20 and _on(store, "gpu") == []


FAILURES = {
    "within the GPU": ("cuLaunchKernel", 1, "PACK|D2H"),
    "on the way down": ("cuMemcpyDtoHAsync_v2", 1, "D2H"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "no guard"])
def test_a_failed_save_leaves_nothing_there(bench: Bench, tmp_path: Path, failure: str, guarded: bool) -> None:
    call, nth, match = FAILURES[failure]
    with opened(tmp_path) as store:
        bench.add(9)
        if guarded:
            store.guard(*bench.tensors)
        state = bench.state()
        store.save(1, state).wait("nvme")
        before = _kept(store)
        bench.driver.fail(call, 700, nth=nth)
        failed = store.save(2, state)
        with pytest.raises(SaveFailed, match=match):
            failed.wait("nvme", timeout=20)
        with pytest.raises(SaveFailed):
            failed.wait("gpu", timeout=20)
        eventually(lambda: _kept(store) == before)
        store.before_update()  # waits for nobody
        bench.update()
        store.save(3, bench.state()).wait("nvme")
        assert bench.check(store, 3, bench.expected())["gpu"] == bench.gpu_bytes
        assert _on(store, "gpu") == [1, 3] and {found.step for found in store.checkpoints()} == {1, 3}


def test_what_cannot_be_copied_up_costs_only_the_copy_there(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        bench.add(9)
        store.save(1, bench.state()).wait("nvme")
        before = _kept(store)
        bench.driver.fail("cuMemcpyHtoDAsync_v2", 700)
        bench.update()
        save = store.save(2, bench.state())
        with pytest.raises(NotPlanned, match="what came from host memory could not be copied there"):
            save.wait("gpu", timeout=20)
        save.wait("nvme")
        assert _on(store, "gpu") == [1] and _kept(store) == before
        assert "gpu" not in bench.check(store, 2, bench.expected())


def test_slots_are_not_free_while_something_is_still_copied_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.savework.GIVE_UP_S", 0.05)
    with opened(tmp_path) as store:
        bench.add(9)
        store.save(1, bench.state()).wait("nvme")
        before = _kept(store)
        with Bus(monkeypatch, "up") as bus:
            bench.driver.fail("cuMemcpyDtoHAsync_v2", 700)
            failed = store.save(2, bench.state())
            with pytest.raises(SaveFailed, match="D2H"):
                failed.wait("nvme", timeout=20)
            assert bus.held and _kept(store)[1] > 0
        eventually(lambda: _kept(store) == before)
        store.save(3, bench.state()).wait("nvme")
        assert _on(store, "gpu") == [1, 3]


def test_a_gpu_that_cannot_copy_within_itself_costs_only_the_copy_there(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def across(gpu: Gpu) -> None:
        raise OSError(errno.ENOMEM, "no memory for another stream")

    monkeypatch.setattr(Gpu, "across", property(across))
    with opened(tmp_path) as store:
        bench.add(9)
        bench.update()
        save = store.save(1, bench.state()).wait("nvme")
        with pytest.raises(NotPlanned, match="no memory for another stream"):
            save.wait("gpu", timeout=20)
        bench.check(store, 1, bench.expected())


def test_above_host_memory_that_outlives_the_process(bench: Bench, tmp_path: Path) -> None:
    with sharing(tmp_path) as config:
        config.write_text(GPU.format("64MiB") + config.read_text())
        with stepwell.open(config, run="run") as store:
            bench.add(9)
            expected = {}
            for step in (1, 2, 3):
                bench.update()
                expected[step] = bench.expected()
                save = store.save(step, bench.state()).wait("host")
            save.wait("gpu")
            assert bench.check(store, 2, expected[2])["gpu"] == bench.gpu_bytes
        with stepwell.open(config, run="run") as store:
            assert bench.check(store, 3, expected[3]).keys() == {"host"}


def test_a_full_disk_takes_the_copy_in_gpu_memory_along(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path, host=None) as store:
        bench.add(9)
        store.save(1, bench.state()).wait("nvme")
        before = _kept(store)
        (tmp_path / "nvme" / "run").rename(tmp_path / "away")
        (tmp_path / "nvme" / "run").write_text("in the way")
        failed = store.save(2, bench.state())
        with pytest.raises(SaveFailed):
            failed.wait("nvme", timeout=60)
        eventually(lambda: _kept(store) == before)
        (tmp_path / "nvme" / "run").unlink()
        (tmp_path / "away").rename(tmp_path / "nvme" / "run")
        store.save(3, bench.state()).wait("nvme")
        assert _on(store, "gpu") == [1, 3]


def test_what_memory_alone_has_gets_down_at_the_end(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path, flush="'at-close'") as store:
        bench.add(9)
        for step in (1, 2, 3):
            bench.update()
            save = store.save(step, bench.state()).wait("gpu").wait("host")
            assert not save.done("nvme")
        expected = bench.expected()
        assert _on(store, "nvme") == [] and 3 in _on(store, "gpu")
    with opened(tmp_path) as store:
        assert _on(store, "nvme") == [3]
        bench.check(store, 3, expected)


def test_a_drain_does_not_count_gpu_memory_as_safe(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path, flush="'at-close'") as store:
        bench.add(9)
        bench.update()
        store.save(1, bench.state()).wait("gpu").wait("host")
        store.drain(within=60)
        assert _on(store, "nvme") == [1]


def test_a_waiter_that_names_no_tier_waits_for_storage(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        bench.add(3)
        save = store.save(1, bench.state()).wait()
        assert save.done("nvme")
        with pytest.raises(stepwell.ConfigError, match="there is no tier 'gpus'.*gpu, host, nvme"):
            save.wait("gpus")
