"""Ctrl-C in every call that waits: it gets out at once, and what was begun is whole or gone."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import stepwell
from stepwell.errors import SaveFailed
from stepwell.tiers.wrap import Fault
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state, steps

#: what hangs in these tests would be waited for without end, or for minutes
PROMPT_S = 20.0


def _main_thread_waits_in(call: str) -> bool:
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    codes = [inner.f_code for inner, _ in traceback.walk_stack(frame)]
    ours = [code.co_name for code in codes if Path(code.co_filename).parent.name == "stepwell"]
    return codes[0].co_name == "wait" and call in ours


@contextmanager
def interrupted(call: str, when: Callable[[], object] = lambda: True) -> Iterator[None]:
    """Ctrl-C while the block waits in `call` and `when` is true; it must leave the block.

    Within a second, on a machine that is not busy: tests/cases/test_io.py.
    """
    struck: list[float] = []

    def strike() -> None:
        try:
            eventually(lambda: bool(when()) and _main_thread_waits_in(call))
        finally:
            struck.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=strike)
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        yield
    left = time.monotonic()
    thread.join()
    assert left - struck[0] < PROMPT_S


def test_in_wait_the_save_goes_on(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        save = store.save(2, state())
        with interrupted("wait", lambda: tier.hit):
            save.wait()
        release(tier)
        save.wait()
        assert steps(store, "disk") == [1, 2]


def test_in_save_the_checkpoint_is_given_up_and_the_step_can_be_saved_again(tmp_path: Path) -> None:
    arena, tier = host(16), disk(tmp_path)
    large = state(size=3_000_000)  # most of what may be kept
    with stepwell.open(run="run", tiers=[arena, tier]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        stuck = store.save(2, large)
        eventually(lambda: bool(tier.hit))
        with interrupted("save", lambda: arena.arena.in_use == arena.arena.kept_max):
            store.save(3, large)
        tier.plan = []
        release(tier)
        stuck.wait()
        store.save(3, large).wait()
        assert steps(store, "disk") == [1, 2, 3]
        eventually(lambda: arena.arena.in_use == 0)
        assert store.debris() == []


def test_in_the_first_save_it_is_no_failure_that_the_next_call_must_tell(tmp_path: Path) -> None:
    tier = disk(tmp_path, [Fault("reserve", 1, "stall")])
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        with interrupted("save", lambda: tier.hit):
            store.save(1, state())
        release(tier)
        store.save(1, state()).wait()
        assert steps(store, "disk") == [1]


def test_in_close_the_store_stays_open(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    store = stepwell.open(run="run", tiers=[host(), near, far])
    store.save(1, state()).wait("far")
    far.plan = [Fault("write", 1, "stall", times=ALWAYS)]
    store.save(2, state()).wait("near")
    with interrupted("close"):
        store.close()
    save = store.save(3, state())
    save.wait("near")
    release(far)
    store.close()
    assert save.done("far")


def test_in_a_with_block_that_is_left_by_ctrl_c_the_second_one_abandons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    with interrupted("wait_with_line"), stepwell.open(run="run", tiers=[host(), near, far]) as store:
        store.save(1, state()).wait("far")
        far.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        store.save(2, state()).wait("near")
        raise KeyboardInterrupt
    assert "abandoned what was under way; newest checkpoint of run run: step 2 on near, step 1 on far" in (
        capsys.readouterr().err
    )
    release(far)


def test_in_restore_it_can_be_called_again(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[tier]) as store:
        store.save(1, state(5.0)).wait()
        tier.plan = [Fault("read", 1, "stall", times=ALWAYS)]
        target = state(0.0)
        with interrupted("restore", lambda: tier.hit):
            store.restore(target)
        release(tier)
        assert store.restore(target) is not None
        assert bool((target["model"]["w"] == 5).all())


def test_in_flush(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    with stepwell.open(run="run", tiers=[near, far], policies=[]) as store:
        store.save(1, state()).wait("near")
        far.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        with interrupted("flush", lambda: far.hit):
            store.flush()
        release(far)
        store.flush()
        assert steps(store, "far") == [1]


def test_a_handler_that_saves_is_heard_in_a_save(tmp_path: Path) -> None:
    """A handler of the user's runs in the thread that waits, and may call the store."""
    arena, tier = host(16), disk(tmp_path)
    large = state(size=3_000_000)
    inner: list[stepwell.Save] = []
    with stepwell.open(run="run", tiers=[arena, tier]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        store.save(2, large)
        eventually(lambda: bool(tier.hit))

        def full() -> bool:
            return arena.arena.in_use == arena.arena.kept_max and _main_thread_waits_in("save")

        def strike() -> None:
            eventually(full)
            os.kill(os.getpid(), signal.SIGUSR1)

        def handler(*_: object) -> None:
            release(tier)
            inner.append(store.save(4, state()))

        before = signal.signal(signal.SIGUSR1, handler)
        try:
            thread = threading.Thread(target=strike)
            thread.start()
            store.save(3, large)
            thread.join()
        finally:
            signal.signal(signal.SIGUSR1, before)
        inner[0].wait()
        assert steps(store, "disk") == [1, 2, 3, 4]


def test_a_failure_after_an_interrupted_save_is_still_told(tmp_path: Path) -> None:
    tier = disk(tmp_path, [Fault("reserve", 1, "stall"), Fault("reserve", 2)])
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        with interrupted("save", lambda: tier.hit):
            store.save(1, state())
        release(tier)
        with pytest.raises(SaveFailed):
            store.save(1, state()).wait()
        with pytest.raises(SaveFailed, match="first save of this process"):
            store.save(1, state())
        store.save(1, state()).wait()
