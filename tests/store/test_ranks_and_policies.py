"""Several ranks and policies: what one rank has decided all do."""

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


#: saves are faster than flushes, so that ranks see different checkpoints when a flush ends
FAST = """
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.policies.retain import Retain
from stepwell.tiers.file import FileTier
root, idle, newest = sys.argv[1], sys.argv[2] == "True", sys.argv[3] == "True"
tiers = [FileTier(f"{root}/near", name="near"), FileTier(f"{root}/far", name="far")]
policies = [FlushNewest("far"), FlushRule("far", idle=idle, newest_wins=newest), FlushRule("far", every_steps=7)]
policies += [Retain("near", last=2), Retain("far", last=2)]
with stepwell.open(run="run", tiers=tiers, policies=policies, rank_timeout_seconds=30) as store:
    for step in range(1, 41):
        store.save(step, {"model": {f"rank{rank}.w": torch.full((400_000,), float(step))}}).wait("near")
dist.barrier()
dist.destroy_process_group()
"""

#: step 1 is on its way to far, where it is held up, when step 3 comes, and step 2 is taken back
TAKEN_BACK = """
import threading, time
from stepwell.policies.flush import FlushRule
from stepwell.runtime import Runtime
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty
root = sys.argv[1]
far = Faulty(FileTier(f"{root}/far", name="far"), [Fault("write", 1, "stall")])
tiers = [FileTier(f"{root}/near", name="near"), far]
with stepwell.open(run="run", tiers=tiers, policies=[FlushRule("far", newest_wins=True)]) as store:
    saves = []
    for step in (1, 2, 3):
        saves.append(store.save(step, {"model": {f"rank{rank}.w": torch.full((400_000,), float(step))}}).wait("near"))
        while not far.hit:
            time.sleep(0.01)
    try:
        saves[1].wait("far", timeout=60)
        sys.exit("step 2 was not taken back")
    except stepwell.NotPlanned:
        pass
    Runtime.get().loop.call_soon_threadsafe(far.release)
    time.sleep(2 * rank)  # this rank asks, and waits for the other one's part
    store.flush(2, "far")
    saves[2].wait("far")
    assert [c.step for c in store.checkpoints(tier="far") if "far" in c.complete_on] == [1, 2, 3]
dist.barrier()
dist.destroy_process_group()
"""

#: a rule of the user's that breaks on the rank whose word counts
BROKEN = """
from stepwell.policies.base import Closing
from stepwell.policies.flush import FlushRule
from stepwell.tiers.file import FileTier
class Breaks(FlushRule):
    def decide(self, event, view):
        if rank == 0 and any(c.step == 2 for c in view.checkpoints) and not any(c.step == 3 for c in view.checkpoints):
            raise ValueError("it cannot count")
        return super().decide(event, view)
root = sys.argv[1]
tiers = [FileTier(f"{root}/near", name="near"), FileTier(f"{root}/far", name="far")]
with stepwell.open(run="run", tiers=tiers, policies=[Breaks("far")]) as store:
    for step in (1, 2, 3):
        save = store.save(step, {"model": {f"rank{rank}.w": torch.full((1000,), float(step))}}).wait("near")
        if step == 1:
            save.wait("far")
    save.wait("far", timeout=60)
dist.barrier()
dist.destroy_process_group()
"""

#: the ranks come to their ends at different times, and policies want something then
APART = """
import time
from stepwell.policies.flush import FlushNewest
from stepwell.tiers.file import FileTier
root, late = sys.argv[1], int(sys.argv[2])
tiers = [FileTier(f"{root}/near", name="near"), FileTier(f"{root}/far", name="far")]
with stepwell.open(run="run", tiers=tiers, policies=[FlushNewest("far")]) as store:
    for step in (1, 2):
        store.save(step, {"model": {f"rank{rank}.w": torch.full((400_000,), float(step))}}).wait("near")
    if rank == late:
        time.sleep(3)
with stepwell.open(run="run", tiers=[FileTier(f"{root}/far", name="far", read_only=True)], mode="r") as store:
    assert [c.step for c in store.checkpoints() if c.complete_on] == [2]
dist.barrier()
dist.destroy_process_group()
"""

