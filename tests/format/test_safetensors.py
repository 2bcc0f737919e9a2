"""The safetensors header: golden bytes, the reference library as a witness, and distrust of every number."""

from __future__ import annotations

import io
import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import FormatError
from stepwell.format.safetensors import DTYPE_BITS, HEADER_LIMIT_BYTES, encode_header, parse_header, tensor_bytes


def test_golden_bytes() -> None:
    header = encode_header([("b", "F32", (2, 3), 24), ('a"\n', "BF16", (), 2), ("e", "U8", (0,), 0)], {"format": "pt"})
    text = (
        b'{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"a\\"\\n":{"dtype":"BF16","shape":[],"data_offsets":[24,26]},"e":{"dtype":"U8","shape":[0],"data_offsets":[26,26]}}'
    )
    assert header == (4088).to_bytes(8, "little") + text + b" " * (4088 - len(text))


def test_no_tensors_and_no_metadata() -> None:
    header = encode_header([], {})
    assert header == (4088).to_bytes(8, "little") + b"{}" + b" " * 4086
    parsed = parse_header(header, 4096, "x")
    assert parsed.entries == {} and parsed.metadata == {} and parsed.data_start == parsed.size_bytes == 4096


def test_labels_must_be_unique() -> None:
    for labels in (("a", "a"), ("__metadata__", "b")):
        with pytest.raises(ValueError, match="unique"):
            encode_header([(label, "U8", (1,), 1) for label in labels], {"x": "y"})


def test_offsets_are_absolute_and_in_file_order() -> None:
    header = encode_header([("z", "F64", (2,), 16), ("a", "I8", (3,), 3)], {"k": "v"})
    parsed = parse_header(header + bytes(19), 4096 + 19, "x")
    assert [(entry.label, entry.begin, entry.end) for entry in parsed.entries.values()] == [
        ("z", 4096, 4112),
        ("a", 4112, 4115),
    ]
    assert parsed.metadata == {"k": "v"} and parsed.size_bytes == 4115
    assert parse_header(header, None, "x") == parsed


DTYPES: dict[str, Any] = {"F64": "f8", "F32": "f4", "I64": "i8", "U16": "u2", "U8": "u1", "BOOL": "?"}
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(
    st.text(max_size=20).filter(lambda name: name != "__metadata__"),
    st.tuples(st.sampled_from(sorted(DTYPES)), SHAPES),
    max_size=6,
)
METADATA = st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3)


