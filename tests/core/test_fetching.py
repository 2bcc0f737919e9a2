"""Each chunk is read once: from where it is on its way, from what was read before, from another process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from stepwell import fetching
from stepwell.errors import CorruptData
from stepwell.ranges import Read
from stepwell.reading import Healing, Reading
from stepwell.tiers.base import ChunkIO, Result
from stepwell.tiers.host import Priority
from stepwell.tiers.memory import MemoryTier
from tests.core.moving import MIB, MODEL, SIZE, State, check_all_back, moving, put, run, target


class Gated(MemoryTier):
    """Counts what is read, and answers only while its gate is open."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.gate = asyncio.Event()
        self.gate.set()
        self.read_bytes = 0

    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        self.read_bytes += sum(chunk.length for chunk in chunks)
        await self.gate.wait()
        return await super().read(chunks)


@pytest.mark.parametrize("first", ["prefetch", "load"])
@pytest.mark.parametrize("second", ["prefetch", "load"])
def test_who_asks_for_what_is_on_its_way_waits_for_it(first: str, second: str) -> None:
    async def scenario() -> None:
        near, state = Gated("near"), State(SIZE)
        async with moving(near) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            near.gate.clear()
            getting, memory = [], []
            for kind in (first, second):
                into = target(SIZE)
                where = {"target": "host"} if kind == "prefetch" else {"pieces": into.map}
                reading = Reading(
                    MODEL, [near], job.crcs, Healing(), Priority.PREFETCH if kind == "prefetch" else Priority.RESTORE,
                    size=SIZE, stays=True, **where,
                )  # fmt: skip
                getting.append(asyncio.ensure_future(mover.get(reading, mover.all_of(SIZE), kept=kind == "prefetch")))
                memory += [into] if kind == "load" else []
                for _ in range(100):
                    await asyncio.sleep(0)
            near.gate.set()
            await asyncio.gather(*getting)
            assert near.read_bytes == SIZE
            assert all(np.array_equal(into.data, state.data) for into in memory)
            assert mover.arena.chunks(MODEL) == set(range(10))
            check_all_back(mover)

    run(scenario)


def test_who_waits_is_not_held_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "JOIN_S", 0.01)

    async def scenario() -> None:
        stuck, near, state = Gated("stuck"), MemoryTier("near"), State(SIZE)
        async with moving(stuck, near) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            stuck.gate.clear()
            reading = Reading(MODEL, [stuck, near], job.crcs, Healing(), Priority.PREFETCH, target="host")
            hanging = asyncio.ensure_future(mover.get(reading, mover.all_of(MIB), kept=True))
            for _ in range(100):
                await asyncio.sleep(0)
            into = target(SIZE)
            mine = Reading(
                MODEL, [near], job.crcs, Healing(), Priority.RESTORE, into.map, size=SIZE, stays=True
            )  # fmt: skip
            await mover.get(mine, mover.all_of(SIZE))
            assert np.array_equal(into.data, state.data) and not hanging.done()
            stuck.gate.set()
            await hanging
            check_all_back(mover)

    run(scenario)


def test_who_waits_for_a_read_that_fails_reads_by_itself() -> None:
    async def scenario() -> None:
        bad, good, state = Gated("bad"), Gated("good"), State(SIZE)
        async with moving(bad, good) as mover:
            [job] = await put(mover, bad, [(MODEL, state)], False)
            await put(mover, good, [(MODEL, state)], False)
            bad._shards[MODEL][0] ^= 1
            bad.gate.clear()
            reading = Reading(MODEL, [bad], job.crcs, Healing(), Priority.PREFETCH, target="host")
            failing = asyncio.ensure_future(mover.get(reading, [Read(0, MIB)], kept=True))
            for _ in range(100):
                await asyncio.sleep(0)
            into = target(SIZE)
            mine = Reading(MODEL, [good], job.crcs, Healing(), Priority.RESTORE, into.map)
            getting = asyncio.ensure_future(mover.get(mine, mover.all_of(SIZE)))
            for _ in range(100):
                await asyncio.sleep(0)
            bad.gate.set()
            with pytest.raises(CorruptData):
                await failing
            await getting
            assert np.array_equal(into.data, state.data) and good.read_bytes == SIZE
            check_all_back(mover)

    run(scenario)


