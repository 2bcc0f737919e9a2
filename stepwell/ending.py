"""How stores end: closed, dropped, or left open when the interpreter exits; and how much time there is for it.

Nothing here waits without a limit, and a preemption that is heard before or meanwhile shortens every limit to what is
left of its grace. Nothing handles Ctrl-C: it raises KeyboardInterrupt where it always does. During the wait at exit it
means "abandon": what is newest where is said then. No thread is started at exit, because Python 3.12 refuses to: all
that has to be done runs on the loop's thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from stepwell.chain import Chain
from stepwell.draining import Drainer
from stepwell.errors import StepwellError, WaitTimeout
from stepwell.jobs import current_job
from stepwell.preemption import Preemption
from stepwell.runtime import Runtime
from stepwell.saving import Save
from stepwell.settings import LONGEST_S
from stepwell.units import format_duration
from stepwell.waiting import done_within
from stepwell.writer import RunWriter

if TYPE_CHECKING:
    from stepwell.store import CheckpointStore

log = logging.getLogger("stepwell")

#: what background work, such as deletes, gets before the tiers are closed: after all was written, or given up
PATIENCE_S, HURRY_S = 3.0, 0.5
#: how long closing waits for tiers after that; leaving the interpreter does not wait long for one that hangs
STOP_S, LEAVE_S = 10.0, 2.0
#: of a short limit, the part that is kept for it
LEAVE_SHARE = 0.1
#: what a preemption leaves for the end at least, however late it is
LEAST_S = 0.5
#: on top of what the loop was given: an answer that does not come then never comes
_GRACE_S = 1.0
#: between two looks, and before the first line is printed
_LOOK_S, _QUIET_S = 0.2, 1.0

open_stores: weakref.WeakSet[CheckpointStore] = weakref.WeakSet()
_dropped: dict[concurrent.futures.Future[None], Ending] = {}  # of stores that nobody holds any more
_opened: dict[str, int] = {}  # run -> stores of it that this process has opened


def _forget_parent() -> None:
    """What the parent of a forked process has open is the parent's to end."""
    open_stores.clear()
    _dropped.clear()


os.register_at_fork(after_in_child=_forget_parent)


def count_open(run: str) -> int:
    """How many stores of this run the process has opened before; the same number on every rank."""
    number = _opened.get(run, 0)
    _opened[run] = number + 1
    return number


