"""What killed, failed and overtaken writers leave behind: never chosen, reported, cleaned when surely dead."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.errors import RunBusy, SaveFailed
from stepwell.format.names import epoch_file
from stepwell.format.records import EpochRecord, Seen, decode, encode
from stepwell.tiers.file import FileTier
from stepwell.tiers.memory import MemoryTier

ROOT = Path(__file__).parents[2]


def state(value: float = 1.0) -> dict[str, torch.Tensor]:
    return {"w": torch.full((1000,), value)}


def saved(folder: Path, *steps: int) -> None:
    with stepwell.open(folder) as store:
        for step in steps:
            store.save(step, state(step)).wait()


def folder_of(run: Path, step: int) -> Path:
    [found] = run.glob(f"step-{step:09d}.*")
    return found


def test_an_attempt_without_a_record_is_debris_and_goes_with_the_next_writer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 1, 2)
    dead = folder_of(run, 2)
    (dead / "manifest.json").unlink()
    (dead / "rank-00000.json").unlink()
    with stepwell.open(run) as store:
        found = store.restore(state(0))
        assert found is not None and found.step == 1
        [left] = store.debris()
        assert left.attempt.step == 2 and left.size_bytes > 0 and not left.late
        assert dead.exists()
        store.save(3, state(3)).wait()
    assert not dead.exists()
    assert [c.step for c in stepwell.open(run, mode="r").checkpoints()] == [1, 3]


def test_an_attempt_that_lacks_only_its_manifest_is_committed_by_the_next_writer(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 1, 2)
    whole = (folder_of(run, 2) / "manifest.json").read_bytes()
    (folder_of(run, 2) / "manifest.json").unlink()
    with stepwell.open(run) as store:
        store.save(3, state(3)).wait()
    with stepwell.open(run, mode="r") as store:
        assert [c.step for c in store.checkpoints()] == [1, 2, 3]
        target = state(0)
        assert store.restore(target, 2) is not None and torch.equal(target["w"], state(2)["w"])
    assert (folder_of(run, 2) / "manifest.json").read_bytes() == whole


def test_an_attempt_with_a_short_file_is_never_committed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 1, 2)
    dead = folder_of(run, 2)
    (dead / "manifest.json").unlink()
    [shard] = dead.glob("*.safetensors")
    os.truncate(shard, shard.stat().st_size - 1)
    with stepwell.open(run) as store:
        store.save(3, state(3)).wait()
        assert [c.step for c in store.checkpoints()] == [1, 3]


def test_a_manifest_that_came_after_its_writer_had_lost_the_run_does_not_count(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 1, 2)
    late = folder_of(run, 2)
    kept = tmp_path / "kept"
    shutil.move(late, kept)
    with stepwell.open(run) as store:  # the next writer looks, and step 2 is not there
        store.restore(state(0))
        store.save(5, state(5)).wait()
    shutil.move(kept, late)
    with stepwell.open(run) as store:
        assert [c.step for c in store.checkpoints()] == [1, 5]
        [left] = store.debris()
        assert left.late
        store.save(6, state(6)).wait()
    assert late.exists(), "it may be somebody's copy: it is reported, not deleted"


def test_the_seen_list_names_what_was_committed(tmp_path: Path) -> None:
    run = tmp_path / "run"
    saved(run, 1, 2)
    saved(run, 3)
    seen = decode((run / epoch_file(2, "seen.json")).read_bytes(), Seen)
    assert seen.attempts == ["step-000000001.1-1", "step-000000002.1-2"]


def test_a_writer_that_sees_one_tier_alone_hides_nothing_on_the_others(tmp_path: Path) -> None:
    """Whoever opens, copies into or deletes from the last tier's folder takes the run over without the others."""
    (tmp_path / "nvme").mkdir()
    (tmp_path / "pfs").mkdir()

    def chain() -> list[FileTier]:
        return [FileTier(tmp_path / name, name=name) for name in ("nvme", "pfs")]

    with stepwell.open(run="run", tiers=chain(), policies=[]) as store:
        store.save(1, state(1)).wait()
        store.flush(1, "pfs")
        store.save(2, state(2)).wait()
    for _ in range(2):
        saved(tmp_path / "pfs" / "run", 7)
        with stepwell.open(run="run", tiers=chain(), mode="r") as store:
            assert {c.step: sorted(c.tiers) for c in store.checkpoints()} == {
                1: ["nvme", "pfs"],
                2: ["nvme"],
                7: ["pfs"],
            }
            assert store.debris() == []
        shutil.rmtree(folder_of(tmp_path / "pfs" / "run", 7))
    with stepwell.open(run="run", tiers=chain(), policies=[]) as store:  # whoever sees all of it tells for all of it
        store.save(3, state(3)).wait()
    (late,) = (tmp_path / "nvme" / "run").glob("step-000000002.*")
    late.rename(late.with_name("step-000000002.1-9"))
    with stepwell.open(run="run", tiers=chain(), mode="r") as store:
        assert 2 not in [c.step for c in store.checkpoints()]


