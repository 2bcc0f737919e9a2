"""`stepwell verify`: whatever is wrong is found, named with file, block and tensors, and nothing else is."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stepwell
from stepwell.places import Progress
from stepwell.verifying import Report, verify
from tests.cli.helpers import Cli, flip, folder_of, tree


def problems(answer: Any) -> list[tuple[str, int | None, list[str]]]:
    [ref] = answer.json["refs"]
    return [(p["file"], p["block"], p["tensors"]) for one in ref["checked"] for p in one["problems"]]


def test_a_good_run(cli: Cli, run: Path) -> None:
    answer = cli("verify", run, "--json")
    assert answer.code == 0 and answer.json["ok"] is True
    [ref] = answer.json["refs"]
    assert [one["step"] for one in ref["checked"]] == [1, 2, 3, 5]
    for one in ref["checked"]:
        files = list(folder_of(run, one["step"]).iterdir())
        assert one["checked_bytes"] == sum(path.stat().st_size for path in files) and one["files"] == len(files)
    assert "4 checkpoints" in cli("verify", run).out and "all good" in cli("verify", run).out


def test_every_bad_block_is_named_with_its_tensors(cli: Cli, run: Path) -> None:
    model = folder_of(run, 2) / "model.safetensors"
    flip(model, 100)
    flip(model, 2 << 20)
    flip(model, (3 << 20) + 7)
    answer = cli("verify", f"{run}@2", "--json")
    assert answer.code == 1 and answer.json["ok"] is False
    assert [(file, block) for file, block, _ in problems(answer)] == [(model.name, b) for b in (0, 2, 3)]
    assert problems(answer)[1][2] == ["a.weight"]
    shown = cli("verify", f"{run}@2")
    assert shown.code == 1 and "model.safetensors, block 2: " in shown.out and "a.weight" in shown.out
    assert cli("verify", f"{run}@1").code == 0


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "first byte of a shard": ("model.safetensors", lambda path: flip(path, 0)),
    "last byte of a shard": ("optimizer.safetensors", lambda path: flip(path, path.stat().st_size - 1)),
    "short shard": ("model.safetensors", lambda path: os.truncate(path, path.stat().st_size - 1)),
    "long shard": ("model.safetensors", lambda path: os.truncate(path, path.stat().st_size + 1)),
    "missing shard": ("optimizer.safetensors", os.unlink),
    "empty shard": ("model.safetensors", lambda path: os.truncate(path, 0)),
    "rank record": ("rank-00000.json", lambda path: flip(path, 60)),
    "missing rank record": ("rank-00000.json", os.unlink),
    "another rank record": (
        "rank-00000.json",
        lambda path: shutil.copy(next(path.parent.parent.glob("step-000000001.*")) / path.name, path),
    ),
    "manifest": ("manifest.json", lambda path: flip(path, 60)),
    "manifest of zeros": ("manifest.json", lambda path: path.write_bytes(bytes(300))),
    "sidecar": ("notes.txt", lambda path: flip(path, 3)),
    "short sidecar": ("notes.txt", lambda path: os.truncate(path, 3)),
    "missing sidecar": ("notes.txt", os.unlink),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_any_damage_is_found_and_only_that(cli: Cli, run: Path, damage: str) -> None:
    name, do = DAMAGES[damage]
    do(folder_of(run, 2) / name)
    answer = cli("verify", run, "--json")
    assert answer.code == 1
    bad = {one["step"]: [p["file"] for p in one["problems"]] for one in answer.json["refs"][0]["checked"]}
    assert bad == {1: [], 2: [name], 3: [], 5: []}


def test_a_shard_of_holes_is_bad_everywhere(cli: Cli, run: Path) -> None:
    model = folder_of(run, 1) / "model.safetensors"
    size = model.stat().st_size
    os.truncate(model, 0)
    os.truncate(model, size)
    assert [block for _, block, _ in problems(cli("verify", f"{run}@1", "--json"))] == list(range(-(-size >> 20)))


def test_debris_and_strangers_are_told_but_no_fault(cli: Cli, run: Path) -> None:
    (folder_of(run, 3) / "manifest.json").unlink()
    (folder_of(run, 1) / "mine.txt").write_text("a note of the user's")
    answer = cli("verify", run, "--json")
    [ref] = answer.json["refs"]
    assert answer.code == 0 and [d["step"] for d in ref["debris"]] == [3]
    assert ref["checked"][0]["strangers"] == ["mine.txt"]
    shown = cli("verify", run).out
    assert "debris  step-000000003" in shown and "mine.txt" in shown


def test_plain_files_are_checked_for_structure_only(cli: Cli, plain: Path) -> None:
    answer = cli("verify", plain, "--json")
    [one] = answer.json["refs"][0]["checked"]
    assert answer.code == 0 and one["checksums"] is False and one["files"] == 2 and one["step"] is None
    assert "structure only" in cli("verify", plain).out
    os.truncate(plain / "model-1.safetensors", 200)
    (plain / "model-2.safetensors").rename(plain / "elsewhere")
    answer = cli("verify", plain, "--json")
    assert answer.code == 1 and [file for file, *_ in problems(answer)] == [
        "model-2.safetensors",
        "model-1.safetensors",
    ]
    assert cli("verify", plain / "model-1.safetensors").code == 1


def test_several_references_each_get_their_answer(cli: Cli, run: Path, plain: Path, tmp_path: Path) -> None:
    flip(folder_of(run, 1) / "model.safetensors", 0)
    answer = cli("verify", f"{run}@1", plain, tmp_path / "nothing", "--json")
    assert answer.code == 1 and [ref["ok"] for ref in answer.json["refs"]] == [False, True]
    assert [one["ref"] for one in answer.json["failed"]] == [str(tmp_path / "nothing")]
    assert "no such file" in answer.err


def test_a_range_that_matches_nothing_was_not_verified(cli: Cli, run: Path) -> None:
    answer = cli("verify", f"{run}@7..")
    assert answer.code == 1 and "no checkpoint matches" in answer.err


def test_verify_changes_nothing(cli: Cli, run: Path) -> None:
    flip(folder_of(run, 2) / "model.safetensors", 9)
    before = tree(run)
    cli("verify", run)
    assert tree(run) == before


def test_a_run_without_checkpoints_says_so(cli: Cli, tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "new") as store:
        store.save(1, {"a": 1}).wait()
    shutil.rmtree(folder_of(tmp_path / "new", 1))
    answer = cli("verify", tmp_path / "new")
    assert answer.code == 0 and "no checkpoint to verify" in answer.out


def test_progress_is_told_exactly_what_there_is(run: Path) -> None:
    class Counted:
        expected = done = 0

        def expect(self, size_bytes: int) -> None:
            self.expected += size_bytes

        def moved(self, size_bytes: int) -> None:
            self.done += size_bytes

    os.truncate(folder_of(run, 2) / "model.safetensors", 5)
    (folder_of(run, 1) / "rank-00000.json").unlink()
    counted = Counted()
    assert verify(run, counted).problems == 2
    assert counted.expected == counted.done == sum(p.stat().st_size for p in run.glob("step-*/*"))


def test_what_was_found_before_an_interrupt_is_told(
    cli: Cli, run: Path, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flip(folder_of(run, 2) / "model.safetensors", 2_000_000)
    really = verify

    def interrupted(ref: str, progress: Progress, report: Report) -> None:
        really(ref, progress, report)
        raise KeyboardInterrupt

    monkeypatch.setattr("stepwell.cli._verify.verify", interrupted)
    answer = cli("verify", run, plain)
    assert answer.code == 130 and "interrupted" in answer.err and answer.out.count("good  ") == 3
    assert "bad     step-000000002" in answer.out and "1 bad so far" in answer.out
    answer = cli("verify", f"{run}@..1", plain, "--json")
    assert answer.code == 130 and answer.json["ok"] is False and answer.json["error"]["kind"] == "KeyboardInterrupt"
    [told] = answer.json["refs"]
    assert [one["step"] for one in told["checked"]] == [1]
