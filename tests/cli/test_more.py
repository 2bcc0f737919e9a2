"""What the command does where something is wrong: with a run's tiers, its records, its reader or its caller."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import stepwell
from stepwell.deleting import Doomed, Which, plan_deletion
from stepwell.errors import TierError
from stepwell.format.records import Manifest, decode, encode
from stepwell.tiers.file import FileTier
from stepwell.verifying import verify
from tests.cli.helpers import Cli, flip, folder_of, state, tree
from tests.cli.test_shell import environment, shell


@pytest.fixture
def chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a run's two tiers, `nvme` and `pfs`, and of the config that names them, which is in force.

    Steps 1 and 2 are on both, and a process of a live writer still holds the run.
    """
    config = tmp_path / "site.toml"
    tiers = ""
    for name, driver in (("nvme", "file"), ("pfs", "pfs")):
        (tmp_path / name).mkdir()
        tiers += f'[[tier]]\nname = "{name}"\ndriver = "{driver}"\npath = "{tmp_path / name}"\n'
    config.write_text('[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "64MiB"\n' + tiers)
    monkeypatch.setenv("STEPWELL_CONFIG", str(config))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("STEPWELL_RUN", raising=False)
    monkeypatch.chdir(tmp_path)
    with stepwell.open(config, run="r") as store:
        for step in (1, 2):
            store.save(step, state(step)).wait("pfs")
        yield tmp_path


# -- deleting ----------------------------------------------------------------------------


def spoil(run: Path, step: int) -> None:
    """The manifest cannot be read any more."""
    flip(folder_of(run, step) / "manifest.json", 70)


def test_the_newest_whole_checkpoint_stays_where_newer_ones_cannot_be_read(cli: Cli, run: Path) -> None:
    spoil(run, 5)
    before = tree(run)
    for options in ([], ["--dry-run"], ["--json"]):
        answer = cli("rm", f"{run}@..4", *options)
        assert answer.code == 1 and "step 3 is the newest whole checkpoint" in answer.err and tree(run) == before
    assert cli("rm", f"{run}@..2").code == 0
    document = cli("rm", f"{run}@3", "--force", "--json").json
    assert [(d["step"], d["newest"]) for d in document["deleted"]] == [(3, True)]


def test_the_newest_whole_checkpoint_stays_where_a_newer_one_is_partial(cli: Cli, chain: Path) -> None:
    with stepwell.open(chain / "other") as store:
        for step in (1, 2):
            store.save(step, state(step)).wait()
    with stepwell.open(
        run="p", tiers=[FileTier(chain / "nvme"), FileTier(chain / "pfs", name="far")], policies=[]
    ) as store:
        for step in (1, 2):
            store.save(step, state(step)).wait()
            store.flush(step, parts=["model"] if step == 2 else None)
    listed = cli("ls", chain / "pfs" / "p", "--json").json["listed"][0]["checkpoints"]
    assert [(c["step"], c["state"]) for c in listed] == [(1, "complete"), (2, "partial")]
    answer = cli("rm", f"{chain / 'pfs' / 'p'}@1")
    assert answer.code == 1 and "step 1 is the newest whole checkpoint" in answer.err


def test_a_tiers_folder_does_not_hide_a_live_writer(cli: Cli, run: Path, chain: Path) -> None:
    """Who writes a run is noted on its last tier: from the folder of another one it cannot be seen."""
    nvme, pfs = chain / "nvme" / "r", chain / "pfs" / "r"
    (folder_of(nvme, 2) / "manifest.json").unlink()  # as a save under way
    before = tree(nvme) | {"pfs": b"".join(tree(pfs / folder_of(pfs, 2).name).values())}
    for words in (["rm", folder_of(nvme, 2)], ["rm", f"{nvme}@1", "--force"], ["cp", f"{run}@5", nvme]):
        answer = cli(*words)
        assert answer.code == 1 and "one tier of a run" in answer.err and "STEPWELL_CONFIG" in answer.err
    for words in (["rm", folder_of(pfs, 2), "--force"], ["rm", "r@2", "--force"], ["cp", f"{run}@5", pfs]):
        answer = cli(*words)
        assert answer.code == 1 and "another writer holds this run" in answer.err
    assert tree(nvme) | {"pfs": b"".join(tree(pfs / folder_of(pfs, 2).name).values())} == before


