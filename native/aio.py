"""Engines under asyncio: one native call to start a batch, one wake-up for all that has ended."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from stepwell.native._engine_face import Engine
from stepwell.native._jobs import Done, Job


class AsyncEngine:
    """Binds an engine to the running event loop. Its methods are called on that loop only.

    Cancelling a future or a task that waits stops the waiting, not the job: the engine keeps the job,
    and what it keeps alive, until the job has ended. The engine stays its owner's to close, after this.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._loop = asyncio.get_running_loop()
        self._futures: dict[int, asyncio.Future[Done]] = {}  # by id of the job, which the engine keeps
        # A descriptor of our own: the loop may still watch it when the engine closes its one.
        self._fileno = os.dup(engine.fileno())
        self._loop.add_reader(self._fileno, self._wake)
        engine._listener = self._late

    def start(self, jobs: Sequence[Job]) -> list[asyncio.Future[Done]]:
        """Submits the jobs in one native call; a future for each, in order. Raises as `Engine.submit`."""
        if self._fileno < 0:
            raise RuntimeError(f"the asyncio side of {self.engine!r} is closed")
        futures = [self._loop.create_future() for _ in jobs]
        for job, future in zip(jobs, futures, strict=True):
            if self._futures.setdefault(id(job), future) is not future:
                self._forget(jobs, futures)
                raise ValueError(f"this job is in flight already: {job}")
        try:
            self.engine.submit(jobs)
        except BaseException:
            self._forget(jobs, futures)
            raise
        return futures

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        """Runs the jobs and returns what became of each, in order. Never raises for a failed job."""
        futures = self.start(jobs)
        if futures:
            await asyncio.wait(futures)  # unlike gather: cancelling us leaves the futures alone
        return [future.result() for future in futures]

    def close(self) -> None:
        """Stops watching the engine; futures still pending are cancelled. Idempotent."""
        if self._fileno < 0:
            return
        self._loop.remove_reader(self._fileno)
        os.close(self._fileno)
        self._fileno = -1
        self.engine._listener = None
        for future in self._futures.values():
            future.cancel()
        self._futures.clear()

    def _forget(self, jobs: Sequence[Job], futures: Sequence[asyncio.Future[Done]]) -> None:
        for job, future in zip(jobs, futures, strict=True):
            if self._futures.get(id(job)) is future:
                del self._futures[id(job)]

    def _wake(self) -> None:
        try:
            dones = self.engine.reap()
        except RuntimeError:
            if self.engine.closed:  # since the loop saw the descriptor, by another thread: see `_late`
                return
            raise
        self._settle(dones)

    def _settle(self, dones: Sequence[Done]) -> None:
        for done in dones:
            future = self._futures.pop(id(done.job), None)
            if future is not None and not future.done():
                future.set_result(done)

    def _late(self, dones: list[Done]) -> None:
        """The engine was closed under us, perhaps by another thread: these are the last results."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._settle, dones)
