"""What the tests of neighbours share: an owner and clients of one arena in a folder, and a shard on a disk."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from stepwell.mover import Mover
from stepwell.native import crc32c
from stepwell.neighbouring import Lent, Neighbouring
from stepwell.neighbours import Neighbours
from stepwell.ranges import Read
from stepwell.reading import Crcs, Healing, Reading
from stepwell.tiers._sharedarena import SlotFile
from stepwell.tiers._sharedindex import SharedIndex
from stepwell.tiers.base import ChunkIO, Result, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import Priority
from stepwell.tiers.wrap import Wrapper
from tests.core.moving import MIB, MODEL, State, moving, target

SIZE = 20 * MIB + 77


@dataclass(frozen=True)
class OnDisk:
    """A shard as a file tier has it."""

    root: Path
    data: bytes

    @property
    def path(self) -> Path:
        return self.root / str(MODEL)

    @property
    def crcs(self) -> Crcs:
        return np.array([crc32c(self.data[at : at + MIB]) for at in range(0, len(self.data), MIB)], np.uint32)

    def tier(self) -> Watched:
        return Watched(FileTier(self.root, name="disk", read_only=True))


def on_disk(root: Path, size: int = SIZE, seed: int = 0) -> OnDisk:
    made = OnDisk(root, random.Random(seed).randbytes(size))
    made.path.parent.mkdir(parents=True)
    made.path.write_bytes(made.data)
    return made


class Watched(Wrapper):
    """Counts what is read, and holds it up while `go` is not set."""

    def __init__(self, tier: Tier) -> None:
        super().__init__(tier)
        self.read_bytes = 0
        self.go, self.asked = asyncio.Event(), asyncio.Event()
        self.go.set()

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self.asked.set()
        await self.go.wait()
        self.read_bytes += sum(chunk.length for chunk in chunks)
        return await self.tier.read(chunks)


@asynccontextmanager
async def owning(folder: Path, *tiers: Tier, slots: int = 32) -> AsyncIterator[tuple[Mover, Neighbours]]:
    """A mover whose arena other processes may use. At the end no slot may be in use."""
    folder.mkdir(mode=0o700, exist_ok=True)
    memory = SlotFile(folder)
    async with moving(*tiers, slots=slots, memory=memory.slice) as mover:
        index = SharedIndex(folder, MIB, mover.arena.count)
        mover.arena._index = index
        serving = Neighbours(mover, folder, tiers)
        await serving.start()
        try:
            yield mover, serving
        finally:
            await serving.close()
    index.close()
    memory.file.close()


@asynccontextmanager
async def asking(folder: Path, *tiers: Tier) -> AsyncIterator[tuple[Mover, Neighbouring]]:
    """A mover that asks the arena's owner first."""
    async with moving(*tiers, slots=16) as mover:
        client = Neighbouring(folder, MIB)
        await client.start()
        mover.neighbour = client
        try:
            yield mover, client
        finally:
            await client.close()


def reading(shard: OnDisk, *tiers: Tier, into: State | None = None, crcs: Crcs | None = None) -> Reading:
    return Reading(
        MODEL, tiers, shard.crcs if crcs is None else crcs, Healing(), Priority.RESTORE,
        None if into is None else into.map, size=len(shard.data), stays=True,
    )  # fmt: skip


async def load(mover: Mover, shard: OnDisk, *tiers: Tier) -> dict[str, int]:
    """Loads the shard whole, and checks every byte; returns from where they came."""
    into = target(len(shard.data))
    how = reading(shard, *tiers, into=into)
    await mover.get(how, mover.all_of(len(shard.data)))
    assert into.data.tobytes() == shard.data
    return how.healing.read_bytes


async def lend(client: Neighbouring, shard: OnDisk, tier: Tier, chunk: int) -> Lent | None:
    """Asks for one chunk."""
    start = chunk * MIB
    return await client.get(reading(shard, tier), Read(start, min(MIB, len(shard.data) - start)))


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(60):
            await scenario()

    asyncio.run(within())
