"""Plain values as JSON nodes and back, without loss of type.

A node is a JSON scalar for itself, a JSON object for a dict with string keys, or an array that starts with a
tag. Every array is a node: nothing else in a tree is written as an array. Chosen over pickle since loading must
execute nothing, and over one JSON object per value since 20,000 leaves must encode in milliseconds.
"""

from __future__ import annotations

import ast
import base64
import datetime
import decimal
import fractions
import pathlib
import struct
import uuid
import warnings
import zoneinfo
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from stepwell.state.dtypes import DTYPE, NAME

Node = Any  # a JSON value; the type cannot be written recursively for mypy without casts everywhere

_INT_LIMIT = 2**63
#: bytes values above this size become tensors of a shard
INLINE_BYTES = 4096


def _float(value: float) -> Node:
    if value - value == 0:  # finite; JSON keeps every digit and the sign of zero
        return value
    return ["f", struct.pack(">d", value).hex()]


def _int(value: int) -> Node:
    return value if -_INT_LIMIT <= value < _INT_LIMIT else ["i", hex(value)]


def _str(value: str) -> Node:
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError:  # lone surrogates, as file names may have
        return ["s", value.encode("utf-8", "surrogatepass").hex()]
    return value


def _bits(value: float) -> str:
    return struct.pack(">d", value).hex()


def _unbits(text: str) -> float:
    return float(struct.unpack(">d", bytes.fromhex(text))[0])


