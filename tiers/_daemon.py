"""Threads for calls that may never return.

A hung file system blocks any call on a path of it, even `close`. The standard ThreadPoolExecutor joins its
threads at exit, so one such call would keep the interpreter alive for ever; these are daemon threads that
nobody joins unless asked. Every tier has its own executor, so one hung tier delays no other.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

#: calls that may wait for a thread; a medium that lets more pile up is not answering
WAITING_MAX = 10_000


class _Work:
    """One call and the future of its result."""

    __slots__ = ("call", "future")

    def __init__(self, call: Callable[[], object], future: Future[Any]) -> None:
        self.call = call
        self.future = future

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.call()
        except BaseException as error:  # noqa: B036 - handed to whoever waits for the future
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


class DaemonExecutor(Executor):
    """At most `threads` daemon threads, started when needed.

    `submit` raises RuntimeError after `shutdown` and when `waiting_max` calls are waiting already. A forked
    child starts with fresh threads and an empty queue: calls that the parent had queued stay the parent's.
    """

    _pid = -1  # until it is made

    def __init__(self, name: str, threads: int = 4, *, waiting_max: int = WAITING_MAX) -> None:
        if threads < 1:
            raise ValueError(f"threads must be at least 1, not {threads}")
        self.name = name
        self.threads_max = threads
        self.waiting_max = waiting_max
        self._shutdown = False
        self._make_fresh()

    def _make_fresh(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()
        self._idle = threading.Semaphore(0)
        self._threads: list[threading.Thread] = []

    def __repr__(self) -> str:
        threads, waiting = len(self._threads), self._queue.qsize()
        return f"<DaemonExecutor {self.name}: {threads}/{self.threads_max} threads, {waiting} waiting>"

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs `fn` on one of the threads."""
        return self._enqueue(partial(fn, *args, **kwargs), self.waiting_max)

    def submit_always(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """As submit, however many calls are waiting: for what gives resources back."""
        return self._enqueue(partial(fn, *args, **kwargs), None)

    def _enqueue(self, call: Callable[[], T], waiting_max: int | None) -> Future[T]:
        if self._pid != os.getpid():  # the parent's threads did not come along, and its lock may be held for ever
            self._make_fresh()
        future: Future[T] = Future()
        work: _Work | None = _Work(call, future)
        with self._lock:
            if self._shutdown:
                raise RuntimeError(f"executor {self.name!r} was shut down")
            if waiting_max is not None and self._queue.qsize() >= waiting_max:
                raise RuntimeError(f"executor {self.name!r}: {waiting_max} calls are waiting for an answer")
            self._queue.put(work)
            if self._idle.acquire(blocking=False) or len(self._threads) >= self.threads_max or self._start_thread():
                return future
            work = None if self._threads else self._queue.get()
        if work is not None:
            work.run()
        return future

    def _start_thread(self) -> bool:
        """False if there can be no more: while the interpreter is being left, Python 3.12 starts none."""
        name = f"stepwell-{self.name}-{len(self._threads)}"
        thread = threading.Thread(target=_serve, args=(self._queue, self._idle), name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError:
            return False
        self._threads.append(thread)
        return True

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuses further calls; threads end once the queue is empty. Only `wait=True` waits for them."""
        if self._pid != os.getpid():
            self._make_fresh()
        with self._lock:
            self._shutdown = True
            threads = list(self._threads)
            dropped: list[_Work] = []
            while cancel_futures and not self._queue.empty():
                work = self._queue.get()
                if work is not None:
                    dropped.append(work)
            for _ in threads:
                self._queue.put(None)
        for work in dropped:
            work.future.cancel()
        if wait:
            for thread in threads:
                thread.join()

    def __del__(self) -> None:
        if self._pid == os.getpid() and not self._shutdown:
            for _ in self._threads:
                self._queue.put(None)


def _serve(queue: SimpleQueue[_Work | None], idle: threading.Semaphore) -> None:
    while True:
        work = queue.get()
        if work is None:
            return
        work.run()
        del work  # else arguments and result live until the next call
        idle.release()
