"""Forks, threads, signals: the engine belongs to the process that made it."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell import ending
from stepwell.tiers.wrap import Fault
from tests.resources import comes_back_to, describe_files, in_use
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state
from tests.store.scripts import ROOT, Scripts

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
def test_G8_a_forked_child_makes_its_own_engine(tmp_path: Path) -> None:
    """Case G8."""
    done = subprocess.run(
        [sys.executable, "-c", FORK, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=100
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

    def once(number: int) -> None:
        with stepwell.open(tmp_path / f"run{number}") as store:
            store.save(1, {"w": torch.ones(10)}).wait()
            store.restore({"w": torch.zeros(10)})
        stepwell.load(tmp_path / f"run{number}")

    once(0)
    before = in_use()
    for number in range(1, 25):
        once(number)
    assert comes_back_to(before, spare=4), describe_files()


def test_stores_that_are_dropped_leave_no_threads_and_no_files_open(tmp_path: Path) -> None:
    """Cases G12 and B9: two hundred of them, with a save each now and then."""

    def once(number: int) -> None:
        store = stepwell.open(tmp_path / f"run{number}")
        if number % 10 == 0:
            store.save(1, {"w": torch.full((10,), float(number))})

    for number in range(3):
        once(number)
    eventually(lambda: not ending._dropped)
    before = in_use()
    for number in range(3, 200):
        once(number)
    eventually(lambda: not ending._dropped)
    assert comes_back_to(before, spare=2), describe_files()
    for number in range(0, 200, 10):
        assert bool((stepwell.load(tmp_path / f"run{number}")["w"] == number).all())


def test_saves_of_one_store_from_several_threads(tmp_path: Path) -> None:
    """Each is whole or refused because of its step; none is lost and none hangs."""
    saved: list[stepwell.Save] = []
    errors: list[BaseException] = []
    numbers = itertools.count(1)
    with stepwell.open(tmp_path / "run") as store:

        def work() -> None:
            for _ in range(8):
                step = next(numbers)
                try:
                    saved.append(store.save(step, {"w": torch.full((50_000,), float(step))}))
                    target = {"w": torch.zeros(50_000)}
                    found = store.restore(target)
                    assert found is not None and bool((target["w"] == found.step).all())
                except stepwell.StepExists:
                    pass
                except BaseException as error:
                    errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        for save in saved:
            save.wait()
        # a restore in between makes the next save go on from there: all are there, some perhaps abandoned
        assert {c.step for c in store.checkpoints(abandoned=True)} == {save.step for save in saved}


def test_inside_a_running_event_loop(tmp_path: Path) -> None:
    """As in Jupyter and in servers: calls work, and handles can be awaited, several of them and with a limit."""
    tier = disk(tmp_path)

    async def main() -> None:
        with stepwell.open(run="run", tiers=[host(), tier]) as store:
            save = store.save(1, state(1.0))
            assert await save is save
            await asyncio.gather(*(one for one in [store.save(2, state(2.0)), store.save(3, state(3.0))]))
            target = state(0.0)
            found = store.restore(target)
            assert found is not None and found.step == 3
            tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
            slow = store.save(4, state(4.0))
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_arrival(slow), 0.05)
            release(tier)
            await asyncio.gather(_arrival(slow), _arrival(slow))
            tier.plan = [Fault("reserve", 1, times=ALWAYS)]
            with pytest.raises(stepwell.SaveFailed, match="injected"):
                await store.save(5, state())
            tier.plan = []
            await store.save(6, state())

    asyncio.run(main())


def test_an_event_loop_may_end_before_the_save(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]

        async def main() -> stepwell.Save:
            save = store.save(2, state())
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(_arrival(save), 0.05)
            return save

        save = asyncio.run(main())
        release(tier)
        save.wait()
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


async def _arrival(save: stepwell.Save) -> stepwell.Save:
    return await save


LOADERS = """
import sys, torch, stepwell
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self):
        return 40
    def __getitem__(self, index):
        return torch.full((1000,), float(index))
weight = torch.zeros(500_000)
with stepwell.open(sys.argv[1]) as store:
    step = 0
    for epoch in range(3):
        for batch in DataLoader(Numbers(), batch_size=4, num_workers=2):
            step += 1
            weight.fill_(step)
            save = store.save(step, {"w": weight})
    target = {"w": torch.zeros(500_000)}
    assert store.restore(target).step == step == 30 and bool((target["w"] == step).all())
    assert [c.step for c in store.checkpoints()] == list(range(1, 31))
"""


def test_data_loader_workers_forked_while_saves_run(tmp_path: Path, scripts: Scripts) -> None:
    ended = scripts.run(LOADERS, tmp_path / "run")
    assert (ended.status, ended.err) == (0, "")


CHILD = """
import os, sys, torch, stepwell
store = stepwell.open(sys.argv[1])
save = store.save(1, {"w": torch.arange(3_000_000)})
pid = os.fork()                                      # while the save is under way
if pid == 0:
    sys.exit(7)                                      # runs atexit handlers, and drops the store
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
save.wait()
pid = os.fork()
if pid == 0:
    del store, save                                  # its memory, files and folder are the parent's
    with stepwell.open(sys.argv[1] + "-child") as own:
        own.save(1, {"w": torch.arange(10)}).wait()
    sys.exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 8
store.save(2, {"w": torch.arange(3_000_000)}).wait()
assert len(store.checkpoints()) == 2
"""


def test_a_child_that_exits_touches_nothing_of_its_parent(tmp_path: Path, scripts: Scripts) -> None:
    ended = scripts.run(CHILD, tmp_path / "run")
    assert (ended.status, ended.err) == (0, "")
    assert torch.equal(stepwell.load(tmp_path / "run-child")["w"], torch.arange(10))


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
