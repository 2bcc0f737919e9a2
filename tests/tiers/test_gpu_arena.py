"""What a GPU tier takes of a device's memory, and gives back: on a driver that stands for a GPU."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import Awaitable, Callable, Iterator

import pytest

from stepwell.errors import TierFull, TierUnavailable
from stepwell.gpus import Gpu, Gpus
from stepwell.native import PieceMap
from stepwell.policies.evict import LRU
from stepwell.tiers._slots import Priority, Slot
from stepwell.tiers.base import CheckpointKey, ChunkIO, RecordKey, Refused, Reservation, ShardKey
from stepwell.tiers.gpu import Device, GpuTier
from tests.fakecuda import FakeCuda, build

MIB = 1 << 20
SLOT = MIB


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> FakeCuda:
    return FakeCuda(build(tmp_path_factory.mktemp("fakecuda")))


@pytest.fixture
def driver(built: FakeCuda) -> Iterator[FakeCuda]:
    built.reset()
    before = built.owned()
    yield built
    built.reset()
    gc.collect()  # an error that was raised knows who raised it
    assert built.owned() == before


def run(
    driver: FakeCuda, scenario: Callable[[GpuTier], Awaitable[None]], capacity_bytes: int | None = 8 * MIB,
    share: float | None = None, headroom_bytes: int = 0,
) -> None:  # fmt: skip
    """On an event loop of its own; all is closed at the end."""

    async def all_of_it() -> None:
        gpus = Gpus(driver.path, stream=lambda gpu: 0, kernels=lambda engine, index: None)
        tier = GpuTier(
            LRU(), capacity_bytes, share=share, chunk_bytes=SLOT, headroom_bytes=headroom_bytes, device=gpus.device
        )
        try:
            async with asyncio.timeout(20):
                await tier.use()
                await scenario(tier)
        finally:
            await tier.close()
            gpus.close()

    asyncio.run(all_of_it())


async def kept(tier: GpuTier, shard: ShardKey, count: int, *, clean: bool = True) -> None:
    """Chunks of a shard, as a save leaves them."""
    for number in range(count):
        slot = await tier.arena.acquire(Priority.SNAPSHOT, kept=True)
        tier.arena.place(slot, shard, number, SLOT)
        tier.arena.filled(slot)
        tier.arena.release(slot)
    if clean:
        tier.arena.clean(shard)


def shard(number: int) -> ShardKey:
    return ShardKey(CheckpointKey("run", f"step-{number:09}.1-{number}"), "model.safetensors")


async def taken(driver: FakeCuda, buffers: int) -> None:
    while driver.count("buffers") != buffers:
        await asyncio.sleep(0.001)


def test_memory_is_taken_as_it_is_needed_and_all_of_it_goes_back(driver: FakeCuda) -> None:
    async def scenario(tier: GpuTier) -> None:
        assert driver.count("buffers") == 0
        await kept(tier, shard(1), 3)
        assert 3 <= driver.count("buffers") <= 8
        tier.arena.expect(100 * MIB)
        await taken(driver, 8)  # the capacity, and no more
        assert tier.arena.ready_bytes <= tier.arena.capacity_bytes == 8 * MIB

    run(driver, scenario)


def test_a_share_is_of_the_gpu_that_it_is_used_with(driver: FakeCuda) -> None:
    driver.memory(total=200 * MIB)

    async def scenario(tier: GpuTier) -> None:
        assert tier.info.capacity_bytes == tier.arena.capacity_bytes == 20 * MIB
        refused = await tier.reserve(shard(1), 21 * MIB)
        assert isinstance(refused, Refused) and refused.reason == "full" and refused.free_bytes == 20 * MIB
        assert not isinstance(await tier.reserve(shard(1), 20 * MIB), Refused)

    run(driver, scenario, None, share=0.1)


def test_what_is_free_on_the_device_stays_above_the_headroom(driver: FakeCuda) -> None:
    driver.memory(total=100 * MIB, used=85 * MIB)

    async def scenario(tier: GpuTier) -> None:
        await kept(tier, shard(1), 5, clean=False)
        with pytest.raises(TierFull):
            await asyncio.gather(*(tier.arena.acquire(Priority.SNAPSHOT, kept=True) for _ in range(2)))
        assert driver.count("buffers") == 5 and len(tier.arena.chunks(shard(1))) == 5
        refused = await tier.reserve(shard(2), 8 * MIB)  # it looks once more: the capacity may be had again
        assert not isinstance(refused, Refused)

    run(driver, scenario, headroom_bytes=10 * MIB)


def test_training_gets_back_what_storage_has_and_nothing_else(driver: FakeCuda) -> None:
    driver.memory(total=100 * MIB, used=50 * MIB)

    async def scenario(tier: GpuTier) -> None:
        lost: list[CheckpointKey] = []
        tier.on_uncommitted = lost.append
        await kept(tier, shard(1), 3)
        await kept(tier, shard(2), 2, clean=False)
        await kept(tier, shard(3), 3)
        held = tier.hold(shard(3), 3 * SLOT)
        assert held is not None and tier.hold(shard(4), SLOT) is None
        driver.memory(total=100 * MIB, used=97 * MIB)
        await taken(driver, 5)
        assert [len(tier.arena.chunks(shard(number))) for number in (1, 2, 3)] == [0, 2, 3]
        held.release()
        await taken(driver, 2)
        assert [len(tier.arena.chunks(shard(number))) for number in (1, 2, 3)] == [0, 2, 0]
        driver.memory(total=100 * MIB, used=50 * MIB)
        assert not isinstance(await tier.reserve(shard(5), 6 * SLOT), Refused)
        await kept(tier, shard(5), 6)  # it has its capacity again
        assert len(tier.arena.chunks(shard(2))) == 2

    run(driver, scenario, headroom_bytes=10 * MIB)


def test_a_shard_whose_chunks_have_changed_places_is_held_where_they_are_now(driver: FakeCuda) -> None:
    async def scenario(tier: GpuTier) -> None:
        def held() -> tuple[list[int], PieceMap]:
            found = tier.hold(shard(1), 3 * SLOT)
            assert found is not None
            found.release()
            return [slot.address for slot in found.slots], found.map

        def here() -> list[int]:
            return [tier.arena._of(shard(1))[number].address for number in range(3)]

        await kept(tier, shard(1), 3)
        addresses, before = held()
        assert addresses == here() and held()[1] is before
        tier.arena.drop(shard(1))
        assert tier.hold(shard(1), 3 * SLOT) is None
        await kept(tier, shard(2), 1)  # takes the slot that was free last
        await kept(tier, shard(1), 3)
        assert here() != addresses and held()[0] == here() and held()[1] is not before
        tier.arena.forget(tier.arena._of(shard(1))[1])
        assert tier.hold(shard(1), 3 * SLOT) is None

    run(driver, scenario)


def test_a_shard_that_is_dropped_while_it_is_held_stays_until_it_is_released(driver: FakeCuda) -> None:
    async def scenario(tier: GpuTier) -> None:
        await kept(tier, shard(1), 8)
        held, again = tier.hold(shard(1), 8 * SLOT), tier.hold(shard(1), 8 * SLOT)
        assert held is not None and again is not None
        tier.arena.drop(shard(1))
        for one in (held, again):
            assert tier.arena.take_now(Priority.SNAPSHOT) is None and tier.arena.give_back(MIB) == 0
            one.used()
            one.release()
        await kept(tier, shard(2), 8)

    run(driver, scenario)


def test_a_tier_that_is_closed_holds_nothing(driver: FakeCuda) -> None:
    async def scenario(tier: GpuTier) -> None:
        await kept(tier, shard(1), 2)
        held = tier.hold(shard(1), 2 * SLOT)
        assert held is not None
        held.release()
        await tier.close()
        assert driver.count("buffers") == 0 and tier.hold(shard(1), 2 * SLOT) is None

    run(driver, scenario)


def test_what_is_used_goes_last(driver: FakeCuda) -> None:
    async def scenario(tier: GpuTier) -> None:
        for number in (1, 2):
            await kept(tier, shard(number), 4)
        held = tier.hold(shard(1), 4 * SLOT)
        assert held is not None
        held.used()
        held.release()
        await kept(tier, shard(3), 4)
        assert [len(tier.arena.chunks(shard(number))) for number in (1, 2, 3)] == [4, 0, 4]

    run(driver, scenario)


def test_a_driver_that_refuses_memory_costs_only_what_it_refuses(driver: FakeCuda) -> None:
    async def scenario(tier: GpuTier) -> None:
        await kept(tier, shard(1), 2, clean=False)
        ready = driver.count("buffers")
        driver.fail("cuMemAlloc_v2", 2, times=-1)
        got: list[Slot] = []
        with pytest.raises(TierFull):
            while True:
                got.append(await tier.arena.acquire(Priority.SNAPSHOT, kept=True))
        assert len(got) == ready - 2 and driver.count("buffers") == ready
        for slot in got:
            tier.arena.release(slot)
        driver.fail("", 0, times=0)
        assert not isinstance(await tier.reserve(shard(2), 6 * SLOT), Refused)
        await kept(tier, shard(2), 6)
        assert driver.count("buffers") == 8

    run(driver, scenario)


def test_who_waits_for_memory_hears_of_the_end(driver: FakeCuda) -> None:
    async def scenario(tier: GpuTier) -> None:
        slots = [await tier.arena.acquire(Priority.SNAPSHOT) for _ in range(8)]
        waiting = asyncio.ensure_future(tier.arena.acquire(Priority.SNAPSHOT))
        await asyncio.sleep(0)
        closing = asyncio.ensure_future(tier.close())
        with pytest.raises(TierUnavailable):
            await waiting
        assert driver.count("buffers") == 8  # they are in use
        for slot in slots:
            tier.arena.release(slot)
        await closing
        assert driver.count("buffers") == 0

    run(driver, scenario)


def test_memory_goes_and_comes_while_slots_are_taken(driver: FakeCuda) -> None:
    """Training takes and gives memory at any moment; there are never more slots than the capacity."""

    async def scenario(tier: GpuTier) -> None:
        for turn in range(40):
            driver.memory(total=100 * MIB, used=(99 if turn % 3 else 50) * MIB)
            tier.arena.give_back(turn % 5 * MIB)
            tier.arena.whole_again()
            got = [slot for _ in range(4) if (slot := tier.arena.take_now(Priority.SNAPSHOT)) is not None]
            tier.arena.expect(8 * MIB)
            await asyncio.sleep(0.001)
            for slot in got:
                tier.arena.release(slot)
            assert tier.arena.capacity_bytes <= 8 * MIB and driver.count("buffers") <= 8
        driver.memory()
        assert not isinstance(await tier.reserve(shard(1), 8 * MIB), Refused)
        await kept(tier, shard(1), 8)

    run(driver, scenario, headroom_bytes=10 * MIB)


def test_what_is_being_written_is_not_taken_for_whole(driver: FakeCuda) -> None:
    """A chunk has its slot before it has its bytes."""

    async def scenario(tier: GpuTier) -> None:
        data = ctypes.create_string_buffer(b"a" * (SLOT // 2), SLOT // 2)
        reservation = await tier.reserve(shard(1), SLOT)
        assert isinstance(reservation, Reservation)
        for half in range(2):
            assert tier.hold(shard(1), SLOT) is None
            [result] = await tier.write([ChunkIO(shard(1), half * SLOT // 2, SLOT // 2, ctypes.addressof(data))])
            assert result.error is None
        await tier.commit(RecordKey("run", f"{shard(1).checkpoint.attempt}/rank-0.json"), b"{}", shards=[reservation])
        held = tier.hold(shard(1), SLOT)
        assert held is not None
        held.release()

    run(driver, scenario)


def test_who_asks_for_a_gpu_while_the_tier_is_closed_gets_none(driver: FakeCuda) -> None:
    async def main() -> None:
        gpus = Gpus(driver.path, stream=lambda gpu: 0, kernels=lambda engine, index: None)
        asked, go = asyncio.Event(), asyncio.Event()

        async def find(index: int | None) -> Device:
            asked.set()
            await go.wait()
            return await gpus.device(index)

        tier = GpuTier(LRU(), 8 * MIB, chunk_bytes=SLOT, device=find)
        using = asyncio.ensure_future(tier.use())
        await asked.wait()
        await tier.close()
        go.set()
        with pytest.raises(TierUnavailable):
            await using
        gpus.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}  # nobody watches over memory that it will never have

    asyncio.run(main())


def test_an_engine_that_is_closed_has_no_memory(driver: FakeCuda) -> None:
    """Whoever waits for some is told, by the thread that asked for it."""

    async def scenario(tier: GpuTier) -> None:
        device = await tier.use()
        assert isinstance(device, Gpu)
        device.down.engine.close()
        with pytest.raises(TierFull):
            await tier.arena.acquire(Priority.SNAPSHOT)

    run(driver, scenario)
