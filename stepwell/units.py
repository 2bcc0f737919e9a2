"""Sizes, durations, percentages and rates, as people write and read them.

Parsing is strict, since a wrong unit costs a factor of a million: what can be meant in two ways (`64M`, `20Gb/s`)
is refused. Every error is a ConfigError whose `todo` shows what would be right.
"""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise

from stepwell.errors import ConfigError

_SIZES = {"B": 1}
for _power, _letter in enumerate("KMGTPE", 1):
    _SIZES |= {f"{_letter}B": 1000**_power, f"{_letter}iB": 1024**_power}
_SIZES["kB"] = 1000
_SIZES |= {name.lower(): size for name, size in _SIZES.items()}

_SECONDS = {
    "ms": Fraction(1, 1000), "s": Fraction(1), "min": Fraction(60), "m": Fraction(60), "h": Fraction(3600),
    "d": Fraction(86400),
}  # fmt: skip

#: more than any medium holds, and well inside the 64-bit offsets of files
SIZE_BYTES_MAX = 1 << 62
#: ten years; far longer times overflow the timeouts of threading
DURATION_S_MAX = 3652 * 86400

_NUMBER = r"([0-9]{1,20}(?:\.[0-9]{1,20})?)"
_QUANTITY = re.compile(_NUMBER + r"\s*([A-Za-z]*)")
_SPAN = re.compile(rf"(?:{_NUMBER}\s*([a-z]+)\s*)+")
_SPAN_PART = re.compile(_NUMBER + r"\s*([a-z]+)")
_PERCENT = re.compile(_NUMBER + r"\s*%")

_SIZE_TODO = "Write a size such as '400GiB', '64MB' or a whole number of bytes"
_DURATION_TODO = "Write a time such as '1h', '90s', '250ms' or a number of seconds"
_PERCENT_TODO = "Write a percentage above 0 and up to 100, such as '25%'"
_RATE_TODO = "Write a rate such as '20GB/s', '500MiB/s' or a whole number of bytes a second"


def parse_size(value: object) -> int:
    """Bytes: from '400GiB', '64MB', '8 MiB', '1.5 TiB', or a whole number of bytes. At least 1."""
    return _bytes(value, "a size", _SIZE_TODO)


def parse_rate(value: object) -> int:
    """Bytes a second: from '20GB/s', '500 MiB/s', or a whole number. At least 1."""
    if isinstance(value, str):
        head, slash, unit = value.strip().rpartition("/")
        if not slash or unit.strip() != "s":
            raise ConfigError(f"{value!r} is not a rate", todo=_RATE_TODO)
        value = head.strip()
        if value.isdecimal():
            raise ConfigError(f"{value!r} a second has no unit", todo=_RATE_TODO)
    return _bytes(value, "a rate", _RATE_TODO, "/s")


def _bytes(value: object, what: str, todo: str, per: str = "") -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError(f"{value!r} is not {what}", todo=todo)
    if isinstance(value, int):
        size = value
    else:
        match = _QUANTITY.fullmatch(value.strip())
        if match is None:
            raise ConfigError(f"{value!r} is not {what}", todo=todo)
        number, unit = match.groups()
        if unit not in _SIZES and not (unit == "" and number.isdecimal()):
            raise ConfigError(f"{value!r} has {_unit(unit)}", todo=_size_hint(number, unit, per) or todo)
        size = int(Fraction(number) * _SIZES.get(unit, 1))
    if not 1 <= size <= SIZE_BYTES_MAX:
        raise ConfigError(f"{value!r} is out of range for {what}", todo=todo)
    return size


def _unit(unit: str) -> str:
    return f"the unknown unit {unit!r}" if unit else "no unit"


def _size_hint(number: str, unit: str, per: str) -> str:
    letter = unit[:1].upper()
    if letter not in tuple("KMGTPE") or unit[1:].lower() not in ("", "b", "i", "ib"):
        return ""
    return f"Write {number}{letter}iB{per} (powers of 1024) or {number}{letter}B{per} (powers of 1000)"


def parse_duration(value: object, *, or_zero: bool = False) -> float:
    """Seconds: from '1h', '2min', '1h 30min', '30s', '250ms', or a number of seconds. Above 0, or 0 with `or_zero`."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ConfigError(f"{value!r} is not a time", todo=_DURATION_TODO)
    seconds = _seconds(value.strip()) if isinstance(value, str) else value
    if not (0 < seconds <= DURATION_S_MAX or or_zero and seconds == 0):  # not for NaN, either
        raise ConfigError(f"{value!r} is out of range for a time", todo=_DURATION_TODO)
    return float(seconds)


def _seconds(text: str) -> Fraction:
    if not _SPAN.fullmatch(text):
        what = "has no unit" if re.fullmatch(_NUMBER, text) else "is not a time"
        raise ConfigError(f"{text!r} {what}", todo=_DURATION_TODO)
    total = Fraction(0)
    for number, unit in _SPAN_PART.findall(text):
        if unit not in _SECONDS:
            raise ConfigError(f"{text!r} has {_unit(unit)}", todo=f"{_DURATION_TODO}; units are {', '.join(_SECONDS)}")
        total += Fraction(number) * _SECONDS[unit]
    return total


def parse_percent(value: object) -> float:
    """The fraction that '25%' stands for: above 0, up to 1."""
    match = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{value!r} is not a percentage", todo=_PERCENT_TODO)
    fraction = Fraction(match[1]) / 100
    if not 0 < fraction <= 1:
        raise ConfigError(f"{value!r} is out of range for a percentage", todo=_PERCENT_TODO)
    return float(fraction)


def format_bytes(size_bytes: int) -> str:
    """For people, three digits: '512 B', '1.50 KiB', '64.0 MiB', '400 GiB'."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    value = float(size_bytes)
    for letter in "KMGTPE":
        value /= 1024
        if abs(value) < 999.5 or letter == "E":
            break
    digits = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
    return f"{value:.{digits}f} {letter}iB"


def format_duration(seconds: float) -> str:
    """For people, its two largest units: '250 ms', '1.25 s', '42 s', '2 min 5 s', '1 h', '3 d 4 h'."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms" if seconds >= 0.00995 or seconds == 0 else f"{seconds * 1000:.1f} ms"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    for (big, size), (small, part) in pairwise((("d", 86400), ("h", 3600), ("min", 60), ("s", 1))):
        whole = round(seconds / part) * part  # rounded first, so that 119.9 s is 2 min and not 1 min 60 s
        if whole >= size:
            rest = whole % size // part
            return f"{whole // size} {big}" + (f" {rest} {small}" if rest else "")
    raise AssertionError(f"{seconds} s are less than a minute")
