"""Full disks, quotas and failing syncs: refused or failed by name, and nothing old is lost."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from stepwell.errors import TierError, TierFull
from stepwell.tiers import _files
from stepwell.tiers.base import CheckpointKey, ChunkIO, Refused, Reservation, ShardKey
from stepwell.tiers.file import FileTier
from tests.contract.suite import CHECKPOINT, MANIFEST, NEW, NEW_MANIFEST, OTHER, SHARD, Memory, data_of, get, put, save
from tests.resources import comes_back_to
from tests.tiers.helpers import disk, files_in_use, no_fallocate, on, refusing, tree

MB = 1 << 20


def test_a_full_disk_refuses_and_takes_the_next_save_once_there_is_room(small: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        await save(tier, SHARD, data_of(MB))
        refused = await tier.reserve(NEW, 5 * MB)
        assert isinstance(refused, Refused) and refused.reason == "full"
        assert "disk full" in refused.detail and str(small) in refused.detail
        assert refused.needed_bytes == 5 * MB and 2 * MB < refused.free_bytes <= 3 * MB
        assert not (small / "root" / "run" / NEW.checkpoint.attempt).exists()
        assert await get(tier, SHARD, MB) == data_of(MB)
        second = ShardKey(CheckpointKey("run", "step-2"), "model.safetensors")
        await save(tier, second, data_of(2 * MB))
        assert isinstance(await tier.reserve(NEW, 2 * MB), Refused)
        await tier.drop([second.checkpoint])
        await save(tier, NEW, data_of(2 * MB))
        assert await get(tier, NEW, 2 * MB) == data_of(2 * MB)

    on(disk(small / "root"), scenario)


def test_room_that_another_program_takes_meanwhile(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Free space looks ample, yet the file system refuses: nothing claims that there is enough."""
    real = os.statvfs(small)
    boast = os.statvfs_result((real.f_bsize, real.f_frsize, 10**9, 10**9, 10**9, *tuple(real)[5:]))

    async def scenario(tier: FileTier) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: boast)
        refused = await tier.reserve(SHARD, 5 * MB)
        assert isinstance(refused, Refused) and refused.reason == "full" and "ENOSPC" in refused.detail
        assert "enough" not in refused.detail
        assert tree(small / "root") == {"run"} and tier.usage().in_flight_bytes == 0

    on(disk(small / "root"), scenario)


