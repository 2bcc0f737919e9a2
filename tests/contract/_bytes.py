"""Bytes: what is written is what is there and what is read, chunk by chunk, each with its tickets."""

from __future__ import annotations

import asyncio
import errno
import random

import pytest

from stepwell.errors import TierError
from stepwell.native import Ticket
from stepwell.tiers.base import ChunkIO, Reservation, ShardKey, Tier
from tests.contract._place import (
    CHECKPOINT,
    LENGTHS,
    MANIFEST,
    OTHER,
    PAGE,
    SHARD,
    Memory,
    Place,
    chunks_of,
    data_of,
    get,
    perform,
    save,
)


class BytesContract:
    """`write` and `read`, and the tickets of their chunks."""

    # -- bytes ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", LENGTHS)
    def test_what_is_written_is_there_and_exactly_as_long(self, place: Place, size: int) -> None:
        async def scenario(tier: Tier) -> None:
            data = data_of(size)
            await save(tier, SHARD, data)
            assert place.peek(SHARD) == data
            assert await get(tier, SHARD, size) == data

        perform(place, scenario)

    def test_what_others_put_there_is_read(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, bytes(10_000))
            place.poke(SHARD, data_of(10_000))
            assert await get(tier, SHARD, 10_000, PAGE) == data_of(10_000)

        perform(place, scenario)

    def test_chunks_come_in_any_order_and_in_many_batches(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            size = (1 << 20) + 77
            data, memory = data_of(size), Memory(size, data_of(size))
            chunks = chunks_of(SHARD, size, memory, 64 << 10)
            random.Random(1).shuffle(chunks)
            reservation = await tier.reserve(SHARD, size)
            assert isinstance(reservation, Reservation)
            halves = await asyncio.gather(tier.write(chunks[:7]), tier.write(chunks[7:]))
            assert all(result.error is None for half in halves for result in half)
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
            assert place.peek(SHARD) == data
            random.Random(2).shuffle(chunks)
            back = Memory(size)
            again = [ChunkIO(SHARD, each.offset, each.length, back.address + each.offset) for each in chunks]
            assert all(result.error is None for result in await tier.read(again))
            assert back.take(size) == data

        perform(place, scenario)

    def test_shards_share_a_batch_and_a_commit(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            first, second = data_of(5000), data_of(6000)
            reservations = [await tier.reserve(SHARD, 5000), await tier.reserve(OTHER, 6000)]
            memories = Memory(5000, first), Memory(6000, second)
            results = await tier.write(chunks_of(SHARD, 5000, memories[0]) + chunks_of(OTHER, 6000, memories[1]))
            assert [result.error for result in results] == [None, None]
            assert await tier.commit(MANIFEST, b"{}", shards=[r for r in reservations if isinstance(r, Reservation)])
            assert (place.peek(SHARD), place.peek(OTHER)) == (first, second)

        perform(place, scenario)

    def test_a_failed_chunk_fails_alone(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(5000))
            memory = Memory(20_000)
            absent = ShardKey(CHECKPOINT, "absent.safetensors")
            good, past, gone = await tier.read(
                [
                    ChunkIO(SHARD, 4096, 904, memory.address),
                    ChunkIO(SHARD, 4096, 905, memory.address + PAGE),
                    ChunkIO(absent, 0, 100, memory.address + 2 * PAGE),
                ]
            )
            assert good.error is None and memory.take(904) == data_of(5000)[4096:]
            assert isinstance(past.error, TierError) and "truncated" in str(past.error) and "4096" in str(past.error)
            assert isinstance(gone.error, TierError) and gone.error.errno == errno.ENOENT
            assert "absent.safetensors" in str(gone.error)

        perform(place, scenario)

    def test_nothing_is_written_outside_of_a_reservation(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            memory = Memory(10_000, data_of(10_000))
            reservation = await tier.reserve(SHARD, 5000)
            assert isinstance(reservation, Reservation)
            inside, past, unknown = await tier.write(
                [
                    ChunkIO(SHARD, 0, 5000, memory.address),
                    ChunkIO(SHARD, 4096, 905, memory.address),
                    ChunkIO(OTHER, 0, 100, memory.address),
                ]
            )
            assert inside.error is None
            assert isinstance(past.error, TierError) and isinstance(unknown.error, TierError)
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
            assert place.peek(SHARD) == data_of(10_000)[:5000]
            late = await tier.write([ChunkIO(SHARD, 0, 100, memory.address + PAGE)])
            assert late[0].error is not None and place.peek(SHARD) == data_of(10_000)[:5000]

        perform(place, scenario)

    # -- tickets -------------------------------------------------------------------------------------

    def test_tickets(self, place: Place) -> None:
        """A linked tier waits for `after` and fires `signal`; another does not even look at them."""

        async def scenario(tier: Tier) -> None:
            reservation = await tier.reserve(SHARD, 5000)
            assert isinstance(reservation, Reservation)
            memory, after, signal = Memory(5000, data_of(5000)), Ticket(), Ticket()
            writing = asyncio.ensure_future(tier.write([ChunkIO(SHARD, 0, 5000, memory.address, after, signal)]))
            if tier.info.linked:
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not writing.done() and signal.state == "pending"
                after.fire()
            assert [result.error for result in await writing] == [None]
            assert signal.state == ("done" if tier.info.linked else "pending")
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
            assert place.peek(SHARD) == data_of(5000)

        perform(place, scenario)

    def test_a_failed_chunk_fails_its_signal(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            if not tier.info.linked:
                return
            await save(tier, SHARD, data_of(100))
            memory, signals = Memory(10_000), [Ticket() for _ in range(4)]
            await tier.read([ChunkIO(SHARD, 0, 101, memory.address, None, signals[0])])
            await tier.read([ChunkIO(OTHER, 0, 10, memory.address, None, signals[1])])
            await tier.write([ChunkIO(OTHER, 0, 10, memory.address, None, signals[2])])
            assert isinstance(await tier.reserve(OTHER, 100), Reservation)
            failed = Ticket()
            failed.fire(False)
            [result] = await tier.write([ChunkIO(OTHER, 0, 10, memory.address, failed, signals[3])])
            assert result.error is not None
            assert [signal.state for signal in signals] == ["failed"] * 4

        perform(place, scenario)
