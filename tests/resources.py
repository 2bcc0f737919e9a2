"""Threads, open files and objects of this process, for tests that nothing is left behind.

Counts are compared as limits, after waiting: an earlier test's thread may still be ending when a test takes its first
count, and a daemon thread that was told to end needs a moment. So does the loop's thread to let go of what it did.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
import weakref
from collections.abc import Iterable
from typing import Any

FILES = "/proc/self/fd"
THREADS = "/proc/self/task"  # native threads too, which `threading` does not know
WAIT_S = 20.0


def in_use() -> tuple[int, int]:
    """How many threads and open files there are; (0, 0) where the system does not tell."""
    if not os.path.isdir(FILES):
        return 0, 0
    return len(os.listdir(THREADS)), len(os.listdir(FILES))


def comes_back_to(limit: tuple[int, int], *, spare: int = 0) -> bool:
    """Whether threads and files are, in time, at most `spare` above a former count of each."""
    deadline = time.monotonic() + WAIT_S
    while not all(have <= most + spare for have, most in zip(in_use(), limit, strict=True)):
        if time.monotonic() > deadline:
            return False
        gc.collect()  # a loop's own descriptors may wait for it; not before: in a long run it takes 0.3 s
        time.sleep(0.02)
    return True


def still_alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    """The objects that are kept alive, although they had time to go."""
    deadline = time.monotonic() + WAIT_S
    while True:
        gc.collect()
        objects = [thing for thing in (reference() for reference in references) if thing is not None]
        if not objects or time.monotonic() > deadline:
            return objects
        objects.clear()
        time.sleep(0.02)


def describe_files() -> str:
    """Where each open descriptor points to, one a line."""
    links = []
    for number in os.listdir(FILES):
        with contextlib.suppress(OSError):  # the listing's own
            links.append(f"{number}: " + os.readlink(f"{FILES}/{number}"))
    return "\n".join(links)
