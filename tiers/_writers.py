"""Shards on their way down: made with room, written by the engine, made durable or discarded.

Everything here raises OSError with the path as its filename; the driver translates it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import replace

from stepwell.errors import TierError
from stepwell.tiers import _files, _folders
from stepwell.tiers._calls import PathCalls
from stepwell.tiers._files import WriteFile
from stepwell.tiers._medium import Medium
from stepwell.tiers.base import Refused, Reservation, ShardKey

#: left free on the medium, so that records, logs and other programs still find room: this, or 1 % if that is less
KEEP_FREE_BYTES = 64 << 20

#: not there, or not for an append-only file
_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EPERM}


class Writers:
    """The files of reserved shards. A file stays here until its record is published or it is discarded."""

    def __init__(self, calls: PathCalls, medium: Medium) -> None:
        self._calls = calls
        self._medium = medium
        self.files: dict[ShardKey, WriteFile] = {}
        self._coming: dict[ShardKey, int] = {}  # room that files will take which are being made
        self.space = _folders.Space(0, 0)  # as last seen
        self.detail: dict[str, str] = {}  # what turned out to be different from what was probed

    async def update_space(self) -> None:
        self.space = await self._calls.call(_folders.space, self._calls.root)

    @property
    def free_bytes(self) -> int:
        """Room that is not promised yet, less what is always left free."""
        promised = sum(self._coming.values()) + sum(file.unallocated_bytes for file in self.files.values())
        return max(0, self.space.free_bytes - promised - min(KEEP_FREE_BYTES, self.space.total_bytes // 100))

    def can_resume(self, shard: ShardKey, size_bytes: int) -> bool:
        """False if its file is known to be of another size, or to have lost data."""
        file = self.files.get(shard)
        return file is None or (file.size_bytes == size_bytes and not file.failure)

    async def make(self, shard: ShardKey, path: str, size_bytes: int, resume: bool) -> Reservation | Refused:
        """Makes the shard's file, or with `resume` keeps the one that is there, and takes the room for it."""
        await self.update_space()
        taken_bytes = await self._calls.call(_files.taken_bytes, path, size_bytes) if resume else None
        missing_bytes = max(0, size_bytes - (taken_bytes or 0))
        free_bytes = self.free_bytes
        if missing_bytes > free_bytes:
            detail = f"disk full: {path}: {missing_bytes} bytes needed, {free_bytes} free"
            return Refused("full", detail, missing_bytes, free_bytes)
        self._coming[shard] = missing_bytes  # before the next await: whoever else asks must see it
        try:
            file, resumed = await self._open(path, size_bytes, taken_bytes is not None)
        finally:
            del self._coming[shard]
        file.unallocated_bytes = missing_bytes if resumed else size_bytes
        self.files[shard] = file
        number = -await self._medium.allocate(file.fd, size_bytes) if size_bytes else 0
        if number == 0:
            file.unallocated_bytes = 0
            self.space = replace(self.space, free_bytes=self.space.free_bytes - missing_bytes)
        elif number in _NO_FALLOCATE:
            self.detail["fallocate"] = f"not there: {errno.errorcode[number]}"
            try:
                await self._calls.call(_files.lengthen, file.fd, size_bytes)
            except OSError:
                await self.discard(shard)
                raise
        else:
            await self.discard(shard)
            raise OSError(number, os.strerror(number), path)
        file.reservation = Reservation(shard, size_bytes, resumed=resumed)
        return file.reservation

    async def _open(self, path: str, size_bytes: int, resume: bool) -> tuple[WriteFile, bool]:
        """The file, and whether it is the old one. One that cannot be opened or read is made anew."""
        wanted = self._medium.direct_write
        if resume:
            try:
                fd, direct = await self._calls.call(_files.resume, path, size_bytes, wanted)
            except OSError as error:
                if isinstance(error, TierError) or error.errno == errno.EEXIST:
                    raise
                resume = False
        if not resume:
            fd, direct = await self._calls.call(_files.create, self._calls.root, path, size_bytes, wanted)
        if wanted and size_bytes and not direct:
            self.detail["buffered"] = f"direct write refused: {path}"
        return WriteFile(path, fd, direct, self._calls.close_later, size_bytes), resume

    def let_go(self, shard: ShardKey) -> None:
        """Ends a reservation whose file stays as debris."""
        self.files.pop(shard).let_go()

    async def make_durable(self, reservations: Sequence[Reservation], paths: Sequence[str]) -> None:
        """Cuts the files to size, syncs them and their folders, and closes them."""
        files = []
        for reservation, path in zip(reservations, paths, strict=True):
            file = self.files.get(reservation.shard)
            if file is None or file.size_bytes != reservation.size_bytes:
                raise OSError(errno.EINVAL, "the shard is not reserved", path)
            if file.users > 1:
                raise OSError(errno.EBUSY, "the shard is still being written", path)
            if file.failure:
                raise OSError(errno.EIO, file.failure, path)
            if file.fd >= 0:  # else an earlier commit got as far as the record
                files.append(file)
        for file in files:
            file.sealed = True
        try:
            await self._sync(files)
        finally:
            for file in files:
                file.sealed = False

    async def _sync(self, files: Sequence[WriteFile]) -> None:
        await self._calls.call(_files.finish, [(file.fd, file.size_bytes) for file in files])
        synced = await self._medium.sync([file.fd for file in files])
        closed = await self._calls.call(_files.close_all, [file.take() for file in files])
        lost: list[OSError] = []
        for file, sync_result, close_number in zip(files, synced, closed, strict=True):
            number = -sync_result if sync_result < 0 else close_number
            if number:  # the kernel tells of lost pages only once: a second sync would pass
                file.failure = f"data did not become durable: {errno.errorcode.get(number, number)}"
                lost.append(OSError(number, "data did not become durable", file.path))
        if lost:
            raise lost[0]
        for folder in {os.path.dirname(file.path) for file in files}:
            await self._calls.call(_folders.sync_folder, folder)

    async def discard(self, shard: ShardKey) -> None:
        """Removes the file. Its descriptor is closed by the last write under way, if there is one."""
        file = self.files.pop(shard, None)
        if file is None:
            return
        if file.users == 1 and file.fd >= 0:
            await self._calls.call(_files.discard, file.path, [file.take()])
        else:
            file.let_go()
            await self._calls.call(_files.discard, file.path, [])
        await self.update_space()

    def close(self) -> None:
        """What is still reserved stays as debris, as after a crash."""
        for file in self.files.values():
            file.let_go()
        self.files.clear()
