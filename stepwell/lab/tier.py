"""Tiers in virtual time: a place with a speed and a room, and each process's handle on it.

A place keeps records as they are and shards as sizes. A chunk waits for its turn on the place's way in or out, passes
at that way's bytes a second, and takes the latency on top: one chunk after the other, whoever asks, as a disk that is
kept busy gives them. Whatever the contract says of order and durability holds; nothing ever fails.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from stepwell.tiers._books import Books
from stepwell.tiers._inmemory import InMemory
from stepwell.tiers._paths import check_shard
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
    TierInfo,
    Usage,
)


class Dead(BaseException):
    """The process of this handle was killed."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a place is, for all processes that use it together."""

    write_bytes_per_s: float
    read_bytes_per_s: float
    limit_bytes_per_s: float | None = None  # of both together: an operation waits before it begins, as at a throttle
    latency_s: float = 0.0  # of a chunk, on top of its bytes
    record_s: float = 0.0  # of a small record that is made durable


@dataclass(slots=True)
class _Way:
    """Lets bytes through one after the other."""

    bytes_per_s: float
    free_at: float = 0.0

    def take(self, now: float, length: int) -> tuple[float, float]:
        """When so many bytes, asked for now, begin to pass, and when they have."""
        begin = max(now, self.free_at)
        self.free_at = begin + length / self.bytes_per_s
        return begin, self.free_at


@dataclass(slots=True)
class Place:
    """What outlives the processes. `info` is what their tiers say of themselves."""

    info: TierInfo
    speed: Speed
    books: Books = field(init=False)
    records: dict[RecordKey, bytes] = field(default_factory=dict)
    written_bytes: int = 0
    read_bytes: int = 0
    most_bytes: int = 0  # that were there at once
    _in: _Way = field(init=False)
    _out: _Way = field(init=False)
    _limit: _Way | None = field(init=False)

    def __post_init__(self) -> None:
        speed = self.speed
        self.books = Books(self.info.capacity_bytes)
        self._in, self._out = _Way(speed.write_bytes_per_s), _Way(speed.read_bytes_per_s)
        self._limit = None if speed.limit_bytes_per_s is None else _Way(speed.limit_bytes_per_s)

    def written_at(self, now: float, length: int) -> float:
        self.written_bytes += length
        return self._passed(self._in, now, length)

    def read_at(self, now: float, length: int) -> float:
        self.read_bytes += length
        return self._passed(self._out, now, length)

    def _passed(self, way: _Way, now: float, length: int) -> float:
        begin = now if self._limit is None else self._limit.take(now, length)[0]
        return way.take(begin, length)[1] + self.speed.latency_s

    def lose(self) -> None:
        """All that was there is gone."""
        self.books.reserved.clear()
        self.books.committed.clear()
        self.books.physical.clear()
        self.records.clear()

    def give_up(self, shards: Sequence[ShardKey]) -> None:
        """What a killed process had reserved stays as debris, as its files would; nobody writes it any more."""
        for shard in shards:
            if shard in self.books.reserved:
                self.books.commit(shard)


class LabTier(InMemory):
    """One process's handle on a place."""

    def __init__(self, place: Place) -> None:
        super().__init__(place.info, place.books)
        self.place = place
        self._records = place.records
        self._leased: Counter[ShardKey] = Counter()
        self._mine: set[ShardKey] = set()  # reserved by this process
        self._dead = False

    def __repr__(self) -> str:
        return f"<LabTier {self.info.name}: {len(self._books.committed)} shards>"

    def kill(self) -> None:
        """The process is gone: nothing that it still asks for has an effect."""
        self._dead = True
        self.place.give_up(list(self._mine))

    def _check_open(self) -> None:
        if self._dead:
            raise Dead
        super()._check_open()

    async def _call(self, seconds: float) -> None:
        """The time of a small operation, before its effect."""
        self._check_open()
        await asyncio.sleep(seconds)
        self._check_open()

    # -- going down ----------------------------------------------------------------------------------

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        await self._call(self.place.speed.latency_s)
        there = self._books.committed.get(shard)
        if there is not None and self._is_debris(shard):  # a killed process had begun it
            self._books.forget(shard)
        self._check_new(shard, size_bytes)
        refused = self._books.over_capacity(shard, size_bytes, self.info.name)
        if refused is not None:
            return refused
        resumed = resume and size_bytes in (there, self._books.reserved.get(shard))
        self._books.reserve(shard, size_bytes)
        self._mine.add(shard)
        self.place.most_bytes = max(self.place.most_bytes, self._books.taken_bytes)
        return Reservation(shard, size_bytes, resumed=resumed)

    def _is_debris(self, shard: ShardKey) -> bool:
        manifest = f"{shard.checkpoint.attempt}/manifest"
        return not any(key.run == shard.checkpoint.run and key.name.startswith(manifest) for key in self._records)

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        return await self._moved(chunks, into=True)

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        return await self._moved(chunks, into=False)

    async def _moved(self, chunks: Sequence[ChunkIO], *, into: bool) -> list[Result]:
        results, end, now = [], 0.0, asyncio.get_running_loop().time()
        for chunk in chunks:
            result = self._checked(chunk, into)
            if result.error is None:
                take = self.place.written_at if into else self.place.read_at
                end = max(end, take(now, chunk.length))
            results.append(result)
        await asyncio.sleep(end - now)
        self._check_open()
        return results

    def _checked(self, chunk: ChunkIO, into: bool) -> Result:
        shard, books = chunk.shard, self._books
        size = books.reserved.get(shard) if into else books.committed.get(shard, books.reserved.get(shard))
        if size is None and not (self._leased[shard] and not into):
            return Result(self._error(errno.ENOENT, "the shard is not there", shard))
        if size is not None and chunk.offset + chunk.length > size:
            return Result(self._error(errno.EINVAL, f"the shard has {size} bytes", shard))
        return Result()

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        await self._call(self.place.speed.record_s)
        done = await super().commit(record, data, shards=shards)
        if done:
            self._mine.difference_update(each.shard for each in shards)
        return done

    async def beat(self, record: RecordKey, data: bytes) -> None:
        await self._call(self.place.speed.latency_s)
        await super().beat(record, data)

    async def abort(self, reservation: Reservation) -> None:
        await self._call(self.place.speed.latency_s)
        await super().abort(reservation)

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        await self._call(self.place.speed.latency_s)
        await super().drop(what)

    def _remove(self, shard: ShardKey) -> None:
        self._books.forget(shard)
        self._mine.discard(shard)

    # -- coming up -----------------------------------------------------------------------------------

    async def fetch(self, record: RecordKey) -> bytes | None:
        await self._call(self.place.speed.latency_s)
        return await super().fetch(record)

    async def scan(self, run: str) -> AsyncIterator[Found]:
        await self._call(self.place.speed.latency_s)
        async for found in super().scan(run):
            yield found

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        await self._call(self.place.speed.latency_s)
        for shard in shards:
            if check_shard(shard) not in self._books.committed and shard not in self._books.reserved:
                raise self._missing(shard)
        self._leased.update(shards)
        return _LabLease(self._leased, shards)

    def usage(self) -> Usage:
        return self._books.usage(None)

    async def close(self) -> None:
        self._closed = True


class _LabLease(Lease):
    def __init__(self, leased: Counter[ShardKey], shards: Sequence[ShardKey]) -> None:
        self._leased, self._shards = leased, list(shards)

    async def close(self) -> None:
        shards, self._shards = self._shards, []
        self._leased.subtract(shards)
