"""`stepwell ls`: runs under a folder, checkpoints of a run, and what is no checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.catalog import Catalog
from stepwell.listing import find_here
from stepwell.tiers.base import RecordKey
from stepwell.tiers.file import FileTier
from tests.cli.helpers import Cli, folder_of

ODD_NAMES = ["a b", "a[1]", "lr=1e-3", "ünï", "a@b", "[bold]x", "-dash", "'quoted'", "two\nlines", ":smile:"]


def test_a_folder_lists_its_runs_and_plain_checkpoints(cli: Cli, run: Path, plain: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "root" / "team" / "other")
    found = cli("ls", tmp_path, "--json").json["listed"][0]["found"]
    where = [(Path(one["path"]).relative_to(tmp_path).as_posix(), one["kind"]) for one in found]
    assert where == [("hub/bert", "plain"), ("root/run", "run"), ("root/team/other", "run")]
    assert found[1]["checkpoints"] == 4 and found[1]["newest_step"] == 5 and found[1]["unfinished"] == 0
    assert found[1]["bytes"] == sum(path.stat().st_size for path in run.glob("step-*/*"))
    shown = cli("ls", tmp_path).out
    assert "root/team/other" in shown and "hub/bert" in shown


def test_a_run_lists_its_checkpoints(cli: Cli, run: Path) -> None:
    [listed] = cli("ls", run, "--json").json["listed"]
    assert listed["kind"] == "run" and listed["run"] == "run" and listed["tiers"] == ["disk"]
    seen = [(c["step"], c["state"], c["tags"]) for c in listed["checkpoints"]]
    assert seen == [(1, "complete", []), (2, "complete", ["release"]), (3, "abandoned", []), (5, "complete", [])]
    first = listed["checkpoints"][0]
    assert first["metrics"] == {"loss": 0.5} and listed["checkpoints"][2]["metrics"] == {"loss": None}
    assert first["tiers"] == first["complete_on"] == ["disk"]
    assert first["bytes"] == sum(first["parts"].values()) == 900_000 * 4 + 5 * 8 + 700_000 * 4
    assert listed["debris"] == [] and listed["unreadable"] == [] and listed["absent"] == {}


def test_people_see_a_table(cli: Cli, run: Path) -> None:
    lines = cli("ls", run).out.splitlines()
    assert lines[0].split() == ["step", "age", "size", "parts", "state", "tiers", "tags", "loss"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "2", "3", "5"]
    assert "release" in lines[2] and "abandoned" in lines[3] and "0.25" in lines[2]


def test_a_range_lists_only_its_steps(cli: Cli, run: Path) -> None:
    for select, steps in (("@..2", [1, 2]), ("@2..", [2, 3, 5]), ("@2..3", [2, 3]), ("@latest", [5]), ("@6..", [])):
        [listed] = cli("ls", f"{run}{select}", "--json").json["listed"]
        assert [c["step"] for c in listed["checkpoints"]] == steps


def test_debris_is_told_apart(cli: Cli, run: Path) -> None:
    (folder_of(run, 3) / "manifest.json").unlink()
    (run / "step-000000009.1-9").mkdir()
    [listed] = cli("ls", run, "--json").json["listed"]
    assert [c["step"] for c in listed["checkpoints"]] == [1, 2, 5]
    assert [(d["step"], d["late"]) for d in listed["debris"]] == [(3, False), (9, False)]
    assert listed["debris"][0]["bytes"] > 6_000_000 and listed["debris"][1]["bytes"] == 0
    assert "step-000000009.1-9 on disk: debris" in cli("ls", run).out


def test_an_unreadable_manifest_hides_no_other_checkpoint(cli: Cli, run: Path) -> None:
    (folder_of(run, 2) / "manifest.json").write_text("{}")
    [listed] = cli("ls", run, "--json").json["listed"]
    assert [c["step"] for c in listed["checkpoints"]] == [1, 3, 5]
    assert [u["name"] for u in listed["unreadable"]] == [folder_of(run, 2).name]
    assert "unreadable" in cli("ls", run).out


@pytest.mark.parametrize("name", ODD_NAMES)
def test_odd_names_are_found_and_shown_whole(cli: Cli, run: Path, name: str) -> None:
    odd = run.rename(run.parent / name)
    answer = cli("ls", odd, "--json")
    assert answer.json["listed"][0]["run"] == name and len(answer.json["listed"][0]["checkpoints"]) == 4
    assert cli("ls", f"{odd}@2", "--json").json["listed"][0]["checkpoints"][0]["step"] == 2
    [found] = cli("ls", run.parent, "--json").json["listed"][0]["found"]
    assert found["path"] == str(odd)
    assert name.replace("\n", "\\n") in cli("ls", run.parent).out


def test_names_that_are_no_text_are_escaped(cli: Cli, run: Path) -> None:
    odd = os.fsencode(run.parent) + b"/bad\xff"
    os.rename(run, odd)
    assert "bad\\udcff" in cli("ls", run.parent).out
    [found] = cli("ls", run.parent, "--json").json["listed"][0]["found"]
    assert os.fsencode(found["path"]) == odd


def test_paths_may_be_written_in_many_ways(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("HOME", str(run.parent))
    monkeypatch.delenv("STEPWELL_CONFIG", raising=False)
    for written in ("run", "run/", "./run", "~/" + run.name, f"../{run.parent.name}/run", str(run)):
        [listed] = cli("ls", written, "--json").json["listed"]
        assert len(listed["checkpoints"]) == 4, written
    assert cli("ls", "--json").json["listed"][0]["found"][0]["path"] == str(run)
    monkeypatch.chdir(run)
    assert cli("ls", "--json").json["listed"][0]["run"] == "run"


def test_several_paths_are_listed_one_after_the_other(cli: Cli, run: Path, plain: Path) -> None:
    listed = cli("ls", run, plain, "--json").json["listed"]
    assert [one["kind"] for one in listed] == ["run", "folder"]
    shown = cli("ls", run, plain).out
    assert shown.index(str(run)) < shown.index(str(plain))


def test_of_several_paths_one_that_is_not_there_hides_no_other(cli: Cli, run: Path, tmp_path: Path) -> None:
    answer = cli("ls", tmp_path / "nothing", run, "--json")
    assert answer.code == 1 and "nothing" in answer.err
    assert [one["run"] for one in answer.json["listed"]] == ["run"]
    assert [one["ref"] for one in answer.json["failed"]] == [str(tmp_path / "nothing")]
    shown = cli("ls", tmp_path / "nothing", run)
    assert shown.code == 1 and "release" in shown.out and "nothing" in shown.err


def test_an_empty_folder_is_no_error(cli: Cli, tmp_path: Path) -> None:
    answer = cli("ls", tmp_path)
    assert answer.code == 0 and "no run" in answer.out


def test_what_is_not_there_is_an_error_on_stderr_only(cli: Cli, tmp_path: Path) -> None:
    for options in ([], ["--json"]):
        answer = cli("ls", tmp_path / "nothing", *options)
        assert answer.code == 1 and (list(answer.json) == ["error"] if options else answer.out == "")
        assert answer.err.startswith("stepwell: error: no such file or folder") and answer.err.count("\n") == 1


def test_ls_reads_a_run_that_nobody_may_write(cli: Cli, run: Path) -> None:
    for path in (run, run.parent, *run.glob("step-*")):
        path.chmod(0o555)
    try:
        assert len(cli("ls", run, "--json").json["listed"][0]["checkpoints"]) == 4
    finally:
        for path in (run, run.parent, *run.glob("step-*")):
            path.chmod(0o755)


def test_ls_writes_nothing(cli: Cli, run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in [run.parent, run, *run.rglob("*")]}
    cli("ls", run)
    assert {path: path.stat().st_mtime_ns for path in [run.parent, run, *run.rglob("*")]} == before


def test_runs_of_a_config_file_are_found_by_name(
    cli: Cli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "far"
    shutil.copytree(run, far / "run")
    shutil.rmtree(folder_of(run, 1))
    config = tmp_path / "stepwell.toml"
    config.write_text(
        f'[[tier]]\nname = "nvme"\ndriver = "file"\npath = "{run.parent}"\n'
        f'[[tier]]\nname = "pfs"\ndriver = "pfs"\npath = "{far}"\n'
    )
    monkeypatch.setenv("STEPWELL_CONFIG", str(config))
    monkeypatch.chdir(tmp_path)
    [listed] = cli("ls", "run", "--json").json["listed"]
    assert [(c["step"], c["tiers"]) for c in listed["checkpoints"]] == [
        (1, ["pfs"]), (2, ["nvme", "pfs"]), (3, ["nvme", "pfs"]), (5, ["nvme", "pfs"]),
    ]  # fmt: skip
    assert [one["path"] for one in cli("ls", "--json").json["listed"]] == [str(run.parent), str(far)]
    shutil.rmtree(far)
    answer = cli("ls", "run", "--json").json["listed"][0]
    assert [c["step"] for c in answer["checkpoints"]] == [2, 3, 5] and list(answer["absent"]) == ["pfs"]
    missing = cli("ls", "other")
    assert missing.code == 1 and "no run 'other'" in missing.err


def test_what_cannot_be_looked_at_hides_nothing_else(cli: Cli, run: Path, plain: Path, tmp_path: Path) -> None:
    before = {found["path"]: found for found in cli("ls", tmp_path, "--json").json["listed"][0]["found"]}
    for folder in (folder_of(run, 1), plain):
        (folder / "loop").symlink_to("loop")
        (folder / "loop.safetensors").symlink_to("loop.safetensors")
    answer = cli("ls", tmp_path, "--json")
    assert answer.code == 0 and {found["path"]: found for found in answer.json["listed"][0]["found"]} == before


def test_a_file_that_vanishes_while_it_is_looked_at(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the temporary files of a commit do."""
    really = os.scandir

    class Vanishing:
        def __init__(self, path: Path) -> None:
            self._listing = really(path)

        def __enter__(self) -> Iterator[os.DirEntry[str]]:
            with self._listing as entries:
                found = list(entries)
            for entry in found:
                if entry.name.startswith("rank-"):
                    os.unlink(entry.path)
            return iter(found)

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr("stepwell.listing.os.scandir", Vanishing)
    [here] = find_here(run)
    assert here.checkpoints == 4 and here.newest_step == 5


