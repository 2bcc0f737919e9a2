"""Resuming: a shard that was reserved, written in part and never committed is kept when asked, else replaced."""

from __future__ import annotations

import asyncio

import pytest

from stepwell.errors import TierError
from stepwell.tiers.base import ChunkIO, Reservation, Tier
from tests.contract._place import (
    MANIFEST,
    PAGE,
    SHARD,
    Memory,
    Place,
    chunks_of,
    data_of,
    get,
    perform,
    put,
    save,
)


async def begin(tier: Tier, data: bytes, written: int) -> Reservation:
    """Reserves SHARD and writes its first bytes."""
    reservation = await tier.reserve(SHARD, len(data))
    assert isinstance(reservation, Reservation) and not reservation.resumed
    await write(tier, data, 0, written)
    return reservation


async def write(tier: Tier, data: bytes, offset: int, length: int) -> None:
    memory = Memory(length, data[offset : offset + length])
    [result] = await tier.write([ChunkIO(SHARD, offset, length, memory.address)])
    assert result.error is None


class ResumeContract:
    """`reserve` with `resume`, and reading what is reserved."""

    def test_a_resumed_shard_keeps_its_bytes(self, place: Place) -> None:
        data = data_of(20_000)

        async def scenario(tier: Tier) -> None:
            await begin(tier, data, 3 * PAGE)
            again = await tier.reserve(SHARD, 20_000, resume=True)
            assert isinstance(again, Reservation) and again.resumed == place.resumes
            assert tier.usage().in_flight_bytes == 20_000
            if again.resumed:
                assert (await get(tier, SHARD, 20_000, PAGE))[: 3 * PAGE] == data[: 3 * PAGE]
                await write(tier, data, 3 * PAGE, 20_000 - 3 * PAGE)
            else:
                await write(tier, data, 0, 20_000)
            assert await tier.commit(MANIFEST, b"{}", shards=[again])
            assert place.peek(SHARD) == data == await get(tier, SHARD, 20_000)

        perform(place, scenario)

    def test_another_process_resumes(self, place: Place) -> None:
        if not (place.persistent and place.resumes):
            return
        data = data_of(20_000)

        async def first(tier: Tier) -> None:
            await begin(tier, data, 20_000)  # with the padding of its last page

        async def second(tier: Tier) -> None:
            again = await tier.reserve(SHARD, 20_000, resume=True)
            assert isinstance(again, Reservation) and again.resumed
            assert await get(tier, SHARD, 20_000, PAGE) == data
            assert await tier.commit(MANIFEST, b"{}", shards=[again])
            assert place.peek(SHARD) == data

        perform(place, first)
        assert place.peek(SHARD) is not None
        perform(place, second)

    @pytest.mark.parametrize("size", [1, PAGE, 20_000])
    def test_without_resume_it_is_replaced(self, place: Place, size: int) -> None:
        async def scenario(tier: Tier) -> None:
            await begin(tier, data_of(size), size)
            again = await tier.reserve(SHARD, size)
            assert isinstance(again, Reservation) and not again.resumed
            assert place.peek(SHARD) != data_of(size)
            await write(tier, data_of(size, 1), 0, size)
            assert await tier.commit(MANIFEST, b"{}", shards=[again])
            assert place.peek(SHARD) == data_of(size, 1)

        perform(place, scenario)

    @pytest.mark.parametrize("size", [1, 19_999, 20_001, 50_000])
    def test_of_another_size_it_is_replaced(self, place: Place, size: int) -> None:
        async def scenario(tier: Tier) -> None:
            await begin(tier, data_of(20_000), 20_000)
            again = await tier.reserve(SHARD, size, resume=True)
            assert isinstance(again, Reservation) and not again.resumed and again.size_bytes == size
            await write(tier, data_of(size, 1), 0, size)
            assert await tier.commit(MANIFEST, b"{}", shards=[again])
            assert place.peek(SHARD) == data_of(size, 1)

        perform(place, scenario)

    def test_where_nothing_is_there_to_resume(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            reservation = await tier.reserve(SHARD, 5000, resume=True)
            assert isinstance(reservation, Reservation) and not reservation.resumed
            await tier.abort(reservation)
            again = await tier.reserve(SHARD, 5000, resume=True)  # an abort leaves nothing
            assert isinstance(again, Reservation) and not again.resumed

        perform(place, scenario)

    def test_a_committed_shard_is_not_resumed(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(5000))
            with pytest.raises(TierError):
                await tier.reserve(SHARD, 5000, resume=True)
            assert tier.usage().logical_bytes == 5000
            assert place.peek(SHARD) == data_of(5000) == await get(tier, SHARD, 5000)

        perform(place, scenario)

    def test_what_was_kept_takes_no_more_room(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await begin(tier, data_of(64 << 10), 64 << 10)
            assert isinstance(await tier.reserve(SHARD, 64 << 10, resume=True), Reservation)
            assert tier.usage().physical_bytes <= 64 << 10

        perform(place, scenario, capacity_bytes=100 << 10)

    def test_a_cancelled_resumption_loses_nothing(self, place: Place) -> None:
        if not (place.persistent and place.resumes):
            return
        data = data_of(20_000)

        async def scenario(tier: Tier) -> None:
            await begin(tier, data, 20_000)
            for turns in range(12):
                task = asyncio.ensure_future(tier.reserve(SHARD, 20_000, resume=True))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                await asyncio.wait([task])
            again = await tier.reserve(SHARD, 20_000, resume=True)
            assert isinstance(again, Reservation) and again.resumed
            assert await get(tier, SHARD, 20_000) == data

        perform(place, scenario)

    def test_reserved_shards_are_read_while_they_are_written(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            data = data_of(1 << 20)
            reservation = await put(tier, SHARD, data, 64 << 10)
            memory = Memory(1 << 20, data)
            second_half = [chunk for chunk in chunks_of(SHARD, 1 << 20, memory, PAGE) if chunk.offset >= 512 << 10]
            writing = asyncio.ensure_future(tier.write(second_half))
            back = Memory(512 << 10)
            reading = [chunk for chunk in chunks_of(SHARD, 512 << 10, back, PAGE)]
            assert all(result.error is None for result in await tier.read(reading))
            assert back.take(512 << 10) == data[: 512 << 10]
            await writing
            assert await get(tier, SHARD, 1 << 20, PAGE) == data
            assert await tier.commit(MANIFEST, b"{}", shards=[reservation])

        perform(place, scenario)

    def test_a_read_past_the_reserved_size_is_an_error(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await begin(tier, data_of(5000), 5000)
            memory = Memory(8192)
            [result] = await tier.read([ChunkIO(SHARD, PAGE, 5000 - PAGE + 1, memory.address)])
            assert isinstance(result.error, TierError) and "truncated" in str(result.error)

        perform(place, scenario)
