"""Loads and restores to GPUs, on a driver and in memory that stand for them: the engine alone puts bytes there."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepwell
from stepwell.runtime import Runtime
from tests.fakecuda import USER, FakeCuda
from tests.gpus import stand_in
from tests.state.memory import assert_same
from tests.state.standing import Standing


@pytest.fixture
def gpus(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Standing]:
    with stand_in(driver, monkeypatch, kernels=False) as (found, _):
        yield found


def _state(scale: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    weights = {
        f"w{n}": torch.randn(size, generator=generator) * scale for n, size in enumerate((5, 3_000_000, 1, 70_000))
    }
    weights["turned"] = torch.randn(30, 50, generator=generator).t() * scale
    return {"model": weights, "array": np.arange(2000) * scale, "n": scale}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, _state(1.0)).wait()
    return tmp_path / "run"


def test_a_load_goes_straight_to_the_gpu(saved: Path, gpus: Standing, driver: FakeCuda) -> None:
    gpus.home, before = 0, driver.count("copies")
    loaded = stepwell.load(saved)
    assert_same(loaded, _state(1.0))
    assert len(gpus.made) == 5 and driver.count("copies") - before >= 5
    assert {tensor.data_ptr() for tensor in gpus.made} >= {loaded["model"][f"w{n}"].data_ptr() for n in range(4)}


def test_what_the_gpu_still_does_with_the_memory_comes_first(saved: Path, gpus: Standing, driver: FakeCuda) -> None:
    """A kernel that was given to the stream before the restore may still write to the tensors: copies wait for it."""
    state = _state(0.0)
    gpus.put(state["model"], 0)
    stream = Runtime.get().gpus._stream(0)
    driver.hold(USER)
    for tensor in state["model"].values():
        driver.write(stream, tensor.data_ptr(), 0xEE, tensor.nbytes)
    with stepwell.open(saved) as store, ThreadPoolExecutor(1) as thread:
        restoring = thread.submit(store.restore, state)
        wait([restoring], timeout=0.2)  # it would be done by then
        assert not restoring.done()
        driver.go()
        assert restoring.result() is not None
    driver.finish(stream)
    assert_same(state, _state(1.0))


def test_a_restore_fills_tensors_on_several_gpus_and_in_host_memory(saved: Path, gpus: Standing) -> None:
    state = _state(0.0)
    gpus.put(state["model"]["w1"], 0)
    gpus.put(state["model"]["w3"], 1)
    gpus.put(state["model"]["turned"], 1)
    gpus.home = 1
    where = [tensor.data_ptr() for tensor in state["model"].values()]
    with stepwell.open(saved) as store:
        assert store.restore(state) is not None
    assert_same(state, _state(1.0))
    assert [tensor.data_ptr() for tensor in state["model"].values()] == where


def test_a_cast_load(saved: Path, gpus: Standing) -> None:
    gpus.home = 0
    loaded = stepwell.load(saved, "model", dtype=torch.bfloat16)
    assert_same(loaded, {key: value.to(torch.bfloat16) for key, value in _state(1.0)["model"].items()})


def test_plain_files_go_to_the_gpu(tmp_path: Path, gpus: Standing) -> None:
    from safetensors.torch import save_file

    weights = {key: value.contiguous() for key, value in _state(2.0)["model"].items()}
    (tmp_path / "hf").mkdir()
    save_file(weights, tmp_path / "hf" / "model.safetensors")
    gpus.home = 0
    assert_same(dict(sorted(stepwell.load(tmp_path / "hf").items())), dict(sorted(weights.items())))
    assert len(gpus.made) == 5


def test_a_block_that_is_bad_is_not_the_gpus(saved: Path, gpus: Standing) -> None:
    [file] = saved.glob("step-*/model.safetensors")
    data = bytearray(file.read_bytes())
    data[8_000_000] ^= 1
    file.write_bytes(data)
    gpus.home = 0
    with pytest.raises(stepwell.CorruptData, match="w1"):
        stepwell.load(saved)


def test_a_gpu_that_fails_says_so(saved: Path, gpus: Standing, driver: FakeCuda) -> None:
    gpus.home = 0
    driver.fail("cuMemcpyHtoDAsync_v2", 719)
    try:
        with pytest.raises(stepwell.StepwellError, match="failed"):
            stepwell.load(saved)
    finally:
        driver.reset()
