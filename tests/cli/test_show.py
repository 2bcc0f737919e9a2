"""`stepwell show`: everything about one checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import Cli, folder_of


def test_a_checkpoint_with_all_that_its_records_say(cli: Cli, run: Path) -> None:
    shown = cli("show", f"{run}@2", "--json").json
    assert shown["step"] == 2 and shown["state"] == "complete" and shown["tags"] == ["release"]
    assert shown["world"] == 1 and shown["covers"] == [0] and shown["absent"] == []
    assert shown["folders"] == {"disk": str(folder_of(run, 2))}
    assert set(shown["files"]) == {path.name for path in folder_of(run, 2).iterdir()}
    assert shown["sidecars"] == ["notes.txt"] and shown["parent"] == folder_of(run, 1).name
    [rank] = shown["ranks"]
    assert rank["tensor_count"] == 3 and rank["dtypes"] == {"float32": 2, "int64": 1}
    assert list(rank["parts"]) == ["model", "optimizer", "step"]
    assert "tensors" not in shown and shown["wrong"] == []


def test_tensors_on_request(cli: Cli, run: Path) -> None:
    tensors = cli("show", run, "--tensors", "--json").json["tensors"]
    assert [(t["name"], t["dtype"], t["shape"], t["rank"]) for t in tensors] == [
        ("model.a.weight", "float32", [900_000], 0), ("model.b", "int64", [5], 0),
        ("optimizer.0.m", "float32", [700_000], 0),
    ]  # fmt: skip
    assert all((folder_of(run, 5) / t["file"]).is_file() for t in tensors)
    out = cli("show", run, "--tensors").out
    assert "model.a.weight" in out and "900000" in out and str(folder_of(run, 5)) in out


@pytest.mark.parametrize(
    ("select", "step"),
    [("", 5), ("@latest", 5), ("@1", 1), ("@3", 3), ("@release", 2), ("@best:loss", 2), ("@best:max:loss", 5)],
)
def test_references_choose(cli: Cli, run: Path, select: str, step: int) -> None:
    assert cli("show", f"{run}{select}", "--json").json["step"] == step


def test_a_step_folder_by_its_path_also_when_it_was_renamed(cli: Cli, run: Path) -> None:
    folder = folder_of(run, 3)
    assert cli("show", folder, "--json").json["abandoned"] is True
    renamed = folder.rename(run.parent / "my favourite [1]")
    shown = cli("show", renamed, "--json").json
    assert shown["step"] == 3 and shown["folders"] == {"disk": str(renamed)}


def test_a_plain_folder_and_a_single_file(cli: Cli, plain: Path) -> None:
    shown = cli("show", plain, "--json", "--tensors").json
    assert shown["kind"] == "plain" and shown["tensor_count"] == 3
    assert shown["dtypes"] == {"F32": 1, "I32": 1, "BF16": 1}
    assert {t["name"]: t["shape"] for t in shown["tensors"]} == {"w": [300, 4], "x": [7], "y": [5]}
    assert cli("show", plain / "model-2.safetensors", "--json").json["tensor_count"] == 1
    assert "no checksums" in cli("show", plain).out


def test_a_range_needs_one_checkpoint(cli: Cli, run: Path) -> None:
    answer = cli("show", f"{run}@1..3")
    assert answer.code == 1 and "means 3 checkpoints" in answer.err
    assert cli("show", f"{run}@2..2", "--json").json["step"] == 2


def test_a_reference_to_nothing_says_what_there_is(cli: Cli, run: Path) -> None:
    for select in ("@7", "@nothing", "@best:acc"):
        answer = cli("show", f"{run}{select}", "--json")
        assert answer.code == 1 and "1, 2" in answer.json["error"]["text"] and "1, 2" in answer.err


def test_a_damaged_manifest_hides_no_tag(cli: Cli, run: Path) -> None:
    (folder_of(run, 5) / "manifest.json").write_text(json.dumps({"seal": "00000000"}))
    assert cli("show", f"{run}@release", "--json").json["step"] == 2


def test_an_uncommitted_save_is_no_checkpoint(cli: Cli, run: Path) -> None:
    folder = folder_of(run, 3)
    (folder / "manifest.json").unlink()
    answer = cli("show", folder)
    assert answer.code == 1 and "never committed" in answer.err
