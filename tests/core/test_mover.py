"""The mover going down: waves, kept chunks, errors in the middle, too little memory, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.errors import TierError
from stepwell.native import Job
from stepwell.putting import BATCH, SPREAD
from stepwell.reading import Healing, Reading
from stepwell.shardjob import ShardJob
from stepwell.tiers.base import RecordKey, Reservation, ShardKey
from stepwell.tiers.host import Priority
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Fault, Faulty
from tests.core.moving import (
    KEY,
    MIB,
    MODEL,
    OTHER,
    SIZE,
    Scarce,
    State,
    check_all_back,
    moving,
    put,
    read_back,
    reserve,
    run,
    tiers_of,
)
from tests.core.virtual import turns

THIRD = ShardKey(KEY, "third.safetensors")


@pytest.mark.parametrize("kind", ["memory", "file"])
@pytest.mark.parametrize("kept", [False, True])
def test_a_put_brings_every_byte_and_gives_every_slot_back(tmp_path: Path, kind: str, kept: bool) -> None:
    async def scenario() -> None:
        tier, states = tiers_of(tmp_path)[kind], [State(SIZE, 1), State(3 * MIB, 2), State(0)]
        async with moving(tier) as mover:
            keys = [MODEL, OTHER, ShardKey(KEY, "empty.safetensors")]
            jobs = await put(mover, tier, zip(keys, states, strict=True), kept)
            check_all_back(mover)
            assert mover.arena.cached_bytes == (13 * MIB if kept else 0)
            for job, state in zip(jobs, states, strict=True):
                for chain in ([tier], [mover.host, tier]):
                    into, healing = await read_back(mover, [each for each in chain if each is not None], job)
                    assert np.array_equal(into.data, state.data)
                    assert set(healing.read_bytes) <= {"host" if kept else "near"}

    run(scenario)


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_state_larger_than_the_arena_goes_in_waves(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        tier, state = tiers_of(tmp_path)[kind], State(30 * MIB + 5)
        async with moving(tier, slots=4) as mover:
            [job] = await put(mover, tier, [(MODEL, state)], False)
            assert mover.arena.ready_bytes <= 4 * MIB and mover.arena.cached_bytes == 0
            into, _ = await read_back(mover, [tier], job)
            assert np.array_equal(into.data, state.data)
            check_all_back(mover)

    run(scenario)


def test_kept_chunks_are_readable_as_soon_as_they_are_copied() -> None:
    async def scenario() -> None:
        tier = Faulty(MemoryTier("near"), [Fault("write", 1, "stall", times=1000)])
        async with moving(tier) as mover:
            state, copied = State(SIZE), asyncio.Event()
            assert mover.host is not None
            job = ShardJob(MODEL, SIZE, state)
            reservations = [await reserve(each, MODEL, SIZE) for each in (tier, mover.host)]
            putting = asyncio.ensure_future(mover.put(tier, [job], copied.set, kept=True))
            await copied.wait()
            record = RecordKey("run", f"{KEY.attempt}/manifest.json")
            assert await mover.host.commit(record, b"{}", shards=reservations[1:])
            into, healing = await read_back(mover, [mover.host], job)
            assert np.array_equal(into.data, state.data) and healing.read_bytes == {"host": SIZE}
            assert not putting.done()
            tier.release()
            await putting
            check_all_back(mover)

    run(scenario)


@pytest.mark.parametrize("sizes", [(9,), (16, 3), (20, 33, 1)])
def test_what_stays_in_memory_is_copied_together_but_no_thread_is_waited_for_at_the_end(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with moving(slots=64) as mover:
            assert mover.host is not None
            states = [State(size * MIB - 7, seed) for seed, size in enumerate(sizes)]
            keys = (MODEL, OTHER, THIRD)[: len(sizes)]
            jobs = [ShardJob(key, len(state.data), state) for key, state in zip(keys, states, strict=True)]
            for job in jobs:
                await reserve(mover.host, job.key, job.size)
            chunks: list[int] = []
            copy = mover.copier.start

            def start(asked: Sequence[Job]) -> Any:
                chunks.extend(-(-job.length // MIB) for job in asked)
                return copy(asked)

            monkeypatch.setattr(mover.copier, "start", start)
            await mover.put(None, jobs, lambda: None, kept=True)
            left = sum(sizes)
            for count in chunks:
                assert count == 1 or count <= min(BATCH, 1 + left // SPREAD)
                left -= count
            assert left == 0 and len(chunks) < max(sum(sizes), 10)
            for job, state in zip(jobs, states, strict=True):
                into, _ = await read_back(mover, [mover.host], job)
                assert np.array_equal(into.data, state.data)

    run(scenario)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("kind", ["error", "torn"])
def test_a_write_that_fails_in_the_middle(kept: bool, kind: Any) -> None:
    async def scenario() -> None:
        inner = MemoryTier("near")
        tier = Faulty(inner, [Fault("write", 4, kind)])
        async with moving(tier) as mover:
            state = State(20 * MIB)
            job = ShardJob(MODEL, len(state.data), state)
            await reserve(tier, MODEL, job.size)
            if kept:
                assert mover.host is not None
                await reserve(mover.host, MODEL, job.size)
            with pytest.raises(TierError, match="injected"):
                await mover.put(tier, [job], lambda: None, kept=kept)
            check_all_back(mover)
            if not kept:
                assert mover.arena.cached_bytes == 0
                return
            # all of it is in host memory, and goes down from there when it is tried again
            assert mover.host is not None
            assert mover.arena.chunks(MODEL) == set(range(20))
            reading = Reading(MODEL, [mover.host], job.crcs, Healing(), Priority.SNAPSHOT, target="near")
            await mover.copy(reading, tier, job.size)
            mover.arena.drop(MODEL)
            back, healing = await read_back(mover, [tier], job)
            assert np.array_equal(back.data, state.data) and healing.read_bytes == {"near": job.size}

    run(scenario)


def test_with_less_memory_than_promised_what_cannot_be_kept_passes() -> None:
    async def scenario() -> None:
        tier = MemoryTier("near")
        async with moving(tier, memory=Scarce(6 * MIB).make) as mover:
            state = State(SIZE)
            [job] = await put(mover, tier, [(MODEL, state)], True)
            check_all_back(mover)
            assert mover.host is not None and 0 < len(mover.arena.chunks(MODEL)) < 10
            record = RecordKey("run", f"{KEY.attempt}/manifest.json")
            with pytest.raises(TierError, match="of 10 chunks are here"):
                await mover.host.commit(record, b"{}", shards=[Reservation(MODEL, SIZE)])
            assert await mover.host.fetch(record) is None
            into, healing = await read_back(mover, [mover.host, tier], job)
            assert np.array_equal(into.data, state.data) and set(healing.read_bytes) == {"host", "near"}

    run(scenario)


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 13, 40])
def test_a_put_cancelled_at_any_moment_leaves_nothing_once_it_is_settled(kept: bool, after: int) -> None:
    async def scenario() -> None:
        tier = MemoryTier("near")
        async with moving(tier, slots=8) as mover:
            job = ShardJob(MODEL, 12 * MIB, State(12 * MIB))
            await reserve(tier, MODEL, job.size)
            putting = asyncio.ensure_future(mover.put(tier, [job], lambda: None, kept=kept))
            await turns(after)
            putting.cancel()
            await asyncio.wait([putting])
            await mover.settled([MODEL])
            await turns(2)
            mover.arena.drop(MODEL)
            check_all_back(mover)
            assert mover.arena.cached_bytes == 0

    run(scenario)