#: what was deleted from far comes there again by hand, twice; the ranks ask for it at different times
AGAIN = """
import json, time
from pathlib import Path
from stepwell.policies.base import Committed, Drop
from stepwell.policies.flush import FlushRule
from stepwell.policies.evict import LRU
from stepwell.settings import Settings, TierOptions
from stepwell.store import CheckpointStore
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
root, parts, grace_s, late = sys.argv[1], sys.argv[2].split("+"), float(sys.argv[3]), int(sys.argv[4])
class DropFirst:
    tier = "far"
    def decide(self, event, view):
        if isinstance(event, Committed) and event.tier == "near" and event.checkpoint[:14] != "step-000000001":
            return [Drop(c.name, "far", "a test wants it") for c in view.checkpoints if c.step == 1]
        return []
tiers = [HostTier(LRU(), 48 << 20), FileTier(f"{root}/near", name="near")]
tiers += [FileTier(f"{root}/far", name="far", scope="shared")]
def state(value):
    full = torch.full((400_000,), float(value * 10 + rank))
    return {name: {f"rank{rank}.{name}": full.clone()} for name in ("model", "more")}
def there():
    return [c.step for c in store.checkpoints(tier="far") if c.step == 1]
policies = [FlushRule("far", parts=None if parts == ["all"] else parts), DropFirst()]
settings, options = Settings(rank_timeout_seconds=30.0), {"far": TierOptions(delete_grace_s=grace_s)}
with CheckpointStore("run", tiers, "w", settings, policies, options=options) as store:
    store.save(1, state(1)).wait("near")
    for step in (2, 3):
        while not there():
            time.sleep(0.01)
        dist.barrier()
        save = store.save(step, state(step)).wait("near")
        if rank == 0:
            while there():
                time.sleep(0.01)
        dist.barrier()
        if rank == late:
            time.sleep(1.5)
        store.flush(1, "far")
        [manifest] = Path(root, "far", "run").glob("step-000000001.*/manifest.json")
        assert not json.loads(manifest.read_text()).get("absent"), manifest.read_text()
        dist.barrier()
with stepwell.open(run="run", tiers=[FileTier(f"{root}/far", name="far", read_only=True)], mode="r") as store:
    target = state(0)
    store.restore(target, step=1)
    assert all(torch.equal(target[name][f"rank{rank}.{name}"], state(1)[name][f"rank{rank}.{name}"]) for name in target)
dist.barrier()
dist.destroy_process_group()
"""


#: a disk that all ranks of a node share has room for the newest checkpoint and one more; saves wait for room
TIGHT = """
import random, time
from stepwell.policies.flush import FlushRule
from stepwell.policies.retain import Retain
from stepwell.tiers.file import FileTier
root = sys.argv[1]
size, rng = 400_000, random.Random(10 + rank)
near = FileTier(f"{root}/near", name="near", capacity_bytes=world * 9 * size, siblings=True)
tiers = [near, FileTier(f"{root}/far", name="far", scope="shared")]
policies = [FlushRule("far"), Retain("near", last=1), Retain("far", last=1)]
with stepwell.open(run="run", tiers=tiers, policies=policies, host="256MiB", block_timeout=20) as store:
    saves = []
    for step in range(1, 13):
        time.sleep(rng.random() * 0.1)
        saves.append(store.save(step, {"model": {f"rank{rank}.w": torch.full((size,), float(step))}}))
    for save in saves:
        save.wait("near", timeout=60)
dist.barrier()
dist.destroy_process_group()
"""


#: one rank cannot save step 2; the others have it in memory by then
GIVEN_UP = """
from stepwell.policies.flush import FlushNewest
from stepwell.policies.evict import LRU
from stepwell.settings import Settings
from stepwell.store import CheckpointStore
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.wrap import Fault, Faulty
root, fails = sys.argv[1], int(sys.argv[2])
near = FileTier(f"{root}/near", name="near")
if rank == fails:
    near = Faulty(near, [Fault("reserve", 2, "error")])
tiers = [HostTier(LRU(), 48 << 20), near, FileTier(f"{root}/far", name="far", scope="shared")]
with CheckpointStore("run", tiers, "w", Settings(), [FlushNewest("far")]) as store:
    def save(step):
        return store.save(step, {"model": {f"rank{rank}.w": torch.full((400_000,), float(step))}})
    save(1).wait("near")
    try:
        save(2).wait("near")
        sys.exit("a rank had no part in it")
    except stepwell.SaveFailed:
        pass
    assert [c.step for c in store.checkpoints()] == [1], store.checkpoints()
    store.drain(20)
    save(3).wait("near")
    assert [c.step for c in store.checkpoints(tier="far")] == [1], store.checkpoints()
dist.barrier()
dist.destroy_process_group()
"""

