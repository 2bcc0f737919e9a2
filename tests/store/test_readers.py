"""Evaluation jobs: they read, annotate, keep and watch a run while another process writes it, without write permission
anywhere but in its folder of notes."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.catalog import Catalog
from stepwell.errors import CheckpointGone, CheckpointNotFound, ConfigError, CorruptData, StepwellError, TierUnavailable
from stepwell.format.names import GROWING, MANIFEST, rank_of
from stepwell.policies.evict import LRU
from stepwell.reader import open_checkpoint
from stepwell.tiers.base import NOTES, CheckpointKey, Found, RecordKey, ShardKey
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.pfs import PfsTier
from tests.store.helpers import state
from tests.store.scripts import Scripts

NOBODY = 65534

#: an evaluation job of another user: annotates, tags and keeps what the run has, and writes nothing else
EVALUATOR = """
import encodings.ascii, encodings.idna, os, sys, stepwell
from stepwell.tiers.pfs import PfsTier
root, uid = sys.argv[1], int(sys.argv[2])
with stepwell.open(run="run", tiers=[PfsTier(root + "/pfs", read_only=True)], mode="r") as store:
    store.restore({}, step=1, strict=False)   # imports what the other user may not be able to read
os.setgroups([]), os.setgid(uid), os.setuid(uid)
os.environ["XDG_CACHE_HOME"] = root + "/home"
with stepwell.open(run="run", tiers=[PfsTier(root + "/pfs", read_only=True)], mode="r") as store:
    for ckpt in store.watch(poll="20ms", timeout="200ms"):
        model = {}
        store.restore(model, step=ckpt.step, strict=False)
        try:
            store.annotate(ckpt, {"eval/acc": ckpt.step / 10}, tags=["seen"])
        except stepwell.TierError as error:
            print(type(error).__name__, error)
            sys.exit(7)
    print(store.keep(2).kept, store.best("eval/acc", "max").step, store.tag(1, "first", remove="seen").tags)
"""


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder that other users get to, as pytest's are not."""
    folder = Path(tempfile.mkdtemp(prefix="stepwell-test-"))
    folder.chmod(0o755)
    (folder / "pfs").mkdir(mode=0o755)
    yield folder
    shutil.rmtree(folder)


def writer(root: Path) -> stepwell.CheckpointStore:
    return stepwell.open(
        run="run", tiers=[HostTier(LRU(), 64 << 20, chunk_bytes=1 << 20), PfsTier(root / "pfs", reading="direct")]
    )


def tree(root: Path) -> dict[str, int]:
    """All that is under a folder, with the times of what changes."""
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in sorted(root.rglob("*"))}


as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")


@as_root
def test_another_user_annotates_while_the_writer_saves(
    shared: Path, scripts: Scripts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(shared / "home"))
    with writer(shared) as store:
        for step in (1, 2, 3):
            store.save(step, state(step), metrics={"loss": 1 / step}).wait("pfs")
        notes = shared / "pfs" / "run" / NOTES
        notes.mkdir()
        os.chown(notes, NOBODY, NOBODY)
        done = scripts.run(EVALUATOR, shared, NOBODY)
        assert (done.status, done.out) == (0, "True 3 ('first',)\n"), done.err
        theirs = [path for path in shared.rglob("*") if path.lstat().st_uid == NOBODY]
        assert len(theirs) == 6 and all(path in (notes, *notes.iterdir()) for path in theirs)
        store.save(4, state(4)).wait("pfs")
        found = {c.step: c for c in store.checkpoints()}
        assert [c.metrics.get("eval/acc") for c in found.values()] == [0.1, 0.2, 0.3, None]
        assert [c.kept for c in found.values()] == [False, True, False, False]
        assert [c.tags for c in found.values()] == [("first",), ("seen",), ("seen",), ()]


@as_root
def test_without_permission_an_evaluator_reads_and_hears_which_folder_it_needs(shared: Path, scripts: Scripts) -> None:
    with writer(shared) as store:
        store.save(1, state(1)).wait("pfs")
    before = tree(shared / "pfs")
    done = scripts.run(EVALUATOR, shared, NOBODY)
    assert done.status == 7 and f"{shared}/pfs/run/notes" in done.out and "chmod g+rwxs" in done.out, done.err
    assert tree(shared / "pfs") == before


