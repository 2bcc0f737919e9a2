"""What `ls` and `show` say of a run whose newest checkpoint is in shared memory alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stepwell
from tests.cli.helpers import Cli
from tests.store.helpers import sharing


def state(step: int) -> dict[str, object]:
    return {"model": {"w": torch.full((1000,), float(step))}}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Steps 1 and 5 are on the disk, step 8 is in shared memory alone, as long as its process lives."""
    with sharing(tmp_path) as config:
        config.write_text(config.read_text() + "flush = { every_steps = 5 }\n")
        monkeypatch.setenv("STEPWELL_CONFIG", str(config))
        with stepwell.open(config, run="sft") as store:
            for step in (1, 5, 8):
                store.save(step, state(step)).wait("host" if step == 8 else "disk")
            yield "sft"


@pytest.mark.parametrize("by_path", [False, True])
def test_ls_names_it_apart_from_what_is_on_tiers(cli: Cli, run: str, tmp_path: Path, by_path: bool) -> None:
    ref = tmp_path / run if by_path else run
    said, [told] = cli("ls", ref), cli("ls", ref, "--json").json["listed"]
    assert said.code == 0 and "step-000000008.1-3: in shared memory alone, host.sft.0." in said.out
    assert [each["step"] for each in told["checkpoints"]] == [1, 5]
    assert list(told["in_memory"]) == ["step-000000008.1-3"]
    assert told["in_memory"]["step-000000008.1-3"] in cli("host", "ls").out


def test_ls_of_another_run_of_that_name_says_nothing_of_it(cli: Cli, run: str, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    with stepwell.open(tmp_path / "elsewhere" / run) as other:
        other.save(1, state(1)).wait()
        assert cli("ls", tmp_path / "elsewhere" / run, "--json").json["listed"][0]["in_memory"] == {}
        assert "memory" not in cli("show", tmp_path / "elsewhere" / run).err


def test_show_shows_the_newest_on_a_tier_and_says_that_there_is_a_newer_one(cli: Cli, run: str) -> None:
    said = cli("show", run)
    assert said.code == 0 and "step-000000005.1-2" in said.out
    assert "step-000000008.1-3 is newer, and in shared memory alone" in said.err
    assert cli("show", f"{run}@8").code == 1
    assert "memory" not in cli("show", f"{run}@1").err


def test_once_it_is_down_nothing_is_said(cli: Cli, run: str, tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "shared.toml", run="other") as store:
        store.save(1, state(1)).wait("disk")
        assert cli("ls", "other", "--json").json["listed"][0]["in_memory"] == {}
