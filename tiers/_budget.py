"""A capacity that several processes of a node keep together, all of which write the same run.

Who reserves looks at what is really there, under a lock on the run's folder, and gives the lock back when the file
that it makes has its full length. So there is no moment at which they have taken more together.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from stepwell.tiers import _folders
from stepwell.tiers._calls import PathCalls
from stepwell.tiers.base import Refused


class NodeBudget:
    """The capacity of one tier. `unit_bytes`: what the medium gives room in."""

    def __init__(self, root: str, calls: PathCalls, capacity_bytes: int, unit_bytes: int) -> None:
        self._root, self._calls = root, calls
        self._capacity_bytes, self._unit_bytes = capacity_bytes, unit_bytes
        self._turn = asyncio.Lock()  # so that one of the tier's threads at most waits for other processes

    @asynccontextmanager
    async def held(self, run: str) -> AsyncIterator[None]:
        """While nobody else reserves for the run on this node."""
        async with self._turn:
            descriptor = await self._calls.call(self._lock, os.path.join(self._root, run))
            try:
                yield
            finally:
                await self._calls.call(os.close, descriptor)

    def _lock(self, folder: str) -> int:
        _folders.make_folders(self._root, folder)
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    async def refusal(self, run: str, path: str, size_bytes: int, tier: str) -> Refused | None:
        """The refusal if there is no room for a shard that goes to `path`. The budget is held."""
        taken = await self._calls.call(self._taken, os.path.join(self._root, run), path)
        free = max(0, self._capacity_bytes - taken)
        if self._whole(size_bytes) <= free:
            return None
        detail = (
            f"{tier}: {size_bytes} bytes needed, {free} free of its capacity of {self._capacity_bytes}, which this "
            "node's ranks share"
        )
        return Refused("full", detail, size_bytes, free)

    def _taken(self, folder: str, but_for: str) -> int:
        """Bytes of all shards that are there, begun ones included."""
        taken = 0
        with os.scandir(folder) as attempts:
            for attempt in attempts:
                if attempt.is_dir(follow_symlinks=False):
                    taken += self._taken_in(attempt.path, but_for)
        return taken

    def _taken_in(self, folder: str, but_for: str) -> int:
        taken = 0
        try:
            with os.scandir(folder) as files:
                for file in files:
                    if file.name.endswith(".json") or file.name.startswith(".") or file.path == but_for:
                        continue
                    try:
                        taken += self._whole(file.stat(follow_symlinks=False).st_size)
                    except FileNotFoundError:  # deleted meanwhile
                        continue
        except FileNotFoundError:
            pass
        return taken

    def _whole(self, size_bytes: int) -> int:
        return -(-size_bytes // self._unit_bytes) * self._unit_bytes
