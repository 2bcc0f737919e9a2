"""The mover: chunks between the state, slots of the host arena and tiers.

Everything here runs on the one event loop and only decides: bytes are copied, checksummed, written and
read by native threads. Each direction between two tiers is an edge with a queue, a bound and a limit of its
own (`stepwell.edges`), so a slow tier delays only what goes there. A chunk's operation is a task of its own
that is never cancelled, because its memory belongs to the kernel until the operation has ended; whoever gives
up stops feeding and leaves the tasks that run to finish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np

from stepwell.edges import VERIFY, Edge, Turn
from stepwell.errors import CorruptData, StepwellError, TierFull
from stepwell.fetching import Fetching
from stepwell.groups import Countdown, Group
from stepwell.native import BLOCK_BYTES, Done, Job, Op, PieceMap, Ticket
from stepwell.ranges import Read
from stepwell.reading import Crcs, Healing, Reading
from stepwell.tiers.base import ChunkIO, ShardKey, Tier
from stepwell.tiers.host import Priority, Slot


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


class Mover(Fetching):
    """Moves chunks with one copier engine and the slots of one arena.

    host: the tier whose arena it is, if checkpoints are kept there; else the arena is only for staging.
    """

    async def settled(self, keys: Iterable[ShardKey]) -> None:
        """Returns once no chunk of these shards is on its way: then their files may be closed."""
        await self._tasks.settled(keys)

    # -- down: state -> slots -> tier ------------------------------------------------------

    async def put(
        self, tier: Tier, shards: Sequence[ShardJob], on_copied: Callable[[], None], *, kept: bool = False
    ) -> None:
        """State -> slots -> tier, chunk by chunk. kept: the chunks stay in the arena, dirty, after that.

        `on_copied` is called once nothing of the state is needed any more. Raises the first chunk's error,
        after all running chunks have ended; kept chunks are copied all the same, so that they can be tried
        again. If cancelled, chunks still run: see `settled`.
        """
        group = Group(self._tasks, stop_on_error=not kept)
        copied = Countdown(on_copied)
        edge = self._edge(self._here, tier.info.name, Priority.SNAPSHOT, tier.info.write_bytes_per_s)
        self.arena.expect(sum(shard.size for shard in shards))
        for shard, read in ((each, read) for each in shards for read in self.all_of(each.size)):
            if group.failed:
                break
            try:
                slot, turn = await self._room(edge, read.length, kept)
            except StepwellError as error:
                group.fail(error)
                break
            copied.up()
            group.start(shard.key, self._put_chunk(tier, edge, shard, read.start, slot, turn, copied.down))
        else:
            copied.seal()
        await group.end()

    async def _room(self, edge: Edge, length: int, kept: bool) -> tuple[Slot, Turn | None]:
        """A slot for a chunk of the state. What only passes waits for its turn before it takes one: a stuck tier
        must not hold all of them."""
        if kept:
            try:
                return await self.arena.acquire(Priority.SNAPSHOT, kept=True), None
            except TierFull:  # less memory than was promised: the chunk passes, and the host tier will not commit
                pass
        turn = await edge.enter(length, Priority.SNAPSHOT)
        return await self._slot(turn, Priority.SNAPSHOT), turn

    async def _put_chunk(
        self, tier: Tier, edge: Edge, shard: ShardJob, start: int, slot: Slot, turn: Turn | None,
        on_copied: Callable[[], None],
    ) -> None:  # fmt: skip
        """Owns the slot and the turn until it ends."""
        length = min(self.arena.slot_bytes, shard.size - start)
        linked = Ticket() if tier.info.linked else None
        try:
            if slot.kept:
                self.arena.place(slot, shard.key, start // self.arena.slot_bytes, length)
            copying = self._copy_in(shard, start, length, slot, linked)
            copying.add_done_callback(partial(self._copied, slot, on_copied))
            if linked is None:
                await copying
            try:
                turn = turn or await edge.enter(length, Priority.SNAPSHOT)
                with turn:
                    await write(tier, ChunkIO(shard.key, start, length, slot.address, after=linked))
            finally:
                await copying  # the slot is the copier's until then, whatever the tier says
                self.arena.filled(slot)
        finally:
            if turn is not None:
                turn.leave(False)
            if slot.chunk is not None and not slot.filled:
                self.arena.forget(slot)
            self.arena.release(slot)

    def _copied(self, slot: Slot, on_copied: Callable[[], None], copying: asyncio.Future[Done]) -> None:
        """The chunk is whole in host memory, and can be read there, before it is on the tier."""
        if not copying.cancelled() and copying.exception() is None:
            self.arena.filled(slot)
        on_copied()

    def _copy_in(
        self, shard: ShardJob, start: int, length: int, slot: Slot, signal: Ticket | None
    ) -> asyncio.Future[Done]:
        job = Job(
            Op.GATHER, address=slot.address, length=length, signal=signal,
            pieces=shard.source.pieces(start, start + length), pieces_offset=start,
            crcs=shard.crcs[start // BLOCK_BYTES : -(-(start + length) // BLOCK_BYTES)],
        )  # fmt: skip
        [copying] = self.copier.start([job])
        return copying

    # -- between tiers ---------------------------------------------------------------------

    async def copy(
        self, reading: Reading, target: Tier, size: int, *, resumed: bool = False,
        on_there: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:  # fmt: skip
        """One shard to another tier, verified on the way. The target has reserved it; `reading.target` names it.

        resumed: its file was begun by an earlier try; chunks that are good there are not written again.
        on_there: is told of bytes that have got there, or that were there already.
        """

        async def move(read: Read, address: int) -> None:
            await write(target, ChunkIO(reading.key, read.start, read.length, address))
            on_there(read.length)

        reads = self.all_of(size)
        if resumed and reading.crcs is not None:
            reads = await self._missing(reading, target, reads)
            on_there(size - sum(read.length for read in reads))
        await self.get(reading, reads, move)

    async def _missing(self, reading: Reading, target: Tier, reads: Sequence[Read]) -> list[Read]:
        """Those of `reads` whose bytes are not good on the target yet."""
        check = Reading(reading.key, [target], reading.crcs, Healing(), reading.priority, target=VERIFY)
        edge = self._edge(target.info.name, VERIFY, reading.priority)
        missing: set[int] = set()

        async def one(read: Read, slot: Slot, turn: Turn) -> None:
            try:
                await self._get_read(check, read, slot, turn, None)
            except CorruptData:
                missing.add(read.start)

        group = Group(self._tasks)
        for read in reads:
            try:
                turn = await edge.enter(read.length, reading.priority)
                slot = await self._slot(turn, reading.priority)
            except StepwellError as error:
                group.fail(error)
                break
            group.start(reading.key, one(read, slot, turn))
        await group.end()
        return [read for read in reads if read.start in missing]

    async def verify(self, sources: Sequence[Tier], key: ShardKey, size: int, crcs: Crcs, *, first: int = 0) -> None:
        """Raises CorruptData unless every block, from byte `first` on, is good on one of these tiers at least."""
        chunks = [read for read in self.all_of(size) if read.start + read.length > first]
        reads = [Read(start, read.start + read.length - start) for read in chunks for start in [max(read.start, first)]]
        memory = self.host in sources  # else a good chunk in memory would hide a bad one on the tier
        reading = Reading(key, sources, crcs, Healing(), Priority.FLUSH, target=VERIFY, from_memory=memory)
        await self.get(reading, reads)

    def all_of(self, size: int) -> list[Read]:
        """Reads of a whole shard, a chunk each."""
        chunk = self.arena.slot_bytes
        return [Read(start, min(chunk, size - start)) for start in range(0, size, chunk)]


async def write(tier: Tier, chunk: ChunkIO) -> None:
    """One chunk; raises what went wrong."""
    [result] = await tier.write([chunk])
    if result.error is not None:
        raise result.error