class Ending:
    """How one store ends. Any thread."""

    def __init__(
        self, runtime: Runtime, chain: Chain, writer: RunWriter, exit_timeout_s: float, *, writes: bool = True
    ) -> None:
        self.run, self._writes = chain.run, writes
        self._runtime, self._chain, self._writer = runtime, chain, writer
        self.exit_timeout_s = exit_timeout_s
        self.closed = False
        self.preemption = Preemption(chain.run, chain.clock)
        self.drainer = Drainer(chain, writer)
        self.newest: Save | None = None  # the newest save; its error is the store's when it ends
        self._lock = threading.RLock()  # a signal handler may close the store while it is being closed

    def within(self, limit_s: float) -> float:
        """A limit in seconds, or what a preemption has left of it."""
        left_s = self.preemption.left_s
        return limit_s if left_s is None else min(limit_s, max(LEAST_S, left_s))

    def close(self, limit_s: float) -> None:
        """Waits until all saves are on every tier that they go to, then frees everything.

        Raises what the newest save failed with: SaveFailed, or WaitTimeout if it is not there in time.
        After a KeyboardInterrupt, or what a signal handler raises, the store is still open: leaving the interpreter
        waits for it again.
        """
        limit_s = self.within(min(limit_s, LONGEST_S))
        if not self._lock.acquire(timeout=max(0.0, limit_s)):
            raise self._late(limit_s)  # another thread is at it, with a limit of its own
        try:
            if not self.closed:
                self._close(limit_s)
        finally:
            if self.closed:
                self.preemption.remove()
            self._lock.release()

    def _close(self, limit_s: float) -> None:
        finishing = self._runtime.start(self._finish(limit_s))
        try:
            done_within(finishing, limit_s + _GRACE_S)
        except BaseException:
            finishing.cancel()
            raise
        if self.closed:  # by a signal handler, meanwhile
            return
        if not finishing.done():
            finishing.cancel()
            self._stop(HURRY_S, LEAVE_S)
            raise self._late(limit_s)
        if (error := finishing.exception()) is not None:
            self._stop(HURRY_S, LEAVE_S)
            raise error
        self._stop(*self._patience())

    def _patience(self) -> tuple[float, float]:
        """(for background work, for the tiers) once all is finished."""
        return (PATIENCE_S, STOP_S) if self.preemption.left_s is None else (HURRY_S, LEAVE_S)

    def close_after_error(self) -> None:
        """As `close`, while an error is under way that matters more: raises nothing. Ctrl-C abandons."""
        if self.closed:
            return
        finishing = self._runtime.start(self._finish(self.exit_timeout_s))
        try:
            wait_with_line({finishing: self.run}, self.exit_timeout_s + _GRACE_S)
            self.tell(finishing)
            finished = finishing.done() and not finishing.exception()
            self._stop(*(self._patience() if finished else (HURRY_S, LEAVE_S)))
        except KeyboardInterrupt:
            self.abandon()
        self.preemption.remove()

    def leave(self) -> concurrent.futures.Future[None]:
        """Starts to close, for the exit to wait for."""
        self.closed = True

        async def end() -> None:
            try:
                await self._finish(self.exit_timeout_s)
            except BaseException:
                await asyncio.wait([asyncio.ensure_future(self._free(HURRY_S))], timeout=LEAVE_S)
                raise
            await self._free(self._patience()[0])

        return self._runtime.start(end())

    def abandon(self) -> None:
        """Gives up what is under way, and says where the newest copy is. Quick: somebody has pressed Ctrl-C."""
        write_line(f"\r\x1b[Kstepwell: abandoned what was under way; {self.newest_words()}\n")
        with contextlib.suppress(KeyboardInterrupt, StepwellError):
            self._stop(0.0, LEAVE_S)

    def drop(self) -> None:
        """Lets the loop finish a store that nobody holds any more; the exit waits for it."""

        async def end() -> None:
            try:
                await self._writer.finish()
                if self.newest is not None:
                    await self.newest.wait_everywhere()
            except Exception as error:
                log.error("the newest save of a store that was dropped is not everywhere: %s", error)
            await self._free(PATIENCE_S)

        if self.closed or sys.is_finalizing():
            return
        self.closed = True
        self.preemption.remove()
        with contextlib.suppress(StepwellError, RuntimeError):
            closing = self._runtime.start(end())
            _dropped[closing] = self
            closing.add_done_callback(lambda done: _dropped.pop(done, None))

    async def _finish(self, limit_s: float) -> None:
        until = time.monotonic() + _to_wait(limit_s)
        finishing = asyncio.ensure_future(self._everywhere())
        finishing.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if nobody waits any more
        try:
            while not finishing.done():
                left_s = max(0.0, until - time.monotonic())
                if self.preemption.left_s is not None:
                    return await self._get_down(left_s)
                await asyncio.wait([finishing], timeout=min(left_s, _LOOK_S) if self.preemption.listening else left_s)
                if not finishing.done() and not left_s:
                    raise self._late(limit_s)
            finishing.result()
        finally:
            finishing.cancel()

    async def _everywhere(self) -> None:
        if self._left() and current_job().world == 1:
            await self._take_over()
        await self._writer.finish()
        if self.newest is not None:
            await self.newest.wait_everywhere()

    def _left(self) -> bool:
        """Whether this store, which has not saved, has found that memory that outlives processes has the newest
        checkpoint, and nothing else has: it would end with this node."""
        return self._writes and not self._writer.owner.taken and self._writer.memory.newest() is not None

    async def _take_over(self) -> None:
        """So that what an earlier process left gets down. If that cannot be, it stays where it is."""
        try:
            await self._writer.owner.take(current_job())
        except StepwellError as error:
            log.warning("what only memory has of run %s stays there: %s", self.run, error)
            return
        if (newest := self._writer.memory.newest()) is not None:
            self._writer.flushers[self._chain.first.info.name].want_alone(newest)

    async def _get_down(self, limit_s: float) -> None:
        """As `_finish`, after a preemption: what matters most first, and what did not make it is said."""
        if self.newest is None and not self._writer.owner.taken and not self._left():
            return  # it has only read
        limit_s = min(limit_s, _to_wait(self.within(LONGEST_S)))
        report = await self.drainer.run(limit_s, current_job())
        log.log(logging.WARNING if report.cut else logging.INFO, "run %s was preempted and %s", self.run, report)
        if self.newest is not None:
            if not self.newest.settled:
                raise self._late(limit_s)
            await self.newest.wait_everywhere()

    def _late(self, limit_s: float) -> WaitTimeout:
        what = self._writer.under_way() or "background work"
        return WaitTimeout(
            f"not finished within {format_duration(limit_s)}: {what}; {self.newest_words()}",
            todo="The next store that opens this run goes on from there",
            run=self.run,
        )

    def _stop(self, patience_s: float, limit_s: float) -> None:
        freeing = self._runtime.start(self._free(patience_s))
        self.closed = True  # not before: Ctrl-C may come at any line
        concurrent.futures.wait([freeing], limit_s)

    async def _free(self, patience_s: float) -> None:
        """Gives up what is not finished; background work, such as deletes, gets some patience."""
        await self._writer.close(patience_s)
        if self._chain.sharing is not None:
            await self._chain.sharing.close()
        await asyncio.gather(*(tier.close() for tier in self._chain.tiers), return_exceptions=True)

    def newest_words(self) -> str:
        """Where the newest copy is, in words, as far as is known without asking any tier."""
        lost = {tier.info.name for tier in self._chain.tiers if tier.info.survives == "nothing"}
        newest = {tier: step for tier, step in self._chain.catalog.newest_steps().items() if tier not in lost}
        if not newest:
            return f"run {self.run} has no checkpoint that outlives this process"
        return f"newest checkpoint of run {self.run}: " + ", ".join(f"step {s} on {t}" for t, s in newest.items())

    def tell(self, left: concurrent.futures.Future[None]) -> None:
        """Says what could not be finished, if anything."""
        error = left.exception(0) if left.done() and not left.cancelled() else self._late(self.exit_timeout_s)
        if error is not None:
            words = "" if isinstance(error, WaitTimeout) else f"; {self.newest_words()}"
            log.error("leaving run %s unfinished: %s%s", self.run, error, words)


