"""`stepwell rewind`, `stepwell rm --abandoned`, and the line of descent that `stepwell show` prints."""

from __future__ import annotations

from pathlib import Path

import stepwell
from tests.cli.helpers import Cli, folder_of, state, tree


def steps(run: Path) -> list[int]:
    return sorted(int(path.name[5:14]) for path in run.glob("step-*"))


def states(cli: Cli, run: Path) -> dict[int, str]:
    [listed] = cli("ls", run, "--json").json["listed"]
    return {c["step"]: c["state"] for c in listed["checkpoints"]}


def test_a_run_goes_on_from_an_older_checkpoint(cli: Cli, run: Path) -> None:
    before = tree(run)
    answer = cli("rewind", f"{run}@1")
    assert answer.code == 0
    assert answer.out == "run run goes on from step 1; 2 checkpoints, steps 2 to 5, are abandoned, not deleted\n"
    assert states(cli, run) == {1: "complete", 2: "abandoned", 3: "abandoned", 5: "abandoned"}
    assert {name: data for name, data in tree(run).items() if name in before and not name.endswith(".beat")} == {
        name: data for name, data in before.items() if not name.endswith(".beat")
    }
    assert cli("show", run, "--json").json["step"] == 1
    assert cli("show", f"{run}@5", "--json").json["state"] == "abandoned"
    assert cli("verify", run).code == 0


def test_as_json_and_by_tag(cli: Cli, run: Path) -> None:
    answer = cli("rewind", f"{run}@release", "--json")
    five = folder_of(run, 5).name
    assert answer.json == {
        "run": "run", "step": 2, "name": folder_of(run, 2).name, "abandoned": [{"step": 5, "name": five}]
    }  # fmt: skip
    assert cli("rewind", f"{run}@2").out == "run run goes on from step 2; nothing is left behind\n"


def test_what_is_refused_changes_nothing(cli: Cli, run: Path) -> None:
    before = tree(run)
    for ref, why in ((run, "where to rewind to"), (f"{run}@3", "abandoned"), (f"{run}@9", "no checkpoint of step 9")):
        answer = cli("rewind", ref)
        assert answer.code == 1 and why in answer.err
    assert tree(run) == before


def test_a_damaged_rewind_does_not_pass_verify(cli: Cli, run: Path) -> None:
    assert cli("rewind", f"{run}@1").code == 0
    [record] = run.glob("epochs/*.rewind.json")
    record.write_bytes(record.read_bytes().replace(b'"to": 1', b'"to": 0'))
    answer = cli("verify", run)
    assert answer.code == 1 and record.name in answer.out + answer.err


def test_abandoned_checkpoints_are_freed(cli: Cli, run: Path) -> None:
    assert "1 would be deleted" in cli("rm", run, "--abandoned", "--dry-run").out
    assert steps(run) == [1, 2, 3, 5]
    assert [d["step"] for d in cli("rm", run, "--abandoned", "--json").json["deleted"]] == [3]
    assert steps(run) == [1, 2, 5] and states(cli, run) == dict.fromkeys((1, 2, 5), "complete")
    assert "nothing was deleted" in cli("rm", run, "--abandoned").out


def test_abandoned_ones_of_a_range_and_never_what_counts(cli: Cli, run: Path) -> None:
    assert cli("rewind", f"{run}@1").code == 0
    assert [d["step"] for d in cli("rm", f"{run}@..3", "--abandoned", "--json").json["deleted"]] == [2, 3]
    assert steps(run) == [1, 5]
    assert "nothing was deleted" in cli("rm", f"{run}@1", "--abandoned", "--force").out
    assert steps(run) == [1, 5]


def test_show_prints_the_line_of_descent(cli: Cli, run: Path) -> None:
    one, two, five = (folder_of(run, step).name for step in (1, 2, 5))
    with stepwell.open(run.parent / "fork", fork_from="run@5") as store:
        store.restore(state(0))
        for step in (6, 7):
            store.save(step, state(step)).wait()
    six = folder_of(run.parent / "fork", 6).name
    shown = cli("show", f"{run.parent / 'fork'}@7", "--json").json
    assert shown["parent"] == six and shown["ancestors"] == [six, f"run@{five}"]
    assert shown["forked_from"] == f"run@{five}" and shown["timeline"] == 0
    lines = {line[:16].strip(): line[16:].strip() for line in cli("show", run.parent / "fork").out.splitlines()}
    assert lines["parent"] == six and lines["before that"] == lines["run forked from"] == f"run@{five}"
    shown = cli("show", run, "--json").json
    assert shown["ancestors"] == [two, one] and shown["forked_from"] is None and shown["timeline"] == 1
