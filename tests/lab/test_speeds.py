"""Files of speeds: what they say, what is wrong with them, and what is measured into them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.lab import Speed, Speeds, probe, read_speeds
from stepwell.lab.speeds import write_speeds
from tests.lab.helpers import HOST, NVME, config

GOOD = 'copy = "8GB/s"\n[tier.nvme]\nwrite = "2GB/s"\nread = "3GB/s"\n'


def read(folder: Path, text: str) -> Speeds:
    file = folder / "speeds.toml"
    file.write_text(text)
    return read_speeds(file)


def test_what_is_written_is_what_is_read(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD + 'limit = "4GB/s"\nlatency = "0.2ms"\nrecord = "5ms"\n')
    assert found == Speeds(8e9, {"nvme": Speed(2e9, 3e9, 4e9, 0.0002, 0.005)})
    assert read(tmp_path, GOOD).of("nvme") == Speed(2e9, 3e9)


rates = st.integers(1, 10**6).map(lambda number: number * 1e5)


@given(rates, rates, rates, st.none() | rates, st.integers(0, 10**6))
def test_a_file_that_is_made_is_read_again(
    tmp_path_factory: pytest.TempPathFactory, copy: float, write: float, read_: float, limit: float | None, late: int
) -> None:
    speeds = Speeds(copy, {"disk": Speed(write, read_, limit, late / 1e6, late / 1e6)})
    assert read(tmp_path_factory.mktemp("speeds"), write_speeds(speeds)) == speeds


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD.replace("copy", "cpoy"), r"no key 'cpoy'.*key cpoy.*Did you mean 'copy'"),
        (GOOD.replace('copy = "8GB/s"', ""), r"'copy' is missing"),
        (GOOD.replace('read = "3GB/s"', ""), r"'read' is missing.*key tier\.nvme\.read"),
        (GOOD.replace("2GB/s", "2GB"), r"not a rate.*key tier\.nvme\.write"),
        (GOOD + 'latency = "5"\n', r"has no unit.*key tier\.nvme\.latency"),
        (GOOD + "raed = 5\n", r"no key 'raed'.*Did you mean 'read'"),
        ("copy =", r"cannot be read"),
        ('copy = "8GB/s"\ntier = 5', r"expected a table.*key tier"),
    ],
)
def test_what_is_wrong_is_named_with_its_key(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(tmp_path, text)


def test_probing_measures_every_tier_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "nvme").mkdir()
    found = probe(config(tmp_path, HOST, NVME), 20 << 20)
    speed = found.of("nvme")
    assert found.copy_bytes_per_s > 1e8
    assert speed.write_bytes_per_s > 1e6 and speed.read_bytes_per_s > 1e6
    assert 0 < speed.latency_s < 1 and 0 < speed.record_s < 1
    assert list((tmp_path / "nvme").iterdir()) == []


def test_probing_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder.*tier nvme"):
        probe(config(tmp_path, NVME), 8 << 20)
