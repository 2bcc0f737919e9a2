"""`stepwell keep`, `tag`, `annotate`, `watch`, and what the other commands make of notes; `stepwell.runs`."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

import stepwell
from stepwell.errors import CheckpointNotFound
from tests.cli.helpers import Cli, flip, folder_of, state


def test_a_kept_checkpoint_is_shown_until_it_is_undone(cli: Cli, run: Path) -> None:
    assert cli("keep", f"{run}@2").out == "step 2; kept; tags release; loss 0.25\n"
    listed = cli("ls", run)
    assert "kept" in listed.out and [line.split()[0] for line in listed.out.splitlines() if " yes " in line] == ["2"]
    assert [c["kept"] for c in cli("ls", run, "--json").json["listed"][0]["checkpoints"]] == [False, True, False, False]
    assert "retention never deletes it" in cli("show", f"{run}@2").out
    undone = cli("keep", f"{run}@2", "--undo", "--json").json["checkpoints"]
    assert [(c["step"], c["kept"]) for c in undone] == [(2, False)]
    assert "kept" not in cli("ls", run).out


def test_tags_and_metrics_name_checkpoints(cli: Cli, run: Path, tmp_path: Path) -> None:
    assert cli("tag", f"{run}@1..2", "a", "b").code == 0
    assert cli("tag", f"{run}@2", "a", "release", "--remove").code == 0
    assert cli("show", f"{run}@a", "--json").json["step"] == 1
    assert cli("show", f"{run}@b", "--json").json["tags"] == ["b"]
    assert cli("show", f"{run}@release").code == 1
    assert cli("annotate", f"{run}@1", "eval/acc=0.9", "loss=0.01").code == 0
    assert cli("annotate", run, "eval/acc=nan").out.startswith("step 5;")
    assert cli("show", f"{run}@best:max:eval/acc", "--json").json["metrics"] == {"loss": 0.01, "eval/acc": 0.9}
    assert cli("cp", f"{run}@best:loss", tmp_path / "copy").code == 0
    assert [path.name for path in (tmp_path / "copy").iterdir()] == [folder_of(run, 1).name]
    assert (stepwell.load(f"{run}@best:loss", part="model")["b"] == state(1)["model"]["b"]).all()


def test_what_cannot_be_noted_is_refused(cli: Cli, run: Path, plain: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder_of(run, 1), tmp_path / "copied" / "renamed"))
    before = sorted(run.rglob("*"))
    for wrong in (
        ("keep", f"{run}@9"),
        ("keep", plain),
        ("tag", copy, "x"),
        ("keep", f"{run}@100.."),
        ("tag", run, ""),
    ):
        answer = cli(*wrong)
        assert (answer.code, answer.out) == (1, ""), wrong
    for wrong in (("annotate", run, "loss"), ("annotate", run, "=1"), ("annotate", run, "loss=low")):
        assert cli(*wrong).code == 2
    assert sorted(run.rglob("*")) == before


def test_a_bad_note_is_passed_over_and_verify_finds_it(cli: Cli, run: Path) -> None:
    cli("tag", f"{run}@1", "a")
    cli("keep", f"{run}@1")
    flip(run / "notes" / "0000002.json", 150)
    shown = cli("show", f"{run}@1", "--json").json
    assert shown["tags"] == ["a"] and not shown["kept"]
    verified = cli("verify", run, "--json")
    assert verified.code == 1
    [records] = verified.json["refs"][0]["run"]
    assert [problem["file"] for problem in records["problems"]] == ["notes/0000002.json"]


def test_watch_prints_a_line_for_each(cli: Cli, run: Path) -> None:
    lines = cli("watch", run, "--timeout", "10ms").out.splitlines()
    assert [line.partition(";")[0] for line in lines] == ["step 1", "step 2", "step 5"]  # 3 is abandoned
    documents = cli("watch", run, "--after", "1", "--tier", "disk", "--timeout", "10ms", "--json").out.splitlines()
    assert [json.loads(line)["step"] for line in documents] == [2, 5]
    assert cli("watch", run, "--tier", "none", "--timeout", "10ms").code == 1
    assert cli("watch", f"{run}@1").code == 1
    assert cli("watch", run, "--timeout", "soon").code == 1


# -- runs --------------------------------------------------------------------------------


def test_runs_below_a_folder(run: Path, plain: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(run, tmp_path / "root" / "team" / "other"))
    shutil.rmtree(folder_of(other, 5))
    (other / "step-000000009.1-9").mkdir()
    (other / "step-000000009.1-9" / "model.safetensors").write_bytes(bytes(100))
    with stepwell.open(run) as store:
        store.annotate(5, {"eval/acc": 0.5})
        store.save(6, state(6))
        store.restore(state(0), step=5)
        store.save(6, state(6), metrics={"loss": 0.1}).wait()
        alive = {summary.name: summary for summary in stepwell.runs(tmp_path)}
    found = {summary.name: summary for summary in stepwell.runs(tmp_path)}
    assert set(found) == {"run", "other"} and found["other"].path == other
    assert (found["other"].newest_step, found["other"].checkpoints) == (3, 3)  # of 3's abandonment only 5 knew
    assert (found["run"].newest_step, found["run"].metrics) == (6, {"loss": 0.1})
    on_disk = sum(path.stat().st_size for path in other.glob("step-*/*"))
    assert found["other"].size_bytes == on_disk
    writer, was = found["run"].writer, alive["run"].writer
    assert writer is not None and was is not None
    assert (was.alive, writer.alive, writer.pid) == (True, False, os.getpid())
    assert stepwell.runs(run)[0].name == "run" and stepwell.runs(plain) == []
    with pytest.raises(CheckpointNotFound):
        stepwell.runs(tmp_path / "nothing")
