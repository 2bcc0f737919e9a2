"""`stepwell rm`: deletes what was named, and refuses slips of the hand."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

import stepwell
from stepwell.cli import app
from stepwell.deleting import Doomed, delete
from tests.cli.helpers import Cli, folder_of, state, tree


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:14]) for path in run.glob("step-*"))


def test_one_checkpoint_goes(cli: Cli, run: Path) -> None:
    size = sum(path.stat().st_size for path in folder_of(run, 1).iterdir())
    answer = cli("rm", f"{run}@1", "--json")
    assert answer.code == 0 and answer.json["bytes"] == size and answer.json["dry_run"] is False
    assert [d["step"] for d in answer.json["deleted"]] == [1]
    assert steps(run) == [2, 3, 5]
    assert cli("verify", run).code == 0


def test_dry_run_deletes_nothing(cli: Cli, run: Path) -> None:
    before = tree(run)
    answer = cli("rm", f"{run}@..3", "--dry-run", "--json")
    assert answer.json["dry_run"] is True and [d["step"] for d in answer.json["deleted"]] == [1, 2, 3]
    assert "3 would be deleted" in cli("rm", f"{run}@..3", "-n").out
    assert tree(run) == before


def test_a_range_means_abandoned_ones_too(cli: Cli, run: Path) -> None:
    assert "3 deleted" in cli("rm", f"{run}@..4").out
    assert steps(run) == [5]


def test_a_range_with_nothing_in_it(cli: Cli, run: Path) -> None:
    answer = cli("rm", f"{run}@100..200", "--json")
    assert answer.code == 0 and answer.json["deleted"] == []
    assert "nothing was deleted" in cli("rm", f"{run}@100..200").out


def test_tags_and_metrics_choose(cli: Cli, run: Path) -> None:
    cli("rm", f"{run}@release")
    assert steps(run) == [1, 3, 5]
    cli("rm", f"{run}@best:loss")
    assert steps(run) == [3, 5]


@pytest.mark.parametrize("ref", ["@latest", "@5", "@..5", "@1.."])
def test_the_newest_stays_without_force(cli: Cli, run: Path, ref: str) -> None:
    before = tree(run)
    for options in ([], ["--yes"], ["--dry-run"]):
        answer = cli("rm", f"{run}{ref}", *options)
        assert answer.code == 1 and "--force" in answer.err and tree(run) == before
    assert cli("rm", f"{run}{ref}", "--force").code == 0
    assert 5 not in steps(run)


def test_after_the_newest_is_gone_the_run_goes_on_from_the_one_before(cli: Cli, run: Path) -> None:
    assert cli("rm", f"{run}@5", "--force").code == 0
    with stepwell.open(run) as store:
        found = store.restore(state(0))
        assert found is not None and found.step in (2, 3)
        store.save(9, state(9)).wait()
    assert cli("verify", run).code == 0


def test_while_a_writer_runs_older_ones_may_go_but_not_the_newest(cli: Cli, run: Path) -> None:
    with stepwell.open(run) as store:
        store.restore(state(0))
        store.save(6, state(6)).wait()
        assert cli("rm", f"{run}@5").code == 0
        answer = cli("rm", f"{run}@6", "--force")
        assert answer.code == 1 and "another writer holds this run" in answer.err
        assert steps(run) == [1, 2, 3, 6]
        store.save(7, state(7)).wait()
    assert cli("verify", run).code == 0


def test_what_is_left_of_a_save_goes_by_its_path(cli: Cli, run: Path) -> None:
    (folder_of(run, 3) / "manifest.json").unlink()
    answer = cli("rm", folder_of(run, 3), "--json")
    assert answer.code == 0 and answer.json["deleted"][0]["committed"] is False and steps(run) == [1, 2, 5]


def test_a_save_under_way_is_not_taken_from_its_writer(cli: Cli, run: Path) -> None:
    with stepwell.open(run) as store:
        store.restore(state(0))
        store.save(6, state(6)).wait()
        (folder_of(run, 6) / "manifest.json").unlink()
        assert cli("rm", folder_of(run, 6)).code == 1
        assert 6 in steps(run)


def test_what_stepwell_did_not_make_stays(cli: Cli, run: Path, plain: Path) -> None:
    renamed = Path(shutil.copytree(folder_of(run, 1), run.parent / "my favourite"))
    before = tree(run.parent) | tree(plain)
    for ref, why in ((plain, "did not make"), (plain / "model-1.safetensors", "did not make"), (renamed, "renamed")):
        answer = cli("rm", ref, "--yes", "--force")
        assert answer.code == 1 and why in answer.err and "rm -r" in answer.err
    assert tree(run.parent) | tree(plain) == before


def test_a_whole_run_is_refused(cli: Cli, run: Path) -> None:
    answer = cli("rm", run, "--force", "--yes")
    assert answer.code == 1 and "whole run" in answer.err and steps(run) == [1, 2, 3, 5]


def test_one_bad_reference_and_nothing_is_deleted(cli: Cli, run: Path) -> None:
    assert cli("rm", f"{run}@1", f"{run}@77", "--yes").code == 1
    assert cli("rm", f"{run}@1", f"{run}@latest", "--yes").code == 1
    assert steps(run) == [1, 2, 3, 5]


def test_what_is_named_twice_is_deleted_once(cli: Cli, run: Path) -> None:
    answer = cli("rm", f"{run}@1", f"{run}@..2", folder_of(run, 2), "--json")
    assert [d["step"] for d in answer.json["deleted"]] == [1, 2] and steps(run) == [3, 5]


def test_other_files_in_the_run_stay(cli: Cli, run: Path) -> None:
    (run / "notes.md").write_text("mine")
    (folder_of(run, 1) / "sub").mkdir()
    (folder_of(run, 1) / "sub" / "mine").write_text("mine")
    assert cli("rm", f"{run}@1").code == 0
    assert (run / "notes.md").exists() and (run / "run.json").exists() and any(run.glob("step-000000001.*/sub/mine"))


@pytest.mark.parametrize(
    ("reply", "code", "left"), [("y\n", 0, [2, 3, 5]), ("n\n", 1, [1, 2, 3, 5]), ("", 1, [1, 2, 3, 5])]
)
def test_a_terminal_is_asked(
    run: Path, monkeypatch: pytest.MonkeyPatch, reply: str, code: int, left: list[int]
) -> None:
    monkeypatch.setattr("stepwell.cli._change.on_terminal", lambda: True)
    answer = CliRunner().invoke(app, ["rm", f"{run}@1", "--json"], input=reply)
    assert answer.exit_code == code and steps(run) == left
    assert "for good?" in answer.stderr and ("deleted" in answer.stdout) == (code == 0)
    assert CliRunner().invoke(app, ["rm", f"{run}@2", "--yes"]).exit_code == 0


@pytest.mark.parametrize(
    ("ref", "shown"), [("@release", [2]), ("@best:loss", [2]), ("@latest", [5]), ("@2..100", [2, 3, 5])]
)
def test_only_what_was_shown_is_deleted(run: Path, ref: str, shown: list[int]) -> None:
    """While somebody looks at the question, training goes on, and the reference comes to mean another checkpoint."""
    asked: list[int] = []

    def before(plan: Sequence[Doomed]) -> None:
        asked.extend(doomed.step for doomed in plan)
        with stepwell.open(run) as store:
            store.save(6, state(6), metrics={"loss": 0.0}, tags=["release"]).wait()

    delete([f"{run}{ref}"], force=True, before=before)
    assert asked == shown and steps(run) == [step for step in (1, 2, 3, 5, 6) if step not in shown]


def test_whoever_is_told_before_can_stop_it(run: Path) -> None:
    def before(plan: Sequence[Doomed]) -> None:
        raise PermissionError

    with pytest.raises(PermissionError):
        delete([f"{run}@1", f"{run}@2"], before=before)
    assert steps(run) == [1, 2, 3, 5]


def test_a_run_of_a_config_is_deleted_on_every_tier(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "far"
    shutil.copytree(run, far / "run")
    config = tmp_path / "stepwell.toml"
    config.write_text(
        f'[[tier]]\nname = "nvme"\ndriver = "file"\npath = "{run.parent}"\n'
        f'[[tier]]\nname = "pfs"\ndriver = "pfs"\npath = "{far}"\n'
    )
    monkeypatch.setenv("STEPWELL_CONFIG", str(config))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    answer = cli("rm", "run@..3", "--json")
    assert {(d["step"], d["tier"]) for d in answer.json["deleted"]} == {
        (s, t) for s in (1, 2, 3) for t in ("nvme", "pfs")
    }
    assert steps(run) == steps(far / "run") == [5]
