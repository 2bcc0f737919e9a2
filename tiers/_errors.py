"""Where the operating system's errors become stepwell's, for the file driver: once, with tier, path and numbers."""

from __future__ import annotations

import errno
import os
from typing import Any

from stepwell.errors import CheckpointGone, TierError, TierUnavailable
from stepwell.native import Op
from stepwell.tiers._books import is_full
from stepwell.tiers._writers import Writers
from stepwell.tiers.base import ChunkIO, tier_error


class Errors:
    """Makes the errors of one tier."""

    def __init__(self, tier: str, writers: Writers) -> None:
        self._tier = tier
        self._writers = writers

    def make(self, number: int, what: str, **where: Any) -> TierError:
        return tier_error(number, f"Tier {self._tier}: {what}", **where)

    def translate(self, error: OSError, what: str, path: str) -> TierError:
        if isinstance(error, TierError):
            return error
        number = error.errno or errno.EIO
        if error.strerror and error.strerror != os.strerror(number):
            what = f"{what}: {error.strerror}"
        free_bytes = self._writers.space.free_bytes if is_full(number) else None
        return self.make(number, what, path=error.filename or path, free_bytes=free_bytes)

    def away(self, error: OSError, root: str, make: bool) -> TierUnavailable:
        """The root is not there; `make`: it would have been made."""
        todo = "Make its parent folder" if make else "Mount it: it is never made"
        what = f"Tier {self._tier} is not there: {error.strerror}"
        away = TierUnavailable(what, todo=f"{todo}, or correct the path", path=root)
        away.errno = error.errno
        return away

    def missing(self, what: str, path: str, root: str) -> TierError | CheckpointGone:
        """`what` is missing: the root, the checkpoint, or only this file."""
        if what == "root":
            return TierUnavailable(f"Tier {self._tier} is not there any more", path=root)
        if what == "checkpoint":
            return CheckpointGone(f"Tier {self._tier}: the checkpoint is gone", path=path)
        return self.make(errno.ENOENT, "a shard of a committed checkpoint is missing", path=path)

    def chunk(self, number: int, what: str, chunk: ChunkIO, path: str) -> TierError:
        free_bytes = self._writers.space.free_bytes if is_full(number) else None
        return self.make(number, what, path=path, offset=chunk.offset, length=chunk.length, free_bytes=free_bytes)

    def of_move(self, op: Op, chunk: ChunkIO, path: str, moved: int) -> TierError | None:
        """What the engine's answer means: bytes moved or -errno; None if all is well."""
        if moved < 0:
            return self.chunk(-moved, f"cannot {op.name.lower()}", chunk, path)
        if moved < chunk.length:
            what = f"the file is truncated: {moved} of {chunk.length} bytes are there"
            return self.chunk(errno.ENODATA, what, chunk, path)
        return None
