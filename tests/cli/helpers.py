"""What the command's tests share: its answers, a state, and damage to files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The one document that stdout must be."""
        return json.loads(self.out)


Cli = Callable[..., Answer]


def state(value: int) -> dict[str, Any]:
    return {
        "model": {"a.weight": torch.full((900_000,), float(value)), "b": torch.arange(5, dtype=torch.int64)},
        "optimizer": {0: {"m": torch.full((700_000,), float(-value))}},
        "step": value,
    }


def folder_of(run: Path, step: int) -> Path:
    [found] = run.glob(f"step-{step:09d}.*")
    return found


def flip(path: Path, offset: int) -> None:
    """Changes one bit of a byte."""
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
