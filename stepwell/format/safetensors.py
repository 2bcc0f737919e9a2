"""The safetensors file format: headers made and headers read.

A file is an 8-byte little-endian header length, a JSON header, and the tensors' bytes back to back without
holes. Headers made here are padded with spaces so that the data starts at a multiple of 4096. Headers read
here come from anywhere and are distrusted: every number is checked before it is used.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import msgspec

from stepwell.errors import FormatError
from stepwell.format.collecting import paused

#: what the safetensors library accepts at most
HEADER_LIMIT_BYTES = 100_000_000
#: the data of our files starts at a multiple of this, which is what direct I/O wants
DATA_ALIGNMENT_BYTES = 4096
#: dtype -> bits an element
DTYPE_BITS = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

_LENGTH_BYTES = 8
_SIZE_MAX = 2**63 - 1  # beyond it, offsets overflow in other readers
_DIMENSIONS_MAX = 64  # torch's own limit


class TensorEntry(NamedTuple):
    """One tensor of a file. `begin` and `end` are absolute offsets in the file, in bytes."""

    label: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file says it holds, in the order of its bytes."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int

    @property
    def size_bytes(self) -> int:
        """How long the file must be."""
        return max((entry.end for entry in self.entries.values()), default=self.data_start)


class _Described(msgspec.Struct, gc=False):
    """One tensor in a header."""

    dtype: str
    shape: Sequence[int]
    data_offsets: tuple[int, int]


def encode_header(entries: Sequence[tuple[str, str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """The header of a file that holds `entries` (label, dtype, shape, bytes) in this order, back to back.

    Labels must be unique; the result's length is a multiple of 4096. Raises ValueError above the format's limit.
    """
    labels, dtypes, shapes, sizes = zip(*entries, strict=True) if entries else ((), (), (), ())
    offsets = pairwise(accumulate(sizes, initial=0))
    body: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    body.update(zip(labels, map(_Described, dtypes, shapes, offsets), strict=True))
    if len(body) != len(entries) + bool(metadata):
        raise ValueError("labels of a safetensors file must be unique and not __metadata__")
    text = msgspec.json.encode(body)
    total = -(-(len(text) + _LENGTH_BYTES) // DATA_ALIGNMENT_BYTES) * DATA_ALIGNMENT_BYTES
    if total - _LENGTH_BYTES > HEADER_LIMIT_BYTES:
        raise ValueError(f"a header of {total} bytes is above the limit of safetensors ({HEADER_LIMIT_BYTES})")
    return (total - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text.ljust(total - _LENGTH_BYTES)


def parse_header(data: bytes, file_size: int | None, path: object) -> Header:
    """Reads the header from the first bytes of a file.

    data: at least the whole header (8 bytes plus the length that they say), more does no harm. file_size: how
    long the file is; None if unknown. Raises FormatError, naming `path`, for anything that is not a safetensors
    file, is cut short, or has holes, overlaps or impossible sizes.
    """
    with paused():
        return _parse(data, file_size, path)


def _parse(data: bytes, file_size: int | None, path: object) -> Header:
    length = header_length(data, file_size, path)
    end = _LENGTH_BYTES + length
    if len(data) < end:
        raise _truncated(f"its header needs {end} bytes, {len(data)} are there", path)
    body = _decode(data[_LENGTH_BYTES:end], data, path)
    metadata = body.pop("__metadata__", None)
    if metadata is not None and not _is_string_map(metadata):
        raise _bad("its __metadata__ is not a map of strings", path)
    entries = [_entry(label, value, end, path) for label, value in body.items()]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    _check_layout(entries, end, file_size, path)
    return Header({entry.label: entry for entry in entries}, metadata or {}, end)


def header_length(data: bytes, file_size: int | None, path: object) -> int:
    """Bytes of JSON that follow the first eight bytes; raises FormatError if `data` starts no safetensors file."""
    if file_size == 0 or (file_size is None and not data):
        raise FormatError("The file is empty", path=path, todo="It was probably never written; use another copy")
    if len(data) < _LENGTH_BYTES:
        raise _truncated(f"only {len(data)} bytes are there", path)
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    foreign = _foreign(data)
    if foreign and (length > HEADER_LIMIT_BYTES or data[_LENGTH_BYTES : _LENGTH_BYTES + 1] != b"{"):
        raise FormatError(foreign, path=path, todo="stepwell reads safetensors files")
    if length > HEADER_LIMIT_BYTES:
        raise _bad(f"its header length {length} is above the limit of {HEADER_LIMIT_BYTES} bytes", path)
    if length < 2:
        raise _bad(f"its header length {length} is too short", path)
    if file_size is not None and _LENGTH_BYTES + length > file_size:
        raise _truncated(f"its header needs {_LENGTH_BYTES + length} bytes, the file has {file_size}", path)
    return length


def tensor_bytes(dtype: str, shape: Iterable[int]) -> int | None:
    """Bytes of a tensor; None if the dtype is unknown, the size overflows or is no whole number of bytes."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        return None
    for size in shape:
        bits *= size
        if bits > _SIZE_MAX:
            return None
    return None if bits % 8 else bits // 8


