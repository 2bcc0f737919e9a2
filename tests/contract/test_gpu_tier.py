"""The gpu driver keeps the contract, on a driver that stands for a GPU and with slots of one page."""

from __future__ import annotations

import ctypes

import pytest

from stepwell.gpus import Gpus
from stepwell.policies.evict import LRU
from stepwell.tiers.base import RecordKey, ShardKey, Tier
from stepwell.tiers.gpu import GpuTier
from tests.contract.suite import Place, TierContract
from tests.fakecuda import FakeCuda, build

SLOT_BYTES = 4096
DEFAULT_BYTES = 256 << 20


class _Tier(GpuTier):
    """Takes the engines of its GPU along when it is closed: each scenario has an event loop of its own."""

    gpus: Gpus

    async def close(self) -> None:
        await super().close()
        self.gpus.close()


class GpuPlace(Place):
    persistent = False
    resumes = False

    def __init__(self, driver: FakeCuda) -> None:
        self.driver = driver

    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        gpus = Gpus(self.driver.path, stream=lambda gpu: 0, kernels=lambda engine, index: None)
        self.tier = _Tier(
            LRU(), capacity_bytes or DEFAULT_BYTES, chunk_bytes=SLOT_BYTES, headroom_bytes=0, device=gpus.device
        )
        self.tier.gpus = gpus
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


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(build(tmp_path_factory.mktemp("fakecuda")))


class TestGpu(TierContract):
    @pytest.fixture
    def place(self, driver: FakeCuda) -> Place:
        return GpuPlace(driver)
