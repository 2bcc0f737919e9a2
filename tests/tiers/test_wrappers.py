"""Throttle, faults and trace, around the in-memory driver and one that is linked."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import TierError, TierFull, TierUnavailable
from stepwell.native import Ticket
from stepwell.tiers.base import ChunkIO, RecordKey, Reservation, Tier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Event, Fault, Faulty, Throttled, Traced
from tests.contract.suite import MANIFEST, NEW, SHARD, Memory, chunks_of, data_of, get, put, save
from tests.tiers.helpers import disk, on


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


# -- throttle ------------------------------------------------------------------------------------------


def test_a_throttle_lets_so_many_bytes_a_second_pass() -> None:
    clock = Clock()

    async def scenario(tier: Tier) -> None:
        await save(tier, SHARD, data_of(10 << 20))
        assert clock.now - 100 == pytest.approx(9)  # the first MiB passes at once, the last after nine
        clock.now += 1000  # a pause is not saved up
        begin = clock.now
        assert await get(tier, SHARD, 10 << 20) == data_of(10 << 20)
        assert clock.now - begin == pytest.approx(9)

    on(Throttled(MemoryTier(), 1 << 20, clock, clock.sleep), scenario)


def test_callers_share_a_throttle() -> None:
    clock = Clock()

    async def scenario(tier: Tier) -> None:
        await asyncio.gather(put(tier, SHARD, data_of(2 << 20)), put(tier, NEW, data_of(2 << 20)))
        assert sum(clock.slept) >= 3

    on(Throttled(MemoryTier(), 1 << 20, clock, clock.sleep), scenario)


def test_a_throttle_needs_a_rate() -> None:
    with pytest.raises(ValueError, match="positive"):
        Throttled(MemoryTier(), 0, Clock(), Clock().sleep)


def test_a_cancelled_throttled_write_tells_those_who_wait(tmp_path: Path) -> None:
    async def forever(seconds: float) -> None:
        await asyncio.Event().wait()

    async def scenario(tier: Tier) -> None:
        assert isinstance(await tier.reserve(SHARD, 8192), Reservation)
        memory, signals = Memory(8192), [Ticket(), Ticket()]
        chunks = [ChunkIO(SHARD, 4096 * i, 4096, memory.address, None, signals[i]) for i in range(2)]
        writing = asyncio.ensure_future(tier.write(chunks))
        for _ in range(5):
            await asyncio.sleep(0)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        assert [signal.state for signal in signals] == ["done", "failed"]

    on(Throttled(disk(tmp_path), 1000, lambda: 0.0, forever), scenario)


# -- faults --------------------------------------------------------------------------------------------


def memory_of(faulty: Faulty) -> bytes:
    assert isinstance(faulty.tier, MemoryTier)
    return bytes(faulty.tier._shards[SHARD])


async def write(tier: Tier, size: int = 16_384) -> list[TierError | None]:
    assert isinstance(await tier.reserve(SHARD, size), Reservation)
    memory = Memory(size, data_of(size))
    return [result.error for result in await tier.write(chunks_of(SHARD, size, memory, 8192))]


def test_the_nth_write_fails_and_leaves_nothing() -> None:
    async def scenario(tier: Faulty) -> None:
        first, second = await write(tier)
        assert first is None and isinstance(second, TierFull) and second.errno == errno.ENOSPC
        assert memory_of(tier) == data_of(16_384)[:8192] + bytes(8192)
        assert [fault.kind for fault in tier.hit] == ["error"]

    on(Faulty(MemoryTier(), [Fault("write", 2, errno=errno.ENOSPC)]), scenario)


def test_a_fault_lasts_as_long_as_planned() -> None:
    async def scenario(tier: Faulty) -> None:
        answers = []
        for _ in range(5):
            try:
                answers.append(await tier.fetch(MANIFEST))
            except TierUnavailable:
                answers.append(b"failed")
        assert answers == [None, b"failed", b"failed", b"failed", None]

    on(Faulty(MemoryTier(), [Fault("fetch", 2, errno=errno.ESTALE, times=3)]), scenario)


def test_a_torn_write_leaves_its_first_half() -> None:
    async def scenario(tier: Faulty) -> None:
        first, second = await write(tier)
        assert isinstance(first, TierError) and second is None
        assert memory_of(tier) == data_of(16_384)[:4096] + bytes(4096) + data_of(16_384)[8192:]

    on(Faulty(MemoryTier(), [Fault("write", 1, "torn")]), scenario)


def differing_bits(one: bytes, other: bytes) -> int:
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("linked", [False, True], ids=["memory", "file"])
def test_a_flipped_bit_on_the_tier_reports_success(tmp_path: Path, linked: bool) -> None:
    async def flipped(seed: int) -> bytes:
        async def scenario(tier: Tier) -> bytes:
            assert await write(tier) == [None, None]
            once = await get(tier, SHARD, 16_384)
            assert once == await get(tier, SHARD, 16_384) and differing_bits(once, data_of(16_384)) == 1
            return once

        tier = Faulty(disk(tmp_path) if linked else MemoryTier(), [Fault("write", 1, "flip")], seed)
        await tier.start()
        try:
            return await scenario(tier)
        finally:
            await tier.close()

    assert asyncio.run(flipped(1)) == asyncio.run(flipped(1)) != asyncio.run(flipped(2))


def test_a_flipped_bit_of_a_read_is_only_in_memory() -> None:
    async def scenario(tier: Faulty) -> None:
        await save(tier, SHARD, data_of(9000))
        assert differing_bits(await get(tier, SHARD, 9000), data_of(9000)) == 1
        assert await get(tier, SHARD, 9000) == data_of(9000)

    on(Faulty(MemoryTier(), [Fault("read", 1, "flip")]), scenario)


@pytest.mark.parametrize("operation", ["write", "commit"])
def test_a_stall_lasts_until_its_release(operation: Any) -> None:
    async def scenario(tier: Faulty) -> None:
        saving = asyncio.ensure_future(save(tier, SHARD, data_of(5000)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not saving.done() and [fault.operation for fault in tier.hit] == [operation]
        tier.release()
        await saving
        assert memory_of(tier) == data_of(5000)

    on(Faulty(MemoryTier(), [Fault(operation, 1, "stall")]), scenario)


def test_a_lost_answer_was_done_all_the_same() -> None:
    record = RecordKey("run", "run.json")

    async def scenario(tier: Faulty) -> None:
        with pytest.raises(TierError):
            await tier.commit(record, b"{}")
        assert await tier.fetch(record) == b"{}"
        assert not await tier.commit(record, b"{}")

    on(Faulty(MemoryTier(), [Fault("commit", 1, "lost answer")]), scenario)


@pytest.mark.parametrize("kind", ["error", "torn", "lost answer"])
def test_a_failed_linked_write_fails_its_signal(tmp_path: Path, kind: Any) -> None:
    async def scenario(tier: Tier) -> None:
        assert isinstance(await tier.reserve(SHARD, 16_384), Reservation)
        memory, signals = Memory(16_384), [Ticket(), Ticket()]
        chunks = [ChunkIO(SHARD, 8192 * i, 8192, memory.address, None, signals[i]) for i in range(2)]
        results = await tier.write(chunks)
        assert [result.error is None for result in results] == [False, True]
        assert [signal.state for signal in signals] == ["failed", "done"]

    on(Faulty(disk(tmp_path), [Fault("write", 1, kind)]), scenario)


def test_only_possible_faults_are_planned() -> None:
    with pytest.raises(ValueError, match="torn"):
        Fault("read", 1, "torn")
    with pytest.raises(ValueError, match="flip"):
        Fault("commit", 1, "flip")


# -- trace ---------------------------------------------------------------------------------------------


def traced(plan: list[Fault], scenario: Callable[[Tier], Coroutine[Any, Any, object]]) -> list[Event]:
    events: list[Event] = []
    on(Traced(Faulty(MemoryTier("host"), plan), events.append), scenario)
    return events


def test_a_trace_tells_start_and_end_of_everything() -> None:
    events = traced([], lambda tier: save(tier, SHARD, data_of(5000)))
    assert [(event.operation, event.phase) for event in events] == [
        (operation, phase)
        for operation in ("start", "reserve", "write", "commit", "close")
        for phase in ("started", "complete")
    ]
    assert {event.tier for event in events} == {"host"}
    writes = [event for event in events if event.operation == "write"]
    assert all(event.size_bytes == 5000 and str(SHARD) in event.detail for event in writes)
    assert writes[0].number == writes[1].number != events[0].number


def test_a_trace_tells_failures() -> None:
    async def scenario(tier: Tier) -> None:
        await write(tier)
        with pytest.raises(TierError):
            await tier.fetch(MANIFEST)

    failed = [event for event in traced([Fault("write", 2), Fault("fetch", 1)], scenario) if event.phase == "failed"]
    assert [event.operation for event in failed] == ["write", "fetch"]
    assert all(isinstance(event.error, TierError) for event in failed)
