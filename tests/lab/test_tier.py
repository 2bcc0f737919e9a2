"""Tiers of the lab: they keep the contract, and take the time that their speeds say."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from stepwell.errors import CheckpointGone, TierError
from stepwell.lab.loop import Timeline
from stepwell.lab.tier import LabTier, Place, Speed
from stepwell.tiers.base import CheckpointKey, ChunkIO, RecordKey, Refused, Reservation, ShardKey, TierInfo

MIB = 1 << 20
KEY = CheckpointKey("run", "step-000000001.1-1")
SHARD = ShardKey(KEY, "model.safetensors")
RANK, MANIFEST = (RecordKey("run", f"{KEY.attempt}/{name}.json") for name in ("rank-00000", "manifest"))
T = TypeVar("T")


USUAL = Speed(4 * MIB, 8 * MIB)


def place(speed: Speed = USUAL, capacity: int | None = None) -> Place:
    return Place(TierInfo("disk", "lab", "node", "reboot", capacity), speed)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> tuple[T, float]:
    """What it answers, and the virtual seconds that it takes."""
    timeline = Timeline(random.Random(0))
    loop = timeline.new_loop("test")
    with loop.running():
        task = loop.create_task(work())
    timeline.run_until(task.done)
    return task.result(), timeline.now


def chunks(count: int) -> list[ChunkIO]:
    return [ChunkIO(SHARD, number * MIB, MIB, 0) for number in range(count)]


async def reserved(tier: LabTier, size: int = 8 * MIB) -> Reservation:
    answer = await tier.reserve(SHARD, size)
    assert isinstance(answer, Reservation)
    return answer


def test_bytes_pass_one_after_the_other_at_the_speed_of_their_way() -> None:
    async def work() -> list[float]:
        tier, loop = LabTier(place()), asyncio.get_running_loop()
        await reserved(tier)
        await asyncio.gather(*(tier.write([chunk]) for chunk in chunks(8)))
        written = loop.time()
        await asyncio.gather(*(tier.read([chunk]) for chunk in chunks(8)))
        return [written, loop.time() - written]

    assert run(work)[0] == pytest.approx([2.0, 1.0])


def test_writing_does_not_slow_down_reading_but_a_limit_holds_for_both() -> None:
    async def both(speed: Speed) -> float:
        tier = LabTier(place(speed))
        await reserved(tier)
        await asyncio.gather(tier.write(chunks(8)), tier.read(chunks(8)))
        return asyncio.get_running_loop().time()

    assert run(lambda: both(Speed(4 * MIB, 8 * MIB)))[0] == pytest.approx(2.0)
    limited = run(lambda: both(Speed(400 * MIB, 800 * MIB, limit_bytes_per_s=2 * MIB)))[0]
    assert limited == pytest.approx(7.5, abs=0.1)  # 16 chunks at 2 a second; nothing waits after the last one


def test_latency_is_of_a_chunk_and_a_record_takes_its_own_time() -> None:
    async def work() -> list[float]:
        tier, loop = LabTier(place(Speed(1 << 40, 1 << 40, None, 0.01, 0.5))), asyncio.get_running_loop()
        reservation, began = await reserved(tier), loop.time()
        await tier.write(chunks(1))
        moved = loop.time()
        await tier.commit(RANK, b"{}", shards=[reservation])
        return [moved - began, loop.time() - moved]

    assert run(work)[0] == pytest.approx([0.01, 0.5], abs=1e-5)


def test_records_are_never_replaced_and_committed_shards_never_overwritten() -> None:
    async def work() -> None:
        where = place()
        tier, other = LabTier(where), LabTier(where)
        reservation = await reserved(tier)
        assert await tier.commit(RANK, b"first", shards=[reservation])
        assert not await other.commit(RANK, b"second")
        assert await other.fetch(RANK) == b"first"
        assert await tier.commit(MANIFEST, b"{}")
        with pytest.raises(TierError, match="never overwritten"):
            await other.reserve(SHARD, 5)
        found = {(each.name, each.size_bytes) async for each in other.scan("run")}
        assert found == {("rank-00000.json", 5), ("manifest.json", 2), ("model.safetensors", 8 * MIB)}

    run(work)


def test_a_full_place_refuses_and_dropping_makes_room() -> None:
    async def work() -> int:
        where = place(capacity=10 * MIB)
        tier = LabTier(where)
        reservation = await reserved(tier)
        refused = await tier.reserve(ShardKey(KEY, "extra.safetensors"), 4 * MIB)
        assert isinstance(refused, Refused) and refused.free_bytes == 2 * MIB
        await tier.commit(RANK, b"{}", shards=[reservation])
        await tier.drop([KEY])
        assert isinstance(await tier.reserve(ShardKey(KEY, "extra.safetensors"), 10 * MIB), Reservation)
        return where.most_bytes

    assert run(work)[0] == 10 * MIB


def test_what_a_lease_keeps_can_be_read_after_it_was_dropped() -> None:
    async def work() -> None:
        tier = LabTier(place())
        await tier.commit(RANK, b"{}", shards=[await reserved(tier)])
        lease = await tier.lease([SHARD])
        await tier.drop([KEY])
        [result] = await tier.read(chunks(1))
        assert result.error is None
        await lease.close()
        [result] = await tier.read(chunks(1))
        assert result.error is not None
        with pytest.raises(CheckpointGone):
            await tier.lease([SHARD])

    run(work)


def test_errors_of_chunks_are_results() -> None:
    async def work() -> None:
        tier = LabTier(place())
        [absent] = await tier.write(chunks(1))
        await reserved(tier, MIB)
        good, past = await tier.write(chunks(2))
        assert absent.error is not None and good.error is None and past.error is not None

    run(work)


def test_what_a_killed_process_had_begun_is_debris_that_the_next_one_replaces() -> None:
    where, timeline = place(), Timeline(random.Random(0))
    first, second = timeline.new_loop("first"), timeline.new_loop("second")
    tier = LabTier(where)
    with first.running():
        first.create_task(reserved(tier))
    timeline.run_until(lambda: SHARD in where.books.reserved)
    tier.kill()
    first.kill()

    async def next_one() -> bool:
        again = LabTier(where)
        names = [found.name async for found in again.scan("run")]
        answer = await again.reserve(SHARD, 8 * MIB, resume=True)
        assert isinstance(answer, Reservation)
        return names == ["model.safetensors"] and answer.resumed

    with second.running():
        task = second.create_task(next_one())
    timeline.run_until(task.done)
    assert task.result()
