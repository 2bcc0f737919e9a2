"""Whole scripts that are told that they will be killed, in whatever they do. Case F9."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

import stepwell
from tests.store.scripts import Ended, Scripts

TERM = signal.SIGTERM

#: a training script with a disk of the node and a shared file system of so many bytes a second; it is killed for good
#: some time after the signal, as schedulers do: far later than it has to end even on a busy machine
SCRIPT = """
import logging, os, signal, sys, threading, time
import torch, stepwell
from stepwell import preemption
from stepwell.tiers.file import FileTier
from stepwell.tiers.pfs import PfsTier
folder, grace, rate = sys.argv[1], sys.argv[2], float(sys.argv[3])
os.environ["XDG_CACHE_HOME"] = folder + "/home"
logging.basicConfig(format="%(message)s")
for name in ("near", "pfs"):
    os.makedirs(folder + "/" + name, exist_ok=True)
near = FileTier(folder + "/near", name="near")
store = stepwell.open(run="run", tiers=[near, PfsTier(folder + "/pfs", write_bytes_per_s=rate)])
store.handle_preemption(grace=grace)

def state(step, size=2_000_000):
    return {"w": torch.full((size,), float(step))}

def strike(when=lambda: True):
    def work():
        while not when():
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(30)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=work, daemon=True).start()

def train(first, size=2_000_000):
    step = first
    while True:
        stop = store.preempted(step)
        if stop:
            store.save(step, state(step, size))
            break
        time.sleep(0.01)
        step += 1
    store.close()
    print(step)
"""


def newest(root: Path) -> int:
    """The newest step there, which must be whole."""
    with stepwell.open(root / "run", mode="r") as store:
        checkpoint = store.latest()
        assert checkpoint is not None
        step = checkpoint.step
    values = stepwell.load(f"{root / 'run'}@{step}")["w"]
    assert bool((values == step).all())
    return step


WHEN = {
    "idle": "strike()",
    "in staging": "save = store.save(1, state(1, 20_000_000)); strike()",
    "in a flush": "store.save(1, state(1)).wait('near'); strike(lambda: store.status().tier('pfs').in_flight_bytes)",
}


@pytest.mark.parametrize("when", WHEN)
def test_F9_with_enough_time_the_newest_is_on_the_last_tier(tmp_path: Path, scripts: Scripts, when: str) -> None:
    ended = scripts.run(SCRIPT + WHEN[when] + "\ntrain(2)", tmp_path, "25s", 200e6)
    assert ended.status == 0, ended.err
    step = int(ended.out)
    assert newest(tmp_path / "pfs") == newest(tmp_path / "near") == step
    assert f"run run is preempted at step {step}" in ended.err


def cut_short(ended: Ended) -> str:
    assert ended.status == 1, ended  # close() raised, before the kill
    assert "WaitTimeout: not finished within" in ended.err
    [line] = [line for line in ended.err.splitlines() if "was preempted and drained for" in line]
    return line


#: four seconds and more of flushing
SHORT = """
store.save(1, state(1)).wait("pfs")
store.save(2, state(2, 20_000_000)).wait("near")
os.kill(os.getpid(), signal.SIGTERM)
assert store.preempted(3)
store.close()
"""


def test_F9_with_too_little_time_the_one_before_is_intact_and_the_report_says_what_was_cut(
    tmp_path: Path, scripts: Scripts
) -> None:
    line = cut_short(scripts.run(SCRIPT + SHORT, tmp_path, "2s", 20e6))
    assert newest(tmp_path / "pfs") == 1 and newest(tmp_path / "near") == 2
    assert "Newest: step 2 on near, step 1 on pfs. Not there: step 2 on pfs (" in line
    assert "iB left: it takes" in line


def test_F9_killed_in_the_middle_the_next_process_goes_on(tmp_path: Path, scripts: Scripts) -> None:
    killed = """
def kill():
    while not store.status().tier("pfs").in_flight_bytes:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)   # long before the grace is over
threading.Thread(target=kill, daemon=True).start()
"""
    ended = scripts.run(SCRIPT + SHORT.replace("store.close()", killed + "store.close()"), tmp_path, "60s", 20e6)
    assert ended.status == -signal.SIGKILL
    assert newest(tmp_path / "pfs") == 1 and newest(tmp_path / "near") == 2
    ended = scripts.run(SCRIPT + "print(store.drain('60s'))\nstore.close()", tmp_path, "30s", 1e9)
    assert ended.status == 0 and "step 2 to pfs" in ended.out, ended
    assert newest(tmp_path / "pfs") == 2


def test_F9_a_script_that_just_ends_keeps_its_exit_code_and_tells(tmp_path: Path, scripts: Scripts) -> None:
    code = """
store.save(1, state(1)).wait("pfs")
store.save(2, state(2, 40_000_000)).wait("near")
strike(lambda: store.ending.closed)   # the exit waits already
sys.exit(7)
"""
    ended = scripts.run(SCRIPT + code, tmp_path, "2s", 20e6)
    assert ended.status == 7, ended
    last = ended.err.strip().splitlines()[-1]
    assert "leaving run run unfinished" in last and "step 2 on near, step 1 on pfs" in last
    assert newest(tmp_path / "pfs") == 1 and newest(tmp_path / "near") == 2


def test_F9_the_second_signal_ends_the_process_but_an_echo_does_not(tmp_path: Path, scripts: Scripts) -> None:
    code = """
os.kill(os.getpid(), signal.SIGTERM)
os.kill(os.getpid(), signal.SIGTERM)   # a launcher's echo
print(store.preempted(1), flush=True)
preemption.ECHO_S = 0.0
os.kill(os.getpid(), signal.SIGTERM)
print("alive", flush=True)
"""
    ended = scripts.run(SCRIPT + code, tmp_path, "30s", 20e6)
    assert (ended.status, ended.out) == (-TERM, "True\n")


def test_a_forked_child_is_ended_by_the_signal_as_if_nothing_was_there(tmp_path: Path, scripts: Scripts) -> None:
    code = """
pid = os.fork()
if pid == 0:
    os.kill(os.getpid(), signal.SIGTERM)
    os._exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), store.preempted(1))
"""
    ended = scripts.run(SCRIPT + code, tmp_path, "30s", 20e6)
    assert (ended.status, ended.out) == (0, f"{-TERM} False\n"), ended.err
