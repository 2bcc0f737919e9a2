"""What drivers share beyond the contract, as wrappers around any of them: limits, retries, faults, tracing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from stepwell.tiers._calls import settle
from stepwell.tiers._faults import Fault, Faulty
from stepwell.tiers._paced import Paced
from stepwell.tiers._retrying import Retrying
from stepwell.tiers._timed import Timed
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
)

__all__ = ["Event", "Fault", "Faulty", "Paced", "Retrying", "Throttled", "Timed", "Traced", "Wrapper"]

T = TypeVar("T")


class Throttled(Wrapper):
    """Lets at most `bytes_per_s` pass, written and read together, chunk by chunk.

    clock: seconds, monotonic; sleep: waits so many seconds. Both are passed in for tests and simulation.
    """

    def __init__(
        self, tier: Tier, bytes_per_s: float, clock: Callable[[], float], sleep: Callable[[float], Awaitable[object]]
    ) -> None:
        if bytes_per_s <= 0:
            raise ValueError(f"bytes_per_s must be positive, not {bytes_per_s}")
        super().__init__(tier)
        self.bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()  # when all that was let through so far has passed at that rate

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._paced(self.tier.write, chunks)

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._paced(self.tier.read, chunks)

    async def _paced(
        self, move: Callable[[Sequence[ChunkIO]], Awaitable[list[Result]]], chunks: Sequence[ChunkIO]
    ) -> list[Result]:
        moves: list[asyncio.Future[list[Result]]] = []
        try:
            for chunk in chunks:
                await self._wait_turn(chunk.length)
                moves.append(asyncio.ensure_future(move([chunk])))  # not awaited: chunks may depend on each other
        except BaseException:
            give_up(chunks[len(moves) :])
            await settle(moves)  # they work on the caller's memory
            raise
        return [result for results in await settle(moves) for result in results or ()]

    async def _wait_turn(self, length: int) -> None:
        now = self._clock()
        begin = max(now, self._free_at)
        self._free_at = begin + length / self.bytes_per_s
        if begin > now:
            await self._sleep(begin - now)


@dataclass(frozen=True, slots=True)
class Event:
    """One moment of one operation; `number` joins its moments. `error` is set when it failed: an exception,
    or of a batch the first chunk's."""

    tier: str
    operation: str
    phase: Literal["started", "complete", "failed"]
    number: int
    detail: str
    size_bytes: int = 0
    error: BaseException | None = None


class Traced(Wrapper):
    """Tells `emit` when each operation has started and how it ended. `emit` must neither block nor raise."""

    def __init__(self, tier: Tier, emit: Callable[[Event], object]) -> None:
        super().__init__(tier)
        self._emit = emit
        self._number = 0

    async def _traced(self, operation: str, detail: str, call: Callable[[], Awaitable[T]], size_bytes: int = 0) -> T:
        self._number += 1
        started = Event(self.info.name, operation, "started", self._number, detail, size_bytes)
        self._emit(started)
        try:
            answer = await call()
        except BaseException as error:
            self._emit(replace(started, phase="failed", error=error))
            raise
        failure = _first_error(answer)
        self._emit(replace(started, phase="complete" if failure is None else "failed", error=failure))
        return answer

    async def start(self) -> None:
        await self._traced("start", "", super().start)

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        return await self._traced(
            "reserve", str(shard), lambda: self.tier.reserve(shard, size_bytes, resume=resume), size_bytes
        )

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._traced("write", _shards(chunks), lambda: self.tier.write(chunks), _size(chunks))

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._traced("read", _shards(chunks), lambda: self.tier.read(chunks), _size(chunks))

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        size = sum(each.size_bytes for each in shards)
        return await self._traced("commit", str(record), lambda: self.tier.commit(record, data, shards=shards), size)

    async def fetch(self, record: RecordKey) -> bytes | None:
        return await self._traced("fetch", str(record), lambda: self.tier.fetch(record))

    async def beat(self, record: RecordKey, data: bytes) -> None:
        await self._traced("beat", str(record), lambda: self.tier.beat(record, data))

    async def abort(self, reservation: Reservation) -> None:
        await self._traced("abort", str(reservation.shard), lambda: self.tier.abort(reservation))

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        await self._traced("drop", ", ".join(map(str, what)), lambda: self.tier.drop(what))

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        return await self._traced("lease", ", ".join(map(str, shards)), lambda: self.tier.lease(shards))

    async def close(self) -> None:
        await self._traced("close", "", self.tier.close)


def _first_error(answer: object) -> BaseException | None:
    if isinstance(answer, list):
        return next((each.error for each in answer if isinstance(each, Result) and each.error is not None), None)
    return None


def _shards(chunks: Sequence[ChunkIO]) -> str:
    return ", ".join(dict.fromkeys(str(chunk.shard) for chunk in chunks))


def _size(chunks: Sequence[ChunkIO]) -> int:
    return sum(chunk.length for chunk in chunks)
