"""The files of examples/: each is valid, makes a store's tiers and policies, and does what its comments say."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.building import Built, Node, build
from stepwell.config import load_config
from stepwell.reference import json_schema
from stepwell.settings import TierOptions
from stepwell.tiers.shared import SHARED_ROOT
from tests.config.test_reference import fits

EXAMPLES = Path(__file__).parents[2] / "examples"
NAMES = ["cluster-lustre", "gpu-node", "inference-host", "laptop"]
GIB = 1 << 30


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The folders that the examples' variables name."""
    found = {}
    for name in ("HOME", "SCRATCH", "ARCHIVE", "PROJECT_DIR", "MODELS"):
        found[name] = str(tmp_path / name.lower())
        monkeypatch.setenv(name, found[name])
        Path(found[name]).mkdir()
    Path(found["PROJECT_DIR"], "checkpoints").mkdir()
    with tempfile.TemporaryDirectory(dir=SHARED_ROOT, prefix="stepwell-test-") as memory:
        monkeypatch.setattr("stepwell.building.SHARED_ROOT", Path(memory))
        yield found


def built(name: str, places: dict[str, str]) -> Built:
    node = Node(local_ranks=8, limit_bytes=512 * GIB, free_bytes=256 * GIB, world=64)
    return build(load_config(EXAMPLES / f"{name}.toml", places), run="r", node=node, environ={})


def test_these_are_all() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.toml")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_it_is_valid_for_editors_too(name: str, places: dict[str, str]) -> None:
    assert fits(load_config(EXAMPLES / f"{name}.toml", places).written, json_schema())


@pytest.mark.parametrize(
    ("name", "tiers"),
    [
        ("laptop", {"host": None, "disk": 50 * GIB}),
        ("gpu-node", {"host": 16 * GIB, "nvme": 400 * GIB, "archive": None}),
        ("cluster-lustre", {"host": 16 * GIB, "nvme": 800 * GIB, "pfs": None}),
        ("inference-host", {"host": 32 * GIB, "models": None}),
    ],
)
def test_it_makes_tiers(name: str, tiers: dict[str, int | None], places: dict[str, str]) -> None:
    made = built(name, places)
    sizes = {tier.info.name: tier.info.capacity_bytes for tier in made.tiers}
    assert {**sizes, "host": tiers["host"] and sizes["host"]} == tiers
    assert [t.info.write_bytes_per_s for t in made.tiers if t.info.scope == "shared"] == (
        {"gpu-node": [2e9 / 8], "cluster-lustre": [20e9 / 64], "inference-host": [None]}.get(name, [])
    )


def test_the_cluster_does_what_its_comments_say(places: dict[str, str]) -> None:
    made = built("cluster-lustre", places)
    assert [(type(policy).__name__, vars(policy)["tier"]) for policy in made.policies] == [
        ("FlushNewest", "pfs"), ("FlushRule", "pfs"), ("FlushRule", "pfs"), ("Retain", "nvme"), ("Retain", "pfs"),
    ]  # fmt: skip
    assert made.options == {"nvme": TierOptions(), "pfs": TierOptions(1800.0, "size", by_rules=True)}
    assert made.settings == {"max_unsaved": 3600.0, "block_timeout": 120.0}


def test_the_laptop_saves_and_restores(places: dict[str, str]) -> None:
    with stepwell.open(EXAMPLES / "laptop.toml", run="r", block_timeout="1min") as store:
        store.save(1, {"model": {"w": torch.ones(4)}}).wait()
        state = {"model": {"w": torch.zeros(4)}}
        restored = store.restore(state)
        assert restored is not None and restored.step == 1 and state["model"]["w"].tolist() == [1, 1, 1, 1]
    assert Path(places["HOME"], "checkpoints", "r").is_dir()


def test_the_inference_host_reads_what_training_wrote(
    places: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.building.cgroup_limit_bytes", lambda: GIB // 4)
    training = tmp_path / "training.toml"
    training.write_text('[[tier]]\nname = "pfs"\ndriver = "pfs"\npath = "$MODELS"\n')
    with stepwell.open(training, run="llama-sft") as store:
        store.save(7, {"model": {"w": torch.ones(300_000)}, "optimizer": {"m": torch.ones(3)}}).wait()
    with stepwell.open(EXAMPLES / "inference-host.toml", run="llama-sft", mode="r") as store:
        store.prefetch("@latest").wait()
        weights = stepwell.load(f"{places['MODELS']}/llama-sft@latest", part="model")
    assert weights["w"].sum() == 300_000
