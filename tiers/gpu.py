"""The GPU tier: checkpoints in the memory of one GPU, chunk by chunk, for instant rollback and warm models.

It takes memory as it needs it, never the device's last: what is free there stays above a headroom, and as soon as
training takes some of that, chunks that another tier has, too, make way.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from stepwell.errors import StepwellError
from stepwell.native import Done, Job, Op, PieceMap
from stepwell.tiers._arenatier import ArenaTier
from stepwell.tiers._calls import settle
from stepwell.tiers._gpuslots import GpuArena, Whole
from stepwell.tiers._slots import Slot
from stepwell.tiers.base import CheckpointKey, EvictionPolicy, Refused, Reservation, ShardKey, tier_error

#: how large chunks are, and those of a small tier: each of them takes time to decide on, none to copy
GPU_CHUNK_BYTES, SMALL_CHUNK_BYTES = 64 << 20, 8 << 20
#: a tier with less memory has small ones, since the last chunk of each shard takes a whole slot
LARGE_BYTES = 8 << 30
#: of the device's memory so much stays free for others, who may want it at once
HEADROOM_BYTES = 512 << 20
#: how often a tier looks whether that is so
LOOK_S = 0.05

log = logging.getLogger("stepwell")


class Copier(Protocol):
    """A native engine under asyncio."""

    def start(self, jobs: Sequence[Job]) -> list[asyncio.Future[Done]]: ...


class Device(Protocol):
    """A GPU."""

    @property
    def index(self) -> int: ...

    @property
    def down(self) -> Copier:
        """Runs D2H."""

    @property
    def up(self) -> Copier:
        """Runs H2D."""

    @property
    def across(self) -> Copier:
        """Runs PACK and UNPACK."""

    def allocate(self, size_bytes: int) -> int:
        """The address of new memory; raises OSError if there is none. Any thread, as the next two."""

    def free(self, address: int) -> None: ...

    def memory(self) -> tuple[int, int]:
        """Free and total bytes."""

    def lend(self, addresses: Sequence[int]) -> None:
        """Memory that may be freed from now on when the allocator of the device's other user is about to fail."""

    def take_back(self, addresses: Sequence[int]) -> list[bool]:
        """Memory that may not be freed any more; False for what has been."""

    def trips(self) -> tuple[int, int]:
        """How often that has happened, and how many bytes it has freed."""


def slot_map(addresses: Sequence[int], chunk_bytes: int, size_bytes: int) -> PieceMap:
    """Where the chunks of a shard lie: the address of each, 0 for one that is not there."""
    bounds = np.minimum(np.arange(len(addresses) + 1, dtype=np.uint64) * np.uint64(chunk_bytes), np.uint64(size_bytes))
    return PieceMap(bounds, np.array(addresses, np.uint64))


class HeldShard:
    """The chunks of a shard, in slots that stay until they are released."""

    def __init__(self, arena: GpuArena, whole: Whole) -> None:
        self._arena, self._whole = arena, whole

    @property
    def slots(self) -> Sequence[Slot]:
        """In the order of the chunks."""
        return self._whole.slots

    @property
    def map(self) -> PieceMap:
        """Of the shard's bytes, in GPU memory."""
        whole = self._whole
        if whole.map is None:
            addresses = [slot.address for slot in whole.slots]
            whole.map = slot_map(addresses, self._arena.slot_bytes, whole.size_bytes)
        return whole.map

    def used(self) -> None:
        """Somebody wanted its bytes, so that it is worth keeping. It may be said once they are on their way."""
        for slot in self.slots:
            if slot.chunk is not None:
                self._arena.eviction.used(slot.chunk)

    def release(self) -> None:
        """Once."""
        self._arena.release_all(self.slots)


