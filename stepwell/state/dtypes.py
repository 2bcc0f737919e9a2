"""torch's dtypes and how their bytes are stored.

A dtype that safetensors knows is stored as such. Any other (complex128, int4, bits16, …) is stored as U8 with
its item size as an extra last dimension, and the skeleton keeps its true name.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

#: safetensors name -> torch attribute; packed float4 holds two elements a byte
_NATIVE = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
PACKED: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)


def _names() -> dict[torch.dtype, str]:
    """Every dtype with the name that torch prints, which is the one that every torch version understands."""
    found = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {dtype: str(dtype).removeprefix("torch.") for dtype in found}


#: dtype -> the name in skeletons ("float32")
NAME: dict[torch.dtype, str] = _names()
DTYPE: dict[str, torch.dtype] = {name: dtype for dtype, name in NAME.items()}
#: dtype -> safetensors name, for those that safetensors has
STORED: dict[torch.dtype, str] = {
    getattr(torch, attribute): stored for stored, attribute in _NATIVE.items() if hasattr(torch, attribute)
}
#: safetensors name -> torch dtype; names without one (F6…) are read as bytes
FROM_STORED: dict[str, torch.dtype] = {stored: dtype for dtype, stored in STORED.items()}
if PACKED is not None:
    FROM_STORED["F4"] = PACKED
#: quantised dtypes: their tensors carry scales beside the data
QUANTISED = frozenset(dtype for dtype, name in NAME.items() if name.startswith(("qint", "quint")))
#: dtypes between which torch converts; the others are only copied bit for bit
CASTABLE = frozenset(dtype for dtype in STORED if dtype not in (getattr(torch, "float8_e8m0fnu", None),)) | {
    torch.complex32,
    torch.complex128,
}
#: item size -> a dtype of that size that every operation of torch can move, bit for bit
RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def stored_as(dtype: torch.dtype, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """safetensors dtype and shape for a tensor of this dtype and shape."""
    stored = STORED.get(dtype)
    if stored is not None:
        return stored, shape if isinstance(shape, tuple) else tuple(shape)
    if dtype is PACKED and shape:  # safetensors counts elements, torch counts pairs
        return "F4", (*shape[:-1], shape[-1] * 2)
    size = dtype.itemsize
    return "U8", (*shape, size) if size > 1 else tuple(shape)


def loaded_as(stored: str, shape: Sequence[int], size_bytes: int) -> tuple[torch.dtype, tuple[int, ...]]:
    """torch dtype and shape for a tensor that some safetensors file holds; bytes where torch has no such dtype."""
    dtype = FROM_STORED.get(stored)
    if dtype is None:
        return torch.uint8, (size_bytes,)
    if stored == "F4":
        if not shape or shape[-1] % 2:
            return torch.uint8, (size_bytes,)
        return dtype, (*shape[:-1], shape[-1] // 2)
    return dtype, tuple(shape)


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Bytes of the data of a tensor, contiguous."""
    return prod(shape) * dtype.itemsize


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides, in elements, as torch makes them."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)
