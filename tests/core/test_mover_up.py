"""The mover going up and between tiers: several sources, evicted and bad chunks, resuming, stuck tiers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from stepwell.errors import CorruptData, TierError
from stepwell.ranges import Read
from stepwell.reading import Caller, Healing, Reading
from stepwell.shardjob import ShardJob
from stepwell.tiers.host import Priority
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Event, Fault, Faulty, Traced
from tests.core.moving import (
    MIB,
    MODEL,
    OTHER,
    SIZE,
    State,
    check_all_back,
    moving,
    put,
    read_back,
    reserve,
    run,
    store,
    target,
    tiers_of,
)
from tests.core.virtual import turns


def test_chunks_come_from_the_arena_where_it_has_them_and_from_the_tier_where_not() -> None:
    async def scenario() -> None:
        tier, state = MemoryTier("near"), State(SIZE)
        async with moving(tier) as mover:
            [job] = await put(mover, tier, [(MODEL, state)], True)
            for number in (0, 4, 9):
                slot = mover.arena.find(MODEL, number)
                assert slot is not None
                mover.arena.forget(slot)
                mover.arena.release(slot)
            assert mover.host is not None
            into, healing = await read_back(mover, [mover.host, tier], job)
            assert np.array_equal(into.data, state.data)
            assert healing.read_bytes == {"host": 7 * MIB, "near": 2 * MIB + 77} and not healing.bad
            check_all_back(mover)

    run(scenario)


def test_what_memory_holds_does_not_hide_what_a_tier_has_lost() -> None:
    """Verifying a tier is asked about its own bytes, although the same chunks lie in memory."""

    async def scenario() -> None:
        tier, state = MemoryTier("near"), State(SIZE, 1)
        async with moving(tier) as mover:
            [job] = await put(mover, tier, [(MODEL, state)], True)
            assert mover.host is not None
            await mover.verify([tier], MODEL, SIZE, job.crcs)
            tier._shards[MODEL][3 * MIB] ^= 1
            await mover.verify([mover.host, tier], MODEL, SIZE, job.crcs)
            with pytest.raises(CorruptData):
                await mover.verify([tier], MODEL, SIZE, job.crcs)
            await mover.verify([tier], MODEL, SIZE, job.crcs, first=4 * MIB)
            check_all_back(mover)

    run(scenario)


def test_chunks_are_evicted_while_they_are_read() -> None:
    async def scenario() -> None:
        tier, states = MemoryTier("near"), {MODEL: State(SIZE, 1), OTHER: State(14 * MIB, 2)}
        async with moving(tier, slots=24) as mover:
            [first] = await put(mover, tier, [(MODEL, states[MODEL])], True)
            mover.arena.clean(MODEL)
            assert mover.host is not None
            restoring = asyncio.ensure_future(read_back(mover, [mover.host, tier], first))
            job = ShardJob(OTHER, 14 * MIB, states[OTHER])
            await reserve(tier, OTHER, job.size)
            await mover.put(tier, [job], lambda: None, kept=True)  # has no room beside the first
            assert mover.arena.evicted_bytes >= 3 * MIB
            into, healing = await restoring
            assert np.array_equal(into.data, states[MODEL].data) and not healing.bad
            again, healing = await read_back(mover, [mover.host, tier], first)
            assert np.array_equal(again.data, states[MODEL].data) and set(healing.read_bytes) == {"host", "near"}
            check_all_back(mover)

    run(scenario)


def test_a_corrupt_block_comes_from_the_next_tier_and_is_reported() -> None:
    async def scenario() -> None:
        near, far, state = MemoryTier("near"), MemoryTier("far"), State(SIZE)
        async with moving(near, far) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            await store(far, MODEL, state.data)
            near._shards[MODEL][5 * MIB + 3] ^= 1
            into, healing = await read_back(mover, [near, far], job)
            assert np.array_equal(into.data, state.data)
            assert healing.bad == {("near", MODEL): "checksum of block 5 is wrong"}
            assert healing.read_bytes == {"near": SIZE - MIB, "far": MIB}
            far._shards[MODEL][5 * MIB + 9] ^= 1
            with pytest.raises(CorruptData, match="bytes 5242880 to 6291456") as caught:
                await read_back(mover, [near, far], job)
            assert "near: checksum of block 5" in str(caught.value) and caught.value.where["block"] == 5
            check_all_back(mover)

    run(scenario)


@pytest.mark.parametrize("kept", [False, True])
def test_a_read_that_fails_is_made_on_the_next_tier(kept: bool) -> None:
    async def scenario() -> None:
        near, far, state = Faulty(MemoryTier("near"), [Fault("read", 3)]), MemoryTier("far"), State(SIZE)
        async with moving(near, far) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            await store(far, MODEL, state.data)
            into, healing = target(SIZE), Healing()
            reading = Reading(MODEL, [near, far], job.crcs, healing, Priority.RESTORE, into.map)
            await mover.get(reading, mover.all_of(SIZE), kept=kept)
            assert np.array_equal(into.data, state.data)
            assert "injected" in healing.bad["near", MODEL] and healing.read_bytes["far"] == MIB
            assert mover.arena.chunks(MODEL) == (set(range(10)) if kept else set())
            check_all_back(mover)

    run(scenario)


def test_a_get_that_finds_no_good_copy_keeps_nothing_of_the_bad_chunk() -> None:
    async def scenario() -> None:
        near, state = MemoryTier("near"), State(SIZE)
        async with moving(near) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            near._shards[MODEL][0] ^= 1
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.PREFETCH, target="host")
            with pytest.raises(CorruptData):
                await mover.get(reading, mover.all_of(SIZE), kept=True)
            assert 0 not in mover.arena.chunks(MODEL) and mover.arena.find(MODEL, 0) is None
            check_all_back(mover)
            mover.arena.drop(MODEL)
            assert mover.arena.cached_bytes == 0

    run(scenario)


def test_what_a_reader_does_with_the_bytes_may_fail() -> None:
    async def scenario() -> None:
        near = MemoryTier("near")
        async with moving(near) as mover:
            [job] = await put(mover, near, [(MODEL, State(SIZE))], True)

            async def then(read: Read, address: int) -> None:
                raise TierError("no further")

            for cached in (True, False):
                if not cached:
                    mover.arena.drop(MODEL)
                reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.FLUSH, target="far")
                with pytest.raises(TierError, match="no further"):
                    await mover.get(reading, mover.all_of(SIZE), then)
                check_all_back(mover)

    run(scenario)


@pytest.mark.parametrize("pushing", [0, 8])
def test_reads_that_pass_push_out_no_more_kept_chunks_than_they_must(
    pushing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stepwell.edges.PUSHING_BYTES", pushing * MIB)

    async def scenario() -> None:
        near, kept, state = MemoryTier("near"), State(28 * MIB, 1), State(20 * MIB, 2)
        async with moving(near, slots=32) as mover:
            [job] = await put(mover, near, [(OTHER, state)], False)
            await put(mover, near, [(MODEL, kept)], True)
            mover.arena.clean(MODEL)
            assert mover.arena.cached_bytes == 28 * MIB  # all that may be kept: four slots are left
            for _ in range(3):
                into, _ = await read_back(mover, [near], job)
                assert np.array_equal(into.data, state.data)
                assert mover.arena.evicted_bytes == max(0, pushing - 4) * MIB
            check_all_back(mover)

    run(scenario)


def test_who_gives_up_is_left_alone_at_once() -> None:
    """Reads that a tier answers late put nothing into memory that is somebody else's by then."""

    async def scenario() -> None:
        near, state = Faulty(MemoryTier("near"), []), State(SIZE)
        async with moving(near) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            near.plan = [Fault("read", 4, "stall", times=1000)]
            into, caller = target(SIZE), Caller()
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.RESTORE, into.map, caller=caller)
            getting = asyncio.ensure_future(mover.get(reading, mover.all_of(SIZE)))
            await turns(20)
            getting.cancel()
            await mover.leave(caller)
            into.data[:] = 7
            assert mover.arena.in_use > 0
            near.release()
            await caller.settled()
            assert (into.data == 7).all()
            await asyncio.wait([getting])
            check_all_back(mover)

    run(scenario)


