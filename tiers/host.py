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
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

from stepwell.errors import CheckpointGone, TierError
from stepwell.native import Region
from stepwell.tiers._arena import Arena, Priority, Slot
from stepwell.tiers._books import Books
from stepwell.tiers._paths import check_checkpoint, check_record, check_run, check_shard
from stepwell.tiers._slices import Memory
from stepwell.tiers.base import (
    CHUNK_BYTES,
    CheckpointKey,
    ChunkIO,
    EvictionPolicy,
    Found,
    Lease,
    RecordKey,
    Refused,
    Reservation,
    Result,
    ShardKey,
    Tier,
    TierInfo,
    Usage,
    not_open,
    tier_error,
)

#: what an arena has before it knows how large the state is: enough to stage the first restore
FIRST_BYTES = 256 << 20
#: how long `close` waits for memory that is still in use
CLOSE_S = 5.0

__all__ = ["Arena", "HostTier", "Priority", "Slot"]

_abandoned: list[Arena] = []  # memory that a hung device may still write to stays until the process ends


class HostTier(Tier):
    """An arena of `capacity_bytes` of private memory. None: it starts small and grows as `grow` says."""

    def __init__(
        self,
        eviction: EvictionPolicy,
        capacity_bytes: int | None = None,
        name: str = "host",
        *,
        chunk_bytes: int = CHUNK_BYTES,
        memory: Callable[[int], Memory] = Region,
        background: bool = True,
    ) -> None:
        """chunk_bytes, memory, background: as `Arena` takes them."""
        self.grows = capacity_bytes is None
        self.arena = Arena(
            capacity_bytes or FIRST_BYTES,
            eviction,
            slot_bytes=chunk_bytes,
            memory=memory,
            background=background,
            on_evicted=self._lost,
        )
        self.info = TierInfo(
            name=name,
            driver="host",
            scope="process",
            survives="nothing",
            capacity_bytes=self.arena.capacity_bytes,
            alignment_bytes=1,
            request_bytes=chunk_bytes,
        )
        self._books = Books()
        self._records: dict[RecordKey, bytes] = {}
        self._leased: Counter[tuple[ShardKey, int, Slot]] = Counter()
        self._closed = False
        #: told of each checkpoint that is not committed here any more, because a chunk of it was evicted
        self.on_uncommitted: Callable[[CheckpointKey], object] = lambda checkpoint: None

    def __repr__(self) -> str:
        return f"<HostTier {self.info.name}: {len(self._books.committed)} shards committed, {self.arena!r}>"

    async def start(self) -> None:
        if not self.grows:
            self.arena.expect(self.arena.capacity_bytes)

    def grow(self, capacity_bytes: int) -> None:
        """Raises the capacity of an arena whose size was not set. Budgets are the caller's business."""
        assert self.grows
        self.arena.grow(capacity_bytes)
        self.info = replace(self.info, capacity_bytes=self.arena.capacity_bytes)

    def _check_open(self) -> None:
        if self._closed:
            raise not_open(self.info.name, "closed")

    def _error(self, number: int, what: str, shard: ShardKey, **where: Any) -> TierError:
        return tier_error(number, f"Tier {self.info.name}: {what}", key=str(shard), **where)

    def _slots(self, size_bytes: int) -> int:
        return -(-size_bytes // self.arena.slot_bytes)

    def fits(self, sizes: Sequence[int]) -> bool:
        """Whether shards of these sizes can be kept together, once nothing else is promised."""
        return sum(self._slots(size) for size in sizes) <= self.arena.kept_max

    # -- going down ----------------------------------------------------------------------

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        self._check_open()
        check_shard(shard)
        if shard in self._books.committed:
            raise self._error(errno.EEXIST, "a committed shard is never overwritten", shard)
        if size_bytes < 0:
            raise ValueError(f"size_bytes must not be negative: {size_bytes}")
        promised = sum(self._slots(size) for other, size in self._books.reserved.items() if other != shard)
        free = self.arena.kept_max - promised
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
                result = await self._copy_in(chunk, size)
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
                slot = await self.arena.acquire(Priority.SNAPSHOT, kept=True)
                if self._books.reserved.get(chunk.shard) != size:
                    self.arena.release(slot)
                    return self._not_reserved(chunk)
                self.arena.place(slot, chunk.shard, number, min(slot_bytes, size - number * slot_bytes))
                self.arena.view(slot, slot_bytes)[:] = bytes(slot_bytes)
                self.arena.filled(slot)
            ctypes.memmove(slot.address + within, chunk.address + done, part)
            self.arena.release(slot)
            done += part
            await asyncio.sleep(0)
        return Result()

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        self._check_open()
        check_record(record)
        if record in self._records:
            return False
        for each in shards:
            if self._books.reserved.get(each.shard) != each.size_bytes:
                raise self._error(errno.EINVAL, "cannot commit: the shard is not reserved", each.shard)
            here = len(self.arena.chunks(each.shard))
            if here < self._slots(each.size_bytes):  # the system gave less memory than was promised
                what = f"cannot commit: {here} of {self._slots(each.size_bytes)} chunks are here"
                raise self._error(errno.ENOSPC, what, each.shard)
        for each in shards:
            self._books.commit(each.shard)
        self._records[record] = bytes(data)
        return True

    async def beat(self, record: RecordKey, data: bytes) -> None:
        self._check_open()
        self._records[check_record(record)] = bytes(data)

    async def abort(self, reservation: Reservation) -> None:
        self._check_open()
        if reservation.shard in self._books.reserved:
            self._remove(reservation.shard)

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        self._check_open()
        for key in what:
            if isinstance(key, RecordKey):
                self._records.pop(check_record(key), None)
            elif isinstance(key, ShardKey):
                self._remove(check_shard(key))
            else:
                self._uncommit(check_checkpoint(key))
                for shard in self.arena.shards():
                    if isinstance(shard, ShardKey) and shard.checkpoint == key:
                        self._remove(shard)

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
        inside = f"{checkpoint.attempt}/"
        for record in [r for r in self._records if r.run == checkpoint.run and r.name.startswith(inside)]:
            del self._records[record]
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

    async def fetch(self, record: RecordKey) -> bytes | None:
        self._check_open()
        return self._records.get(check_record(record))

    async def scan(self, run: str) -> AsyncIterator[Found]:
        self._check_open()
        check_run(run)
        for record, data in list(self._records.items()):
            if record.run == run:
                folder, _, name = record.name.rpartition("/")
                yield Found(folder, name, len(data))
        books = {**self._books.reserved, **self._books.committed}
        for shard, size in books.items():
            if shard.checkpoint.run == run:
                yield Found(shard.checkpoint.attempt, shard.name, size)

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
            (shard, number, self.arena.find(shard, number)) for shard in shards for number in self.arena.chunks(shard)
        ]
        return _HostLease(self, [(shard, number, slot) for shard, number, slot in held if slot is not None])

    def _missing(self, shard: ShardKey) -> CheckpointGone | TierError:
        manifest = f"{shard.checkpoint.attempt}/manifest"
        if any(record.run == shard.checkpoint.run and record.name.startswith(manifest) for record in self._records):
            return self._error(errno.ENOENT, "a shard of a committed checkpoint is missing", shard)
        return CheckpointGone(f"Tier {self.info.name}: the checkpoint is gone", key=str(shard))

    # -- the end -------------------------------------------------------------------------

    async def close(self) -> None:
        """Gives the memory back, at once or as soon as what uses it has ended; a moment later it is abandoned."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                while not self.arena.close():
                    await asyncio.sleep(0.01)
                return
        _abandoned.append(self.arena)


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
