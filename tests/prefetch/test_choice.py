"""Which chunks come: by part, by key, of whichever kind of reference; and to storage tiers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import stepwell
from stepwell.ahead import Turns
from stepwell.errors import CheckpointNotFound, ConfigError, KeyMismatch
from stepwell.prefetching import Urgency
from tests.prefetch.helpers import MIB, here, moved_bytes, on_loop, state
from tests.store.helpers import disk, host, steps


def saved(folder: Path) -> Path:
    """A run of two steps; returns its folder."""
    with stepwell.open(run="run", tiers=[disk(folder)], policies=[]) as store:
        for step in (1, 2):
            store.save(step, state(float(step))).wait()
    return folder / "disk" / "run"


def brought(folder: Path, ref: object, **choice: object) -> tuple[int, int]:
    """(chunks in memory, bytes read) after a prefetch of its own store."""
    memory = host(32)
    with stepwell.open(run="run", tiers=[memory, disk(folder)], mode="r", policies=[]) as store:
        handle = store.prefetch(ref, **choice).wait(20)  # type: ignore[arg-type]
        chunks = here(memory)
        assert handle.progress.done_bytes == handle.progress.total_bytes
        assert moved_bytes(store) == handle.progress.total_bytes
        return len(chunks), moved_bytes(store)


def test_parts_and_keys_of_the_stores_own_run(tmp_path: Path) -> None:
    saved(tmp_path)
    whole, _ = brought(tmp_path, 2)
    model, _ = brought(tmp_path, 2, parts="model")
    first, size = brought(tmp_path, "@latest", parts=["model"], keys="first")
    assert whole > 12 and model == 9 and first == 5 and size == 5 * MIB  # the file begins with a header
    assert brought(tmp_path, 2, keys=["model.first", "optimizer.*"])[0] == 5 + whole - model
    assert brought(tmp_path, 2, keys="optimizer")[0] == brought(tmp_path, np.int64(2), parts=["optimizer"])[0]


def test_parts_and_keys_of_another_run_and_of_plain_files(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    run = saved(tmp_path / "there")
    for ref in (run, f"{run}@2", next(run.glob("step-000000002*"))):
        assert brought(tmp_path, ref, parts="model", keys="second")[0] == 5
    plain = tmp_path / "plain"
    plain.mkdir()
    weights = {name: torch.ones(4 * MIB // 4) for name in ("layers.0.w", "layers.1.w")}
    save_file(weights, plain / "model-00001-of-00002.safetensors")
    save_file({"head": torch.ones(MIB // 4)}, plain / "model-00002-of-00002.safetensors")
    names = {name: "model-00001-of-00002.safetensors" for name in weights}
    index = {"weight_map": {**names, "head": "model-00002-of-00002.safetensors"}}
    (plain / "model.safetensors.index.json").write_text(json.dumps(index))
    assert brought(tmp_path, plain)[0] == 9 + 2
    assert brought(tmp_path, plain, keys="layers.0.*")[0] == 5
    assert brought(tmp_path, plain, keys=["head"], parts=["model"])[0] == 2
    assert brought(tmp_path, plain / "model-00001-of-00002.safetensors", keys="*.w")[0] == 9


def test_what_was_brought_by_key_is_found_by_a_load_of_that_key(tmp_path: Path) -> None:
    run = saved(tmp_path)
    with stepwell.open(run="run", tiers=[host(32), disk(tmp_path)], mode="r", policies=[]) as store:
        store.prefetch(2, keys="model.first").wait(20)
        before = moved_bytes(store)
        assert bool((stepwell.load(f"{run}@2", part="model", keys="first")["first"] == 2).all())
        assert moved_bytes(store) == before


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    run = saved(tmp_path)
    with stepwell.open(run="run", tiers=[host(32), disk(tmp_path)], mode="r", policies=[]) as store:
        for choice, what in (({"parts": "head"}, "no part.*head.*It has model, optimizer"), ({"keys": "b*"}, r"b\*")):
            for ref in (1, f"{run}@1"):
                with pytest.raises(KeyMismatch, match=what):
                    store.prefetch(ref, **choice).wait(20)  # type: ignore[arg-type]
        with pytest.raises(CheckpointNotFound):
            store.prefetch([1, 7]).wait(20)
        with pytest.raises(CheckpointNotFound):
            store.prefetch(tmp_path / "nowhere").wait(20)


def test_checkpoints_and_parts_come_up_to_a_storage_tier(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    with stepwell.open(run="run", tiers=[far], policies=[]) as store:
        for step in (1, 2, 3):
            store.save(step, state(float(step))).wait()
    with stepwell.open(run="run", tiers=[near, disk(tmp_path, name="far")], policies=[]) as store:
        size = store.prefetch(3, to="near").wait(20).progress.total_bytes
        assert steps(store, "near") == [3]
        handle = store.prefetch([1, 2], to="near", parts=["model"]).wait(20)
        found = {c.step: c for c in store.checkpoints()}
        assert "near" in found[1].tiers and found[1].complete_on == ("far",)
        assert handle.progress.done_bytes == handle.progress.total_bytes == 2 * size
        left = store.prefetch([1, 2], to="near", max_bytes=size + 1).wait(20).progress
        assert (left.total_bytes, left.left_out_bytes) == (size, size)
        assert [c.step for c in store.checkpoints(tier="near", complete=True)] == [1, 3]
        with pytest.raises(ConfigError, match="only checkpoints of run run"):
            store.prefetch(tmp_path / "far" / "run", to="near").wait(20)
        with pytest.raises(KeyMismatch, match="no part opt.*It has model"):
            store.prefetch([1, 2], to="near", parts=["model", "opt"]).wait(20)


def test_the_more_urgent_goes_first_to_a_storage_tier() -> None:
    async def scenario() -> list[int]:
        turns, order, begun = Turns(), [], asyncio.Event()

        async def one(number: int, priority: int, *, first: bool = False) -> None:
            async with turns.taken(Urgency.of(priority, None)):
                order.append(number)
                if first:
                    await begun.wait()

        tasks = [asyncio.ensure_future(one(0, 0, first=True))]
        await asyncio.sleep(0)
        tasks += [asyncio.ensure_future(one(number, priority)) for number, priority in ((1, 0), (2, 5), (3, 1), (4, 5))]
        await asyncio.sleep(0)
        tasks[3].cancel()
        await asyncio.sleep(0)
        begun.set()
        await asyncio.wait(tasks)
        return order

    assert on_loop(scenario()) == [0, 2, 4, 1]
