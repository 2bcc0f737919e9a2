"""What the tests of the mover share: a state in memory, a mover over real tiers, and ways to look behind it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.mover import Mover
from stepwell.native import AsyncEngine, Engine, PieceMap, Region
from stepwell.policies.evict import LRU
from stepwell.ranges import Array
from stepwell.reading import Healing, Reading
from stepwell.shardjob import ShardJob
from stepwell.tiers._slices import Memory
from stepwell.tiers.base import CheckpointKey, ChunkIO, RecordKey, Reservation, ShardKey, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier, Priority
from stepwell.tiers.memory import MemoryTier

MIB = 1 << 20
KEY = CheckpointKey("run", "step-000000001.1-1")
MODEL, OTHER = ShardKey(KEY, "model.safetensors"), ShardKey(KEY, "other.safetensors")
SIZE = 9 * MIB + 77  # ten chunks, the last one short


class State:
    """A shard's bytes in memory, in uneven pieces."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.data = np.frombuffer(random.Random(seed).randbytes(size), np.uint8).copy()

    def pieces(self, start: int, stop: int) -> PieceMap:
        return self.map

    def gpu_pieces(self, start: int, stop: int) -> list[tuple[int, PieceMap]]:
        return []

    def borders(self) -> tuple[Array, np.ndarray[Any, np.dtype[np.bool_]]]:
        raise AssertionError("nothing here is in a GPU's memory")

    def has_host_pieces(self, start: int, stop: int) -> bool:
        return True

    @property
    def map(self) -> PieceMap:
        cuts = sorted({0, 100, len(self.data) // 3, len(self.data)})
        offsets = np.array(cuts, np.uint64)
        addresses = np.array([self.data.ctypes.data + cut for cut in cuts[:-1]], np.uint64)
        return PieceMap(offsets, addresses, self.data)


def target(size: int) -> State:
    blank = State(0)
    blank.data = np.zeros(size, np.uint8)
    return blank


class Scarce:
    """Memory of a system that has so much, and no more."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes

    def make(self, size: int) -> Memory:
        region, scarce = Region(size), self
        populate = region.populate

        class Part:
            address = region.address
            view = region.view
            close = region.close

            def populate(self, offset: int, length: int) -> None:
                if length > scarce.left_bytes:
                    raise OSError(12, "no memory")
                scarce.left_bytes -= length
                populate(offset, length)

        return Part()


@asynccontextmanager
async def moving(*tiers: Tier, slots: int = 32, memory: Callable[[int], Memory] | None = None) -> AsyncIterator[Mover]:
    """A mover over started tiers; at its end every slot must be back."""
    engine = Engine("copy", backend="threads", threads=2)
    copier = AsyncEngine(engine)
    extra: dict[str, Any] = {} if memory is None else {"memory": memory}
    host = HostTier(LRU(), slots * MIB, chunk_bytes=MIB, background=False, **extra)
    for tier in tiers:
        await tier.start()
    try:
        yield Mover(copier, host.arena, host)
        assert host.arena.in_use == 0
    finally:
        for tier in (*tiers, host):
            await tier.close()
        copier.close()
        engine.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def check_all_back(mover: Mover) -> None:
    assert mover.arena.in_use == 0
    for way in mover.edges.all():
        seen = way.statistics()
        assert seen.queued == seen.in_flight_bytes == 0, way


async def reserve(tier: Tier, key: ShardKey, size: int, resume: bool = False) -> Reservation:
    answer = await tier.reserve(key, size, resume=resume)
    assert isinstance(answer, Reservation), answer
    return answer


async def put(mover: Mover, tier: Tier, shards: Iterable[tuple[ShardKey, State]], kept: bool) -> list[ShardJob]:
    jobs = [ShardJob(key, len(state.data), state) for key, state in shards]
    for job in jobs:
        await reserve(tier, job.key, job.size)
        if kept:
            assert mover.host is not None
            await reserve(mover.host, job.key, job.size)
    copied = asyncio.Event()
    await mover.put(tier, jobs, copied.set, kept=kept)
    assert copied.is_set()
    return jobs


async def store(tier: Tier, key: ShardKey, data: np.ndarray[Any, Any]) -> None:
    """Puts a shard's bytes there and commits them, without the mover."""
    reservation = await reserve(tier, key, len(data))
    padded = np.zeros(len(data) + 8192, np.uint8)
    shift = -padded.ctypes.data % 4096
    padded[shift : shift + len(data)] = data
    [result] = await tier.write([ChunkIO(key, 0, len(data), padded.ctypes.data + shift)])
    assert result.error is None
    record = RecordKey(key.checkpoint.run, f"{key.checkpoint.attempt}/manifest.json")
    assert await tier.commit(record, b"{}", shards=[reservation])


async def read_back(mover: Mover, tiers: Sequence[Tier], job: ShardJob) -> tuple[State, Healing]:
    into, healing = target(job.size), Healing()
    reading = Reading(job.key, tiers, job.crcs, healing, Priority.RESTORE, into.map)
    await mover.get(reading, mover.all_of(job.size))
    return into, healing


def tiers_of(tmp_path: Path) -> dict[str, Tier]:
    return {"memory": MemoryTier("near"), "file": FileTier(tmp_path, name="near", reading="direct")}
