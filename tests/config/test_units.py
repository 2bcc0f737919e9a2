from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.units import (
    DURATION_S_MAX,
    SIZE_BYTES_MAX,
    format_bytes,
    format_duration,
    parse_duration,
    parse_percent,
    parse_rate,
    parse_size,
)

SIZES = {
    "400GiB": 400 << 30, "64MB": 64 * 10**6, "8 MiB": 8 << 20, 1024: 1024, "1": 1, "512B": 512, "1.5KiB": 1536,
    "2 TiB": 2 << 40, "1PB": 10**15, "64gb": 64 * 10**9, "64gib": 64 << 30, "10kB": 10_000, "10KB": 10_000, " 3 B ": 3,
    "0.1KB": 100, "1.0001KB": 1000,
}  # fmt: skip
DURATIONS = {
    "1h": 3600.0, "30s": 30.0, "2min": 120.0, "250ms": 0.25, 30: 30.0, 0.5: 0.5, "1h30m": 5400.0, "1 h 5 min": 3900.0,
    "1d": 86400.0, "1.5h": 5400.0,
}  # fmt: skip
PERCENTS = {"25%": 0.25, "100%": 1.0, "0.5 %": 0.005}
RATES = {"20GB/s": 20 * 10**9, "500 MiB/s": 500 << 20, "1 GB / s": 10**9, 4096: 4096}


@pytest.mark.parametrize(("written", "size_bytes"), SIZES.items())
def test_sizes(written: object, size_bytes: int) -> None:
    assert parse_size(written) == size_bytes


@pytest.mark.parametrize(("written", "seconds"), DURATIONS.items())
def test_durations(written: object, seconds: float) -> None:
    assert parse_duration(written) == seconds


@pytest.mark.parametrize(("written", "fraction"), PERCENTS.items())
def test_percentages(written: object, fraction: float) -> None:
    assert parse_percent(written) == fraction


@pytest.mark.parametrize(("written", "bytes_per_s"), RATES.items())
def test_rates(written: object, bytes_per_s: int) -> None:
    assert parse_rate(written) == bytes_per_s


BAD: dict[Callable[[object], float], list[object]] = {
    parse_size: [
        "",
        "GB",
        "4 GB 5",
        "-3GB",
        "1e9",
        "0",
        0,
        -1,
        1.5,
        True,
        None,
        [],
        "4 bytes",
        "9" * 5000,
        "8EiB",
        "²GB",
    ],
    parse_duration: ["", "1", "h", "1h2", "-1s", "1 hour", "1w", 0, -1, math.nan, math.inf, True, None, "1e3s", "0s"],
    parse_percent: ["25", "%", "0%", "101%", "-1%", 25, 0.25, None, "25 percent"],
    parse_rate: ["20GB", "20", "20/s", "20Gb/s", "20GB/h", "20GBps", 0, -1, None, "/s", "0B/s"],
}


@pytest.mark.parametrize(("parse", "written"), [(parse, written) for parse, bad in BAD.items() for written in bad])
def test_what_is_wrong_is_refused_with_an_example(parse: Callable[[object], float], written: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(written)
    assert "Write" in caught.value.todo
    if len(str(written)) < 100:
        assert str(written).rpartition("/")[0] in caught.value.what


@pytest.mark.parametrize("written", ["64M", "64Mb", "64Mi", "64mB", "64MIB"])
def test_a_unit_that_can_mean_two_things_names_both(written: str) -> None:
    with pytest.raises(ConfigError, match="64MiB .powers of 1024. or 64MB .powers of 1000."):
        parse_size(written)


def test_bounds() -> None:
    assert parse_size(SIZE_BYTES_MAX) == SIZE_BYTES_MAX
    assert parse_duration(DURATION_S_MAX) == DURATION_S_MAX
    for parse, beyond in ((parse_size, SIZE_BYTES_MAX + 1), (parse_duration, DURATION_S_MAX + 1)):
        with pytest.raises(ConfigError, match="out of range"):
            parse(beyond)


@given(st.integers(1, SIZE_BYTES_MAX))
def test_a_formatted_size_reads_back_within_half_a_percent(size_bytes: int) -> None:
    text = format_bytes(size_bytes)
    assert abs(parse_size(text) - size_bytes) <= max(1, size_bytes * 0.0051)
    assert len(text.split()[0].replace(".", "")) <= 4


@given(st.floats(0.0001, DURATION_S_MAX / 1.1))
def test_a_formatted_duration_reads_back_close(seconds: float) -> None:
    text = format_duration(seconds)
    assert math.isclose(parse_duration(text), seconds, rel_tol=0.05, abs_tol=5e-5)
    assert "60 " not in f" {text}".replace(" 160 ", "").replace(" 260 ", "") or seconds < 1 or "d" in text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (64 << 20, "64.0 MiB"), (400 << 30, "400 GiB"),
     ((1 << 20) - 1, "1.00 MiB"), (1000 << 20, "0.98 GiB"), (5 << 60, "5.00 EiB"), (-2048, "-2.00 KiB")],
)  # fmt: skip
def test_sizes_for_people(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 ms"), (0.0004, "0.4 ms"), (0.25, "250 ms"), (1.25, "1.25 s"), (42, "42 s"), (59.7, "1 min"),
     (119.9, "2 min"), (125, "2 min 5 s"), (3599.8, "1 h"), (3661, "1 h 1 min"), (86399, "1 d"), (100_000, "1 d 4 h"),
     (-3, "-3 s")],
)  # fmt: skip
def test_times_for_people(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_zero_is_a_time_only_where_that_is_said() -> None:
    for written in (0, 0.0, "0s", "0 min"):
        assert parse_duration(written, or_zero=True) == 0
    assert parse_duration("30 min", or_zero=True) == 1800
    for written in (-1, "0", math.nan, True):
        with pytest.raises(ConfigError):
            parse_duration(written, or_zero=True)


@given(st.integers(1, 10**6), st.sampled_from(["B", "kB", "MB", "GB", "KiB", "MiB", "GiB"]), st.sampled_from(["", " "]))
def test_a_size_means_its_number_times_its_unit(number: int, unit: str, space: str) -> None:
    one = parse_size(f"1{unit}")
    assert parse_size(f"{number}{space}{unit}") == number * one
    assert parse_rate(f"{number}{space}{unit}/s") == number * one


@given(st.lists(st.tuples(st.integers(1, 99), st.sampled_from(["ms", "s", "min", "h", "d"])), min_size=1, max_size=4))
def test_a_duration_is_the_sum_of_its_terms(terms: list[tuple[int, str]]) -> None:
    together = parse_duration(" ".join(f"{number}{unit}" for number, unit in terms))
    assert math.isclose(together, sum(parse_duration(f"{number} {unit}") for number, unit in terms))


@given(st.integers(1, 100))
def test_a_percentage_is_a_hundredth_of_its_number(percent: int) -> None:
    assert math.isclose(parse_percent(f"{percent}%"), percent / 100)
