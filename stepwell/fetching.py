"""Chunks on their way up: from tiers, through slots of the host arena, to memory.

Each chunk is read once, however many ask for it: who finds it on its way into the arena waits for that, whatever
brings it, and takes it from there. What a restore or a load reads whole stays in the arena, as far as eviction lets
it, for the next one who asks.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from stepwell.edges import NEIGHBOUR, STAGING, STATE, Edge, Edges, Turn
from stepwell.errors import CorruptData, StepwellError, TierError
from stepwell.groups import Group, Tasks
from stepwell.native import BLOCK_BYTES, Done, Job, Op
from stepwell.ranges import Read
from stepwell.reading import Caller, Crcs, Reading
from stepwell.tiers.base import ChunkIO, Tier
from stepwell.tiers.gpu import GpuTier
from stepwell.tiers.host import Arena, HostTier, Priority, Slot

#: what a read fails with if the file is gone or too short: no later one fares better
_NOT_THERE = {errno.ENOENT, errno.EINVAL}
#: how long a read waits for one that brings the same chunk: that one may hang where this one need not
JOIN_S = 5.0


class Then(Protocol):
    """What happens with a read's good bytes, which are at `address` until it returns."""

    def __call__(self, read: Read, address: int, /) -> Awaitable[None]: ...


class Copier(Protocol):
    """The native engine that copies and checksums, under asyncio."""

    def start(self, jobs: Sequence[Job]) -> list[asyncio.Future[Done]]: ...


class Lent(Protocol):
    """A chunk in another process's arena, ours to read until it is released."""

    address: int  # of the chunk's first byte

    def still_good(self) -> bool:
        """Whether what has been copied from there until now was this chunk."""

    def release(self) -> None:
        """Gives it back. Once."""


class Neighbour(Protocol):
    """Another process of this node whose arena may have what is read, or may fetch it for both."""

    async def get(self, reading: Reading, read: Read) -> Lent | None:
        """The chunk that `read` lies in; None if it must be read here. Never takes long to say so."""


class Gpu(Protocol):
    """What copies between one GPU's memory and slots, each way in the order in which it was asked to."""

    @property
    def down(self) -> Copier: ...

    @property
    def up(self) -> Copier: ...

    def trouble(self, way: Copier, /) -> str:
        """Of one of the two, the error that it had last, in the driver's words."""


class Gpus(Protocol):
    """The GPUs of this process, by their index."""

    def get(self, index: int, /) -> Gpu: ...

    async def pin(self, arena: Arena, address: int | None = None, /) -> None:
        """Makes an arena's memory quick to copy from and to; returns once what is at `address` (None: all) is so."""


class NoGpus:
    """Of a mover that moves nothing from or to a GPU."""

    def get(self, index: int, /) -> Gpu:
        raise AssertionError(f"nobody has opened GPU {index}")

    async def pin(self, arena: Arena, address: int | None = None, /) -> None:
        pass


def raise_failed(done: Done, driver: str = "") -> None:
    """Raises StepwellError for a copy from or to the state that failed: its GPU is lost, say. driver: its words."""
    if done.result < 0:
        raise StepwellError(
            f"copying {done.job.length} bytes ({done.job.op.name}) failed: {driver or os.strerror(-done.result)}",
            todo="If a GPU has failed, the driver's log (dmesg) says which",
        )


