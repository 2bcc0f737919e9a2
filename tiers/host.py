"""The host tier: checkpoints in this process's memory, chunk by chunk, in the slots of an arena.

It is where all bytes pass: the mover fills and reads its slots in place.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

from stepwell.native import Region
from stepwell.tiers._arena import Arena
from stepwell.tiers._arenatier import ArenaTier
from stepwell.tiers._slices import Memory
from stepwell.tiers._slots import Priority, Slot
from stepwell.tiers.base import CHUNK_BYTES, EvictionPolicy

#: what an arena has before it knows how large the state is: enough to stage the first restore
FIRST_BYTES = 256 << 20
#: what of it may be kept before `grow` says more: a small state must not fill the rest with its older checkpoints
KEEP_FIRST_BYTES = 64 << 20
#: of memory that is so large, and no other process's, chunks are larger: fewer to decide on, where states are of many
#: GiB. What several processes share has one size for all
LARGE_BYTES, LARGE_CHUNK_BYTES = 16 << 30, 32 << 20
__all__ = ["Arena", "HostTier", "Priority", "Slot", "chunk_bytes_for"]


def chunk_bytes_for(capacity_bytes: int | None) -> int:
    """How large the chunks of an arena are, in bytes."""
    return LARGE_CHUNK_BYTES if capacity_bytes is not None and capacity_bytes >= LARGE_BYTES else CHUNK_BYTES


class HostTier(ArenaTier):
    """An arena of `capacity_bytes` of private memory. None: it starts small, and keeps no more than `grow` says."""

    _ARENA: ClassVar[type[Arena]] = Arena

    def __init__(
        self,
        eviction: EvictionPolicy,
        capacity_bytes: int | None = None,
        name: str = "host",
        *,
        chunk_bytes: int = CHUNK_BYTES,
        memory: Callable[[int], Memory] = Region,
        background: bool = True,
        ahead: bool = True,
    ) -> None:
        """chunk_bytes, memory, background: as `Arena` takes them. ahead: a capacity that is given is taken from the
        system at the start, not when it is needed."""
        self.grows, self._ahead = capacity_bytes is None, ahead
        arena = self._ARENA(
            capacity_bytes or FIRST_BYTES, eviction, slot_bytes=chunk_bytes, memory=memory, background=background
        )
        super().__init__(name, "host", arena)
        if self.grows:
            arena.keep_limit = self._slots(KEEP_FIRST_BYTES)

    def __repr__(self) -> str:
        return f"<HostTier {self.info.name}: {len(self._books.committed)} shards committed, {self.arena!r}>"

    async def start(self) -> None:
        if self._ahead and not self.grows:
            self.arena.expect(self.arena.capacity_bytes)

    def grow(self, capacity_bytes: int) -> None:
        """Raises the capacity of an arena whose size was not set. Budgets are the caller's business."""
        assert self.grows
        self.arena.grow(capacity_bytes)
        self.arena.keep_limit = max(self.arena.keep_limit or 0, self._slots(capacity_bytes))
        self.info = replace(self.info, capacity_bytes=self.arena.capacity_bytes)

    async def _put(self, slot: Slot, within: int, address: int, length: int) -> None:
        ctypes.memmove(slot.address + within, address, length)
        await asyncio.sleep(0)

    async def _take(self, slot: Slot, within: int, address: int, length: int) -> None:
        ctypes.memmove(address, slot.address + within, length)
        await asyncio.sleep(0)

    def _begin(self, slot: Slot) -> None:
        self.arena.view(slot, self.arena.slot_bytes)[:] = bytes(self.arena.slot_bytes)
