"""A flush that begins while its checkpoint is only in host memory: it goes on from the disk when memory has lost it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

import stepwell
from stepwell.runtime import Runtime
from stepwell.tiers._wrapper import Wrapper
from stepwell.tiers.base import ChunkIO, RecordKey, Reservation, Result, Tier
from stepwell.tiers.file import FileTier
from tests.store.helpers import eventually, host


class Gate(Wrapper):
    """Holds back commits of one checkpoint, or all writes."""

    def __init__(self, tier: Tier, step: str = "", writes: bool = False) -> None:
        super().__init__(tier)
        self._step, self._writes = step, writes
        self.open = asyncio.Event()
        self.waiting = 0

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        if self._step and self._step in record.name:
            self.waiting += 1
            await self.open.wait()
        return await self.tier.commit(record, data, shards=shards)

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        if self._writes:
            self.waiting += 1
            await self.open.wait()
        return await self.tier.write(chunks)


def file(path: Path, name: str) -> FileTier:
    (path / name).mkdir()
    return FileTier(path / name, name=name)


def state(value: int) -> dict[str, object]:
    return {"model": {"w": torch.full((2_500_000,), float(value))}}  # 10 chunks of 1 MiB


def test_a_flush_that_began_before_the_disk_had_it(tmp_path: Path) -> None:
    arena = host(28)
    inner = Gate(file(tmp_path, "nvme"), step="step-000000002")
    nvme = Gate(inner, step="step-000000001")
    pfs = Gate(file(tmp_path, "pfs"), writes=True)
    loop = Runtime.get().loop
    with stepwell.open(run="run", tiers=[arena, nvme, pfs]) as store:
        first = store.save(1, state(1))
        second = store.save(2, state(2))  # whole in host memory, its commit on nvme waits
        second.wait("host")
        loop.call_soon_threadsafe(nvme.open.set)
        first.wait("nvme")
        eventually(lambda: pfs.waiting > 0)  # flush of the newest (2) to pfs has begun
        loop.call_soon_threadsafe(inner.open.set)
        second.wait("nvme")
        store.save(3, state(3)).wait("nvme")  # takes the memory of older ones
        eventually(lambda: arena.arena.evicted_bytes > 0)
        store.save(4, state(4)).wait("nvme")
        loop.call_soon_threadsafe(pfs.open.set)
        second.wait("pfs", timeout=30)
        first.wait("pfs", timeout=30)
