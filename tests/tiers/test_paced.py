"""Dropping a checkpoint without haste: the manifest first, then file by file, and nobody waits for it."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest

from stepwell.tiers import _folders
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey, Tier
from stepwell.tiers.pfs import PfsTier
from tests.contract.suite import CHECKPOINT, MANIFEST, NEW, SHARD, data_of, found, get, put, save
from tests.tiers.helpers import on, pfs, record_deletions, tree

FILES = 5


class Gate:
    """Sleeps until it is told to go on."""

    def __init__(self) -> None:
        self.naps = 0
        self.asleep = asyncio.Event()
        self._go = asyncio.Semaphore(0)

    async def __call__(self, seconds: float) -> None:
        assert seconds == 0.02
        self.naps += 1
        self.asleep.set()
        await self._go.acquire()

    async def next(self) -> None:
        """Lets one sleeper go on and waits until somebody sleeps again."""
        self.asleep.clear()
        self._go.release()
        await self.asleep.wait()

    def open(self) -> None:
        for _ in range(1000):
            self._go.release()


def paced(root: Path, sleep: Any) -> PfsTier:
    return pfs(root, delete_pause_s=0.02, sleep=sleep)


async def save_many(tier: Tier, checkpoint: CheckpointKey) -> None:
    shards = [ShardKey(checkpoint, f"{number}.safetensors") for number in range(FILES)]
    reservations = [await put(tier, shard, data_of(10)) for shard in shards]
    assert await tier.commit(RecordKey("run", f"{checkpoint.attempt}/rank-00000.json"), b"{}", shards=reservations)
    assert await tier.commit(RecordKey("run", f"{checkpoint.attempt}/manifest.json"), b"{}")


def test_the_manifest_goes_first_and_durably_then_file_by_file(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[str] = []

    async def sleep(seconds: float) -> None:
        steps.append("pause")

    async def scenario(tier: PfsTier) -> None:
        await save_many(tier, CHECKPOINT)
        with monkeypatch.context() as patch:
            record_deletions(steps, patch)
            await tier.drop([CHECKPOINT])
        assert steps[:4] == ["manifest.json", "fsync", "rank-00000.json", "fsync"]
        assert steps[5::2] == ["pause"] * FILES
        assert set(steps[4::2]) == {f"{number}.safetensors" for number in range(FILES)}
        assert tier.usage().logical_bytes == 0 and await found(tier) == set()

    on(paced(root, sleep), scenario)
    assert tree(root) == {"run", ".stepwell-tier.json"}


def test_a_drop_that_pauses_delays_nobody_and_holds_no_thread(root: Path) -> None:
    async def main() -> None:
        gate = Gate()
        tier = paced(root, gate)
        await tier.start()
        await save_many(tier, CHECKPOINT)
        await save_many(tier, NEW.checkpoint)
        first = asyncio.ensure_future(tier.drop([CHECKPOINT]))
        await gate.asleep.wait()
        second = asyncio.ensure_future(tier.drop([NEW.checkpoint]))
        assert await tier.fetch(MANIFEST) is None  # first of all
        other = ShardKey(CheckpointKey("run", "step-3"), "model.safetensors")
        await save(tier, other, data_of(5000))
        assert await get(tier, other, 5000) == data_of(5000)
        await tier.drop([other])
        for _ in range(FILES - 1):
            await gate.next()
            assert (root / "run" / NEW.checkpoint.attempt / "manifest.json").exists()  # one after the other
        assert gate.naps == FILES and not first.done() and not second.done()
        gate.open()
        await asyncio.gather(first, second)
        assert await found(tier) == {("step-3", "manifest.json", 2)}
        await tier.close()

    asyncio.run(main())


def test_a_cancelled_drop_is_no_checkpoint_any_more_and_can_be_dropped_again(root: Path) -> None:
    async def main() -> None:
        gate = Gate()
        tier = paced(root, gate)
        await tier.start()
        await save_many(tier, CHECKPOINT)
        dropping = asyncio.ensure_future(tier.drop([CHECKPOINT]))
        await gate.asleep.wait()
        dropping.cancel()
        with pytest.raises(asyncio.CancelledError):
            await dropping
        assert await tier.fetch(MANIFEST) is None and len(await found(tier)) == FILES - 1
        gate.open()
        await tier.drop([CHECKPOINT])
        assert await found(tier) == set()
        await tier.close()

    asyncio.run(main())


def test_a_listing_that_fails_for_a_moment_is_asked_for_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = _folders.names_in, 0

    def names_in(path: str) -> list[str]:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)
        return real(path)

    async def sleep(seconds: float) -> None:
        pass

    async def scenario(tier: PfsTier) -> None:
        await save(tier, SHARD, data_of(10))
        monkeypatch.setattr(_folders, "names_in", names_in)
        await tier.drop([CHECKPOINT])
        assert calls == 2 and await found(tier) == set()

    on(paced(root, sleep), scenario)


def test_a_link_in_place_of_a_checkpoint_is_not_followed(root: Path) -> None:
    async def sleep(seconds: float) -> None:
        raise AssertionError("nothing is deleted here")

    async def scenario(tier: PfsTier) -> None:
        await save(tier, SHARD, data_of(10))
        (root / "run" / "step-9").symlink_to(CHECKPOINT.attempt)
        with pytest.raises(OSError):
            await tier.drop([CheckpointKey("run", "step-9")])
        assert await get(tier, SHARD, 10) == data_of(10)

    on(paced(root, sleep), scenario)


def test_what_the_server_removes_itself_is_left_to_it(root: Path) -> None:
    async def sleep(seconds: float) -> None:
        pass

    async def scenario(tier: PfsTier) -> None:
        await save(tier, SHARD, data_of(10))
        (root / "run" / CHECKPOINT.attempt / ".nfs0001").write_bytes(b"still open somewhere")
        (root / "run" / CHECKPOINT.attempt / "theirs").mkdir()
        names = await tier.files.names_of(CHECKPOINT)
        assert set(names) == {SHARD.name, "manifest.json"}

    on(paced(root, sleep), scenario)


def test_a_pause_is_not_negative(root: Path) -> None:
    with pytest.raises(ValueError, match="negative"):
        PfsTier(root, delete_pause_s=-1)
