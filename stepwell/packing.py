"""Saves by way of GPU memory: tensors are copied within their GPU first, at the rate of its memory.

Training may overwrite them as soon as that copy is under way, many times sooner than the bus would allow. All that
goes further down comes from the slots; they stay, as the GPU tier's copy of the checkpoint, where there is
room for all of it. Where there is not, what room there is only lets go sooner what the bus would take last.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from stepwell.errors import StepwellError, TierError, TierFull
from stepwell.hosting import try_reserve
from stepwell.native import Done, Job, Latch, Op, PieceMap, Ticket
from stepwell.shardjob import ShardJob
from stepwell.tiers.base import Refused, Reservation
from stepwell.tiers.gpu import Device, GpuTier, slot_map
from stepwell.tiers.host import Priority, Slot
from stepwell.tripwire import arm
from stepwell.units import format_bytes

#: how long a save waits for GPU memory that is being taken: the driver gives 32 MiB in 64 us
PATIENCE_S = 1.0


class PackedShard:
    """One shard in slots of GPU memory, or some of its chunks."""

    def __init__(
        self, device: Device, shard: ShardJob, chunk_bytes: int, slots: Mapping[int, Slot], *, stays: bool
    ) -> None:
        """slots: by the number of the chunk, which is of `chunk_bytes`. stays: what comes from host memory is wanted
        there, too."""
        self.device, self.slots, self.stays = device, slots, stays
        self._shard, self._chunk_bytes = shard, chunk_bytes
        addresses = [slots[n].address if n in slots else 0 for n in range(-(-shard.size // chunk_bytes))]
        self._addresses = np.array(addresses, np.uint64)
        self.map = slot_map(addresses, chunk_bytes, shard.size)
        self.header_bytes = int(shard.source.borders()[0][1])
        self.ticket = Ticket()  # done once the tensors' bytes are in the slots
        self.packed: asyncio.Future[Done] | None = None  # the same; None: there are none
        self.broken = False  # some of what came from host memory has not got to the slots
        self._host_map: PieceMap | None = None
        self._mirroring: set[asyncio.Future[Done]] = set()

    @property
    def under_way(self) -> list[asyncio.Future[Done]]:
        """What copies to the slots, or may."""
        return [*self._mirroring, *([] if self.packed is None else [self.packed])]

    def has(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) of the file are in slots."""
        return all(n in self.slots for n in range(start // self._chunk_bytes, -(-stop // self._chunk_bytes)))

    def begin(self, chunk_bytes: int) -> None:
        """Begins the copy. chunk_bytes: of the chunks that the shard's cover is of."""
        shard, index, across = self._shard, self.device.index, self.device.across
        latches: list[Latch] = []
        for number, cover in enumerate(shard.cover or ()):
            start = number * chunk_bytes
            if index in cover.gpu and self.has(start, min(start + chunk_bytes, shard.size)):
                latches += cover.gpu[index]
        for _, pieces in shard.source.gpu_pieces(0, shard.size):
            job = Job(
                Op.PACK, length=shard.size, pieces=pieces, slots=self.map, signal=self.ticket, mark=shard.marks[index],
                latches=latches,
            )  # fmt: skip
            [self.packed] = across.start([job])
        shard.packed = self

    def mirror(self, address: int, start: int, length: int) -> asyncio.Future[Done]:
        """Copies what of bytes [start, start + length) came from host memory to the slots, from the host slot at
        `address`, which has all of them."""
        if self._host_map is None:
            self._host_map = self._host_pieces()
        [copying] = self.device.up.start(
            [Job(Op.H2D, address=address, length=length, pieces=self._host_map, pieces_offset=start)]
        )
        self._mirroring.add(copying)
        copying.add_done_callback(self._mirroring.discard)
        return copying

    def _host_pieces(self) -> PieceMap:
        """The places in the slots of all that is not in GPU memory."""
        offsets, on_gpu = self._shard.source.borders()
        chunks = np.arange(0, self._shard.size, self._chunk_bytes, dtype=np.uint64)
        cuts = np.unique(np.concatenate([offsets, chunks]))
        starts = cuts[:-1]
        piece = np.searchsorted(offsets, starts, side="right") - 1
        chunk = (starts // np.uint64(self._chunk_bytes)).astype(np.intp)
        there = self._addresses[chunk] + starts % np.uint64(self._chunk_bytes)
        return PieceMap(cuts, np.where(on_gpu[piece] | (self._addresses[chunk] == 0), np.uint64(0), there))


class Packing:
    """One save's bytes in GPU memory."""

    def __init__(
        self, tier: GpuTier, shards: Sequence[PackedShard], reserved: list[Reservation] | None, passes: str
    ) -> None:
        """reserved: on the tier, of all shards; None: the slots are only passed through, and `passes` says why."""
        self._tier, self._shards, self.reserved, self.passes = tier, shards, reserved, passes

    @property
    def why_not(self) -> str:
        """Why the checkpoint cannot stay in the slots, as far as is known; empty if it can."""
        broken = any(shard.broken for shard in self._shards)
        return "what came from host memory could not be copied there" if broken else self.passes

    def whole(self) -> None:
        """All bytes are in the slots, and the checkpoint is to be committed there."""
        slots = [slot for shard in self._shards for slot in shard.slots.values()]
        for slot in slots:
            self._tier.arena.filled(slot)
        self._tier.arena.release_all(slots)
        self._shards = ()

    async def undo(self) -> None:
        """Frees the slots: nothing more is to be copied from there, and nothing more is begun to be copied to them.
        Returns once nothing is any more. What is `whole` is dropped like any shard."""
        if under_way := [copying for shard in self._shards for copying in shard.under_way]:
            await asyncio.wait(under_way)
        _free(self._tier, [dict(shard.slots) for shard in self._shards])
        for reservation in self.reserved or ():
            await self._tier.abort(reservation)


async def pack(tier: GpuTier, jobs: Sequence[ShardJob], chunk_bytes: int) -> Packing | str:
    """Begins to copy a save's shards within their GPU's memory; they know it then (`ShardJob.packed`). Else says why
    that cannot be. chunk_bytes: of the chunks that their covers are of."""
    gpus = sorted({gpu for job in jobs for gpu, _ in job.source.gpu_pieces(0, job.size)})
    if not gpus:
        return "nothing of the state is in GPU memory"
    if len(gpus) > 1:
        return f"the state is in the memory of GPUs {', '.join(map(str, gpus))}, and the tier in that of one"
    try:
        device = await tier.use(*gpus)
        arm(device.index)  # again, if torch was not there when the tier was used first
        _ = device.across  # made when first asked for
    except (StepwellError, OSError) as error:
        return str(error)
    if device.index not in gpus:
        return f"the state is in the memory of GPU {gpus[0]}, and the tier in that of GPU {device.index}"
    reserved, slots, passes = await _room(tier, jobs)
    if not any(slots):
        return passes
    shards = [
        PackedShard(device, job, tier.arena.slot_bytes, mine, stays=reserved is not None)
        for job, mine in zip(jobs, slots, strict=True)
        if mine
    ]
    packing = Packing(tier, shards, reserved, passes)
    try:
        for shard in shards:
            shard.begin(chunk_bytes)
    except BaseException:
        await packing.undo()
        raise
    return packing


_Slots = list[dict[int, Slot]]  # of each shard, by the number of the chunk


async def _room(tier: GpuTier, jobs: Sequence[ShardJob]) -> tuple[list[Reservation] | None, _Slots, str]:
    """Slots for all of the save, promised to it; or None, such as nobody needs now, and why."""
    granted = await try_reserve(tier, jobs)
    if isinstance(granted, Refused):
        return None, _spare(tier, jobs), granted.detail
    try:
        return granted, await _promised(tier, jobs), ""
    except BaseException as error:
        for reservation in granted:
            await tier.abort(reservation)
        if not isinstance(error, TierError | TimeoutError):
            raise
        return None, _spare(tier, jobs), str(error)


async def _promised(tier: GpuTier, jobs: Sequence[ShardJob]) -> _Slots:
    """A slot for each chunk. Raises TierFull or TimeoutError if less memory is there than was promised."""
    arena, slots = tier.arena, [dict[int, Slot]() for _ in jobs]
    count = sum(len(_numbers(tier, job)) for job in jobs)
    needed = count * arena.slot_bytes
    if needed > arena.keepable_bytes:
        raise TierFull(
            f"tier {tier.info.name} still has what is nowhere else yet: {format_bytes(needed)} needed, "
            f"{format_bytes(arena.keepable_bytes)} can be kept"
        )
    arena.make_room(count)
    try:
        async with asyncio.timeout(PATIENCE_S):
            for job, mine in zip(jobs, slots, strict=True):
                for number in _numbers(tier, job):
                    slot = arena.take_now(Priority.SNAPSHOT, kept=True)
                    slot = slot or await arena.acquire(Priority.SNAPSHOT, kept=True)
                    arena.place(slot, job.key, number, _length(tier, job, number))
                    mine[number] = slot
    except TimeoutError:
        _free(tier, slots)
        raise TimeoutError(f"tier {tier.info.name} got no memory within {PATIENCE_S} s") from None
    except BaseException:
        _free(tier, slots)
        raise
    return slots


def _spare(tier: GpuTier, jobs: Sequence[ShardJob]) -> _Slots:
    """Slots that nobody needs now, for chunks with bytes in GPU memory, the last ones first: the bus would take them
    last."""
    arena, slots = tier.arena, [dict[int, Slot]() for _ in jobs]
    arena.expect(sum(job.size for job in jobs))  # what is not there yet is there for the next save
    for job, mine in zip(reversed(jobs), reversed(slots), strict=True):
        for number in reversed(_numbers(tier, job)):
            start = number * arena.slot_bytes
            if not job.source.gpu_pieces(start, start + _length(tier, job, number)):
                continue
            spare = arena.take_now(Priority.SNAPSHOT)
            if spare is None:
                return slots
            mine[number] = spare
    return slots


def _free(tier: GpuTier, slots: _Slots) -> None:
    taken = [slot for mine in slots for slot in mine.values()]
    for slot in taken:
        if slot.chunk is not None:
            tier.arena.forget(slot)
    tier.arena.release_all(taken)


def _numbers(tier: GpuTier, job: ShardJob) -> range:
    return range(-(-job.size // tier.arena.slot_bytes))


def _length(tier: GpuTier, job: ShardJob, number: int) -> int:
    return min(tier.arena.slot_bytes, job.size - number * tier.arena.slot_bytes)
