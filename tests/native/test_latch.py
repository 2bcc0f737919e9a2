"""Latches: counted down once by each job, whatever becomes of it; waited for by any thread."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest

from stepwell.native import DeviceEngine, Done, Engine, Job, Latch, Op, PieceMap, Region, Ticket
from tests.fakecuda import FakeCuda

Run = Callable[[Engine, list[Job]], list[Done]]
Wait = Callable[[Engine, int], list[Done]]
WAIT_S = 60.0


def test_counting() -> None:
    latch = Latch(3)
    assert repr(latch) == "<Latch, 3 left>" and not latch.wait(0)
    latch.down()
    assert latch.left == 2 and not latch.wait(0.001)
    latch.down(2)
    assert latch.left == 0 and latch.wait() and latch.wait(0)
    latch.down(5)  # not below zero
    assert latch.left == 0 and repr(latch) == "<Latch, open>"
    assert Latch(0).wait(0)
    with pytest.raises(ValueError, match="-1"):
        Latch(-1)


def test_opening_wakes_all_who_wait() -> None:
    latch = Latch(1 << 40)
    answers: list[bool] = []
    threads = [threading.Thread(target=lambda: answers.append(latch.wait(WAIT_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    latch.open()
    for thread in threads:
        thread.join()
    assert answers == [True] * 4


def test_a_wait_can_be_interrupted() -> None:
    class Stop(Exception):
        pass

    def handler(number: int, frame: object) -> None:
        raise Stop

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    started = time.monotonic()
    try:
        with pytest.raises(Stop):
            Latch(1).wait(WAIT_S)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert time.monotonic() - started < WAIT_S / 2


def test_each_end_of_a_job_counts_once(copier: Engine, run: Run, wait: Wait, region: Region) -> None:
    """Done, failed, cancelled; one job for two latches, and one latch that a job names twice."""
    shard = PieceMap(np.array([0, 10]), np.array([region.address]))
    one, two, begin = Latch(10), Latch(10), Ticket()
    good = Job(Op.GATHER, address=region.address + 4096, length=10, pieces=shard, latches=[one, two])
    bad = Job(Op.READ, -1, region.address, 0, 10, latches=[one, one])
    assert [done.result for done in run(copier, [good, bad])] == [10, -errno.EBADF]
    assert (one.left, two.left) == (7, 9)
    copier.submit([Job(Op.SCATTER, after=begin, latches=(one,)), Job(Op.SCATTER, after=begin, latches=(two,))])
    assert (one.left, two.left) == (7, 9)
    begin.fire(False)
    assert [done.result for done in wait(copier, 2)] == [-errno.ECANCELED] * 2
    assert (one.left, two.left) == (6, 8)


def test_latches_count_before_their_job_is_reaped(copier: Engine, region: Region) -> None:
    """Whoever waits for the latch needs no event loop: nobody reaps here."""
    latch = Latch(100)
    copier.submit([Job(Op.SCATTER, latches=(latch,)) for _ in range(100)])
    assert latch.wait(WAIT_S)
    while len(copier.reap()) < 1:
        pass


def test_a_refused_submit_counts_nothing(copier: Engine, region: Region) -> None:
    latch = Latch(2)
    with pytest.raises(ValueError):
        copier.submit([Job(Op.SCATTER, latches=[latch]), Job(Op.GATHER, latches=[latch])])
    assert latch.left == 2


def test_closing_counts_down_what_it_cancels(backend: str) -> None:
    latch, never = Latch(3), Ticket()
    engine = Engine("closes", backend=backend)  # type: ignore[arg-type]
    engine.submit([Job(Op.SYNC, -1, after=never, latches=[latch]) for _ in range(3)])
    assert latch.left == 3
    assert engine.close() and latch.left == 0


def test_a_latch_is_kept_until_its_job_is_reaped(copier: Engine, wait: Wait) -> None:
    begin = Ticket()
    copier.submit([Job(Op.SCATTER, after=begin, latches=[Latch(1)])])
    gc.collect()
    begin.fire()
    assert wait(copier, 1)[0].job.latches[0].left == 0


def test_fetches_count_when_issued_and_only_once(
    make_device: Callable[..., DeviceEngine], fake: FakeCuda, wait: Wait, region: Region
) -> None:
    """A fetch under way has counted; what came after it and cannot be issued any more counts as cancelled."""
    gpu = make_device(depth=1)
    shard = PieceMap(np.array([0, 4096]), np.array([region.address]))
    slot = region.address + (1 << 20)
    assert gpu.pin(region.address, region.size)
    latch = Latch(10)
    fake.hold()
    gpu.submit([Job(Op.D2H, address=slot, length=4096, pieces=shard, latches=[latch]) for _ in range(3)])
    while latch.left == 10:
        assert not latch.wait(0)
    assert latch.left == 9 and gpu.reap() == []
    closing = threading.Thread(target=gpu.close, args=(WAIT_S,))
    closing.start()
    while latch.left > 7:
        assert not latch.wait(0)
    fake.go()
    closing.join()
    assert gpu.closed and latch.left == 7
    other = make_device()
    other.unpin(region.address)


def test_deliveries_count_when_ended(
    make_device: Callable[..., DeviceEngine], fake: FakeCuda, wait: Wait, region: Region
) -> None:
    gpu = make_device()
    shard = PieceMap(np.array([0, 4096]), np.array([region.address]))
    slot = region.address + (1 << 20)
    assert gpu.pin(region.address, region.size)
    latch = Latch(1)
    fake.hold()
    gpu.submit([Job(Op.H2D, address=slot, length=4096, pieces=shard, latches=[latch])])
    while not gpu.statistics().copies:
        assert latch.left == 1
    assert not latch.wait(0.01)
    fake.go()
    assert latch.wait(WAIT_S) and wait(gpu, 1)[0].result == 4096
    gpu.unpin(region.address)


def test_a_forked_child_is_refused() -> None:
    latch = Latch(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads is what is tested
        child = os.fork()
    if not child:
        refused = 0
        for call in (latch.down, latch.open, lambda: latch.wait(0), lambda: latch.left):
            try:
                call()
            except RuntimeError as error:
                refused += "forked" in str(error)
        del latch
        os._exit(0 if refused == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert latch.left == 1
