"""Snapshots as bytes in memory, so that no engine and no disk is needed; and equality that looks at types."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import warnings
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import torch

from stepwell.format.safetensors import TensorEntry, parse_header
from stepwell.state import Placement, Snapshot, assign, build, capture

CHUNK = 1 << 16


def files_of(snapshot: Snapshot, chunk: int = CHUNK) -> dict[str, bytes]:
    """Every shard's bytes, copied through its pieces one chunk at a time, as the engines do: each byte once."""
    out = {}
    for index, plan in enumerate(snapshot.shards):
        source = snapshot.source(index)
        buffer, copies = np.empty(plan.size, np.uint8), np.zeros(plan.size, np.uint8)
        for start in range(0, plan.size, chunk):
            stop = min(start + chunk, plan.size)
            for pieces in (source.pieces(start, stop), *(pieces for _, pieces in source.gpu_pieces(start, stop))):
                for begin, end, address in zip(
                    pieces._offsets[:-1].tolist(), pieces._offsets[1:].tolist(), pieces._addresses.tolist(), strict=True
                ):
                    low, high = max(begin, start), min(end, stop)
                    if low < high and address:
                        ctypes.memmove(buffer.ctypes.data + low, address + low - begin, high - low)
                        copies[low:high] += 1
        assert (copies == 1).all(), f"bytes of {plan.file} are nowhere, or twice"
        out[plan.file] = buffer.tobytes()
    return out


def entries_of(files: Mapping[str, bytes]) -> dict[str, tuple[str, TensorEntry]]:
    """label -> (file, entry); no label may be in two files."""
    out: dict[str, tuple[str, TensorEntry]] = {}
    for name, data in files.items():
        for label, entry in parse_header(data, len(data), name).entries.items():
            assert label not in out
            out[label] = (name, entry)
    return out


def fill(placement: Placement, files: Mapping[str, bytes]) -> Any:
    """Reads what the placement asks for and finishes it."""
    entries = entries_of(files)
    for item in placement.fills:
        name, entry = entries[item.label]
        assert item.tensor.is_contiguous() and item.tensor.is_cpu
        assert item.nbytes == entry.end - entry.begin > 0
        ctypes.memmove(item.tensor.data_ptr(), files[name][entry.begin : entry.end], item.nbytes)
    return placement.finish()


class Saved:
    """A state that was captured, written and is ready to be read; its skeleton went through JSON."""

    def __init__(self, state: Mapping[Any, Any], **options: Any) -> None:
        self.snapshot = capture(state, **options)
        self.files = files_of(self.snapshot)
        self.skeleton = msgspec.json.decode(msgspec.json.encode(self.snapshot.skeleton))

    def load(self, **options: Any) -> Any:
        return fill(build(self.skeleton, **options), self.files)

    def restore(self, state: Any, **options: Any) -> Placement:
        placement = assign(self.skeleton, state, **options)
        fill(placement, self.files)
        return placement

    def labels(self) -> dict[str, tuple[str, TensorEntry]]:
        return entries_of(self.files)


def through(value: Any) -> Any:
    """The value after a save and a load."""
    return Saved({"part": value}).load()["part"]


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's values in row-major order."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if not tensor.numel():
        return b""
    if tensor.is_quantized:
        return raw(tensor.int_repr())
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        flat = torch.empty(tensor.numel(), dtype=sizes[tensor.itemsize])
        return bytes(flat.copy_(tensor.view(flat.dtype).reshape(-1)).view(torch.uint8).numpy())


def assert_same(new: Any, old: Any, at: str = "") -> None:
    """Equal in type and value, all the way down; NaNs with equal bits are equal."""
    assert type(new) is type(old), (at, type(new), type(old))
    if isinstance(old, torch.Tensor):
        assert (new.dtype, new.shape, new.requires_grad) == (old.dtype, old.shape, old.requires_grad), at
        assert raw(new) == raw(old), at
    elif isinstance(old, np.ndarray) and old.dtype != object:
        assert (new.dtype, new.shape, new.tobytes()) == (old.dtype, old.shape, old.tobytes()), at
    elif isinstance(old, np.ndarray):
        assert new.shape == old.shape
        assert_same(new.ravel().tolist(), old.ravel().tolist(), at)
    elif isinstance(old, dict):
        assert len(new) == len(old), at
        for (new_key, new_item), (old_key, old_item) in zip(new.items(), old.items(), strict=True):
            assert_same(new_key, old_key, f"{at}.key")
            assert_same(new_item, old_item, f"{at}.{old_key!r}")
    elif isinstance(old, list | tuple) or type(old).__name__ == "deque":
        assert len(new) == len(old), at
        for index, (new_item, old_item) in enumerate(zip(new, old, strict=True)):
            assert_same(new_item, old_item, f"{at}[{index}]")
    elif isinstance(old, float) and math.isnan(old):
        assert math.isnan(new), at
    elif isinstance(old, float | np.generic | complex):
        assert repr(new) == repr(old), at
    elif dataclasses.is_dataclass(old) and not isinstance(old, type):
        for field in dataclasses.fields(old):
            assert_same(getattr(new, field.name), getattr(old, field.name), f"{at}.{field.name}")
    else:
        assert new == old, at
