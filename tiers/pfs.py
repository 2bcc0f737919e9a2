"""The driver for a parallel or network file system that all nodes see.

Files as in the file driver, with what a shared file system needs around them: a marker that tells the mounted
file system from its bare mount point, limits on how long a call may take, repetition of what may pass, and
deletes that leave room for others. Each is a wrapper or a hook of its own; this module puts them together.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from stepwell.errors import CheckpointGone, TierError, TierUnavailable
from stepwell.tiers import _folders, _leases, _marker, _records
from stepwell.tiers._medium import CACHE_S, EngineName, Reading
from stepwell.tiers._paced import Paced
from stepwell.tiers._retrying import Retrying
from stepwell.tiers._timed import Timed
from stepwell.tiers._wrapper import Wrapper
from stepwell.tiers.base import CheckpointKey, Refused, Reservation, ShardKey
from stepwell.tiers.file import FileTier

#: longer than a busy metadata server takes, shorter than watchdogs of collectives
TIMEOUT_S = 60.0
#: between two deleted files: at most 50 a second from one process
DELETE_PAUSE_S = 0.02


class PfsTier(Wrapper):
    """Keeps shards and records as files under `path` on a shared file system, for all nodes.

    path: must be there: a missing folder means that the file system is not mounted, so it is never made.
    timeout_s: calls give up after it with TierUnavailable; chunks being moved are not cut off.
    write_bytes_per_s, read_bytes_per_s: limits that the mover keeps, each its own; None: no limit.
    delete_pause_s: between the files of a checkpoint that is dropped.
    sleep, jitter: time and randomness of pauses and retries; passed in for tests and simulation.
    All others are FileTier's.

    The first write leaves a marker file in the root, and this user's cache folder remembers it: `start` raises
    TierUnavailable where a remembered root shows up without its marker. Readers write nothing anywhere.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "pfs",
        capacity_bytes: int | None = None,
        read_only: bool = False,
        engine: EngineName = "auto",
        direct: bool | None = None,
        reading: Reading = "auto",
        request_bytes: int | None = None,
        depth: int | None = None,
        timeout_s: float = TIMEOUT_S,
        write_bytes_per_s: float | None = None,
        read_bytes_per_s: float | None = None,
        delete_pause_s: float = DELETE_PAUSE_S,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        for limit in (write_bytes_per_s, read_bytes_per_s):
            if limit is not None and limit <= 0:
                raise ValueError(f"a limit in bytes per second must be positive, not {limit}")
        files = MarkedFiles(
            path,
            name=name,
            scope="shared",
            survives="node-loss",
            capacity_bytes=capacity_bytes,
            read_only=read_only,
            engine=engine,
            direct=direct,
            reading=reading,
            request_bytes=request_bytes,
            depth=depth,
        )
        files.info = replace(
            files.info, driver="pfs", write_bytes_per_s=write_bytes_per_s, read_bytes_per_s=read_bytes_per_s
        )
        timed = Timed(files, timeout_s)
        retrying = Retrying(timed, sleep, jitter)

        async def names_in_time(checkpoint: CheckpointKey) -> Sequence[str]:
            async with timed.limit("drop", checkpoint):
                return await files.names_of(checkpoint)

        async def names_of(checkpoint: CheckpointKey) -> Sequence[str]:
            return await retrying.repeated(lambda: names_in_time(checkpoint))

        self.files = files
        super().__init__(Paced(retrying, delete_pause_s, names_of, sleep))

    def __repr__(self) -> str:
        return f"<PfsTier {self.files!r}>"


class MarkedFiles(FileTier):
    """A file tier whose root is told from a bare mount point by its marker."""

    _tier_id = ""  # as far as this process knows

    async def names_of(self, checkpoint: CheckpointKey) -> Sequence[str]:
        """The files of a checkpoint's folder; none if it is not there."""
        path = self.layout.folder(checkpoint)
        self._check_open()
        try:
            return await self._calls.call(_folders.names_in, path)
        except OSError as error:
            raise self._errors.translate(error, "cannot delete", path) from error

    # -- the marker ----------------------------------------------------------------------------------

    async def _check_root(self, make: bool = False) -> None:
        await super()._check_root(make)
        root, executor = self.layout.root, self._calls.executor
        marker = await _records.fetch(os.path.join(root, _marker.MARKER_NAME), executor)
        memory = _marker.Memory(root)
        seen = self._tier_id or await self._remembered(memory)
        self._tier_id = _marker.check(self.info.name, memory, seen, marker)
        if self._tier_id != seen and not self.info.read_only:
            await self._remember(memory)

    async def _mark(self) -> None:
        """Before anything is written: the root has its marker, and it is the one that was there. Who may only add
        notes makes no marker."""
        if self._tier_id or self.info.read_only:
            await self._check_root()
            return
        root = self.layout.root
        self._tier_id = _marker.decode(await _marker.ensure(root, self._calls.executor))
        await self._remember(_marker.Memory(root))

    async def _remembered(self, memory: _marker.Memory) -> str:
        try:
            return await asyncio.wait_for(self._calls.call(memory.recall), CACHE_S)
        except TimeoutError:  # the user's cache folder may lie on another, hung file system
            return ""

    async def _remember(self, memory: _marker.Memory) -> None:
        if self._tier_id:  # else the marker is damaged
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._calls.call(memory.remember, self._tier_id), CACHE_S)

    async def _take_room(self, shard: ShardKey, path: str, size_bytes: int, resume: bool) -> Reservation | Refused:
        try:
            await self._mark()
        except OSError as error:
            return self._refuse(error, path, size_bytes)
        return await super()._take_room(shard, path, size_bytes, resume)

    async def _commit(self, path: str, data: bytes, shards: Sequence[Reservation]) -> bool:
        await self._mark_for(path, "cannot commit")
        return await super()._commit(path, data, shards)

    async def _beat(self, path: str, data: bytes) -> None:
        await self._mark_for(path, "cannot write a heartbeat")
        await super()._beat(path, data)

    async def _mark_for(self, path: str, what: str) -> None:
        try:
            await self._mark()
        except OSError as error:
            raise self._errors.translate(error, what, path) from error

    async def _lease(self, shards: Sequence[ShardKey]) -> _leases.FileLease:
        try:
            return await super()._lease(shards)
        except (CheckpointGone, TierError):
            try:
                await self._check_root()
            except TierUnavailable:
                raise  # nothing is gone that is only not mounted
            except OSError:
                pass
            raise
