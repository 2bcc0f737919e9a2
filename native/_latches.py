"""What user threads and streams wait by: latches, which jobs count down, and marks on a stream."""

from __future__ import annotations

import os
import time
from typing import Any

from stepwell.native._engine import ffi, lib

WAIT_SLICE_S = 0.1  # between looks at the interpreter's signals, so that Ctrl-C ends a wait


class Latch:
    """Opens once jobs have counted it down from `count`; any thread can wait for that, without an event loop.

    A job counts each of its latches down, once for each time that it names it: D2H and PACK when their copies are
    issued, every other one when it has ended, also by failing or being cancelled. A latch of D2H and PACK jobs also
    knows the event that their copies end with, see `DeviceEngine.release`. All raises RuntimeError in a forked child.
    Raises ValueError for a negative count.
    """

    __slots__ = ("__weakref__", "_handle", "_pid")

    def __init__(self, count: int) -> None:
        if count < 0:
            raise ValueError(f"a latch counts down from zero or more, not {count}")
        handle = lib.sw_latch_new(count)
        if handle == ffi.NULL:
            raise MemoryError("no memory for a latch")
        self._handle: Any = ffi.gc(handle, lib.sw_latch_free)
        self._pid = os.getpid()

    def _alive(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError("this latch belongs to the parent of this forked process")
        return self._handle

    def down(self, n: int = 1) -> None:
        """Counts down by `n`, not below zero."""
        lib.sw_latch_down(self._alive(), n)

    def open(self) -> None:
        """Counts down to zero, for what will never come that far."""
        lib.sw_latch_down(self._alive(), (1 << 64) - 1)

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until the latch is open, at most `timeout` seconds; True if it is. Others run meanwhile."""
        handle = self._alive()
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            left = WAIT_SLICE_S if deadline is None else min(WAIT_SLICE_S, max(0.0, deadline - time.monotonic()))
            if lib.sw_latch_wait(handle, round(left * 1e9)):
                return True
            if deadline is not None and time.monotonic() >= deadline:
                return False

    @property
    def left(self) -> int:
        """How many countdowns are missing; 0: it is open."""
        return int(lib.sw_latch_left(self._alive()))

    def __repr__(self) -> str:
        if os.getpid() != self._pid:
            return "<Latch of the parent process>"
        return f"<Latch, {self.left} left>" if self.left else "<Latch, open>"


class Mark:
    """A point of a device's stream, made by `DeviceEngine.mark`; jobs with it start after all that came before."""

    __slots__ = ("__weakref__", "_handle")

    def __init__(self, handle: Any) -> None:
        self._handle = ffi.gc(handle, lib.sw_event_drop)
