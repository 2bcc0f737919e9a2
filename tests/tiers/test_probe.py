"""What is found out at start, and that it is found out once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stepwell.native import AsyncEngine
from stepwell.tiers import _medium, _probe
from stepwell.tiers._probe import (
    PROBE_READ_S,
    TRIALS_MAX,
    ReadSpeed,
    SpeedCache,
    SpeedProbe,
    direct_alignment,
    probe_access,
)
from stepwell.tiers.file import FileTier
from tests.contract.suite import SHARD, data_of, get, save
from tests.tiers.helpers import disk, on, tree


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without any cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(SpeedCache, "_memory", {})
    return tmp_path / "home"


class Measuring:
    """Stands in for the measurement and counts how often it is made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, speed: ReadSpeed | None) -> None:
        self.count = 0

        async def measure(probe: SpeedProbe, *engines: AsyncEngine) -> ReadSpeed | None:
            self.count += 1
            return speed

        monkeypatch.setattr(SpeedProbe, "measure", measure)


async def ways(tier: FileTier) -> str:
    if tier.info.detail["writing"] != "direct":
        pytest.skip("no direct I/O here: nothing to choose from")
    await save(tier, SHARD, data_of(5000))
    assert await get(tier, SHARD, 5000) == data_of(5000)
    return tier.info.detail["reading"]


def test_the_faster_way_of_reading_is_measured_and_leaves_no_file(tmp_path: Path) -> None:
    reading = on(FileTier(tmp_path / "root"), ways)
    assert "GB/s" in reading
    assert tree(tmp_path / "root") == {"run", "run/step-000000001.1-1"} | {
        f"run/step-000000001.1-1/{name}" for name in ("model.safetensors", "manifest.json")
    }


@pytest.mark.parametrize(
    ("direct", "buffered", "chosen"), [(1e9, 1.1e9, "direct"), (1e9, 1.2e9, "buffered"), (2e9, 1e9, "direct")]
)
def test_buffered_must_be_clearly_faster(
    tmp_path: Path, direct: float, buffered: float, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Measuring(monkeypatch, ReadSpeed(direct, buffered))
    assert on(FileTier(tmp_path / "root"), ways).startswith(chosen)


def test_it_is_measured_once_a_machine_and_disk(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measuring = Measuring(monkeypatch, ReadSpeed(1e9, 2e9))
    assert on(FileTier(tmp_path / "a"), ways) == on(FileTier(tmp_path / "b"), ways)
    monkeypatch.setattr(SpeedCache, "_memory", {})  # another process
    assert on(FileTier(tmp_path / "c"), ways).startswith("buffered")
    assert measuring.count == 1
    assert len(json.loads((home / "stepwell" / "probe.json").read_text())) == 1


@pytest.mark.parametrize("unclear", [ReadSpeed(1e9, 1.1e9), ReadSpeed(1e9, 1.3e9), ReadSpeed(1e9, 2e9, steady=False)])
def test_an_unclear_answer_is_asked_for_again_but_not_for_ever(
    tmp_path: Path, unclear: ReadSpeed, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring = Measuring(monkeypatch, unclear)
    for number in range(TRIALS_MAX + 2):
        monkeypatch.setattr(SpeedCache, "_memory", {})  # another process
        on(FileTier(tmp_path / str(number)), ways)
    assert measuring.count == TRIALS_MAX


def test_the_best_of_each_way_decides() -> None:
    busy, quiet = ReadSpeed(0.5e9, 2e9, steady=False), ReadSpeed(3e9, 1.5e9)
    assert busy.buffered_is_faster and not busy.settled
    both = quiet.merged(busy)
    assert both == ReadSpeed(3e9, 2e9, steady=True, trials=2) and both.settled and not both.buffered_is_faster


def test_a_measurement_on_a_busy_disk_is_not_settled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([(64 << 20, 0.1), *[(16 << 20, seconds) for seconds in (0.02, 0.01, 0.005, 0.01, 0.02, 0.01)]])

    async def sweep(*arguments: object) -> tuple[int, float]:
        return next(answers)

    monkeypatch.setattr(_probe, "_sweep", sweep)

    async def scenario(tier: FileTier) -> None:
        probe = SpeedProbe(str(tmp_path))
        try:
            probe.open()
            speed = await probe.measure(tier._medium.writer, tier._medium.reader, tier._medium.reader)
        finally:
            probe.remove()
        assert speed == ReadSpeed((16 << 20) / 0.005, (16 << 20) / 0.01, steady=False)

    on(disk(tmp_path), scenario)


@pytest.mark.parametrize("content", ["", "[]", '{"x": 1}', "{", "\0"])
def test_a_broken_cache_costs_a_measurement(
    tmp_path: Path, home: Path, content: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "stepwell").mkdir(parents=True)
    (home / "stepwell" / "probe.json").write_text(content)
    measuring = Measuring(monkeypatch, ReadSpeed(1e9, 2e9))
    assert on(FileTier(tmp_path / "root"), ways).startswith("buffered")
    assert measuring.count == 1


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.write_bytes(b"a file")
    Measuring(monkeypatch, ReadSpeed(1e9, 2e9))
    assert on(FileTier(tmp_path / "root"), ways).startswith("buffered")


def test_an_odd_disk_is_read_direct(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Measuring(monkeypatch, None)
    assert on(FileTier(tmp_path / "root"), ways) == "direct"
    assert not home.exists()


def test_a_nearly_full_disk_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_medium, "MEASURE_FREE_BYTES_MIN", 1 << 62)
    measuring = Measuring(monkeypatch, ReadSpeed(1e9, 2e9))
    on(FileTier(tmp_path / "root"), ways)
    assert measuring.count == 0


def test_doctor_gets_words(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> dict[str, str]:
        return tier.info.detail

    detail = on(disk(tmp_path), scenario)
    assert detail["path"] == str(tmp_path)
    assert {"access", "engine", "reading", "writing"} <= set(detail)
    assert on(disk(tmp_path, engine="threads"), scenario)["engine"].startswith("threads")
    assert on(disk(tmp_path, direct=False), scenario)["reading"] == "buffered"


def test_the_probe_cleans_up_and_agrees_with_the_kernel(tmp_path: Path) -> None:
    access = probe_access(str(tmp_path))
    assert access.writable and tree(tmp_path) == set()
    with (tmp_path / "x").open("wb") as file:
        assert direct_alignment(file.fileno()) in (0, 512, 4096, *(1 << n for n in range(20)))


def test_the_measurement_is_short() -> None:
    assert 2 * PROBE_READ_S < 0.3


def test_options_reach_the_engines(tmp_path: Path) -> None:
    async def scenario(tier: FileTier) -> None:
        assert (tier.info.request_bytes, tier.info.depth) == (64 << 10, 3)
        await save(tier, SHARD, data_of(1 << 20))
        assert tier._medium.writer.engine.statistics().requests >= 16

    on(disk(tmp_path, request_bytes=64 << 10, depth=3), scenario)
