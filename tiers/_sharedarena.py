"""An arena whose slots and index outlive the process: taken up from an earlier owner, and let go for another one.

Slots are known by their place in the file. Only as many are ever made as the capacity has, but they need not be the
first ones: where an earlier owner had more of them, or a device may still write for it, there are holes.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from stepwell import native
from stepwell.native import Region, give_back
from stepwell.tiers._arena import SLOTS_MIN, Arena
from stepwell.tiers._index import Index, SlotState
from stepwell.tiers._sharedindex import Row, SharedIndex, Unusable
from stepwell.tiers._shm import SLOTS, HeldFile, Lock
from stepwell.tiers._slices import Memory, Slices
from stepwell.tiers._slots import Slot
from stepwell.tiers.base import Chunk

log = logging.getLogger("stepwell")

#: between two looks whether the slots are free that another owner is to have
LOOK_S = 0.01


class SlotFile:
    """The file of slots, mapped slice by slice."""

    def __init__(self, folder: Path, target: Path | None = None) -> None:
        """target: where it lies, if not in the folder: then the folder has a link to it. Raises OSError."""
        path = folder / SLOTS
        if target is not None and not (path.is_symlink() and Path(os.readlink(path)) == target):
            path.unlink(missing_ok=True)
            path.symlink_to(target)
        self.file = HeldFile(target or path, os.O_RDWR | os.O_CREAT)
        self._mapped_bytes = 0

    @property
    def size_bytes(self) -> int:
        """As far as slots were ever made."""
        return os.fstat(self.file.fd).st_size

    @property
    def taken_bytes(self) -> int:
        """Memory that it takes."""
        return os.fstat(self.file.fd).st_blocks * 512

    def slice(self, size_bytes: int) -> native.Mapping:
        """The next one."""
        mapping = native.Mapping(self.file.fd, self._mapped_bytes, size_bytes)
        self._mapped_bytes += size_bytes
        return mapping

    def give_back(self, slots: Sequence[int], slot_bytes: int) -> None:
        """Frees the memory of these slots; whoever reads them by mistake finds zeros."""
        for slot in slots:
            give_back(self.file.fd, slot * slot_bytes, slot_bytes)


class Attached:
    """What a process holds of a shared arena that it owns."""

    def __init__(self, lock: Lock, index: SharedIndex, slots: SlotFile) -> None:
        self.lock, self.index, self.slots = lock, index, slots

    def close(self) -> None:
        """The arena has no owner any more. Nobody uses its slots. Idempotent."""
        self.index.close()
        self.slots.file.close()
        self.lock.close()


class SharedArena(Arena):
    """In private memory until `attach`, and after `detach`."""

    attached: Attached | None = None
    _paused = False  # nobody gets a slot

    def attach(
        self,
        attached: Attached,
        capacity_bytes: int,
        rows: Sequence[Row],
        worth: Callable[[Row], bool],
        keys: Mapping[str, Hashable],
    ) -> None:
        """Goes on with what an earlier owner left, as far as it is `worth` it and the capacity has room. keys: of
        shards, by their names, as far as they are known.

        No slot is in use, and nothing is here. The eviction policy decides what goes if it is too much; chunks that
        only memory has stay in any case, and the capacity is as large as they need. Raises Unusable.
        """
        ended = max((row.slot + 1 for row in rows if row.state is SlotState.FILLED), default=0) * self.slot_bytes
        if attached.slots.size_bytes < ended:
            raise Unusable(f"the slots were cut off: {attached.slots.size_bytes} of {ended} bytes are there")
        self._exchange(attached.index, attached.slots.slice, capacity_bytes)
        self.attached, self.keep_limit = attached, None
        slots = self._take_up(rows, worth)
        self._shards.update((name, key) for name, key in keys.items() if name in self._cached)
        while self._kept > self.kept_max and self._evict():
            pass
        self._free.clear()  # what has just gone is a hole from now on
        if self._kept > self.kept_max:
            while self._kept > self.kept_max:
                self.count += 1
            log.warning(
                "%d bytes in shared memory are nowhere else: the arena is larger than its capacity of %d bytes until "
                "another process opens it", self._kept * self.slot_bytes, capacity_bytes,
            )  # fmt: skip
        kept = {slot.index: slot for slot in slots if slot.chunk is not None}
        assert isinstance(self._memory, Slices)
        for number, address in self._memory.find(list(kept)).items():
            kept[number].address = address
        self._slots = list(kept.values())
        made = attached.slots.size_bytes // self.slot_bytes
        if attached.slots.taken_bytes > capacity_bytes:
            attached.slots.give_back([number for number in range(made) if number not in kept], self.slot_bytes)

    def _take_up(self, rows: Sequence[Row], worth: Callable[[Row], bool]) -> list[Slot]:
        slots = []
        for row in rows:
            if row.state is not SlotState.FILLED or not worth(row) or (row.name, row.chunk) in self._by_key:
                self._index.free(row.slot)
                continue
            chunk = Chunk((row.name, row.chunk), row.name, row.chunk, self.slot_bytes)
            slot = Slot(row.slot, 0, kept=True, chunk=chunk, filled=True, dirty=row.dirty)
            self._cached.setdefault(row.name, {})[row.chunk] = self._by_key[chunk.key] = slot
            self._kept += 1
            self._clean += slot.clean
            self._idle += slot.idle
            self.eviction.entered(chunk)
            slots.append(slot)
        return slots

    def _exchange(self, index: Index, memory: Callable[[int], Memory], capacity_bytes: int) -> None:
        """Other memory, with nothing in it. No slot is in use."""
        assert not self.in_use and self._memory.stop()
        self._memory.close()
        self.count, self._is_short = max(SLOTS_MIN, capacity_bytes // self.slot_bytes), False
        self._index = index
        self._memory = self._slices(memory)
        for slot in self._by_key.values():
            assert slot.chunk is not None
            self.eviction.left(slot.chunk)
        self._slots.clear()
        self._free.clear()
        self._cached.clear()
        self._by_key.clear()
        self._shards.clear()
        self._kept = self._clean = self._idle = 0

    def is_dirty(self, shard: Hashable) -> bool:
        """Whether a chunk of the shard is here that no other tier has."""
        return any(slot.dirty for slot in self._of(shard).values())

    def forget_all(self) -> None:
        """Nothing is here any more; slots in use become free when they are released."""
        for slot in list(self._by_key.values()):
            self.forget(slot)
        self._serve()

    # -- for another owner ---------------------------------------------------------------

    @asynccontextmanager
    async def standing_still(self) -> AsyncIterator[None]:
        """Begins once nobody uses a slot; who wants one waits until the end. For `attach` and `detach`."""
        self._paused = True
        try:
            while self.in_use or not self._memory.stop():
                await asyncio.sleep(LOOK_S)
            yield
        finally:
            self._paused = False
            self._serve()
            self._prepare_for_waiting()

    def detach(self, capacity_bytes: int) -> Attached | None:
        """Private memory from now on, with nothing in it; what was here stays in the shared arena, which is the
        caller's to close. None if it was private. No slot is in use."""
        attached, self.attached = self.attached, None
        if attached is not None:
            self._exchange(Index(max(SLOTS_MIN, capacity_bytes // self.slot_bytes)), Region, capacity_bytes)
        return attached

    def _take(self, priority: int, kept: bool) -> Slot | None:
        return None if self._paused else super()._take(priority, kept)

    def find(self, shard: Hashable, number: int, *, used: bool = True) -> Slot | None:
        return None if self._paused else super().find(shard, number, used=used)

    def close(self) -> bool:
        """Leaves what is here in the shared memory, for whoever opens that next. False while slots are in use: the
        arena then stays this process's own until it ends."""
        if not super().close():
            return False
        attached, self.attached = self.attached, None
        if attached is not None:
            self._index = Index(0)
            attached.close()
        return True
