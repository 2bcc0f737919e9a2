"""The mover: chunks between the state, slots of the host arena and tiers.

Everything here runs on the one event loop and only decides: bytes are copied, checksummed, written and
read by native threads. Each direction between two tiers is an edge with a queue, a bound and a limit of its
own (`stepwell.edges`), so a slow tier delays only what goes there. A chunk's operation is a task of its own
that is never cancelled, because its memory belongs to the kernel until the operation has ended; whoever gives
up stops feeding and leaves the tasks that run to finish.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from stepwell.edges import STAGING, VERIFY, Edge, Edges, Turn
from stepwell.errors import CorruptData, StepwellError, TierError, TierFull
from stepwell.groups import Countdown, Group, Room, Tasks
from stepwell.native import BLOCK_BYTES, Done, Job, Op, PieceMap, Ticket
from stepwell.ranges import Read
from stepwell.reading import Caller, Crcs, Healing, Reading
from stepwell.tiers.base import ChunkIO, ShardKey, Tier
from stepwell.tiers.host import Arena, HostTier, Priority, Slot

#: what a read fails with if the file is gone or too short: no later one fares better
_NOT_THERE = {errno.ENOENT, errno.EINVAL}


class Then(Protocol):
    """What happens with a read's good bytes, which are at `address` until it returns."""

    def __call__(self, read: Read, address: int, /) -> Awaitable[None]: ...


class Source(Protocol):
    """Where a shard's bytes come from: the state's memory."""

    def pieces(self, start: int, stop: int) -> PieceMap: ...


class Copier(Protocol):
    """The native engine that copies and checksums, under asyncio."""

    def start(self, jobs: Sequence[Job]) -> list[asyncio.Future[Done]]: ...