@pytest.mark.parametrize("cached", [False, True])
def test_who_reads_does_not_wait_for_what_others_do_with_the_shard(cached: bool) -> None:
    async def scenario() -> None:
        near, state = MemoryTier("source"), State(SIZE)
        stuck = Faulty(MemoryTier("stuck"), [Fault("write", 1, "stall", times=1000)])
        async with moving(near, stuck) as mover:
            [job] = await put(mover, near, [(MODEL, state)], cached)
            await reserve(stuck, MODEL, SIZE)
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.FLUSH, target="stuck")
            copying = asyncio.ensure_future(mover.copy(reading, stuck, SIZE))
            await turns(20)
            caller, into = Caller(), target(SIZE)
            mine = Reading(MODEL, [near], job.crcs, Healing(), Priority.RESTORE, into.map, caller=caller)
            await mover.get(mine, mover.all_of(SIZE))
            await caller.settled()
            assert np.array_equal(into.data, state.data) and not copying.done()
            stuck.release()
            await copying

    run(scenario)


# -- between tiers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_a_resumed_copy_writes_only_what_is_missing(tmp_path: Path, kind: str) -> None:
    async def scenario() -> None:
        near, state, events = MemoryTier("source"), State(SIZE), list[Event]()
        inner = tiers_of(tmp_path)[kind]
        far = Traced(Faulty(inner, [Fault("write", 7, times=1000), Fault("write", 3, "flip")]), events.append)
        async with moving(near, far) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.FLUSH, target="near")
            await reserve(far, MODEL, SIZE)
            with pytest.raises(TierError):
                await mover.copy(reading, far, SIZE)
            await mover.settled([MODEL])
            check_all_back(mover)
            good = (
                sum(event.phase == "complete" and event.operation == "write" for event in events) - 1
            )  # the flipped one
            assert isinstance(far.tier, Faulty)
            far.tier.plan.clear()
            events.clear()
            again = await reserve(far, MODEL, SIZE, resume=True)
            assert again.resumed
            await mover.copy(reading, far, SIZE, resumed=True)
            written = [event for event in events if event.operation == "write" and event.phase == "complete"]
            assert good > 0 and len(written) == 10 - good
            check_all_back(mover)
            events.clear()
            await mover.copy(reading, far, SIZE, resumed=True)
            assert not [event for event in events if event.operation == "write"]
            into, healing = await read_back(mover, [far], job)
            assert np.array_equal(into.data, state.data) and not healing.bad

    run(scenario)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 5, 8, 13, 21])
