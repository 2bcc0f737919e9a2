"""Prefetch: chunks come up before they are asked for.

To the host tier chunks are read into kept slots, verified, and clean from the start; whoever reads them next,
through this store or through `stepwell.load`, takes them from memory. To a storage tier a checkpoint is copied
and committed there, as by a flush.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Hashable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

from stepwell.chain import Chain
from stepwell.errors import ConfigError, StoreClosed, TierFull, WaitTimeout
from stepwell.hostmem import host_budget_bytes, local_ranks
from stepwell.mover import Mover
from stepwell.ranges import Read
from stepwell.reading import Caller, Crcs, Healing, Reading
from stepwell.tiers.base import ShardKey, Tier
from stepwell.tiers.host import Arena, HostTier, Priority
from stepwell.waiting import done_within


@dataclass(frozen=True, slots=True)
class PrefetchProgress:
    """How far a prefetch is."""

    done_bytes: int
    total_bytes: int
    seconds: float
    seconds_left: float | None  # at the rate so far; None: nothing has come yet


class Prefetch:
    """A prefetch under way: `wait`, `done`, `cancel`, `await`, `progress`."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._ended: float | None = None
        self._done_bytes = self._total_bytes = 0
        self._future: Future[None] = Future()

    def wait(self, timeout: float | None = None) -> Prefetch:
        """Blocks until everything is there. Raises what went wrong; WaitTimeout after `timeout` seconds, while it
        goes on; StoreClosed if it was cancelled."""
        if not done_within(self._future, timeout):
            raise WaitTimeout(f"the prefetch took longer than {timeout} s", todo="It goes on; wait again")
        try:
            self._future.result()
        except CancelledError:
            raise StoreClosed("the prefetch was cancelled") from None
        return self

    def done(self) -> bool:
        """Whether everything is there."""
        return self._future.done() and not self._future.cancelled() and self._future.exception() is None

    def cancel(self) -> None:
        """Stops it; what has come stays until its room is needed."""
        self._future.cancel()

    def __await__(self) -> Generator[Any, None, Prefetch]:
        """As `wait`. Whoever stops awaiting it leaves it going on: only `cancel` ends it."""
        yield from self._arrives().__await__()
        return self

    async def _arrives(self) -> None:
        ending = asyncio.wrap_future(self._future)
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:
            if not self._future.cancelled():  # it is the caller that was cancelled
                raise
            raise StoreClosed("the prefetch was cancelled") from None

    @property
    def progress(self) -> PrefetchProgress:
        """Bytes and times now."""
        seconds = (self._ended or time.monotonic()) - self._began
        left = None
        if self._done_bytes:
            left = seconds / self._done_bytes * (self._total_bytes - self._done_bytes)
        return PrefetchProgress(self._done_bytes, self._total_bytes, seconds, left)

    def __repr__(self) -> str:
        return f"<Prefetch: {self._done_bytes} of {self._total_bytes} bytes{', done' if self._future.done() else ''}>"

    # -- for the store -------------------------------------------------------------------

    def follow(self, future: Future[None]) -> None:
        """Takes over how `future` ends; cancelling one cancels the other."""
        self._future = future
        future.add_done_callback(self._note_end)

    def _note_end(self, _: Future[None]) -> None:
        self._ended = time.monotonic()

    def expect(self, size_bytes: int) -> None:
        self._total_bytes += size_bytes

    def moved(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes


@dataclass(frozen=True, slots=True)
class Wanted:
    """One shard that must come up. cached_as: how the arena knows it, if not by its key."""

    key: ShardKey
    size: int
    tiers: Sequence[Tier]
    crcs: Crcs | None
    cached_as: Hashable = None

    @property
    def name(self) -> Hashable:
        return self.key if self.cached_as is None else self.cached_as


async def into_host(chain: Chain, shards: Sequence[Wanted], handle: Prefetch) -> None:
    """Brings shards into the arena, in order. Raises TierFull if they do not fit, CorruptData.

    What comes is not pushed out by what comes next, but by whatever is more urgent. So prefetches that do not fit
    together go one after the other: each would wait for ever for the room of the other.
    """
    host = chain.host
    if host is None:
        raise ConfigError("there is no host tier", todo=f"The tiers are {', '.join(t.info.name for t in chain.tiers)}")
    arena, mover = host.arena, chain.mover
    total = sum(shard.size for shard in shards)
    if host.grows:
        host.grow(host_budget_bytes(total, local_ranks()))
    if not host.fits([shard.size for shard in shards]):
        raise TierFull(
            f"{total} bytes do not fit into the host tier of {arena.capacity_bytes}",
            todo="Give the host tier more memory, or prefetch less",
            tier=host.info.name,
        )
    handle.expect(total)
    caller = Caller()
    slots = sum(-(-shard.size // arena.slot_bytes) for shard in shards)
    try:
        async with mover.coming.held(slots):
            arena.expect(total)
            for shard in shards:
                await _one(mover, host, shard, handle, caller)
    finally:  # at once, a tier may hang; and again, for what was still on its way
        _arrived(arena, shards)
        await caller.settled()
        _arrived(arena, shards)


def _arrived(arena: Arena, shards: Sequence[Wanted]) -> None:
    for shard in shards:
        arena.arrived(shard.name)


async def _one(mover: Mover, host: HostTier, shard: Wanted, handle: Prefetch, caller: Caller) -> None:
    have = host.arena.chunks(shard.name)
    reads = [read for read in mover.all_of(shard.size) if read.start // host.arena.slot_bytes not in have]
    handle.moved(shard.size - sum(read.length for read in reads))

    async def moved(read: Read, address: int) -> None:
        handle.moved(read.length)

    reading = Reading(
        shard.key, shard.tiers, shard.crcs, Healing(), Priority.PREFETCH, target=host.info.name,
        cached_as=shard.cached_as, caller=caller,
    )  # fmt: skip
    await mover.get(reading, reads, moved, kept=True)