def _decode(text: bytes, data: bytes, path: object) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FormatError(
            _foreign(data) or f"Not a safetensors file: its header is not JSON ({error})", path=path
        ) from None
    if not isinstance(body, dict):
        raise _bad("its header is not a JSON object", path)
    _refuse_duplicates(text, len(body) - ("__metadata__" in body), path)
    return body


class _Pair(msgspec.Struct):
    dtype: str
    shape: list[int]
    data_offsets: list[int]


def _refuse_duplicates(text: bytes, entries: int, path: object) -> None:
    """A JSON object may name a key twice; parsers then silently take one of the two.

    Only the slow parser shows that, so it is asked only where a count of the entries leaves a doubt.
    """
    if text.count(b'"data_offsets"') == entries and b"\\u" not in text:
        return

    def unique(pairs: list[tuple[str, Any]]) -> None:
        if len({key for key, _ in pairs}) != len(pairs):
            raise _bad("its header names a tensor twice", path)

    json.loads(text, object_pairs_hook=unique)


def _entry(label: str, value: Any, data_start: int, path: object) -> TensorEntry:
    try:
        pair = msgspec.convert(value, _Pair)
    except msgspec.ValidationError as error:
        raise _bad(f"the entry of tensor {label!r} is wrong ({error})", path) from None
    if pair.dtype not in DTYPE_BITS:
        raise _bad(f"tensor {label!r} has the unknown dtype {pair.dtype!r}", path)
    if len(pair.shape) > _DIMENSIONS_MAX or (pair.shape and not 0 <= min(pair.shape) <= max(pair.shape) <= _SIZE_MAX):
        raise _bad(f"tensor {label!r} has an impossible shape", path)
    if len(pair.data_offsets) != 2 or not 0 <= pair.data_offsets[0] <= pair.data_offsets[1] <= _SIZE_MAX - data_start:
        raise _bad(f"tensor {label!r} has impossible offsets", path)
    begin, end = pair.data_offsets
    if tensor_bytes(pair.dtype, pair.shape) != end - begin:
        raise _bad(f"tensor {label!r} has {end - begin} bytes, which do not fit {pair.dtype} {pair.shape}", path)
    return TensorEntry(label, pair.dtype, tuple(pair.shape), data_start + begin, data_start + end)


def _check_layout(entries: Sequence[TensorEntry], data_start: int, file_size: int | None, path: object) -> None:
    position = data_start
    for entry in entries:
        if entry.begin != position:
            kind = "a hole before" if entry.begin > position else "an overlap at"
            raise _bad(f"there is {kind} tensor {entry.label!r}", path)
        position = entry.end
    if file_size is not None and position > file_size:
        raise _truncated(f"it should have {position} bytes and has {file_size}", path)
    if file_size is not None and position < file_size:
        raise _bad(f"{file_size - position} bytes at its end belong to no tensor", path)


def _foreign(data: bytes) -> str:
    """What the file is instead, "" if it does not show."""
    if data[:2] == b"PK":
        return "Not a safetensors file but a zip archive, as torch.save writes (a pickle inside)"
    if data[:1] == b"\x80" and data[1:2] <= b"\x05" and data[2:8] != bytes(6):
        return "Not a safetensors file but a pickle"
    if data[:6] == b"\x93NUMPY":
        return "Not a safetensors file but a NumPy array"
    if all(byte in b"\t\n\r" or 32 <= byte < 127 for byte in data[:_LENGTH_BYTES]):
        return "Not a safetensors file but text"
    return ""


def _is_string_map(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(item, str) for item in value.values())


def _bad(why: str, path: object) -> FormatError:
    return FormatError(f"Not a valid safetensors file: {why}", path=path)


def _truncated(why: str, path: object) -> FormatError:
    return FormatError(f"The file is truncated: {why}", path=path, todo="Use another copy of this checkpoint")
