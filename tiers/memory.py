"""The plain in-memory driver: all of the contract and nothing else.

It is the default in tests and good for short-lived runs; the arena that is shared between processes is
another driver. Shards are bytearrays, records are bytes, everything ends with the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
from collections import Counter
from collections.abc import Sequence

from stepwell.tiers._books import Books
from stepwell.tiers._inmemory import InMemory
from stepwell.tiers._paths import check_shard
from stepwell.tiers.base import (
    ChunkIO,
    Lease,
    Refused,
    Reservation,
    Result,
    Scope,
    ShardKey,
    Survives,
    TierInfo,
    Usage,
)


class MemoryTier(InMemory):
    """Keeps shards and records in this process's memory.

    `capacity_bytes` bounds the shards, including dropped ones that a lease keeps readable; records are
    small and not counted. Not linked: whoever calls `write` has awaited the chunk's `after` already.
    """

    def __init__(
        self,
        name: str = "memory",
        capacity_bytes: int | None = None,
        scope: Scope = "node",
        survives: Survives = "process",
    ) -> None:
        info = TierInfo(name=name, driver="memory", scope=scope, survives=survives, capacity_bytes=capacity_bytes)
        super().__init__(info, Books(capacity_bytes))
        self._shards: dict[ShardKey, bytearray] = {}
        self._leases: Counter[ShardKey] = Counter()
        self._dropped: dict[ShardKey, bytearray] = {}  # only a lease knows them

    def __repr__(self) -> str:
        counts = f"{len(self._shards)} shards, {len(self._records)} records, {self._books.taken_bytes} bytes"
        return f"<MemoryTier {self.info.name}: {counts}>"

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        self._check_new(shard, size_bytes)
        refused = self._books.over_capacity(shard, size_bytes, self.info.name)
        if refused:
            return refused
        if resume and self._books.reserved.get(shard) == size_bytes:
            return Reservation(shard, size_bytes, resumed=True)
        self._books.reserve(shard, size_bytes)
        self._shards[shard] = bytearray(size_bytes)
        return Reservation(shard, size_bytes)

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        results = []
        for chunk in chunks:
            data = self._shards.get(chunk.shard) if chunk.shard in self._books.reserved else None
            results.append(self._copy(chunk, data, "write", into_tier=True))
            await asyncio.sleep(0)  # a chunk takes a millisecond: others on the loop get their turn
        return results

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        results = []
        for chunk in chunks:
            data = self._shards.get(chunk.shard, self._dropped.get(chunk.shard))
            results.append(self._copy(chunk, data, "read", into_tier=False))
            await asyncio.sleep(0)
        return results

    def _copy(self, chunk: ChunkIO, data: bytearray | None, verb: str, *, into_tier: bool) -> Result:
        if data is None:
            number, why = errno.ENOENT, "is not reserved" if into_tier else "is not there"
        elif chunk.offset < 0 or chunk.length < 0 or chunk.offset + chunk.length > len(data):
            number, why = errno.EINVAL, f"is truncated: it has {len(data)} bytes"
        else:
            if chunk.length:
                inside = ctypes.addressof(ctypes.c_char.from_buffer(data, chunk.offset))
                target, source = (inside, chunk.address) if into_tier else (chunk.address, inside)
                ctypes.memmove(target, source, chunk.length)
            return Result()
        what = f"cannot {verb}: the shard {why}"
        return Result(self._error(number, what, chunk.shard, offset=chunk.offset, length=chunk.length))

    def _remove(self, shard: ShardKey) -> None:
        leased = self._leases[shard] > 0
        self._books.forget(shard, leased=leased)
        data = self._shards.pop(shard, None)
        if data is not None and leased:
            self._dropped[shard] = data

    def usage(self) -> Usage:
        return self._books.usage(None)

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        self._check_open()
        for shard in shards:
            if check_shard(shard) not in self._shards and shard not in self._dropped:
                raise self._missing(shard)
        self._leases.update(shards)
        return _MemoryLease(self, shards)

    def _release(self, shards: Sequence[ShardKey]) -> None:
        self._leases.subtract(shards)
        for shard in shards:
            if self._leases[shard] <= 0:
                del self._leases[shard]
                self._dropped.pop(shard, None)
                self._books.lingering.pop(shard, None)

    async def close(self) -> None:
        self._closed = True
        self._shards.clear()
        self._dropped.clear()
        self._records.clear()


class _MemoryLease(Lease):
    def __init__(self, tier: MemoryTier, shards: Sequence[ShardKey]) -> None:
        self._tier = tier
        self._shards = list(shards)

    async def close(self) -> None:
        shards, self._shards = self._shards, []
        self._tier._release(shards)
