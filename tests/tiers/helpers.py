"""What the tests of drivers share."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from stepwell.tiers._calls import PATH_THREADS
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.pfs import PfsTier
from tests.resources import in_use

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


def pfs(path: Path, **options: Any) -> PfsTier:
    """A tier for a shared file system that measures nothing at start and deletes without pauses."""
    return PfsTier(path, **{"reading": "direct", "delete_pause_s": 0, **options})


def tree(path: Path) -> set[str]:
    """Everything below a folder, by its relative name."""
    return {str(each.relative_to(path)) for each in path.rglob("*")}


def refusing(number: int) -> Callable[..., Any]:
    """A call that fails."""

    def refuse(*arguments: object, **options: object) -> Any:
        raise OSError(number, os.strerror(number))

    return refuse


async def no_fallocate(fd: int, size_bytes: int) -> int:
    """In place of `Medium.allocate`: the file system does not have it."""
    return -errno.EOPNOTSUPP


def record_deletions(steps: list[str], patch: pytest.MonkeyPatch) -> None:
    """Notes the name of each deleted file, and "fsync"."""
    real_unlink, real_fsync = os.unlink, os.fsync

    def unlink(path: str, **options: Any) -> None:
        steps.append(os.path.basename(path))
        real_unlink(path, **options)

    def fsync(descriptor: int) -> None:
        steps.append("fsync")
        real_fsync(descriptor)

    patch.setattr(os, "unlink", unlink)
    patch.setattr(os, "fsync", fsync)


def files_in_use() -> tuple[int, int]:
    """As `in_use`, of a tier that is started: its threads for calls on its path may still come."""
    threads, files = in_use()
    return threads + PATH_THREADS, files
