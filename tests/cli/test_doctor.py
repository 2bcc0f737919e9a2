"""`stepwell doctor`: what the machine and each path offer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.helpers import Cli

MACHINE = {
    "kernel", "io_uring", "crc32c", "torch", "cuda_devices", "gpu_copies", "memory_limit_bytes", "memory_free_bytes",
    "host_tier_bytes", "huge_pages", "memlock_bytes", "open_files", "config",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("STEPWELL_CONFIG", raising=False)


def test_the_machine_and_a_path(cli: Cli, tmp_path: Path) -> None:
    place = tmp_path / "a [1]"
    place.mkdir()
    found = cli("doctor", place, "--json").json
    assert set(found["machine"]) == MACHINE
    assert 0 < found["machine"]["host_tier_bytes"]["value"] <= found["machine"]["memory_limit_bytes"]["value"]
    assert found["machine"]["kernel"]["value"] == os.uname().release
    here = found["paths"][str(place)]
    assert set(here) == {"free_bytes", "writable", "direct_io", "engine", "reading", "alignment_bytes", "fallocate"}
    assert here["writable"]["value"] is True and here["free_bytes"]["value"] > 0
    assert here["engine"]["value"] in ("io_uring", "threads") and here["reading"]["value"] in ("direct", "buffered")
    assert list(place.iterdir()) == []
    shown = cli("doctor", place).out
    assert "io uring" in shown and "a [1]" in shown and "fallocate" in shown


def test_a_run_is_looked_at_where_it_lies(cli: Cli, run: Path) -> None:
    before = sorted(run.iterdir())
    assert cli("doctor", run, "--json").json["paths"][str(run)]["writable"]["value"] is True
    assert sorted(run.iterdir()) == before


def test_a_path_that_is_not_there_is_a_finding(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = cli("doctor", tmp_path / "no", tmp_path / "file", "--json")
    assert answer.code == 0
    assert [found["exists"]["grade"] for found in answer.json["paths"].values()] == ["bad", "bad"]


def test_the_config_is_named_and_a_bad_one_is_a_finding(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "site.toml"
    config.write_text(f'[[tier]]\nname = "nvme"\ndriver = "file"\npath = "{tmp_path}"\n')
    monkeypatch.setenv("STEPWELL_CONFIG", str(config))
    said = cli("doctor", tmp_path, "--json").json["machine"]["config"]
    assert said["value"] == str(config) and "nvme (file)" in said["text"]
    config.write_text("[[tier]]\nnmae = 1\n")
    said = cli("doctor", tmp_path, "--json").json["machine"]["config"]
    assert said["grade"] == "bad" and "nmae" in said["text"]


def test_the_launchers_ranks_share_the_host_tier(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert "each of 4 local ranks" in cli("doctor", tmp_path, "--json").json["machine"]["host_tier_bytes"]["text"]


@pytest.mark.parametrize("name", ["n" * 300, "loop/below"])
def test_a_path_that_cannot_be_looked_at_is_a_finding(cli: Cli, tmp_path: Path, name: str) -> None:
    """And the machine and the other paths are told all the same."""
    (tmp_path / "loop").symlink_to("loop")
    answer = cli("doctor", tmp_path, tmp_path / name, "--json")
    assert answer.code == 0 and answer.json["machine"]["kernel"]["value"]
    assert answer.json["paths"][str(tmp_path)]["writable"]["value"] is True
    [found] = answer.json["paths"][str(tmp_path / name)].values()
    assert found["value"] is False and found["grade"] == "bad" and found["todo"]