def test_a_reader_makes_nothing_but_its_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    (tmp_path / "pfs").mkdir()
    with writer(tmp_path) as store:
        store.save(1, state(1)).wait("pfs")
    before = set(tree(tmp_path))
    with stepwell.open(run="run", tiers=[PfsTier(tmp_path / "pfs", read_only=True)], mode="r") as reader:
        reader.annotate(1, {"acc": 1.0})
        assert set(tree(tmp_path)) - before == {"pfs/run/notes", "pfs/run/notes/0000001.json"}
        (tmp_path / "pfs" / ".stepwell-tier.json").unlink()
        with pytest.raises(TierUnavailable, match="bare mount point"):
            reader.annotate(1, {"acc": 2.0})
    assert not (tmp_path / "pfs" / ".stepwell-tier.json").exists()


def test_many_annotators_lose_nothing(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, state(1)).wait()
    stores = [stepwell.open(tmp_path / "run", mode="r") for _ in range(4)]
    with ThreadPoolExecutor(12) as threads:
        list(threads.map(lambda i: stores[i % 4].annotate(1, {f"m{i}": i}), range(48)))
    for reader in stores:
        [found] = reader.checkpoints()
        assert found.metrics == {f"m{i}": float(i) for i in range(48)}
        reader.close()
    assert len(list((tmp_path / "run" / NOTES).glob("*.json"))) == 48


