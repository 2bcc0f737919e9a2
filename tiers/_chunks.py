"""Batches of chunks of the file driver: which open file each belongs to, and what became of it."""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence

from stepwell.errors import TierError
from stepwell.native import Job, Op
from stepwell.tiers._calls import PathCalls
from stepwell.tiers._errors import Errors
from stepwell.tiers._files import OpenFile
from stepwell.tiers._medium import Medium
from stepwell.tiers._paths import Layout
from stepwell.tiers._writers import Writers
from stepwell.tiers.base import ChunkIO, Result, ShardKey


class Chunks:
    """Moves the chunks of one tier."""

    def __init__(self, layout: Layout, calls: PathCalls, medium: Medium, writers: Writers, errors: Errors) -> None:
        self._layout = layout
        self._calls = calls
        self._medium = medium
        self._writers = writers
        self._errors = errors

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        return await self._transfer(Op.WRITE, [(chunk, self._to_write(chunk)) for chunk in chunks])

    async def read(self, chunks: Sequence[ChunkIO], files: Mapping[ShardKey, OpenFile | OSError]) -> list[Result]:
        """`files` stay the caller's to let go."""
        return await self._transfer(Op.READ, [(chunk, self._to_read(chunk, files[chunk.shard])) for chunk in chunks])

    def _to_write(self, chunk: ChunkIO) -> OpenFile | TierError:
        file = self._writers.files.get(chunk.shard)
        if file is None or file.fd < 0:
            path = self._layout.shard(chunk.shard)
            return self._errors.chunk(errno.EINVAL, "cannot write: the shard is not reserved", chunk, path)
        if file.sealed:
            return self._errors.chunk(errno.EBUSY, "cannot write: the shard is being committed", chunk, file.path)
        if chunk.offset < 0 or chunk.length < 0 or chunk.offset + chunk.length > file.size_bytes:
            what = f"cannot write past the {file.size_bytes} bytes reserved"
            return self._errors.chunk(errno.EINVAL, what, chunk, file.path)
        file.hold()
        file.unallocated_bytes = max(0, file.unallocated_bytes - chunk.length)
        return file

    def _to_read(self, chunk: ChunkIO, file: OpenFile | OSError) -> OpenFile | TierError:
        reserved = self._writers.files.get(chunk.shard)
        if isinstance(file, OSError):
            return self._errors.translate(file, "cannot read", self._layout.shard(chunk.shard))
        if reserved is not None and chunk.offset + chunk.length > reserved.size_bytes:  # padding may be there
            what = f"the file is truncated: {reserved.size_bytes} bytes are reserved"
            return self._errors.chunk(errno.ENODATA, what, chunk, file.path)
        file.hold()
        return file

    async def _transfer(self, op: Op, work: Sequence[tuple[ChunkIO, OpenFile | TierError]]) -> list[Result]:
        """One batch for the engine. Lets go of the files, whatever happens."""
        jobs: list[tuple[Job, OpenFile]] = []
        for chunk, file in work:
            if isinstance(file, OpenFile):
                job = Job(op, file.fd, chunk.address, chunk.offset, chunk.length, file.direct)
                job.after, job.signal = chunk.after, chunk.signal
                jobs.append((job, file))
            elif chunk.signal is not None:
                chunk.signal.fire(False)  # else whoever waits for it waits for ever
        try:
            moved = iter(await self._medium.transfer(self._calls, jobs))
        finally:
            for _, held in jobs:
                held.let_go()
        return [
            Result(file if isinstance(file, TierError) else self._errors.of_move(op, chunk, file.path, next(moved)))
            for chunk, file in work
        ]
