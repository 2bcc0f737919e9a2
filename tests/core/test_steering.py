"""Policies at work on a real catalog and real tiers: views that are true, moves that wait for nothing stale."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Coroutine, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.backoff import Backoff
from stepwell.catalog import Catalog
from stepwell.chain import Chain, reserve
from stepwell.deletion import Deleter
from stepwell.errors import CorruptData, TierFull
from stepwell.events import EventLog
from stepwell.flushing import Flusher, Goal
from stepwell.format.names import Attempt
from stepwell.format.records import Manifest, encode
from stepwell.mending import Mender
from stepwell.mover import Mover
from stepwell.native import AsyncEngine, Engine
from stepwell.policies.base import Drop, Event, Flush, Move, Opened, Read, View
from stepwell.policies.evict import LRU
from stepwell.policies.retain import Retain
from stepwell.settings import Settings
from stepwell.steering import Steering
from stepwell.tiers.base import CheckpointKey, RecordKey, Refused, Reservation, ShardKey, Tier
from stepwell.tiers.host import HostTier, Priority
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Fault, Faulty
from stepwell.verification import Verifier
from tests.core.virtual import LoopClock, turns

PAGE = 4096


class Says:
    """A policy that answers what it is told to, once."""

    def __init__(self, *moves: Move) -> None:
        self.moves: Sequence[Move] = moves
        self.seen: list[View] = []

    def decide(self, event: Event, view: View) -> Sequence[Move]:
        self.seen.append(view)
        moves, self.moves = self.moves, ()
        return moves


class Bench:
    """Host memory, an nvme and a pfs, with a steering on them whose flushes never end."""

    def __init__(self, *policies: Any, faults: Sequence[Fault] = ()) -> None:
        self.engine = Engine("copy", backend="threads", threads=1)
        self.copier = AsyncEngine(self.engine)
        self.host = HostTier(LRU(), 16 * PAGE, chunk_bytes=PAGE, background=False)
        self.nvme = Faulty(MemoryTier("nvme", survives="reboot"), faults)
        self.pfs = Faulty(MemoryTier("pfs", scope="shared", survives="node-loss"), faults)
        tiers: list[Tier] = [self.host, self.nvme, self.pfs]
        mover = Mover(self.copier, self.host.arena, self.host)
        self.catalog = Catalog("run", tiers)
        self.chain = Chain("run", tiers, mover, self.catalog, LoopClock(), Settings())
        self.tasks: list[asyncio.Task[Any]] = []
        self.flushed: list[Goal] = []
        self.flushers = {tier.info.name: self._flusher(tier) for tier in self.chain.storage}
        self.steering = self.steer(policies)

    def steer(self, policies: Sequence[Any]) -> Steering:
        owner: Any = SimpleNamespace(writership=self)
        self.deleter = Deleter(self.chain, owner, EventLog(self.chain.clock), self._keep, set())
        verifier = Verifier(self.chain, Mender(self.chain, owner, set()), self.deleter.events)
        return Steering(self.chain, policies, self.flushers, self.deleter, verifier, self._keep)

    async def require(self, tier: Tier, step: int) -> None:
        """The run is ours."""

    def _flusher(self, tier: Tier) -> Flusher:
        return Flusher(tier, self._flush, LoopClock(), Backoff(random.Random(0)))

    def add_mirror(self) -> Flusher:
        """One more place that flushes go to; policies do not see it."""
        self.flushers["mirror"] = self._flusher(MemoryTier("mirror"))
        return self.flushers["mirror"]

    async def _flush(self, goal: Goal) -> None:
        self.flushed.append(goal)
        await asyncio.Event().wait()

    def _keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    async def have(self, step: int, *tiers: Tier, clean: bool = True) -> Attempt:
        """A checkpoint of one page, committed on these tiers and known to the catalog."""
        attempt = Attempt(1, step, step)
        for tier in tiers:
            shard = ShardKey(CheckpointKey("run", attempt.folder), "model.safetensors")
            reservation = await tier.reserve(shard, PAGE)
            assert isinstance(reservation, Reservation)
            if tier is self.host:
                slot = await self.host.arena.acquire(Priority.SNAPSHOT, kept=True)
                self.host.arena.place(slot, shard, 0, PAGE)
                self.host.arena.filled(slot)
                self.host.arena.release(slot)
            manifest = Manifest(
                run_id="id", step=step, attempt=attempt.folder, world=1, parts={"model": PAGE}, covers=[0], digests=[0],
                made=0.0,
            )  # fmt: skip
            record = RecordKey("run", f"{attempt.folder}/manifest.json")
            assert await tier.commit(record, encode(manifest), shards=[reservation])
            self.catalog.add(attempt, tier, {"model.safetensors": PAGE}, manifest)
            if clean and self.host in tiers:
                self.host.arena.clean(shard)
        return attempt

    async def fill_host(self) -> None:
        """Takes all of the host's slots, so that whatever is clean is evicted."""
        arena = self.host.arena
        held = [await arena.acquire(Priority.SNAPSHOT) for _ in range(arena.count)]
        for slot in held:
            arena.release(slot)

    def on(self, attempt: Attempt) -> set[str]:
        return {holding.tier.info.name for holding in self.catalog.holdings.get(attempt, [])}

    async def done(self) -> None:
        while self.tasks:
            await self.tasks.pop()

    async def close(self) -> None:
        await self.done()
        for flusher in self.flushers.values():
            await flusher.close()
        for tier in self.chain.tiers:
            await tier.close()
        self.copier.close()
        self.engine.close()


