"""Checkpoints going down a chain of tiers: complete, partial, missing tiers, full disks."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import pytest
import torch

import stepwell
from stepwell.errors import NoGoodCheckpoint, SaveFailed, TierError, TierFull, TierUnavailable
from stepwell.runtime import Runtime
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Fault, Faulty
from tests.mounts import tmpfs
from tests.store.helpers import ALWAYS, eventually


def state(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"w": torch.full((400_000,), value)}, "optimizer": {"m": torch.full((400_000,), -value)}}


def chain(tmp_path: Path) -> list[Tier]:
    return [MemoryTier(), FileTier(tmp_path, name="disk")]


def test_a_save_ends_on_every_tier(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=chain(tmp_path)) as store:
        save = store.save(1, state())
        save.wait("memory")
        save.wait("disk")
        newest = store.latest()
        assert newest is not None and newest.tiers == ("memory", "disk") == newest.complete_on
    assert torch.equal(stepwell.load(tmp_path / "run", part="model")["w"], state()["model"]["w"])


def test_looking_while_saves_are_under_way_loses_none(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=chain(tmp_path)) as store:
        saves = []
        for step in range(1, 9):
            saves.append(store.save(step, state(step)))
            store.checkpoints()
            store.debris()
        for save in saves:
            save.wait("disk")
        assert [(c.step, c.tiers) for c in store.checkpoints()] == [(n, ("memory", "disk")) for n in range(1, 9)]


def test_wait_without_a_tier_means_the_first_that_survives_a_reboot(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=chain(tmp_path)) as store:
        save = store.save(1, state())
        save.wait()
        assert "disk" in save.report().tier_seconds
        save.wait(survives="process")
        with pytest.raises(stepwell.ConfigError, match="node-loss"):
            save.wait(survives="node-loss")


def test_restore_reads_from_the_nearest_tier(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=chain(tmp_path)) as store:
        store.save(1, state()).wait("disk")
        found = store.restore(state(0))
        assert found is not None and list(found.sources) == ["memory"]
    with stepwell.open(run="run", tiers=chain(tmp_path)) as store:  # a new, empty memory tier
        found = store.restore(state(0))
        assert found is not None and list(found.sources) == ["disk"]


def test_a_partial_copy_holds_some_parts_and_says_so(tmp_path: Path) -> None:
    (tmp_path / "near").mkdir()
    near, far = FileTier(tmp_path / "near", name="near"), FileTier(tmp_path, name="far")
    with stepwell.open(run="run", tiers=[near]) as store:
        store.save(1, state()).wait()
    with stepwell.open(run="run", tiers=[FileTier(tmp_path / "near", name="near"), far], policies=[]) as store:
        store.flush(1, "far", parts=["model"])
        newest = store.latest()
        assert newest is not None and newest.tiers == ("near", "far") and newest.complete_on == ("near",)
    with stepwell.open(run="run", tiers=[FileTier(tmp_path, name="far")], mode="r") as store:
        only = {"model": state(0)["model"]}
        found = store.restore(only)
        assert found is not None and torch.equal(only["model"]["w"], state()["model"]["w"])
        with pytest.raises((NoGoodCheckpoint, stepwell.StepwellError), match="optimizer"):
            store.restore(state(0))


def test_a_partial_copy_with_a_bad_manifest_does_no_harm_to_the_whole_one(tmp_path: Path) -> None:
    def tiers() -> list[Tier]:
        return [FileTier(tmp_path / name, name=name) for name in ("near", "far")]

    for folder in ("near", "far"):
        (tmp_path / folder).mkdir()
    with stepwell.open(run="run", tiers=tiers(), policies=[]) as store:
        store.save(1, state()).wait()
        store.flush(1, "far", parts=["model"])
    [manifest] = (tmp_path / "far").glob("run/step-*/manifest.json")
    manifest.write_text("{")
    with stepwell.open(run="run", tiers=tiers(), mode="r") as store:
        target = state(0)
        assert store.restore(target) is not None
        assert torch.equal(target["optimizer"]["m"], state()["optimizer"]["m"])


def test_a_record_that_went_bad_before_its_commit_keeps_no_checkpoint_away(tmp_path: Path) -> None:
    """A try came as far as this rank's record, which the medium has garbled since."""
    (tmp_path / "near").mkdir()
    tiers = [FileTier(tmp_path / "near", name="near"), FileTier(tmp_path, name="far")]
    with stepwell.open(run="run", tiers=tiers, policies=[]) as store:
        store.save(1, state()).wait("near")
        [good] = tmp_path.glob("near/run/step-*/rank-*.json")
        bad = tmp_path / good.relative_to(tmp_path / "near")
        bad.parent.mkdir(parents=True)
        bad.write_bytes(b"\0" + good.read_bytes()[1:])
        store.flush(1, "far")
        assert bad.read_bytes() == good.read_bytes()
    assert torch.equal(stepwell.load(tmp_path / "run", part="model")["w"], state()["model"]["w"])


