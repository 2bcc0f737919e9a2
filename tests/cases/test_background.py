"""Cases of part B that a user meets in one script: overlapping saves, lost errors, small /dev/shm, late ranks.

B6 is in tests/store/test_failures.py as well, B8 and B9 are in tests/store/test_exit.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.errors import SaveFailed, StepExists
from stepwell.policies.evict import LRU
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.wrap import Fault, Faulty
from tests.cases.helpers import ROOT, script
from tests.jobs import WAIT_S, running
from tests.store.helpers import ALWAYS, disk, host, release


def test_B5_saves_overlap_on_a_slow_tier_and_each_is_whole(tmp_path: Path) -> None:
    slow = disk(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)])
    weight = torch.zeros(1_000_000)
    with stepwell.open(run="run", tiers=[host(), slow]) as store:
        saves = []
        for step in range(1, 6):
            weight.fill_(step)
            saves.append(store.save(step, {"w": weight}))
        assert not any(save.done() for save in saves)
        with pytest.raises(StepExists, match="step 5 is not above the newest checkpoint, step 5"):
            store.save(5, {"w": weight})
        release(slow)
        for save in saves:
            save.wait()
    for step in range(1, 6):
        assert bool((stepwell.load(f"{tmp_path}/disk/run@{step}")["w"] == step).all())


RANKS = """
import os
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty
folder, what = sys.argv[1:3]
tier = Faulty(FileTier(folder, name="disk"), [])
store = stepwell.open(run="run", tiers=[tier], rank_timeout_seconds=5, exit_timeout=5)
state = {"w": torch.ones(100_000)}
dist.barrier()
store.save(1, state).wait()
dist.barrier()
if rank == 1:
    if what == "never comes":
        sys.stdin.read()
        os._exit(0)
    if what == "is killed":
        os._exit(17)
    if what == "hangs":
        tier.plan.append(Fault("write", 1, "stall", times=10**9))
        store.save(2, state)
        sys.stdin.read()
        os._exit(0)
save = store.save(2, state)
try:
    save.wait(timeout=30)
except stepwell.SaveFailed as error:
    print(error, flush=True)
os._exit(0)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["never comes", "is killed", "hangs"])
def test_B23_the_rank_that_is_late_is_named(tmp_path: Path, what: str) -> None:
    with running(RANKS, tmp_path, what) as ranks:  # the second one may wait until the first one has spoken
        out, err = ranks[0].communicate(timeout=WAIT_S)
    assert "rank 1" in out and "step 2" in out and "within 5 s" in out, out + err


def test_B23_a_save_of_one_rank_needs_no_peers(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, {"w": torch.ones(10)}).wait(timeout=20)


SMALL_SHM = """
import sys, torch, stepwell
weight = torch.arange(50_000_000)
with stepwell.open(sys.argv[1]) as store:
    store.save(1, {"w": weight}).wait()
    target = {"w": torch.zeros_like(weight)}
    store.restore(target)
    assert torch.equal(target["w"], weight)
"""


@pytest.mark.slow
def test_B19_a_small_shared_memory_mount_does_not_matter(tmp_path: Path) -> None:
    mount = "mount -t tmpfs -o size=1m tmpfs /dev/shm"
    if subprocess.run(["unshare", "-m", "sh", "-c", mount], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs is not allowed here")
    command = ["unshare", "-m", "sh", "-c", f'{mount} && exec "$@"', "sh", sys.executable, "-c", SMALL_SHM]
    done = subprocess.run([*command, str(tmp_path / "run")], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_B18_memory_that_must_not_be_locked_is_not_needed(tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (0, 0))\n"
    done = script(limit + SMALL_SHM.replace("50_000_000", "1_000_000"), tmp_path / "run")
    assert (done.returncode, done.stderr) == (0, "")


def test_B18_reads_find_room_in_an_arena_that_is_full(tmp_path: Path) -> None:
    arena = HostTier(LRU(), 16 << 20, chunk_bytes=1 << 20)
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, {"w": torch.arange(1_000_000), "o": torch.ones(10)}).wait()
    disk = Faulty(FileTier(tmp_path, name="disk"), [])
    store = stepwell.open(run="run", tiers=[arena, disk], exit_timeout=0.2)
    store.restore({"o": torch.ones(10)})
    disk.plan = [Fault("write", 1, "stall", times=10**9)]
    stuck = store.save(2, {"o": torch.ones(3_500_000)})  # all that may be kept
    target = {"w": torch.zeros(1_000_000, dtype=torch.int64)}
    found = store.restore(target, step=1, timeout=20)
    assert found is not None and torch.equal(target["w"], torch.arange(1_000_000))
    assert not stuck.done("disk")
    with pytest.raises(stepwell.WaitTimeout):
        store.close()
    with pytest.raises(SaveFailed, match="closed|abandoned"):
        stuck.wait(timeout=20)
