"""Time as the rest of stepwell sees it: passed in, so that simulation can turn the hands."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def wall(self) -> float:
        """Seconds since 1970, for people to read; never compared between machines."""
        ...

    def monotonic(self) -> float:
        """Seconds that only grow, for measuring."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    """The machine's own."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
