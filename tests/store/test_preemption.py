"""Preemption: the handler only notes the time, the loop asks, and the end keeps within the grace. Case F9."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
import torch

import stepwell
from stepwell import preemption
from stepwell.errors import ConfigError, StepwellError, StoreClosed, WaitTimeout
from stepwell.preemption import Preemption
from stepwell.tiers.wrap import Fault
from tests.store.helpers import ALWAYS, disk, eventually, release, state
from tests.store.scripts import ROOT

TERM = signal.SIGTERM


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.getsignal(TERM)
    yield
    assert signal.getsignal(TERM) is before  # whatever a test does, closing its stores puts it back
    assert not preemption._listening


@pytest.fixture
def store(tmp_path: Path) -> Iterator[stepwell.CheckpointStore]:
    with stepwell.open(run="run", tiers=[disk(tmp_path)]) as opened:
        yield opened


def strike(number: int = TERM) -> None:
    """The main thread's handler has run when this returns."""
    os.kill(os.getpid(), number)


# -- the handler -------------------------------------------------------------------------------------


def test_the_loop_hears_of_it_and_the_process_lives(
    store: stepwell.CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    store.handle_preemption(grace="1min")
    assert not store.preempted(1)
    strike()
    assert [store.preempted(step) for step in (2, 3)] == [True, True]
    [record] = [record for record in caplog.records if "preempted" in record.getMessage()]
    assert "run run is preempted at step 2, 5" in record.getMessage()  # seconds of the minute but 2


def test_without_a_handler_it_is_never_preempted_and_says_so_once(
    store: stepwell.CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    assert not store.preempted(1) and not store.preempted(2)
    assert sum("without handle_preemption" in record.getMessage() for record in caplog.records) == 1


def test_a_python_handler_from_before_is_called_each_time(store: stepwell.CheckpointStore) -> None:
    heard: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(TERM, mine)
    try:
        handle = store.handle_preemption()
        strike()
        strike()
        assert heard == [TERM, TERM] and store.preempted(1)
        handle.remove()
        assert signal.getsignal(TERM) is mine
    finally:
        signal.signal(TERM, before)


def test_a_handler_from_before_may_raise(store: stepwell.CheckpointStore) -> None:
    store.handle_preemption(signals=signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        strike(signal.SIGINT)
        time.sleep(5)
    assert store.preempted(1)


def test_a_signal_that_was_ignored_stays_quiet(
    store: stepwell.CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preemption, "ECHO_S", -1.0)
    before = signal.signal(TERM, signal.SIG_IGN)
    try:
        handle = store.handle_preemption()
        strike()
        strike()
        assert store.preempted(1)
        handle.remove()
        assert signal.getsignal(TERM) == signal.SIG_IGN
    finally:
        signal.signal(TERM, before)


def test_the_same_call_again_changes_nothing_and_another_one_is_refused(store: stepwell.CheckpointStore) -> None:
    handle = store.handle_preemption(grace="30s")
    installed = signal.getsignal(TERM)
    assert store.handle_preemption(grace=30) is handle and signal.getsignal(TERM) is installed
    with pytest.raises(ConfigError, match=r"handled already: .*SIGTERM, grace 30 s"):
        store.handle_preemption(grace="60s")
    handle.remove()
    handle.remove()
    assert store.handle_preemption([signal.SIGUSR1, TERM], "1min") is handle
    strike(signal.SIGUSR1)
    assert store.preempted(1) and "SIGUSR1, SIGTERM" in repr(handle)


@pytest.mark.parametrize(
    ("signals", "grace", "words"),
    [
        ((), "30s", "no signal"),
        ((12345,), "30s", "12345 is not a signal"),
        ((signal.SIGKILL,), "30s", "SIGKILL cannot be handled"),
        ((TERM,), "half", "'half' is not a time"),
        ((TERM,), 0, "out of range"),
    ],
)
def test_what_cannot_be_right_is_refused(
    store: stepwell.CheckpointStore, signals: tuple[int, ...], grace: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        store.handle_preemption(signals, grace)


def test_only_the_main_thread_may_ask_for_it_but_any_may_close(tmp_path: Path) -> None:
    store = stepwell.open(run="run", tiers=[disk(tmp_path)])
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            store.handle_preemption()
        except ConfigError as error:
            errors.append(error)

    for work in (ask, store.close):
        if work == store.close:
            store.handle_preemption()
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert len(errors) == 1 and "main thread" in str(errors[0]) and "Call handle_preemption()" in str(errors[0])
    with pytest.raises(StoreClosed):
        store.handle_preemption()
    with pytest.raises(StoreClosed):
        store.preempted(1)
    left = signal.getsignal(TERM)  # another thread cannot put it back: it only passes signals on
    assert isinstance(left, preemption._Handler) and left.before == signal.SIG_DFL
    signal.signal(TERM, signal.SIG_DFL)


def test_several_stores_share_a_handler_whichever_ends_first(tmp_path: Path) -> None:
    for first, last in ((0, 1), (1, 0)):
        stores = [stepwell.open(run=f"run{number}", tiers=[disk(tmp_path)]) for number in range(2)]
        for store in stores:
            store.handle_preemption()
        stores[first].close()
        strike()  # would end the process if nobody listened
        assert stores[last].preempted(1)
        stores[last].close()
        assert signal.getsignal(TERM) == signal.SIG_DFL


def test_a_handler_on_top_of_ours_keeps_working(store: stepwell.CheckpointStore) -> None:
    handle = store.handle_preemption()
    ours = signal.getsignal(TERM)
    assert callable(ours)
    signal.signal(TERM, lambda number, frame: ours(number, frame))
    try:
        strike()
        assert store.preempted(1)
        handle.remove()
        assert signal.getsignal(TERM) is not ours  # what is on top is not ours to take away
    finally:
        signal.signal(TERM, signal.SIG_DFL)


def test_a_store_that_is_dropped_listens_no_more(tmp_path: Path) -> None:
    store = stepwell.open(run="run", tiers=[disk(tmp_path)])
    store.handle_preemption()
    del store
    assert signal.getsignal(TERM) == signal.SIG_DFL


class Hands:
    """A clock that is set by hand."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now

    wall = monotonic

    async def sleep(self, seconds: float) -> None:
        raise AssertionError("nobody sleeps here")


def test_what_is_left_of_the_grace() -> None:
    clock = Hands()
    handle = Preemption("run", clock)
    handle.handle(TERM, "30s")
    try:
        assert handle.left_s is None
        strike()
        assert handle.left_s == 28.0  # the rest is for the end of the process
        clock.now += 40
        assert handle.left_s == -12.0
        assert not handle.note(signal.SIGUSR1) and handle.note(TERM)  # patience is lost signal by signal
    finally:
        handle.remove()
    handle = Preemption("run", clock)
    handle.handle(TERM, 2)
    strike()
    handle.remove()
    assert handle.left_s == pytest.approx(1.8)


# -- the end -----------------------------------------------------------------------------------------


def test_close_keeps_within_the_grace_and_tells_what_is_where(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    store = stepwell.open(run="run", tiers=[near, far])
    store.handle_preemption(grace="1s")
    store.save(1, state()).wait("far")
    far.plan = [Fault("write", 1, "stall", times=ALWAYS)]
    store.save(2, state()).wait("near")
    strike()
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match="step 2 on near, step 1 on far"):
        store.close()
    assert time.monotonic() - began < 20
    [said] = [r.getMessage() for r in caplog.records if "was preempted and drained" in r.getMessage()]
    assert "Newest: step 2 on near, step 1 on far. Not there: step 2 on far (" in said
    assert signal.getsignal(TERM) == signal.SIG_DFL
    release(far)


@pytest.mark.parametrize("how", ["close", "with", "drain"])
def test_a_signal_that_comes_while_the_end_is_waited_for_shortens_it(tmp_path: Path, how: str) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    store = stepwell.open(run="run", tiers=[near, far], exit_timeout=600)
    store.handle_preemption(grace="1s")
    store.save(1, state()).wait("far")
    far.plan = [Fault("write", 1, "stall", times=ALWAYS)]
    store.save(2, state()).wait("near")
    eventually(lambda: bool(far.hit))
    threading.Timer(0.1, strike).start()
    began = time.monotonic()
    if how == "close":
        with pytest.raises(WaitTimeout):
            store.close()
    elif how == "with":
        with pytest.raises(ValueError, match="mine"), store:
            raise ValueError("mine")
    else:
        assert store.drain(3).cut  # its own limit holds
        with pytest.raises(WaitTimeout):
            store.close()
    assert time.monotonic() - began < 30
    release(far)


def test_a_grace_that_is_over_leaves_only_a_moment(tmp_path: Path) -> None:
    far = disk(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)], name="far")
    store = stepwell.open(run="run", tiers=[disk(tmp_path, name="near"), far])
    store.handle_preemption(grace="1ms")
    strike()
    store.save(1, state()).wait("near")
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match="step 1 on near"):
        store.close()
    assert time.monotonic() - began < 20
    release(far)


def test_a_reader_that_is_preempted_writes_nothing(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=[disk(tmp_path, name="near")]) as store:
        store.save(1, state())
    for mode in ("r", "w"):
        with stepwell.open(
            run="run", tiers=[disk(tmp_path, name="near"), disk(tmp_path, name="far")], mode=mode
        ) as store:
            store.handle_preemption()
            strike()
            assert store.preempted(1)
    assert not (tmp_path / "far" / "run").exists()


def test_the_example_of_the_docs_runs_and_stops_at_a_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    [example] = [
        text for text in re.findall(r"^```python\n(.*?)^```", page, re.M | re.S) if "handle_preemption" in text
    ]
    monkeypatch.chdir(tmp_path)
    loop = "    optimizer.step()\n"
    assert loop in example
    striking = example.replace(loop, loop + "    if step == 7: strike()\n")
    for code, step in ((striking, 7), (example, 300)):
        exec(compile(code, "docs/api.md", "exec"), {"strike": strike})
        with stepwell.open(tmp_path / "sft", mode="r") as reader:
            assert [c.step for c in reader.checkpoints()][-1:] == [step]


def test_a_rank_that_is_gone_is_told() -> None:
    """The error of the collective becomes ours."""

    class Broken:
        def is_completed(self) -> bool:
            return True

        def wait(self) -> None:
            raise RuntimeError("connection closed by peer")

    votes = preemption._Votes.__new__(preemption._Votes)
    votes._open = (Broken(), torch.zeros(1), 0.0)  # type: ignore[assignment]
    with pytest.raises(StepwellError, match=r"cannot agree whether to stop: connection closed.*alive"):
        votes.ask(0, 1.0)
