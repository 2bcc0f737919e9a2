"""A shared file system that is full, over its quota or read-only says so, whichever call finds out."""

from __future__ import annotations

import errno
import subprocess
from pathlib import Path

import pytest

from stepwell.errors import TierError, TierFull
from stepwell.tiers import _files
from stepwell.tiers.base import ChunkIO, RecordKey, Refused, Reservation
from stepwell.tiers.pfs import PfsTier
from tests.contract.suite import MANIFEST, NEW, SHARD, Memory, data_of, get, put, save
from tests.tiers.helpers import on, pfs, tree

MB = 1 << 20


async def never(seconds: float) -> None:
    raise AssertionError("a full tier is not asked again")


def impatient(root: Path) -> PfsTier:
    return pfs(root, sleep=never)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_full_at_a_write(root: Path, number: int) -> None:
    async def scenario(tier: PfsTier) -> None:
        assert isinstance(await tier.reserve(SHARD, 8192), Reservation)
        tier.files._medium.writer.engine.inject_faults(every=1, error=number)
        memory = Memory(8192)
        [result] = await tier.write([ChunkIO(SHARD, 0, 8192, memory.address)])
        assert isinstance(result.error, TierFull) and result.error.errno == number
        assert errno.errorcode[number] in str(result.error) and "enough" not in str(result.error)

    on(impatient(root), scenario)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("call", ["fsync", "close"])
def test_full_at_fsync_and_close(root: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: PfsTier) -> None:
        reservation = await put(tier, SHARD, data_of(5000))
        with monkeypatch.context() as patch:
            if call == "close":
                real = _files.close_all
                patch.setattr(_files, "close_all", lambda fds: [number for _ in real(fds)])
            else:

                async def sync(descriptors: list[int]) -> list[int]:
                    return [-number] * len(descriptors)

                patch.setattr(tier.files._medium, "sync", sync)
            with pytest.raises(TierFull) as caught:
                await tier.commit(MANIFEST, b"{}", shards=[reservation])
        assert caught.value.errno == number and "enough" not in str(caught.value)
        assert await tier.fetch(MANIFEST) is None
        await tier.abort(reservation)
        await save(tier, SHARD, data_of(5000))  # goes on when there is room

    on(impatient(root), scenario)


def test_full_at_a_reservation_and_free_again(small: Path) -> None:
    async def scenario(tier: PfsTier) -> None:
        await save(tier, SHARD, data_of(MB))
        refused = await tier.reserve(NEW, 5 * MB)
        assert isinstance(refused, Refused) and refused.reason == "full" and str(small) in refused.detail
        assert await get(tier, SHARD, MB) == data_of(MB)
        await save(tier, NEW, data_of(MB))

    (small / "ckpt").mkdir()
    on(pfs(small / "ckpt"), scenario)


def test_what_is_kept_of_a_shard_needs_no_second_room(small: Path) -> None:
    (small / "ckpt").mkdir()
    on(impatient(small / "ckpt"), lambda tier: put(tier, SHARD, data_of(3 * MB)))

    async def scenario(tier: PfsTier) -> None:
        reservation = await tier.reserve(SHARD, 3 * MB, resume=True)  # of 4 MB
        assert isinstance(reservation, Reservation) and reservation.resumed
        assert await get(tier, SHARD, 3 * MB) == data_of(3 * MB)

    on(impatient(small / "ckpt"), scenario)


def test_a_read_only_mount_is_read_and_refuses(small: Path) -> None:
    (small / "ckpt").mkdir()
    on(impatient(small / "ckpt"), lambda tier: save(tier, SHARD, data_of(5000)))
    before = tree(small)
    remount = subprocess.run(["mount", "-o", "remount,ro", str(small)], capture_output=True)
    if remount.returncode:
        pytest.skip("remounting is refused")

    async def scenario(tier: PfsTier) -> None:
        assert tier.info.read_only and "EROFS" in tier.info.detail["access"]
        assert await get(tier, SHARD, 5000) == data_of(5000)
        refused = await tier.reserve(NEW, 10)
        assert isinstance(refused, Refused) and refused.reason == "read-only"
        with pytest.raises(TierError) as caught:
            await tier.drop([SHARD.checkpoint])
        assert caught.value.errno == errno.EROFS
        async with await tier.lease([SHARD]):
            pass

    on(impatient(small / "ckpt"), scenario)
    assert tree(small) == before


def test_a_mount_that_turns_read_only_refuses(small: Path) -> None:
    (small / "ckpt").mkdir()

    async def scenario(tier: PfsTier) -> None:
        await save(tier, SHARD, data_of(5000))
        remount = subprocess.run(["mount", "-o", "remount,ro", str(small)], capture_output=True)
        if remount.returncode:
            pytest.skip("remounting is refused")
        refused = await tier.reserve(NEW, 10)
        assert isinstance(refused, Refused) and refused.reason == "read-only"
        for call in (tier.commit(RecordKey("run", "x.json"), b""), tier.drop([SHARD.checkpoint])):
            with pytest.raises(TierError) as caught:
                await call
            assert caught.value.errno == errno.EROFS
        assert await get(tier, SHARD, 5000) == data_of(5000)

    on(impatient(small / "ckpt"), scenario)
