"""Saves and waits where something comes between: Ctrl-C at any line, a signal handler, a fork, another thread."""

from __future__ import annotations

import asyncio
import contextlib
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import stepwell
import stepwell.store
from stepwell.errors import ConfigError, StoreClosed, WaitTimeout
from stepwell.settings import Settings
from stepwell.store import CheckpointStore
from stepwell.tiers.wrap import Fault
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state, steps
from tests.store.scripts import Scripts

pytestmark = pytest.mark.usefixtures("short_pauses")


# -- Ctrl-C at any line --------------------------------------------------------------------------

_OURS = ("store.py", "line.py", "saving.py", "runtime.py", "ending.py")


class Strike:
    """Raises KeyboardInterrupt at the nth line of ours that this thread comes to."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __enter__(self) -> Strike:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, arg: object) -> Any:
        name = Path(frame.f_code.co_filename)
        return self._line if name.parent.name == "stepwell" and name.name in _OURS else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        # at the end of a `with` there is a line once more, where no signal is looked for before the lock is let go
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
        self.left -= event == "line" and not line.startswith("with ")
        if self.left == 0:
            sys.settrace(None)
            self.left = -1
            raise KeyboardInterrupt
        return self._line


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_interrupt_at_any_line_of_save_leaves_a_store_that_saves_on(tmp_path: Path) -> None:
    arena = host()
    with CheckpointStore("run", [arena, disk(tmp_path)], "w", Settings(exit_timeout=5.0)) as store:
        store.save(1, state()).wait()
        value, nth, struck = state(2.0), 0, True
        while struck:
            nth, struck = nth + 1, False
            try:
                with Strike(nth):
                    store.save(nth + 1, value)
            except KeyboardInterrupt:
                struck = True
            value["model"]["w"].fill_(-1.0)  # must never be seen
            value = state(2.0)
            if struck:
                with contextlib.suppress(stepwell.StepExists):  # it was saved before the interrupt came
                    store.save(nth + 1, value).wait(timeout=5)
            store._saves[-1].wait(timeout=5)
            assert store.status().unsaved_seconds == 0, nth
            saved = stepwell.load(tmp_path / "disk" / f"run@{nth + 1}")["model"]["w"]
            assert bool((saved == 2).all()), nth
        assert nth > 30
        eventually(lambda: arena.arena.in_use == 0 and arena.usage().in_flight_bytes == 0)
        assert store.debris() == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_interrupt_at_any_line_of_close_leaves_a_store_that_can_be_closed(tmp_path: Path) -> None:
    nth, struck = 0, True
    while struck:
        nth, struck = nth + 1, False
        store = CheckpointStore("run", [host(), disk(tmp_path)], "w", Settings(exit_timeout=5.0))
        save = store.save(nth, state())
        try:
            with Strike(nth):
                store.close()
        except KeyboardInterrupt:
            struck = True
        store.close()
        assert save.done(), nth
        with pytest.raises(StoreClosed):
            store.save(nth + 1, state())
    assert nth > 10


# -- signal handlers -----------------------------------------------------------------------------


@contextlib.contextmanager
def handled(handler: Callable[[], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGUSR1, lambda *_: handler())
    try:
        yield
    finally:
        signal.signal(signal.SIGUSR1, before)


def strike_when(what: Callable[[], object]) -> threading.Thread:
    """Sends the signal once `what` holds."""

    def strike() -> None:
        eventually(lambda: bool(what()))
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=strike)
    thread.start()
    return thread


def main_thread_is_in(function: str) -> bool:
    frame: FrameType | None = sys._current_frames()[threading.main_thread().ident or 0]
    while frame is not None:
        if frame.f_code.co_name == function and Path(frame.f_code.co_filename).parent.name == "stepwell":
            return True
        frame = frame.f_back
    return False


def test_a_handler_closes_the_store_that_is_being_closed(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    store = stepwell.open(run="run", tiers=[host(), near, far])
    store.save(1, state()).wait("far")
    far.plan = [Fault("write", 1, "stall", times=ALWAYS)]
    save = store.save(2, state())
    save.wait("near")

    def handler() -> None:
        release(far)
        store.close()

    with handled(handler):
        thread = strike_when(lambda: far.hit and main_thread_is_in("close"))
        store.close()
        thread.join()
    assert save.done("far")


def test_a_handler_that_leaves_the_interpreter_out_of_close_leaves_the_rest_to_the_exit(
    tmp_path: Path, scripts: Scripts
) -> None:
    code = """
import os, signal, sys, threading, time
import torch, stepwell
from stepwell.runtime import Runtime
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty
os.mkdir(sys.argv[1] + "/far")
far = Faulty(FileTier(sys.argv[1] + "/far", name="far"), [])
store = stepwell.open(run="run", tiers=[far])
store.save(1, {"w": torch.zeros(9)}).wait()
far.plan = [Fault("write", 1, "stall", times=99)]
store.save(2, {"w": torch.ones(9)})
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
def strike():
    while not far.hit: time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.3, Runtime.get().loop.call_soon_threadsafe, [far.release]).start()