def steer(scenario: Callable[[Bench], Coroutine[Any, Any, None]], *policies: Any, faults: Sequence[Fault] = ()) -> None:
    async def main() -> None:
        bench = Bench(*policies, faults=faults)
        try:
            await scenario(bench)
        finally:
            await bench.close()

    asyncio.run(main())


def name(step: int) -> str:
    return Attempt(1, step, step).folder


def test_a_view_says_what_is_where() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.have(1, bench.nvme, bench.pfs)
        await bench.have(2, bench.host, bench.nvme)
        bench.flushers["pfs"].want(Attempt(1, 2, 2))
        view = await bench.steering.views.look()
        assert [tier.name for tier in view.tiers] == ["host", "nvme", "pfs"]
        assert [(c.step, sorted(c.complete_on), c.size_bytes) for c in view.checkpoints] == [
            (1, ["nvme", "pfs"], PAGE),
            (2, ["host", "nvme"], PAGE),
        ]
        assert view.promised == {(name(2), "pfs"): None}

    steer(scenario)


def test_what_host_memory_has_lost_counts_no_more() -> None:
    policy = Says(Drop(name(1), "nvme", "any"))

    async def scenario(bench: Bench) -> None:
        first = await bench.have(1, bench.host, bench.nvme)
        await bench.have(2, bench.nvme)
        bench.flushers["pfs"].want(first)
        assert bench.on(first) == {"host", "nvme"}
        await bench.fill_host()
        assert bench.host.arena.evicted_bytes == PAGE and bench.on(first) == {"nvme"}
        await bench.steering.on(Opened())
        await bench.done()
        assert bench.on(first) == {"nvme"}  # the flush to the pfs still needs it

    steer(scenario, policy)


def test_a_copy_in_memory_that_may_go_is_no_reason_to_drop_the_one_that_a_flush_needs() -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.have(1, bench.host, bench.nvme)
        await bench.have(2, bench.nvme)
        bench.flushers["pfs"].want(first)
        await bench.steering.on(Opened())
        await bench.done()
        assert bench.on(first) == {"host", "nvme"}

    steer(scenario, Retain("nvme", last=1))


