"""`stepwell cp`: verified on the way, committed last, never over anything, and nothing is left of a failed copy."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.copying import copy
from stepwell.errors import CheckpointGone, StepExists
from tests.cli.helpers import Cli, flip, folder_of, state, tree


class Watch:
    """A progress that calls back at every step."""

    def __init__(self, on_moved: Any) -> None:
        self.expected = self.done = 0
        self._on_moved = on_moved

    def expect(self, size_bytes: int) -> None:
        self.expected += size_bytes

    def moved(self, size_bytes: int) -> None:
        self.done += size_bytes
        self._on_moved()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "archive"


def test_a_copy_is_the_same_bytes_under_the_same_name(cli: Cli, run: Path, target: Path) -> None:
    answer = cli("cp", f"{run}@2", target, "--json")
    [copied] = answer.json["copied"]
    assert copied["path"] == str(target / folder_of(run, 2).name) and copied["step"] == 2
    assert tree(folder_of(target, 2)) == tree(folder_of(run, 2))
    assert [path.name for path in target.iterdir()] == [folder_of(run, 2).name]
    assert stepwell.load(target)["step"] == 2
    assert cli("verify", target).code == 0
    assert f"-> {target}" in cli("cp", f"{run}@1", target).out


def test_the_newest_one_if_none_is_named_and_a_range(cli: Cli, run: Path, target: Path) -> None:
    assert [c["step"] for c in cli("cp", run, target, "--json").json["copied"]] == [5]
    assert [c["step"] for c in cli("cp", f"{run}@..3", target, "--json").json["copied"]] == [1, 2]
    assert [c["step"] for c in cli("cp", f"{run}@3", target, "--json").json["copied"]] == [3]  # abandoned, by number
    assert cli("verify", target).code == 0


def test_no_manifest_is_there_before_all_else_is(run: Path, target: Path) -> None:
    seen: list[bool] = []
    watch = Watch(lambda: seen.append(any(target.glob("*/manifest.json"))))
    copy(f"{run}@1", target, watch)
    assert len(seen) >= 3 and not any(seen)
    assert watch.expected == watch.done > 0


def test_nothing_is_replaced(cli: Cli, run: Path, target: Path) -> None:
    cli("cp", f"{run}@2", target)
    before = tree(target)
    for ref in (f"{run}@2", f"{run}@1..2"):  # of the range nothing is copied either
        answer = cli("cp", ref, target, "--json")
        assert answer.code == 1 and answer.json["copied"] == [] and "step 2 is there already" in answer.err
    assert tree(target) == before


def test_what_is_left_of_another_copy_is_named_and_can_be_removed(cli: Cli, run: Path, target: Path) -> None:
    left = target / folder_of(run, 2).name
    left.mkdir(parents=True)
    (left / "rank-00000.json").write_text("half")
    answer = cli("cp", f"{run}@2", target)
    assert answer.code == 1 and f"stepwell rm '{left}'" in answer.err
    assert (left / "rank-00000.json").read_text() == "half"
    assert cli("rm", left, "--yes").code == 0
    assert cli("cp", f"{run}@2", target).code == 0


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "rank-00000.json", "notes.txt"])
def test_a_damaged_source_is_not_copied_and_leaves_nothing(cli: Cli, run: Path, target: Path, name: str) -> None:
    path = folder_of(run, 2) / name
    flip(path, path.stat().st_size // 2)
    answer = cli("cp", f"{run}@2", target)
    assert answer.code == 1 and name in answer.err and answer.err.count("\n") == 1
    assert not target.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "rank-00000.json", "notes.txt"])
def test_a_source_with_a_file_missing_is_not_copied(cli: Cli, run: Path, target: Path, name: str) -> None:
    (folder_of(run, 2) / name).unlink()
    answer = cli("cp", f"{run}@2", target)
    assert answer.code == 1 and name in answer.err and not target.exists()


def test_a_copy_that_fails_midway_leaves_nothing(run: Path, target: Path, plain: Path) -> None:
    def fail() -> None:
        raise RuntimeError("out of luck")

    for ref in (f"{run}@2", plain):
        with pytest.raises(RuntimeError, match="luck"):
            copy(ref, target, Watch(fail))
        assert not target.exists()
    copy(f"{run}@2", target)


def test_earlier_copies_of_a_range_stay_when_a_later_one_fails(cli: Cli, run: Path, target: Path) -> None:
    flip(folder_of(run, 5) / "model.safetensors", 0)
    assert cli("cp", f"{run}@2..5", target).code == 1
    assert [path.name for path in target.iterdir()] == [folder_of(run, 2).name]
    assert cli("verify", target).code == 0


# -- into a run --------------------------------------------------------------------------


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A run that had two writers."""
    folder = tmp_path / "other"
    for step in (1, 4):
        with stepwell.open(folder) as store:
            if step > 1:
                store.restore(state(0))
            store.save(step, state(100 + step)).wait()
    return folder


