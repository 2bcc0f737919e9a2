"""File systems and files that only grow: no truncation, no deletion, no room taken ahead."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.errors import TierError
from stepwell.tiers.base import ChunkIO, Reservation, Tier
from stepwell.tiers.file import FileTier
from tests.contract.suite import CHECKPOINT, LENGTHS, MANIFEST, SHARD, Memory, data_of, get, save
from tests.mounts import mounted
from tests.tiers.helpers import disk, on, pfs, refusing, tree

SHARD_PATH = f"run/{CHECKPOINT.attempt}/{SHARD.name}"


def change(path: Path, flags: str) -> None:
    subprocess.run(["chattr", "-R", flags, str(path)], check=True, capture_output=True)


@pytest.fixture
def ext4(tmp_path: Path) -> Iterator[Path]:
    """A file system that knows the append-only attribute; skips the test where it cannot be mounted."""
    image, point = tmp_path / "image", tmp_path / "ext4"
    if any(shutil.which(tool) is None for tool in ("mkfs.ext4", "chattr")):
        pytest.skip("no ext4 tools")
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True)
    with mounted(["mount", "-o", "loop", image, point], point):
        try:
            yield point
        finally:
            change(point, "-a")


async def write_all(tier: Tier, reservation: Reservation, data: bytes) -> None:
    memory = Memory(len(data), data)
    [result] = await tier.write([ChunkIO(reservation.shard, 0, len(data), memory.address)])
    assert result.error is None


@pytest.mark.parametrize(("direct", "size"), [(False, 5000), (False, 8192), (None, 8192)])
def test_a_file_that_is_append_only_is_committed_if_its_size_fits(ext4: Path, direct: bool | None, size: int) -> None:
    async def scenario(tier: FileTier) -> None:
        reservation = await tier.reserve(SHARD, size)
        assert isinstance(reservation, Reservation)
        change(ext4 / "root" / SHARD_PATH, "+a")
        with pytest.raises(PermissionError):
            os.truncate(ext4 / "root" / SHARD_PATH, size)
        await write_all(tier, reservation, data_of(size))
        assert await tier.commit(MANIFEST, b"{}", shards=[reservation])
        assert await get(tier, SHARD, size) == data_of(size)

    on(disk(ext4 / "root", direct=direct), scenario)
    assert (ext4 / "root" / SHARD_PATH).read_bytes() == data_of(size)


def test_padding_that_cannot_be_cut_off_fails_the_commit_by_name(ext4: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        if not tier._medium.direct_write:
            pytest.skip("no direct I/O here: nothing is padded")
        reservation = await tier.reserve(SHARD, 5000)
        assert isinstance(reservation, Reservation)
        await write_all(tier, reservation, data_of(5000))
        change(ext4 / "root" / SHARD_PATH, "+a")
        with pytest.raises(TierError, match="cannot commit: .*EPERM") as caught:
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
        assert caught.value.errno == errno.EPERM and await tier.fetch(MANIFEST) is None
        change(ext4 / "root" / SHARD_PATH, "-a")
        assert await tier.commit(MANIFEST, b"{}", shards=[reservation])

    on(disk(ext4 / "root"), scenario)
    assert (ext4 / "root" / SHARD_PATH).read_bytes() == data_of(5000)


@pytest.mark.parametrize("make", [FileTier, pfs])
def test_a_root_that_is_append_only_takes_checkpoints(ext4: Path, make: type[FileTier]) -> None:
    (ext4 / "root").mkdir()
    change(ext4 / "root", "+a")

    async def scenario(tier: Tier) -> None:
        assert "nothing can be deleted" in tier.info.detail["access"] and not tier.info.read_only
        await save(tier, SHARD, data_of(5000))
        assert await get(tier, SHARD, 5000) == data_of(5000)

    on(make(ext4 / "root"), scenario)
    assert (ext4 / "root" / SHARD_PATH).read_bytes() == data_of(5000)
    left = sum(path.stat().st_size for path in (ext4 / "root").iterdir() if path.is_file())
    assert left < 64 << 10  # of the probe and the marker


def test_a_mount_that_lets_nothing_be_deleted_or_renamed(tmp_path: Path) -> None:
    """In user space, as gateways to other kinds of storage are."""
    behind, point = tmp_path / "behind", tmp_path / "point"
    behind.mkdir()

    async def scenario(tier: Tier) -> None:
        await save(tier, SHARD, data_of(5000))
        assert await get(tier, SHARD, 5000) == data_of(5000)
        with pytest.raises(TierError, match="cannot delete") as caught:
            await tier.drop([CHECKPOINT])
        assert caught.value.errno == errno.EPERM and await tier.fetch(MANIFEST) is not None

    with mounted(["bindfs", "--delete-deny", "--rename-deny", behind, point], point):
        on(disk(point), scenario)
    assert (behind / SHARD_PATH).read_bytes() == data_of(5000)


@pytest.mark.parametrize("number", [errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP])
@pytest.mark.parametrize("size", LENGTHS)
def test_a_mount_without_truncation_is_written_without_padding(
    tmp_path: Path, size: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "ftruncate", refusing(number))

    async def no_fallocate(fd: int, size_bytes: int) -> int:
        return -number

    async def scenario(tier: FileTier) -> None:
        assert tier.info.detail["writing"] == "buffered"
        monkeypatch.setattr(tier._medium, "allocate", no_fallocate)
        await save(tier, SHARD, data_of(size))
        assert await get(tier, SHARD, size) == data_of(size)

    on(disk(tmp_path), scenario)
    assert (tmp_path / SHARD_PATH).read_bytes() == data_of(size)
    assert tree(tmp_path) == {"run", f"run/{CHECKPOINT.attempt}", SHARD_PATH, f"run/{CHECKPOINT.attempt}/manifest.json"}