class GpuTier(ArenaTier):
    """An arena of at most `capacity_bytes` on the GPU that it is first used with."""

    arena: GpuArena

    def __init__(
        self,
        eviction: EvictionPolicy,
        capacity_bytes: int | None,
        name: str = "gpu",
        *,
        share: float | None = None,
        chunk_bytes: int | None = None,
        headroom_bytes: int = HEADROOM_BYTES,
        device: Callable[[int | None], Awaitable[Device]] | None = None,
    ) -> None:
        """share: the capacity as a part of the GPU's memory, if it has no other. chunk_bytes: None: as large as suits
        the capacity. device: finds a GPU by its index; None: the one that is this process's."""
        self._find, self._headroom, self._share = device, headroom_bytes, share
        if chunk_bytes is None:
            chunk_bytes = (
                SMALL_CHUNK_BYTES if capacity_bytes is not None and capacity_bytes < LARGE_BYTES else GPU_CHUNK_BYTES
            )
        self.device: Device | None = None  # once it is used
        self._watching: asyncio.Task[None] | None = None
        self.on_tripped: Callable[[int], object] = lambda index: None  # told when memory of a GPU was taken away
        arena = GpuArena(
            capacity_bytes or 0, eviction, slot_bytes=chunk_bytes, take=self._allocate, give=self._free, lender=self
        )
        super().__init__(name, "gpu", arena)

    def __repr__(self) -> str:
        return f"<GpuTier {self.info.name}: {len(self._books.committed)} shards committed, {self.arena!r}>"

    def connect(self, device: Callable[[int | None], Awaitable[Device]]) -> None:
        """Says how GPUs are found, before the first use."""
        self._find = device

    async def use(self, index: int | None = None) -> Device:
        """The GPU whose memory this is: from the first call on, which chooses it, always the same.

        Raises StepwellError or OSError if there is none."""
        self._check_open()
        if self.device is None:
            assert self._find is not None
            found = await self._find(index)
            self._check_open()
            if self.device is None:
                self.device = found
                if self._share is not None:
                    self.arena.resize(int(self._share * found.memory()[1]))
                    self.info = replace(self.info, capacity_bytes=self.arena.capacity_bytes)
                self._watching = asyncio.ensure_future(self._watch(found))
        return self.device

    # -- memory --------------------------------------------------------------------------

    def _allocate(self, size_bytes: int) -> int:
        device = self.device
        assert device is not None
        try:
            free, _ = device.memory()
            if free - size_bytes < self._headroom:
                why = f"GPU {device.index} has {free} bytes free, of which {self._headroom} stay so"
                raise OSError(errno.ENOMEM, why)
            return device.allocate(size_bytes)
        except RuntimeError as error:  # its engine was closed
            raise OSError(errno.ESHUTDOWN, str(error)) from error

    def _free(self, address: int) -> None:
        assert self.device is not None
        with contextlib.suppress(OSError, RuntimeError):  # the device is lost, or has been given up before
            self.device.free(address)

    def lend(self, addresses: Sequence[int]) -> None:
        """See `Device`."""
        assert self.device is not None
        self.device.lend(addresses)

    def take_back(self, addresses: Sequence[int]) -> list[bool]:
        """See `Device`."""
        assert self.device is not None
        return self.device.take_back(addresses)

    async def _watch(self, device: Device) -> None:
        """Gives memory back as soon as less is free than should be, and notices what was taken."""
        trips, _ = device.trips()
        while True:
            await asyncio.sleep(LOOK_S)
            if not self.arena.ready_bytes:
                continue
            try:
                given, free, (now, _) = 0, device.memory()[0], device.trips()
                if now != trips:
                    trips, given = now, self.arena.sweep()
                    self.on_tripped(device.index)
                elif free < self._headroom:
                    given = self.arena.give_back(self._headroom - free)
            except (OSError, RuntimeError):  # see `_free`
                return
            if given:
                log.info("tier %s gave %d bytes of GPU %d back to training", self.info.name, given, device.index)

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        try:
            await self.use()
        except (StepwellError, OSError) as error:
            self._check_open()
            return Refused("unhealthy", f"{self.info.name}: {error}")
        self.arena.whole_again()
        return await super().reserve(shard, size_bytes, resume=resume)

    def hold(self, shard: ShardKey, size_bytes: int) -> HeldShard | None:
        """All of a shard, so that it is not evicted until it is released; None if not all of it is here."""
        if shard in self._books.reserved:  # a chunk that is being written has a slot before it has its bytes
            return None
        whole = self.arena.hold_all(shard, size_bytes)
        return None if whole is None else HeldShard(self.arena, whole)

    def clean(self, checkpoint: CheckpointKey) -> None:
        """Another tier has the checkpoint, too: it may make way."""
        for shard in self._books.of(checkpoint):
            self.arena.clean(shard)

    # -- copies for callers that bring their own memory ----------------------------------------

    async def _put(self, slot: Slot, within: int, address: int, length: int) -> None:
        device = await self.use()
        await self._copy(device.up, Op.H2D, slot.address + within, address, length)

    async def _take(self, slot: Slot, within: int, address: int, length: int) -> None:
        device = await self.use()
        await self._copy(device.down, Op.D2H, slot.address + within, address, length)

    async def _copy(self, way: Copier, op: Op, there: int, here: int, length: int) -> None:
        pieces = PieceMap(np.array([0, length], np.uint64), np.array([there], np.uint64))
        [done] = await settle(way.start([Job(op, address=here, length=length, pieces=pieces)]))
        if done is None or done.result < 0:
            number = errno.EIO if done is None else -done.result
            raise tier_error(number, f"Tier {self.info.name}: copying {length} bytes ({op.name}) failed")

    async def close(self) -> None:
        if self._watching is not None:
            self._watching.cancel()
        await super().close()
