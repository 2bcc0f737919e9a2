"""Cases of tiers from a config file: C3, C4, C5, C16 (retention), A1 (host memory), G16 (bandwidth)."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.format.names import Attempt
from stepwell.tiers.base import CheckpointKey
from stepwell.tiers.file import FileTier
from tests.cases.helpers import only_step
from tests.store.helpers import eventually


def state(value: float, size: int = 1000) -> dict[str, Any]:
    return {"model": {"w": torch.full((size,), float(value))}}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared tiers that were seen are remembered in the user's cache: not of these tests."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(folder: Path, near: str = "", far: str = "", top: str = "") -> Path:
    """A host, a near and a far tier, with more keys for each."""
    for name in ("near", "far"):
        (folder / name).mkdir(exist_ok=True)
    file = folder / "stepwell.toml"
    file.write_text(
        f"""{top}
        [[tier]]
        name = "host"
        driver = "host"
        capacity = "256MiB"

        [[tier]]
        name = "near"
        driver = "file"
        path = "{folder / "near"}"
        {near}

        [[tier]]
        name = "far"
        driver = "pfs"
        path = "{folder / "far"}"
        {far}
        """
    )
    return file


def steps_of(root: Path) -> list[int]:
    """Steps with a commit on the disk."""
    return sorted(int(path.parent.name[5:14]) for path in root.glob("run/step-*/manifest.json"))


def save_all(file: Path, steps: Iterable[int]) -> None:
    with stepwell.open(file, run="run") as store:
        store.restore(state(0))
        for step in steps:
            store.save(step, state(step)).wait("far")


@pytest.mark.parametrize("last", [1, 3])
@pytest.mark.parametrize("steps", [range(800, 1201, 100), range(9900, 10101, 40), range(30)])
def test_C4_the_newest_are_kept_in_the_order_of_numbers_and_exactly_as_many(
    tmp_path: Path, steps: range, last: int
) -> None:
    save_all(config(tmp_path, far=f"retain = {{ last = {last} }}"), steps)
    assert steps_of(tmp_path / "far") == list(steps)[-last:]
    assert steps_of(tmp_path / "near") == list(steps)  # no retain: all


def test_C5_saves_after_a_rewind_are_not_older_than_what_they_left_behind(tmp_path: Path) -> None:
    file = config(tmp_path, near="retain = { last = 2 }", far="retain = { last = 2 }")
    save_all(file, [100, 500, 600, 700])
    with stepwell.open(file, run="run") as store:
        store.rewind(600)
        for step in (610, 620):
            store.save(step, state(step)).wait("far")
            assert step in steps_of(tmp_path / "far") and step in steps_of(tmp_path / "near")
        eventually(lambda: [checkpoint.step for checkpoint in store.checkpoints()] == [610, 620])


def test_C3_the_old_goes_only_when_the_new_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies on each tier is looked at whenever something is deleted there."""
    file = config(tmp_path, near="retain = { last = 1 }", far='retain = { last = 1 }\ndelete_grace = "0s"')
    dropped: list[tuple[str, int, list[int]]] = []
    drop = FileTier.drop

    async def seen(tier: FileTier, what: Sequence[Any]) -> None:
        for key in what:
            attempt = Attempt.parse(key.attempt) if isinstance(key, CheckpointKey) else None
            if attempt is not None:
                dropped.append((tier.info.name, attempt.step, steps_of(tmp_path / tier.info.name)))
        await drop(tier, what)

    monkeypatch.setattr(FileTier, "drop", seen)
    with stepwell.open(file, run="run") as store:
        for step in range(1, 8):
            store.save(step, state(step, 2_000_000))
    assert {name for name, _, _ in dropped} == {"near", "far"}
    for name, step, there in dropped:
        assert max(there) > step, f"step {step} is deleted from {name}, which has {there}"
    assert steps_of(tmp_path / "far") == steps_of(tmp_path / "near") == [7]