def test_moves_of_one_answer_are_judged_one_after_the_other() -> None:
    policy = Says(Drop(name(1), "nvme", "any"), Drop(name(1), "pfs", "any"))

    async def scenario(bench: Bench) -> None:
        first = await bench.have(1, bench.nvme, bench.pfs)
        mirror, second_one = bench.add_mirror(), await bench.have(2, bench.nvme, bench.pfs)
        for attempt in (second_one, first):  # the first has to wait until the second is there
            mirror.want(attempt)
            await turns()
        await bench.steering.on(Opened())
        await bench.done()
        assert bench.on(first) == {"pfs"}  # one of them must stay for the mirror

    steer(scenario, policy)


def test_decisions_at_the_same_time_do_not_delete_twice_what_each_allows_once() -> None:
    first_policy, second = Says(Drop(name(1), "nvme", "any")), Says(Drop(name(1), "pfs", "any"))

    async def scenario(bench: Bench) -> None:
        first = await bench.have(1, bench.nvme, bench.pfs)
        mirror, second_one = bench.add_mirror(), await bench.have(2, bench.nvme, bench.pfs)
        for attempt in (second_one, first):  # the first has to wait until the second is there
            mirror.want(attempt)
            await turns()
        bench.catalog._manifests.clear()  # so that views take a while
        other = bench.steer([second])
        await asyncio.gather(bench.steering.on(Opened()), other.on(Opened()))
        await bench.done()
        assert len(bench.on(first)) == 1

    steer(scenario, first_policy)


def test_no_scan_brings_back_what_is_being_deleted() -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.have(1, bench.nvme)
        await bench.have(2, bench.nvme)
        await bench.steering.on(Opened())
        await turns()
        assert bench.on(first) == set() and await bench.nvme.fetch(RecordKey("run", f"{name(1)}/manifest.json"))
        await bench.catalog.refresh()  # the files are still there: the deletion is stuck
        assert bench.on(first) == set() and not bench.catalog.debris
        scan = asyncio.ensure_future(bench.catalog.refresh())
        bench.nvme.release()
        await bench.done()
        await scan
        assert bench.on(first) == set()
        await bench.catalog.refresh()
        assert [a.step for a in bench.catalog.holdings] == [2]

    steer(scenario, Retain("nvme", last=1), faults=[Fault("drop", 1, "stall")])


def test_a_copy_that_cannot_be_deleted_is_found_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.have(1, bench.nvme)
        await bench.have(2, bench.nvme)
        await bench.steering.on(Opened())
        await bench.done()
        assert "deleting step 1 from nvme failed" in caplog.text
        await bench.catalog.refresh()
        assert bench.on(first) == {"nvme"}
        await bench.steering.on(Opened())
        await bench.done()
        assert bench.on(first) == set()

    with caplog.at_level(logging.WARNING):
        steer(scenario, Retain("nvme", last=1), faults=[Fault("drop", 1)])


def test_moves_that_make_no_sense_harm_nothing() -> None:
    policy = Says(
        Flush(name(1), "host", "any"),
        Flush(name(9), "pfs", "any"),
        Flush(name(1), "tape", "any"),
        Drop(name(1), "tape", "any"),
        Flush(name(1), "pfs", "any"),
    )

    async def scenario(bench: Bench) -> None:
        first = await bench.have(1, bench.nvme)
        goals = await bench.steering.on(Opened())
        assert [(goal.attempt, goal.parts) for goal in goals] == [(first, None)]

    steer(scenario, policy)


def test_a_checkpoint_that_is_open_is_not_dropped_and_another_rank_deletes_elsewhere() -> None:
    async def scenario(bench: Bench) -> None:
        first = await bench.have(1, bench.nvme)
        await bench.have(2, bench.nvme)
        bench.catalog.begin_reading(first)
        await bench.steering.on(Opened())
        bench.catalog.end_reading(first)
        bench.steering.may_drop = lambda tier: tier != "nvme"
        await bench.steering.on(Opened())
        await bench.done()
        assert bench.on(first) == {"nvme"}
        bench.steering.may_drop = lambda tier: True
        await bench.steering.on(Opened())
        await bench.done()
        assert bench.on(first) == set()

    steer(scenario, Retain("nvme", last=1))


