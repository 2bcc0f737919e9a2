"""Faults by plan.

The fault model of `Faulty`. One fault of its plan hits one operation, counted from 1 per kind of operation
(chunks for write and read, calls for all others):

- error: the operation fails with the errno of the fault and nothing of it reaches the tier.
- torn: of a written chunk only the first half reaches the tier, and the write fails with that errno.
- flip: one bit of the chunk, chosen by the seed, is changed, and success is reported: a write leaves it wrong
  on the tier, a read only in memory.
- stall: the operation waits, before anything is done, until `release()`; then it goes on as if nothing was.
- lost answer: the operation is done, and then reported as failed with that errno.

Not in the model: loss of data that was not synced, and crashes. Those need a medium that can be cut off, which
is the simulation's business.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from stepwell.native import Region
from stepwell.tiers._wrapper import Wrapper, give_up
from stepwell.tiers.base import (
    CheckpointKey,
    ChunkIO,
    Lease,
    RecordKey,
    Refused,
    Reservation,
    Result,
    ShardKey,
    Tier,
    tier_error,
)

T = TypeVar("T")
Operation = Literal["reserve", "write", "read", "commit", "fetch", "beat", "abort", "drop", "lease"]

_BLOCK_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Fault:
    """One entry of a plan: from the `nth` operation on, `times` of them fail in this way."""

    operation: Operation
    nth: int
    kind: Literal["error", "torn", "flip", "stall", "lost answer"] = "error"
    errno: int = errno.EIO
    times: int = 1

    def __post_init__(self) -> None:
        if self.kind == "torn" and self.operation != "write":
            raise ValueError("only a write can be torn")
        if self.kind == "flip" and self.operation not in ("write", "read"):
            raise ValueError("only a write or a read can flip a bit")


class Faulty(Wrapper):
    """Fails by plan, reproducibly. The docstring of this module is the fault model; `hit` lists what has struck."""

    def __init__(self, tier: Tier, plan: Sequence[Fault], seed: int = 0) -> None:
        super().__init__(tier)
        self.plan = list(plan)
        self.hit: list[Fault] = []
        self._random = random.Random(seed)
        self._counts: Counter[str] = Counter()
        self._released = asyncio.Event()

    def release(self) -> None:
        """Ends all stalls, also those to come."""
        self._released.set()

    def _next(self, operation: Operation) -> Fault | None:
        self._counts[operation] += 1
        count = self._counts[operation]
        for fault in self.plan:
            if fault.operation == operation and fault.nth <= count < fault.nth + fault.times:
                self.hit.append(fault)
                return fault
        return None

    async def _call(self, operation: Operation, call: Callable[[], Awaitable[T]]) -> T:
        fault = self._next(operation)
        if fault is None:
            return await call()
        if fault.kind == "stall":
            await self._released.wait()
            return await call()
        if fault.kind == "lost answer":
            await call()
        raise tier_error(fault.errno, f"Tier {self.info.name}: cannot {operation} (injected)", tier=self.info.name)

    async def _move(
        self,
        operation: Literal["write", "read"],
        move: Callable[[Sequence[ChunkIO]], Awaitable[list[Result]]],
        chunks: Sequence[ChunkIO],
    ) -> list[Result]:
        faults = [self._next(operation) for _ in chunks]
        if any(fault is not None and fault.kind == "stall" for fault in faults):
            try:
                await self._released.wait()
            except asyncio.CancelledError:
                give_up(chunks)
                raise
        passed: dict[int, ChunkIO] = {}
        for index, (chunk, fault) in enumerate(zip(chunks, faults, strict=True)):
            if fault is None or fault.kind == "stall":
                passed[index] = chunk
            elif fault.kind == "torn":
                half = chunk.length // 2 // _BLOCK_BYTES * _BLOCK_BYTES
                passed[index] = replace(chunk, length=half, signal=None)
            elif fault.kind != "error":
                passed[index] = replace(chunk, signal=None)
        moved = dict(zip(passed, await move(list(passed.values())) if passed else (), strict=True))
        results = []
        for index, (chunk, fault) in enumerate(zip(chunks, faults, strict=True)):
            result = moved.get(index, Result())
            if fault is not None and fault.kind != "stall":
                result = await self._strike(fault, operation, chunk, result)
                if chunk.signal is not None:
                    chunk.signal.fire(result.error is None)
            results.append(result)
        return results

    async def _strike(self, fault: Fault, operation: str, chunk: ChunkIO, result: Result) -> Result:
        if fault.kind != "flip":
            what = f"Tier {self.info.name}: cannot {operation} (injected)"
            return Result(tier_error(fault.errno, what, key=str(chunk.shard), offset=chunk.offset, length=chunk.length))
        if result.error is None and chunk.length:
            position, bit = self._random.randrange(chunk.length), 1 << self._random.randrange(8)
            if operation == "read":
                (ctypes.c_uint8 * chunk.length).from_address(chunk.address)[position] ^= bit
            else:
                await self._flip_stored(chunk, position, bit)
        return result

    async def _flip_stored(self, chunk: ChunkIO, position: int, bit: int) -> None:
        """Through the tier itself: the caller's memory may be in other use by now."""
        start = position // _BLOCK_BYTES * _BLOCK_BYTES
        length = min(_BLOCK_BYTES, chunk.length - start)
        with Region(_BLOCK_BYTES) as region:
            block = ChunkIO(chunk.shard, chunk.offset + start, length, region.address)
            for result in await self.tier.read([block]):
                if result.error is not None:
                    raise result.error
            region.view()[position - start] ^= bit
            await self.tier.write([block])

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        return await self._call("reserve", lambda: self.tier.reserve(shard, size_bytes, resume=resume))

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._move("write", self.tier.write, chunks)

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._move("read", self.tier.read, chunks)

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        return await self._call("commit", lambda: self.tier.commit(record, data, shards=shards))

    async def fetch(self, record: RecordKey) -> bytes | None:
        return await self._call("fetch", lambda: self.tier.fetch(record))

    async def beat(self, record: RecordKey, data: bytes) -> None:
        await self._call("beat", lambda: self.tier.beat(record, data))

    async def abort(self, reservation: Reservation) -> None:
        await self._call("abort", lambda: self.tier.abort(reservation))

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        await self._call("drop", lambda: self.tier.drop(what))

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        return await self._call("lease", lambda: self.tier.lease(shards))
