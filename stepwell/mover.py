"""The mover: chunks between the state, slots of host memory and tiers.

Everything here runs on the one event loop and only decides: bytes are copied, checksummed, written and
read by native threads. A chunk's operation is a task of its own that is never cancelled, because its
memory belongs to the kernel until the operation has ended; whoever gives up stops feeding and leaves the
tasks that run to finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from stepwell.errors import CorruptData, TierError
from stepwell.native import BLOCK_BYTES, AsyncEngine, Job, Op, PieceMap, Ticket
from stepwell.ranges import Read
from stepwell.slots import Slot, SlotPool
from stepwell.tiers.base import ChunkIO, ShardKey, Tier

Crcs = np.ndarray[Any, np.dtype[np.uint32]]


class Source(Protocol):
    """Where a shard's bytes come from: the state's memory."""

    def pieces(self, start: int, stop: int) -> PieceMap: ...


@dataclass(slots=True)
class ShardJob:
    """A shard on its way from the state to a tier. `crcs` is filled as its blocks are copied."""

    key: ShardKey
    size: int
    source: Source
    crcs: Crcs = field(init=False)

    def __post_init__(self) -> None:
        self.crcs = np.zeros(-(-self.size // BLOCK_BYTES), np.uint32)


@dataclass(slots=True)
class Healing:
    """What a read found bad, and where it got the bytes instead."""

    bad: dict[tuple[str, ShardKey], str] = field(default_factory=dict)  # (tier, shard) -> what was wrong
    read_bytes: dict[str, int] = field(default_factory=dict)  # tier -> bytes that came from it


class Mover:
    """Moves chunks with one copier engine and one pool of slots."""

    def __init__(self, copier: AsyncEngine, pool: SlotPool) -> None:
        self.copier, self.pool = copier, pool
        self._busy: dict[ShardKey, set[asyncio.Task[None]]] = {}

    async def settled(self, keys: Iterable[ShardKey]) -> None:
        """Returns once no chunk of these shards is on its way: then their files may be closed."""
        while tasks := [task for key in keys for task in self._busy.get(key, ())]:
            await asyncio.wait(tasks)

    async def put(self, tier: Tier, shards: Sequence[ShardJob], on_copied: Callable[[], None]) -> None:
        """State -> slots -> tier, chunk by chunk.

        `on_copied` is called once nothing of the state is needed any more. Raises the first chunk's error,
        after all running chunks have ended. If cancelled, chunks still run: see `settled`.
        """
        chunks = _Chunks(self)
        copied = _Countdown(on_copied)
        for shard in shards:
            for start in range(0, shard.size, self.pool.slot_bytes):
                slot = await chunks.slot()
                if slot is None:
                    break
                copied.up()
                chunks.start(shard.key, slot, self._put_chunk(tier, shard, start, slot, copied.down))
        copied.seal()
        await chunks.end()

    async def _put_chunk(
        self, tier: Tier, shard: ShardJob, start: int, slot: Slot, on_copied: Callable[[], None]
    ) -> None:
        length = min(self.pool.slot_bytes, shard.size - start)
        linked = Ticket() if tier.info.linked else None
        copy = Job(
            Op.GATHER,
            address=slot.address,
            length=length,
            pieces=shard.source.pieces(start, start + length),
            pieces_offset=start,
            crcs=shard.crcs[start // BLOCK_BYTES : -(-(start + length) // BLOCK_BYTES)],
            signal=linked,
        )
        [copying] = self.copier.start([copy])
        copying.add_done_callback(lambda _: on_copied())
        if linked is None:
            await copying
        chunk = ChunkIO(shard.key, start, length, slot.address, after=linked)
        try:
            [result] = await tier.write([chunk])
        finally:
            done = await copying  # the slot is the copier's until then, whatever the tier says
        if done.result < 0:
            raise AssertionError(f"copying a chunk failed: {done}")
        if result.error is not None:
            raise result.error

    async def get(
        self,
        tiers: Sequence[Tier],
        key: ShardKey,
        reads: Iterable[Read],
        pieces: PieceMap | None,
        crcs: Crcs | None,
        healing: Healing,
        then: Callable[[Read, Slot], Awaitable[None]] | None = None,
    ) -> None:
        """Tiers -> slots -> memory, each read from the nearest tier that has good bytes for it.

        pieces: where the bytes go (None: only verified). crcs: of every block of the shard; None where
        there are none. then: called with each read whose slot holds good bytes. Raises CorruptData if a
        block is good on no tier, after all running reads have ended.
        """
        chunks = _Chunks(self)

        async def one(read: Read, slot: Slot) -> None:
            await self._get_read(tiers, key, read, pieces, crcs, healing, slot)
            if then is not None:
                await then(read, slot)

        for read in reads:
            assert read.length <= self.pool.slot_bytes
            slot = await chunks.slot()
            if slot is None:
                break
            chunks.start(key, slot, one(read, slot))
        await chunks.end()

    async def _get_read(
        self,
        tiers: Sequence[Tier],
        key: ShardKey,
        read: Read,
        pieces: PieceMap | None,
        crcs: Crcs | None,
        healing: Healing,
        slot: Slot,
    ) -> None:
        todo = [read]
        for tier in tiers:
            rest: list[Read] = []
            for part in todo:
                rest += await self._get_part(tier, key, read.start, part, pieces, crcs, healing, slot)
            todo = rest
            if not todo:
                return
        wrong = "; ".join(f"{name}: {what}" for (name, shard), what in healing.bad.items() if shard == key)
        raise CorruptData(
            f"bytes {todo[0].start} to {todo[0].start + todo[0].length} of {key.name} are bad: {wrong}",
            todo="No other tier holds a good copy",
            run=key.checkpoint.run,
            checkpoint=key.checkpoint.attempt,
            path=str(key),
            block=todo[0].start // BLOCK_BYTES,
        )

    async def _get_part(
        self,
        tier: Tier,
        key: ShardKey,
        base: int,
        part: Read,
        pieces: PieceMap | None,
        crcs: Crcs | None,
        healing: Healing,
        slot: Slot,
    ) -> list[Read]:
        """Reads `part` from `tier`; returns what of it is not good there."""
        address = slot.address + part.start - base
        try:
            [result] = await tier.read([ChunkIO(key, part.start, part.length, address)])
            error = result.error
        except TierError as raised:
            error = raised
        if error is not None:
            healing.bad[tier.info.name, key] = str(error)
            return [part]
        check = Job(
            Op.SCATTER,
            address=address,
            length=part.length,
            pieces=pieces,
            pieces_offset=part.start,
            crcs=None
            if crcs is None
            else crcs[part.start // BLOCK_BYTES : -(-(part.start + part.length) // BLOCK_BYTES)],
        )
        [done] = await self.copier.run([check])
        bad = [
            Read(start, min(BLOCK_BYTES, part.start + part.length - start))
            for i, start in enumerate(range(part.start, part.start + part.length, BLOCK_BYTES))
            if done.bad_blocks >> i & 1
        ]
        if bad:
            healing.bad[tier.info.name, key] = f"checksum of block {bad[0].start // BLOCK_BYTES} is wrong"
        name = tier.info.name
        healing.read_bytes[name] = healing.read_bytes.get(name, 0) + part.length - sum(r.length for r in bad)
        return bad

    async def copy(
        self, sources: Sequence[Tier], target: Tier, key: ShardKey, size: int, crcs: Crcs | None, healing: Healing
    ) -> None:
        """One shard between tiers, verified on the way. The target has reserved it."""

        async def write(read: Read, slot: Slot) -> None:
            [result] = await target.write([ChunkIO(key, read.start, read.length, slot.address)])
            if result.error is not None:
                raise result.error

        await self.get(sources, key, self._all_of(size), None, crcs, healing, write)

    async def verify(self, sources: Sequence[Tier], key: ShardKey, size: int, crcs: Crcs) -> None:
        """Raises CorruptData unless every block is good on one of the tiers at least."""
        await self.get(sources, key, self._all_of(size), None, crcs, Healing())

    def _all_of(self, size: int) -> list[Read]:
        chunk = self.pool.slot_bytes
        return [Read(start, min(chunk, size - start)) for start in range(0, size, chunk)]


class _Chunks:
    """Chunk operations that were started together."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._running: set[asyncio.Task[None]] = set()
        self._failed: list[BaseException] = []

    async def slot(self) -> Slot | None:
        """The next free slot; None once an operation has failed and no more should be started."""
        slot = await self._mover.pool.acquire()
        if self._failed:
            self._mover.pool.release(slot)
            return None
        return slot

    def start(self, key: ShardKey, slot: Slot, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work`, which owns `slot` until it ends."""
        task = asyncio.ensure_future(work)
        busy = self._mover._busy.setdefault(key, set())
        busy.add(task)
        self._running.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._mover.pool.release(slot)
            self._running.discard(task)
            busy.discard(task)
            if not busy and self._mover._busy.get(key) is busy:
                del self._mover._busy[key]
            if (error := task.exception()) is not None:
                self._failed.append(error)

        task.add_done_callback(ended)

    async def end(self) -> None:
        """Waits for all; raises the first error."""
        while self._running:
            await asyncio.wait(self._running)
        if self._failed:
            raise self._failed[0]


class _Countdown:
    """Calls back once it is sealed and as many went down as went up."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done, self._open, self._sealed = done, 0, False

    def up(self) -> None:
        self._open += 1

    def down(self) -> None:
        self._open -= 1
        self._check()

    def seal(self) -> None:
        self._sealed = True
        self._check()

    def _check(self) -> None:
        if self._sealed and self._open == 0:
            self._done()
