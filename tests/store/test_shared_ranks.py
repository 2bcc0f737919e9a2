"""Shared host memory in a job of several ranks: each has an arena of its own, and all of them make one checkpoint."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import stepwell
from stepwell.tiers import _shm
from stepwell.verifying import verify
from tests.jobs import ended
from tests.store.helpers import sharing

SCRIPT = """
import asyncio, logging, os, pathlib, signal, time
logging.basicConfig(level=logging.INFO)
config, action = sys.argv[1:3]
os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"] = str(rank), str(world)
def state(value):
    return {"model": {f"rank{rank}.w": torch.full((3_000_000,), float(value * 10 + rank))}}
async def stuck(chunks):
    await asyncio.Event().wait()
store = stepwell.open(config, run="job")
host, disk = store.tiers
assert host.owned, host.why
if action == "die":
    store.save(1, state(1)).wait()
    disk.write = stuck
    save = store.save(2, state(2))
    save.wait(survives="process", timeout=60)
    assert save.done("host") and not save.done("disk")
    dist.barrier()
    os.kill(os.getpid(), signal.SIGKILL)
target = state(0)
found = store.restore(target)
step = int(action.removeprefix("find "))
assert found.step == step and (step == 1 or set(found.sources) == {"host"}), found
assert torch.equal(target["model"][f"rank{rank}.w"], state(step)["model"][f"rank{rank}.w"])
store.save(3, state(3)).wait()
if step == 2:  # what only memory had gets down, too
    while [c.step for c in store.checkpoints() if "disk" in c.tiers] != [1, 2, 3]:
        time.sleep(0.02)
store.close()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    with sharing(tmp_path) as file:
        yield file


def arenas(config: Path) -> list[_shm.Found]:
    """By rank."""
    [memory] = re.findall(r'path = "(/dev/shm/.*)"', config.read_text())
    return _shm.arenas(memory)


def killed(config: Path) -> None:
    """Two ranks save step 1 to memory and disk, step 2 to memory alone, and are killed."""
    for done in ended(SCRIPT, config, "die"):
        assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    assert len(arenas(config)) == 2 and not any(found.alive for found in arenas(config))


@pytest.mark.slow
def test_what_the_memory_of_all_ranks_has_is_restored_and_gets_down(config: Path) -> None:
    killed(config)
    for done in ended(SCRIPT, config, "find 2"):
        assert done.returncode == 0, done.stderr[-3000:]
    folder = config.parent / "job"
    for found in arenas(config):
        shutil.rmtree(found.folder)
    with stepwell.open(folder, mode="r") as store:
        assert [c.step for c in store.checkpoints()] == [1, 2, 3] and all(c.world == 2 for c in store.checkpoints())
    report = verify(folder)
    assert not report.problems and {one.step for one in report.checked} == {1, 2, 3}


@pytest.mark.slow
def test_what_only_one_rank_s_memory_has_counts_for_nobody(config: Path) -> None:
    killed(config)
    shutil.rmtree(arenas(config)[1].folder)
    first, second = ended(SCRIPT, config, "find 1")
    assert first.returncode == second.returncode == 0, first.stderr[-3000:] + second.stderr[-3000:]
    with stepwell.open(config.parent / "job", mode="r") as store:
        assert [c.step for c in store.checkpoints()] == [1, 3]
