"""Several ranks, as real processes with a gloo group: one checkpoint, one manifest."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import stepwell
from stepwell.format.records import Manifest, decode

ROOT = Path(__file__).parents[2]

SCRIPT = """
import sys, torch, torch.distributed as dist, stepwell
folder, action, rank, world, port = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
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


def job(folder: Path, action: str, world: int) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(folder), action]
    started = [
        subprocess.Popen(
            [*command, str(rank), str(world), port], cwd=ROOT, stderr=subprocess.PIPE, text=True, env=os.environ
        )
        for rank in range(world)
    ]
    return [subprocess.CompletedProcess(p.args, p.wait(90), None, p.communicate()[1]) for p in started]


@pytest.mark.slow
def test_two_ranks_save_one_checkpoint_and_go_on_after_a_restart(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "other").mkdir()
    for done in job(folder, "save", 2):
        assert done.returncode == 0, done.stderr[-3000:]
    for done in job(folder, "again", 2):
        assert done.returncode == 0, done.stderr[-3000:]
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
    assert all(done.returncode == 0 for done in job(folder, "save", 2))
    [shard] = folder.glob("step-000000002.*/model.rank00001-of-00002.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    for done in job(folder, "older", 2):
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_another_number_of_ranks_is_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (tmp_path / "other").mkdir()
    assert all(done.returncode == 0 for done in job(folder, "save", 2))
    with pytest.raises(stepwell.WorldChanged, match="2 ranks"):
        stepwell.load(folder)
    [alone] = job(folder, "restore", 1)
    assert alone.returncode != 0 and "WorldChanged" in alone.stderr and "2 ranks" in alone.stderr
