"""Slots that the arena makes ready in the background."""

from __future__ import annotations

import asyncio
import threading

from stepwell.policies.evict import LRU
from stepwell.tiers._arena import Arena
from stepwell.tiers._slots import Priority

SLOT_BYTES = 1 << 20


def join_preparer() -> None:
    for thread in threading.enumerate():
        if thread.name == "stepwell-arena":
            thread.join()


def test_asking_again_before_the_loop_knows_of_ready_slots_makes_none_twice() -> None:
    async def run() -> None:
        arena = Arena(16 * SLOT_BYTES, LRU(), slot_bytes=SLOT_BYTES)
        arena.expect(4 * SLOT_BYTES)
        join_preparer()  # the slots are ready, but the loop has not been told yet
        arena.expect(8 * SLOT_BYTES)
        join_preparer()
        slots = [await arena.acquire(Priority.SNAPSHOT) for _ in range(16)]
        assert len({slot.address for slot in slots}) == len({slot.index for slot in slots}) == 16
        for slot in slots:
            arena.release(slot)
        join_preparer()
        assert arena.close()

    asyncio.run(run())
