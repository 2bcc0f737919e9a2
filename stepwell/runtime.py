"""The one background thread with its event loop, and what all stores of a process share.

A forked child never touches its parent's loop, engines or memory: `Runtime.get()` makes it new ones.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from stepwell.errors import StepwellError, StoreClosed, WaitTimeout
from stepwell.gpus import Gpus
from stepwell.native import AsyncEngine, Engine
from stepwell.policies.evict import LRU
from stepwell.tiers.host import Arena
from stepwell.waiting import done_within

T = TypeVar("T")

#: staging memory; some 25 ms of the fastest disk's rate, and enough that copying runs ahead of writing
STAGING_BYTES = 256 << 20
#: threads that copy and checksum; one is about as fast as a plain copy, so two keep save() short. Checksums of what
#: comes from a GPU at 50 GB/s need more, and more are of use only where there are processors to spare
COPY_THREADS, COPY_THREADS_MAX, PROCESSORS_EACH = 2, 8, 2
#: how long the exit waits for the loop to come to a stop
PARK_S = 1.0

_lock = threading.RLock()  # a signal handler may open a store while the thread that it interrupts does
_current: Runtime | None = None


def _new_lock() -> None:
    """The parent's may have been held by a thread that did not come along."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def copy_threads() -> int:
    """How many threads copy and checksum in this process."""
    return min(COPY_THREADS_MAX, max(COPY_THREADS, len(os.sched_getaffinity(0)) // PROCESSORS_EACH))


class Runtime:
    """Loop thread, copier engine and slots of this process."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._parked = False
        self._started = threading.Event()
        self._trouble: BaseException | None = None  # why it could not start
        self._staging: Arena | None = None
        self.gpus = Gpus()
        self.loop: asyncio.AbstractEventLoop
        self.copier: AsyncEngine
        self._thread = threading.Thread(target=self._main, name="stepwell-loop", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._trouble is not None:
            gc.collect()  # a loop that is half made is in cycles, with file descriptors that the next try would miss
            raise StepwellError(
                f"the background thread cannot start: {self._trouble}",
                todo="See the process's limits of open files, threads and memory (ulimit -a)",
            ) from self._trouble

    @staticmethod
    def get() -> Runtime:
        """This process's runtime, made on first use."""
        global _current
        with _lock:
            if _current is None or _current.pid != os.getpid() or _current._parked:
                _current = Runtime()
            return _current

    @staticmethod
    def park() -> None:
        """Stops this process's loop between two callbacks, for good: while the interpreter is torn down nothing of
        ours may run. A thread that logs then, say, can abort the process. Its stack stays, so nothing is collected."""
        runtime = _current
        if runtime is None or runtime.pid != os.getpid() or runtime._parked:
            return
        runtime._parked, parked = True, threading.Event()

        def wait_for_ever() -> None:
            under_way = asyncio.all_tasks()  # held here for ever: tasks that are collected complain
            parked.set()
            threading.Event().wait()
            del under_way

        runtime.loop.call_soon_threadsafe(wait_for_ever)
        parked.wait(PARK_S)

    def _main(self) -> None:
        try:
            self.loop = asyncio.new_event_loop()
        except BaseException as error:
            self._fail(error)
            self._started.set()
            return
        asyncio.set_event_loop(self.loop)
        self.loop.call_soon(self._ready)
        self.loop.run_forever()
        self.loop.close()  # it could not start

    def _ready(self) -> None:
        try:
            self.copier = AsyncEngine(Engine("copy", backend="threads", threads=copy_threads()))
        except BaseException as error:
            self._fail(error)
            self.loop.stop()
        self._started.set()

    def _fail(self, error: BaseException) -> None:
        """Kept without its frames, which refer to what is half made."""
        self._trouble = error.with_traceback(None)

    def staging(self) -> Arena:
        """Slots for what only passes through, shared by all that has no host tier of its own."""
        if self._staging is None:
            self._staging = Arena(STAGING_BYTES, LRU())
        return self._staging

    def start(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Runs `work` on the loop; from any thread, also from one that runs an event loop of its own."""
        try:
            self._check()
        except StoreClosed:
            work.close()
            raise
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def call(self, what: Callable[..., object], *given: object) -> None:
        """Calls `what` on the loop, after all that was called or started there before; nobody hears what comes of it.
        From any thread. A few calls less than `start`."""
        self._check()
        self.loop.call_soon_threadsafe(what, *given)

    def _check(self) -> None:
        if self._parked:
            raise StoreClosed(
                "the interpreter is being left", todo="Save before, or in an atexit handler that is newer"
            )
        if self.pid != os.getpid():
            raise StoreClosed(
                "this store was opened in the parent of this forked process",
                todo="Open it again here: the parent's engine cannot be shared",
            )

    def run(self, work: Coroutine[Any, Any, T], timeout: float | None = None, what: str = "the call") -> T:
        """`start` and wait. Raises WaitTimeout after `timeout` seconds (the work is then cancelled)."""
        assert threading.current_thread() is not self._thread, "would wait for itself"
        future = self.start(work)
        try:
            done = done_within(future, timeout)
        except BaseException:  # Ctrl-C, or what a signal handler raises
            future.cancel()
            raise
        if not done:
            future.cancel()
            raise WaitTimeout(f"{what} took longer than {timeout} s")
        return future.result()
