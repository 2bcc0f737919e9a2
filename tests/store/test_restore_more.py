"""Restores and prefetches that are given up, that meet deletions, and that share memory with saves."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import stepwell
from stepwell.errors import CheckpointGone, KeyMismatch, NoGoodCheckpoint, StoreClosed, TierFull, WaitTimeout
from stepwell.format.names import Attempt
from stepwell.prefetching import Prefetch
from stepwell.reader import OpenCheckpoint, open_checkpoint
from stepwell.runtime import Runtime
from stepwell.tiers.base import CheckpointKey, RecordKey
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier, Priority
from stepwell.tiers.wrap import Fault, Faulty
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state

MIB = 1 << 20


def on_loop(work: Any) -> Any:
    return Runtime.get().run(work, 20)


def settle(store: stepwell.CheckpointStore) -> None:
    """Waits until no chunk is on its way."""
    eventually(lambda: store.mover.arena.in_use == 0)


# -- given up ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["timeout", "Ctrl-C"])
def test_what_a_restore_leaves_behind_puts_nothing_into_the_state(tmp_path: Path, how: str) -> None:
    """A tier that hangs answers late: by then the state may hold another checkpoint, or be trained on."""
    tier = disk(tmp_path)
    size = 3_000_000
    with stepwell.open(run="run", tiers=[tier]) as store:
        for step in (1, 2):
            store.save(step, state(float(step), size)).wait()  # the dtype of the target: read in place
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[tier], mode="r") as store:
        tier.plan = [Fault("read", 1, "stall", times=ALWAYS)]
        target = state(0.0, size)
        if how == "timeout":
            with pytest.raises(WaitTimeout) as caught:
                store.restore(target, timeout=0.3)
            assert any("mix" in note for note in caught.value.__notes__)
        else:

            def press() -> None:
                eventually(lambda: bool(tier.hit))
                os.kill(os.getpid(), signal.SIGINT)

            strike = threading.Thread(target=press)
            with pytest.raises(KeyboardInterrupt):
                strike.start()
                store.restore(target)
            strike.join()
        hung = store.mover.arena.in_use
        tier.plan = []
        found = store.restore(target, 1)
        assert found is not None and hung > 0 and store.mover.arena.in_use == hung
        release(tier)
        settle(store)
        assert bool((target["model"]["w"] == 1).all())
        eventually(lambda: not any(store.catalog.reading.values()))


def test_opening_that_is_cancelled_at_any_moment_gives_every_lease_back(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    inner = [tier.tier for tier in (near, far)]
    with stepwell.open(run="run", tiers=[host(), near, far]) as store:
        store.save(1, {**state(), "optimizer": {"m": torch.ones(300_000)}}).wait("far")

        async def scenario(after: int) -> bool:
            [attempt] = store.catalog.holdings
            opening = asyncio.ensure_future(open_checkpoint(store.catalog, attempt, 0, 1))
            for _ in range(after):
                await asyncio.sleep(0 if after < 12 else 0.0002)
            opening.cancel()
            await asyncio.wait([opening])
            if not opening.cancelled():
                await opening.result().close()
            return not any(store.catalog.reading.values())

        for after in range(24):
            assert on_loop(scenario(after))
            eventually(lambda: store.mover.arena.in_use == 0)
            for tier in inner:
                assert isinstance(tier, FileTier)
                eventually(lambda files=tier: not files._readers._leased)  # type: ignore[misc]


# -- deletions -----------------------------------------------------------------------------------------


def deleted_at(store: stepwell.CheckpointStore, tier: Faulty, operation: str) -> None:
    """Deletes the newest checkpoint as another process would, just before the tier carries out the operation."""
    wrapped = getattr(tier, operation)
    newest = max(store.catalog.holdings)
    key = CheckpointKey("run", newest.folder)

    async def first(*arguments: Any, **more: Any) -> Any:
        setattr(tier, operation, wrapped)
        await tier.drop([key])
        return await wrapped(*arguments, **more)

    setattr(tier, operation, first)


@pytest.mark.parametrize("operation", ["lease", "read", "fetch"])
@pytest.mark.parametrize("step", [None, 2])
def test_a_checkpoint_deleted_while_it_is_restored_is_whole_or_gone(
    tmp_path: Path, operation: str, step: int | None
) -> None:
    with stepwell.open(run="run", tiers=[disk(tmp_path)]) as store:
        for number in (1, 2):
            store.save(number, state(float(number))).wait()
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[tier]) as store:
        store.checkpoints()
        deleted_at(store, tier, operation)
        target = state(0.0)
        if operation == "read":  # its files are open
            found = store.restore(target, step)
            assert found is not None and found.step == 2
        elif step is not None:
            with pytest.raises(CheckpointGone, match="deleted meanwhile"):
                store.restore(target, step)
            assert bool((target["model"]["w"] == 0).all())
            return
        else:
            found = store.restore(target)
            assert found is not None and found.step == 1 and list(found.skipped) == [2]
        assert bool((target["model"]["w"] == found.step).all())


async def begun_to_open(store: stepwell.CheckpointStore) -> tuple[Attempt, asyncio.Task[OpenCheckpoint]]:
    """The store's only checkpoint, and the task that opens it, which has made its first step."""
    [attempt] = store.catalog.holdings
    opening = asyncio.ensure_future(open_checkpoint(store.catalog, attempt, 0, 1))
    await asyncio.sleep(0)
    return attempt, opening


