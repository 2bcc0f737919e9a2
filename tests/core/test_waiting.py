"""Waits of the user's thread: signals that come just before it falls asleep."""

from __future__ import annotations

import concurrent.futures
import signal
import threading
import time
from typing import Any

import pytest

from stepwell import waiting


def test_a_signal_that_comes_just_before_the_sleep_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread takes it, so that the sleep itself is not interrupted."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    taken = threading.Event()

    def take() -> None:
        signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
        taken.set()

    wait = concurrent.futures.wait

    def strike_first(*arguments: Any) -> Any:
        if not taken.is_set():
            threading.Thread(target=take).start()
        return wait(*arguments)

    def handler(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures, "wait", strike_first)
    before = signal.signal(signal.SIGUSR1, handler)
    began = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            waiting.done_within(future, 60)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert taken.is_set() and time.monotonic() - began < 30


def test_it_tells_whether_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "SLEEP_S", 0.01)
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    assert not waiting.done_within(future, 0.05)
    assert not waiting.done_within(future, -1)
    threading.Timer(0.1, future.set_result, [None]).start()
    assert waiting.done_within(future, None)
    assert waiting.done_within(future, 0)
