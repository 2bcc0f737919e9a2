"""How long to wait before something that failed is tried again."""

from __future__ import annotations

import random

#: first and longest pause; a file system that comes back is noticed within a minute
FIRST_S, LAST_S = 0.5, 60.0
#: so that many ranks do not all come back at the same moment
JITTER = 0.25


class Backoff:
    """Pauses that double with each failure. `choose` gives random numbers from 0 to 1."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.failures = 0

    def failed(self) -> float:
        """Notes a failure; the pause before the next try, in seconds."""
        pause = min(LAST_S, FIRST_S * 2.0 ** min(self.failures, 32))  # a tier may fail for days
        self.failures += 1
        return pause * (1 + JITTER * (2 * self._rng.random() - 1))

    def succeeded(self) -> None:
        self.failures = 0
