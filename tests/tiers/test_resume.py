"""Drains that were cut off go on: what a killed process wrote is kept, and what was lost is written again."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from stepwell.errors import TierError
from stepwell.tiers import _files
from stepwell.tiers.base import ChunkIO, Refused, Reservation, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.pfs import PfsTier
from tests.contract.suite import CHECKPOINT, MANIFEST, SHARD, Memory, chunks_of, data_of, found, get, put
from tests.tiers.helpers import disk, no_fallocate, on, pfs, refusing, tree

MB = 1 << 20
SIZE = 8 * MB + 777
CHUNK = MB
SHARD_PATH = f"run/{CHECKPOINT.attempt}/{SHARD.name}"

WRITER = """
import asyncio, random, sys
from stepwell.native import Region
from stepwell.tiers.base import CheckpointKey, ChunkIO, ShardKey
from stepwell.tiers.pfs import PfsTier
root, direct, size, written, chunk = sys.argv[1], sys.argv[2] == "True", *map(int, sys.argv[3:])

async def main():
    tier = PfsTier(root, reading="direct", direct=None if direct else False)
    await tier.start()
    shard = ShardKey(CheckpointKey("run", "step-000000001.1-1"), "model.safetensors")
    await tier.reserve(shard, size)
    region = Region(-(-size // 4096) * 4096)
    region.view()[:size] = random.Random(size).randbytes(size)
    chunks = [ChunkIO(shard, at, min(chunk, size - at), region.address + at) for at in range(0, size, chunk)]
    for each in chunks[:written]:
        [result] = await tier.write([each])
        assert result.error is None
    print("written", flush=True)
    while True:  # in the middle of writing: the same chunk again and again
        await tier.write(chunks[written - 1 : written])

asyncio.run(main())
"""


def killed_writer(root: Path, direct: bool, written: int) -> None:
    """Runs a writer of SHARD and kills it once it has written so many chunks."""
    command = [sys.executable, "-c", WRITER, str(root), str(direct), *map(str, (SIZE, written, CHUNK))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        process.kill()
        assert process.wait() == -signal.SIGKILL


async def go_on(tier: Tier, data: bytes) -> int:
    """Resumes, verifies, and writes only what is not good; how many chunks that were."""
    reservation = await tier.reserve(SHARD, SIZE, resume=True)
    assert isinstance(reservation, Reservation) and reservation.resumed
    back = Memory(SIZE)
    chunks = chunks_of(SHARD, SIZE, back, CHUNK)
    results = await tier.read(chunks)
    there = back.take(SIZE)
    bad = [
        chunk
        for chunk, result in zip(chunks, results, strict=True)
        if result.error is not None
        or there[chunk.offset : chunk.offset + chunk.length] != data[chunk.offset : chunk.offset + chunk.length]
    ]
    memory = Memory(SIZE, data)
    again = [ChunkIO(SHARD, chunk.offset, chunk.length, memory.address + chunk.offset) for chunk in bad]
    assert all(result.error is None for result in await tier.write(again))
    assert await tier.commit(MANIFEST, b"{}", shards=[reservation])
    return len(bad)


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("written", [1, 5, 9])
def test_a_kill_does_not_rewrite_what_is_there_and_good(root: Path, direct: bool, written: int) -> None:
    killed_writer(root, direct, written)
    assert (root / SHARD_PATH).exists() and not (root / SHARD_PATH).with_name("manifest.json").exists()
    data = data_of(SIZE)
    rewritten = on(pfs(root, direct=None if direct else False), lambda tier: go_on(tier, data))
    assert rewritten in (9 - written, 9 - written + 1)  # the kill may have torn the chunk that was being written
    assert (root / SHARD_PATH).read_bytes() == data


def test_a_chunk_that_went_bad_is_written_again(root: Path) -> None:
    on(pfs(root), lambda tier: put(tier, SHARD, data_of(SIZE)))
    with (root / SHARD_PATH).open("r+b") as file:
        file.seek(3 * MB + 5)
        file.write(b"?")
    assert on(pfs(root), lambda tier: go_on(tier, data_of(SIZE))) == 1
    assert (root / SHARD_PATH).read_bytes() == data_of(SIZE)


def test_a_close_leaves_what_is_reserved(root: Path) -> None:
    on(pfs(root), lambda tier: put(tier, SHARD, data_of(SIZE)))
    assert (root / SHARD_PATH).read_bytes()[:SIZE] == data_of(SIZE)
    assert on(pfs(root), lambda tier: go_on(tier, data_of(SIZE))) == 0


def test_where_room_cannot_be_taken_ahead(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fallocate the file is as long as reserved all the same, so that another process can tell."""

    async def begin(tier: PfsTier) -> None:
        monkeypatch.setattr(tier.files._medium, "allocate", no_fallocate)
        assert isinstance(await tier.reserve(SHARD, SIZE), Reservation)
        assert await get(tier, SHARD, SIZE) == bytes(SIZE)  # nothing is there yet, and nothing is missing
        memory = Memory(CHUNK, data_of(SIZE)[:CHUNK])
        await tier.write([ChunkIO(SHARD, 0, CHUNK, memory.address)])

    async def resume(tier: PfsTier) -> int:
        monkeypatch.setattr(tier.files._medium, "allocate", no_fallocate)
        return await go_on(tier, data_of(SIZE))

    on(pfs(root), begin)
    assert on(pfs(root), resume) == 8
    assert (root / SHARD_PATH).read_bytes() == data_of(SIZE)


@pytest.mark.parametrize("other", [SIZE - 8192, SIZE + 8192])
def test_debris_of_another_size_is_replaced(root: Path, other: int) -> None:
    on(pfs(root), lambda tier: put(tier, SHARD, data_of(other)))

    async def scenario(tier: Tier) -> None:
        reservation = await tier.reserve(SHARD, SIZE, resume=True)
        assert isinstance(reservation, Reservation) and not reservation.resumed

    on(pfs(root), scenario)


def test_a_link_or_folder_is_never_resumed(tmp_path: Path, root: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(bytes(5000))
    (root / SHARD_PATH).parent.mkdir(parents=True)
    (root / SHARD_PATH).symlink_to(victim)

    async def scenario(tier: Tier) -> None:
        reservation = await tier.reserve(SHARD, 5000, resume=True)
        assert isinstance(reservation, Reservation) and not reservation.resumed
        memory = Memory(5000, data_of(5000))
        await tier.write([ChunkIO(SHARD, 0, 5000, memory.address)])
        await tier.commit(MANIFEST, b"{}", shards=[reservation])

    on(pfs(root), scenario)
    assert victim.read_bytes() == bytes(5000) and (root / SHARD_PATH).read_bytes() == data_of(5000)


def test_a_shard_that_lost_data_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failed sync: pages in memory look good and are not on the medium."""

    async def scenario(tier: FileTier) -> None:
        reservation = await put(tier, SHARD, data_of(5000))
        with monkeypatch.context() as patch:

            async def lose(descriptors: list[int]) -> list[int]:
                return [-errno.EIO] * len(descriptors)

            patch.setattr(tier._medium, "sync", lose)
            with pytest.raises(TierError):
                await tier.commit(MANIFEST, b"{}", shards=[reservation])
        again = await tier.reserve(SHARD, 5000, resume=True)
        assert isinstance(again, Reservation) and not again.resumed

    on(disk(tmp_path), scenario)


def test_a_commit_that_got_as_far_as_its_record_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: FileTier) -> None:
        reservation = await put(tier, SHARD, data_of(5000))
        with monkeypatch.context() as patch:
            patch.setattr(os, "link", refusing(errno.ENOSPC))
            with pytest.raises(TierError):
                await tier.commit(MANIFEST, b"{}", shards=[reservation])
        again = await tier.reserve(SHARD, 5000, resume=True)
        assert isinstance(again, Reservation) and again.resumed
        assert await get(tier, SHARD, 5000) == data_of(5000)
        assert await tier.commit(MANIFEST, b"{}", shards=[again])

    on(disk(tmp_path), scenario)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_debris_that_cannot_be_read_is_replaced(root: Path, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    on(pfs(root), lambda tier: put(tier, SHARD, data_of(5000)))

    monkeypatch.setattr(_files, "resume", refusing(number))

    async def scenario(tier: Tier) -> None:
        reservation = await tier.reserve(SHARD, 5000, resume=True)
        assert isinstance(reservation, Reservation) and not reservation.resumed

    on(pfs(root), scenario)


def test_debris_that_a_scan_saw_takes_no_second_room(root: Path) -> None:
    on(pfs(root), lambda tier: put(tier, SHARD, data_of(64 << 10)))

    async def scenario(tier: Tier) -> None:
        assert (CHECKPOINT.attempt, SHARD.name, 64 << 10) in await found(tier)
        assert not isinstance(await tier.reserve(SHARD, 64 << 10, resume=True), Refused)

    on(pfs(root, capacity_bytes=100 << 10), scenario)


def test_an_abort_removes_what_was_resumed(root: Path) -> None:
    on(pfs(root), lambda tier: put(tier, SHARD, data_of(5000)))

    async def scenario(tier: Tier) -> None:
        reservation = await tier.reserve(SHARD, 5000, resume=True)
        assert isinstance(reservation, Reservation) and reservation.resumed
        await tier.abort(reservation)

    on(pfs(root), scenario)
    assert tree(root) == {"run", ".stepwell-tier.json"}
