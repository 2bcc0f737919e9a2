"""Several ranks, of which one hears that it will be killed: all stop at the same step, and the checkpoint is whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.format.records import Manifest, decode
from tests.jobs import ended

SCRIPT = """
import logging, os, signal
from stepwell.tiers.file import FileTier
from stepwell.tiers.pfs import PfsTier
folder, hears = sys.argv[1], int(sys.argv[2])
os.environ["XDG_CACHE_HOME"] = f"{folder}/home-{rank}"
logging.basicConfig(format="%(message)s")
store = stepwell.open(run="run", tiers=[FileTier(folder + "/near", name="near"), PfsTier(folder + "/pfs")])
store.handle_preemption(grace="40s")
for step in range(1, 50):
    if rank == hears and step == 5:
        os.kill(os.getpid(), signal.SIGTERM)
    stop = store.preempted(step)
    if stop:
        break
assert stop and store.preempted(step) and 0 < store.ending.preemption.left_s < 40
save = store.save(step, {"model": {f"rank{rank}.w": torch.full((100_000,), float(rank))}})
report = store.drain()
assert report.newest == {"near": step, "pfs": step} and report.cut == [], report
assert save.done("pfs")
store.close()
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
print(step)
dist.destroy_process_group()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("world", "hears"), [(2, 1), (4, 0)])
def test_F9_all_ranks_stop_at_the_same_step(tmp_path: Path, world: int, hears: int) -> None:
    for name in ("near", "pfs"):
        (tmp_path / name).mkdir()
    ranks = ended(SCRIPT, tmp_path, hears, world=world)
    assert [(rank.returncode, rank.stdout) for rank in ranks] == [(0, "6\n")] * world, ranks[0].stderr[-2000:]
    assert all("run run is preempted at step 6" in rank.stderr for rank in ranks)
    [manifest] = (tmp_path / "pfs" / "run").glob("step-*/manifest.json")
    assert decode(manifest.read_bytes(), Manifest).covers == list(range(world))