class Fetching:
    """The base of a mover: what it reads, verifies and puts into memory."""

    def __init__(
        self, copier: Copier, arena: Arena, host: HostTier | None = None, gpus: Gpus | None = None,
        gpu: GpuTier | None = None,
    ) -> None:  # fmt: skip
        self.copier, self.arena, self.host, self.gpus, self.gpu = copier, arena, host, gpus or NoGpus(), gpu
        self.edges = Edges(arena)
        self.neighbour: Neighbour | None = None
        self.on_used: Callable[[Reading, int], object] = lambda reading, number: None  # a chunk that memory gets
        self._tasks = Tasks()
        self._scattering: set[asyncio.Future[Done]] = set()

    async def leave(self, caller: Caller) -> None:
        """The caller gives up: when this returns, nothing more is put into its memory. Waits for no tier."""
        caller.gone = True
        if self._scattering:
            await asyncio.wait(set(self._scattering))

    def follow(self, copying: asyncio.Future[Done]) -> None:
        """It writes to a caller's memory until it is done."""
        self._scattering.add(copying)
        copying.add_done_callback(self._scattering.discard)

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

    async def _slot(self, turn: Turn, priority: Priority, kept: bool = False) -> Slot:
        """A slot for who has its turn already."""
        try:
            return await self.arena.acquire(priority, kept=kept)
        except BaseException:
            turn.leave(False)
            raise

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
        if reading.from_memory and (arrival := self._arrival(reading, read)) is not None:
            return self._get_arriving(reading, read, arrival, then, kept)
        if self.neighbour is not None and reading.from_memory and (kept or reading.delivers):
            if not self.arena.has(reading.known_as, self._number(read)):
                edge = self.edges.between(NEIGHBOUR, reading.target, background=reading.priority >= Priority.FLUSH)
                turn = await edge.enter(read.length, reading.priority)
                return self._get_lent(self.neighbour, reading, read, turn, then, kept)
        return await self._own(reading, read, then, kept)

    async def _own(
        self, reading: Reading, read: Read, then: Then | None, kept: bool, *, alone: bool = False
    ) -> Coroutine[Any, Any, None]:
        """The operation for a read that this process does. alone: whoever else brings the chunk has taken too long."""
        turn = await self._edge_of(reading, read).enter(read.length, reading.priority)
        held = self._held(reading, read) if reading.from_memory else None
        if held is not None:
            return self._get_held(reading, read, held, turn, then)
        slot = await self._slot(turn, reading.priority, kept)
        # nothing pauses from here on until the chunk is known to be on its way
        if reading.from_memory and not alone:
            held, arrival = self._held(reading, read), self._arrival(reading, read)
            if held is not None or arrival is not None:  # since this one has waited
                self.arena.release(slot)
            if held is not None:
                return self._get_held(reading, read, held, turn, then)
            if arrival is not None:
                turn.give_back()
                return self._get_arriving(reading, read, arrival, then, kept)
        name, number = reading.known_as, self._number(read)
        self._used(reading, number)
        if slot.kept or (self._stays(reading, read) and self.arena.keep(slot, name, number)):
            self.arena.place(slot, name, number, read.length, clean=True, fetch_s=self._fetch_s(reading, read))
        return self._get_read(reading, read, slot, turn, then)

    def _held(self, reading: Reading, read: Read) -> Slot | None:
        """The chunk's slot, if it is here. Copying it to another tier is no use of it: nobody asked for the chunk."""
        return self.arena.find(reading.known_as, self._number(read), used=reading.target == STATE)

    def _used(self, reading: Reading, number: int) -> None:
        if reading.target == STATE:
            self.on_used(reading, number)

    def _number(self, read: Read) -> int:
        return read.start // self.arena.slot_bytes

    def _arrival(self, reading: Reading, read: Read) -> asyncio.Future[None] | None:
        return self.arena.arrival(reading.known_as, self._number(read))

    def _fetch_s(self, reading: Reading, read: Read) -> float:
        """What fetching it again takes, at the rate that its way had so far; 0.0: nothing has come that way yet."""
        rate = self._edge_of(reading, read).statistics().bytes_per_s
        return read.length / rate if rate > 0 else 0.0

    def _stays(self, reading: Reading, read: Read) -> bool:
        """Whether what is read should be there for the next one: whole chunks only."""
        if not reading.stays or self.host is None or not reading.from_memory:
            return False
        return read.start % self.arena.slot_bytes == 0 and read.length == min(
            self.arena.slot_bytes, reading.size - read.start
        )

    async def _get_arriving(
        self, reading: Reading, read: Read, arrival: asyncio.Future[None], then: Then | None, kept: bool
    ) -> None:
        """Somebody else brings the chunk."""
        await asyncio.wait([arrival], timeout=JOIN_S)
        await (await self._own(reading, read, then, kept, alone=not arrival.done()))

    async def _get_lent(
        self, neighbour: Neighbour, reading: Reading, read: Read, turn: Turn, then: Then | None, kept: bool
    ) -> None:
        """From another process's arena, if that has it or fetches it. Owns the turn until it ends."""
        try:
            lent = await neighbour.get(reading, read)
            if lent is not None:
                try:
                    address = lent.address + read.start % self.arena.slot_bytes
                    crcs = reading.crcs_of(read.start, read.length)  # again: another process may change the memory
                    bad = (await self._scatter(reading, read, address, crcs)).bad_blocks
                    if not bad:
                        await self._deliver(reading, read, address)
                    if not bad and lent.still_good():
                        if then is not None:
                            await then(read, address)
                        self._used(reading, self._number(read))
                        reading.healing.took(self._here, read.length)
                        turn.leave(True)
                        return
                finally:
                    lent.release()
        finally:
            turn.give_back()
        await (await self._own(reading, read, then, kept))

    async def _get_held(self, reading: Reading, read: Read, slot: Slot, turn: Turn, then: Then | None) -> None:
        """From the arena: verified when it was filled. Owns slot and turn until it ends."""
        address = slot.address + read.start % self.arena.slot_bytes
        self._used(reading, self._number(read))
        try:
            with turn:
                if reading.pieces is not None:
                    await self._scatter(reading, read, address, None)
                await self._deliver(reading, read, address)
                if then is not None:
                    await then(read, address)
            reading.healing.took(self._here, read.length)
        finally:
            self.arena.release(slot)

    async def _get_read(self, reading: Reading, read: Read, slot: Slot, turn: Turn, then: Then | None) -> None:
        """From the tiers. Owns slot and turn until it ends."""
        try:
            with turn:
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
                await self._deliver(reading, read, slot.address)
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

    async def _deliver(self, reading: Reading, read: Read, address: int) -> None:
        """Good bytes to GPUs' memory, all GPUs at once."""
        if not reading.gpu_pieces or reading.caller.gone:
            return
        await self.gpus.pin(self.arena, address)
        gpus = [self.gpus.get(gpu) for gpu, _ in reading.gpu_pieces]
        copying = [
            gpu.up.start([
                Job(
                    Op.H2D, address=address, length=read.length, pieces=pieces, pieces_offset=read.start,
                    mark=reading.marks.get(number),
                )
            ])[0]
            for gpu, (number, pieces) in zip(gpus, reading.gpu_pieces, strict=True)
        ]  # fmt: skip
        for each in copying:
            self.follow(each)
        await asyncio.wait(copying)
        for gpu, each in zip(gpus, copying, strict=True):
            raise_failed(each.result(), gpu.trouble(gpu.up))

    async def _scatter(self, reading: Reading, read: Read, address: int, crcs: Crcs | None) -> Done:
        pieces = None if reading.caller.gone else reading.pieces
        [scattering] = self.copier.start([
            Job(Op.SCATTER, address=address, length=read.length, pieces=pieces, pieces_offset=read.start, crcs=crcs)
        ])  # fmt: skip
        self.follow(scattering)
        await asyncio.wait([scattering])
        return scattering.result()
