"""Forks: a run that begins from another run's checkpoint, without a copy, and keeps it as long as it needs it."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import CheckpointNotFound, ConfigError, StepExists, TierError
from stepwell.format.names import RUN_FILE
from stepwell.format.records import RunRecord, decode
from stepwell.policies.base import Drop, Event, Move, View
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from tests.store.helpers import eventually
from tests.store.scripts import Scripts


def state(value: float = 0.0, *parts: str) -> dict[str, Any]:
    return {part: {"w": torch.full((1000,), float(value))} for part in parts or ("model",)}


def value(of: dict[str, Any], part: str = "model") -> float:
    return float(of[part]["w"][0])


def saved(folder: Path, *steps: int) -> Path:
    with stepwell.open(folder) as store:
        for step in steps:
            store.save(step, state(step)).wait()
    return folder


def holders(run: Path, step: int) -> frozenset[str]:
    """Who keeps a checkpoint, as a reader of the run sees it."""
    with stepwell.open(run, mode="r") as store:
        [found] = [c for c in store.checkpoints() if c.step == step]
        attempt = next(a for a in store.catalog.holdings if a.folder == found.name)
        return store.catalog.notes.holders(attempt)


def chain(tmp_path: Path) -> list[Tier]:
    """Two storage tiers."""
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir(exist_ok=True)
    return [FileTier(tmp_path / "nvme", name="nvme"), FileTier(tmp_path / "pfs", name="pfs", survives="node-loss")]


@pytest.fixture
def parent(tmp_path: Path) -> Path:
    return saved(tmp_path / "sft", 1, 2, 3)


# -- the beginning -------------------------------------------------------------------------


def test_a_fork_begins_from_its_parent_and_copies_nothing(tmp_path: Path, parent: Path) -> None:
    with stepwell.open(tmp_path / "new", fork_from=f"{parent}@2") as store:
        assert store.checkpoints() == [] and not (tmp_path / "new").exists()
        target = state()
        found = store.restore(target)
        assert found is not None and (found.step, found.run, value(target)) == (2, "sft", 2.0)
        store.save(3, state(33)).wait()
        [own] = store.checkpoints()
        assert (own.step, own.run) == (3, "new")
        assert own.parent == f"sft@{found.name}"
        store.save(4, state(44)).wait()
        assert store.checkpoints()[-1].parent == own.name
    assert not list((tmp_path / "new").glob("step-000000002*"))
    with stepwell.open(parent, mode="r") as store:
        assert [c.step for c in store.checkpoints()] == [1, 2, 3]  # as it was
    record = decode((tmp_path / "new" / RUN_FILE).read_bytes(), RunRecord)
    assert record.forked_from == own.parent


@pytest.mark.parametrize("ref", ["sft@2", "{root}/sft@2", "{root}/sft/{folder}", "sft@best:loss", "sft@good"])
def test_any_reference_to_one_checkpoint_serves(tmp_path: Path, ref: str) -> None:
    with stepwell.open(tmp_path / "sft") as store:
        for step, loss in ((1, 0.5), (2, 0.1), (3, 0.9)):
            store.save(step, state(step), metrics={"loss": loss}, tags=["good"] if step == 2 else []).wait()
        folder = store.checkpoints()[1].name
    with stepwell.open(tmp_path / "new", fork_from=ref.format(root=tmp_path, folder=folder)) as store:
        found = store.restore(state())
        assert found is not None and (found.run, found.step) == ("sft", 2)
        again = store.restore(state(), step=2)
        assert again is not None and again.sources == {"host": sum(found.sources.values())}
        assert replace(again, sources=found.sources) == found


def test_a_fork_under_the_same_name_elsewhere(tmp_path: Path, parent: Path) -> None:
    (tmp_path / "b").mkdir()
    home = tmp_path / "b" / "sft"
    with stepwell.open(home, fork_from=f"{parent}@2") as store:
        target = state()
        found = store.restore(target)
        assert found is not None and found.step == 2 and value(target) == 2.0 and "parent" in found.sources
        assert holders(parent, 2) == {f"fork:{home}"}
        store.save(3, state(33)).wait()
        [own] = store.checkpoints()
        assert own.parent == f"{parent}@{found.name}"
    assert holders(parent, 2) == frozenset()


def test_steps_go_on_above_the_parents(tmp_path: Path, parent: Path) -> None:
    with stepwell.open(tmp_path / "new", fork_from="sft@2") as store:
        for step in (1, 2):
            with pytest.raises(StepExists):
                store.save(step, state())
        with pytest.raises(CheckpointNotFound):
            store.rewind(1)
        store.rewind(2)
        store.save(3, state(33)).wait()  # the weights came from elsewhere: its parent is the same
        [own] = store.checkpoints()
        assert own.parent is not None and own.parent.startswith("sft@step-000000002.")


def test_a_step_that_only_the_parent_has_is_not_the_forks(tmp_path: Path, parent: Path) -> None:
    with stepwell.open(tmp_path / "new", fork_from="sft@2") as store:
        with pytest.raises(CheckpointNotFound):
            store.restore(state(), step=1)


# -- later starts --------------------------------------------------------------------------


def test_every_start_may_say_the_same(tmp_path: Path, parent: Path) -> None:
    seen = []
    for start in range(3):
        with stepwell.open(tmp_path / "new", fork_from="sft@2", resume="must") as store:
            target = state()
            found = store.restore(target)
            assert found is not None
            seen.append((found.run, found.step, value(target)))
            store.save(found.step + 1, state(100 + start)).wait()
            with pytest.raises(StepExists):
                store.save(2, state())
    assert seen == [("sft", 2, 2.0), ("new", 3, 100.0), ("new", 4, 101.0)]
    shutil.rmtree(parent)
    with stepwell.open(tmp_path / "new", fork_from="sft@2") as store:
        found = store.restore(state())
        assert found is not None and found.step == 5


def test_until_the_last_tier_has_it_whole_the_parent_is_kept_and_stands_in(tmp_path: Path) -> None:
    with stepwell.open(tiers=chain(tmp_path), run="sft") as store:
        store.save(5, state(5, "model", "optimizer"))
    pfs = tmp_path / "pfs"
    with stepwell.open(tiers=chain(tmp_path), run="new", policies=[], fork_from="sft@5") as store:
        assert store.restore(state(0, "model", "optimizer")) is not None
        store.save(6, state(6, "model", "optimizer")).wait("nvme")
        store.flush(6, "pfs", parts=["model"])
    assert holders(pfs / "sft", 5) == {"fork:new"}
    shutil.rmtree(tmp_path / "nvme" / "new")  # the node is gone; on the PFS only the weights are left
    with stepwell.open(tiers=chain(tmp_path), run="new", fork_from="sft@5") as store:
        target = state(0, "model", "optimizer")
        found = store.restore(target)
        assert found is not None and (found.run, found.step) == ("sft", 5)
        assert list(found.skipped) == [6] and value(target, "optimizer") == 5.0
        only = state()
        assert (weights := store.restore(only)) is not None and weights.run == "new" and value(only) == 6.0
        assert store.restore(target) is not None
        store.save(6, state(66, "model", "optimizer")).wait("pfs")
        newest = store.latest()
        assert newest is not None and newest.step == 6 and newest.timeline == 1 and newest.parent == f"sft@{found.name}"
    assert holders(pfs / "sft", 5) == frozenset()


def test_what_a_killed_fork_could_not_take_back_is_taken_back_at_the_next_start(
    tmp_path: Path, parent: Path, scripts: Scripts
) -> None:
    code = """
