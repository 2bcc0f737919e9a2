"""What goes wrong at a simulated place, and when: drawn from a seed, the same for all processes that use it.

Kinds of trouble:

- `error`: the operation fails before it had any effect, with EIO, ENOSPC or ETIMEDOUT
- `torn`: it fails in the middle: of a write some blocks are there, of a commit the shards but not the record
- `lost`: it takes effect, and the answer says ETIMEDOUT
- stuck: for a while nothing answers, then all goes on
- slow: for a while everything takes many times as long
"""

from __future__ import annotations

import asyncio
import errno
import random
from dataclasses import dataclass
from typing import Literal

Trouble = Literal["", "error", "torn", "lost"]

#: seconds of a small operation and of moving one block, on average
CALL_S, BLOCK_S = 0.0008, 0.0004
SLOW_FACTOR = 40.0
#: what hangs goes on at most so long after the weather has cleared up
LOOK_S = 10.0

_ERRORS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.ETIMEDOUT)


@dataclass(slots=True)
class Weather:
    """Of one place. `trouble_rate`: the part of its operations that fail."""

    rng: random.Random
    trouble_rate: float = 0.0
    pace: float = 1.0  # how much longer than usual a block always takes
    stuck_until: float = 0.0
    slow_until: float = 0.0
    troubled_at: float = -1.0  # when something last went wrong here, or was stuck or slow
    full_at: float = -1.0  # when something last found no room here

    def draw(self) -> Trouble:
        """What becomes of one operation."""
        now = asyncio.get_running_loop().time()
        if now < max(self.stuck_until, self.slow_until):
            self.troubled_at = now
        if self.rng.random() >= self.trouble_rate:
            return ""
        self.troubled_at = now
        luck = self.rng.random()
        return "error" if luck < 0.5 else "torn" if luck < 0.75 else "lost"

    def number(self) -> int:
        """The errno of an `error` or a `torn` operation."""
        return self.rng.choice(_ERRORS)

    async def pass_time(self, blocks: int = 0) -> None:
        """As long as an operation on so many blocks takes now."""
        loop = asyncio.get_running_loop()
        seconds = self.rng.expovariate(1.0) * (CALL_S + BLOCK_S * blocks * self.pace)
        await asyncio.sleep(seconds * SLOW_FACTOR if loop.time() < self.slow_until else seconds)
        while loop.time() < self.stuck_until:
            left_s = min(self.stuck_until - loop.time(), LOOK_S)  # it may clear up earlier
            await asyncio.sleep(left_s + self.rng.random() * CALL_S)

    def clear_up(self) -> None:
        """From now on nothing goes wrong."""
        self.trouble_rate = self.stuck_until = self.slow_until = 0.0


class Calm:
    """No trouble, and some turns of the loop as latency: for the contract suite, on a real event loop."""

    full_at = -1.0

    def draw(self) -> Trouble:
        return ""

    def number(self) -> int:
        raise AssertionError("nothing goes wrong here")

    async def pass_time(self, blocks: int = 0) -> None:
        for _ in range(8):
            await asyncio.sleep(0)
