"""The base of drivers that keep all in this process's memory: records, and books of which shards are there.

Where the bytes of shards lie is each driver's own.
"""

from __future__ import annotations

import errno
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any

from stepwell.errors import CheckpointGone, TierError
from stepwell.tiers._books import Books
from stepwell.tiers._paths import check_checkpoint, check_record, check_run, check_shard
from stepwell.tiers.base import (
    CheckpointKey,
    Found,
    RecordKey,
    Reservation,
    ShardKey,
    Tier,
    TierInfo,
    not_open,
    tier_error,
)


def _is_manifest(record: RecordKey) -> bool:
    return record.name.rpartition("/")[2].startswith("manifest")


class InMemory(Tier):
    """All that needs no look at a shard's bytes: records, commits, deletion, listing."""

    def __init__(self, info: TierInfo, books: Books) -> None:
        self.info = info
        self._books = books
        self._records: dict[RecordKey, bytes] = {}
        self._closed = False

    @abstractmethod
    def _remove(self, shard: ShardKey) -> None:
        """Strikes a shard out of the books and frees its bytes, if it is there."""

    def _check_whole(self, reservation: Reservation) -> None:
        """Raises TierError if a reserved shard cannot be committed."""

    def _store(self, record: RecordKey, data: bytes, shards: Sequence[Reservation] = ()) -> None:
        """Keeps a record, which commits these shards. Raises TierError; nothing has changed then."""
        self._records[record] = data

    def _strike(self, record: RecordKey) -> None:
        """Keeps it no more. Idempotent."""
        self._records.pop(record, None)

    def _check_open(self) -> None:
        if self._closed:
            raise not_open(self.info.name, "closed")

    def _error(self, number: int, what: str, shard: ShardKey, **where: Any) -> TierError:
        return tier_error(number, f"Tier {self.info.name}: {what}", key=str(shard), **where)

    # -- going down ----------------------------------------------------------------------

    def _check_new(self, shard: ShardKey, size_bytes: int) -> None:
        """Raises what `reserve` raises."""
        self._check_open()
        check_shard(shard)
        if shard in self._books.committed:
            raise self._error(errno.EEXIST, "a committed shard is never overwritten", shard)
        if size_bytes < 0:
            raise ValueError(f"size_bytes must not be negative: {size_bytes}")

    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        self._check_open()
        check_record(record)
        if record in self._records:
            return False
        for each in shards:
            if self._books.reserved.get(each.shard) != each.size_bytes:
                raise self._error(errno.EINVAL, "cannot commit: the shard is not reserved", each.shard)
            self._check_whole(each)
        if not shards:
            self._check_something_to_commit(record)
        self._store(record, bytes(data), shards)
        for each in shards:
            self._books.commit(each.shard)
        return True

    def _check_something_to_commit(self, record: RecordKey) -> None:
        folder = record.name.rpartition("/")[0]
        others = self._records_of(CheckpointKey(record.run, folder))
        if _is_manifest(record) and not any(each.name.startswith(f"{folder}/rank-") for each in others):
            raise tier_error(errno.ENOENT, f"Tier {self.info.name}: what it commits is gone", key=str(record))

    async def beat(self, record: RecordKey, data: bytes) -> None:
        self._check_open()
        self._store(check_record(record), bytes(data))

    async def abort(self, reservation: Reservation) -> None:
        self._check_open()
        if reservation.shard in self._books.reserved:
            self._remove(reservation.shard)

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        self._check_open()
        for key in what:
            if isinstance(key, RecordKey):
                self._strike(check_record(key))
            elif isinstance(key, ShardKey):
                self._remove(check_shard(key))
            else:
                self._drop_checkpoint(check_checkpoint(key))

    def _drop_checkpoint(self, checkpoint: CheckpointKey) -> None:
        self._drop_records(checkpoint)
        for shard in self._books.of(checkpoint):
            self._remove(shard)

    def _drop_records(self, checkpoint: CheckpointKey) -> None:
        """The manifest first: where records outlive a kill, what is left must not look committed."""
        for record in sorted(self._records_of(checkpoint), key=lambda each: not _is_manifest(each)):
            self._strike(record)

    def _records_of(self, checkpoint: CheckpointKey) -> list[RecordKey]:
        inside = f"{checkpoint.attempt}/"
        return [each for each in self._records if each.run == checkpoint.run and each.name.startswith(inside)]

    # -- coming up -----------------------------------------------------------------------

    async def fetch(self, record: RecordKey) -> bytes | None:
        self._check_open()
        return self._records.get(check_record(record))

    async def scan(self, run: str) -> AsyncIterator[Found]:
        self._check_open()
        check_run(run)
        found = []
        for record, data in self._records.items():
            if record.run == run:
                folder, _, name = record.name.rpartition("/")
                found.append(Found(folder, name, len(data)))
        for book in (self._books.reserved, self._books.committed):
            for shard, size_bytes in book.items():
                if shard.checkpoint.run == run:
                    found.append(Found(shard.checkpoint.attempt, shard.name, size_bytes))
        for each in found:
            yield each

    def _missing(self, shard: ShardKey) -> CheckpointGone | TierError:
        """Why a shard cannot be leased."""
        manifest = f"{shard.checkpoint.attempt}/manifest"
        if any(record.run == shard.checkpoint.run and record.name.startswith(manifest) for record in self._records):
            return self._error(errno.ENOENT, "a shard of a committed checkpoint is missing", shard)
        return CheckpointGone(f"Tier {self.info.name}: the checkpoint is gone", key=str(shard))
