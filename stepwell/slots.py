"""Slots: page-aligned pieces of host memory, one chunk long, through which all bytes pass.

The memory is mapped at once and made ready (populated) in slices by a thread of its own; a slot is handed
out as soon as its slice is ready, so the first save does not wait for the whole pool. It is not registered
with the tiers' rings: with huge pages that made no measurable difference (docs/architecture.md).
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from dataclasses import dataclass

from stepwell.native import Region

#: slots made ready together: small enough that the first are there soon, large enough to be few calls
_SLICE_SLOTS = 4


@dataclass(frozen=True, slots=True)
class Slot:
    index: int
    address: int


class SlotPool:
    """`count` slots of `slot_bytes` each. Used on one event loop; waiting is first come, first served."""

    def __init__(self, count: int, slot_bytes: int, loop: asyncio.AbstractEventLoop) -> None:
        assert count > 0 and slot_bytes % 4096 == 0
        self.count, self.slot_bytes = count, slot_bytes
        self.region = Region(count * slot_bytes)
        self._loop = loop
        self._free: deque[Slot] = deque()
        self._waiting: deque[asyncio.Future[Slot]] = deque()
        self._in_use = 0
        self._closed = False
        self._preparer = threading.Thread(target=self._prepare, name="stepwell-slots", daemon=True)
        self._preparer.start()

    def _prepare(self) -> None:
        for first in range(0, self.count, _SLICE_SLOTS):
            last = min(first + _SLICE_SLOTS, self.count)
            if self._closed:
                return
            self.region.populate(first * self.slot_bytes, (last - first) * self.slot_bytes)
            ready = [Slot(i, self.region.address + i * self.slot_bytes) for i in range(first, last)]
            try:
                self._loop.call_soon_threadsafe(self._put_back, ready)
            except RuntimeError:  # the loop was closed meanwhile: nobody waits any more
                return

    def _put_back(self, slots: list[Slot]) -> None:
        for slot in slots:
            while self._waiting:
                waiter = self._waiting.popleft()
                if not waiter.done():
                    self._in_use += 1
                    waiter.set_result(slot)
                    break
            else:
                self._free.append(slot)

    async def acquire(self) -> Slot:
        """A free slot, as soon as there is one."""
        if self._free:
            self._in_use += 1
            return self._free.popleft()
        waiter: asyncio.Future[Slot] = self._loop.create_future()
        self._waiting.append(waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(waiter.result())
            raise

    def release(self, slot: Slot) -> None:
        self._in_use -= 1
        self._put_back([slot])

    def view(self, slot: Slot, length: int) -> memoryview:
        """The first `length` bytes of a slot."""
        return self.region.view(slot.index * self.slot_bytes, length)

    @property
    def in_use(self) -> int:
        return self._in_use

    def close(self) -> None:
        """Frees the memory. No slot may be in use."""
        self._closed = True
        self._preparer.join()
        self.region.close()

    def __repr__(self) -> str:
        return f"<SlotPool {self._in_use} of {self.count} slots of {self.slot_bytes} bytes in use>"
