"""One slot of the host arena, and who waits for one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from enum import IntEnum

from stepwell.errors import TierFull, TierUnavailable
from stepwell.tiers.base import Chunk, not_open


class Priority(IntEnum):
    """Who is served first when slots or an edge are short."""

    RESTORE = 0
    SNAPSHOT = 1
    FLUSH = 2
    PREFETCH = 3


@dataclass(eq=False, slots=True)
class Slot:
    """One chunk's worth of memory. `users` hold it; `chunk` is what it keeps."""

    index: int
    address: int
    users: int = 0
    kept: bool = False
    chunk: Chunk | None = None
    filled: bool = False
    dirty: bool = False
    arrival: asyncio.Future[None] | None = None  # somebody waits until the chunk is here, or will not come

    @property
    def clean(self) -> bool:
        return self.filled and not self.dirty

    @property
    def idle(self) -> bool:
        """Its chunk may go: nobody works with it, and it is elsewhere, too."""
        return self.clean and self.users == 0 and self.chunk is not None

    def tell(self) -> None:
        """The chunk is here, or will not come."""
        arrival, self.arrival = self.arrival, None
        if arrival is not None and not arrival.done():
            arrival.set_result(None)


@dataclass(order=True, slots=True)
class Waiter:
    """Who waits for a slot, in the order of being served."""

    priority: int
    number: int
    kept: bool = field(compare=False)
    future: asyncio.Future[Slot] = field(compare=False)


def no_memory(why: str) -> TierFull:
    return TierFull(f"the host arena got no memory: {why}", todo="Free memory or give it less")


def closed() -> TierUnavailable:
    return not_open("host", "closed")
