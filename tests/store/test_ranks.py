"""Several ranks, as real processes with a gloo group: one checkpoint, one manifest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import stepwell
from stepwell.format.records import Manifest, decode
from tests.jobs import ended

SCRIPT = """
folder, action = sys.argv[1:3]
def state(value):
    return {"model": {f"rank{rank}.w": torch.full((400_000,), float(value * 10 + rank))}, "mine": rank, "step": value}
with stepwell.open(folder.removesuffix("run") + "other/run") as store:  # another run of the same name in the same job
    if action == "save":
        for step in (1, 2):
            store.save(step, state(7)).wait()
with stepwell.open(folder) as store:
    if action == "save":
        for step in (1, 2):
            store.save(step, state(step)).wait()
    target = state(0)
    target["mine"] = target["step"] = -1
    found = store.restore(target)
    if action == "older":
        assert found.step == 1 and list(found.skipped) == [2], found
        assert torch.equal(target["model"][f"rank{rank}.w"], state(1)["model"][f"rank{rank}.w"])
        store.close()
        sys.exit()
    assert found.step == 2 and found.world == world, found
    assert torch.equal(target["model"][f"rank{rank}.w"], state(2)["model"][f"rank{rank}.w"])
    assert target["mine"] == rank and target["step"] == 2
    if action == "again":
        store.save(3, state(3)).wait()
dist.barrier()
dist.destroy_process_group()
"""


def check(folder: Path, action: str) -> None:
    """Two ranks do that; none may fail."""
    for done in ended(SCRIPT, folder, action):
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_two_ranks_save_one_checkpoint_and_go_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "other").mkdir()
    check(folder, "save")
    check(folder, "again")
    steps = sorted(folder.glob("step-*"))
    assert [p.name for p in steps] == ["step-000000001.1-1", "step-000000002.1-2", "step-000000003.2-1"]
    manifest = decode((steps[-1] / "manifest.json").read_bytes(), Manifest)
    assert manifest.world == 2 and manifest.covers == [0, 1] and manifest.complete
    names = {p.name for p in steps[-1].iterdir()}
    assert {"model.rank00000-of-00002.safetensors", "model.rank00001-of-00002.safetensors"} <= names
    assert {"rank-00000.json", "rank-00001.json"} <= names
    assert json.loads((steps[-1] / "manifest.json").read_text())["parts"]["model"] == 2 * 1_600_000


@pytest.mark.slow
def test_a_checkpoint_that_one_rank_cannot_use_is_used_by_none(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "other").mkdir()
    check(folder, "save")
    [shard] = folder.glob("step-000000002.*/model.rank00001-of-00002.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    check(folder, "older")


@pytest.mark.slow
def test_another_number_of_ranks_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "other").mkdir()
    check(folder, "save")
    with pytest.raises(stepwell.WorldChanged, match="2 ranks"):
        stepwell.load(folder)
    [alone] = ended(SCRIPT, folder, "restore", world=1)
    assert alone.returncode != 0 and "WorldChanged" in alone.stderr and "2 ranks" in alone.stderr


#: a thread of training waits at the job's store, as in making a group that another rank makes later
WAITS = """
import threading, time
from datetime import timedelta
from torch.distributed.distributed_c10d import _get_default_store
def wait():
    try:
        _get_default_store().wait(["never"], timedelta(seconds=8))
    except dist.DistStoreError:
        pass
began = time.monotonic()
waiting = threading.Thread(target=wait)
waiting.start()
time.sleep(0.2)
with stepwell.open(sys.argv[1]) as store:
    for step in (1, 2, 3):
        store.save(step, {"w": torch.full((1000,), float(step))}).wait()
    assert waiting.is_alive(), time.monotonic() - began
waiting.join()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_a_thread_that_waits_at_the_jobs_store_holds_up_no_save(tmp_path: Path) -> None:
    for done in ended(WAITS, tmp_path / "run"):
        assert done.returncode == 0, done.stderr[-3000:]
