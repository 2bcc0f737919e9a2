"""The host tier: checkpoints in this process's memory, chunk by chunk, in the slots of an arena.

The mover fills and reads the slots in place (`arena`); the contract's `write` and `read` copy, for callers
that bring their own memory. A committed checkpoint may lose chunks to eviction once another tier has it, too:
it is then no longer committed here, and what is left of it still serves reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import errno
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import ClassVar

from stepwell.errors import TierError
from stepwell.native import Region
from stepwell.tiers._arena import Arena
from stepwell.tiers._books import Books
from stepwell.tiers._inmemory import InMemory
from stepwell.tiers._paths import check_shard
from stepwell.tiers._slices import Memory
from stepwell.tiers._slots import Priority, Slot
from stepwell.tiers.base import (
    CHUNK_BYTES,
    CheckpointKey,
    ChunkIO,
    EvictionPolicy,
    Lease,
    Refused,
    Reservation,
    Result,
    ShardKey,
    TierInfo,
    Usage,
)

#: what an arena has before it knows how large the state is: enough to stage the first restore
FIRST_BYTES = 256 << 20
#: what of it may be kept before `grow` says more: a small state must not fill the rest with its older checkpoints
KEEP_FIRST_BYTES = 64 << 20
#: of memory that is so large, and no other process's, chunks are larger: fewer to decide on, where states are of many
#: GiB. What several processes share has one size for all
LARGE_BYTES, LARGE_CHUNK_BYTES = 16 << 30, 32 << 20
#: how long `close` waits for memory that is still in use
CLOSE_S = 5.0

__all__ = ["Arena", "HostTier", "Priority", "Slot", "chunk_bytes_for"]

_abandoned: list[Arena] = []  # memory that a hung device may still write to stays until the process ends


def chunk_bytes_for(capacity_bytes: int | None) -> int:
    """How large the chunks of an arena are, in bytes."""
    return LARGE_CHUNK_BYTES if capacity_bytes is not None and capacity_bytes >= LARGE_BYTES else CHUNK_BYTES


class HostTier(InMemory):
    """An arena of `capacity_bytes` of private memory. None: it starts small, and keeps no more than `grow` says."""

    _ARENA: ClassVar[type[Arena]] = Arena

    def __init__(
        self,
        eviction: EvictionPolicy,
        capacity_bytes: int | None = None,
        name: str = "host",
        *,
        chunk_bytes: int = CHUNK_BYTES,
        memory: Callable[[int], Memory] = Region,
        background: bool = True,
        ahead: bool = True,
    ) -> None:
        """chunk_bytes, memory, background: as `Arena` takes them. ahead: a capacity that is given is taken from the
        system at the start, not when it is needed."""
        self.grows, self._ahead = capacity_bytes is None, ahead
        self.arena = self._ARENA(
            capacity_bytes or FIRST_BYTES,
            eviction,
            slot_bytes=chunk_bytes,
            memory=memory,
            background=background,
            on_evicted=self._lost,
        )
        if self.grows:
            self.arena.keep_limit = self._slots(KEEP_FIRST_BYTES)
        info = TierInfo(
            name=name,
            driver="host",
            scope="process",
            survives="nothing",
            capacity_bytes=self.arena.capacity_bytes,
            alignment_bytes=1,
            request_bytes=chunk_bytes,
        )
        super().__init__(info, Books())
        self._leased: Counter[tuple[ShardKey, int, Slot]] = Counter()
        #: told of each checkpoint that is not committed here any more, because a chunk of it was evicted
        self.on_uncommitted: Callable[[CheckpointKey], object] = lambda checkpoint: None

    def __repr__(self) -> str:
        return f"<HostTier {self.info.name}: {len(self._books.committed)} shards committed, {self.arena!r}>"

    async def start(self) -> None:
        if self._ahead and not self.grows:
            self.arena.expect(self.arena.capacity_bytes)

    def grow(self, capacity_bytes: int) -> None:
        """Raises the capacity of an arena whose size was not set. Budgets are the caller's business."""
        assert self.grows
        self.arena.grow(capacity_bytes)
        self.arena.keep_limit = max(self.arena.keep_limit or 0, self._slots(capacity_bytes))
        self.info = replace(self.info, capacity_bytes=self.arena.capacity_bytes)

    def _slots(self, size_bytes: int) -> int:
        return -(-size_bytes // self.arena.slot_bytes)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether shards of these sizes can be kept together, once nothing else is promised."""
        return sum(self._slots(size) for size in sizes) <= self.arena.kept_max - len(self.arena.pinned)

    @property
    def promised_slots(self) -> int:
        """Slots that shards on their way here were promised."""
        return sum(self._slots(size) for size in self._books.reserved.values())

    # -- going down ----------------------------------------------------------------------

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        self._check_new(shard, size_bytes)
        promised = sum(self._slots(size) for other, size in self._books.reserved.items() if other != shard)
        free = self.arena.kept_max - len(self.arena.pinned) - promised
        if self._slots(size_bytes) > free:
            free_bytes = max(0, free) * self.arena.slot_bytes
            detail = (
                f"{self.info.name}: {size_bytes} bytes needed, {free_bytes} of the arena's {self.arena.capacity_bytes}"
            )
            return Refused("full", f"{detail} can be promised", size_bytes, free_bytes)
        self.arena.drop(shard)
        self._books.reserve(shard, size_bytes)
        return Reservation(shard, size_bytes)

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        results = []
        for chunk in chunks:
            size = self._books.reserved.get(chunk.shard)
            if size is None:
                result = self._not_reserved(chunk)
            elif chunk.offset < 0 or chunk.length < 0 or chunk.offset + chunk.length > size:
                result = Result(self._error(errno.EINVAL, f"cannot write past the {size} bytes reserved", chunk.shard))
            else:
                try:
                    result = await self._copy_in(chunk, size)
                except TierError as error:  # the arena got no memory, or was closed
                    result = Result(error)
            results.append(result)
        return results

    def _not_reserved(self, chunk: ChunkIO) -> Result:
        return Result(self._error(errno.EINVAL, "cannot write: the shard is not reserved", chunk.shard))

    async def _copy_in(self, chunk: ChunkIO, size: int) -> Result:
        slot_bytes = self.arena.slot_bytes
        done = 0
        while done < chunk.length:
            if self._books.reserved.get(chunk.shard) != size:  # aborted meanwhile
                return self._not_reserved(chunk)
            number, within = divmod(chunk.offset + done, slot_bytes)
            part = min(chunk.length - done, slot_bytes - within)
            slot = self.arena.find(chunk.shard, number)
            if slot is None:
                new = await self.arena.acquire(Priority.SNAPSHOT, kept=True)
                if self._books.reserved.get(chunk.shard) != size:
                    self.arena.release(new)
                    return self._not_reserved(chunk)
                if self.arena.place(new, chunk.shard, number, min(slot_bytes, size - number * slot_bytes)):
                    self.arena.view(new, slot_bytes)[:] = bytes(slot_bytes)
                    self.arena.filled(new)
                slot = self.arena.find(chunk.shard, number)  # of another write of this chunk, if that was faster
                self.arena.release(new)
            if slot is None:
                return Result(self._error(errno.EBUSY, "cannot write: the chunk is being filled in place", chunk.shard))
            ctypes.memmove(slot.address + within, chunk.address + done, part)
            self.arena.release(slot)
            done += part
            await asyncio.sleep(0)
        return Result()

    def _check_whole(self, reservation: Reservation) -> None:
        here, needed = len(self.arena.chunks(reservation.shard)), self._slots(reservation.size_bytes)
        if here < needed:  # the system gave less memory than was promised
            what = f"cannot commit: {here} of {needed} chunks are here"
            raise self._error(errno.ENOSPC, what, reservation.shard)

    def _drop_checkpoint(self, checkpoint: CheckpointKey) -> None:
        """Also what is left of one that is not whole here."""
        self._uncommit(checkpoint)
        for shard in self.arena.shards():
            if isinstance(shard, ShardKey) and shard.checkpoint == checkpoint:
                self.arena.drop(shard)

    def _remove(self, shard: ShardKey) -> None:
        self._books.forget(shard)
        self.arena.drop(shard)

    def _lost(self, shard: Hashable) -> None:
        """A chunk was evicted: its checkpoint is not whole here any more."""
        if isinstance(shard, ShardKey):
            was_here = shard in self._books.committed
            self._uncommit(shard.checkpoint)
            if was_here:
                self.on_uncommitted(shard.checkpoint)

    def _uncommit(self, checkpoint: CheckpointKey) -> None:
        self._drop_records(checkpoint)
        for shard in self._books.of(checkpoint):
            self._books.forget(shard)

    # -- coming up -----------------------------------------------------------------------

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        results = []
        for chunk in chunks:
            results.append(self._copy_out(chunk))
            await asyncio.sleep(0)
        return results

    def _copy_out(self, chunk: ChunkIO) -> Result:
        size = self._books.committed.get(chunk.shard, self._books.reserved.get(chunk.shard))
        if size is not None and (chunk.offset < 0 or chunk.length < 0 or chunk.offset + chunk.length > size):
            what = f"cannot read: the shard is truncated at {size}"
            return Result(self._error(errno.EINVAL, what, chunk.shard, offset=chunk.offset, length=chunk.length))
        done = 0
        while done < chunk.length:
            number, within = divmod(chunk.offset + done, self.arena.slot_bytes)
            part = min(chunk.length - done, self.arena.slot_bytes - within)
            slot = self.arena.find(chunk.shard, number) or self._find_leased(chunk.shard, number)
            if slot is None:
                what = f"cannot read: chunk {number} of the shard is not here"
                return Result(self._error(errno.ENOENT, what, chunk.shard, offset=chunk.offset))
            ctypes.memmove(chunk.address + done, slot.address + within, part)
            self.arena.release(slot)
            done += part
        return Result()

    def _find_leased(self, shard: ShardKey, number: int) -> Slot | None:
        """The slot of a chunk that was dropped while a lease keeps it; held once for the caller."""
        for leased_shard, leased_number, slot in self._leased:
            if leased_shard == shard and leased_number == number:
                self.arena.hold(slot)
                return slot
        return None

    def usage(self) -> Usage:
        kept = self.arena.cached_bytes
        in_flight = sum(self._books.reserved.values())
        return Usage(
            logical_bytes=in_flight + sum(self._books.committed.values()),
            physical_bytes=kept,
            in_flight_bytes=in_flight,
            free_bytes=max(0, self.arena.kept_max * self.arena.slot_bytes - kept),
        )

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        """Holds the chunks of the shards that are here, so that they are not evicted."""
        self._check_open()
        for shard in shards:
            if check_shard(shard) not in self._books.committed and shard not in self._books.reserved:
                raise self._missing(shard)
        held = [
            (shard, number, self.arena.find(shard, number, used=False))
            for shard in shards
            for number in self.arena.chunks(shard)
        ]
        return _HostLease(self, [(shard, number, slot) for shard, number, slot in held if slot is not None])

    # -- the end -------------------------------------------------------------------------

    async def close(self) -> None:
        """Gives the memory back, at once or as soon as what uses it has ended; a moment later it is abandoned."""
        if self._closed:
            return
        self._closed = True
        _abandoned.append(self.arena)  # first: also if this is cancelled
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while not self.arena.close():
                    await asyncio.sleep(0.01)
                _abandoned.remove(self.arena)


class _HostLease(Lease):
    """Slots held for their chunks; only those that were there when it was taken."""

    def __init__(self, tier: HostTier, held: list[tuple[ShardKey, int, Slot]]) -> None:
        self._tier, self._held = tier, held
        tier._leased.update(held)

    async def close(self) -> None:
        held, self._held = self._held, []
        for entry in held:
            self._tier._leased[entry] -= 1
            if not self._tier._leased[entry]:
                del self._tier._leased[entry]
            self._tier.arena.release(entry[2])