#: one rank gives step 2 up; the other one removes its part of it, whose room step 3 needs, a moment later
LEFT_BEHIND = """
from stepwell import savework
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty
savework.ABORT_POLL_S = 0.5
fails = int(sys.argv[2])
near = FileTier(f"{sys.argv[1]}/near", name="near", capacity_bytes=2_600_000, siblings=True)
if rank == fails:
    near = Faulty(near, [Fault("write", 2, "error")])
def save(step, of_fails, of_other):
    size = of_fails if rank == fails else of_other
    return store.save(step, {"model": {f"rank{rank}.w": torch.full((size,), float(step))}})
with stepwell.open(run="run", tiers=[near], policies=[], host="256MiB", block_timeout=20) as store:
    save(1, 1_000, 1_000).wait("near")
    try:
        save(2, 100_000, 500_000).wait("near")
        sys.exit("a rank had no part in it")
    except stepwell.SaveFailed:
        pass
    save(3, 500_000, 100_000).wait("near")
dist.barrier()
dist.destroy_process_group()
"""

#: one rank drains while memory alone has step 1, the other one when it has got to far
MEMORY_ALONE = """
import threading, time
from stepwell.policies.evict import LRU
from stepwell.policies.flush import FlushRule
from stepwell.runtime import Runtime
from stepwell.settings import Settings, TierOptions
from stepwell.store import CheckpointStore
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.wrap import Fault, Faulty
root, early = sys.argv[1], int(sys.argv[2])
far = Faulty(FileTier(f"{root}/far", name="far", scope="shared"), [Fault("write", 1, "stall", times=10**9)])
tiers = [HostTier(LRU(), 48 << 20), FileTier(f"{root}/near", name="near"), far]
settings, options = Settings(rank_timeout_seconds=20), {"near": TierOptions(by_rules=True)}
with CheckpointStore("run", tiers, "w", settings, [FlushRule("far")], options=options) as store:
    save = store.save(1, {"model": {f"rank{rank}.w": torch.full((400_000,), 1.0)}}).wait("host")
    reports = []
    drain = threading.Thread(target=lambda: reports.append(store.drain(60)))
    if rank == early:
        drain.start()
        while not any(goal.attempt.step == 1 for goal in store._writer.flushers["near"].goals):
            time.sleep(0.01)
    dist.barrier()
    Runtime.get().loop.call_soon_threadsafe(far.release)
    save.wait("far", timeout=30)
    dist.barrier()
    began = time.monotonic()
    if rank != early:
        drain.start()
    drain.join()
    assert time.monotonic() - began < 15 and not reports[0].cut and reports[0].newest["far"] == 1, reports
dist.barrier()
dist.destroy_process_group()
"""

#: one rank closes its store; the other one asks for something that needs both, and hears why that cannot be
LEFT = """
from stepwell.tiers.file import FileTier
root, left = sys.argv[1], int(sys.argv[2])
tiers = [FileTier(f"{root}/near", name="near"), FileTier(f"{root}/far", name="far", scope="shared")]
store = stepwell.open(run="run", tiers=tiers, policies=[], host="256MiB")
def save(step):
    return store.save(step, {"model": {f"rank{rank}.w": torch.full((1000,), float(step))}})
save(1).wait("near")
if rank == left:
    store.close()
dist.barrier()
if rank != left:
    try:
        store.flush(1, "far")
        sys.exit("it needs both")
    except stepwell.StoreClosed as error:
        assert f"rank {left} has closed its store" in str(error), error
    try:
        save(2).wait("near")
        sys.exit("it needs both")
    except stepwell.SaveFailed as error:
        assert f"rank {left} has closed its store" in str(error), error
    try:
        store.close()
    except stepwell.SaveFailed:
        pass
dist.barrier()
dist.destroy_process_group()
"""