import os, sys, torch, stepwell
from stepwell.notes import Notes
real = Notes.add
async def add(self, attempt, **what):
    if what.get("keep") is False:
        os._exit(9)
    return await real(self, attempt, **what)
Notes.add = add
with stepwell.open(sys.argv[1], fork_from=sys.argv[2]) as store:
    state = {"model": {"w": torch.zeros(1000)}}
    store.restore(state)
    store.save(3, state).wait()
"""
    assert scripts.run(code, tmp_path / "new", f"{parent}@2").status == 9
    assert holders(parent, 2) == {"fork:new"}
    with stepwell.open(tmp_path / "new", fork_from="sft@2") as store:
        found = store.restore(state())
        assert found is not None and found.run == "new"
    assert holders(parent, 2) == frozenset()


# -- families ------------------------------------------------------------------------------


def test_a_fork_of_a_fork(tmp_path: Path, parent: Path) -> None:
    with stepwell.open(tmp_path / "b", fork_from="sft@2") as store:
        store.restore(state())
        store.save(3, state(30)).wait()
    with stepwell.open(tmp_path / "c", fork_from="b@latest") as store:
        target = state()
        found = store.restore(target)
        assert found is not None and (found.run, found.step, value(target)) == ("b", 3, 30.0)
        store.save(4, target).wait()
        [own] = store.checkpoints()
        assert own.parent == f"b@{found.name}"


def test_two_forks_of_one_parent_at_once(tmp_path: Path, parent: Path) -> None:
    stores = [stepwell.open(tmp_path / name, fork_from="sft@2") for name in ("b", "c")]
    for store in stores:
        assert store.restore(state()) is not None
    assert holders(parent, 2) == {"fork:b", "fork:c"}
    stores[0].save(3, state(30)).wait()
    eventually(lambda: holders(parent, 2) == {"fork:c"})
    stores[1].save(3, state(31)).wait()
    for store in stores:
        store.close()
    assert holders(parent, 2) == frozenset()
    target = state()
    assert stepwell.load(f"{tmp_path / 'b'}@3")["model"]["w"][0] == 30.0
    with stepwell.open(tmp_path / "c", mode="r") as reader:
        assert reader.restore(target) is not None and value(target) == 31.0


class DropAllButNewest:
    """A retention that wants every checkpoint gone but the newest."""

    def decide(self, event: Event, view: View) -> Sequence[Move]:
        return [Drop(c.name, "disk", "test") for c in view.on("disk")[:-1]]


def test_the_parents_retention_leaves_it_while_a_fork_waits(tmp_path: Path, parent: Path) -> None:
    fork = stepwell.open(tmp_path / "new", fork_from="sft@2")
    assert fork.restore(state()) is not None
    tier = FileTier(tmp_path, name="disk")
    with stepwell.open(tiers=[tier], run="sft", policies=[DropAllButNewest()]) as store:
        store.restore(state())
        store.save(4, state(4)).wait()
        eventually(lambda: [c.step for c in store.checkpoints()] == [2, 4])
        fork.save(3, state(33)).wait()
        eventually(lambda: not holders(parent, 2))
        store.save(5, state(5)).wait()
        eventually(lambda: [c.step for c in store.checkpoints()] == [5])
    fork.close()


# -- refusals ------------------------------------------------------------------------------


def test_a_parent_that_is_gone(tmp_path: Path, parent: Path) -> None:
    store = stepwell.open(tmp_path / "new", fork_from="sft@2")
    for folder in parent.glob("step-000000002.*"):
        shutil.rmtree(folder)
    with pytest.raises(CheckpointNotFound, match="fork_from='sft@2' is not there.*begin anew"):
        store.restore(state())
    store.close()
    for ref in ("sft@2", f"{parent}@2", "nothing@1", f"{tmp_path}/nothing@1", "sft@1..3"):
        with pytest.raises(CheckpointNotFound, match="is not there.*begin anew"):
            stepwell.open(tmp_path / "new", fork_from=ref)


def test_what_is_no_checkpoint_of_another_run(tmp_path: Path, parent: Path) -> None:
    with pytest.raises(ConfigError, match="this run itself"):
        stepwell.open(parent, fork_from="sft@2")
    with pytest.raises(ConfigError, match="reader cannot fork"):
        stepwell.open(tmp_path / "new", mode="r", fork_from="sft@2")
    plain = next(parent.glob("step-000000002.*")) / "model.safetensors"
    with pytest.raises(ConfigError, match="no checkpoint of a run"):
        stepwell.open(tmp_path / "new", fork_from=plain)


def test_a_parent_that_nobody_may_write(
    tmp_path: Path, parent: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write everywhere, so the tier refuses here."""
    real = FileTier.commit

    async def commit(self: FileTier, record: Any, data: bytes, **more: Any) -> bool:
        if record.run == "sft":
            error = TierError("Permission denied")
            error.errno = 13
            raise error
        return await real(self, record, data, **more)

    monkeypatch.setattr(FileTier, "commit", commit)
    with caplog.at_level(logging.WARNING), stepwell.open(tmp_path / "new", fork_from="sft@2") as store:
        assert store.restore(state()) is not None
        store.save(3, state()).wait()
    [warning] = [r.getMessage() for r in caplog.records if "cannot be kept" in r.getMessage()]
    assert "may delete it" in warning and "stepwell keep 'sft@2'" in warning and os.fspath(parent) in warning


def test_a_parent_that_was_only_copied_needs_no_note(tmp_path: Path, parent: Path) -> None:
    copied = tmp_path / "archive" / "sft"
    copied.mkdir(parents=True)
    for folder in parent.glob("step-*"):
        shutil.copytree(folder, copied / folder.name)
    with stepwell.open(tmp_path / "new", fork_from=f"{copied}@2") as store:
        assert store.restore(state()) is not None
    assert not (copied / "notes").exists()