@dataclass(slots=True)
class ShardJob:
    """A shard on its way from the state to a tier. `crcs` is filled as its blocks are copied."""

    key: ShardKey
    size: int
    source: Source
    crcs: Crcs = field(init=False)

    def __post_init__(self) -> None:
        self.crcs = np.zeros(-(-self.size // BLOCK_BYTES), np.uint32)


class Mover:
    """Moves chunks with one copier engine and the slots of one arena.

    host: the tier whose arena it is, if checkpoints are kept there; else the arena is only for staging.
    """

    def __init__(self, copier: Copier, arena: Arena, host: HostTier | None = None) -> None:
        self.copier, self.arena, self.host = copier, arena, host
        self.edges = Edges(arena)
        self._tasks = Tasks()
        self._scattering: set[asyncio.Future[Done]] = set()
        self.coming = Room(lambda: arena.kept_max)  # slots promised to prefetches

    async def settled(self, keys: Iterable[ShardKey]) -> None:
        """Returns once no chunk of these shards is on its way: then their files may be closed."""
        await self._tasks.settled(keys)

    async def leave(self, caller: Caller) -> None:
        """The caller gives up: when this returns, nothing more is put into its memory. Waits for no tier."""
        caller.gone = True
        if self._scattering:
            await asyncio.wait(set(self._scattering))

    def _edge(self, source: str, target: str, priority: Priority, write_limit: float | None = None) -> Edge:
        background = priority >= Priority.FLUSH
        return self.edges.between(source, target, background=background, write_limit=write_limit)

    def _edge_of(self, reading: Reading, read: Read) -> Edge:
        """The edge that a read takes: from the arena if that has the chunk, else from the nearest tier."""
        tier = None
        if not self.arena.has(reading.known_as, read.start // self.arena.slot_bytes):
            tier = reading.first(self.host)
        return self.edges.between(
            self._here if tier is None else tier.info.name,
            reading.target,
            background=reading.priority >= Priority.FLUSH,
            sparing=tier is not None,
            write_limit=reading.write_limit,
            read_limit=None if tier is None or reading.write_limit is not None else tier.info.read_bytes_per_s,
        )

    @property
    def _here(self) -> str:
        return self.host.info.name if self.host is not None else STAGING

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

    async def _slot(self, turn: Turn, priority: Priority, kept: bool = False) -> Slot:
        """A slot for who has its turn already."""
        try:
            return await self.arena.acquire(priority, kept=kept)
        except BaseException:
            turn.leave(False)
            raise

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

    # -- up: tiers -> slots -> memory ------------------------------------------------------

    async def get(
        self, reading: Reading, reads: Iterable[Read], then: Then | None = None, *, kept: bool = False
    ) -> None:
        """Tiers -> slots -> memory, each read from the nearest tier that has good bytes for it.

        A chunk that the arena holds is taken from there. then: called with each read and the address of its
        good bytes, which are valid until it returns. kept: the chunks stay in the arena, for a prefetch; reads
        are then whole chunks. Raises CorruptData if a block is good on no tier, after all running reads have ended.
        """
        group = Group(self._tasks)
        for read in reads:
            if group.failed:
                break
            try:
                operation = await self._next(reading, read, then, kept)
            except StepwellError as error:
                group.fail(error)
                break
            reading.caller.note(group.start(reading.key, operation))
        await group.end()

    async def _next(self, reading: Reading, read: Read, then: Then | None, kept: bool) -> Coroutine[Any, Any, None]:
        """The operation for a read, once there is room for it on its edge and a slot."""
        turn = await self._edge_of(reading, read).enter(read.length, reading.priority)
        number = read.start // self.arena.slot_bytes
        held = self.arena.find(reading.known_as, number) if reading.from_memory else None
        if held is not None:
            return self._get_held(reading, read, held, turn, then)
        slot = await self._slot(turn, reading.priority, kept)
        return self._get_read(reading, read, slot, turn, then)

    async def _get_held(self, reading: Reading, read: Read, slot: Slot, turn: Turn, then: Then | None) -> None:
        """From the arena: verified when it was filled. Owns slot and turn until it ends."""
        address = slot.address + read.start % self.arena.slot_bytes
        try:
            with turn:
                if reading.pieces is not None:
                    await self._scatter(reading, read, address, None)
                if then is not None:
                    await then(read, address)
            reading.healing.took(self._here, read.length)
        finally:
            self.arena.release(slot)

    async def _get_read(self, reading: Reading, read: Read, slot: Slot, turn: Turn, then: Then | None) -> None:
        """From the tiers. Owns slot and turn until it ends."""
        try:
            with turn:
                if slot.kept:
                    number = read.start // self.arena.slot_bytes
                    self.arena.place(slot, reading.known_as, number, read.length, coming=True)
                todo = [read]
                for tier in reading.tiers:
                    if tier is self.host:
                        continue  # what it holds was looked for in the arena
                    rest: list[Read] = []
                    for part in todo:
                        rest += await self._get_part(reading, tier, part, slot.address + part.start - read.start)
                    todo = rest
                    if not todo:
                        break
                if todo:
                    raise self._bad_everywhere(reading, todo[0])
                if slot.kept:
                    self.arena.filled(slot)
                if then is not None:
                    await then(read, slot.address)
        finally:
            if slot.chunk is not None and not slot.filled:
                self.arena.forget(slot)
            self.arena.release(slot)

    def _bad_everywhere(self, reading: Reading, part: Read) -> CorruptData:
        key = reading.key
        wrong = "; ".join(f"{name}: {what}" for (name, shard), what in reading.healing.bad.items() if shard == key)
        error = CorruptData(
            f"bytes {part.start} to {part.start + part.length} of {key.name} are bad: {wrong or 'they are on no tier'}",
            todo="No other tier holds a good copy",
            run=key.checkpoint.run,
            checkpoint=key.checkpoint.attempt,
            path=str(key),
            block=part.start // BLOCK_BYTES,
        )
        error.retry = any(shard == key for _, shard in reading.healing.unread)
        return error

    async def _get_part(self, reading: Reading, tier: Tier, part: Read, address: int) -> list[Read]:
        """Reads `part` from `tier`; returns what of it is not good there."""
        name = tier.info.name
        try:
            [result] = await tier.read([ChunkIO(reading.key, part.start, part.length, address)])
            error = result.error
        except TierError as raised:
            error = raised
        if error is not None:
            reading.healing.bad[name, reading.key] = str(error)
            if error.errno not in _NOT_THERE:
                reading.healing.unread.add((name, reading.key))
            return [part]
        done = await self._scatter(reading, part, address, reading.crcs_of(part.start, part.length))
        bad = [
            Read(start, min(BLOCK_BYTES, part.start + part.length - start))
            for i, start in enumerate(range(part.start, part.start + part.length, BLOCK_BYTES))
            if done.bad_blocks >> i & 1
        ]
        if bad:
            reading.healing.bad[name, reading.key] = f"checksum of block {bad[0].start // BLOCK_BYTES} is wrong"
        reading.healing.took(name, part.length - sum(r.length for r in bad))
        return bad

    async def _scatter(self, reading: Reading, read: Read, address: int, crcs: Crcs | None) -> Done:
        pieces = None if reading.caller.gone else reading.pieces
        [scattering] = self.copier.start([
            Job(Op.SCATTER, address=address, length=read.length, pieces=pieces, pieces_offset=read.start, crcs=crcs)
        ])  # fmt: skip
        self._scattering.add(scattering)
        scattering.add_done_callback(self._scattering.discard)
        await asyncio.wait([scattering])
        return scattering.result()

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
