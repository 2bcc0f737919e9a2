"""The place that a driver is tested on, and what the tests share: keys, memory, and a way to run a scenario."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, ClassVar

from stepwell.native import Region
from stepwell.tiers.base import CheckpointKey, ChunkIO, RecordKey, Reservation, ShardKey, Tier
from tests.resources import comes_back_to, describe_files, in_use

LENGTHS = (0, 1, 511, 512, 4095, 4096, 4097, (8 << 20) + 1)
CANARY = 0xA5
PAGE = 4096

CHECKPOINT = CheckpointKey("run", "step-000000001.1-1")
SHARD = ShardKey(CHECKPOINT, "model.safetensors")
OTHER = ShardKey(CHECKPOINT, "optimizer.rank00000-of-00004.safetensors")
MANIFEST = RecordKey("run", "step-000000001.1-1/manifest.json")
NEW = ShardKey(CheckpointKey("run", "step-000000002.1-2"), "model.safetensors")
NEW_MANIFEST = RecordKey("run", "step-000000002.1-2/manifest.json")

Scenario = Callable[[Tier], Coroutine[Any, Any, None]]


class Place(ABC):
    """A medium and how to reach it without the driver."""

    #: data are there for a second driver object on the same place
    persistent: ClassVar[bool] = True
    #: an uncommitted shard is kept for `reserve(resume=True)`
    resumes: ClassVar[bool] = True

    @abstractmethod
    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        """A new driver on this place, not started."""

    @abstractmethod
    def peek(self, shard: ShardKey) -> bytes | None:
        """The shard's bytes on the medium; None if it is not there."""

    @abstractmethod
    def poke(self, shard: ShardKey, data: bytes) -> None:
        """Overwrites the shard's bytes on the medium. It is there, at least as long as `data`."""

    @abstractmethod
    def remove(self, shard: ShardKey) -> None:
        """Removes the shard from the medium."""

    @abstractmethod
    def peek_record(self, record: RecordKey) -> bytes | None:
        """The record's bytes on the medium; None if it is not there."""

    @abstractmethod
    def reality(self, run: str) -> set[tuple[str, str, int]]:
        """Everything that is there of a run: folder or "", name, bytes."""


class Memory:
    """Page-aligned memory, filled with a canary, with room for padding and one page more."""

    def __init__(self, size: int, data: bytes = b"") -> None:
        self.region = Region(-(-size // PAGE) * PAGE + 2 * PAGE)
        self.view = self.region.view()
        self.view[:] = bytes([CANARY]) * self.region.size
        self.view[: len(data)] = data
        self.address = self.region.address

    def take(self, size: int) -> bytes:
        return bytes(self.view[:size])

    def untouched_after(self, size: int) -> bool:
        padded = -(-size // PAGE) * PAGE
        return bytes(self.view[padded:]) == bytes([CANARY]) * (self.region.size - padded)


def data_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + size).randbytes(size)


def chunks_of(shard: ShardKey, size: int, memory: Memory, step: int = 1 << 20) -> list[ChunkIO]:
    return [ChunkIO(shard, at, min(step, size - at), memory.address + at) for at in range(0, size, step)]


async def put(tier: Tier, shard: ShardKey, data: bytes, step: int = 1 << 20) -> Reservation:
    """Reserves and writes a shard."""
    reservation = await tier.reserve(shard, len(data))
    assert isinstance(reservation, Reservation), reservation
    memory = Memory(len(data), data)
    results = await tier.write(chunks_of(shard, len(data), memory, step))
    assert [result.error for result in results] == [None] * len(results)
    return reservation


async def save(tier: Tier, shard: ShardKey, data: bytes) -> None:
    """Reserves, writes and commits a checkpoint of one shard."""
    reservation = await put(tier, shard, data)
    record = RecordKey(shard.checkpoint.run, f"{shard.checkpoint.attempt}/manifest.json")
    assert await tier.commit(record, b"{}", shards=[reservation])


async def get(tier: Tier, shard: ShardKey, size: int, step: int = 1 << 20) -> bytes:
    memory = Memory(size)
    results = await tier.read(chunks_of(shard, size, memory, step))
    for result in results:
        if result.error is not None:
            raise result.error
    assert memory.untouched_after(size)
    return memory.take(size)


async def found(tier: Tier, run: str = "run") -> set[tuple[str, str, int]]:
    return {(each.attempt, each.name, each.size_bytes) async for each in tier.scan(run)}


def perform(place: Place, scenario: Scenario, *, capacity_bytes: int | None = None) -> None:
    """Runs a scenario on a started driver, closes it, and checks that no descriptor is left open."""

    async def main() -> None:
        tier = place.make(capacity_bytes=capacity_bytes)
        await tier.start()
        try:
            await scenario(tier)
        finally:
            await tier.close()

    before = in_use()
    asyncio.run(main())
    assert comes_back_to(before), describe_files()