def test_full_in_the_middle_of_a_write_where_room_cannot_be_taken_ahead(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(tier: FileTier) -> None:
        monkeypatch.setattr(tier._medium, "allocate", no_fallocate)
        reservation = await tier.reserve(SHARD, 3 * MB)
        assert isinstance(reservation, Reservation) and "not there" in tier.info.detail["fallocate"]
        promised = await tier.reserve(OTHER, 2 * MB)
        assert isinstance(promised, Refused)  # 3 of 4 MB are promised, though none of them is taken
        (small / "log").write_bytes(bytes(2 * MB))
        memory = Memory(3 * MB, data_of(3 * MB))
        results = await tier.write([ChunkIO(SHARD, at * MB, MB, memory.address + at * MB) for at in range(3)])
        errors = [result.error for result in results if result.error is not None]
        assert errors and all(isinstance(error, TierFull) for error in errors)
        assert str(small) in str(errors[0]) and "offset" in errors[0].where and "ENOSPC" in str(errors[0])
        await tier.abort(reservation)
        assert tree(small) == {"root", "root/run", "log"}
        (small / "log").unlink()
        await save(tier, SHARD, data_of(3 * MB))

    on(disk(small / "root"), scenario)


@pytest.mark.parametrize("number", [errno.EDQUOT, errno.ENOSPC])
def test_a_quota_is_a_full_disk(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        async def refuse(fd: int, size_bytes: int) -> int:
            return -number

        monkeypatch.setattr(tier._medium, "allocate", refuse)
        refused = await tier.reserve(SHARD, 5000)
        assert isinstance(refused, Refused) and refused.reason == "full"
        assert errno.errorcode[number] in refused.detail and "enough" not in refused.detail
        assert tree(tmp_path / "root") == {"run"}

    on(disk(tmp_path / "root"), scenario)


@pytest.mark.parametrize("number", [errno.EIO, errno.EDQUOT, errno.ENOSPC])
@pytest.mark.parametrize("call", ["fdatasync", "close"])
def test_an_error_of_sync_or_close_fails_the_commit_for_good(
    tmp_path: Path, call: str, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel tells of lost pages once; a commit that is tried again must not believe the second sync."""

    async def scenario(tier: FileTier) -> None:
        reservations = [await put(tier, SHARD, data_of(5000)), await put(tier, OTHER, data_of(5000))]
        with monkeypatch.context() as patch:
            if call == "close":
                real = _files.close_all
                patch.setattr(_files, "close_all", lambda fds: [0 * n for n in real(fds)][1:] + [number])
            else:

                async def sync(descriptors: list[int]) -> list[int]:
                    return [0] * (len(descriptors) - 1) + [-number]

                patch.setattr(tier._medium, "sync", sync)
            with pytest.raises(TierError) as caught:
                await tier.commit(MANIFEST, b"{}", shards=reservations)
        assert caught.value.errno == number and OTHER.name in str(caught.value)
        assert isinstance(caught.value, TierFull) == (number != errno.EIO)
        with pytest.raises(TierError, match="not become durable"):
            await tier.commit(MANIFEST, b"{}", shards=reservations)
        assert await tier.fetch(MANIFEST) is None
        for reservation in reservations:
            await tier.abort(reservation)
        assert tree(tmp_path / "root") == {"run"}
        reservations = [await put(tier, SHARD, data_of(5000))]
        assert await tier.commit(MANIFEST, b"{}", shards=reservations)

    on(disk(tmp_path / "root"), scenario)


def test_a_record_that_finds_no_room_can_be_committed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        reservation = await put(tier, NEW, data_of(5000))
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", refusing(errno.ENOSPC))
            with pytest.raises(TierFull):
                await tier.commit(NEW_MANIFEST, b"{}", shards=[reservation])
        assert await tier.fetch(NEW_MANIFEST) is None
        assert await tier.commit(NEW_MANIFEST, b"{}", shards=[reservation])
        assert await get(tier, NEW, 5000) == data_of(5000)
        assert {name.name for name in (tmp_path / "root" / "run" / NEW.checkpoint.attempt).iterdir()} == {
            NEW.name,
            "manifest.json",
        }

    on(disk(tmp_path / "root"), scenario)


@pytest.mark.parametrize("number", [errno.EIO, errno.EFBIG])
def test_a_length_that_is_refused_leaves_nothing(tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        monkeypatch.setattr(tier._medium, "allocate", no_fallocate)
        before = files_in_use()
        with monkeypatch.context() as patch:
            patch.setattr(_files, "lengthen", refusing(number))
            if number == errno.EFBIG:
                assert isinstance(await tier.reserve(SHARD, 5000), Refused)
            else:
                with pytest.raises(TierError):
                    await tier.reserve(SHARD, 5000)
        assert not tier._writers.files and tier.usage().in_flight_bytes == 0 and comes_back_to(before)
        assert tree(tmp_path / "root") == {"run"}
        await save(tier, SHARD, data_of(5000))

    on(disk(tmp_path / "root"), scenario)


def test_a_capacity_counts_what_a_scan_finds(tmp_path: Path) -> None:
    on(disk(tmp_path), lambda tier: save(tier, SHARD, data_of(5000)))

    async def scenario(tier: FileTier) -> None:
        assert [each async for each in tier.scan("run")]
        refused = await tier.reserve(NEW, 6000)
        assert isinstance(refused, Refused) and refused.free_bytes == 10_000 - 8192
        await tier.drop([CHECKPOINT])
        assert isinstance(await tier.reserve(NEW, 6000), Reservation)

    on(disk(tmp_path, capacity_bytes=10_000), scenario)
