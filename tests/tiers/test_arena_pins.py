"""Memory of an arena is pinned piece by piece, and who needs one piece does not wait for the others."""

from __future__ import annotations

import asyncio
import threading

from stepwell.policies.evict import LRU
from stepwell.tiers.host import Arena

SLOT_BYTES = 4096


def test_who_needs_one_slot_does_not_wait_until_all_are_pinned() -> None:
    go, pinned = threading.Event(), list[int]()

    def pin(address: int, size_bytes: int) -> bool:
        if pinned:
            go.wait()
        pinned.append(address)
        return address != pinned[0]  # one that is refused is settled, too

    async def main() -> None:
        arena = Arena(64 * SLOT_BYTES, LRU(), slot_bytes=SLOT_BYTES)
        arena.expect(64 * SLOT_BYTES)
        while len(arena._slots) < 64:
            await asyncio.sleep(0)
        registering = asyncio.ensure_future(arena.register(pin, lambda address: None))
        await asyncio.sleep(0)
        await arena.registered(arena._slots[0].address)
        assert len(pinned) == 1 and not registering.done()
        last = asyncio.ensure_future(arena.registered(arena._slots[-1].address))
        await asyncio.sleep(0)
        assert not last.done()
        go.set()
        await asyncio.gather(last, registering)
        assert len(pinned) > 2
        arena.unregister()
        assert arena.close()

    asyncio.run(main())


def test_memory_that_is_being_pinned_is_not_given_back() -> None:
    """Neither unmapped, since the driver would still count on it, nor left pinned once nobody wants that any more."""
    begun, go, pinned = threading.Event(), threading.Event(), set[int]()

    def pin(address: int, size_bytes: int) -> bool:
        begun.set()
        assert go.wait(60)
        pinned.add(address)
        return True

    async def main(unregister: bool) -> None:
        arena = Arena(8 * SLOT_BYTES, LRU(), slot_bytes=SLOT_BYTES)
        arena.expect(8 * SLOT_BYTES)
        while len(arena._slots) < 8:
            await asyncio.sleep(0)
        registering = asyncio.ensure_future(arena.register(pin, pinned.remove))
        while not begun.is_set():
            await asyncio.sleep(0)
        if unregister:
            arena.unregister()
        closed = arena.close()
        go.set()
        await registering
        while not arena.close():  # the thread that made memory ready may have told of it, and not have ended
            await asyncio.sleep(0)
        assert not closed and not pinned

    for unregister in (False, True):
        begun.clear()
        go.clear()
        try:
            asyncio.run(main(unregister))
        finally:
            go.set()
