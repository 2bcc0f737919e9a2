"""Places that several tests of drivers start from."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mounts import tmpfs


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The folder of a shared tier: there, and empty."""
    (tmp_path / "pfs").mkdir()
    return tmp_path / "pfs"


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB."""
    with tmpfs(tmp_path / "small", 4) as point:
        yield point