class FailingDrop:
    """Lets as many checkpoints be deleted as `allowed` says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, allowed: int, failure: BaseException) -> None:
        self.left, self.failure, self.really = allowed, failure, FileTier.drop
        monkeypatch.setattr(FileTier, "drop", lambda tier, what: self.drop(tier, what))

    async def drop(self, tier: FileTier, what: list[object]) -> None:
        if not self.left:
            raise self.failure
        self.left -= 1
        await self.really(tier, what)  # type: ignore[arg-type]  # as it was called


def test_what_is_gone_is_told_though_the_next_one_fails(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FailingDrop(monkeypatch, 1, TierError("the disk is out of order"))
    answer = cli("rm", f"{run}@..3", "--json")
    assert answer.code == 1 and [d["step"] for d in answer.json["deleted"]] == [1]
    assert answer.json["error"] == {"kind": "TierError", "text": "the disk is out of order", "where": {}}
    assert answer.err == "stepwell: error: the disk is out of order\n"
    assert not list(run.glob("step-000000001*")) and list(run.glob("step-000000002*"))


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_an_interrupted_rm_says_how_far_it_came(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def interrupted(
        refs: list[str], *, force: bool, which: Which, before: Callable[[list[Doomed]], None], on_deleted: object
    ) -> None:
        before(plan_deletion(refs, which))
        raise KeyboardInterrupt

    monkeypatch.setattr("stepwell.cli._change.delete", interrupted)
    answer = cli("rm", f"{run}@..3", *options)
    assert answer.code == 130 and answer.err.startswith("stepwell: interrupted; 0 of 3 are deleted")
    assert "half done" not in answer.err
    if options:
        assert answer.json["deleted"] == [] and answer.json["error"]["kind"] == "KeyboardInterrupt"


# -- copying -----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_copies_of_a_range_that_were_made_are_told(cli: Cli, run: Path, tmp_path: Path, options: list[str]) -> None:
    flip(folder_of(run, 5) / "model.safetensors", 0)
    answer = cli("cp", f"{run}@1..5", tmp_path / "target", *options)
    assert answer.code == 1 and "are bad" in answer.err
    if options:
        assert [c["step"] for c in answer.json["copied"]] == [1, 2] and answer.json["error"]["kind"] == "CorruptData"
    else:
        assert answer.out.count(" -> ") == 2 and "durable" not in answer.out


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.json", "model.safetensors"])
def test_a_copy_takes_what_is_bad_on_one_tier_from_another(cli: Cli, chain: Path, file: str) -> None:
    flip(folder_of(chain / "nvme" / "r", 2) / file, 70)
    answer = cli("cp", "r@2", chain / "target")
    assert answer.code == 0, answer.err
    assert cli("verify", chain / "target").code == 0


def test_a_folder_that_cannot_be_written_is_named_before_anything_changes(cli: Cli, run: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        drop = ["setpriv", "--bounding-set=-dac_override", sys.executable]
        if subprocess.run([*drop, "-c", ""], capture_output=True).returncode:
            pytest.skip("root cannot give up its right to write everywhere here")
    else:
        drop = [sys.executable]
    other = Path(shutil.copytree(run, tmp_path / "locked" / "run"))
    before = tree(other)
    other.parent.chmod(0o555)
    try:
        for words in (["rm", f"{other}@1"], ["cp", f"{run}@5", str(other)]):
            command = [*drop, "-m", "stepwell", *words]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True)
            assert done.returncode == 1
            assert f"cannot be changed: not writable: EACCES (path {other.parent})" in done.stderr
        assert tree(other) == before
    finally:
        other.parent.chmod(0o755)


# -- looking -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["run.json", "epochs/0000001.json", "epochs/0000002.seen.json"])
def test_verify_checks_the_runs_own_records(cli: Cli, run: Path, name: str) -> None:
    with stepwell.open(run) as store:  # the second writer, which has a list of what it found
        store.restore(state(0))
        store.save(7, state(7)).wait()
    good = cli("verify", run, "--json").json
    assert good["ok"] and [one["files"] for one in good["refs"][0]["run"]] == [4]
    flip(run / name, 40)
    answer = cli("verify", run, "--json")
    assert answer.code == 1 and all(one["ok"] for one in answer.json["refs"][0]["checked"])
    [problem] = [p for one in answer.json["refs"][0]["run"] for p in one["problems"]]
    assert problem["file"] == name
    shown = cli("verify", run)
    assert shown.code == 1 and name in shown.out and "1 bad" in shown.out
    assert cli("verify", f"{run}@7").code == 0  # of one checkpoint the run's records are not asked for


def test_a_step_folder_under_another_steps_name_is_found(cli: Cli, run: Path) -> None:
    folder_of(run, 1).rename(run / "step-000000009.1-1")
    answer = cli("verify", run)
    assert answer.code == 1 and "manifest.json: it is that of step-000000001.1-1" in answer.out


def test_a_checkpoint_deleted_while_it_is_verified_is_no_fault(run: Path) -> None:
    class Deleting:
        """Deletes the first checkpoint as retention does, once some of it has been read."""

        def expect(self, size_bytes: int) -> None: ...

        def moved(self, size_bytes: int) -> None:
            for path in sorted(run.glob("step-000000001*/*"), key=lambda path: path.name != "manifest.json"):
                path.unlink()

    report = verify(str(run), Deleting())
    assert report.problems == 0 and [one.step for one in report.checked] == [2, 3, 5]


@pytest.mark.parametrize("anew", [True, False])
def test_a_copy_that_is_made_whole_while_it_is_verified_is_no_fault(run: Path, anew: bool) -> None:
    folder = folder_of(run, 1)
    manifest = decode((folder / "manifest.json").read_bytes(), Manifest)

    class Renewing:
        """The record makes way once some has been read; then there is a manifest again, another one or the same."""

        def expect(self, size_bytes: int) -> None: ...

        def moved(self, size_bytes: int) -> None:
            (folder / "rank-00000.json").unlink(missing_ok=True)
            manifest.made += anew
            (folder / "manifest.json").write_bytes(encode(manifest))

    report = verify(str(run), Renewing())
    assert (report.problems > 0) == (not anew)
    assert [one.step for one in report.checked] == [1, 2, 3, 5][anew:]


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_show_does_not_call_a_damaged_checkpoint_complete(cli: Cli, run: Path, damage: str) -> None:
    model = folder_of(run, 5) / "model.safetensors"
    if damage == "missing":
        model.unlink()
    else:
        os.truncate(model, 5)
    answer = cli("show", run)
    assert answer.code == 0 and "complete, but damaged: see stepwell verify" in answer.out
    assert "model.safetensors" in answer.err
    [wrong] = cli("show", run, "--json").json["wrong"]
    assert wrong.startswith("model.safetensors ") and "tier disk" in wrong
    assert cli("show", f"{run}@2", "--json").json["wrong"] == []


def test_a_tier_whose_manifest_cannot_be_read_is_not_said_to_hold_it(cli: Cli, chain: Path) -> None:
    flip(folder_of(chain / "nvme" / "r", 2) / "manifest.json", 70)
    [listed] = cli("ls", "r", "--json").json["listed"]
    assert [(c["step"], c["tiers"]) for c in listed["checkpoints"]] == [(1, ["nvme", "pfs"]), (2, ["pfs"])]
    [bad] = listed["unreadable"]
    assert bad["name"] == f"{folder_of(chain / 'pfs' / 'r', 2).name} on nvme"


def test_a_config_for_larger_machines_is_no_obstacle(cli: Cli, chain: Path) -> None:
    config = chain / "site.toml"
    config.write_text(config.read_text().replace("64MiB", "999TiB"))
    assert cli("ls", "r").code == cli("verify", "r").code == cli("rm", "r@1").code == 0


def test_a_reference_that_cannot_be_looked_at_does_not_keep_the_others_from_being_verified(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(path: object) -> Iterator[object]:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return really(path)  # type: ignore[call-overload,no-any-return]  # as it was called

    really = os.scandir
    closed = run.parent / "closed"
    closed.mkdir()
    monkeypatch.setattr("stepwell.refs.os.scandir", refused)
    answer = cli("verify", closed, run, "--json")
    assert answer.code == 1 and len(answer.json["refs"][0]["checked"]) == 4
    assert answer.json["failed"] == [{"ref": str(closed), "error": f"Permission denied (path {closed})"}]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_not_opened(cli: Cli, plain: Path, make: Callable[[Path], object]) -> None:
    make(plain / "odd.safetensors")
    answer = cli("verify", plain)
    assert answer.code == 1 and "odd.safetensors: it is not a file" in answer.out


# -- output ------------------------------------------------------------------------------


def test_an_error_is_a_document_too(tmp_path: Path, run: Path) -> None:
    nothing = tmp_path / "nothing"
    for words in (["ls", nothing], ["show", nothing], ["cp", nothing, tmp_path / "x"], ["rm", nothing], ["rm", run]):
        done = shell(*words, "--json")
        assert done.returncode == 1 and done.stderr.startswith("stepwell: error: ")
        error = json.loads(done.stdout)["error"]
        assert set(error) == {"kind", "text", "where"} and error["text"] in done.stderr


@pytest.mark.parametrize("words", ["ls RUN", "ls RUN --json", "show RUN/nothing --json", "--version", "--help"])
def test_stdout_that_is_closed_or_full(run: Path, words: str) -> None:
    real = [word.replace("RUN", str(run)) for word in words.split()]
    command = [sys.executable, "-m", "stepwell", *real]
    closed = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *command], env=environment(), capture_output=True)
    assert closed.returncode == int("nothing" in words) and b"internal error" not in closed.stderr, closed.stderr
    with open("/dev/full", "wb") as full:
        done = subprocess.run(command, env=environment(), stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1, done.stderr
