"""`stepwell config`: what counts and where it comes from; whether it works here; the schema for editors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.cli.helpers import Cli

TEXT = """\
max_unsaved = "30min"

[[tier]]
name = "host"
driver = "host"
capacity = "50%"

[[tier]]
name = "nvme"
driver = "file"
path = "$PLACE/nvme"
retain = { last = 3 }

[[tier]]
name = "pfs"
driver = "pfs"
path = "pfs"
capacity = "1MB"
flush = [{ every_steps = 100, parts = ["model"] }, { every = "1h" }]
bandwidth_per_job = "8MB/s"
delete_grace = 5
"""


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose answers do not depend on where the tests run."""
    for name in ("STEPWELL_CONFIG", "STEPWELL_RUN", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PLACE", str(tmp_path))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setattr("stepwell.building.cgroup_limit_bytes", lambda: 4 << 30)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "pfs").mkdir()
    made = tmp_path / "cluster.toml"
    made.write_text(TEXT)
    return made


def values(document: dict[str, Any]) -> dict[str, tuple[Any, str]]:
    return {each["key"]: (each["value"], each["source"]) for each in document["values"]}


def test_each_value_and_where_it_comes_from(
    cli: Cli, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPWELL_RUN", "sft")
    answer = cli("config", "check", file, "--no-probe", "--json")
    assert answer.code == 0 and answer.json["good"] is True and answer.json["file"] == str(file)
    assert "machine" not in answer.json and "paths" not in answer.json
    assert values(answer.json) == {
        "run": ("sft", "environment"),
        "on_pressure": ("block", "default"),
        "max_unsaved": (1800, "file"),
        "block_timeout": (120, "default"),
        "exit_timeout": (600, "default"),
        "trace": (None, "default"),
        "tier[0].name": ("host", "file"),
        "tier[0].driver": ("host", "file"),
        "tier[0].capacity": (2 << 30, "derived"),
        "tier[0].shared": (False, "default"),
        "tier[0].evict": ("s3-fifo", "default"),
        "tier[0].prefetch": (None, "default"),
        "tier[1].name": ("nvme", "file"),
        "tier[1].driver": ("file", "file"),
        "tier[1].path": (f"{tmp_path}/nvme", "derived"),
        "tier[1].capacity": (None, "default"),
        "tier[1].survives": ("reboot", "default"),
        "tier[1].flush": ("all", "default"),
        "tier[1].retain": ("{ last = 3 }", "file"),
        "tier[1].verify_after_flush": (None, "default"),
        "tier[1].delete_grace": (0, "default"),
        "tier[2].name": ("pfs", "file"),
        "tier[2].driver": ("pfs", "file"),
        "tier[2].path": (f"{tmp_path}/pfs", "derived"),
        "tier[2].capacity": (10**6, "file"),
        "tier[2].survives": ("node-loss", "default"),
        "tier[2].flush": ('[{ every_steps = 100, parts = ["model"] }, { every = "1h" }]', "file"),
        "tier[2].retain": (None, "default"),
        "tier[2].verify_after_flush": (None, "default"),
        "tier[2].delete_grace": (5, "file"),
        "tier[2].bandwidth": (None, "default"),
        "tier[2].bandwidth_per_job": (8 * 10**6, "file"),
        "tier[2].timeout": (60, "default"),
        "tier[2].write_bytes_per_s": (10**6, "derived"),
    }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cluster.toml", "pfs"]


def test_the_run_of_the_file_or_of_nobody(cli: Cli, file: Path) -> None:
    def run() -> tuple[Any, str]:
        return values(cli("config", "check", file, "--no-probe", "--json").json)["run"]

    assert run() == (None, "default")
    file.write_text('run = "mine"\n' + TEXT)
    assert run() == ("mine", "file")


def test_people_see_file_and_key(cli: Cli, file: Path) -> None:
    shown = cli("config", "check", file, "--no-probe").out
    rows = [re.split(r"  +", line.strip()) for line in shown.splitlines()]
    assert ["max_unsaved", "30 min", "cluster.toml:max_unsaved"] in rows
    assert ["exit_timeout", "10 min", "default"] in rows
    assert ["capacity", "2.00 GiB: 50% of the 4.00 GiB that this job may use here", "derived"] in rows
    assert ["bandwidth_per_job", "8MB/s", "cluster.toml:tier[2].bandwidth_per_job"] in rows
    assert ["tier pfs (pfs)"] in rows and ["machine"] not in rows


def test_the_machine_and_the_folders_are_tried(cli: Cli, file: Path, tmp_path: Path) -> None:
    answer = cli("config", "check", file, "--json")
    assert answer.code == 0 and answer.json["good"] is True
    assert {"io_uring", "memlock_bytes"} <= set(answer.json["machine"])
    assert "config" not in answer.json["machine"]  # that would be another file
    nvme, pfs = answer.json["paths"][f"{tmp_path}/nvme"], answer.json["paths"][f"{tmp_path}/pfs"]
    for found in (nvme, pfs):
        assert {"exists", "free_bytes", "writable", "direct_io", "engine", "alignment_bytes"} <= set(found)
    assert nvme["exists"]["value"] is False and f"made in {tmp_path}" in nvme["exists"]["text"]
    assert pfs["exists"]["value"] is True
    assert pfs["capacity_bytes"]["value"] == 10**6 and "capacity_bytes" not in nvme
    assert not (tmp_path / "nvme").exists() and list((tmp_path / "pfs").iterdir()) == []
    shown = cli("config", "check", file).out
    assert "io uring" in shown and f"\n{tmp_path}/pfs\n" in shown


def test_more_than_is_free_is_said(cli: Cli, file: Path, tmp_path: Path) -> None:
    file.write_text(TEXT.replace('"1MB"', '"1000PB"'))
    answer = cli("config", "check", file, "--json")
    capacity = answer.json["paths"][f"{tmp_path}/pfs"]["capacity_bytes"]
    assert answer.code == 0 and capacity["grade"] == "slow" and "only" in capacity["text"]


@pytest.mark.parametrize(
    ("change", "path", "says"),
    [
        (('path = "pfs"', 'path = "gone"'), "gone", "no such folder.*never makes the folder of a shared tier"),
        (('path = "$PLACE/nvme"', 'path = "$PLACE/a/b"'), "a/b", "nor .*/a.*Make .*/a, or mend the path"),
        (('path = "$PLACE/nvme"', 'path = "cluster.toml"'), "cluster.toml", "it is a file.*Name a folder"),
    ],
)
def test_what_cannot_work_here_is_an_error(
    cli: Cli, file: Path, tmp_path: Path, change: tuple[str, str], path: str, says: str
) -> None:
    file.write_text(TEXT.replace(*change))
    answer = cli("config", "check", file, "--json")
    assert answer.code == 1 and answer.json["good"] is False and "not everything" in answer.err
    found = answer.json["paths"][f"{tmp_path}/{path}"]
    assert found["exists"]["grade"] == "bad"
    assert re.search(says, found["exists"]["text"] + ". " + found["exists"]["todo"])
    assert cli("config", "check", file, "--no-probe").code == 0


def test_a_mistake_names_file_key_and_remedy(cli: Cli, file: Path) -> None:
    file.write_text(TEXT.replace("every_steps", "evry_steps"))
    answer = cli("config", "check", file, "--json")
    assert answer.code == 1
    assert answer.json["error"]["where"] == {"file": str(file), "key": "tier[2].flush[0].evry_steps", "tier": "pfs"}
    assert f"{file}, key tier[2].flush[0].evry_steps" in answer.err and "Did you mean 'every_steps'?" in answer.err


def test_memory_that_this_machine_does_not_have(cli: Cli, file: Path) -> None:
    file.write_text(TEXT.replace('"50%"', '"5GiB"'))
    answer = cli("config", "check", file)
    assert answer.code == 1 and "5.00 GiB are more than the 4.00 GiB" in answer.err
    assert cli("config", "check", file, "--no-probe").code == 0


def test_no_such_file(cli: Cli, tmp_path: Path) -> None:
    answer = cli("config", "check", tmp_path / "none.toml")
    assert answer.code == 1 and "cannot be read: No such file" in answer.err


def test_the_schema_is_one_document(cli: Cli) -> None:
    schema = json.loads(cli("config", "schema").out)
    assert schema["$defs"]["TierConfig"]["properties"]["flush"]["description"]
