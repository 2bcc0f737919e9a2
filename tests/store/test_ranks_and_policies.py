"""Several ranks and policies: partial copies that become whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.format.records import Manifest, decode
from tests.jobs import ended

PARTS = """
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.policies.retain import Retain
from stepwell.tiers.file import FileTier
root = sys.argv[1]
tiers = [FileTier(f"{root}/near", name="near"), FileTier(f"{root}/far", name="far")]
policies = [FlushNewest("far"), FlushRule("far", every_steps=100), FlushRule("far", parts=["model"])]
policies += [Retain("near", last=2)]
def state(value):
    return {"model": {f"rank{rank}.w": torch.full((400_000,), float(value * 10 + rank))},
            "optimizer": {f"rank{rank}.m": torch.full((400_000,), float(value * 10 + rank))}}
with stepwell.open(run="run", tiers=tiers, policies=policies) as store:
    for step in (10, 20, 30):
        store.save(step, state(step)).wait("near")
    far = {c.step: sorted(c.parts) for c in store.checkpoints(tier="far")}
with stepwell.open(run="run", tiers=[FileTier(f"{root}/far", name="far", read_only=True)], mode="r") as store:
    found = {c.step: bool(c.complete_on) for c in store.checkpoints()}
    assert found == {10: True, 20: False, 30: True}, found
    target = state(0)
    assert store.restore(target).step == 30
    assert torch.equal(target["model"][f"rank{rank}.w"], state(30)["model"][f"rank{rank}.w"])
    assert torch.equal(target["optimizer"][f"rank{rank}.m"], state(30)["optimizer"][f"rank{rank}.m"])
dist.barrier()
dist.destroy_process_group()
"""


def check(code: str, root: Path) -> None:
    """Two ranks do that; none may fail."""
    for place in ("near", "far"):
        (root / place).mkdir()
    for done in ended(code, root):
        assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_a_partial_copy_of_several_ranks_becomes_whole_at_the_end(tmp_path: Path) -> None:
    """Step 30 went down without its optimizer, and is the newest at close."""
    check(PARTS, tmp_path)
    [newest] = (tmp_path / "far" / "run").glob("step-000000030.*/manifest.json")
    manifest = decode(newest.read_bytes(), Manifest)
    assert manifest.complete and manifest.covers == [0, 1] and sorted(manifest.parts) == ["model", "optimizer"]
