"""Forks, threads, signals: the engine belongs to the process that made it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import stepwell

ROOT = Path(__file__).parents[2]

FORK = """
import os, sys, torch, stepwell
folder = sys.argv[1]
store = stepwell.open(folder)
store.save(1, {"w": torch.arange(1000)}).wait()
pid = os.fork()
if pid == 0:
    code = 1
    try:
        assert torch.equal(stepwell.load(folder)["w"], torch.arange(1000))   # an engine of its own
        try:
            store.save(2, {"w": torch.arange(1000)})
        except stepwell.StoreClosed:
            code = 0
    finally:
        os._exit(code)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
store.save(2, {"w": torch.arange(1000)}).wait()                              # the parent's still works
store.close()
"""


@pytest.mark.slow
def test_a_forked_child_makes_its_own_engine(tmp_path: Path) -> None:
    """Case G8."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


SIGNALS = """
import signal, sys, torch, stepwell
ticks = []
signal.signal(signal.SIGALRM, lambda *_: ticks.append(1))
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
weight = torch.arange(20_000_000)
with stepwell.open(sys.argv[1]) as store:
    for step in range(1, 4):
        store.save(step, {"w": weight + step}).wait()
        target = {"w": torch.zeros_like(weight)}
        store.restore(target)
        assert torch.equal(target["w"], weight + step)
signal.setitimer(signal.ITIMER_REAL, 0)
assert len(ticks) > 50, len(ticks)
"""


@pytest.mark.slow
def test_a_storm_of_signals_disturbs_nothing(tmp_path: Path) -> None:
    """Case G6."""
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


def test_many_stores_leave_no_threads_and_no_files_open(tmp_path: Path) -> None:
    """Case G12."""

    def counts() -> tuple[int, int]:
        return threading.active_count(), len(os.listdir("/proc/self/fd"))

    def once(number: int) -> None:
        with stepwell.open(tmp_path / f"run{number}") as store:
            store.save(1, {"w": torch.ones(10)}).wait()
            store.restore({"w": torch.zeros(10)})
        stepwell.load(tmp_path / f"run{number}")

    once(0)
    threads, files = counts()
    for number in range(1, 25):
        once(number)
    after_threads, after_files = counts()
    assert after_threads <= threads + 4 and after_files <= files + 4


def test_saves_from_several_threads_are_all_whole(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            with stepwell.open(tmp_path / f"run{number}") as store:
                for step in range(1, 4):
                    store.save(step, {"w": torch.full((100_000,), float(number * 10 + step))}).wait()
                    target = {"w": torch.zeros(100_000)}
                    store.restore(target)
                    assert bool((target["w"] == number * 10 + step).all())
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
