"""A limit on how long a tier may take to answer."""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import AsyncIterator, Sequence

from stepwell.errors import TierUnavailable
from stepwell.tiers._wrapper import Wrapper
from stepwell.tiers.base import (
    CheckpointKey,
    Found,
    Lease,
    RecordKey,
    Refused,
    Reservation,
    ShardKey,
    Tier,
)

#: a commit syncs what the system may still hold of its shards; slower than this is not answering either
SYNC_BYTES_PER_S_MIN = 100 << 20


class Timed(Wrapper):
    """Gives every call that is not answered within `timeout_s` up with TierUnavailable (ETIMEDOUT).

    What was begun goes on in the tier and is cleaned up there, so a commit that was given up may still succeed:
    ask with `fetch`. Reads and writes of chunks are never cut off, since their memory is the tier's until it
    answers; whoever moves them watches them. A commit has time for its shards' bytes on top.
    """

    def __init__(self, tier: Tier, timeout_s: float) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s must be positive, not {timeout_s}")
        super().__init__(tier)
        self.timeout_s = timeout_s

    @contextlib.asynccontextmanager
    async def limit(self, call: str, what: object, more_s: float = 0.0) -> AsyncIterator[None]:
        """Of one call on the tier; `what` it is about names the place in the error."""
        limit_s = self.timeout_s + more_s
        scope = asyncio.timeout(limit_s)
        try:
            async with scope:
                yield
        except TimeoutError as error:
            if not scope.expired():
                raise  # the tier's own
            gone = TierUnavailable(
                f"Tier {self.info.name} did not answer within {limit_s:.3g} s",
                todo="See whether its file system or server hangs; what was asked for goes on in the background",
                call=call,
                key=str(what) or None,
                path=self.info.detail.get("path"),
            )
            gone.errno = errno.ETIMEDOUT
            raise gone from error

    async def start(self) -> None:
        async with self.limit("start", ""):
            await super().start()

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        async with self.limit("reserve", shard):
            return await self.tier.reserve(shard, size_bytes, resume=resume)

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        sync_s = sum(each.size_bytes for each in shards) / SYNC_BYTES_PER_S_MIN
        async with self.limit("commit", record, sync_s):
            return await self.tier.commit(record, data, shards=shards)

    async def fetch(self, record: RecordKey) -> bytes | None:
        async with self.limit("fetch", record):
            return await self.tier.fetch(record)

    async def beat(self, record: RecordKey, data: bytes) -> None:
        async with self.limit("beat", record):
            await self.tier.beat(record, data)

    async def abort(self, reservation: Reservation) -> None:
        async with self.limit("abort", reservation.shard):
            await self.tier.abort(reservation)

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        for key in what:  # each with a limit of its own
            async with self.limit("drop", key):
                await self.tier.drop([key])

    async def scan(self, run: str) -> AsyncIterator[Found]:
        items = self.tier.scan(run)
        while True:
            async with self.limit("scan", run):
                found = await anext(items, None)
            if found is None:
                return
            yield found

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        async with self.limit("lease", ", ".join(map(str, shards))):
            return await self.tier.lease(shards)
