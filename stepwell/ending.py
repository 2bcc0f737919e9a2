"""How stores end: closed, dropped, or left open when the interpreter exits.

Nothing here waits without a limit, and nothing installs a signal handler: Ctrl-C raises KeyboardInterrupt
where it always does. During the wait at exit it means "abandon": what is newest where is said then.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import logging
import os
import sys
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from stepwell.errors import SaveFailed, StepwellError, WaitTimeout
from stepwell.runtime import Runtime
from stepwell.saving import Save
from stepwell.tiers.base import Tier
from stepwell.writer import RunWriter

if TYPE_CHECKING:
    from stepwell.store import CheckpointStore

log = logging.getLogger("stepwell")

#: how long closing waits for tiers after everything has been written or given up
STOP_S = 30.0
#: what background work, such as deletes, gets before the tiers are closed
PATIENCE_S = 3.0
#: between two looks, and before the first line is printed
_LOOK_S, _QUIET_S = 0.2, 1.0

open_stores: weakref.WeakSet[CheckpointStore] = weakref.WeakSet()
_closing: set[concurrent.futures.Future[None]] = set()  # of stores that were dropped
_opened: dict[str, int] = {}  # run -> stores of it that this process has opened


def count_open(run: str) -> int:
    """How many stores of this run the process has opened before; the same number on every rank."""
    number = _opened.get(run, 0)
    _opened[run] = number + 1
    return number


async def stop(writer: RunWriter, tiers: Sequence[Tier]) -> None:
    """Gives up what is not finished and frees everything."""
    await writer.close(PATIENCE_S)
    await asyncio.gather(*(tier.close() for tier in tiers), return_exceptions=True)


def finish(runtime: Runtime, writer: RunWriter, saves: Sequence[Save], limit_s: float) -> None:
    """Waits until all saves are on every tier they go to. Raises for the newest one."""
    deadline = time.monotonic() + limit_s
    finishing = runtime.start(writer.finish())
    try:
        finishing.result(limit_s)
    except concurrent.futures.TimeoutError:
        if finishing.done():
            raise
        finishing.cancel()
    except BaseException:
        finishing.cancel()
        raise
    if saves:
        newest = saves[-1]
        left = max(0.0, deadline - time.monotonic())
        newest.wait_all(min(left, _LOOK_S) if finishing.cancelled() else left)


def leave_behind(runtime: Runtime, writer: RunWriter, tiers: Sequence[Tier]) -> None:
    """Lets the loop finish a store that nobody holds any more; the exit waits for it."""

    async def end() -> None:
        await writer.finish()
        await stop(writer, tiers)

    try:
        closing = runtime.start(end())
    except (StepwellError, RuntimeError):
        return
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)


@atexit.register
def _at_exit() -> None:
    """The newest save of a script that just ends still becomes durable."""
    stores = [store for store in open_stores if store._pid == os.getpid()]
    if not stores and not _closing:
        return
    limit = max((store.exit_timeout for store in stores), default=60.0)
    deadline = time.monotonic() + limit
    line = _Line()
    try:
        for future in list(_closing):
            line.wait(future, deadline, "a dropped store")
        for store in stores:
            _close(store, deadline, line)
    except KeyboardInterrupt:
        line.clear()
        for store in stores:
            sys.stderr.write(f"stepwell: abandoned; {store.newest_words()}\n")
    finally:
        line.clear()


def _close(store: CheckpointStore, deadline: float, line: _Line) -> None:
    closing: concurrent.futures.Future[None] = concurrent.futures.Future()

    def close() -> None:
        try:
            store.close(max(1.0, deadline - time.monotonic()))
            closing.set_result(None)
        except BaseException as error:
            closing.set_exception(error)

    import threading

    threading.Thread(target=close, name="stepwell-exit", daemon=True).start()
    try:
        line.wait(closing, deadline + STOP_S, f"run {store.run}")
    except (SaveFailed, WaitTimeout, StepwellError) as error:  # every other store still gets its turn
        line.clear()
        log.error("leaving with a save unfinished: %s; %s", error, store.newest_words())


class _Line:
    """One progress line on stderr, only on a terminal and only if it takes a while."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._shown = False

    def wait(self, future: concurrent.futures.Future[None], deadline: float, what: str) -> None:
        """Waits for `future`; KeyboardInterrupt comes through at once."""
        while True:
            try:
                future.result(_LOOK_S)
                return
            except concurrent.futures.TimeoutError:
                if future.done():
                    raise
            now = time.monotonic()
            if now > deadline:
                log.error("leaving %s unfinished: it took longer than exit_timeout", what)
                return
            if now - self._began > _QUIET_S and sys.stderr is not None and sys.stderr.isatty():
                left = max(0.0, deadline - now)
                sys.stderr.write(
                    f"\rstepwell: {what}: writing the newest checkpoint, {now - self._began:.0f} s "
                    f"(gives up in {left:.0f} s; Ctrl-C abandons) "
                )
                sys.stderr.flush()
                self._shown = True

    def clear(self) -> None:
        if self._shown:
            sys.stderr.write("\r\x1b[K")
            self._shown = False