threading.Timer(0.2, strike).start()
store.close()
"""
    ended = scripts.run(code, tmp_path)
    assert ended.status == 0 and ended.err == "", ended.err
    assert bool((stepwell.load(tmp_path / "far" / "run@2")["w"] == 1).all())


def test_an_error_that_a_handler_raises_in_save_is_not_taken_for_block_timeout(tmp_path: Path) -> None:
    """Alarms are often made into TimeoutError."""
    arena, tier = host(16), disk(tmp_path)
    large = state(size=3_000_000)
    with stepwell.open(run="run", tiers=[arena, tier]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        save = store.save(2, large)

        def handler() -> None:
            raise TimeoutError("mine")

        with handled(handler):
            thread = strike_when(lambda: arena.arena.in_use == arena.arena.kept_max and main_thread_is_in("save"))
            with pytest.raises(TimeoutError, match="^mine$"):
                store.save(3, large)
            thread.join()
            thread = strike_when(lambda: main_thread_is_in("wait"))
            with pytest.raises(TimeoutError, match="^mine$"):
                save.wait()
            thread.join()
        release(tier)
        store.save(3, large).wait()
        assert steps(store, "disk") == [1, 2, 3]


class Restless:
    """Its state is asked for in the middle of a capture."""

    def __init__(self, then: Callable[[], object]) -> None:
        self.then = then

    def state_dict(self) -> dict[str, Any]:
        self.then()
        return {"w": torch.zeros(3)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


def test_a_save_inside_of_a_save_has_a_number_of_its_own(tmp_path: Path) -> None:
    """As a signal handler's may come, while the state is being looked through."""
    inner: list[stepwell.Save] = []
    with stepwell.open(run="run", tiers=[host(), disk(tmp_path)]) as store:
        outer = store.save(1, {"model": Restless(lambda: inner.append(store.save(5, state())))})
        outer.wait()
        inner[0].wait()
        assert outer.checkpoint == "step-000000001.1-1" and inner[0].checkpoint == "step-000000005.1-2"


# -- forks, threads, limits ----------------------------------------------------------------------


def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        save = store.save(2, state())
        pid = os.fork()
        if pid == 0:
            told = 0
            for wait in (save.wait, lambda: asyncio.run(_awaited(save))):
                try:
                    wait()
                except StoreClosed:
                    told += 1
            os._exit(told)
        release(tier)
        deadline = time.monotonic() + 20
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)
        assert os.waitstatus_to_exitcode(ended[1]) == 2
        save.wait()


async def _awaited(save: stepwell.Save) -> None:
    await save


def held(lock: Any) -> bool:
    if free := lock.acquire(blocking=False):
        lock.release()
    return not free


def test_a_second_thread_that_closes_waits_no_longer_than_it_says(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    store = stepwell.open(run="run", tiers=[host(), tier])
    store.save(1, state()).wait()
    tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
    save = store.save(2, state())
    first = threading.Thread(target=store.close)
    first.start()
    eventually(lambda: held(store.ending._lock))
    with pytest.raises(WaitTimeout, match="step 2 to disk"):
        store.close(timeout=0.1)
    release(tier)
    first.join()
    assert save.done()


def test_infinite_limits_are_as_good_as_none(tmp_path: Path) -> None:
    store = stepwell.open(run="run", tiers=[host(), disk(tmp_path)])
    store.save(1, state()).wait(timeout=float("inf"))
    assert store.restore(state(), timeout=float("inf")) is not None
    save = store.save(2, state())
    store.close(timeout=float("inf"))
    assert save.done()
    with pytest.raises(ConfigError, match=r"block_timeout=inf.*seconds above 0"):
        Settings(block_timeout=float("inf"))


def test_a_process_without_file_descriptors_is_told_so_and_may_try_again(tmp_path: Path, scripts: Scripts) -> None:
    code = """
import gc, os, resource, sys
import torch, stepwell
from stepwell.runtime import Runtime
told = 0
gc.collect()
gc.disable()  # what a try has opened must not stay open until garbage is collected
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
state = {"w": torch.zeros(9)}
lowest = os.dup(0)
os.close(lowest)
for more in range(32):  # one descriptor more each time, until it has all that it needs
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + more, hard))
    try:
        Runtime.get()
        break
    except stepwell.StepwellError as error:
        assert "limits of open files" in str(error), error
        told += 1
assert 3 <= told < 31, told
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
with stepwell.open(sys.argv[1] + "/run") as store:
    store.save(1, state)
"""
    ended = scripts.run(code, tmp_path)
    assert ended.status == 0, ended.err
    assert list(stepwell.load(tmp_path / "run")) == ["w"]
