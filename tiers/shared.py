"""The host tier in shared memory: what was saved or fetched outlives a process that is killed.

One process owns the arena. It keeps its slots, its index, its records and the eviction policy's state in files in
memory (`_shm`), so whoever opens it next goes on with them: a checkpoint whose records are there and whose chunks are
all filled is committed, chunks that came from other tiers still serve, and what was half filled is free. Others see who
the owner is, and read its slots. A process that cannot own it works in private memory, and says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from stepwell.errors import TierUnavailable
from stepwell.tiers import _shm
from stepwell.tiers._arena import SLOTS_MIN
from stepwell.tiers._claim import Claim, Place, claim, free
from stepwell.tiers._committed import Records, Stored
from stepwell.tiers._daemon import DaemonExecutor
from stepwell.tiers._index import SlotState, name_of
from stepwell.tiers._sharedarena import Attached, SharedArena, SlotFile
from stepwell.tiers._sharedindex import Row, SharedIndex, Unusable
from stepwell.tiers._slices import SLICE_BYTES
from stepwell.tiers.base import (
    CHUNK_BYTES,
    CheckpointKey,
    EvictionPolicy,
    RecordKey,
    Reservation,
    ShardKey,
    not_open,
    tier_error,
)
from stepwell.tiers.host import FIRST_BYTES, KEEP_FIRST_BYTES, HostTier

__all__ = ["SHARED_ROOT", "SharedHostTier", "arena_name", "shared_room"]

SHARED_ROOT, arena_name = _shm.ROOT, _shm.arena_name

log = logging.getLogger("stepwell")

#: how often the eviction policy's state is written down, if it has changed
REMEMBER_S = 5.0


def shared_room(root: Path) -> tuple[str, int]:
    """The kind of memory that is mounted there, and the bytes of it that are free or whose owners are dead.

    Raises TierUnavailable if it is no memory, or this user's folder there cannot be trusted.
    """
    place = Place.find(root, "any")
    return place.kind, free(root) + sum(found.size_bytes for found in _shm.arenas(root) if not found.alive)


class SharedHostTier(HostTier):
    """A host tier of `capacity_bytes` in the shared arena `arena` below `root`, if this process gets to own it."""

    arena: SharedArena
    _ARENA = SharedArena

    def __init__(
        self,
        eviction: EvictionPolicy,
        capacity_bytes: int,
        name: str = "host",
        *,
        arena: str,
        run: str = "",
        root: Path | str = _shm.ROOT,
        chunk_bytes: int = CHUNK_BYTES,
        background: bool = True,
        ahead: bool = True,
    ) -> None:
        """arena: its folder's name (`_shm.arena_name`). run: told to others who ask whose it is. The rest is as
        HostTier has it; until `start`, and without ownership, the memory is private and small."""
        small_bytes = min(capacity_bytes, FIRST_BYTES)
        super().__init__(eviction, small_bytes, name, chunk_bytes=chunk_bytes, background=background, ahead=ahead)
        self.arena.keep_limit = self._slots(min(capacity_bytes, KEEP_FIRST_BYTES))
        self.info = replace(self.info, capacity_bytes=max(capacity_bytes, self.arena.capacity_bytes))
        self._wanted_bytes, self._run, self._root, self.arena_name = capacity_bytes, run, Path(root), arena
        self._pid = os.getpid()
        self._stored: Records | None = None
        self._left: set[CheckpointKey] = set()  # checkpoints that an earlier process left
        self._written = ""  # of what is remembered, as it was written last
        self._remembering: asyncio.Task[None] | None = None
        self.why = "it was not started"  # the memory is private; "" if it is shared
        self.busy = False  # at the last try a live process had the arena
        self.folder: Path | None = None  # of the arena, once it was looked for

    def __repr__(self) -> str:
        return f"<SharedHostTier {self.info.name} in {self.folder}: {self.why or 'owned'}, {self.arena!r}>"

    @property
    def owned(self) -> bool:
        """Whether the shared arena is this process's."""
        return self.arena.attached is not None and self.arena.attached.lock.held

    @property
    def owner(self) -> _shm.OwnerInfo | None:
        """Who says that the arena is theirs; None if nobody does, or it has not been looked for."""
        return None if self.folder is None else _shm.read_owner(self.folder)

    # -- the beginning -------------------------------------------------------------------

    async def start(self) -> None:
        """Takes the arena, with what an earlier owner left, if it has no owner. Raises TierUnavailable where no shared
        memory can be."""
        await self.try_to_own()

    async def try_to_own(self) -> bool:
        """Takes the arena if it has no owner; True if it is this process's then. Raises TierUnavailable.

        What is in private memory so far is let go of, once nobody uses a slot there. For a process that saves nothing
        at the moment.
        """
        self._check_open()
        if self.owned:
            return True
        calls = DaemonExecutor(f"stepwell-{self.info.name}-claim", 1)
        try:
            taken, place = await asyncio.get_running_loop().run_in_executor(calls, self._claim)
        finally:
            calls.shutdown(wait=False)
        self.folder, self.why, self.busy = place.folder, taken.why, taken.busy
        if taken.lock is None:
            level = logging.INFO if taken.busy else logging.WARNING
            log.log(level, "tier %s: host memory is private and small: %s", self.info.name, self.why)
            self.info = replace(self.info, capacity_bytes=self.arena.capacity_bytes)
            return False
        try:
            async with self.arena.standing_still():
                self._leave_all()
                self._open(taken.lock, place, taken.capacity_bytes)
        except BaseException:
            taken.lock.close()
            raise
        self.info = replace(
            self.info, survives="process", capacity_bytes=self.arena.capacity_bytes,
            detail={**self.info.detail, "shared": str(place.folder)},
        )  # fmt: skip
        self._remembering = asyncio.ensure_future(self._remember())
        self.arena.expect(self.arena.capacity_bytes if self._ahead else 0)
        return True

    def _claim(self) -> tuple[Claim, Place]:
        place = Place.find(self._root, self.arena_name)
        return claim(place, self._wanted_bytes), place

    def _open(self, lock: _shm.Lock, place: Place, capacity_bytes: int) -> None:
        """Goes on with what is there, or begins anew. Raises TierUnavailable."""
        slot_bytes = self.arena.slot_bytes
        if SLICE_BYTES // slot_bytes * slot_bytes % place.page_bytes:
            raise TierUnavailable(f"pages of {place.page_bytes} bytes are too large", path=str(place.root))
        owner = _shm.describe_owner(self._run, slot_bytes, capacity_bytes)
        for again in (False, True):
            try:
                index = SharedIndex(place.folder, slot_bytes, max(capacity_bytes // slot_bytes, SLOTS_MIN))
                slots = SlotFile(place.folder, place.slots)
                self._stored = Records(place.folder)
                lock.tell(owner)
                self._go_on(Attached(lock, index, slots), capacity_bytes)
                return
            except Unusable as error:
                if again:
                    raise TierUnavailable(f"cannot use shared memory: {error}", path=str(place.folder)) from error
                log.warning("what was in shared memory is lost: %s (%s)", error, place.folder)
                _shm.wipe(place.folder)
            except OSError as error:
                number = error.errno or 0
                raise tier_error(
                    number, f"Tier {self.info.name}: cannot share memory", path=str(place.folder)
                ) from error

    def _go_on(self, attached: Attached, capacity_bytes: int) -> None:
        """Enters what an earlier owner left. Raises Unusable."""
        assert self._stored is not None
        rows = list(attached.index.found())
        filled: defaultdict[str, set[int]] = defaultdict(set)
        for row in rows:
            if row.state is SlotState.FILLED:
                filled[row.name].add(row.chunk)
        stored = self._stored.load()
        torn = {
            record.checkpoint
            for record in stored
            for shard, size in record.shards
            if not filled[name_of(shard)] >= set(range(self._slots(size)))
        }
        keys: dict[str, ShardKey] = {}
        for record in stored:
            if record.checkpoint in torn:
                self._stored.lose(record.key)
                continue
            self._records[record.key] = record.data
            for shard, size in record.shards:
                self._books.adopt(shard, size, size)
                keys[name_of(shard)] = shard
        self._left = {shard.checkpoint for shard in keys.values()}
        self.arena.eviction.resume(self._recall())

        def worth(row: Row) -> bool:
            return row.name in keys or not row.dirty

        try:
            self.arena.attach(attached, capacity_bytes, rows, worth, keys)
        except BaseException:
            self._records.clear()
            self._books.committed.clear()
            self._books.physical.clear()
            raise
        if rows:
            log.info(
                "tier %s: %d chunks are still in shared memory from an earlier process, and %d shards whole",
                self.info.name, self.arena.cached_bytes // self.arena.slot_bytes, len(self._books.committed),
            )  # fmt: skip

    # -- what was left -------------------------------------------------------------------

    @property
    def empty(self) -> bool:
        """Whether nothing is kept here."""
        return not self._records and not self._books.committed and not self.arena.cached_bytes

    def clear(self) -> None:
        """Forgets all that is here. No save is under way."""
        assert not self._books.reserved
        for record in list(self._records):
            self._strike(record)
        for shard in list(self._books.committed):
            self._books.forget(shard)
        self.arena.forget_all()

    def was_elsewhere(self, checkpoint: CheckpointKey) -> bool:
        """Whether an earlier process left it here, when another tier had it, too."""
        shards = self._books.of(checkpoint)
        return checkpoint in self._left and not any(self.arena.is_dirty(shard) for shard in shards)

    # -- records, and what is remembered -------------------------------------------------

    def _store(self, record: RecordKey, data: bytes, shards: Sequence[Reservation] = ()) -> None:
        if self.owned and self._stored is not None:
            try:
                self._stored.put(Stored(record, data, tuple((each.shard, each.size_bytes) for each in shards)))
            except OSError as error:
                what = f"Tier {self.info.name}: no room for a record in shared memory"
                raise tier_error(error.errno or 0, what, key=str(record)) from error
        super()._store(record, data, shards)

    def _strike(self, record: RecordKey) -> None:
        super()._strike(record)
        if self.owned and self._stored is not None:
            self._stored.lose(record)

    async def _remember(self) -> None:
        while True:
            await asyncio.sleep(REMEMBER_S)
            self._write_state()

    def _write_state(self) -> None:
        """Of the eviction policy. Without it, the next owner begins with another order, and nothing is lost."""
        assert self.folder is not None
        state = json.dumps(self.arena.eviction.state())
        if state == self._written:
            return
        new = self.folder / f"{_shm.EVICT}.new"
        with contextlib.suppress(OSError):
            new.write_text(state)
            os.replace(new, self.folder / _shm.EVICT)
            self._written = state

    def _recall(self) -> object:
        assert self.folder is not None
        with contextlib.suppress(OSError, ValueError):
            return json.loads((self.folder / _shm.EVICT).read_bytes())
        return None

    # -- the end -------------------------------------------------------------------------

    def _check_open(self) -> None:
        super()._check_open()
        if os.getpid() != self._pid:
            raise not_open(self.info.name, "open in the parent of this forked process only")

    async def release_ownership(self) -> None:
        """Hands the arena over, with all that is in it, to whoever opens it next; this tier goes on in private memory,
        with nothing in it. Waits until nobody uses a slot. For a process that saves nothing: raises TierError (EBUSY)
        while a shard is reserved. Idempotent."""
        self._check_open()
        if not self.owned:
            return
        if self._books.reserved:
            raise tier_error(errno.EBUSY, f"Tier {self.info.name}: a save is under way", path=str(self.folder))
        small_bytes = min(self._wanted_bytes, FIRST_BYTES)
        async with self.arena.standing_still():
            self._stop_remembering()
            self._write_state()
            attached = self.arena.detach(small_bytes)
            self.arena.keep_limit = self._slots(min(self._wanted_bytes, KEEP_FIRST_BYTES))
            self.why = "it was handed over"
            self.info = replace(self.info, survives="nothing", capacity_bytes=self.arena.capacity_bytes)
            self._leave_all()
        if attached is not None:
            attached.close()

    def _leave_all(self) -> None:
        """What was committed here so far is not here any more, as far as this process knows."""
        gone = {shard.checkpoint for shard in self._books.committed}
        self._records.clear()
        for checkpoint in gone:
            for shard in self._books.of(checkpoint):
                self._books.forget(shard)
        for checkpoint in gone:
            self.on_uncommitted(checkpoint)

    def _stop_remembering(self) -> None:
        task, self._remembering = self._remembering, None
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Leaves the arena, with all that is in it, to whoever opens it next. Slots that are in use after a moment stay
        this process's until it ends, and so does the arena."""
        if os.getpid() != self._pid:
            self._closed = True  # what the parent has is none of its business
        elif not self._closed:
            self._stop_remembering()
            if self.owned:
                self._write_state()
            await super().close()
