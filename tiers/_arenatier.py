"""The base of drivers that keep chunks in the slots of an arena: promises, commits, eviction, leases.

Their chunks are filled and read in place (`arena`) by whoever moves them; the contract's `write` and `read` copy,
for callers that bring their own memory. How, is each driver's own. A committed checkpoint may lose chunks to eviction
once another tier has it, too: it is then no longer committed here, and what is left of it still serves reads.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from stepwell.errors import TierError
from stepwell.tiers._arena import Arena
from stepwell.tiers._books import Books
from stepwell.tiers._inmemory import InMemory
from stepwell.tiers._paths import check_shard
from stepwell.tiers._slots import Priority, Slot
from stepwell.tiers.base import (
    CheckpointKey,
    ChunkIO,
    Lease,
    Refused,
    Reservation,
    Result,
    ShardKey,
    TierInfo,
    Usage,
)

#: how long `close` waits for memory that is still in use
CLOSE_S = 5.0

_abandoned: list[Arena] = []  # memory that a hung device may still write to stays until the process ends


class ArenaTier(InMemory):
    """Chunks in the slots of `arena`, in this process's memory."""

    def __init__(self, name: str, driver: str, arena: Arena) -> None:
        info = TierInfo(
            name=name,
            driver=driver,
            scope="process",
            survives="nothing",
            capacity_bytes=arena.capacity_bytes,
            alignment_bytes=1,
            request_bytes=arena.slot_bytes,
        )
        super().__init__(info, Books())
        self.arena = arena
        arena.on_evicted = self._lost
        self._leased: Counter[tuple[ShardKey, int, Slot]] = Counter()
        #: told of each checkpoint that is not committed here any more, because a chunk of it was evicted
        self.on_uncommitted: Callable[[CheckpointKey], object] = lambda checkpoint: None

    @abstractmethod
    async def _put(self, slot: Slot, within: int, address: int, length: int) -> None:
        """Copies to a slot, from byte `within` on, from the caller's memory. Raises TierError."""

    @abstractmethod
    async def _take(self, slot: Slot, within: int, address: int, length: int) -> None:
        """Copies from a slot to the caller's memory. Raises TierError."""

    def _begin(self, slot: Slot) -> None:
        """A chunk is about to be written piece by piece."""

    def _slots(self, size_bytes: int) -> int:
        return -(-size_bytes // self.arena.slot_bytes)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether shards of these sizes can be kept together, once nothing else is promised."""
        return sum(self._slots(size) for size in sizes) <= self.arena.kept_max - len(self.arena.pinned)

    @property
    def promised_slots(self) -> int:
        """Slots that shards on their way here were promised."""
        return sum(self._slots(size) for size in self._books.reserved.values())

    @property
    def awaited_slots(self) -> int:
        """Those of them that have not been taken yet."""
        reserved = self._books.reserved.items()
        return sum(max(0, self._slots(size) - self.arena.taken(shard)) for shard, size in reserved)

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
                    self._begin(new)
                    self.arena.filled(new)
                slot = self.arena.find(chunk.shard, number)  # of another write of this chunk, if that was faster
                self.arena.release(new)
            if slot is None:
                return Result(self._error(errno.EBUSY, "cannot write: the chunk is being filled in place", chunk.shard))
            try:
                await self._put(slot, within, chunk.address + done, part)
            finally:
                self.arena.release(slot)
            done += part
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
            try:
                results.append(await self._copy_out(chunk))
            except TierError as error:
                results.append(Result(error))
        return results

    async def _copy_out(self, chunk: ChunkIO) -> Result:
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
            try:
                await self._take(slot, within, chunk.address + done, part)
            finally:
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
        return _Held(self, [(shard, number, slot) for shard, number, slot in held if slot is not None])

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


class _Held(Lease):
    """Slots held for their chunks; only those that were there when it was taken."""

    def __init__(self, tier: ArenaTier, held: list[tuple[ShardKey, int, Slot]]) -> None:
        self._tier, self._held = tier, held
        tier._leased.update(held)

    async def close(self) -> None:
        held, self._held = self._held, []
        for entry in held:
            self._tier._leased[entry] -= 1
            if not self._tier._leased[entry]:
                del self._tier._leased[entry]
            self._tier.arena.release(entry[2])
