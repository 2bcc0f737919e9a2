"""The in-memory driver keeps the contract, bare and inside each wrapper."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from stepwell.tiers.base import RecordKey, ShardKey, Tier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Event, Faulty, Throttled, Traced, Wrapper
from tests.contract.suite import Place, TierContract


class MemoryPlace(Place):
    persistent = False

    def __init__(self, wrap: Callable[[Tier], Tier] = lambda tier: tier) -> None:
        self.wrap = wrap
        self.tier = MemoryTier()

    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        self.tier = MemoryTier(capacity_bytes=capacity_bytes)
        return self.wrap(self.tier)

    def peek(self, shard: ShardKey) -> bytes | None:
        data = self.tier._shards.get(shard)
        return None if data is None else bytes(data)

    def poke(self, shard: ShardKey, data: bytes) -> None:
        self.tier._shards[shard][: len(data)] = data

    def remove(self, shard: ShardKey) -> None:
        del self.tier._shards[shard]
        self.tier._books.forget(shard)

    def peek_record(self, record: RecordKey) -> bytes | None:
        return self.tier._records.get(record)

    def reality(self, run: str) -> set[tuple[str, str, int]]:
        shards = self.tier._shards.items()
        there = {(key.checkpoint.attempt, key.name, len(data)) for key, data in shards if key.checkpoint.run == run}
        for record, data in self.tier._records.items():
            if record.run == run:
                folder, _, name = record.name.rpartition("/")
                there.add((folder, name, len(data)))
        return there


class TestMemory(TierContract):
    @pytest.fixture
    def place(self) -> Place:
        return MemoryPlace()


class TestWrapped(TierContract):
    """Wrappers that have nothing to do change nothing."""

    @pytest.fixture(params=["plain", "throttled", "faulty", "traced", "all"])
    def place(self, request: pytest.FixtureRequest) -> Place:
        events: list[Event] = []
        wrappers: dict[str, Callable[[Tier], Tier]] = {
            "plain": Wrapper,
            "throttled": lambda tier: Throttled(tier, 1e9, lambda: 0.0, lambda seconds: asyncio.sleep(0)),
            "faulty": lambda tier: Faulty(tier, []),
            "traced": lambda tier: Traced(tier, events.append),
        }

        def wrap(tier: Tier) -> Tier:
            for name, wrapper in wrappers.items():
                if request.param in (name, "all"):
                    tier = wrapper(tier)
            return tier

        return MemoryPlace(wrap)
