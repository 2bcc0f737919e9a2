"""A simulated tier: one process's handle on a medium, with all of the contract and the manners of a file tier.

The fault model:

- An operation is a chain of small steps with time between them; a process may be killed, and others may look or
  write, between any two. What a step did stays done: what that means after a crash is the medium's model.
- Operations fail as the weather says: before any effect, in the middle, or after all of it with the answer lost.
  Every failure is reported; nothing ever succeeds silently without having been done.
- A write takes each of its blocks from memory at its beginning or at its end, so memory that is given away too early
  is seen. When a process is killed, each block of a write under way is there or not.
- A listing is not of one moment: folders are listed first, then one after the other looked into.
- A caller that is cancelled leaves an operation going on, except that reads and writes are waited for.
- A dead handle answers nothing: it raises `Dead`, which no handler of the product catches.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

from stepwell.errors import CheckpointGone, TierError
from stepwell.tiers._books import Books
from stepwell.tiers._calls import Locks, settle
from stepwell.tiers._paths import check_checkpoint, check_record, check_run, check_shard
from stepwell.tiers.base import (
    CheckpointKey,
    ChunkIO,
    Found,
    Lease,
    RecordKey,
    Refused,
    Reservation,
    Result,
    Scope,
    ShardKey,
    Survives,
    Tier,
    TierInfo,
    Usage,
    not_open,
    tier_error,
)
from tests.sim.background import Background
from tests.sim.medium import File, Medium, Token
from tests.sim.parts import Dead, Flying, Memory, OpenShard, SimLease, Weather
from tests.sim.weather import Trouble

#: what `close` waits for operations that hang
CLOSE_S = 5.0


class SimTier(Background, Tier):
    """`node`: whose cache holds what is not synced."""

    def __init__(
        self,
        medium: Medium,
        memory: Memory,
        weather: Weather,
        rng: random.Random,
        *,
        node: str = "node",
        scope: Scope = "node",
        survives: Survives = "reboot",
        capacity_bytes: int | None = None,
    ) -> None:
        super().__init__()
        self.info = TierInfo(medium.name, "sim", scope, survives, capacity_bytes)
        self.medium, self.node = medium, node
        self._memory, self._weather, self._rng = memory, weather, rng
        self._books = Books(capacity_bytes)
        self._open: dict[ShardKey, OpenShard] = {}
        self._flying: list[Flying] = []
        self._leased: dict[ShardKey, list[File]] = {}
        self._locks = Locks()
        self._closed = self._dead = False

    def __repr__(self) -> str:
        return f"<SimTier {self.info.name}: {len(self._open)} shards reserved, {len(self._flying)} writes under way>"

    # -- life ----------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Waits a moment for operations under way. What is still reserved stays as debris."""
        self._closed = True
        await self._wait_idle(CLOSE_S)

    def kill(self) -> None:
        """The process is gone. Of the writes under way some blocks have arrived."""
        self._dead = True
        for flying in self._flying:
            first, tokens = self._blocks(flying.chunk)
            for at, token in enumerate(tokens):
                if self._rng.random() < 0.5:
                    self.medium.write(flying.chunk.shard, flying.file, first + at, [token])

    def _check_open(self) -> None:
        if self._dead:
            raise Dead
        if self._closed:
            raise not_open(self.info.name, "closed")

    def _error(self, number: int, what: str, key: object, **where: Any) -> TierError:
        return tier_error(number, f"Tier {self.info.name}: {what}", key=str(key), **where)

    async def _begin(self, key: object) -> Trouble:
        """The time before an operation's effect; raises if it is to have none."""
        trouble = self._weather.draw()
        await self._weather.pass_time()
        if trouble == "error":
            raise self._error(self._weather.number(), "failed", key)
        return trouble

    def _end(self, trouble: Trouble, key: object) -> None:
        if trouble == "lost":
            raise self._error(errno.ETIMEDOUT, "did not answer", key)

    def _torn(self, trouble: Trouble, key: object) -> None:
        if trouble == "torn":
            raise self._error(self._weather.number(), "failed in the middle", key)

    # -- going down ----------------------------------------------------------------------------------

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        self._check_open()
        check_shard(shard)
        if size_bytes < 0:
            raise ValueError(f"size_bytes must not be negative: {size_bytes}")
        return await self._finish(self._reserve(shard, size_bytes, resume), self._undo_reserve)

    async def _undo_reserve(self, answer: Reservation | Refused) -> None:
        if isinstance(answer, Reservation):
            await self._abort(answer.shard, answer, keep=answer.resumed)

    async def _reserve(self, shard: ShardKey, size: int, resume: bool) -> Reservation | Refused:
        async with self._locks.hold(shard):
            trouble = await self._begin(shard)
            self._discard(shard, keep=resume)
            refused = self._books.over_capacity(shard, size, self.info.name)
            if refused is not None:
                return refused
            committed_bytes = self._books.committed.get(shard)
            self._books.reserve(shard, size)
            try:
                await self._weather.pass_time()
                self._torn(trouble, shard)
                answer = self._make(shard, size, resume)
                if isinstance(answer, Refused):
                    self._books.forget(shard)
                    return answer
                self._end(trouble, shard)
            except TierError as error:
                self._books.forget(shard)
                if error.errno == errno.EEXIST and committed_bytes is not None:  # it stays what it was
                    self._books.adopt(shard, committed_bytes, committed_bytes)
                raise
            return answer

    def _make(self, shard: ShardKey, size: int, resume: bool) -> Reservation | Refused:
        there = self.medium.files.get(shard)
        if there is not None and self.medium.committed(shard.checkpoint):
            raise self._error(errno.EEXIST, "a committed shard is never overwritten", shard)
        resumed = resume and there is not None and there.size == size
        room = self.medium.room_bytes
        taken = self.medium.used_bytes - (there.size if there is not None else 0)
        if room is not None and taken + size > room:
            self._weather.full_at = asyncio.get_running_loop().time()
            detail = f"{self.info.name}: disk full: {size} bytes needed, {room - taken} free"
            return Refused("full", detail, size, max(0, room - taken))
        file = there if resumed and there is not None else self.medium.create(shard, size, self.node)
        file.node = self.node  # whose writes come next
        reservation = Reservation(shard, size, resumed=resumed)
        self._open[shard] = OpenShard(file, reservation)
        return reservation

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        return await self._moved([self._write(chunk) for chunk in chunks])

    async def _moved(self, work: Sequence[Coroutine[Any, Any, Result]]) -> list[Result]:
        """All chunks' results; a cancellation waits for them, since they work on the caller's memory."""
        results = await settle([self._keep(each) for each in work])
        assert None not in results
        return [result for result in results if result is not None]

    def _blocks(self, chunk: ChunkIO) -> tuple[int, list[Token]]:
        first, within = divmod(chunk.offset, self.medium.block_bytes)
        assert within == 0, f"{chunk} begins inside a block"
        return first, list(self._memory.load(chunk.address, chunk.length))

    async def _write(self, chunk: ChunkIO) -> Result:
        opened = self._open.get(chunk.shard)
        if opened is None or opened.closed:
            return self._failed(chunk, errno.EINVAL, "cannot write: the shard is not reserved")
        size = opened.reservation.size_bytes
        if chunk.offset < 0 or chunk.length < 0 or chunk.offset + chunk.length > size:
            return self._failed(chunk, errno.EINVAL, f"cannot write past the {size} bytes reserved")
        trouble, flying = self._weather.draw(), Flying(chunk, opened.file)
        opened.writes += 1
        self._flying.append(flying)
        try:
            first, early = self._blocks(chunk)
            await self._weather.pass_time(len(early))
            if trouble == "error":
                return self._failed(chunk, self._weather.number(), "cannot write")
            late = self._blocks(chunk)[1]
            for at, pair in enumerate(zip(early, late, strict=True)):
                if trouble != "torn" or self._rng.random() < 0.5:
                    self.medium.write(chunk.shard, opened.file, first + at, [self._rng.choice(pair)])
        finally:
            opened.writes -= 1
            self._flying.remove(flying)
        return Result() if not trouble else self._failed(chunk, errno.EIO, "cannot write all of it")

    def _failed(self, chunk: ChunkIO, number: int, what: str) -> Result:
        return Result(self._error(number, what, chunk.shard, offset=chunk.offset, length=chunk.length))

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        self._check_open()
        check_record(record)
        return await self._finish(self._commit(record, bytes(data), shards))

    async def _commit(self, record: RecordKey, data: bytes, shards: Sequence[Reservation]) -> bool:
        async with contextlib.AsyncExitStack() as stack:
            for shard in sorted({each.shard for each in shards}, key=str):
                await stack.enter_async_context(self._locks.hold(shard))
            await stack.enter_async_context(self._locks.hold(record))
            trouble = await self._begin(record)
            if record in self.medium.records:
                return await self._there_already(record)
            await self._sync(shards)
            self._torn(trouble, record)
            temporary = self.medium.write_beside(record)
            await self._weather.pass_time()
            if not self.medium.may_publish(record, temporary, alone=not shards):
                raise self._error(errno.ENOENT, "what it commits is gone", record)
            if not self.medium.publish(record, data, self.node):
                return await self._there_already(record)
            await self._weather.pass_time()
            if trouble == "lost" and self._rng.random() < 0.5:  # it cannot be made durable, so it is taken back
                self.medium.remove(record, durable=False)
                self._end(trouble, record)
            self.medium.sync_folder(record)
            self._end(trouble, record)
            for each in shards:
                del self._open[each.shard]
                self._books.commit(each.shard)
            return True

    async def _there_already(self, record: RecordKey) -> bool:
        await self._weather.pass_time()
        self.medium.sync_folder(record)
        return False

    async def _sync(self, shards: Sequence[Reservation]) -> None:
        for each in shards:
            opened = self._open.get(each.shard)
            if opened is None or opened.reservation.size_bytes != each.size_bytes:
                raise self._error(errno.EINVAL, "cannot commit: the shard is not reserved", each.shard)
            if opened.writes:
                raise self._error(errno.EBUSY, "the shard is still being written", each.shard)
            opened.closed = True
            await self._weather.pass_time()
            self.medium.sync(opened.file)

    async def beat(self, record: RecordKey, data: bytes) -> None:
        self._check_open()
        check_record(record)
        await self._finish(self._beat(record, bytes(data)))

    async def _beat(self, record: RecordKey, data: bytes) -> None:
        trouble = await self._begin(record)
        self._torn(trouble, record)
        self.medium.replace(record, data, self.node)
        self._end(trouble, record)

    async def abort(self, reservation: Reservation) -> None:
        self._check_open()
        await self._finish(self._abort(reservation.shard))

    async def _abort(self, shard: ShardKey, only: Reservation | None = None, *, keep: bool = False) -> None:
        async with self._locks.hold(shard):
            opened = self._open.get(shard)
            if opened is None or (only is not None and opened.reservation is not only):
                return
            trouble = await self._begin(shard)
            self._torn(trouble, shard)
            self._discard(shard, keep=keep)
            self._end(trouble, shard)

    def _discard(self, shard: ShardKey, *, keep: bool) -> None:
        opened = self._open.pop(shard, None)
        if opened is None:
            return
        if not keep and self.medium.files.get(shard) is opened.file:
            self.medium.remove(shard, durable=False)
        self._books.forget(shard)

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        self._check_open()
        for key in what:
            if isinstance(key, CheckpointKey):
                check_checkpoint(key)
            else:
                check_shard(key) if isinstance(key, ShardKey) else check_record(key)
        for key in what:
            await self._finish(self._drop(key))

    async def _drop(self, key: CheckpointKey | ShardKey | RecordKey) -> None:
        if isinstance(key, ShardKey) and key.name.endswith(".json"):
            key = RecordKey(key.checkpoint.run, f"{key.checkpoint.attempt}/{key.name}")
        if not isinstance(key, RecordKey):
            await self._drop_now(key)
            return
        async with self._locks.hold(key):
            await self._drop_now(key)

    async def _drop_now(self, key: CheckpointKey | ShardKey | RecordKey) -> None:
        trouble = await self._begin(key)
        gone = [key] if isinstance(key, ShardKey) else self._books.of(key) if isinstance(key, CheckpointKey) else []
        for _ in range(2 if isinstance(key, CheckpointKey) else 1):
            for each in self.medium.delete_from(key) if isinstance(key, CheckpointKey) else [key]:
                commits = isinstance(each, RecordKey) and (
                    each is key or "/manifest" in each.name or "/rank-" in each.name
                )
                self.medium.remove(each, durable=commits)
                if not commits:
                    self._torn(trouble, key)
                await self._weather.pass_time()
        for shard in gone:
            async with self._locks.hold(shard):
                self._discard(shard, keep=False)
            self._books.forget(shard, leased=bool(self._leased.get(shard)))
        self._end(trouble, key)

    # -- coming up -----------------------------------------------------------------------------------

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        return await self._moved([self._read(chunk) for chunk in chunks])

    async def _read(self, chunk: ChunkIO) -> Result:
        leased = self._leased.get(chunk.shard)
        file = leased[-1] if leased else self.medium.files.get(chunk.shard)
        if file is None:
            return self._failed(chunk, errno.ENOENT, "cannot read: the shard is not there")
        if chunk.offset < 0 or chunk.length < 0 or chunk.offset + chunk.length > file.size:
            return self._failed(chunk, errno.EINVAL, f"cannot read: the shard is truncated, {file.size} bytes")
        trouble = self._weather.draw()
        grain = self.medium.block_bytes
        blocks = range(chunk.offset // grain, -(-(chunk.offset + chunk.length) // grain))
        await self._weather.pass_time(len(blocks))
        if trouble:
            return self._failed(chunk, errno.EIO, "cannot read")
        nothing: Token = b"" if grain < 1 << 20 else 0
        self._memory.store(chunk.address, [file.blocks.get(block, nothing) for block in blocks], chunk.length)
        return Result()

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        self._check_open()
        for shard in shards:
            check_shard(shard)
        return await self._finish(self._lease(shards), SimLease.close)

    async def _lease(self, shards: Sequence[ShardKey]) -> SimLease:
        trouble = await self._begin(shards)
        self._torn(trouble, shards)
        held: list[tuple[ShardKey, File]] = []
        for shard in shards:
            leased = self._leased.get(shard)
            file = self.medium.files.get(shard) or (leased[-1] if leased else None)
            if file is None:
                raise self._missing(shard)
            held.append((shard, file))
        for shard, file in held:
            self._leased.setdefault(shard, []).append(file)
        return SimLease(self.give_back, held)

    def _missing(self, shard: ShardKey) -> CheckpointGone | TierError:
        if self.medium.committed(shard.checkpoint):
            return self._error(errno.ENOENT, "a shard of a committed checkpoint is missing", shard)
        return CheckpointGone(f"Tier {self.info.name}: the checkpoint is gone", key=str(shard))

    def give_back(self, held: Sequence[tuple[ShardKey, File]]) -> None:
        for shard, file in held:
            self._leased[shard].remove(file)
            if not self._leased[shard]:
                del self._leased[shard]
                self._books.lingering.pop(shard, None)

    async def fetch(self, record: RecordKey) -> bytes | None:
        self._check_open()
        check_record(record)
        trouble = await self._begin(record)
        self._torn(trouble, record)
        there = self.medium.records.get(record)
        self._end(trouble, record)
        return None if there is None else there.data

    async def scan(self, run: str) -> AsyncIterator[Found]:
        self._check_open()
        check_run(run)
        trouble = await self._begin(run)
        known = {shard for shard in self._books.committed if shard.checkpoint.run == run}
        folders = self.medium.folders(run)
        for found in self.medium.listing(run, ""):
            yield found
        for number, folder in enumerate(folders):
            if number % 4 == 0:
                await self._weather.pass_time()
                self._torn(trouble, run)
                self._check_open()
            for found in self.medium.listing(run, folder):
                known.discard(self._books.see(run, found, found.size_bytes))
                yield found
        for shard in known:
            self._books.forget(shard, leased=bool(self._leased.get(shard)))
        self._end(trouble, run)

    def usage(self) -> Usage:
        room = self.medium.room_bytes
        return self._books.usage(None if room is None else max(0, room - self.medium.used_bytes))
