"""A tier's calls on its path: off the loop, to their end, and never in the way of exit."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeAlias, TypeVar

from stepwell.errors import TierUnavailable
from stepwell.tiers._daemon import DaemonExecutor
from stepwell.tiers.base import not_open

P = ParamSpec("P")
T = TypeVar("T")
Work: TypeAlias = Coroutine[Any, Any, T]

#: threads for path calls: one may hang in a slow call while the others go on
PATH_THREADS = 4


class _PathExecutor(DaemonExecutor):
    """Refuses in the words of the tier: aiofiles submits here, too."""

    def __init__(self, name: str, root: str) -> None:
        super().__init__(name, PATH_THREADS)
        self._root = root

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            raise TierUnavailable(f"Tier {self.name} does not answer: {error}", path=self._root) from error


class PathCalls:
    """Runs blocking calls on the tier's own daemon threads.

    `finish` is for whatever makes something (a descriptor, a file): it runs to its end even if the caller is
    cancelled, so nothing is left half done, and the caller still returns at once.
    """

    def __init__(self, name: str, root: str) -> None:
        self.name = name
        self.root = root
        self.executor = _PathExecutor(name, root)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closes: set[Future[None]] = set()
        self._closed = False

    async def call(self, call: Callable[..., T], *args: object) -> T:
        """One blocking call; OSError comes through as it is."""
        return await asyncio.wrap_future(self.executor.submit(call, *args))

    async def finish(self, work: Work[T], undo: Callable[[T], Work[None]] | None = None) -> T:
        """Runs `work` to its end; if the caller was cancelled meanwhile, `undo` takes back what came of it."""
        if self._closed:
            work.close()
            raise not_open(self.name, "closed", path=self.root)
        task = asyncio.ensure_future(work)
        self._keep(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if undo is not None and not task.cancelled():
                self._keep(asyncio.ensure_future(_take_back(task, undo)))
            raise

    def _keep(self, task: asyncio.Task[Any]) -> None:
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # marks it as seen: the cancelled caller cannot

    def close_later(self, fd: int) -> None:
        """Closes a descriptor on the tier's threads; only `close` waits for it."""
        try:
            future = self.executor.submit_always(os.close, fd)
        except RuntimeError:  # a call that hung has returned after the tier was closed
            threading.Thread(target=os.close, args=(fd,), daemon=True).start()
            return
        self._closes.add(future)
        future.add_done_callback(self._closes.discard)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Refuses further `finish` and waits a moment for those under way; False if some still hang."""
        self._closed = True
        return not self._tasks or not (await asyncio.wait(self._tasks, timeout=timeout_s))[1]

    async def close(self, timeout_s: float) -> None:
        """Waits a moment for descriptors being closed; what hangs is left to its daemon thread."""
        closes = [asyncio.wrap_future(future) for future in list(self._closes)]
        if closes:
            await asyncio.wait(closes, timeout=timeout_s)
        self.executor.shutdown(wait=False)


async def _take_back(task: asyncio.Task[T], undo: Callable[[T], Work[None]]) -> None:
    try:
        made = await asyncio.shield(task)
    except Exception:  # nothing was made
        return
    await undo(made)


async def settle(futures: list[asyncio.Future[T]]) -> list[T | None]:
    """All results; None where the engine gave up. A cancellation of the caller is passed on only when all
    are done: they work on the caller's memory."""
    cancelled: asyncio.CancelledError | None = None
    while any(not future.done() for future in futures):
        try:
            await asyncio.wait(futures)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    return [None if future.cancelled() else future.result() for future in futures]


class Locks:
    """One lock a key, there as long as somebody uses it."""

    def __init__(self) -> None:
        self._locks: dict[Hashable, tuple[asyncio.Lock, int]] = {}

    @contextlib.asynccontextmanager
    async def hold(self, key: Hashable) -> AsyncIterator[None]:
        lock, users = self._locks.get(key, (None, 0))
        lock = lock or asyncio.Lock()
        self._locks[key] = lock, users + 1
        try:
            async with lock:
                yield
        finally:
            users = self._locks[key][1] - 1
            if users:
                self._locks[key] = lock, users
            else:
                del self._locks[key]