class Stubborn(FileTier):
    """Fails once to delete what commits a checkpoint: before anything is done, or after all of it."""

    failed = done = False

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        fails = not self.failed and any("step-" in str(key) and not isinstance(key, ShardKey) for key in what)
        if self.done or not fails:
            await super().drop(what)
        if fails:
            self.failed = True
            raise TierError("not deleted, or so it seems", tier=self.info.name)


@pytest.mark.parametrize("done", [False, True])
def test_a_partial_copy_grows_whole_although_it_cannot_make_way_at_once(tmp_path: Path, done: bool) -> None:
    (tmp_path / "near").mkdir()
    far = Stubborn(tmp_path, name="far")
    far.done = done
    with stepwell.open(run="run", tiers=[FileTier(tmp_path / "near", name="near"), far], policies=[]) as store:
        store.save(1, state()).wait()
        store.flush(1, "far", parts=["model"])
        store.flush(1, "far")
        newest = store.latest("far")
        assert far.failed and newest is not None and newest.complete_on == ("near", "far")
    with stepwell.open(run="run", tiers=[FileTier(tmp_path, name="far")], mode="r") as store:
        assert store.restore(state(0)) is not None


@pytest.mark.parametrize("after", ["reserve", "write", "commit"])
def test_a_growth_that_is_taken_back_leaves_what_was_there(
    tmp_path: Path, after: Literal["reserve", "write", "commit"]
) -> None:
    (tmp_path / "near").mkdir()
    far = Faulty(FileTier(tmp_path, name="far"), [])
    with stepwell.open(run="run", tiers=[FileTier(tmp_path / "near", name="near"), far], policies=[]) as store:
        store.save(1, state()).wait("near")
        store.flush(1, "far", parts=["model"])
        far.plan = [Fault(after, 1, "error", times=ALWAYS)]
        with pytest.raises(TierError):
            store.flush(1, "far")
        far.plan = []
        [attempt] = store.catalog.holdings
        store._writer.flushers["far"].take_back(attempt, "a test")
        store._runtime.run(store._writer.work.forget(attempt, far))
        [found] = store.checkpoints()
        assert found.tiers == ("near", "far") and found.complete_on == ("near",)
        assert not list(tmp_path.glob("run/step-*/optimizer*"))
    assert torch.equal(stepwell.load(tmp_path / "run", part="model")["w"], state()["model"]["w"])


@pytest.mark.parametrize("select", ["", "@1", "@latest"])
def test_who_loads_what_is_just_being_made_whole_waits_for_it(tmp_path: Path, select: str) -> None:
    (tmp_path / "near").mkdir()
    far = Faulty(FileTier(tmp_path, name="far"), [])
    with stepwell.open(run="run", tiers=[FileTier(tmp_path / "near", name="near"), far], policies=[]) as store:
        store.save(1, state()).wait("near")
        store.flush(1, "far", parts=["model"])
        far.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        with ThreadPoolExecutor(3) as threads:
            flushing = threads.submit(store.flush, 1, "far")
            try:
                eventually(lambda: bool(far.hit))
                assert not list(tmp_path.glob("run/step-*/manifest.json"))
                loading = threads.submit(stepwell.load, f"{tmp_path}/run{select}", part="model")
                time.sleep(0.3)
                assert not loading.done()
            finally:
                Runtime.get().loop.call_soon_threadsafe(far.release)
            flushing.result(30)
            assert torch.equal(loading.result(30)["w"], state()["model"]["w"])


