"""The simulated tier keeps the drivers' contract: the simulation's findings are worth as much as that."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import pytest

from stepwell.tiers.base import RecordKey, ShardKey, Tier
from tests.contract.suite import Place, TierContract
from tests.sim.medium import Medium, Record, Token
from tests.sim.tier import SimTier
from tests.sim.weather import Calm

GRAIN = 4096


class RealMemory:
    """Blocks whose tokens are their bytes."""

    def load(self, address: int, length: int) -> Sequence[Token]:
        data = ctypes.string_at(address, length)
        return [data[at : at + GRAIN] for at in range(0, length, GRAIN)]

    def store(self, address: int, tokens: Sequence[Token], length: int) -> None:
        data = b"".join(token for token in tokens if isinstance(token, bytes))[:length]
        ctypes.memmove(address, data, len(data))


class SimPlace(Place):
    def __init__(self) -> None:
        self.medium = Medium("sim", GRAIN)

    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        return SimTier(self.medium, RealMemory(), Calm(), random.Random(1), capacity_bytes=capacity_bytes)

    def peek(self, shard: ShardKey) -> bytes | None:
        file = self.medium.files.get(shard)
        if file is None:
            return None
        blocks = (file.blocks.get(at, b"") for at in range(-(-file.size // GRAIN)))
        return b"".join(block for block in blocks if isinstance(block, bytes))

    def poke(self, shard: ShardKey, data: bytes) -> None:
        blocks: list[Token] = [data[at : at + GRAIN] for at in range(0, len(data), GRAIN)]
        self.medium.write(shard, self.medium.files[shard], 0, blocks)

    def remove(self, shard: ShardKey) -> None:
        self.medium.remove(shard, durable=True)

    def peek_record(self, record: RecordKey) -> bytes | None:
        there = self.medium.records.get(record)
        return there.data if isinstance(there, Record) else None

    def reality(self, run: str) -> set[tuple[str, str, int]]:
        found = [each for folder in ("", *self.medium.folders(run)) for each in self.medium.listing(run, folder)]
        return {(each.attempt, each.name, each.size_bytes) for each in found}


class TestSimulated(TierContract):
    @pytest.fixture
    def place(self) -> Place:
        return SimPlace()