def test_a_resumed_copy_cancelled_at_any_moment_gives_everything_back(after: int) -> None:
    async def scenario() -> None:
        near, far, state = MemoryTier("source"), MemoryTier("far"), State(SIZE)
        async with moving(near, far, slots=4) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            await reserve(far, MODEL, SIZE)
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.FLUSH, target="far")
            copying = asyncio.ensure_future(mover.copy(reading, far, SIZE, resumed=True))
            await turns(after)
            copying.cancel()
            await asyncio.wait([copying])
            await mover.settled([MODEL])
            await turns(2)
            check_all_back(mover)

    run(scenario)


def test_a_stuck_tier_holds_few_slots_and_others_go_on() -> None:
    async def scenario() -> None:
        near, state = MemoryTier("source"), State(SIZE)
        stuck = Faulty(MemoryTier("stuck"), [Fault("write", 1, "stall", times=1000)])
        async with moving(near, stuck, slots=32) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            await reserve(stuck, MODEL, SIZE)
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.FLUSH, target="stuck")
            copying = asyncio.ensure_future(mover.copy(reading, stuck, SIZE))
            for _ in range(5):
                into, _ = await read_back(mover, [near], job)
                assert np.array_equal(into.data, state.data)
            [way] = [each for each in mover.edges.all() if each.target == "stuck"]
            assert 0 < way.statistics().in_flight_bytes <= 4 * MIB  # an eighth of the arena
            assert mover.arena.in_use == way.statistics().in_flight_bytes // MIB
            stuck.release()
            await copying
            check_all_back(mover)

    run(scenario)


def test_verify_is_content_with_one_good_copy_of_each_block() -> None:
    async def scenario() -> None:
        near, far, state = MemoryTier("near"), MemoryTier("far"), State(SIZE)
        async with moving(near, far) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            await store(far, MODEL, state.data)
            near._shards[MODEL][3 * MIB] ^= 4
            await mover.verify([near, far], MODEL, SIZE, job.crcs)
            with pytest.raises(CorruptData, match="checksum of block 3"):
                await mover.verify([near], MODEL, SIZE, job.crcs)
            check_all_back(mover)

    run(scenario)


@pytest.mark.parametrize("resumed", [False, True])
def test_whoever_gives_up_while_it_waits_for_a_slot_leaves_its_turn(resumed: bool) -> None:
    async def scenario() -> None:
        near, far, state = MemoryTier("source"), MemoryTier("far"), State(SIZE)
        async with moving(near, far, slots=4) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            await reserve(far, MODEL, SIZE)
            held = [await mover.arena.acquire(Priority.RESTORE) for _ in range(4)]
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.FLUSH, target="far")
            copying = asyncio.ensure_future(mover.copy(reading, far, SIZE, resumed=resumed))
            await turns(10)
            assert sum(way.statistics().in_flight_bytes for way in mover.edges.all()) == MIB
            copying.cancel()
            await asyncio.wait([copying])
            for slot in held:
                mover.arena.release(slot)
            check_all_back(mover)
            await mover.copy(reading, far, SIZE, resumed=resumed)
            into, _ = await read_back(mover, [far], job)
            assert np.array_equal(into.data, state.data)

    run(scenario)
