"""Tasks that outlive whoever started them, and what tasks share: errors, a countdown."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from stepwell.tiers.base import ShardKey


class Tasks:
    """All running chunk operations of a mover."""

    def __init__(self) -> None:
        self._busy: dict[ShardKey, set[asyncio.Task[None]]] = {}

    def start(self, key: ShardKey, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._busy.setdefault(key, set()).add(task)
        task.add_done_callback(lambda done: self._ended(key, done))
        return task

    def _ended(self, key: ShardKey, task: asyncio.Task[None]) -> None:
        busy = self._busy[key]
        busy.discard(task)
        if not busy:
            del self._busy[key]

    async def settled(self, keys: Iterable[ShardKey]) -> None:
        """Returns once no operation of these shards runs."""
        wanted = list(keys)
        while tasks := [task for key in wanted for task in self._busy.get(key, ())]:
            await asyncio.wait(tasks)


class Group:
    """Operations that were started together; the first error is theirs."""

    def __init__(self, tasks: Tasks, *, stop_on_error: bool = True) -> None:
        self._tasks, self._stop_on_error = tasks, stop_on_error
        self._running: set[asyncio.Task[None]] = set()
        self._errors: list[BaseException] = []

    @property
    def failed(self) -> bool:
        """Whether no more should be started."""
        return self._stop_on_error and bool(self._errors)

    def start(self, key: ShardKey, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._tasks.start(key, work)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:
            self._errors.append(error)

    def fail(self, error: BaseException) -> None:
        """Something went wrong outside of the operations: nothing more is started."""
        self._stop_on_error = True
        self._errors.append(error)

    async def end(self) -> None:
        """Waits for all; raises the first error."""
        while self._running:
            await asyncio.wait(self._running)
        if self._errors:
            raise self._errors[0]


class Countdown:
    """Calls back once it is sealed and as many went down as went up."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done, self._open, self._sealed = done, 0, False

    def up(self, count: int = 1) -> None:
        self._open += count

    def down(self, count: int = 1) -> None:
        self._open -= count
        self._check()

    def seal(self) -> None:
        self._sealed = True
        self._check()

    def _check(self) -> None:
        if self._sealed and self._open == 0:
            self._done()


async def either(task: asyncio.Task[None], event: asyncio.Event) -> None:
    """Returns once the event is set; raises the task's error if that comes first."""
    waiting = asyncio.ensure_future(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not event.is_set():
            task.result()
    finally:
        waiting.cancel()
