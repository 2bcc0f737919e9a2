"""The file driver: a folder on a local disk or a shared file system.

Layout: <path>/<run>/<attempt>/<shard>. Bulk data goes through the native engine, with direct I/O where the
path takes it; records are small files put there whole (`_records`). Every call on a path runs on the tier's
own daemon threads, and what was begun there is finished there: a cancelled caller leaves neither an open
descriptor nor half a record, and does not wait for a hung medium.
The exception is `write` and `read`: they return, even when cancelled, only once the engine has let go of the
caller's memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace

from stepwell.errors import TierError
from stepwell.tiers import _folders, _leases, _records
from stepwell.tiers._books import Books, refusal
from stepwell.tiers._budget import NodeBudget
from stepwell.tiers._calls import Locks, PathCalls
from stepwell.tiers._chunks import Chunks
from stepwell.tiers._errors import Errors
from stepwell.tiers._files import OpenFile
from stepwell.tiers._medium import EngineName, Medium, Reading
from stepwell.tiers._paths import Layout, absolute_root
from stepwell.tiers._probe import ALIGNMENT_BYTES
from stepwell.tiers._writers import Writers
from stepwell.tiers.base import (
    NOTES,
    CheckpointKey,
    ChunkIO,
    Found,
    Lease,
    RecordKey,
    Refused,
    Reservation,
    Result,
    Scope,
    ShardKey,
    Survives,
    Tier,
    TierInfo,
    Usage,
    not_open,
)

#: step folders listed in one call
SCAN_BATCH = 16
#: what close() waits for calls under way before it leaves them to their daemon threads; and then for all else
CLOSE_S = 5.0
CLOSE_HUNG_S = 0.5


class FileTier(Tier):
    """Keeps shards and records as files under `path`.

    path: '~' and relative paths are resolved once, here. A node tier's folder is made if its parent exists;
    a shared tier's never is, since a missing one means that the file system is not mounted.
    capacity_bytes: bound on the shards this tier knows (its own and those that `scan` saw); None: the disk's.
    siblings: other processes of this node write the same runs there, and the capacity is theirs, too.
    read_only: nothing is ever made, written, locked or probed by writing, but for records in NOTES.
    engine: "auto" takes io_uring where it works. direct: False never uses direct I/O; None uses it where it works.
    reading: "auto" measures whether direct or buffered reading is faster, once per machine and disk.
    request_bytes, depth: of the engines' requests; None: what is good for this way of access.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        name: str = "disk",
        scope: Scope = "node",
        survives: Survives = "reboot",
        capacity_bytes: int | None = None,
        siblings: bool = False,
        read_only: bool = False,
        engine: EngineName = "auto",
        direct: bool | None = None,
        reading: Reading = "auto",
        request_bytes: int | None = None,
        depth: int | None = None,
    ) -> None:
        self.layout = Layout(absolute_root(path))
        self._calls = PathCalls(name, self.layout.root)
        self._medium = Medium(name, engine, direct, reading, request_bytes, depth)
        self._books = Books(capacity_bytes, ALIGNMENT_BYTES)
        self._budget = (
            NodeBudget(self.layout.root, self._calls, capacity_bytes, ALIGNMENT_BYTES)
            if siblings and capacity_bytes is not None
            else None
        )
        self._writers = Writers(self._calls, self._medium)
        self._readers = _leases.Readers(self.layout, self._calls, lambda shard: self._books.lingering.pop(shard, None))
        self._errors = Errors(name, self._writers)
        self._chunks = Chunks(self.layout, self._calls, self._medium, self._writers, self._errors)
        self._locks = Locks()
        self._state = "not started"
        self._closing: asyncio.Future[None] | None = None
        self.info = TierInfo(
            name=name,
            driver="file",
            scope=scope,
            survives=survives,
            capacity_bytes=capacity_bytes,
            alignment_bytes=ALIGNMENT_BYTES,
            request_bytes=self._medium.request_bytes,
            depth=self._medium.depth,
            linked=True,
            read_only=read_only,
            detail={"path": self.layout.root},
        )

    def __repr__(self) -> str:
        counts = f"{len(self._writers.files)} shards reserved, {self._readers!r}"
        return f"<FileTier {self.info.name} at {self.layout.root}: {self._state}, {counts}>"

    # -- life ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        """As the contract says. May be called again: after a failure, or while an earlier call still hangs."""
        await self._calls.finish(self._start())

    async def _start(self) -> None:
        async with self._locks.hold("start"):
            if self._state == "not started":
                await self._open()

    async def _open(self) -> None:
        root = self.layout.root
        make = self.info.scope == "node" and not self.info.read_only
        try:
            await self._check_root(make)
            access, detail = await self._medium.probe(self._calls, self.info.read_only)
            await self._writers.update_space()
            if self._state == "closed":  # while a call of ours hung
                raise not_open(self.info.name, self._state, path=root)
        except OSError as error:
            await self._medium.close(CLOSE_S)
            raise error if isinstance(error, TierError) else self._errors.away(error, root, make) from error
        self._writers.detail = {"path": root, **detail}
        read_only = self.info.read_only or not access.writable
        self.info = replace(self.info, read_only=read_only, detail=self._writers.detail)
        self._readers.direct = self._medium.direct_read
        self._state = "open"

    async def _check_root(self, make: bool = False) -> None:
        """Raises OSError or TierUnavailable if this is not the place it should be."""
        await self._calls.call(_folders.check_root, self.layout.root, make)

    async def close(self) -> None:
        """Waits a moment for calls under way; what hangs is left to its daemon threads. Goes on if it is cancelled."""
        if self._state == "closed":
            return
        self._state = "closed"
        self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        left_s = CLOSE_S if await self._calls.wait_idle(CLOSE_S) else CLOSE_HUNG_S
        await self._medium.close(left_s)
        self._writers.close()
        self._readers.close()
        await self._calls.close(left_s)

    def _check_open(self) -> None:
        if self._state != "open":
            raise not_open(self.info.name, self._state, path=self.layout.root)

    def _check_ours(self, run: str, path: str, *, note: bool = False) -> None:
        self._check_open()
        if not run:
            raise self._errors.make(errno.EPERM, "a folder outside of any run is not stepwell's to change", path=path)
        if self.info.read_only and not note:
            raise self._errors.make(errno.EROFS, "it is read-only", path=path)

    # -- going down ----------------------------------------------------------------------------------

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        path = self.layout.shard(shard)
        if size_bytes < 0:
            raise ValueError(f"size_bytes must not be negative: {size_bytes}")
        if self.info.read_only:
            return Refused("read-only", f"{path}: {self.info.detail.get('access', 'as asked')}", size_bytes)
        self._check_ours(shard.checkpoint.run, path)
        return await self._calls.finish(self._reserve(shard, path, size_bytes, resume), self._undo_reserve)

    async def _undo_reserve(self, answer: Reservation | Refused) -> None:
        """What was resumed stays, as it was before."""
        if isinstance(answer, Reservation):
            await self._abort(answer.shard, answer, keep=answer.resumed)

    async def _reserve(self, shard: ShardKey, path: str, size_bytes: int, resume: bool) -> Reservation | Refused:
        async with self._locks.hold(shard):
            await self._discard(shard, keep=resume and self._writers.can_resume(shard, size_bytes))
            if self._budget is None:
                return await self._take_room(shard, path, size_bytes, resume)
            run = shard.checkpoint.run
            async with self._budget.held(run):
                refused = await self._budget.refusal(run, path, size_bytes, self.info.name)
                return refused or await self._take_room(shard, path, size_bytes, resume)

    async def _take_room(self, shard: ShardKey, path: str, size_bytes: int, resume: bool) -> Reservation | Refused:
        refused = self._books.over_capacity(shard, size_bytes, self.info.name) if self._budget is None else None
        if refused:
            return refused
        committed = self._books.committed.get(shard), self._books.physical.get(shard)
        self._books.reserve(shard, size_bytes)  # before the first await: others must see it
        try:
            made = await self._writers.make(shard, path, size_bytes, resume)
        except OSError as error:
            self._books.forget(shard)
            if error.errno == errno.EEXIST and committed[0] is not None and committed[1] is not None:
                self._books.adopt(shard, committed[0], committed[1])  # it is committed, and stays so
            return self._refuse(error, path, size_bytes)
        if isinstance(made, Refused):
            self._books.forget(shard)
        return made

    def _refuse(self, error: OSError, path: str, size_bytes: int) -> Refused:
        """The refusal that the error means; else raises it."""
        refused = None
        if not isinstance(error, TierError):
            refused = refusal(error.errno or errno.EIO, path, size_bytes, self._writers.space.free_bytes)
        if refused is None:
            raise self._errors.translate(error, "cannot make the file of a shard", path) from error
        return refused

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        return await self._chunks.write(chunks)

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        path = self.layout.record(record)
        self._check_ours(record.run, path, note=record.name.startswith(f"{NOTES}/") and not shards)
        return await self._calls.finish(self._commit_locked(record, path, data, shards))

    async def _commit_locked(self, record: RecordKey, path: str, data: bytes, shards: Sequence[Reservation]) -> bool:
        """No abort may close a descriptor, and free its number, while a commit works on it; and no second try may
        tell of a record that the first, still under way, takes back."""
        async with contextlib.AsyncExitStack() as stack:
            for shard in sorted({each.shard for each in shards}, key=str):  # one order for all: no deadlock
                await stack.enter_async_context(self._locks.hold(shard))
            await stack.enter_async_context(self._locks.hold(record))
            return await self._commit(path, data, shards)

    async def _commit(self, path: str, data: bytes, shards: Sequence[Reservation]) -> bool:
        try:
            if await self._calls.call(os.path.lexists, path):
                # whoever made it may have died, or may hang, before its name was durable
                await self._calls.call(_folders.sync_folder, os.path.dirname(path))
                return False
            await self._writers.make_durable(shards, [self.layout.shard(each.shard) for each in shards])
            created = await self._publish(path, data, alone=not shards)
        except OSError as error:
            raise self._errors.translate(error, "cannot commit", path) from error
        if created:
            for each in shards:
                del self._writers.files[each.shard]
                self._books.commit(each.shard, -(-each.size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
        return created

    async def _publish(self, path: str, data: bytes, *, alone: bool) -> bool:
        """alone: no shards are committed with it."""
        folder, name = os.path.split(path)
        if not (alone and name.startswith(_folders.MANIFEST_PREFIX)):
            await self._calls.call(_folders.make_folders, self.layout.root, folder)
            return await _records.publish(path, data, self._calls.executor)
        # who was overtaken may come so late that the next writer has deleted the checkpoint meanwhile
        check = functools.partial(_folders.check_something_to_commit, folder)
        return await _records.publish(path, data, self._calls.executor, check)

    async def abort(self, reservation: Reservation) -> None:
        await self._calls.finish(self._abort(reservation.shard))

    async def _abort(self, shard: ShardKey, only: Reservation | None = None, *, keep: bool = False) -> None:
        """`only`: unless another reservation has taken its place meanwhile."""
        async with self._locks.hold(shard):
            file = self._writers.files.get(shard)
            if file is not None and (only is None or file.reservation is only):
                await self._discard(shard, keep=keep)

    async def _discard(self, shard: ShardKey, *, keep: bool = False) -> None:
        """Ends a reservation. `keep`: its file stays, as if the process had died."""
        if shard not in self._writers.files:
            return
        try:
            if keep:
                self._writers.let_go(shard)
            else:
                await self._writers.discard(shard)
        except OSError as error:
            raise self._errors.translate(error, "cannot remove an aborted shard", self.layout.shard(shard)) from error
        finally:
            self._books.forget(shard)

    async def beat(self, record: RecordKey, data: bytes) -> None:
        path = self.layout.record(record)
        self._check_ours(record.run, path)
        await self._calls.finish(self._beat(path, data))

    async def _beat(self, path: str, data: bytes) -> None:
        try:
            await self._calls.call(_folders.make_folders, self.layout.root, os.path.dirname(path))
            await _records.replace(path, data, self._calls.executor)
        except OSError as error:
            raise self._errors.translate(error, "cannot write a heartbeat", path) from error

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        for key in what:
            run = key.checkpoint.run if isinstance(key, ShardKey) else key.run
            self._check_ours(run, str(key))
        for key in what:
            await self._calls.finish(self._drop(key))

    async def _drop(self, key: CheckpointKey | ShardKey | RecordKey) -> None:
        if not isinstance(key, RecordKey):
            await self._drop_now(key)
            return
        async with self._locks.hold(key):  # one that hangs must not take what is committed under its name later
            await self._drop_now(key)

    async def _drop_now(self, key: CheckpointKey | ShardKey | RecordKey) -> None:
        gone: list[ShardKey] = []
        if isinstance(key, CheckpointKey):
            path, gone = self.layout.folder(key), self._books.of(key)
        elif isinstance(key, ShardKey):
            path, gone = self.layout.shard(key), [key]
        else:
            path = self.layout.record(key)
        try:
            await self._calls.call(_folders.drop, self.layout.root, path, isinstance(key, CheckpointKey))
            await self._writers.update_space()
        except OSError as error:
            raise self._errors.translate(error, "cannot delete", path) from error
        for shard in gone:
            await self._abort(shard)
            self._books.forget(shard, leased=shard in self._readers)

    # -- coming up -----------------------------------------------------------------------------------

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self._check_open()
        files = await self._calls.finish(self._readers.open([chunk.shard for chunk in chunks]), _let_go)
        try:
            return await self._chunks.read(chunks, files)
        finally:
            _leases.let_go(files)

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        self._check_open()
        return await self._calls.finish(self._lease(shards), _close_lease)

    async def _lease(self, shards: Sequence[ShardKey]) -> _leases.FileLease:
        try:
            return await self._readers.lease(shards)
        except FileNotFoundError as error:
            path, folder = error.filename, os.path.dirname(error.filename)
            in_run = any(shard.checkpoint.run and self.layout.shard(shard) == path for shard in shards)
            missing = await self._calls.call(_leases.what_is_missing, self.layout.root, folder, in_run)
            raise self._errors.missing(missing, path, self.layout.root) from error
        except OSError as error:
            raise self._errors.translate(error, "cannot open a shard", self.layout.root) from error

    async def fetch(self, record: RecordKey) -> bytes | None:
        path = self.layout.record(record)
        self._check_open()
        try:
            data = await self._calls.finish(_records.fetch(path, self._calls.executor))
            if data is None:
                await self._check_root()
        except OSError as error:
            raise self._errors.translate(error, "cannot read a record", path) from error
        return data

    async def scan(self, run: str) -> AsyncIterator[Found]:
        path = self.layout.run(run)
        self._check_open()
        known = {shard for shard in self._books.committed if shard.checkpoint.run == run}
        try:
            listed = await self._calls.call(_folders.list_run, path)
            if listed is None:
                await self._check_root()
                return
            attempts, files = listed
            for file in files:
                yield file.found
            for begin in range(0, len(attempts), SCAN_BATCH):
                for file in await self._calls.call(_folders.list_folders, path, attempts[begin : begin + SCAN_BATCH]):
                    known.discard(self._books.see(run, file.found, file.physical_bytes))
                    yield file.found
        except OSError as error:
            raise self._errors.translate(error, "cannot list a run", path) from error
        for shard in known:  # deleted by another process
            self._books.forget(shard, leased=shard in self._readers)

    def usage(self) -> Usage:
        return self._books.usage(self._writers.free_bytes if self._state == "open" else None)


async def _let_go(files: Mapping[ShardKey, OpenFile | OSError]) -> None:
    _leases.let_go(files)


async def _close_lease(lease: _leases.FileLease) -> None:
    await lease.close()
