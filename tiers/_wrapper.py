"""The base of all wrappers: implements the contract by passing everything on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from stepwell.tiers.base import (
    CheckpointKey,
    ChunkIO,
    Found,
    Lease,
    RecordKey,
    Refused,
    Reservation,
    Result,
    ShardKey,
    Tier,
    Usage,
)


class Wrapper(Tier):
    """Passes everything on. Base of the wrappers here, and of yours."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.info = tier.info

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.tier!r}>"

    async def start(self) -> None:
        await self.tier.start()
        self.info = self.tier.info

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        return await self.tier.reserve(shard, size_bytes, resume=resume)

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self.tier.write(chunks)

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self.tier.read(chunks)

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        return await self.tier.commit(record, data, shards=shards)

    async def fetch(self, record: RecordKey) -> bytes | None:
        return await self.tier.fetch(record)

    async def beat(self, record: RecordKey, data: bytes) -> None:
        await self.tier.beat(record, data)

    async def abort(self, reservation: Reservation) -> None:
        await self.tier.abort(reservation)

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        await self.tier.drop(what)

    async def scan(self, run: str) -> AsyncIterator[Found]:
        async for found in self.tier.scan(run):
            yield found

    def usage(self) -> Usage:
        return self.tier.usage()

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        return await self.tier.lease(shards)

    async def close(self) -> None:
        await self.tier.close()


def give_up(chunks: Sequence[ChunkIO]) -> None:
    """Tells those who wait for chunks that never reach the tier."""
    for chunk in chunks:
        if chunk.signal is not None:
            chunk.signal.fire(False)
