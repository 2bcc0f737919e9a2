"""What differs between two runs, or between tensors, in words. An empty list means: equal, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from examples.demo.killed import Attempt


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal type, shape and bytes; a NaN equals itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)))


def different_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """The names that only one has, or that differ."""
    both = one.keys() & other.keys()
    return sorted([*(one.keys() ^ other.keys()), *(name for name in both if not same_bits(one[name], other[name]))])


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder's safetensors files, as the safetensors package reads them."""
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    return tensors


def different_runs(whole: Attempt, attempts: list[Attempt]) -> list[str]:
    """What of the killed run's processes is not as in the run without interruption."""
    found = []
    for number, attempt in enumerate(attempts, 1):
        for step, loss in attempt.losses.items():
            if whole.losses[step] != loss:
                values = f"{float.fromhex(loss)} is not {float.fromhex(whole.losses[step])}"
                found.append(f"process {number}, step {step}: loss {values}")
    for number, (before, after) in enumerate(zip(attempts, attempts[1:], strict=False), 2):
        restored = None if after.restored is None else after.restored["step"]
        newest = before.committed_step or None  # None: it was killed before its first checkpoint
        if restored != newest:
            found.append(f"process {number} restored step {restored}, but step {newest} was the newest")
    last = attempts[-1]
    if max(last.losses, default=0) != max(whole.losses):
        found.append(f"the resumed run ended at step {max(last.losses, default=0)}")
    one, other = whole.digests or {}, last.digests or {}
    found += [f"tensor {name}" for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
    return found if one else ["the run without interruption wrote no tensors", *found]