def test_C16_retention_on_the_first_save_and_of_what_was_removed_by_hand(tmp_path: Path) -> None:
    file = config(tmp_path, near="retain = { last = 2 }", far="retain = { last = 2 }")
    with stepwell.open(file, run="run") as store:
        for step in (1, 2):
            store.save(step, state(step)).wait("far")
        shutil.rmtree(only_step(tmp_path / "far" / "run", 1))
        for step in (3, 4, 5):
            store.save(step, state(step)).wait("far")
    assert steps_of(tmp_path / "far") == steps_of(tmp_path / "near") == [4, 5]


def test_C16_slow_deletes_delay_no_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = config(tmp_path, near="retain = { last = 1 }")
    deleting: list[object] = []
    release = threading.Event()
    drop = FileTier.drop

    async def slow(tier: FileTier, what: Any) -> None:
        deleting.append(what)
        while not release.is_set():
            await asyncio.sleep(0.01)
        await drop(tier, what)

    monkeypatch.setattr(FileTier, "drop", slow)
    with stepwell.open(file, run="run") as store:
        for step in range(1, 6):
            store.save(step, state(step)).wait("far", timeout=30)
        assert deleting
        release.set()
    assert steps_of(tmp_path / "near") == [5]


def test_C18_a_copy_in_host_memory_of_what_was_replaced_on_the_shared_tier_is_not_used(tmp_path: Path) -> None:
    save_all(config(tmp_path), [1, 2])
    with stepwell.open(config(tmp_path), run="run", mode="r") as reader:
        reader.prefetch([2]).wait()
        target = state(0)
        found = reader.restore(target)
        assert found is not None and list(found.sources) == ["host"] and bool((target["model"]["w"] == 2).all())
        with stepwell.open(tmp_path / "far" / "run") as store:  # a job on another node
            store.rewind(1)
            store.save(2, state(2.5)).wait()
        found = reader.restore(target)
        assert found is not None and list(found.sources) == ["far"] and bool((target["model"]["w"] == 2.5).all())
        assert stepwell.load(tmp_path / "far" / "run@2")["model"]["w"][0] == 2.5


def test_C15_prefetching_and_restoring_write_nothing_beside_the_data(tmp_path: Path) -> None:
    save_all(config(tmp_path), [1, 2])
    before = modified(tmp_path)
    with stepwell.open(config(tmp_path), run="run", mode="r") as store:
        store.prefetch([1, 2]).wait()
        assert store.restore(state(0)) is not None
    stepwell.load(tmp_path / "far" / "run@1")
    assert modified(tmp_path) == before


def modified(folder: Path) -> dict[Path, int]:
    """When each file and folder of the tiers was last changed."""
    return {path: path.stat().st_mtime_ns for root in ("near", "far") for path in (folder / root).rglob("*")}


def test_A1_a_view_takes_a_few_bytes_of_the_host_tier_too(tmp_path: Path) -> None:
    big = torch.empty(25_000_000)
    with stepwell.open(config(tmp_path), run="run") as store:
        before = host_bytes(store)
        store.save(1, {"model": {"w": big[1000:1010].fill_(3)}}).wait("far")
        assert host_bytes(store) - before < 32_000
        target = {"model": {"w": torch.zeros(10)}}
        assert store.restore(target) is not None and bool((target["model"]["w"] == 3).all())


def host_bytes(store: stepwell.CheckpointStore) -> int:
    [host] = [tier for tier in store.tiers if tier.info.name == "host"]
    return host.usage().logical_bytes


def test_G16_a_flush_keeps_to_its_bandwidth_and_a_restore_does_not(tmp_path: Path) -> None:
    large = state(1, 12_000_000)  # 48 MB
    with stepwell.open(config(tmp_path, far='bandwidth = "40MB/s"'), run="run") as store:
        began = time.monotonic()
        store.save(1, large).wait("near")
        store.save(2, large).wait("far")
        assert time.monotonic() - began > 0.9 * 96 / 40
    shutil.rmtree(tmp_path / "near" / "run")
    with stepwell.open(config(tmp_path, far='bandwidth = "1MB/s"'), run="run", mode="r") as store:
        began = time.monotonic()
        found = store.restore(state(0, 12_000_000))
        assert found is not None and list(found.sources) == ["far"]
        assert time.monotonic() - began < 48 / 1