def test_manifests_that_a_tier_does_not_give_are_asked_for_together() -> None:
    policy = Says()

    async def scenario(bench: Bench) -> None:
        for step in range(1, 9):
            await bench.have(step, bench.nvme, bench.pfs)
        bench.catalog._manifests.clear()
        looking = asyncio.ensure_future(bench.steering.on(Opened()))
        await turns(20)
        assert len(bench.nvme.hit) == 8 and len(bench.pfs.hit) == 9 and not looking.done()  # and the next note
        bench.nvme.release()
        bench.pfs.release()
        await looking
        assert [len(c.complete_on) for c in policy.seen[0].checkpoints] == [2] * 8

    steer(scenario, policy, faults=[Fault("fetch", 1, "stall", times=100)])


# -- reserving ---------------------------------------------------------------------------------------


class Slow(MemoryTier):
    """Grants at once, answers later."""

    def __init__(self, refuse: str = "") -> None:
        super().__init__("slow", 10 * PAGE)
        self.refuse = refuse

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        if shard.name == self.refuse:
            await asyncio.sleep(0)
            raise CorruptData("no")
        answer = await super().reserve(shard, size_bytes, resume=resume)
        try:
            for _ in range(int(shard.name)):
                await asyncio.sleep(0)
        except asyncio.CancelledError:  # as the contract says: nobody hears the answer
            await self.abort(Reservation(shard, size_bytes))
            raise
        return answer


def shards(count: int, size: int = PAGE) -> list[tuple[ShardKey, int]]:
    return [(ShardKey(CheckpointKey("run", name(1)), str(number)), size) for number in range(count)]


def test_room_for_all_or_for_none() -> None:
    async def scenario() -> None:
        tier = Slow()
        with pytest.raises(TierFull, match="needed") as caught:
            await reserve(tier, shards(11))
        assert tier.usage().in_flight_bytes == 0 and caught.value.where["needed_bytes"] == PAGE
        tier.refuse = "3"
        with pytest.raises(CorruptData):
            await reserve(tier, shards(5))
        assert tier.usage().in_flight_bytes == 0
        assert len(await reserve(tier, shards(3))) == 3

    asyncio.run(scenario())


def test_an_abort_that_fails_does_not_hide_why_there_is_no_room() -> None:
    async def scenario() -> None:
        tier = Faulty(Slow(), [Fault("abort", 1, times=100)])
        with pytest.raises(TierFull):
            await reserve(tier, shards(11))

    asyncio.run(scenario())


@pytest.mark.parametrize("count", range(8))
def test_a_reservation_cancelled_at_any_moment_gives_all_room_back(count: int) -> None:
    async def scenario() -> None:
        tier = Slow()
        task = asyncio.ensure_future(reserve(tier, shards(5)))
        await turns(count)
        task.cancel()
        await asyncio.wait([task])
        await turns(10)
        assert tier.usage().in_flight_bytes == (0 if task.cancelled() else 5 * PAGE)

    asyncio.run(scenario())


def test_what_was_open_is_asked_about_again_once_nobody_reads_it() -> None:
    """And nothing else is: a read that is itself a policy's doing would be followed by the next one, for ever."""

    async def scenario(bench: Bench) -> None:
        first, second = await bench.have(1, bench.nvme), await bench.have(2, bench.nvme)
        bench.catalog.was_read = bench.steering.was_read
        for attempt in (first, first, second):
            bench.catalog.begin_reading(attempt)
        await bench.steering.on(Opened())
        bench.catalog.end_reading(second)
        bench.catalog.end_reading(first)
        await bench.done()
        assert bench.on(first) == {"nvme"} and Read(second.folder) not in asked
        bench.catalog.end_reading(first)
        await bench.done()
        assert bench.on(first) == set() and asked == [Opened(), Read(first.folder)]

    asked: list[Event] = []
    retain = Retain("nvme", last=1)

    class Asked:
        def decide(self, event: Event, view: View) -> Sequence[Move]:
            asked.append(event)
            return retain.decide(event, view)

    steer(scenario, Asked())