class Blinking(FileTier):
    """Does not find a manifest that it has listed, once."""

    left = 1

    async def fetch(self, record: RecordKey) -> bytes | None:
        if record.name.startswith("step-000000001") and record.name.endswith("/manifest.json") and self.left:
            self.left -= 1
            return None
        return await super().fetch(record)


def test_a_watch_tells_of_what_was_just_being_made_whole(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        for step in (1, 2):
            store.save(step, state()).wait()
    with stepwell.open(run="run", tiers=[Blinking(tmp_path, name="disk", read_only=True)], mode="r") as store:
        assert sorted(c.step for c in store.watch(poll="20ms", timeout="500ms")) == [1, 2]


#: the only whole copy is in the memory of a process that ends while it makes a partial one on disk whole
DIES = """
import os, sys, torch, stepwell
from stepwell.policies.evict import LRU
from stepwell.settings import Settings, TierOptions
from stepwell.store import CheckpointStore
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
torch.set_num_threads(1)

class Mortal(FileTier):
    left = None
    async def step(self, work):
        found = await work
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                os._exit(9)
        return found
    async def reserve(self, *a, **k): return await self.step(super().reserve(*a, **k))
    async def write(self, *a): return await self.step(super().write(*a))
    async def commit(self, *a, **k): return await self.step(super().commit(*a, **k))
    async def drop(self, *a): return await self.step(super().drop(*a))

def writer(root, dies_after):
    disk = Mortal(root, name="disk")
    options = {"disk": TierOptions(by_rules=True)}
    tiers = [HostTier(LRU(), 64 << 20, chunk_bytes=1 << 20), disk]
    store = CheckpointStore("run", tiers, "w", Settings(), [], options=options)
    parts = {name: {name[0]: torch.full((400_000,), 1.0)} for name in ("model", "optimizer", "other")}
    store.save(1, parts).wait("host")
    store.flush(1, "disk", parts=["model"])
    disk.left = dies_after
    store.flush(1, "disk", parts=GROWS)
    disk.left = None
    os._exit(0)

def reader(root):
    assert (stepwell.load(f"{root}/run", part="model")["m"] == 1.0).all()
    os._exit(0)

def successor(root):
    store = stepwell.open(run="run", tiers=[FileTier(root, name="disk")])
    store.save(2, {"model": {"m": torch.zeros(10)}}).wait()
    [first] = [c for c in store.checkpoints() if c.step == 1]
    files = {name[:-12] for name in os.listdir(f"{root}/run/step-000000001.1-1") if name.endswith(".safetensors")}
    assert files == set(first.parts), (files, first.parts)
    for part in first.parts:
        assert (stepwell.load(f"{root}/run@1", part=part)[part[0]] == 1.0).all()
    store.close()
    os._exit(0 if "model" in first.parts else 1)

def ended(work, *arguments):
    pid = os.fork()
    if pid == 0:
        work(*arguments)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

for after in range(1, 100):
    root = f"{sys.argv[1]}/{after}"
    os.mkdir(root)
    code = ended(writer, root, after)
    assert code in (0, 9), code
    if os.path.exists(f"{root}/run/step-000000001.1-1/manifest.json"):
        assert ended(reader, root) == 0, after
    assert ended(successor, root) == 0, after
    if code == 0:
        break
print(after)
"""


@pytest.mark.slow
@pytest.mark.parametrize("grows", [None, ["optimizer"]])
def test_a_writer_that_dies_while_a_partial_copy_grows_takes_nothing_with_it(
    tmp_path: Path, grows: list[str] | None
) -> None:
    code = DIES.replace("GROWS", repr(grows))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 7  # as many moments as there are operations


class Away(MemoryTier):
    """A tier that does not answer."""

    away = True

    async def start(self) -> None:
        return

    def scan(self, run: str):  # type: ignore[no-untyped-def]
        if self.away:
            raise TierUnavailable("no answer", tier=self.info.name)
        return super().scan(run)


def test_nothing_found_is_not_nothing_there_while_a_tier_is_away(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=[MemoryTier(name="near"), Away(name="far")], mode="r") as store:
        with pytest.raises(TierUnavailable, match="far: no answer"):
            store.restore(state(0))


def test_what_is_found_is_restored_although_a_tier_is_away(tmp_path: Path) -> None:
    near = MemoryTier(name="near")
    far = Away(name="far")
    far.away = False
    with stepwell.open(run="run", tiers=[near, far]) as store:
        store.save(1, state()).wait("far")
        far.away = True
        found = store.restore(state(0))
        assert found is not None and found.step == 1
        far.away = False


def test_a_part_is_not_bad_that_only_a_tier_which_is_away_has(tmp_path: Path) -> None:
    near = Away(name="near")
    near.away = False
    with stepwell.open(run="run", tiers=[near, FileTier(tmp_path, name="far")], policies=[]) as store:
        store.save(1, state()).wait("near")
        store.flush(1, "far", parts=["model"])
        near.away = True
        with pytest.raises(TierUnavailable, match="no tier has optimizer.safetensors.*near: no answer"):
            store.restore(state(0), 1)
        near.away = False
        assert store.restore(state(0), 1) is not None


def test_a_tier_that_was_away_for_a_moment_costs_no_flush_from_it(tmp_path: Path) -> None:
    """The scan that it did not answer has left the catalog without what is there."""
    near, far = Away(name="near"), Faulty(FileTier(tmp_path, name="far"), [Fault("reserve", 1)])
    near.away = False
    with stepwell.open(run="run", tiers=[near, far]) as store:
        save = store.save(1, state())
        eventually(lambda: bool(far.hit))
        near.away = True
        store.checkpoints()
        near.away = False
        save.wait("far", timeout=20)


@pytest.mark.parametrize("what", ["all of it", "a part", "taken back"])
def test_what_is_whole_on_a_tier_that_was_away_for_a_moment_stays_so(tmp_path: Path, what: str) -> None:
    """Nor is it taken for what a broken flush has left there."""
    near, far = FileTier(tmp_path, name="near"), Away(name="far")
    far.away = False
    with stepwell.open(run="run", tiers=[near, far], policies=[]) as store:
        store.save(1, state()).wait("near")
        store.flush(1, "far")
        far.away = True
        assert [c.tiers for c in store.checkpoints()] == [("near",)]
        far.away = False
        [attempt] = store.catalog.holdings
        writer, parts = store._writer, ["model"] if what == "a part" else None

        async def flushed() -> None:  # as a policy has it done, which does not look at the tiers anew
            await writer.flushers["far"].want(attempt, parts).wait()

        store._runtime.run(writer.work.forget(attempt, far) if what == "taken back" else flushed())
        assert [c.complete_on for c in store.checkpoints()] == [("near", "far")]
        for shard in tmp_path.glob("run/step-*/*.safetensors"):
            shard.unlink()
        into = state(0)
        found = store.restore(into, 1)
        assert found is not None and torch.equal(into["optimizer"]["m"], state()["optimizer"]["m"])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", 96) as folder:
        yield folder


def test_a_full_disk_keeps_the_older_checkpoint_and_saving_goes_on(small_disk: Path) -> None:
    """Case C10."""
    ballast = small_disk / "ballast"
    with stepwell.open(small_disk / "run") as store:
        store.save(1, {"w": torch.ones(5_000_000)}).wait()
        ballast.write_bytes(bytes(40 << 20))
        before = os.statvfs(small_disk).f_bavail
        with pytest.raises(SaveFailed) as caught:
            store.save(2, {"w": torch.ones(20_000_000)}).wait()
        assert isinstance(caught.value.__cause__, TierFull)
        text = str(caught.value)
        assert "disk" in text and "80" in text.replace("_", "") and "free" in text
        assert os.statvfs(small_disk).f_bavail == before
        assert [c.step for c in store.checkpoints()] == [1] and store.debris() == []
        ballast.unlink()
        store.save(3, {"w": torch.ones(5_000_000)}).wait()
        assert [c.step for c in store.checkpoints()] == [1, 3]
