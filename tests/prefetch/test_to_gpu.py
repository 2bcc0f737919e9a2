"""Checkpoints brought up to GPU memory, for models that are to be there at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import CheckpointNotFound, ConfigError, KeyMismatch, TierFull
from stepwell.native import Op
from tests.fakecuda import FakeCuda
from tests.store.gpubench import Bench, benches, opened, ops
from tests.store.helpers import eventually


@pytest.fixture
def bench(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with benches(driver, monkeypatch) as made:
        yield made


def _saved(folder: Path, steps: int = 1) -> None:
    """By a process whose state is in host memory."""
    with opened(folder) as store:
        for step in range(1, steps + 1):
            store.save(step, _state(float(step))).wait("nvme")


def _state(value: float) -> dict[str, Any]:
    return {
        "model": {"a": torch.full((500_000,), value), "b": torch.full((200_000,), -value)},
        "optimizer": {"m": torch.full((500_000,), 2 * value)},
    }


def _check(bench: Bench, store: stepwell.CheckpointStore, step: int, parts: tuple[str, ...]) -> dict[str, int]:
    blank = {part: value for part, value in _state(0.0).items() if part in parts}
    bench.on.put(blank)
    done = store.restore(blank, step=step)
    assert done is not None
    for part, tensors in _state(float(step)).items():
        assert part not in parts or all(torch.equal(blank[part][name], tensor) for name, tensor in tensors.items())
    return dict(done.sources)


def _used(store: stepwell.CheckpointStore) -> tuple[int, int]:
    assert store.mover.gpu is not None
    return store.mover.gpu.arena.cached_bytes, store.mover.gpu.arena.in_use


def test_all_of_a_checkpoint(bench: Bench, tmp_path: Path) -> None:
    _saved(tmp_path)
    with opened(tmp_path) as store:
        handle = store.prefetch("@latest", to="gpu").wait(timeout=20)
        progress = handle.progress
        assert progress.done_bytes == progress.total_bytes == 4_800_000
        [found] = store.checkpoints(tier="gpu")
        assert found.step == 1 and "gpu" in found.complete_on
        assert _check(bench, store, 1, ("model", "optimizer")) == {"gpu": 4_800_000}
        before = bench.driver.count("copies")
        store.prefetch(1, to="gpu").wait(timeout=20)
        assert bench.driver.count("copies") == before  # it is there already


def test_parts_and_then_the_others(bench: Bench, tmp_path: Path) -> None:
    _saved(tmp_path)
    with opened(tmp_path) as store:
        store.prefetch(1, to="gpu", parts="model").wait(timeout=20)
        [found] = store.checkpoints(tier="gpu")
        assert "gpu" not in found.complete_on
        assert _check(bench, store, 1, ("model",)) == {"gpu": 2_800_000}
        sources = _check(bench, store, 1, ("model", "optimizer"))
        assert sum(sources.values()) >= 4_800_000
        store.prefetch(1, to="gpu").wait(timeout=20)
        assert _check(bench, store, 1, ("model", "optimizer")) == {"gpu": 4_800_000}
        store.prefetch(1, to="gpu", parts=["optimizer"]).wait(timeout=20)  # all is there: nothing is taken away
        assert _check(bench, store, 1, ("model", "optimizer")) == {"gpu": 4_800_000}


def test_newer_ones_push_out_what_storage_has(bench: Bench, tmp_path: Path) -> None:
    _saved(tmp_path, steps=3)
    with opened(tmp_path, gpu="12MiB") as store:
        for step in (1, 2, 3):
            store.prefetch(step, to="gpu").wait(timeout=20)
        assert [found.step for found in store.checkpoints(tier="gpu")] == [2, 3]
        assert "gpu" not in _check(bench, store, 1, ("model",))
        assert _check(bench, store, 3, ("model",)) == {"gpu": 2_800_000}


def test_what_does_not_fit_or_is_not_there(bench: Bench, tmp_path: Path) -> None:
    _saved(tmp_path)
    with opened(tmp_path, gpu="4MiB") as store:
        with pytest.raises(TierFull, match="can be promised"):
            store.prefetch(1, to="gpu").wait(timeout=20)
        with pytest.raises(CheckpointNotFound):
            store.prefetch(7, to="gpu").wait(timeout=20)
        with pytest.raises(KeyMismatch):
            store.prefetch(1, to="gpu", parts="models").wait(timeout=20)
        with pytest.raises(ConfigError, match="tier gpu holds whole parts"):
            store.prefetch(1, to="gpu", keys="a")
        assert _used(store) == (0, 0) and store.checkpoints(tier="gpu") == []


def test_a_reader_brings_it_up_too(bench: Bench, tmp_path: Path) -> None:
    _saved(tmp_path)
    with stepwell.open(tmp_path / "config.toml", run="run", mode="r") as store:
        store.prefetch("@latest", to="gpu").wait(timeout=20)
        assert _check(bench, store, 1, ("model", "optimizer")) == {"gpu": 4_800_000}


def test_given_up_it_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    _saved(tmp_path, steps=2)
    with opened(tmp_path) as store:
        store.prefetch(1, to="gpu").wait(timeout=20)
        before = _used(store)
        bench.driver.slow(0.02)
        handle = store.prefetch(2, to="gpu")
        eventually(lambda: _used(store) != before)
        handle.cancel()
        bench.driver.slow(0.0)
        eventually(lambda: _used(store) == before)
        assert [found.step for found in store.checkpoints(tier="gpu")] == [1]
        store.prefetch(2, to="gpu").wait(timeout=20)
        assert _check(bench, store, 2, ("model", "optimizer")) == {"gpu": 4_800_000}


def test_a_copy_that_fails_leaves_nothing(bench: Bench, tmp_path: Path) -> None:
    _saved(tmp_path)
    with opened(tmp_path) as store:
        bench.driver.fail("cuMemcpyHtoDAsync_v2", 700)
        with pytest.raises(stepwell.TierError, match="H2D"):
            store.prefetch(1, to="gpu").wait(timeout=20)
        eventually(lambda: _used(store) == (0, 0))
        assert store.checkpoints(tier="gpu") == []
        assert _check(bench, store, 1, ("model",))


def test_a_load_of_this_process_finds_it_there(bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensors are filled within the GPU: nothing of it crosses the bus, and no file is read for it."""
    _saved(tmp_path)
    with opened(tmp_path) as store:
        store.prefetch("@latest", to="gpu").wait(timeout=20)
        bench.on.home, done = 0, ops(monkeypatch)
        loaded = stepwell.load(tmp_path / "nvme" / "run", "model")
        assert done[Op.UNPACK] == 1 and not done[Op.H2D] and not done[Op.READ]
        assert all(torch.equal(loaded[name], tensor) for name, tensor in _state(1.0)["model"].items())


def test_a_process_that_sees_only_its_own_gpu_uses_that(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As launchers do it that set CUDA_VISIBLE_DEVICES for each rank: the last of eight ranks has a first GPU only."""
    monkeypatch.setenv("LOCAL_RANK", "7")
    _saved(tmp_path)
    with opened(tmp_path) as store:
        store.prefetch("@latest", to="gpu").wait(timeout=20)
        assert store.mover.gpu is not None and store.mover.gpu.device is not None
        assert store.mover.gpu.device.index == 0
