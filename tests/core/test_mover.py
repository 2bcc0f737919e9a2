"""The mover on real memory and real tiers: waves, kept chunks, errors in the middle, several sources, resuming."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stepwell.errors import CorruptData, TierError
from stepwell.mover import Healing, Mover, Reading, ShardJob
from stepwell.native import AsyncEngine, Engine, PieceMap, Region
from stepwell.policies.evict import LRU
from stepwell.ranges import Read
from stepwell.tiers._slices import Memory
from stepwell.tiers.base import CheckpointKey, ChunkIO, RecordKey, Reservation, ShardKey, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier, Priority
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Event, Fault, Faulty, Traced
from tests.core.virtual import turns

MIB = 1 << 20
KEY = CheckpointKey("run", "step-000000001.1-1")
MODEL, OTHER = ShardKey(KEY, "model.safetensors"), ShardKey(KEY, "other.safetensors")
SIZE = 9 * MIB + 77  # ten chunks, the last one short


class State:
    """A shard's bytes in memory, in uneven pieces."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.data = np.frombuffer(random.Random(seed).randbytes(size), np.uint8).copy()

    def pieces(self, start: int, stop: int) -> PieceMap:
        return self.map

    @property
    def map(self) -> PieceMap:
        cuts = sorted({0, 100, len(self.data) // 3, len(self.data)})
        offsets = np.array(cuts, np.uint64)
        addresses = np.array([self.data.ctypes.data + cut for cut in cuts[:-1]], np.uint64)
        return PieceMap(offsets, addresses, self.data)


def target(size: int) -> State:
    blank = State(0)
    blank.data = np.zeros(size, np.uint8)
    return blank


class Scarce:
    """Memory of a system that has so much, and no more."""

    def __init__(self, limit_bytes: int) -> None:
        self.left_bytes = limit_bytes

    def make(self, size: int) -> Memory:
        region, scarce = Region(size), self
        populate = region.populate

        class Part:
            address = region.address
            view = region.view
            close = region.close

            def populate(self, offset: int, length: int) -> None:
                if length > scarce.left_bytes:
                    raise OSError(12, "no memory")
                scarce.left_bytes -= length
                populate(offset, length)

        return Part()


@asynccontextmanager
async def moving(*tiers: Tier, slots: int = 32, memory: Callable[[int], Memory] | None = None) -> AsyncIterator[Mover]:
    """A mover over started tiers; at its end every slot must be back."""
    engine = Engine("copy", backend="threads", threads=2)
    copier = AsyncEngine(engine)
    extra: dict[str, Any] = {} if memory is None else {"memory": memory}
    host = HostTier(LRU(), slots * MIB, chunk_bytes=MIB, background=False, **extra)
    for tier in tiers:
        await tier.start()
    try:
        yield Mover(copier, host.arena, host)
        assert host.arena.in_use == 0
    finally:
        for tier in (*tiers, host):
            await tier.close()
        copier.close()
        engine.close()


def run(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario())


def check_all_back(mover: Mover) -> None:
    assert mover.arena.in_use == 0
    for way in mover.edges.all():
        seen = way.statistics()
        assert seen.queued == seen.in_flight_bytes == 0, way


async def reserve(tier: Tier, key: ShardKey, size: int, resume: bool = False) -> Reservation:
    answer = await tier.reserve(key, size, resume=resume)
    assert isinstance(answer, Reservation), answer
    return answer


async def put(mover: Mover, tier: Tier, shards: Iterable[tuple[ShardKey, State]], kept: bool) -> list[ShardJob]:
    jobs = [ShardJob(key, len(state.data), state) for key, state in shards]
    for job in jobs:
        await reserve(tier, job.key, job.size)
        if kept:
            assert mover.host is not None
            await reserve(mover.host, job.key, job.size)
    copied = asyncio.Event()
    await mover.put(tier, jobs, copied.set, kept=kept)
    assert copied.is_set()
    return jobs


async def store(tier: Tier, key: ShardKey, data: np.ndarray[Any, Any]) -> None:
    """Puts a shard's bytes there and commits them, without the mover."""
    reservation = await reserve(tier, key, len(data))
    padded = np.zeros(len(data) + 8192, np.uint8)
    shift = -padded.ctypes.data % 4096
    padded[shift : shift + len(data)] = data
    [result] = await tier.write([ChunkIO(key, 0, len(data), padded.ctypes.data + shift)])
    assert result.error is None
    record = RecordKey(key.checkpoint.run, f"{key.checkpoint.attempt}/manifest.json")
    assert await tier.commit(record, b"{}", shards=[reservation])


async def read_back(mover: Mover, tiers: Sequence[Tier], job: ShardJob) -> tuple[State, Healing]:
    into, healing = target(job.size), Healing()
    reading = Reading(job.key, tiers, job.crcs, healing, Priority.RESTORE, into.map)
    await mover.get(reading, mover.all_of(job.size))
    return into, healing


def tiers_of(tmp_path: Path) -> dict[str, Tier]:
    return {"memory": MemoryTier("near"), "file": FileTier(tmp_path, name="near", reading="direct")}


# -- down --------------------------------------------------------------------------------------------


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


# -- up ----------------------------------------------------------------------------------------------


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
