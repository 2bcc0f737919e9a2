"""Again, after a moment: for errors that pass, of calls that may be repeated."""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from stepwell.errors import TierError, TierFull
from stepwell.tiers._wrapper import Wrapper
from stepwell.tiers.base import CheckpointKey, ChunkIO, Found, Lease, RecordKey, Result, ShardKey, Tier

T = TypeVar("T")

#: a failover of a server takes minutes and is for the caller to wait out; these bridge hiccups, within 4 s
TRIES = 4
BACKOFF_S = 0.1
BACKOFF_FACTOR = 4.0
JITTER = 0.5  # of the pause, up or down: many nodes hit the same hiccup at once

_PASSING = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ECONNRESET, errno.ENOBUFS, errno.EREMOTEIO}
#: ETIMEDOUT: somebody has waited for long already, and the first call may still be under way
_FINAL = {errno.ETIMEDOUT, errno.ENOENT, errno.EEXIST, errno.EROFS, errno.EACCES, errno.EPERM}


class Retrying(Wrapper):
    """Repeats calls that failed with an error which may pass: up to `TRIES` in all, with growing pauses.

    Only calls that are safe to repeat: read, write, fetch, beat, drop, lease, and scan until its first item.
    reserve, commit and abort are their callers' to repeat, who know what a lost answer means. Of a batch of
    chunks only those that failed are moved again; a chunk with a `signal` never is, because a signal fires once.
    sleep: waits so many seconds; jitter: a number in [0, 1). Both are passed in for tests and simulation.
    """

    def __init__(
        self,
        tier: Tier,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        super().__init__(tier)
        self._sleep = sleep
        self._jitter = jitter

    async def _pause(self, tries: int) -> None:
        """After so many tries."""
        await self._sleep(BACKOFF_S * BACKOFF_FACTOR ** (tries - 1) * (1 - JITTER + 2 * JITTER * self._jitter()))

    async def repeated(self, call: Callable[[], Awaitable[T]]) -> T:
        """The answer of a call that is safe to repeat."""
        for tries in range(1, TRIES):
            try:
                return await call()
            except TierError as error:
                if not may_pass(error):
                    raise
            await self._pause(tries)
        return await call()

    async def _moved(
        self, move: Callable[[Sequence[ChunkIO]], Awaitable[list[Result]]], chunks: Sequence[ChunkIO]
    ) -> list[Result]:
        results = await move(chunks)
        for tries in range(1, TRIES):
            again = [index for index, result in enumerate(results) if _repeatable(chunks[index], result)]
            if not again:
                break
            await self._pause(tries)
            for index, result in zip(again, await move([chunks[index] for index in again]), strict=True):
                results[index] = result
        return results

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._moved(self.tier.write, chunks)

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._moved(self.tier.read, chunks)

    async def fetch(self, record: RecordKey) -> bytes | None:
        return await self.repeated(lambda: self.tier.fetch(record))

    async def beat(self, record: RecordKey, data: bytes) -> None:
        await self.repeated(lambda: self.tier.beat(record, data))

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        await self.repeated(lambda: self.tier.drop(what))

    async def scan(self, run: str) -> AsyncIterator[Found]:
        items, first = await self.repeated(lambda: self._begin_scan(run))
        if first is not None:
            yield first
            async for found in items:
                yield found

    async def _begin_scan(self, run: str) -> tuple[AsyncIterator[Found], Found | None]:
        items = self.tier.scan(run)
        return items, await anext(items, None)

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        return await self.repeated(lambda: self.tier.lease(shards))


def may_pass(error: TierError) -> bool:
    """Whether the same call may work in a moment. A full tier stays full until somebody makes room."""
    if isinstance(error, TierFull) or error.errno in _FINAL:
        return False
    return error.retry or error.errno in _PASSING


def _repeatable(chunk: ChunkIO, result: Result) -> bool:
    return chunk.signal is None and result.error is not None and may_pass(result.error)