@given(tensors=TENSORS, metadata=METADATA)
@settings(deadline=None, derandomize=True, max_examples=80)
def test_the_reference_library_reads_our_files(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    arrays = {name: np.ones(shape, DTYPES[dtype]) for name, (dtype, shape) in tensors.items()}
    ordered = sorted(tensors, key=lambda name: -arrays[name].itemsize)
    header = encode_header([(name, *tensors[name], arrays[name].nbytes) for name in ordered], metadata)
    data = header + b"".join(arrays[name].tobytes() for name in ordered)
    read = safetensors.numpy.load(data)
    assert {name: (array.dtype, array.shape) for name, array in read.items()} == {
        name: (array.dtype, array.shape) for name, array in arrays.items()
    }
    assert all((read[name] == arrays[name]).all() for name in arrays)
    parsed = parse_header(data, len(data), "x")
    assert list(parsed.entries) == ordered or any(array.nbytes == 0 for array in arrays.values())
    assert parsed.metadata == metadata


@given(tensors=TENSORS, metadata=METADATA)
@settings(deadline=None, derandomize=True, max_examples=80)
def test_we_read_files_of_the_reference_library(tensors: dict[str, Any], metadata: dict[str, str]) -> None:
    arrays = {
        name: np.arange(np.prod(shape, dtype=int)).astype(DTYPES[dtype]).reshape(shape)
        for name, (dtype, shape) in tensors.items()
    }
    data = safetensors.numpy.save(arrays, metadata or None)
    parsed = parse_header(data, len(data), "x")
    assert set(parsed.entries) == set(arrays) and parsed.metadata == metadata
    for name, entry in parsed.entries.items():
        assert (entry.dtype, entry.shape) == tensors[name]
        assert data[entry.begin : entry.end] == arrays[name].tobytes()


def test_sizes_of_all_dtypes() -> None:
    assert tensor_bytes("F4", (3, 2)) == 3 and tensor_bytes("F4", (3,)) is None
    assert tensor_bytes("F6_E2M3", (4,)) == 3 and tensor_bytes("F6_E3M2", (2, 1)) is None
    assert tensor_bytes("C64", ()) == 8 and tensor_bytes("F8_E8M0", (5, 0)) == 0
    assert tensor_bytes("U8", (2**62, 4)) is None and tensor_bytes("X9", (1,)) is None
    assert tensor_bytes("F32", (2**40, 2**40, 0)) in (0, None)
    assert set(DTYPE_BITS.values()) == {4, 6, 8, 16, 32, 64}


def file_of(body: object, data: bytes = b"") -> bytes:
    text = body if isinstance(body, bytes) else json.dumps(body).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: object = "U8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"a": torch.zeros(2)}, buffer)
    return buffer.getvalue()


def zip_file() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a", "b")
    return buffer.getvalue()


ENTRY = json.dumps(entry()).encode()
FOREIGN = {
    "empty": (b"", "empty"),
    "three bytes": (b"abc", "truncated"),
    "torch.save": (torch_file(), "zip archive"),
    "zip": (zip_file(), "zip archive"),
    "pickle": (pickle.dumps({"a": list(range(100))}), "pickle"),
    "old pickle": (pickle.dumps({"a": 1}, protocol=2) + b" " * 20, "pickle"),
    "numpy": (b"\x93NUMPY\x01\x00v\x00{'descr'", "NumPy"),
    "text": (b"Hello, this is a text file.\n", "text"),
    "json": (b'{"weights": [1, 2, 3]}', "text"),
    "zeros": (bytes(4096), "too short"),
    "huge header": ((HEADER_LIMIT_BYTES + 1).to_bytes(8, "little") + b"{}", "limit"),
    "cut header": (file_of({"a": entry()}, b"xy")[:20], "truncated"),
    "cut data": (file_of({"a": entry()}, b"x"), "truncated"),
    "no json": (file_of(b"{nope}"), "not JSON"),
    "no utf-8": (file_of(b'{"\xff\xfe": 1}'), "not JSON"),
    "no object": (file_of([1, 2]), "not a JSON object"),
    "deep": (file_of(b'{"a":' * 5000 + b"1" + b"}" * 5000), "not JSON"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_files_are_told_apart(kind: str, tmp_path: Path) -> None:
    data, word = FOREIGN[kind]
    path = tmp_path / "some.safetensors"
    path.write_bytes(data)
    with pytest.raises(FormatError) as caught:
        parse_header(path.read_bytes(), path.stat().st_size, path)
    assert word in str(caught.value) and str(path) in str(caught.value)


BAD: dict[str, bytes] = {
    "hole": file_of({"a": entry(offsets=(0, 2)), "b": entry(offsets=(3, 5))}, bytes(5)),
    "hole in front": file_of({"a": entry(offsets=(1, 3))}, bytes(3)),
    "overlap": file_of({"a": entry(offsets=(0, 2)), "b": entry(offsets=(1, 3))}, bytes(3)),
    "same place": file_of({"a": entry(), "b": entry()}, bytes(2)),
    "bytes behind": file_of({"a": entry()}, bytes(3)),
    "turned": file_of({"a": entry(offsets=(2, 0))}, bytes(2)),
    "negative": file_of({"a": entry(offsets=(-2, 0))}, bytes(2)),
    "three offsets": file_of({"a": entry(offsets=(0, 2, 2))}, bytes(2)),
    "float offset": file_of({"a": entry(offsets=(0, 2.5))}, bytes(2)),
    "wrong size": file_of({"a": entry(shape=(3,))}, bytes(2)),
    "negative shape": file_of({"a": entry(shape=(-1, -2))}, bytes(2)),
    "overflow": file_of({"a": entry(shape=(2**33, 2**33))}, bytes(2)),
    "overflow to zero": file_of({"a": entry(shape=(2**32, 2**32), offsets=(0, 0))}),
    "beyond 64 bits": file_of({"a": entry(shape=(2**70, 0), offsets=(0, 0))}),
    "dimensions": file_of({"a": entry(shape=[1] * 65, offsets=(0, 1))}, bytes(1)),
    "dtype": file_of({"a": entry(dtype="F99")}, bytes(2)),
    "dtype number": file_of({"a": entry(dtype=8)}, bytes(2)),
    "half a byte": file_of({"a": entry(dtype="F4", shape=(3,), offsets=(0, 1))}, bytes(1)),
    "no shape": file_of({"a": {"dtype": "U8", "data_offsets": [0, 2]}}, bytes(2)),
    "entry": file_of({"a": [1]}, bytes(2)),
    "metadata": file_of({"__metadata__": {"a": 1}}),
    "metadata list": file_of({"__metadata__": ["a"]}),
    "twice": file_of(b'{"a":' + ENTRY + b',"a":' + ENTRY + b"}", bytes(2)),
    "twice, spelled otherwise": file_of(b'{"a":' + ENTRY + b',"\\u0061":' + ENTRY + b"}", bytes(2)),
}


@pytest.mark.parametrize("kind", BAD)
def test_headers_that_do_not_add_up_are_refused(kind: str) -> None:
    with pytest.raises(FormatError, match="here.safetensors"):
        parse_header(BAD[kind], len(BAD[kind]), "here.safetensors")


@given(st.binary(max_size=200))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_any_bytes_give_a_header_or_a_format_error(data: bytes) -> None:
    for candidate in (data, file_of(data), file_of(b"{" + data + b"}")):
        try:
            parse_header(candidate, len(candidate), "x")
        except FormatError:
            pass


@given(position=st.integers(0, 200), value=st.integers(0, 255))
@settings(deadline=None, derandomize=True, max_examples=200)
def test_what_we_accept_the_reference_accepts(position: int, value: int) -> None:
    good = bytearray(file_of({"a": entry(), "b": entry("F32", (1,), (2, 6))}, bytes(6)))
    good[position % len(good)] = value
    data = bytes(good)
    try:
        parsed = parse_header(data, len(data), "x")
    except FormatError:
        return
    assert {name for name, _ in safetensors.deserialize(data)} == set(parsed.entries)  # type: ignore[no-untyped-call]