def test_in_a_run_the_copy_is_one_of_its_checkpoints(cli: Cli, run: Path, other: Path) -> None:
    [copied] = cli("cp", f"{run}@5", other, "--json").json["copied"]
    assert copied["name"] == "step-000000005.3-1"
    assert cli("verify", other).code == 0
    [listed] = cli("ls", other, "--json").json["listed"]
    assert [c["step"] for c in listed["checkpoints"]] == [1, 4, 5] and listed["debris"] == []
    assert cli("show", f"{other}@5", "--json").json["run_id"] == cli("show", f"{other}@4", "--json").json["run_id"]
    target = state(0)
    with stepwell.open(other) as store:
        found = store.restore(target)
        assert found is not None and found.step == 5
        assert torch.equal(target["model"]["a.weight"], state(5)["model"]["a.weight"]) and target["step"] == 5
        store.save(6, target).wait()
    assert [c["step"] for c in cli("ls", other, "--json").json["listed"][0]["checkpoints"]] == [1, 4, 5, 6]


def test_a_writer_that_lost_the_run_to_a_copy_commits_nothing_any_more(cli: Cli, run: Path, other: Path) -> None:
    assert cli("cp", f"{run}@5", other).code == 0
    shutil.copytree(folder_of(other, 4), other / "step-000000008.2-9")  # as if the second writer still lived
    [listed] = cli("ls", other, "--json").json["listed"]
    assert [c["step"] for c in listed["checkpoints"]] == [1, 4, 5]
    assert [(d["step"], d["late"]) for d in listed["debris"]] == [(8, True)]


def test_an_older_step_does_not_become_the_newest(cli: Cli, run: Path, other: Path) -> None:
    assert cli("cp", f"{run}@2", other).code == 0
    assert cli("show", other, "--json").json["step"] == 4
    assert stepwell.load(f"{other}@2")["step"] == 2


def test_a_step_that_the_run_has_is_refused(cli: Cli, run: Path, other: Path) -> None:
    before = {name: data for name, data in tree(other).items() if not name.startswith("epochs/")}
    answer = cli("cp", f"{run}@1", other)
    assert answer.code == 1 and "step 1 is there already" in answer.err
    assert {name: data for name, data in tree(other).items() if not name.startswith("epochs/")} == before


def test_a_run_that_is_being_written_is_refused(cli: Cli, run: Path, other: Path) -> None:
    with stepwell.open(other) as store:
        store.restore(state(0))
        store.save(7, state(7)).wait()
        answer = cli("cp", f"{run}@5", other)
        assert answer.code == 1 and "another writer holds this run" in answer.err
        store.save(8, state(8)).wait()
    assert cli("cp", f"{run}@5", other).code == 0


def test_a_failed_copy_into_a_run_leaves_it_as_it_was(cli: Cli, run: Path, other: Path) -> None:
    flip(folder_of(run, 5) / "model.safetensors", 0)
    steps = sorted(path.name for path in other.glob("step-*"))
    assert cli("cp", f"{run}@5", other).code == 1
    assert sorted(path.name for path in other.glob("step-*")) == steps
    with stepwell.open(other) as store:
        found = store.restore(state(0))
        assert found is not None and found.step == 4


# -- where to ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a b", "a[1]", "lr=1e-3", "ünï", "x@y"])
def test_odd_names(cli: Cli, run: Path, tmp_path: Path, name: str) -> None:
    assert cli("cp", f"{run.rename(run.parent / name)}@2", tmp_path / name).code == 0
    assert stepwell.load(tmp_path / name)["step"] == 2


