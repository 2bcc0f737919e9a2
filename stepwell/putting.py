"""Chunks on their way down from the state: from its memory, on the host or on GPUs, to slots, and on to a tier."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from stepwell.edges import Edge, Turn
from stepwell.errors import StepwellError, TierFull
from stepwell.fetching import Fetching, raise_failed
from stepwell.groups import Countdown, Group
from stepwell.native import BLOCK_BYTES, Done, Job, Op, PieceMap, Ticket
from stepwell.ranges import Read
from stepwell.shardjob import UNGUARDED, ChunkCover, Packed, ShardJob
from stepwell.tiers.base import ChunkIO, Tier
from stepwell.tiers.host import Priority, Slot

#: chunks whose copies are asked for together, if there are slots for them: a GPU copies one faster than Python asks
BATCH = 16
#: of what is left, they are one part of so many at most, so that the last ones keep all threads that copy busy
SPREAD = 8
#: bytes that are on their way from GPUs at most: what a fast bus takes in 25 ms, so that a busy interpreter does not
#: stop it, and no more, so that asking for them is spread over the time that they take. Training's own thread needs
#: the interpreter, too, and most of all when an iteration begins
GPU_AHEAD_BYTES = 3 << 29

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


@dataclass(frozen=True, slots=True)
class _Line:
    """What is to be copied yet of a shard, by numbers: a chunk becomes an object when its turn comes, since the cyclic
    garbage collector, which stops training, runs the more often the more objects live long."""

    shard: ShardJob
    numbers: deque[int]


@dataclass(slots=True)
class _Held:
    """Chunks with the room that they got: one, or several that follow each other in a shard and are copied together."""

    chunks: list[_Chunk]
    slots: list[Slot]
    turn: Turn | None = None
    linked: Ticket | None = None  # done once the chunks are whole in their slots
    fetches: list[tuple[int, int]] = field(default_factory=list)  # from GPUs: each one's number, and of its batch which
    fetched: list[tuple[int, asyncio.Future[Done]]] = field(default_factory=list)
    copying: asyncio.Future[Done] = field(init=False)  # done once the chunks are whole

    @property
    def shard(self) -> ShardJob:
        return self.chunks[0].shard

    @property
    def packed(self) -> Packed | None:
        return self.chunks[0].packed

    @property
    def start(self) -> int:
        return self.chunks[0].start

    @property
    def stop(self) -> int:
        return self.chunks[-1].start + self.chunks[-1].length

    def goes_on_with(self, chunk: _Chunk) -> bool:
        """Whether a chunk of the same shard can be copied together with these."""
        return chunk.start == self.stop and chunk.packed is self.packed

    def memory(self) -> tuple[int, PieceMap | None]:
        """The slots, as jobs have them: the address of the one, or where the bytes are in several."""
        if len(self.slots) == 1:
            return self.slots[0].address, None
        starts = [*(chunk.start for chunk in self.chunks), self.stop]
        return 0, PieceMap(np.array(starts, np.uint64), np.array([slot.address for slot in self.slots], np.uint64))


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
        urgent, others = zip(*map(self._lines, shards), strict=True) if shards else ((), ())
        progress.captured.up(sum(len(line.numbers) for line in urgent))
        for shard in shards:
            _follow(shard, progress)
        progress.captured.seal()
        way = None
        if tier is not None:
            way = tier, self._edge(self._here, tier.info.name, Priority.SNAPSHOT, tier.info.write_bytes_per_s)
        self.arena.expect(sum(shard.size for shard in shards))
        left = deque(line for line in (*urgent, *others) if line.numbers)
        while left and not group.failed:
            await self._pace(progress)
            try:
                batch = await self._next_batch(left, way, kept)
            except StepwellError as error:
                group.fail(error)
                break
            self._copy_in(batch, progress)
            key = batch[0].shard.key
            if way is None:
                group.start(key, self._keep_all(batch))
            else:
                for held in batch:
                    group.start(key, self._send(way, held))
        if not left:
            progress.copied.seal()
            progress.whole.seal()
        await group.end()

    def _lines(self, shard: ShardJob) -> tuple[_Line, _Line]:
        """What save() waits for of a shard, and the rest."""
        urgent, others = _Line(shard, deque()), _Line(shard, deque())
        some = shard.cover is None or any(cover.urgent for cover in shard.cover)
        for number in range(-(-shard.size // self.arena.slot_bytes)):
            line = urgent if some and self._chunk(shard, number).urgent else others
            line.numbers.append(number)
        return urgent, others

    def _chunk(self, shard: ShardJob, number: int) -> _Chunk:
        start = number * self.arena.slot_bytes
        length = min(self.arena.slot_bytes, shard.size - start)
        cover = UNGUARDED if shard.cover is None else shard.cover[number]
        packed = shard.packed
        if packed is not None and not packed.has(start, start + length):
            packed = None
        return _Chunk(shard, start, length, cover, packed)

    async def _next_batch(self, left: deque[_Line], way: _Way | None, kept: bool) -> list[_Held]:
        """The next chunks, all of one shard: one as soon as there is room for it, and others that need not wait. What
        goes on to a tier does so chunk by chunk; all else is copied together."""
        line = left[0]
        chunk = self._chunk(line.shard, line.numbers[0])
        slot, turn = await self._room(way, chunk.length, kept)
        linked = way is not None and way[0].info.linked
        line.numbers.popleft()
        batch = [_Held([chunk], [slot], turn, Ticket() if linked else None)]
        together = min(BATCH, 1 + sum(len(each.numbers) for each in left) // SPREAD)
        for _ in range(together - 1 if kept and turn is None else 0):
            more = self.arena.take_now(Priority.SNAPSHOT, kept=True) if line.numbers else None
            if more is None:
                break
            chunk = self._chunk(line.shard, line.numbers.popleft())
            if way is None and batch[-1].goes_on_with(chunk):
                batch[-1].chunks.append(chunk)
                batch[-1].slots.append(more)
            else:
                batch.append(_Held([chunk], [more], None, Ticket() if linked else None))
        if not line.numbers:
            left.popleft()
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
        into its slots."""
        fetches: dict[int, list[Job]] = {}
        gathers = []
        for held in batch:
            shard, packed, start, length = held.shard, held.packed, held.start, held.stop - held.start
            for chunk, slot in zip(held.chunks, held.slots, strict=True):
                if slot.kept:
                    self.arena.place(slot, shard.key, chunk.start // self.arena.slot_bytes, chunk.length)
            address, slots = held.memory()
            after: Ticket | None = None
            for gpu, pieces in shard.source.gpu_pieces(start, held.stop):
                line, ticket = fetches.setdefault(gpu, []), Ticket()
                held.fetches.append((gpu, len(line)))
                job = Job(
                    Op.D2H, address=address, slots=slots, length=length, pieces=pieces, pieces_offset=start,
                    after=after, signal=ticket,
                )  # fmt: skip
                if packed is not None:
                    job.pieces, job.after = packed.map, packed.ticket
                else:
                    job.mark = shard.marks[gpu]
                    job.latches = [latch for chunk in held.chunks for latch in chunk.cover.gpu.get(gpu, ())]
                line.append(job)
                after = ticket
            gathers.append(
                Job(
                    Op.GATHER, address=address, slots=slots, length=length,
                    pieces=shard.source.pieces(start, held.stop), pieces_offset=start,
                    crcs=shard.crcs[start // BLOCK_BYTES : -(-held.stop // BLOCK_BYTES)], after=after,
                    signal=held.linked, latches=[latch for chunk in held.chunks for latch in chunk.cover.host],
                )
            )  # fmt: skip
        fetched = {gpu: self.gpus.get(gpu).down.start(line) for gpu, line in fetches.items()}
        for held, copying in zip(batch, self.copier.start(gathers), strict=True):
            held.fetched = [(gpu, fetched[gpu][at]) for gpu, at in held.fetches]
            held.copying = copying
            self._follow_copies(held, progress)

    def _follow_copies(self, held: _Held, progress: _Progress) -> None:
        read, count = held.copying, len(held.chunks)
        if held.fetched:
            last = held.fetched[-1][1]
            progress.from_gpus += count
            last.add_done_callback(partial(_crossed, progress, count))
            if not held.shard.source.has_host_pieces(held.start, held.stop):
                read = last
        progress.whole.up()
        if any(chunk.reads_state for chunk in held.chunks):
            progress.copied.up()
            read.add_done_callback(partial(_read, progress, sum(chunk.urgent for chunk in held.chunks)))
        held.copying.add_done_callback(partial(self._copied, held, progress))

    async def _pace(self, progress: _Progress) -> None:
        """Waits while enough is on its way from GPUs. Who else needs the interpreter gets it in between."""
        await asyncio.sleep(0)
        most = max(2 * BATCH, GPU_AHEAD_BYTES // self.arena.slot_bytes)
        while progress.from_gpus > most:
            progress.fewer.clear()
            await progress.fewer.wait()

    def _copied(self, held: _Held, progress: _Progress, copying: asyncio.Future[Done]) -> None:
        """The chunks are whole in host memory, and can be read there, before they are on the tier."""
        if not _is_good(copying):
            return
        packed = held.packed
        for chunk, slot in zip(held.chunks, held.slots, strict=True):
            self.arena.filled(slot)
            if packed is not None and packed.stays and chunk.has_host_pieces:
                self.arena.hold(slot)
                progress.whole.up()
                mirroring = packed.mirror(slot.address, chunk.start, chunk.length)
                mirroring.add_done_callback(partial(self._mirrored, packed, slot, progress))
        progress.whole.down()

    def _mirrored(self, packed: Packed, slot: Slot, progress: _Progress, mirroring: asyncio.Future[Done]) -> None:
        """The copy in GPU memory has what of the chunk was in host memory, too."""
        self.arena.release(slot)
        if not _is_good(mirroring):
            packed.broken = True
        progress.whole.down()

    async def _keep_all(self, batch: Sequence[_Held]) -> None:
        """Chunks that stay in memory. Owns the slots until it ends."""
        try:
            await asyncio.wait([held.copying for held in batch])
            for held in batch:
                self._require_whole(held)
        finally:
            for held in batch:
                for slot in held.slots:
                    self._let_go(slot)

    async def _send(self, way: _Way, held: _Held) -> None:
        """A chunk to the tier. Owns the slot and the turn until it ends."""
        tier, edge = way
        [chunk], [slot], turn = held.chunks, held.slots, held.turn
        try:
            if held.linked is None:
                await asyncio.wait([held.copying])
                self._require_whole(held)
            try:
                turn = turn or await edge.enter(chunk.length, Priority.SNAPSHOT)
                with turn:
                    place = ChunkIO(chunk.shard.key, chunk.start, chunk.length, slot.address, after=held.linked)
                    await write(tier, place)
            finally:
                await asyncio.wait([held.copying])  # the slot is the copier's until then, whatever the tier says
                self._require_whole(held)
        finally:
            if turn is not None:
                turn.leave(False)
            self._let_go(slot)

    def _require_whole(self, held: _Held) -> None:
        """Raises StepwellError if a copy into the slots has failed."""
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


def _crossed(progress: _Progress, count: int, done: asyncio.Future[Done]) -> None:
    progress.from_gpus -= count
    progress.fewer.set()


def _read(progress: _Progress, urgent: int, done: asyncio.Future[Done]) -> None:
    """urgent: how many of the chunks save() waits for."""
    progress.copied.down()
    if urgent:
        progress.captured.down(urgent)


async def write(tier: Tier, chunk: ChunkIO) -> None:
    """One chunk; raises what went wrong."""
    [result] = await tier.write([chunk])
    if result.error is not None:
        raise result.error