def check(code: str, root: Path, *arguments: object) -> list[str]:
    """Two ranks do that; none may fail. Returns what they have said on stderr."""
    for place in ("near", "far"):
        (root / place).mkdir()
    found = ended(code, root, *arguments)
    for done in found:
        assert done.returncode == 0, done.stderr[-3000:]
    return [done.stderr for done in found]


@pytest.mark.slow
def test_a_partial_copy_of_several_ranks_becomes_whole_at_the_end(tmp_path: Path) -> None:
    """Step 30 went down without its optimizer, and is the newest at close."""
    check(PARTS, tmp_path)
    [newest] = (tmp_path / "far" / "run").glob("step-000000030.*/manifest.json")
    manifest = decode(newest.read_bytes(), Manifest)
    assert manifest.complete and manifest.covers == [0, 1] and sorted(manifest.parts) == ["model", "optimizer"]


@pytest.mark.slow
@pytest.mark.parametrize(("idle", "newest_wins"), [(True, False), (False, True), (True, True)])
def test_no_flush_waits_for_a_rank_that_has_chosen_another_checkpoint(
    tmp_path: Path, idle: bool, newest_wins: bool
) -> None:
    for said in check(FAST, tmp_path, idle, newest_wins):
        assert "does not get to" not in said and "Traceback" not in said, said[-3000:]
    for copy in (tmp_path / "far" / "run").glob("step-*"):
        assert decode((copy / "manifest.json").read_bytes(), Manifest).covers == [0, 1]
    assert list((tmp_path / "far" / "run").glob("step-000000040.*"))


@pytest.mark.slow
def test_what_was_taken_back_can_be_flushed_by_hand(tmp_path: Path) -> None:
    check(TAKEN_BACK, tmp_path)


@pytest.mark.slow
def test_a_rule_that_breaks_on_one_rank_holds_up_no_other(tmp_path: Path) -> None:
    check(BROKEN, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
def test_ranks_that_close_at_different_times_get_the_newest_down(tmp_path: Path, late: int) -> None:
    check(APART, tmp_path, late)


@pytest.mark.slow
@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(("parts", "grace_s"), [("all", 0.0), ("model", 60.0)])
def test_what_was_deleted_comes_again_by_hand(tmp_path: Path, parts: str, grace_s: float, late: int) -> None:
    """The rank that deletes on a shared tier knows that it did; the other one must not wait for what is not to come,
    nor take what was said of the first copy for the word on the second."""
    check(AGAIN, tmp_path, parts, grace_s, late)


@pytest.mark.slow
def test_no_rank_takes_room_that_another_one_needs_for_an_older_save(tmp_path: Path) -> None:
    check(TIGHT, tmp_path)
    assert list((tmp_path / "near" / "run").glob("step-000000012.*/manifest.json"))


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 1])
def test_a_save_that_one_rank_gives_up_is_nowhere(tmp_path: Path, fails: int) -> None:
    """Also not in the memory of another rank, from where a drain or the end would bring it down."""
    check(GIVEN_UP, tmp_path, fails)


@pytest.mark.slow
@pytest.mark.parametrize("fails", [0, 1])
def test_what_another_rank_is_just_removing_is_room(tmp_path: Path, fails: int) -> None:
    """That rank had committed its part with its record."""
    check(LEFT_BEHIND, tmp_path, fails)
    assert not list((tmp_path / "near" / "run").glob("step-000000002.*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("early", [0, 1])
def test_what_one_rank_wants_because_memory_alone_has_it_is_needless_once_another_tier_has_it(
    tmp_path: Path, early: int
) -> None:
    for said in check(MEMORY_ALONE, tmp_path, early):
        assert "does not get to" not in said, said[-3000:]
    assert not list((tmp_path / "near" / "run").glob("step-*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("left", [0, 1])
def test_nobody_waits_for_a_rank_that_has_closed_its_store(tmp_path: Path, left: int) -> None:
    check(LEFT, tmp_path, left)