def test_a_checkpoint_that_another_task_removes_from_the_catalog_is_gone_not_a_bug(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[tier]) as store:
        store.save(1, state()).wait()

        async def scenario() -> None:
            attempt, opening = await begun_to_open(store)
            store.catalog.remove(attempt, tier)
            await tier.drop([CheckpointKey("run", attempt.folder)])
            with pytest.raises(CheckpointGone):
                (await opening).held[0]

        on_loop(scenario())


def test_what_is_being_opened_is_not_deleted_by_retention(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[tier]) as store:
        store.save(1, state()).wait()

        async def scenario() -> None:
            attempt, opening = await begun_to_open(store)
            assert store.catalog.reading[attempt] == 1
            await (await opening).close()
            assert store.catalog.reading[attempt] == 0

        on_loop(scenario())


# -- which checkpoint ----------------------------------------------------------------------------------


def test_a_part_that_no_checkpoint_has_does_not_lead_back_to_the_oldest(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        for step in (1, 2, 3):
            store.save(step, state(float(step))).wait()
        target = {**state(0.0), "ema": {"w": torch.zeros(3)}}
        found = store.restore(target, strict=False)
        assert found is not None and found.step == 3 and found.skipped == {}
        assert found.missing and all(key.startswith("ema") for key in found.missing)
        assert bool((target["model"]["w"] == 3).all())
        with pytest.raises(KeyMismatch, match="ema") as caught:
            store.restore({**state(0.0), "ema": {"w": torch.zeros(3)}})
        assert caught.value.where.get("step", 3) == 3


def test_a_part_that_only_an_older_checkpoint_has_decides(tmp_path: Path) -> None:
    whole = {**state(1.0), "ema": {"w": torch.ones(3)}}
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, whole).wait()
        store.save(2, state(2.0)).wait()
        target = {**state(0.0), "ema": {"w": torch.zeros(3)}}
        found = store.restore(target, strict=False)
        assert found is not None and found.step == 1 and "'ema'" in found.skipped[2]
    [bad] = (tmp_path / "run").glob("step-000000001.*/model.safetensors")
    bad.write_bytes(bytes(bad.stat().st_size))
    with stepwell.open(tmp_path / "run", mode="r") as store:
        found = store.restore(target, strict=False)  # none that holds all parts is good: the newest of the others
        assert found is not None and found.step == 2 and found.skipped == {}
        with pytest.raises(KeyMismatch, match="ema") as caught:
            store.restore(target)
        assert any("Step 1 was passed over" in note for note in caught.value.__notes__)
        with pytest.raises(NoGoodCheckpoint):
            [bad] = (tmp_path / "run").glob("step-000000002.*/model.safetensors")
            bad.write_bytes(bytes(bad.stat().st_size))
            store.restore(target, strict=False)


def test_a_tier_whose_manifest_is_not_good_does_not_hold_the_checkpoint(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=[disk(tmp_path, name="near"), disk(tmp_path, name="far")]) as store:
        store.save(1, state()).wait("far")
    [manifest] = (tmp_path / "near").glob("run/step-*/manifest.json")
    manifest.write_text("{")
    with stepwell.open(run="run", tiers=[disk(tmp_path, name="near"), disk(tmp_path, name="far")], mode="r") as store:
        [found] = store.checkpoints()
        assert found.tiers == found.complete_on == ("far",) and store.latest("near") is None


# -- prefetch and memory -------------------------------------------------------------------------------


