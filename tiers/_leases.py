"""Shard files open for reading: for the length of one read, or as long as a lease lasts."""

from __future__ import annotations

import os
import resource
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from stepwell.tiers._calls import PathCalls
from stepwell.tiers._files import OpenFile, open_reading
from stepwell.tiers._folders import MANIFEST_PREFIX
from stepwell.tiers._paths import Layout
from stepwell.tiers.base import Lease, ShardKey


class Readers:
    """The files of leases, shared among them, and those of reads without a lease."""

    def __init__(self, layout: Layout, calls: PathCalls, on_release: Callable[[ShardKey], object]) -> None:
        self.direct = False
        self._layout = layout
        self._calls = calls
        self._on_release = on_release
        self._leased: dict[ShardKey, OpenFile] = {}  # each held once for all its leases
        self._leases: Counter[ShardKey] = Counter()

    def __repr__(self) -> str:
        return f"{len(self._leased)} shards leased"

    def __contains__(self, shard: ShardKey) -> bool:
        return shard in self._leased

    async def open(self, shards: Sequence[ShardKey]) -> dict[ShardKey, OpenFile | OSError]:
        """Files to read from, each held once for the caller; leased ones even if they were dropped meanwhile."""
        files: dict[ShardKey, OpenFile | OSError] = {}
        absent: list[ShardKey] = []
        for shard in dict.fromkeys(shards):
            leased = self._leased.get(shard)
            if leased is None:
                absent.append(shard)
            else:
                leased.hold()
                files[shard] = leased
        if absent:
            paths = [self._layout.shard(shard) for shard in absent]
            try:
                results = await self._calls.call(_open_all, paths, self.direct)
            except BaseException:
                let_go(files)
                raise
            for shard, path, result in zip(absent, paths, results, strict=True):
                if isinstance(result, OSError):
                    files[shard] = result
                else:
                    files[shard] = OpenFile(path, *result, self._calls.close_later)
        return files

    async def lease(self, shards: Sequence[ShardKey]) -> FileLease:
        """Opens as many as half of the process's file limit allows. Raises the OSError of the first that is missing."""
        room = max(0, _files_max() - len(self._leased))
        unique = list(dict.fromkeys(shards))
        opened, beyond = unique[:room], unique[room:]
        files = await self.open(opened)
        try:
            errors = [file for file in files.values() if isinstance(file, OSError)]
            if not errors:
                errors = await self._calls.call(_missing, [self._layout.shard(shard) for shard in beyond])
            if errors:
                raise errors[0]
        except BaseException:
            let_go(files)
            raise
        good = {shard: file for shard, file in files.items() if isinstance(file, OpenFile)}
        for shard, file in good.items():
            self._leases[shard] += 1
            if shard in self._leased:
                file.let_go()
            else:
                self._leased[shard] = file
        return FileLease(self, list(good))

    def release(self, shards: Sequence[ShardKey]) -> None:
        for shard in shards:
            self._leases[shard] -= 1
            if self._leases[shard] <= 0:
                del self._leases[shard]
                if shard in self._leased:  # else the tier was closed
                    self._leased.pop(shard).let_go()
                self._on_release(shard)

    def close(self) -> None:
        for file in self._leased.values():
            self._calls.close_later(file.take())
        self._leased.clear()


class FileLease(Lease):
    """Open descriptors: a deleted file lives on as long as one is open."""

    def __init__(self, readers: Readers, shards: list[ShardKey]) -> None:
        self._readers = readers
        self._shards = shards

    async def close(self) -> None:
        shards, self._shards = self._shards, []
        self._readers.release(shards)


def let_go(files: Mapping[ShardKey, OpenFile | OSError]) -> None:
    """Ends the hold that `Readers.open` gave."""
    for file in files.values():
        if isinstance(file, OpenFile):
            file.let_go()


def _files_max() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if soft == resource.RLIM_INFINITY else soft // 2


def _open_all(paths: list[str], direct: bool) -> list[tuple[int, bool] | OSError]:
    opened: list[tuple[int, bool] | OSError] = []
    for path in paths:
        try:
            opened.append(open_reading(path, direct))
        except OSError as error:
            opened.append(error)
    return opened


def _missing(paths: list[str]) -> list[OSError]:
    for path in paths:
        try:
            os.stat(path)
        except OSError as error:
            return [error]
    return []


def what_is_missing(root: str, folder: str, in_run: bool) -> Literal["root", "checkpoint", "file"]:
    """Why a shard's file is not there. A checkpoint without a manifest is one that is being deleted."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return "checkpoint" if os.path.isdir(root) else "root"
    if in_run and not any(name.startswith(MANIFEST_PREFIX) for name in names):
        return "checkpoint"
    return "file"
