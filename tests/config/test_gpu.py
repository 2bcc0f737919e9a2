"""A GPU tier in a config file: what it may say, and what becomes of it on a machine without a GPU."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import stepwell
from stepwell.building import Node, build
from stepwell.cli import app
from stepwell.config import load_config
from stepwell.errors import ConfigError, NotPlanned, TierUnavailable
from stepwell.lab.speeds import Speeds, write_speeds
from stepwell.lab.tier import Speed
from stepwell.tiers.gpu import GpuTier

GIB = 1 << 30
GPU = '[[tier]]\nname = "gpu"\ndriver = "gpu"\ncapacity = "64GiB"\n'
HOST = '[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "64MiB"\n'
NVME = '[[tier]]\nname = "nvme"\ndriver = "file"\npath = "{}"\n'


def _file(folder: Path, *tiers: str) -> Path:
    path = folder / "config.toml"
    (folder / "nvme").mkdir(exist_ok=True)
    path.write_text("\n".join(tiers).replace("{}", str(folder / "nvme")))
    return path


def test_a_size_is_of_all_gpus_of_the_node_and_a_percentage_of_each(tmp_path: Path) -> None:
    node = Node(4, GIB, None, 4)
    [gpu, *_] = build(load_config(_file(tmp_path, GPU, NVME)), run="run", node=node).tiers
    assert isinstance(gpu, GpuTier) and gpu.info.capacity_bytes == 16 * GIB and gpu.info.survives == "nothing"
    config = load_config(_file(tmp_path, GPU.replace("64GiB", "25%"), HOST, NVME))
    [gpu, *_] = build(config, run="run", node=Node.here()).tiers
    assert isinstance(gpu, GpuTier) and gpu._share == 0.25
    assert [tier.info.name for tier in build(config, run="run", storage_only=True).tiers] == ["nvme"]


@pytest.mark.parametrize(
    ("tiers", "says"),
    {
        "no capacity": ((GPU.replace('capacity = "64GiB"\n', ""), NVME), "gpu driver needs a capacity.*16GiB"),
        "not the nearest": ((HOST, GPU, NVME), "gpu tier is not the nearest"),
        "alone": ((GPU,), "storage"),
        "above memory alone": ((GPU, HOST), "storage"),
        "two": ((GPU, GPU.replace('"gpu"\nd', '"other"\nd'), NVME), "gpu tier is not the nearest"),
        "flush": ((GPU + 'flush = "all"\n', NVME), "gpu driver has no 'flush'"),
        "path": ((GPU + 'path = "/x"\n', NVME), "gpu driver has no 'path'"),
        "shared": ((GPU + "shared = true\n", NVME), "gpu driver has no 'shared'"),
        "no policy": ((GPU + 'evict = "newest"\n', NVME), "evict"),
        "a percentage of a disk": ((GPU, NVME + 'capacity = "5%"\n'), "only for gpu and host tiers"),
    }.values(),
)
def test_what_is_wrong(tmp_path: Path, tiers: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        build(load_config(_file(tmp_path, *tiers)), run="run")


def _state(value: float) -> dict[str, Any]:
    return {"model": {"w": torch.full((10_000,), value)}}


def test_without_a_gpu_a_store_does_without_and_says_so_where_asked(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with stepwell.open(_file(tmp_path, GPU, HOST, NVME), run="run") as store, caplog.at_level(logging.WARNING):
        for step in range(1, 4):
            save = store.save(step, _state(float(step))).wait("nvme")
        with pytest.raises(NotPlanned, match="nothing of the state is in GPU memory"):
            save.wait("gpu", timeout=20)
        target = _state(0.0)
        done = store.restore(target, step=2)
        assert done is not None and float(target["model"]["w"][0]) == 2.0 and "gpu" not in done.tiers
        if not torch.cuda.is_available():
            with pytest.raises(TierUnavailable, match="no room for the checkpoint: gpu"):
                store.prefetch(2, to="gpu").wait(timeout=20)
        assert next(tier for tier in store.status().tiers if tier.name == "gpu").used_bytes == 0
    assert not caplog.records


def test_commands_do_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = _file(tmp_path, GPU, HOST, NVME)
    monkeypatch.setenv("STEPWELL_CONFIG", str(config))
    with stepwell.open(config, run="run") as store:
        store.save(1, _state(1.0)).wait("nvme")
    speeds = tmp_path / "speeds.toml"
    speeds.write_text(write_speeds(Speeds(1e10, {"nvme": Speed(1e9, 1e9)})))
    training = ["--speeds", str(speeds), "--synthetic", "training,state=1GB,every=10,saves=3"]
    for command, says in {
        ("config", "check", str(config)): "tier gpu (gpu)",
        ("ls", "run"): "nvme",
        ("show", "run@1"): "on nvme",
        ("verify", "run@1"): "all good",
        ("doctor",): "gpu (gpu)",
        ("cp", "run@1", str(tmp_path / "copy")): "",
        ("lab", "simulate", str(config), *training): "gpu is left out",
    }.items():
        done = CliRunner().invoke(app, list(command))
        assert done.exit_code == 0 and says in done.output, f"{command}: {done.output}"
