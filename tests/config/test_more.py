"""Host memory that was asked for, against what this machine has; and configs of machines other than this one."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

import stepwell
from stepwell.building import Node, build
from stepwell.config import load_config
from stepwell.errors import ConfigError
from stepwell.tiers.host import HostTier

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two local ranks may use 4 GiB, of which 1 GiB is free."""
    monkeypatch.setattr("stepwell.opening.local_ranks", lambda: 2)
    monkeypatch.setattr("stepwell.opening.cgroup_limit_bytes", lambda: 4 * GIB)
    monkeypatch.setattr("stepwell.opening.free_memory_bytes", lambda: GIB)
    # nothing is really taken: only what would be asked for counts here
    monkeypatch.setattr("stepwell.tiers._arena.Arena.expect", lambda arena, size_bytes: None)


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("host", "size_bytes"), [("256MiB", GIB // 4), (GIB // 2, GIB // 2), ("25%", GIB // 2), (" 12.5 % ", GIB // 4)]
)
def test_host_memory_of_this_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, host: str | int, size_bytes: int
) -> None:
    with stepwell.open(tmp_path / "run", host=host) as store:
        assert isinstance(store.tiers[0], HostTier) and store.tiers[0].info.capacity_bytes == size_bytes
    assert not caplog.records


@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(
    ("host", "says"),
    [
        (
            "3GiB",
            "host='3GiB': 3.00 GiB are more than the 2.00 GiB of memory that this job may use. Write a percentage",
        ),
        ("1MiB", "host='1MiB': 1.00 MiB are too little to stage through. Write at least 32.0 MiB"),
        ("64M", "host='64M': '64M' has the unknown unit 'M'. Write 64MiB (powers of 1024) or 64MB (powers of 1000)"),
        ("120%", "host='120%': '120%' is out of range for a percentage. Write a percentage above 0 and up to 100"),
        (True, "host=True: True is not a size. Write a size such as"),
        (-5, "host=-5: -5 is out of range for a size. Write a size such as"),
    ],
)
def test_host_memory_that_cannot_be_right(tmp_path: Path, host: str | int, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        stepwell.open(tmp_path / "run", host=host)
    assert str(caught.value).startswith(says) and str(caught.value).count("Write") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("machine")
def test_host_memory_that_is_not_free_now_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stepwell"), stepwell.open(tmp_path / "run", host="1GiB"):
        pass
    [said] = [record.getMessage() for record in caplog.records]
    assert "1.00 GiB" in said and "512 MiB are free now" in said and "Give it less" in said


CONFIG = """
[[tier]]
name = "host"
driver = "host"
capacity = "3GiB"

[[tier]]
name = "nvme"
driver = "file"
path = "here"

[[tier]]
name = "odd"
driver = "pfs"
path = "there"
retain = { last = 2 }
"""


def test_memory_that_is_not_free_is_warned_of_for_all_local_ranks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "c.toml"
    file.write_text(CONFIG)
    with caplog.at_level(logging.WARNING, "stepwell"):
        build(load_config(file), run="r", node=Node(2, 4 * GIB, free_bytes=4 * GIB))
        assert not caplog.records
        build(load_config(file), run="r", node=Node(2, 4 * GIB, free_bytes=2 * GIB))
    [said] = [record.getMessage() for record in caplog.records]
    assert said.startswith("tier host will take 3.00 GiB of memory, and only 2.00 GiB are free now")


def test_storage_alone_can_be_looked_at_from_a_smaller_machine(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(CONFIG)
    small = Node(1, GIB, free_bytes=GIB)
    with pytest.raises(ConfigError, match=r"tier\[0\].capacity"):
        build(load_config(file), run="r", node=small)
    built = build(load_config(file), run="r", node=small, storage_only=True)
    assert [tier.info.name for tier in built.tiers] == ["nvme", "odd"]
