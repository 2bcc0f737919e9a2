"""Chunks on their way down from the state: from its memory, on the host or on GPUs, to slots, and on to a tier."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from stepwell.edges import Edge, Turn
from stepwell.errors import StepwellError, TierFull
from stepwell.fetching import Fetching, raise_failed
from stepwell.groups import Countdown, Group
from stepwell.native import BLOCK_BYTES, Done, Job, Latch, Mark, Op, PieceMap, Ticket
from stepwell.ranges import Array, Read
from stepwell.reading import Crcs
from stepwell.tiers.base import ChunkIO, ShardKey, Tier
from stepwell.tiers.host import Priority, Slot

#: chunks whose copies are asked for together, if there are slots for them: a GPU copies one faster than Python asks
BATCH = 16
#: bytes that are on their way from GPUs at most: what a fast bus takes in 25 ms, so that a busy interpreter does not
#: stop it, and no more, so that asking for them is spread over the time that they take. Training's own thread needs
#: the interpreter, too, and most of all when an iteration begins
GPU_AHEAD_BYTES = 3 << 29


@dataclass(frozen=True, slots=True)
class ChunkCover:
    """What waits for one chunk. urgent: save() does."""

    urgent: bool = True
    host: tuple[Latch, ...] = ()  # go down once the chunk's bytes in host memory are copied
    gpu: Mapping[int, tuple[Latch, ...]] = field(default_factory=dict)  # once copies from that GPU are under way


UNGUARDED = ChunkCover()


class Source(Protocol):
    """Where a shard's bytes come from: the state's memory."""

    def pieces(self, start: int, stop: int) -> PieceMap:
        """Those in host memory; all else is a hole."""

    def gpu_pieces(self, start: int, stop: int) -> Sequence[tuple[int, PieceMap]]:
        """Those in GPUs' memory, of each GPU that has any."""

    def has_host_pieces(self, start: int, stop: int) -> bool: ...

    def borders(self) -> tuple[Array, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Where each piece begins, with the end of the last one, and whether it is in a GPU's memory."""


class Packed(Protocol):
    """A shard whose bytes are being copied within their GPU's memory, or some of them."""

    map: PieceMap  # of the file, in the copy; holes where there is none
    header_bytes: int  # the file's first ones, which are no state
    ticket: Ticket  # done once the tensors of the GPU are copied
    packed: asyncio.Future[Done] | None  # the same; None: there are none
    stays: bool  # it is to have what comes from host memory, too
    broken: bool  # `mirror` has failed

    def has(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) of the file are in the copy."""

    def mirror(self, address: int, start: int, length: int) -> asyncio.Future[Done]:
        """Adds what of these bytes came from host memory, from `address`, where all of them are."""


@dataclass(slots=True)
class ShardJob:
    """A shard on its way from the state to a tier. `crcs` is filled as its blocks are copied."""

    key: ShardKey
    size: int
    source: Source
    cover: Sequence[ChunkCover] | None = None  # of each chunk; None: the caller of save() waits for all
    marks: Mapping[int, Mark] = field(default_factory=dict)  # of each GPU: copies from there come after it
    packed: Packed | None = None  # chunks come from there as far as it has them
    crcs: Crcs = field(init=False)

    def __post_init__(self) -> None:
        self.crcs = np.zeros(-(-self.size // BLOCK_BYTES), np.uint32)


_Way = tuple[Tier, Edge]


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A chunk of the state on its way."""

    shard: ShardJob
    start: int
    length: int
    cover: ChunkCover
    packed: Packed | None  # that has it

    @property
    def urgent(self) -> bool:
        """Whether save() waits until it is copied to host memory."""
        return self.cover.urgent and self.reads_state

    @property
    def reads_state(self) -> bool:
        """Whether some of it comes from the state, and not from a copy within GPU memory."""
        start, stop = self.start, self.start + self.length
        packed = self.packed
        return packed is None or self.shard.source.has_host_pieces(min(max(start, packed.header_bytes), stop), stop)

    @property
    def has_host_pieces(self) -> bool:
        return self.shard.source.has_host_pieces(self.start, self.start + self.length)


@dataclass(slots=True)
class _Held:
    """A chunk with the room that it got."""

    chunk: _Chunk
    slot: Slot
    turn: Turn | None
    linked: Ticket | None = None  # done once the chunk is whole in its slot
    fetches: list[tuple[int, int]] = field(default_factory=list)  # from GPUs: each one's number, and of its batch which
    fetched: list[tuple[int, asyncio.Future[Done]]] = field(default_factory=list)
    copying: asyncio.Future[Done] = field(init=False)  # done once the chunk is whole


@dataclass(slots=True)
class _Progress:
    """Of one `put`: how many chunks are not so far yet."""

    captured: Countdown
    copied: Countdown
    whole: Countdown
    from_gpus: int = 0  # chunks on their way from there
    fewer: asyncio.Event = field(default_factory=asyncio.Event)  # set when they have become fewer


class Putting(Fetching):
    """The base of a mover: what it copies from the state."""

    async def put(
        self,
        tier: Tier | None,
        shards: Sequence[ShardJob],
        on_copied: Callable[[], None],
        *,
        on_captured: Callable[[], None] = lambda: None,
        on_whole: Callable[[], None] = lambda: None,
        kept: bool = False,
    ) -> None:
        """State -> slots -> tier, chunk by chunk. kept: the chunks stay in the arena, dirty, after that. tier: None
        leaves it at that.

        `on_captured` is called once the chunks that save() waits for are copied, which are the first; `on_copied`
        once nothing of the state is needed any more; `on_whole` once all is in slots, if all is good. Raises the first
        chunk's error, after all running chunks have ended; kept chunks are copied all the same, so that they can be
        tried again. If cancelled, chunks still run: see `settled`.
        """
        group = Group(self._tasks, stop_on_error=not kept)
        progress = _Progress(Countdown(on_captured), Countdown(on_copied), Countdown(on_whole))
        chunks = [chunk for shard in shards for chunk in self._chunks(shard)]
        urgent = [chunk for chunk in chunks if chunk.urgent]
        for _ in urgent:
            progress.captured.up()
        for shard in shards:
            _follow(shard, progress)
        progress.captured.seal()
        way = None
        if tier is not None:
            way = tier, self._edge(self._here, tier.info.name, Priority.SNAPSHOT, tier.info.write_bytes_per_s)
        self.arena.expect(sum(shard.size for shard in shards))
        left = deque([*urgent, *(chunk for chunk in chunks if not chunk.urgent)])
        while left and not group.failed:
            await self._pace(progress)
            try:
                batch = await self._next_batch(left, way, kept)
            except StepwellError as error:
                group.fail(error)
                break
            self._copy_in(batch, progress)
            key = batch[0].chunk.shard.key
            if way is None:
                group.start(key, self._keep_all(batch))
            else:
                for held in batch:
                    group.start(key, self._send(way, held))
        if not left:
            progress.copied.seal()
            progress.whole.seal()
        await group.end()

    def _chunks(self, shard: ShardJob) -> Iterator[_Chunk]:
        for number, read in enumerate(self.all_of(shard.size)):
            cover = UNGUARDED if shard.cover is None else shard.cover[number]
            packed = shard.packed
            if packed is not None and not packed.has(read.start, read.start + read.length):
                packed = None
            yield _Chunk(shard, read.start, read.length, cover, packed)

    async def _next_batch(self, left: deque[_Chunk], way: _Way | None, kept: bool) -> list[_Held]:
        """The next chunks, all of one shard: one as soon as there is room for it, and others that need not wait."""
        slot, turn = await self._room(way, left[0].length, kept)
        shard = left[0].shard
        linked = way is not None and way[0].info.linked
        batch = [_Held(left.popleft(), slot, turn, Ticket() if linked else None)]
        while kept and turn is None and left and left[0].shard is shard and len(batch) < BATCH:
            more = self.arena.take_now(Priority.SNAPSHOT, kept=True)
            if more is None:
                break
            batch.append(_Held(left.popleft(), more, None, Ticket() if linked else None))
        return batch

    async def _room(self, way: _Way | None, length: int, kept: bool) -> tuple[Slot, Turn | None]:
        """A slot for a chunk of the state. What only passes waits for its turn before it takes one: a stuck tier
        must not hold all of them."""
        if kept:
            try:
                return await self.arena.acquire(Priority.SNAPSHOT, kept=True), None
            except TierFull:  # less memory than was promised: the chunk passes, and the host tier will not commit
                if way is None:
                    raise
        assert way is not None
        turn = await way[1].enter(length, Priority.SNAPSHOT)
        return await self._slot(turn, Priority.SNAPSHOT), turn

    def _copy_in(self, batch: Sequence[_Held], progress: _Progress) -> None:
        """GPUs -> slots, then host memory -> slots and the checksums; each copy is linked natively to the one before
        into its slot."""
        fetches: dict[int, list[Job]] = {}
        gathers = []
        for held in batch:
            chunk, slot, shard = held.chunk, held.slot, held.chunk.shard
            start, stop = chunk.start, chunk.start + chunk.length
            if slot.kept:
                self.arena.place(slot, shard.key, start // self.arena.slot_bytes, chunk.length)
            after: Ticket | None = None
            for gpu, pieces in shard.source.gpu_pieces(start, stop):
                line, ticket = fetches.setdefault(gpu, []), Ticket()
                held.fetches.append((gpu, len(line)))
                job = Job(
                    Op.D2H, address=slot.address, length=chunk.length, pieces=pieces, pieces_offset=start, after=after,
                    signal=ticket,
                )  # fmt: skip
                if chunk.packed is not None:
                    job.pieces, job.after = chunk.packed.map, chunk.packed.ticket
                else:
                    job.mark, job.latches = shard.marks[gpu], chunk.cover.gpu.get(gpu, ())
                line.append(job)
                after = ticket
            gathers.append(
                Job(
                    Op.GATHER, address=slot.address, length=chunk.length, pieces=shard.source.pieces(start, stop),
                    pieces_offset=start, crcs=shard.crcs[start // BLOCK_BYTES : -(-stop // BLOCK_BYTES)], after=after,
                    signal=held.linked, latches=chunk.cover.host,
                )
            )  # fmt: skip
        fetched = {gpu: self.gpus.get(gpu).down.start(line) for gpu, line in fetches.items()}
        for held, copying in zip(batch, self.copier.start(gathers), strict=True):
            chunk = held.chunk
            held.fetched = [(gpu, fetched[gpu][at]) for gpu, at in held.fetches]
            held.copying = read = copying
            if held.fetched and not chunk.has_host_pieces:
                _, read = held.fetched[-1]
            progress.copied.up()
            progress.whole.up()
            if held.fetched:
                progress.from_gpus += 1
                held.fetched[-1][1].add_done_callback(partial(_crossed, progress))
            if chunk.reads_state:
                read.add_done_callback(partial(_read, progress, chunk.urgent))
            else:
                progress.copied.down()
            copying.add_done_callback(partial(self._copied, held, progress))

    async def _pace(self, progress: _Progress) -> None:
        """Waits while enough is on its way from GPUs."""
        most = max(2 * BATCH, GPU_AHEAD_BYTES // self.arena.slot_bytes)
        while progress.from_gpus > most:
            progress.fewer.clear()
            await progress.fewer.wait()

    def _copied(self, held: _Held, progress: _Progress, copying: asyncio.Future[Done]) -> None:
        """The chunk is whole in host memory, and can be read there, before it is on the tier."""
        chunk = held.chunk
        if not _is_good(copying):
            return
        self.arena.filled(held.slot)
        if chunk.packed is not None and chunk.packed.stays and chunk.has_host_pieces:
            self.arena.hold(held.slot)
            mirroring = chunk.packed.mirror(held.slot.address, chunk.start, chunk.length)
            mirroring.add_done_callback(partial(self._mirrored, held, progress))
        else:
            progress.whole.down()

    def _mirrored(self, held: _Held, progress: _Progress, mirroring: asyncio.Future[Done]) -> None:
        """The copy in GPU memory has what of the chunk was in host memory, too."""
        self.arena.release(held.slot)
        if held.chunk.packed is not None and not _is_good(mirroring):
            held.chunk.packed.broken = True
        progress.whole.down()

    async def _keep_all(self, batch: Sequence[_Held]) -> None:
        """Chunks that stay in memory. Owns the slots until it ends."""
        try:
            await asyncio.wait([held.copying for held in batch])
            for held in batch:
                self._require_whole(held)
        finally:
            for held in batch:
                self._let_go(held.slot)

    async def _send(self, way: _Way, held: _Held) -> None:
        """A chunk to the tier. Owns the slot and the turn until it ends."""
        tier, edge = way
        chunk, turn = held.chunk, held.turn
        try:
            if held.linked is None:
                await asyncio.wait([held.copying])
                self._require_whole(held)
            try:
                turn = turn or await edge.enter(chunk.length, Priority.SNAPSHOT)
                with turn:
                    place = ChunkIO(chunk.shard.key, chunk.start, chunk.length, held.slot.address, after=held.linked)
                    await write(tier, place)
            finally:
                await asyncio.wait([held.copying])  # the slot is the copier's until then, whatever the tier says
                self._require_whole(held)
        finally:
            if turn is not None:
                turn.leave(False)
            self._let_go(held.slot)

    def _require_whole(self, held: _Held) -> None:
        """Raises StepwellError if a copy into the slot has failed."""
        if held.copying.result().result < 0:
            for number, fetched in held.fetched:
                gpu = self.gpus.get(number)
                raise_failed(fetched.result(), gpu.trouble(gpu.down))
            raise_failed(held.copying.result())

    def _let_go(self, slot: Slot) -> None:
        if slot.chunk is not None and not slot.filled:
            self.arena.forget(slot)
        self.arena.release(slot)

    def all_of(self, size: int) -> list[Read]:
        """Reads of a whole shard, a chunk each."""
        return [Read(at, min(self.arena.slot_bytes, size - at)) for at in range(0, size, self.arena.slot_bytes)]


def _is_good(copying: asyncio.Future[Done]) -> bool:
    return not copying.cancelled() and copying.exception() is None and copying.result().result >= 0


def _follow(shard: ShardJob, progress: _Progress) -> None:
    """Until a copy within GPU memory is made, the tensors are needed, and what is urgent of them is not copied."""
    if shard.packed is None or (packing := shard.packed.packed) is None:
        return
    urgent = shard.cover is None or any(cover.urgent for cover in shard.cover)
    progress.copied.up()
    if urgent:
        progress.captured.up()
    packing.add_done_callback(partial(_read, progress, urgent))


def _crossed(progress: _Progress, done: asyncio.Future[Done]) -> None:
    progress.from_gpus -= 1
    if progress.from_gpus % BATCH == 0:
        progress.fewer.set()


def _read(progress: _Progress, urgent: bool, done: asyncio.Future[Done]) -> None:
    progress.copied.down()
    if urgent:
        progress.captured.down()


async def write(tier: Tier, chunk: ChunkIO) -> None:
    """One chunk; raises what went wrong."""
    [result] = await tier.write([chunk])
    if result.error is not None:
        raise result.error
