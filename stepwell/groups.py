"""Tasks that outlive whoever started them, and what tasks share: errors, room, a countdown."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager
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


class Room:
    """So much that is promised to work that must hold all of its share to come to an end, first come, first served."""

    def __init__(self, size: Callable[[], int]) -> None:
        """size: asked each time; one who wants more than that alone gets it once nobody else has any."""
        self._size, self._taken = size, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def held(self, share: int) -> AsyncIterator[None]:
        """Waits until there is so much beside what others hold."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((share, turn))
        self._serve()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._taken -= share
            else:
                self._waiting.remove((share, turn))
            self._serve()

    def _serve(self) -> None:
        while self._waiting and (not self._taken or self._taken + self._waiting[0][0] <= self._size()):
            share, turn = self._waiting[0]
            if turn.cancelled():
                return  # who waited there takes itself out
            self._waiting.popleft()
            self._taken += share
            turn.set_result(None)


class Countdown:
    """Calls back once it is sealed and as many went down as went up."""

    def __init__(self, done: Callable[[], None]) -> None:
        self._done, self._open, self._sealed = done, 0, False

    def up(self) -> None:
        self._open += 1

    def down(self) -> None:
        self._open -= 1
        self._check()

    def seal(self) -> None:
        self._sealed = True
        self._check()

    def _check(self) -> None:
        if self._sealed and self._open == 0:
            self._done()
