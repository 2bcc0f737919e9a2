"""What the cases share: one checkpoint saved and loaded, and the bytes that lie on a disk."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import stepwell

ROOT = Path(__file__).parents[2]


def saved(run: Path, state: Mapping[Any, Any], step: int = 1) -> Path:
    """Saves `state` as one checkpoint of `run`; returns the run's folder, to load from."""
    with stepwell.open(run) as store:
        store.save(step, state).wait()
    return run


def through(run: Path, state: Mapping[Any, Any]) -> dict[Any, Any]:
    """The state after a save and a load, through real files."""
    return stepwell.load(saved(run, state))


def shards(run: Path) -> list[Path]:
    return sorted(run.glob("step-*/*.safetensors"))


def stored_bytes(run: Path) -> int:
    """Bytes of all files of the run."""
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())


def only_step(run: Path, step: int | None = None) -> Path:
    """The folder of the run's one checkpoint, or of its one checkpoint of `step`."""
    [folder] = run.glob("step-*" if step is None else f"step-{step:09d}.*")
    return folder


def script(code: str, *arguments: object, timeout: float = 100) -> subprocess.CompletedProcess[str]:
    """Runs Python code in a process of its own."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)
