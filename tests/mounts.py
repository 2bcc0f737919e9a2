"""File systems that are mounted for a test."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

_WAIT_S = 20.0


@contextmanager
def tmpfs(point: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of that size in memory; otherwise as `mounted`."""
    with mounted(["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "stepwell-test", str(point)], point):
        yield point


@contextmanager
def mounted(command: Sequence[str | Path], point: Path) -> Iterator[Path]:
    """What the command mounts at the new folder `point`; skips the test where that is refused.

    Raises CalledProcessError if a file there stays open at the end. A thread that is ending may have one for a moment.
    """
    point.mkdir()
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if done.returncode:
        pytest.skip(f"mounting is refused: {done.stderr.strip()}")
    try:
        yield point
    finally:
        deadline = time.monotonic() + _WAIT_S
        while (left := subprocess.run(["umount", point], capture_output=True)).returncode:
            if time.monotonic() > deadline:
                left.check_returncode()
            time.sleep(0.05)
