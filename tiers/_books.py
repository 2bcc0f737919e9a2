"""What a driver knows of its own shards, and whether there is room for another. No I/O, no waiting."""

from __future__ import annotations

import errno
from dataclasses import dataclass, field

from stepwell.tiers.base import CheckpointKey, Found, Refused, ShardKey, Usage

_FULL = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "quota used up",
    errno.EFBIG: "larger than a file may be here",
}
_READ_ONLY = {errno.EROFS, errno.EACCES, errno.EPERM}


@dataclass(slots=True)
class Books:
    """Every shard is reserved or committed; both books hold its logical size.

    `physical` holds what a committed shard takes on the medium. `lingering` are deleted shards that a lease
    still keeps alive: a budget counts them, the catalog does not. The medium gives room in units of `unit_bytes`.
    """

    capacity_bytes: int | None = None
    unit_bytes: int = 1
    reserved: dict[ShardKey, int] = field(default_factory=dict)
    committed: dict[ShardKey, int] = field(default_factory=dict)
    physical: dict[ShardKey, int] = field(default_factory=dict)
    lingering: dict[ShardKey, int] = field(default_factory=dict)

    def reserve(self, shard: ShardKey, size_bytes: int) -> None:
        self.forget(shard)
        self.reserved[shard] = size_bytes

    def commit(self, shard: ShardKey, physical_bytes: int | None = None) -> None:
        size_bytes = self.reserved.pop(shard)
        self.adopt(shard, size_bytes, size_bytes if physical_bytes is None else physical_bytes)

    def adopt(self, shard: ShardKey, size_bytes: int, physical_bytes: int) -> None:
        """Enters a committed shard that was found on the medium."""
        self.committed[shard] = size_bytes
        self.physical[shard] = physical_bytes

    def see(self, run: str, found: Found, physical_bytes: int) -> ShardKey:
        """Enters what a scan found, if it is a shard; reserved ones are known better here. Its key."""
        shard = ShardKey(CheckpointKey(run, found.attempt), found.name)
        is_shard = found.name and not found.name.startswith(".") and not found.name.endswith(".json")
        if is_shard and shard not in self.reserved:
            self.adopt(shard, found.size_bytes, physical_bytes)
        return shard

    def forget(self, shard: ShardKey, *, leased: bool = False) -> None:
        """Strikes a shard out. Its bytes linger if a lease keeps them."""
        size_bytes = self.reserved.pop(shard, None)
        committed_bytes = self.committed.pop(shard, None)
        physical_bytes = self.physical.pop(shard, committed_bytes or 0)
        if leased and (size_bytes is not None or committed_bytes is not None):
            self.lingering[shard] = physical_bytes if size_bytes is None else size_bytes

    def of(self, checkpoint: CheckpointKey) -> list[ShardKey]:
        return [shard for book in (self.reserved, self.committed) for shard in book if shard.checkpoint == checkpoint]

    @property
    def taken_bytes(self) -> int:
        """What counts against a capacity."""
        return sum(
            self._whole(size) for book in (self.reserved, self.physical, self.lingering) for size in book.values()
        )

    def _whole(self, size_bytes: int) -> int:
        return -(-size_bytes // self.unit_bytes) * self.unit_bytes

    def usage(self, free_bytes: int | None) -> Usage:
        if self.capacity_bytes is not None:
            left = max(0, self.capacity_bytes - self.taken_bytes)
            free_bytes = left if free_bytes is None else min(free_bytes, left)
        in_flight = sum(self.reserved.values())
        return Usage(
            logical_bytes=in_flight + sum(self.committed.values()),
            physical_bytes=self.taken_bytes,
            in_flight_bytes=in_flight,
            free_bytes=free_bytes,
        )

    def over_capacity(self, shard: ShardKey, size_bytes: int, tier: str) -> Refused | None:
        """The refusal if the configured capacity has no room for this shard, which may replace one of that name."""
        if self.capacity_bytes is None:
            return None
        replaced = sum(
            self._whole(book.get(shard, 0)) for book in (self.reserved, self.physical)
        )  # debris, for example
        free = max(0, self.capacity_bytes - self.taken_bytes + replaced)
        if self._whole(size_bytes) <= free:
            return None
        detail = f"{tier}: {size_bytes} bytes needed, {free} free of its capacity of {self.capacity_bytes}"
        return Refused("full", detail, size_bytes, free)


def refusal(number: int, path: str, size_bytes: int, free_bytes: int) -> Refused | None:
    """The refusal that an errno means, or None if it is an error.

    A quota or one full storage target refuses although much is reported free, so the message quotes that
    number as reported and draws no conclusion from it.
    """
    if number in _FULL:
        reason = f"{_FULL[number]} ({errno.errorcode[number]})"
        detail = f"{reason}: {path}: {size_bytes} bytes refused, {free_bytes} reported free"
        return Refused("full", detail, size_bytes, free_bytes)
    if number in _READ_ONLY:
        return Refused("read-only", f"{path}: {errno.errorcode[number]}", size_bytes, free_bytes)
    return None


def is_full(number: int) -> bool:
    return number in _FULL
