"""What the tests of drivers share."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier

T = TypeVar("T")


@asynccontextmanager
async def started(tier: Tier) -> AsyncIterator[Tier]:
    await tier.start()
    try:
        yield tier
    finally:
        await tier.close()


def on(tier: Tier, scenario: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
    """Runs a scenario on a started driver and closes it."""

    async def main() -> T:
        async with started(tier):
            return await scenario(tier)

    return asyncio.run(main())


def disk(path: Path | str, **options: Any) -> FileTier:
    """A file tier that measures nothing at start."""
    return FileTier(path, **{"reading": "direct", **options})


def tree(path: Path) -> set[str]:
    """Everything below a folder, by its relative name."""
    return {str(each.relative_to(path)) for each in path.rglob("*")}


@contextmanager
def small_disk(point: Path) -> Iterator[Path]:
    """A file system of 4 MB at `point`; skips the test where mounting is refused."""
    point.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=4m", "stepwell-test", str(point)]
    try:
        mounted = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"no mount: {error}")
    if mounted.returncode:
        pytest.skip(f"mounting is refused: {mounted.stderr.strip()}")
    try:
        yield point
    finally:
        subprocess.run(["umount", str(point)], check=True)