@pytest.fixture
def models(tmp_path: Path) -> Iterator[list[Path]]:
    """Two plain folders of nine MiB each."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        save_file({"w": torch.full((9 * MIB // 4 - 100,), float(number + 1))}, folder / "model.safetensors")
    yield folders


def cached(arena_of: HostTier) -> int:
    return arena_of.arena.cached_bytes // MIB


def test_a_prefetch_makes_room_for_a_save_and_not_the_other_way_round(tmp_path: Path, models: list[Path]) -> None:
    """The prefetch hangs half-way; the save needs its memory, and gets it."""
    memory = host(16)  # 14 chunks may stay
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], block_timeout=20) as store:
        first = store.prefetch(models[0]).wait()
        assert first.progress.done_bytes == first.progress.total_bytes > 9 * MIB - 1000
        room = on_loop_acquire(store, 2)  # so that the second one stops with some chunks of its own
        second = store.prefetch(models[1])
        eventually(lambda: second.progress.done_bytes >= 5 * MIB)
        save = store.save(1, state(4.0, 2_000_000))
        save.wait("host")
        save.wait()
        for slot in room:
            Runtime.get().loop.call_soon_threadsafe(store.mover.arena.release, slot)
        second.wait(20)
        settle(store)
    assert bool((stepwell.load(tmp_path / "disk" / "run")["model"]["w"] == 4).all())


def on_loop_acquire(store: stepwell.CheckpointStore, count: int) -> list[Any]:
    async def take() -> list[Any]:
        return [await store.mover.arena.acquire(Priority.RESTORE, kept=True) for _ in range(count)]

    return list(on_loop(take()))


def test_what_a_prefetch_brings_next_does_not_push_out_what_it_has_brought(tmp_path: Path, models: list[Path]) -> None:
    memory = host(16)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)]) as store:
        store.prefetch(models[0]).wait(20)
        before = cached(memory)
        room = on_loop_acquire(store, 8)  # of the 14 that may stay: the first model makes room for that
        handle = store.prefetch(models[1])
        eventually(lambda: handle.progress.done_bytes == 6 * MIB)
        eventually(lambda: handle.progress.waiting_bytes > 0)  # for what is not its own
        assert cached(memory) == 14 and handle.progress.waiting_bytes == handle.progress.total_bytes - 6 * MIB
        with pytest.raises(WaitTimeout, match="3.00 MiB of it for room"):
            handle.wait(0.01)
        for slot in room:
            Runtime.get().loop.call_soon_threadsafe(store.mover.arena.release, slot)
        handle.wait(20)
        assert handle.progress.waiting_bytes == 0 and memory.arena.evicted_bytes == before * MIB
        assert bool((stepwell.load(models[1])["w"] == 2).all())


def test_prefetches_that_do_not_fit_together_both_end(tmp_path: Path, models: list[Path]) -> None:
    memory = host(16)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)]) as store:
        handles = [store.prefetch(folder) for folder in models]
        for handle in handles:
            handle.wait(20)
        assert cached(memory) == memory.arena.kept_max
        for number, folder in enumerate(models):
            assert bool((stepwell.load(folder)["w"] == number + 1).all())
        with pytest.raises(TierFull, match="do not fit"):
            big = tmp_path / "big"
            big.mkdir()
            save_file({"w": torch.zeros(15 * MIB // 4)}, big / "model.safetensors")
            store.prefetch(big).wait(20)


def test_a_prefetch_leaves_the_only_copy_of_a_save_alone(tmp_path: Path) -> None:
    memory, tier = host(16), disk(tmp_path)
    with stepwell.open(run="run", tiers=[memory, tier], policies=[]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        save = store.save(2, state(2.0, 2_000_000))
        save.wait("host")
        try:
            store.prefetch(2).wait(20)  # waits for nothing of the disk
            stepwell.load(tmp_path / "disk" / "run@1")
            assert sum(slot.dirty for slot in memory.arena._slots) == 8  # still, until the disk has them
        finally:
            tier.plan = []
            release(tier)
        save.wait()
        assert not any(slot.dirty for slot in memory.arena._slots)


def test_a_prefetch_that_is_cancelled_keeps_nothing_from_others(tmp_path: Path, models: list[Path]) -> None:
    memory = host(16)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)]) as store:
        room = on_loop_acquire(store, 8)
        handle = store.prefetch(models[0])
        eventually(lambda: handle.progress.done_bytes >= 5 * MIB)
        waiting = store.prefetch(models[1])  # for the first one's end
        handle.cancel()
        with pytest.raises(StoreClosed, match="cancelled"):
            handle.wait()
        assert not handle.done()
        for slot in room:
            Runtime.get().loop.call_soon_threadsafe(store.mover.arena.release, slot)
        waiting.wait(20)
        settle(store)
        assert memory.arena._clean == cached(memory)
        for number, folder in enumerate(models):
            assert bool((stepwell.load(folder)["w"] == number + 1).all())


def test_whoever_stops_awaiting_a_prefetch_does_not_end_it(tmp_path: Path, models: list[Path]) -> None:
    memory = host(16)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)]) as store:
        room = on_loop_acquire(store, 10)
        handle = store.prefetch(models[0])

        async def wait(one: Prefetch, limit: float) -> Prefetch:
            return await asyncio.wait_for(asyncio.ensure_future(arrives(one)), limit)

        async def arrives(one: Prefetch) -> Prefetch:
            return await one

        with pytest.raises(TimeoutError):
            asyncio.run(wait(handle, 0.1))
        for slot in room:
            Runtime.get().loop.call_soon_threadsafe(store.mover.arena.release, slot)
        assert asyncio.run(wait(handle, 20)).done()
        second = store.prefetch(models[1])
        second.cancel()
        with pytest.raises(StoreClosed, match="cancelled"):
            asyncio.run(wait(second, 20))


# -- warm loads ----------------------------------------------------------------------------------------


def test_memory_of_a_run_that_was_begun_again_is_not_taken_for_it(tmp_path: Path) -> None:
    old = stepwell.open(run="run", tiers=[host(), disk(tmp_path)])
    old.save(1, state(1.0)).wait()
    folder = tmp_path / "disk" / "run"
    names = {path.name for path in folder.glob("step-*")}
    assert bool((stepwell.load(folder)["model"]["w"] == 1).all())
    shutil.rmtree(folder)
    with stepwell.open(run="run", tiers=[disk(tmp_path)]) as new:
        new.save(1, state(2.0)).wait()
        assert {path.name for path in folder.glob("step-*")} == names  # the same name, another checkpoint
        assert bool((stepwell.load(folder)["model"]["w"] == 2).all())
        old.close()


def moved_bytes(store: stepwell.CheckpointStore) -> dict[tuple[str, str], int]:
    async def look() -> dict[tuple[str, str], int]:
        return {(way.source, way.target): way.statistics().moved_bytes for way in store.mover.edges.all()}

    return dict(on_loop(look()))


def test_a_warm_load_reads_no_file(tmp_path: Path, models: list[Path]) -> None:
    with stepwell.open(run="run", tiers=[host(), disk(tmp_path)]) as store:
        store.save(1, state(3.0, 2_000_000)).wait()
        store.prefetch(models[0]).wait(20)
        before = moved_bytes(store)
        link = tmp_path / "link"
        link.symlink_to(tmp_path / "disk" / "run")
        for ref in (tmp_path / "disk" / "run", link):
            assert bool((stepwell.load(ref)["model"]["w"] == 3).all())
        assert bool((stepwell.load(models[0])["w"] == 1).all())
        moved = {way: size - before.get(way, 0) for way, size in moved_bytes(store).items()}
        assert moved.pop(("host", "state")) > 2 * 8_000_000 + 9_000_000 and not any(moved.values())


def test_a_store_that_is_closed_during_a_warm_load_does_not_fail_it(tmp_path: Path, models: list[Path]) -> None:
    with stepwell.open(run="run", tiers=[host(16), disk(tmp_path)]) as store:
        store.prefetch(models[0]).wait(20)
        arena = store.mover.arena
        find, acquire = arena.find, arena.acquire

        def lost(shard: Any, number: int, *, used: bool = True) -> Any:
            arena.find = find  # type: ignore[method-assign]
            arena._closed = True  # as if `close` had come now
            return None

        arena.find = lost  # type: ignore[method-assign]
        assert bool((stepwell.load(models[0])["w"] == 1).all())
        arena._closed = False
        assert arena.acquire == acquire


# -- records -------------------------------------------------------------------------------------------


def test_a_manifest_that_vanishes_under_a_restore_makes_it_pass_on(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    with stepwell.open(run="run", tiers=[near, far]) as store:
        store.save(1, state(7.0)).wait("far")

        async def drop() -> None:
            [attempt] = store.catalog.holdings
            assert isinstance(attempt, Attempt)
            await near.drop([RecordKey("run", f"{attempt.folder}/manifest.json")])
            await near.drop([CheckpointKey("run", attempt.folder)])

        store.checkpoints()
        on_loop(drop())
        target = state(0.0)
        found = store.restore(target)
        assert found is not None and found.tiers == ("far",) and set(found.sources) == {"far"}
        assert bool((target["model"]["w"] == 7).all())