def _b64(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def numpy_dtype_text(dtype: np.dtype[Any]) -> str:
    """A text that gives the dtype again, byte order and structure included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dtype metadata is dropped, as np.save does
        return repr(np.lib.format.dtype_to_descr(dtype))


def numpy_dtype(text: str) -> np.dtype[Any]:
    """The dtype of such a text. Never one that holds objects."""
    dtype: np.dtype[Any] = np.lib.format.descr_to_dtype(ast.literal_eval(text))
    if dtype.hasobject:
        raise ValueError("a dtype of Python objects has no bytes")
    return dtype


def _numpy_scalar(value: np.generic) -> Node:
    return ["ns", numpy_dtype_text(value.dtype), _b64(np.asarray(value).tobytes())]


def _read_numpy_scalar(text: str, data: str) -> np.generic:
    array = np.frombuffer(base64.b64decode(data), dtype=numpy_dtype(text), count=1)
    scalar = array[0]
    return scalar.copy() if isinstance(scalar, np.void) else scalar


def _datetime(value: datetime.datetime) -> Node | None:
    zone = _zone(value.tzinfo)
    return None if zone is _UNKNOWN else ["dm", value.replace(tzinfo=None).isoformat(), value.fold, zone]


def _time(value: datetime.time) -> Node | None:
    zone = _zone(value.tzinfo)
    return None if zone is _UNKNOWN else ["tm", value.replace(tzinfo=None).isoformat(), value.fold, zone]


_UNKNOWN = object()


def _zone(zone: datetime.tzinfo | None) -> Node:
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        offset = zone.utcoffset(None)
        if zone == datetime.UTC or zone.tzname(None) == datetime.timezone(offset).tzname(None):
            return ["tz", _timedelta(offset)]
        return ["tz", _timedelta(offset), _str(zone.tzname(None))]
    if type(zone) is zoneinfo.ZoneInfo and zone.key:
        return ["zi", zone.key]
    return _UNKNOWN


def _timedelta(value: datetime.timedelta) -> Node:
    return ["td", value.days, value.seconds, value.microseconds]


def _read_zone(offset: datetime.timedelta, name: str | None = None) -> datetime.timezone:
    return datetime.timezone(offset) if name is None else datetime.timezone(offset, name)


_PATHS = {"pure": pathlib.PurePosixPath, "purewindows": pathlib.PureWindowsPath, "path": pathlib.Path}

#: exact type -> its node; None: no node is right for this value (a rare time zone)
ENCODERS: dict[type, Callable[[Any], Node | None]] = {
    int: _int,
    float: _float,
    str: _str,
    complex: lambda value: ["c", _bits(value.real), _bits(value.imag)],
    torch.dtype: lambda value: ["dt", NAME[value]],
    torch.device: lambda value: ["dv", str(value)],
    torch.layout: lambda value: ["ly", str(value).removeprefix("torch.")],
    torch.memory_format: lambda value: ["ly", str(value).removeprefix("torch.")],
    torch.Size: lambda value: ["sz", *value],
    range: lambda value: ["rg", _int(value.start), _int(value.stop), _int(value.step)],
    type(...): lambda value: ["el"],
    pathlib.PurePosixPath: lambda value: ["pp", "pure", _str(str(value))],
    pathlib.PureWindowsPath: lambda value: ["pp", "purewindows", _str(str(value))],
    pathlib.PosixPath: lambda value: ["pp", "path", _str(str(value))],
    pathlib.WindowsPath: lambda value: ["pp", "path", _str(str(value))],
    datetime.datetime: _datetime,
    datetime.time: _time,
    datetime.date: lambda value: ["da", value.isoformat()],
    datetime.timedelta: _timedelta,
    datetime.timezone: _zone,
    zoneinfo.ZoneInfo: lambda value: ["zi", value.key] if value.key else None,
    decimal.Decimal: lambda value: ["de", str(value)],
    fractions.Fraction: lambda value: ["fr", _int(value.numerator), _int(value.denominator)],
    uuid.UUID: lambda value: ["uu", value.hex],
    np.dtype: lambda value: None if value.hasobject else ["nd", numpy_dtype_text(value)],
}


def encode_value(value: Any) -> Node | None:
    """The node of a plain value that is no container; None if it is not one (None itself is the caller's)."""
    encoder = ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value)
    if isinstance(value, np.generic):
        return None if value.dtype.hasobject else _numpy_scalar(value)
    if isinstance(value, np.dtype):  # numpy makes a subclass for each
        return None if value.hasobject else ["nd", numpy_dtype_text(value)]
    return None


def encode_bytes(value: bytes | bytearray) -> Node:
    """Short bytes, inside the JSON."""
    return ["b" if type(value) is bytes else "B", _b64(value)]


def _layout(name: str) -> Any:
    found = getattr(torch, name, None)
    if not isinstance(found, (torch.layout, torch.memory_format)):
        raise ValueError(f"torch has no layout {name!r}")
    return found


#: tag -> the value, from arguments that are decoded already
DECODERS: dict[str, Callable[..., Any]] = {
    "i": lambda text: int(text, 16),
    "f": _unbits,
    "c": lambda real, imag: complex(_unbits(real), _unbits(imag)),
    "s": lambda text: bytes.fromhex(text).decode("utf-8", "surrogatepass"),
    "b": lambda text: base64.b64decode(text, validate=True),
    "B": lambda text: bytearray(base64.b64decode(text, validate=True)),
    "dt": lambda name: DTYPE[name],
    "dv": torch.device,
    "ly": _layout,
    "sz": lambda *sizes: torch.Size(sizes),
    "rg": range,
    "el": lambda: ...,
    "pp": lambda kind, text: _PATHS[kind](text),
    "dm": lambda text, fold, zone: datetime.datetime.fromisoformat(text).replace(fold=fold, tzinfo=zone),
    "tm": lambda text, fold, zone: datetime.time.fromisoformat(text).replace(fold=fold, tzinfo=zone),
    "da": datetime.date.fromisoformat,
    "td": datetime.timedelta,
    "tz": _read_zone,
    "zi": zoneinfo.ZoneInfo,
    "de": decimal.Decimal,
    "fr": fractions.Fraction,
    "uu": lambda text: uuid.UUID(hex=text),
    "nd": numpy_dtype,
    "ns": _read_numpy_scalar,
    "l": lambda *items: list(items),
    "u": lambda *items: items,
    "st": lambda *items: set(items),
    "fs": lambda *items: frozenset(items),
    "sl": slice,
}
