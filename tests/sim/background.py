"""Operations that go on to their end although whoever asked for them was cancelled, as those of a file tier do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Background:
    """Holds on to operations under way."""

    def __init__(self) -> None:
        self._background: set[asyncio.Future[Any]] = set()

    async def _wait_idle(self, timeout_s: float) -> None:
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_s)

    async def _finish(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None
    ) -> T:
        """Goes on to the end even if the caller is cancelled; `undo` then takes back what came of it."""
        task = self._keep(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if undo is not None and not task.cancelled():
                self._keep(_take_back(task, undo))
            raise

    def _keep(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._background.add(task)

        def ended(task: asyncio.Task[T]) -> None:
            self._background.discard(task)
            if not task.cancelled():
                task.exception()  # marks it as seen: a cancelled caller cannot

        task.add_done_callback(ended)
        return task


async def _take_back(task: asyncio.Task[T], undo: Callable[[T], Coroutine[Any, Any, None]]) -> None:
    try:
        made = await asyncio.shield(task)
    except Exception:  # nothing was made
        return
    await undo(made)
