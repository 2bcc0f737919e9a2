"""The host driver keeps the contract, on real memory and with slots of one page."""

from __future__ import annotations

import ctypes

import pytest

from stepwell.policies.evict import LRU
from stepwell.tiers._arenatier import ArenaTier
from stepwell.tiers.base import RecordKey, ShardKey, Tier
from stepwell.tiers.host import Arena, HostTier
from tests.contract.suite import Place, TierContract

SLOT_BYTES = 4096


def arena_bytes(kept_bytes: int) -> int:
    """The capacity of an arena that keeps at most so much beside its staging reserve."""
    count = kept_bytes // SLOT_BYTES
    while Arena(count * SLOT_BYTES, LRU(), slot_bytes=SLOT_BYTES).kept_max * SLOT_BYTES < kept_bytes:
        count += 1
    return count * SLOT_BYTES


class HostPlace(Place):
    persistent = False
    resumes = False

    def __init__(self, background: bool) -> None:
        self.background = background
        self.tier: ArenaTier = HostTier(LRU())

    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        capacity = None if capacity_bytes is None else arena_bytes(capacity_bytes)
        self.tier = HostTier(LRU(), capacity, chunk_bytes=SLOT_BYTES, background=self.background)
        return self.tier

    def size(self, shard: ShardKey) -> int | None:
        books = self.tier._books
        return books.committed.get(shard, books.reserved.get(shard))

    def slots(self, shard: ShardKey) -> dict[int, int]:
        """Number of chunk -> address, from the arena's own table."""
        return {number: slot.address for number, slot in self.tier.arena._of(shard).items()}

    def peek(self, shard: ShardKey) -> bytes | None:
        size = self.size(shard)
        if size is None:
            assert not self.slots(shard), "chunks of a shard that is in no book"
            return None
        slots = self.slots(shard)
        return b"".join(ctypes.string_at(slots[number], SLOT_BYTES) for number in sorted(slots))[:size]

    def poke(self, shard: ShardKey, data: bytes) -> None:
        for number, address in self.slots(shard).items():
            part = data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
            ctypes.memmove(address, part, len(part))

    def remove(self, shard: ShardKey) -> None:
        self.tier._books.forget(shard)
        self.tier.arena.drop(shard)

    def peek_record(self, record: RecordKey) -> bytes | None:
        return self.tier._records.get(record)

    def reality(self, run: str) -> set[tuple[str, str, int]]:
        books = {**self.tier._books.reserved, **self.tier._books.committed}
        there = {(key.checkpoint.attempt, key.name, size) for key, size in books.items() if key.checkpoint.run == run}
        for record, data in self.tier._records.items():
            if record.run == run:
                folder, _, name = record.name.rpartition("/")
                there.add((folder, name, len(data)))
        return there


class TestHost(TierContract):
    @pytest.fixture(params=["background", "at once"])
    def place(self, request: pytest.FixtureRequest) -> Place:
        return HostPlace(request.param == "background")
