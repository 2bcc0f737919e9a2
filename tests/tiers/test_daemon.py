"""Daemon threads: bounded, never in the way of exit, alive again after a fork."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from stepwell.tiers._daemon import DaemonExecutor


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """Calls that wait for it end with the test."""
    event = threading.Event()
    yield event
    event.set()


def hang(started: threading.Event, gate: threading.Event) -> None:
    started.set()
    gate.wait()


def test_results_and_errors_reach_the_future() -> None:
    executor = DaemonExecutor("t", 2)
    assert executor.submit(divmod, 7, 2).result() == (3, 1)
    assert list(executor.map(abs, [-1, -2])) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        executor.submit(divmod, 1, 0).result()
    executor.shutdown()


def test_threads_are_daemons_bounded_and_reused(gate: threading.Event) -> None:
    executor = DaemonExecutor("t", 2)
    for _ in range(5):
        executor.submit(int).result()
    assert len(executor._threads) <= 2
    futures = [executor.submit(gate.wait) for _ in range(6)]
    assert len(executor._threads) == 2 and all(thread.daemon for thread in executor._threads)
    assert "2/2 threads" in repr(executor)
    gate.set()
    assert all(future.result() for future in futures)
    executor.shutdown()


def test_a_pile_of_waiting_calls_is_refused(gate: threading.Event) -> None:
    started = threading.Event()
    executor = DaemonExecutor("t", 1, waiting_max=2)
    executor.submit(hang, started, gate)
    assert started.wait(10)
    executor.submit(int)
    executor.submit(int)
    with pytest.raises(RuntimeError, match="waiting"):
        executor.submit(int)


def test_after_shutdown_it_refuses_and_ends_what_was_queued(gate: threading.Event) -> None:
    executor = DaemonExecutor("t", 1)
    executor.submit(gate.wait)
    queued = executor.submit(lambda: "ran")
    executor.shutdown(wait=False)
    with pytest.raises(RuntimeError, match="shut down"):
        executor.submit(int)
    gate.set()
    assert queued.result(10) == "ran"
    executor.shutdown()
    assert not any(thread.is_alive() for thread in executor._threads)


def test_shutdown_can_cancel_what_waits(gate: threading.Event) -> None:
    started = threading.Event()
    executor = DaemonExecutor("t", 1)
    running = executor.submit(hang, started, gate)
    assert started.wait(10)
    queued = executor.submit(int)
    executor.shutdown(wait=False, cancel_futures=True)
    assert queued.cancelled() and not running.done()


def test_a_cancelled_call_is_not_made(gate: threading.Event) -> None:
    executor = DaemonExecutor("t", 1)
    executor.submit(gate.wait)
    made: list[int] = []
    future = executor.submit(made.append, 1)
    assert future.cancel()
    gate.set()
    executor.submit(int).result(10)
    assert made == []
    executor.shutdown()


def test_threads_end_with_the_executor() -> None:
    executor = DaemonExecutor("t", 1)
    executor.submit(int).result()
    [thread] = executor._threads
    del executor
    thread.join(10)
    assert not thread.is_alive()


def test_at_least_one_thread() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        DaemonExecutor("t", 0)


def run_alone(script: str) -> int:
    """Runs a script in a process of its own, where `DaemonExecutor` is all there is; its exit code."""
    script = (
        'import os, runpy, sys, threading\nDaemonExecutor = runpy.run_path(sys.argv[1])["DaemonExecutor"]\n' + script
    )
    return subprocess.run([sys.executable, "-c", script, inspect.getfile(DaemonExecutor)], timeout=60).returncode


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_threads_of_its_own() -> None:
    script = """
started = threading.Event()
executor = DaemonExecutor("forked", 1)
executor.submit(lambda: (started.set(), threading.Event().wait()))
started.wait()
executor.submit(print, "the parent's")
child = os.fork()
if child == 0:
    os._exit(executor.submit(lambda: 42).result(10))
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert run_alone(script) == 42


def test_a_hung_call_does_not_delay_exit() -> None:
    script = """
started = threading.Event()
executor = DaemonExecutor("hung", 1)
executor.submit(lambda: (started.set(), threading.Event().wait()))
started.wait()
executor.submit(int)
"""
    assert run_alone(script) == 0


def test_calls_are_still_made_when_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    """Python 3.12 starts none while the interpreter is being left."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    started = DaemonExecutor("started", 2)
    started.submit(gate.wait)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    fresh = DaemonExecutor("fresh", 2)
    assert fresh.submit(lambda: threading.current_thread()).result(0) is threading.current_thread()
    waiting = started.submit(lambda: threading.current_thread())
    assert not waiting.done()  # for the one thread that there is
    gate.set()
    assert waiting.result(10) is not threading.current_thread()
    started.shutdown()
