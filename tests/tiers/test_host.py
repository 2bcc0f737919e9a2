"""The host tier where the arena does not play along: memory that is short, busy, or hung on to."""

from __future__ import annotations

import asyncio
import errno

import pytest

from stepwell.errors import TierFull, TierUnavailable
from stepwell.native import Region
from stepwell.policies.evict import LRU
from stepwell.tiers import _arenatier
from stepwell.tiers.base import ChunkIO, RecordKey, Reservation
from stepwell.tiers.host import HostTier, Priority
from tests.contract.suite import MANIFEST, SHARD, Memory, data_of, get
from tests.tiers.helpers import on

SLOT = 8192
SLOTS = 8


class Scarce(Region):
    """Of a system that has so little memory left."""

    def populate(self, offset: int, length: int) -> None:
        if offset + length > 2 * SLOT:
            raise OSError(errno.ENOMEM, "no memory")
        super().populate(offset, length)


def tier_of(memory: type[Region] = Region, *, ahead: bool = True) -> HostTier:
    return HostTier(LRU(), SLOTS * SLOT, chunk_bytes=SLOT, memory=memory, background=False, ahead=ahead)


def halves(data: bytes) -> tuple[Memory, list[ChunkIO]]:
    memory = Memory(SLOT, data)
    return memory, [ChunkIO(SHARD, at, SLOT // 2, memory.address + at) for at in (0, SLOT // 2)]


def test_two_writes_into_one_slot_wait_for_memory_together() -> None:
    async def scenario(tier: HostTier) -> None:
        reservation = await tier.reserve(SHARD, SLOT)
        assert isinstance(reservation, Reservation)
        busy = [await tier.arena.acquire(Priority.RESTORE) for _ in range(SLOTS)]
        _, chunks = memory = halves(data_of(SLOT))
        writing = [asyncio.ensure_future(tier.write([chunk])) for chunk in chunks]
        for _ in range(4):
            await asyncio.sleep(0)
        for slot in busy:
            tier.arena.release(slot)
        for [result] in await asyncio.gather(*writing):
            assert result.error is None
        assert memory and await tier.commit(MANIFEST, b"{}", shards=[reservation])
        assert await get(tier, SHARD, SLOT) == data_of(SLOT)
        assert tier.arena.in_use == 0 and tier.arena.cached_bytes == SLOT

    on(tier_of(), scenario)


def test_a_chunk_that_is_filled_in_place_is_not_written() -> None:
    async def scenario(tier: HostTier) -> None:
        await tier.reserve(SHARD, SLOT)
        slot = await tier.arena.acquire(Priority.SNAPSHOT, kept=True)
        assert tier.arena.place(slot, SHARD, 0, SLOT)
        _, chunks = memory = halves(data_of(SLOT))
        for result in await tier.write(chunks):
            assert memory and result.error is not None and result.error.errno == errno.EBUSY
        tier.arena.filled(slot)
        tier.arena.release(slot)
        assert all(result.error is None for result in await tier.write(chunks))
        assert await get(tier, SHARD, SLOT) == data_of(SLOT)

    on(tier_of(), scenario)


def test_chunks_without_memory_fail_one_by_one() -> None:
    async def scenario(tier: HostTier) -> None:
        size = 4 * SLOT
        reservation = await tier.reserve(SHARD, size)
        assert isinstance(reservation, Reservation)
        memory = Memory(size, data_of(size))
        chunks = [ChunkIO(SHARD, at, SLOT, memory.address + at) for at in range(0, size, SLOT)]
        results = await tier.write(chunks)
        assert len(results) == 4 and all(isinstance(result.error, TierFull) for result in results[2:])
        with pytest.raises(TierFull):
            await tier.commit(MANIFEST, b"{}", shards=[reservation])

    on(tier_of(Scarce, ahead=False), scenario)


def test_a_write_that_close_overtakes_fails_by_name() -> None:
    async def scenario(tier: HostTier) -> None:
        await tier.reserve(SHARD, SLOT)
        busy = [await tier.arena.acquire(Priority.RESTORE) for _ in range(SLOTS)]
        memory, chunks = halves(data_of(SLOT))
        writing = asyncio.ensure_future(tier.write(chunks[:1]))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(tier.close())
        [result] = await writing
        assert memory and isinstance(result.error, TierUnavailable) and not result.error.retry
        for slot in busy:
            tier.arena.release(slot)
        await closing

    on(tier_of(), scenario)


@pytest.mark.parametrize("ahead", [True, False])
def test_a_capacity_is_taken_at_the_start_or_when_it_is_needed(ahead: bool) -> None:
    async def scenario(tier: HostTier) -> None:
        assert tier.arena.ready_bytes == (SLOTS * SLOT if ahead else 0)
        tier.arena.release(await tier.arena.acquire(Priority.RESTORE))

    on(tier_of(ahead=ahead), scenario)


def test_memory_in_use_outlives_a_close_that_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    abandoned: list[object] = []
    monkeypatch.setattr(_arenatier, "_abandoned", abandoned)

    async def scenario(tier: HostTier) -> None:
        slot = await tier.arena.acquire(Priority.RESTORE)
        closing = asyncio.ensure_future(tier.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert abandoned == [tier.arena]
        tier.arena.view(slot, SLOT)[:] = bytes(SLOT)  # a device that hangs may still do so

    on(tier_of(), scenario)
    abandoned.clear()
    on(tier_of(), lambda tier: tier.close())
    assert not abandoned


def test_what_is_dropped_loses_its_manifest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shared memory keeps records through a kill: one in between must leave nothing that looks committed."""
    struck: list[str] = []
    rank = RecordKey("run", f"{SHARD.checkpoint.attempt}/rank-00000.json")

    async def scenario(tier: HostTier) -> None:
        await tier.commit(rank, b"{}")
        await tier.commit(MANIFEST, b"{}")
        strike = tier._strike

        def noted(record: RecordKey) -> None:
            struck.append(record.name)
            strike(record)

        monkeypatch.setattr(tier, "_strike", noted)
        await tier.drop([SHARD.checkpoint])

    on(tier_of(), scenario)
    assert struck == [MANIFEST.name, rank.name]
