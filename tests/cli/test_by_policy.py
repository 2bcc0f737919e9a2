"""`stepwell rm --by-policy`, and the story that `stepwell show` tells: what rules say, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepwell
from tests.cli.helpers import Cli, state

CONFIG = """
[[tier]]
name = "nvme"
driver = "file"
path = "{root}/nvme"

[[tier]]
name = "pfs"
driver = "pfs"
path = "{root}/pfs"
flush = {{ every_steps = 10 }}
"""
RULES = {"nvme": "last = 2", "pfs": 'last = 1, every_steps = 20, best = { metric = "acc", mode = "max", count = 1 }'}


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of steps 5 to 40 whose writer kept everything; the config has got rules since then."""
    for tier in ("nvme", "pfs"):
        (tmp_path / tier).mkdir()
    path = tmp_path / "cluster.toml"
    text = CONFIG.format(root=tmp_path)
    path.write_text(text)
    with stepwell.open(path, run="sft") as store:
        for step in range(5, 45, 5):
            store.save(step, state(step), metrics={"acc": 1.0 if step == 10 else 0.5}).wait("nvme")
            store.flush(step) if step % 10 == 0 else None
    for tier, rules in RULES.items():
        text = text.replace(f'path = "{tmp_path}/{tier}"', f'path = "{tmp_path}/{tier}"\nretain = {{ {rules} }}')
    path.write_text(text)
    monkeypatch.setenv("STEPWELL_CONFIG", str(path))
    return path


def on(root: Path, tier: str) -> list[int]:
    return sorted(int(manifest.parent.name[5:14]) for manifest in root.glob(f"{tier}/sft/step-*/manifest.json"))


def test_it_says_what_would_go_and_why_and_then_does_it(cli: Cli, config: Path) -> None:
    root = config.parent
    before = {tier: on(root, tier) for tier in RULES}
    assert before == {"nvme": [5, 10, 15, 20, 25, 30, 35, 40], "pfs": [5, 10, 20, 30, 40]}
    planned = cli("rm", "sft", "--by-policy", "--dry-run", "--json").json
    assert {tier: on(root, tier) for tier in RULES} == before
    going = {(copy["tier"], copy["step"]): copy["why"] for copy in planned["deleted"]}
    assert set(going) == {("nvme", step) for step in range(5, 35, 5)} | {("pfs", 30)}
    assert "last 2" in going["nvme", 5] and "best" in going["pfs", 30] and "window" in going["pfs", 30]
    assert "not among the last 2" in cli("rm", "sft", "--by-policy", "-n").out
    done = cli("rm", "sft", "--by-policy", "--yes", "--json").json
    assert done["deleted"] == planned["deleted"]
    assert {tier: on(root, tier) for tier in RULES} == {"nvme": [35, 40], "pfs": [5, 10, 20, 40]}
    assert cli("rm", "sft", "--by-policy", "--yes", "--json").json["deleted"] == []


def test_a_kept_one_stays_and_only_what_is_named_goes(cli: Cli, config: Path) -> None:
    assert cli("keep", "sft@10").code == 0
    planned = cli("rm", "sft@..15", "--by-policy", "--dry-run", "--json").json
    assert [(copy["tier"], copy["step"]) for copy in planned["deleted"]] == [("nvme", 5), ("nvme", 15)]


def test_a_live_writer_refuses_it(cli: Cli, config: Path) -> None:
    with stepwell.open(config, run="sft", policies=[]) as store:
        store.save(45, state(45)).wait("nvme")
        answer = cli("rm", "sft", "--by-policy", "--yes")
        assert answer.code == 1 and "pid" in answer.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{root}/pfs/sft", "--by-policy"], "no config file says"),
        (["sft", "--by-policy", "--abandoned"], "at once"),
        (["sft"], "this is a whole run"),
    ],
)
def test_what_cannot_be_meant_is_refused(cli: Cli, config: Path, arguments: list[str], words: str) -> None:
    answer = cli("rm", *(each.format(root=config.parent) for each in arguments))
    assert answer.code == 1 and words in answer.err


def test_rules_that_are_not_there(cli: Cli, config: Path) -> None:
    config.write_text(CONFIG.format(root=config.parent))
    answer = cli("rm", "sft", "--by-policy")
    assert answer.code == 1 and "no tier has a retain rule" in answer.err and "cluster.toml" in answer.err


def test_show_tells_why_a_checkpoint_is_where_it_is(cli: Cli, config: Path) -> None:
    with stepwell.open(config, run="sft") as store:
        for step in (50, 55, 60):
            store.save(step, state(step)).wait("nvme")
    told = cli("show", "sft@50", "--json").json
    what = [(event["what"], event.get("tier")) for event in told["events"]]
    assert ("saved", "nvme") in what and ("flushed", "pfs") in what and ("deleted", "nvme") in what
    planned = next(event for event in told["events"] if event["what"] == "planned")
    assert "window of 10 steps" in planned["reason"]
    people = cli("show", "sft@60").out
    assert "stays: among the last" in people
    assert cli("show", "sft@5", "--json").json["events"] != []  # of the writer before