def _to_wait(limit_s: float) -> float:
    """Of a limit, all but the last part: that is for letting go of a tier that hangs, so that the limit holds."""
    return limit_s - min(LEAVE_S, LEAVE_SHARE * limit_s)


# -- leaving the interpreter ---------------------------------------------------------------


@atexit.register
def _at_exit() -> None:
    """The newest save of a script that just ends still becomes durable."""
    ends: dict[concurrent.futures.Future[None], Ending] = {}
    with _no_noise():
        try:
            endings = [store.ending for store in list(open_stores) if not store.ending.closed]
            for closing, ending in list(_dropped.items()):
                closing.cancel()  # it has no limit
                endings.append(ending)
            for ending in endings:
                ends[ending.leave()] = ending
            names = {future: ending.run for future, ending in ends.items()}
            wait_with_line(names, max((ending.exit_timeout_s for ending in ends.values()), default=0.0) + 2 * LEAVE_S)
            for future, ending in ends.items():
                ending.tell(future)
        except KeyboardInterrupt:
            for ending in ends.values():
                ending.abandon()
        Runtime.park()


@contextlib.contextmanager
def _no_noise() -> Iterator[None]:
    """At exit a log handler's stream may be closed already: that is no news."""
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        yield
    finally:
        logging.raiseExceptions = before


def write_line(text: str) -> None:
    """To stderr, if there is still one."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()


def _on_terminal() -> bool:
    with contextlib.suppress(OSError, ValueError, AttributeError):
        return sys.stderr.isatty()
    return False


def wait_with_line(names: Mapping[concurrent.futures.Future[None], str], limit_s: float) -> None:
    """Waits until all are done, at most `limit_s`, with one progress line on a terminal if it takes a while.

    Their errors stay theirs; KeyboardInterrupt comes through at once.
    """
    began, shown = time.monotonic(), False
    try:
        while rest := {future: name for future, name in names.items() if not future.done()}:
            waited = time.monotonic() - began
            if waited > limit_s:
                return
            if waited > _QUIET_S and _on_terminal():
                shown = True
                left = format_duration(round(max(0.0, limit_s - waited)))
                write_line(
                    f"\r\x1b[Kstepwell: writing the newest checkpoint of {', '.join(rest.values())}, {waited:.0f} s "
                    f"(gives up in {left}; Ctrl-C abandons)"
                )
            concurrent.futures.wait(rest, timeout=_LOOK_S, return_when=concurrent.futures.FIRST_COMPLETED)
    finally:
        if shown:
            write_line("\r\x1b[K")