def test_a_second_store_of_the_same_process_is_busy_until_the_first_closes(tmp_path: Path) -> None:
    first = stepwell.open(tmp_path / "run")
    first.save(1, state()).wait()
    second = stepwell.open(tmp_path / "run")
    assert second.restore(state()) is not None  # reading never waits
    with pytest.raises(SaveFailed) as caught:
        second.save(2, state()).wait()
    assert isinstance(caught.value.__cause__, RunBusy) and str(os.getpid()) in str(caught.value)
    first.close()
    with pytest.raises(SaveFailed):
        second.close()
    saved(tmp_path / "run", 2)


def test_an_overtaken_writer_cannot_commit(tmp_path: Path) -> None:
    store = stepwell.open(run="run", tiers=[FileTier(tmp_path)])
    store.save(1, state()).wait()
    usurper = decode((tmp_path / "run" / epoch_file(1)).read_bytes(), EpochRecord)
    usurper.token, usurper.pid = "other", 1
    (tmp_path / "run" / epoch_file(2)).write_bytes(encode(usurper))
    with pytest.raises(SaveFailed) as caught:
        store.save(2, state()).wait()
    assert isinstance(caught.value.__cause__, RunBusy)
    assert [c.step for c in store.checkpoints()] == [1]
    with pytest.raises(SaveFailed, match="another writer"):
        store.close()


def test_a_killed_writer_is_replaced_without_waiting(tmp_path: Path) -> None:
    code = (
        "import sys, os, signal, torch, stepwell\n"
        "store = stepwell.open(sys.argv[1])\n"
        "store.save(1, {'w': torch.full((1000,), 1.0)}).wait()\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], cwd=ROOT, timeout=100, check=False)
    began = time.monotonic()
    with stepwell.open(tmp_path / "run") as store:
        assert store.restore(state(0)) is not None
        store.save(2, state(2)).wait()
    assert time.monotonic() - began < 20, "it watched a dead process's heartbeat"


def test_a_failed_save_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    class Flaky(MemoryTier):
        fail = False

        async def commit(self, record, data, *, shards=()):  # type: ignore[no-untyped-def]
            if self.fail and record.name.endswith("rank-00000.json"):
                raise stepwell.TierFull("no space", tier="memory")
            return await super().commit(record, data, shards=shards)

    tier = Flaky()
    with stepwell.open(run="run", tiers=[tier]) as store:
        store.save(1, state(1)).wait()
        used = tier.usage()
        tier.fail = True
        with pytest.raises(SaveFailed, match="no space"):
            store.save(2, state(2)).wait()
        tier.fail = False
        assert store.debris() == []
        assert tier.usage().logical_bytes == used.logical_bytes and tier.usage().in_flight_bytes == 0
        store.save(3, state(3)).wait()
        assert [c.step for c in store.checkpoints()] == [1, 3]


@pytest.mark.parametrize("name", ["manifest.json", "rank-00000.json"])
def test_a_bad_newest_checkpoint_does_not_stop_the_run(tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    saved(run, 1, 2)
    path = folder_of(run, 2) / name
    path.write_bytes(path.read_bytes().replace(b"seal", b"deal"))
    with stepwell.open(run) as store:
        found = store.restore(state(0))
        assert found is not None and found.step == 1 and list(found.skipped) == [2]
        store.save(2, state(7)).wait()
        target = state(0)
        again = store.restore(target)
        assert again is not None and again.step == 2 and again.timeline == 1 and again.skipped == {}
        assert torch.equal(target["w"], state(7)["w"])