def test_a_checkpoint_that_is_deleted_while_it_is_listed_is_just_not_there(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = Catalog.refresh

    async def refresh(catalog: Catalog) -> None:
        await really(catalog)
        shutil.rmtree(folder_of(run, 1))

    monkeypatch.setattr(Catalog, "refresh", refresh)
    [listed] = cli("ls", run, "--json").json["listed"]
    assert [c["step"] for c in listed["checkpoints"]] == [2, 3, 5] and listed["unreadable"] == []


def test_a_range_in_which_nothing_is(cli: Cli, run: Path) -> None:
    """It does not say that the run were empty."""
    for ref in ("@7..", "@3..2"):
        answer = cli("ls", f"{run}{ref}")
        assert answer.code == 0 and answer.out == f"run run has no checkpoint that matches {ref}\n"
        answer = cli("show", f"{run}{ref}")
        assert answer.code == 1 and f"no checkpoint matches {run}{ref}. The newest steps are 1, 2, 3, 5" in answer.err


def test_a_number_that_no_step_has(cli: Cli, run: Path) -> None:
    for select in ("9" * 5000, ".." + "9" * 5000, "1" * 5000 + ".."):
        for command in ("show", "verify", "rm"):
            answer = cli(command, f"{run}@{select}")
            assert answer.code == 1 and "so many digits" in answer.err and len(answer.err) < 500


@pytest.mark.parametrize("ref", ["", "@best:loss", "@release"])
def test_manifests_are_read_together_and_each_once(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, ref: str
) -> None:
    """One after the other they would take a round trip each: minutes for thousands of them, far away."""
    really, under_way, most, read = FileTier.fetch, [0], [0], list[str]()

    async def fetch(tier: FileTier, record: RecordKey) -> bytes | None:
        read.append(str(record))
        under_way[0] += 1
        most[0] = max(most[0], under_way[0])
        try:
            return await really(tier, record)
        finally:
            under_way[0] -= 1

    monkeypatch.setattr(FileTier, "fetch", fetch)
    assert cli("ls", f"{run}{ref}").code == 0
    manifests = [record for record in read if record.endswith("manifest.json")]
    assert most[0] >= 2 and len(manifests) == len(set(manifests)) >= 3
