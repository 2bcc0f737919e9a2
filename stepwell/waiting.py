"""Waiting in the user's thread for what the event loop does."""

from __future__ import annotations

import concurrent.futures
import time
from typing import Any

from stepwell.settings import LONGEST_S

#: a signal that comes just before a thread falls asleep does not wake it: Python sees it when the sleep ends
SLEEP_S = 0.5


def done_within(future: concurrent.futures.Future[Any], seconds: float | None) -> bool:
    """Whether the future is done after at most so long; None: however long it takes.

    Unlike `result`, it raises no TimeoutError that could be a signal handler's. Ctrl-C ends it within SLEEP_S.
    """
    until = time.monotonic() + min(LONGEST_S if seconds is None else seconds, LONGEST_S)
    while not future.done() and (left := until - time.monotonic()) > 0:
        concurrent.futures.wait([future], min(left, SLEEP_S))
    return future.done()
