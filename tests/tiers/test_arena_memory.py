"""Slots that the arena makes ready in the background, and what it leaves to the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import threading

from stepwell.policies.evict import LRU
from stepwell.policies.s3fifo import S3FIFO
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


def test_the_garbage_collector_looks_at_nothing_that_is_there_once_a_chunk() -> None:
    async def run() -> None:
        policy = S3FIFO()
        arena = Arena(16 * SLOT_BYTES, policy, slot_bytes=SLOT_BYTES)
        slots = [await arena.acquire(Priority.SNAPSHOT, kept=True) for _ in range(8)]
        for number, slot in enumerate(slots):
            assert arena.place(slot, "shard", number, SLOT_BYTES)
            arena.filled(slot)
            arena.release(slot)
        per_chunk = [*(slot.chunk for slot in slots), *policy._entries.values()]
        assert len(per_chunk) == 16 and not any(map(gc.is_tracked, per_chunk))
        arena.drop("shard")
        join_preparer()
        assert not policy._entries and arena.close()

    asyncio.run(run())