def test_what_was_read_whole_stays_as_far_as_there_is_room() -> None:
    async def scenario() -> None:
        near, state = Gated("near"), State(SIZE)
        async with moving(near, slots=8) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)

            async def load(reads: list[Read]) -> int:
                before, into = near.read_bytes, target(SIZE)
                reading = Reading(
                    MODEL, [near], job.crcs, Healing(), Priority.RESTORE, into.map, size=SIZE, stays=True
                )  # fmt: skip
                await mover.get(reading, reads)
                assert np.array_equal(into.data[: reads[-1].start], state.data[: reads[-1].start])
                return near.read_bytes - before

            assert await load(mover.all_of(3 * MIB)) == 3 * MIB
            assert await load(mover.all_of(3 * MIB)) == 0
            assert await load(mover.all_of(SIZE)) == SIZE - 3 * MIB
            assert len(mover.arena.chunks(MODEL)) == mover.arena.kept_max
            check_all_back(mover)

    run(scenario)


def test_a_prefetched_chunk_is_not_pushed_out_by_what_was_only_read() -> None:
    async def scenario() -> None:
        near, state, other = Gated("near"), State(SIZE), State(SIZE, 1)
        async with moving(near, slots=8) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            name = "other"
            room = mover.arena.kept_max
            coming = Reading(
                MODEL, [near], job.crcs, Healing(), Priority.PREFETCH, target="host", cached_as=name
            )  # fmt: skip
            await mover.get(coming, mover.all_of(SIZE)[:room], kept=True)
            announced = {mover.arena.key(name, number) for number in range(room)}
            mover.arena.outranks = lambda key, other: other.key not in announced
            into = target(SIZE)
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.RESTORE, into.map, size=SIZE, stays=True)
            for one in mover.all_of(SIZE):  # what passes needs one slot at a time
                await mover.get(reading, [one])
            assert mover.arena.chunks(name) == set(range(room)) and not mover.arena.chunks(MODEL)
            mover.arena.outranks = lambda key, other: True
            await mover.get(reading, mover.all_of(SIZE))
            assert mover.arena.chunks(MODEL)
            assert np.array_equal(into.data, state.data) and not np.array_equal(into.data, other.data)
            check_all_back(mover)

    run(scenario)


class Lender:
    """Stands for another process: lends what it has, and counts what comes back."""

    def __init__(self, state: State, good: bool = True) -> None:
        self.state, self.good, self.out, self.asked = state, good, 0, 0

    async def get(self, reading: Reading, read: Read) -> Lender | None:
        self.asked += 1
        if read.start >= 5 * MIB:
            return None
        self.address = self.state.data.ctypes.data + read.start
        self.out += 1
        return self

    def still_good(self) -> bool:
        return self.good

    def release(self) -> None:
        self.out -= 1


@pytest.mark.parametrize("good", [True, False])
def test_chunks_come_from_another_process_and_from_the_tier_where_that_fails(good: bool) -> None:
    async def scenario() -> None:
        near, state = Gated("near"), State(SIZE)
        async with moving(near) as mover:
            [job] = await put(mover, near, [(MODEL, state)], False)
            lender = Lender(state, good)
            mover.neighbour = lender
            into = target(SIZE)
            reading = Reading(MODEL, [near], job.crcs, Healing(), Priority.RESTORE, into.map)
            reads = mover.all_of(SIZE)
            for one in reads:  # one after the other, since this lender knows one address at a time
                await mover.get(reading, [one])
            assert np.array_equal(into.data, state.data)
            assert lender.out == 0 and lender.asked == len(reads)
            assert near.read_bytes == (SIZE - 5 * MIB if good else SIZE)
            checked = Reading(MODEL, [near], job.crcs, Healing(), Priority.FLUSH, target="verify", from_memory=False)
            await mover.get(checked, reads)
            assert lender.asked == len(reads)
            check_all_back(mover)

    run(scenario)