def test_relative_paths_and_home(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("HOME", str(run.parent))
    assert cli("cp", "run@1", "here/").code == 0 and cli("cp", "~/run@2", "~/there").code == 0
    assert stepwell.load(run.parent / "here")["step"] == 1 and stepwell.load(run.parent / "there")["step"] == 2


def test_bad_places(cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place, why in (
        (tmp_path / "no" / "parent", "parent does not exist"),
        (tmp_path / "file", "not a folder"),
        (run, "where the checkpoint is"),
        (folder_of(run, 1), "another checkpoint"),
        ("/", "root of the file system"),
    ):
        answer = cli("cp", f"{run}@2", place)
        assert answer.code == 1 and why in answer.err, place
    assert not (tmp_path / "no").exists()


def test_a_renamed_step_folder_gets_its_name_back(cli: Cli, run: Path, target: Path) -> None:
    name = folder_of(run, 3).name
    assert cli("cp", folder_of(run, 3).rename(run.parent / "best so far"), target).code == 0
    assert [path.name for path in target.iterdir()] == [name]
    assert cli("verify", target).code == 0


# -- plain files -------------------------------------------------------------------------


def test_a_plain_folder_is_copied_as_it_is(cli: Cli, plain: Path, target: Path) -> None:
    answer = cli("cp", plain, target, "--json")
    assert answer.code == 0 and answer.json["bytes"] == sum(map(len, tree(plain).values()))
    assert tree(target / "bert") == tree(plain) and [path.name for path in target.iterdir()] == ["bert"]
    again = cli("cp", plain, target)
    assert again.code == 1 and "nothing was written" in again.err and tree(target / "bert") == tree(plain)


def test_links_to_files_are_followed_and_to_folders_refused(cli: Cli, plain: Path, target: Path) -> None:
    blob = (plain / "model-1.safetensors").rename(plain.parent / "blob")
    (plain / "model-1.safetensors").symlink_to(blob)
    assert cli("cp", plain, target).code == 0
    assert not (target / "bert" / "model-1.safetensors").is_symlink() and tree(target / "bert") == tree(plain)
    (plain / "elsewhere").symlink_to(plain.parent)
    answer = cli("cp", plain, target.parent / "second")
    assert answer.code == 1 and "link to a folder" in answer.err and not (target.parent / "second").exists()


def test_one_plain_file(cli: Cli, plain: Path, target: Path) -> None:
    file = plain / "model-2.safetensors"
    assert cli("cp", file, target).code == 0
    assert tree(target) == {file.name: file.read_bytes()}
    with pytest.raises(StepExists):
        copy(file, target)


def test_a_damaged_plain_folder_is_not_copied(cli: Cli, plain: Path, target: Path) -> None:
    os.truncate(plain / "model-1.safetensors", 100)
    answer = cli("cp", plain, target)
    assert answer.code == 1 and "model-1.safetensors" in answer.err and not target.exists()


# -- others at work ----------------------------------------------------------------------


@pytest.mark.parametrize("files", ["*", "model*", "nothing"])
def test_what_another_copy_has_put_there_meanwhile_is_left_alone(run: Path, target: Path, files: str) -> None:
    """Whole, half written, or just begun: it is not this copy's to replace, nor to clean up."""
    theirs = target / folder_of(run, 5).name

    def on_copied(_: object) -> None:
        if not theirs.exists():
            theirs.mkdir()
            for path in folder_of(run, 5).glob(files):
                shutil.copy(path, theirs)

    with pytest.raises(StepExists, match="left alone"):
        copy(f"{run}@..5", target, on_copied=on_copied)
    assert sorted(path.name for path in theirs.iterdir()) == sorted(p.name for p in folder_of(run, 5).glob(files))
    assert sorted(path.name for path in target.iterdir()) == sorted(folder_of(run, step).name for step in (1, 2, 5))


@pytest.mark.parametrize("files", ["*", "model*"])
def test_a_source_that_is_deleted_meanwhile_is_gone_and_not_damaged(run: Path, target: Path, files: str) -> None:
    def on_copied(_: object) -> None:
        for name in ("manifest.json", files):
            for path in folder_of(run, 5).glob(name):
                path.unlink()

    with pytest.raises(CheckpointGone, match="deleted while"):
        copy(f"{run}@2..5", target, on_copied=on_copied)
    assert [path.name for path in target.iterdir()] == [folder_of(run, 2).name]


def test_a_new_target_is_durable_itself(run: Path, plain: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr("stepwell.copying.sync_folder", synced.append)
    copy(f"{run}@2", target)
    copy(plain, target)
    assert synced == [str(target.parent), str(target)]  # the copies' own folders: by those who fill them


@pytest.mark.parametrize("inside", [".", "extra", "new", "../link"])
def test_a_plain_folder_is_not_copied_into_itself(cli: Cli, plain: Path, inside: str) -> None:
    (plain.parent / "link").symlink_to(plain)
    before = tree(plain)
    answer = cli("cp", plain, plain / inside)
    assert answer.code == 1 and "into itself" in answer.err
    assert tree(plain) == before and not (plain / "new").exists()