def test_what_notes_say_is_seen_by_all_that_chooses(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        for step in (1, 2, 3, 4):
            store.save(step, state(step), metrics={"loss": 1.0 if step < 4 else float("nan")}, tags="t").wait()
        best = store.best("loss")
        assert best is not None and best.step == 3  # of equals the newer; NaN never
        store.annotate(1, {"loss": 0.5})
        store.annotate(2, {"loss": float("nan"), "acc": 0.9}, tags=["good"], remove=["t"])
        assert [c.step for c in store.checkpoints(tag="t")] == [1, 3, 4]
        assert [c.step for c in store.checkpoints(kept=True)] == [] == store.checkpoints(kept=False, tag="none")
        found = [store.best("loss"), store.best("loss", "max"), store.best("acc"), store.best("none")]
        assert [c and c.step for c in found] == [1, 3, 2, None]
        assert store.best("loss", tier="host") is not None
        assert (stepwell.load(f"{tmp_path / 'run'}@best:loss", part="model")["w"] == 1).all()
        assert (stepwell.load(f"{tmp_path / 'run'}@good", part="model")["w"] == 2).all()
        for wrong in (
            lambda: store.best("loss", "least"),  # type: ignore[arg-type]
            lambda: store.annotate(1, {"loss": "low"}),
            lambda: store.tag(1, "x", remove="x"),
            lambda: store.tag(1, ""),
            lambda: store.checkpoints(tier="none"),
            lambda: store.watch(poll="often"),
        ):
            with pytest.raises(ConfigError):
                wrong()
        with pytest.raises(CheckpointNotFound):
            store.keep(9)


def test_a_partial_copy_that_becomes_whole_is_whole_for_who_saw_it_before(tmp_path: Path) -> None:
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    tiers = [FileTier(tmp_path / "near", name="near"), FileTier(tmp_path / "far", name="far")]
    with (
        stepwell.open(run="run", tiers=tiers, policies=[]) as store,
        stepwell.open(run="run", tiers=[FileTier(tmp_path / "far", name="far")], mode="r") as reader,
    ):
        store.save(1, state(1) | {"extra": [1]}).wait("near")
        store.flush(1, "far", parts=["model"])
        seen = reader.latest()
        assert seen is not None and seen.tiers == ("far",) and seen.complete_on == ()
        store.flush(1, "far")
        seen = reader.latest()
        assert seen is not None and seen.complete_on == ("far",)
        assert reader.restore(state(0) | {"extra": [0]}) is not None


def test_a_note_needs_its_checkpoint_and_the_last_tier(tmp_path: Path) -> None:
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir()
    tiers = [FileTier(tmp_path / "nvme", name="nvme"), FileTier(tmp_path / "pfs", name="pfs")]
    with stepwell.open(run="run", tiers=tiers) as store:
        store.save(1, state(1)).wait("pfs")
        store.save(2, state(2)).wait("pfs")
        gone = store.checkpoints()[0]
    with stepwell.open(tmp_path / "nvme" / "run", mode="r") as reader, pytest.raises(ConfigError, match="last tier"):
        reader.keep(1)
    with stepwell.open(tmp_path / "pfs" / "run", mode="r") as reader:
        assert reader.keep(gone).kept and not reader.keep(1, False).kept
        shutil.rmtree(tmp_path / "pfs" / "run" / gone.name)
        with pytest.raises(CheckpointGone):
            reader.annotate(gone, {"acc": 1.0})
    assert not (tmp_path / "nvme" / "run" / NOTES).exists()


# -- watch -------------------------------------------------------------------------------


def test_watch_gives_each_checkpoint_once_while_retention_deletes(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store, stepwell.open(tmp_path / "run", mode="r") as reader:
        store.save(1, state(1)).wait()
        watched = threading.Event()
        seen: list[int] = []

        def evaluate() -> None:
            for found in reader.watch(poll="5ms", timeout="60s"):
                seen.append(found.step)
                watched.set()
                if found.step == 12:
                    return

        job = threading.Thread(target=evaluate)
        job.start()
        for step in range(2, 13):
            assert watched.wait(60)
            watched.clear()
            save = store.save(step, state(step))
            save.wait()
            for old in (tmp_path / "run").glob(f"step-{step - 1:09d}.*"):
                shutil.rmtree(old)
        job.join(60)
        assert seen == list(range(1, 13))


def test_watch_goes_on_after_a_step_and_after_a_rewind(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store, stepwell.open(tmp_path / "run", mode="r") as reader:
        for step in (1, 2, 3):
            store.save(step, state(step)).wait()
        news = reader.watch(after=2, poll="5ms", timeout="60s")
        assert next(news).step == 3
        store.rewind(1)
        store.save(2, state(2)).wait()
        again = next(news)
        assert again.step == 2 and again.timeline == 1
        assert [c.step for c in reader.watch(poll="5ms", timeout="20ms")] == [1, 2]


def test_watch_ends_when_the_store_is_closed_and_when_the_time_is_over(tmp_path: Path) -> None:
    reader = stepwell.open(tmp_path / "run", mode="r")
    assert list(reader.watch(timeout=0.01)) == []
    threading.Timer(0.05, reader.close).start()
    assert list(reader.watch(poll="1h")) == []
    with pytest.raises(stepwell.StoreClosed):
        reader.watch()


def test_watch_says_that_it_cannot_see(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    reader = stepwell.open(tmp_path / "root" / "run", mode="r")
    (tmp_path / "root").rmdir()
    with pytest.raises(StepwellError, match="nothing can be seen"):
        list(reader.watch(poll="5ms", timeout="10ms"))
    reader.close()


class Early(FileTier):
    """Is listed once before a checkpoint is there that other tiers already have a part of."""

    early = True

    async def scan(self, run: str) -> AsyncIterator[Found]:
        early, self.early = self.early, False
        async for found in super().scan(run):
            if not (early and found.attempt.startswith("step-")):
                yield found


def test_tiers_that_are_listed_one_after_the_other_hide_no_part(tmp_path: Path) -> None:
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    tiers = [FileTier(tmp_path / "near", name="near"), FileTier(tmp_path / "far", name="far")]
    with stepwell.open(run="run", tiers=tiers, policies=[]) as store:
        store.save(1, {"model": torch.ones(9), "optimizer": torch.ones(600_000)}).wait("near")
        store.flush(1, "far", parts=["model"])
        catalog = Catalog("run", [near := Early(tmp_path / "near", name="near"), *tiers[1:]])

        async def look() -> tuple[int, list[str]]:
            await near.start()
            try:
                await catalog.refresh()
                [attempt] = catalog.holdings
                seen = len(catalog.holdings[attempt])
                opened = await open_checkpoint(catalog, attempt, 0, 1)
                files = sorted(held.shard.file for held in opened.held)
                await opened.close()
                return seen, files
            finally:
                await near.close()

        seen, files = store._runtime.run(look())
        assert seen == 1 and len(files) > 1


class Below(FileTier):
    """Says when it has been listed."""

    listed: asyncio.Event

    async def scan(self, run: str) -> AsyncIterator[Found]:
        async for found in super().scan(run):
            yield found
        self.listed.set()


class Above(FileTier):
    """What it has goes down while it is listed: after a while, or not before the tier below has been listed."""

    late: bool
    below: Below

    async def scan(self, run: str) -> AsyncIterator[Found]:
        await (self.below.listed.wait() if self.late else asyncio.sleep(0.05))
        here, there = (Path(tier.info.detail["path"]) / run for tier in (self, self.below))
        for folder in here.glob("step-*"):
            shutil.move(folder, there / folder.name)
        async for found in super().scan(run):
            yield found


@pytest.mark.parametrize("late", [False, True])
def test_what_goes_down_while_tiers_are_listed_is_not_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr("stepwell.catalog.SOON_S", 0.02 if late else 10.0)
    for name in ("above", "below"):
        (tmp_path / name / "run").mkdir(parents=True)
    with stepwell.open(run="run", tiers=[FileTier(tmp_path / "above")]) as store:
        store.save(1, state(1)).wait()
        above, below = Above(tmp_path / "above", name="above"), Below(tmp_path / "below", name="below")
        above.late, above.below = late, below
        catalog = Catalog("run", [above, below])

        async def look() -> list[str]:
            below.listed = asyncio.Event()
            await asyncio.gather(above.start(), below.start())
            try:
                await catalog.refresh()
                return [holding.tier.info.name for held in catalog.holdings.values() for holding in held]
            finally:
                await asyncio.gather(above.close(), below.close())

        assert store._runtime.run(look()) == ["below"]


class Hesitant(FileTier):
    """Waits, once what commits a copy is gone, until somebody has looked."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, name="far")
        self.gone, self.seen = threading.Event(), threading.Event()

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        await super().drop(what)
        if any(str(key).endswith(MANIFEST) for key in what):
            self.gone.set()
            await asyncio.to_thread(self.seen.wait, 10.0)


class Looking(FileTier):
    """Says that it has been listed."""

    seen = threading.Event()

    async def scan(self, run: str) -> AsyncIterator[Found]:
        async for found in super().scan(run):
            yield found
        self.seen.set()


def test_a_restore_waits_for_a_partial_copy_that_becomes_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.catalog.GROW_LOOK_S", 0.02)
    for name in ("near", "far"):
        (tmp_path / name).mkdir()
    far, seen = Hesitant(tmp_path / "far"), Looking(tmp_path / "far", name="far")
    with (
        stepwell.open(run="run", tiers=[FileTier(tmp_path / "near", name="near"), far], policies=[]) as store,
        stepwell.open(run="run", tiers=[seen], mode="r") as reader,
        ThreadPoolExecutor(1) as threads,
    ):
        store.save(1, state(1) | {"extra": [1]}).wait("near")
        store.flush(1, "far", parts=["model"])
        flushing = threads.submit(store.flush, 1, "far")
        assert far.gone.wait(10.0)
        seen.seen = far.seen
        found = reader.restore(state(0) | {"extra": [0]})
        flushing.result()
        assert found is not None and found.complete_on == ("far",)


class Renewed(FileTier):
    """A copy makes way just before its record is read, and another one is whole just after that."""

    times = 1

    async def fetch(self, record: RecordKey) -> bytes | None:
        if rank_of(record.name.rpartition("/")[2]) is not None and self.times:
            self.times -= 1
            return None
        return await super().fetch(record)


@pytest.mark.parametrize("times", [1, 9])
def test_a_record_that_was_made_anew_while_it_was_read_is_not_missing(tmp_path: Path, times: int) -> None:
    with stepwell.open(run="run", tiers=[FileTier(tmp_path, name="near")], policies=[]) as store:
        store.save(1, state(1)).wait("near")
    tier = Renewed(tmp_path, name="near")
    tier.times = times
    with stepwell.open(run="run", tiers=[tier], mode="r") as reader:
        if times == 1:
            found = reader.restore(state(0), step=1)
            assert found is not None and found.step == 1
        else:
            with pytest.raises(CorruptData, match="the file is missing"):
                reader.restore(state(0), step=1)


def test_a_restore_waits_for_a_dead_writer_only_so_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.catalog.GROW_LOOK_S", 0.02)
    monkeypatch.setattr("stepwell.catalog.GROW_S", 0.1)
    with stepwell.open(tmp_path / "run") as store:
        for step in (1, 2):
            store.save(step, state(step)).wait()
        _, newest = sorted((tmp_path / "run").glob("step-*"))
    (newest / MANIFEST).rename(newest / GROWING)
    (newest / "rank-00000.json").unlink()
    began = time.monotonic()
    with stepwell.open(tmp_path / "run", mode="r") as reader:
        found = reader.restore(state(0))
        assert found is not None and found.step == 1 and time.monotonic() - began > 0.1
