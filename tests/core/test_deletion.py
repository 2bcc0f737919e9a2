"""Deletes: what commits a copy goes first, and its files once nobody can be reading them any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from stepwell.catalog import Catalog
from stepwell.chain import Chain
from stepwell.deletion import GRACE_S, HURRIED_S, Deleter
from stepwell.errors import RunBusy, TierError
from stepwell.events import EventLog
from stepwell.format.names import DELETED, Attempt, rank_file
from stepwell.format.records import Deleted, Manifest, decode, encode
from stepwell.settings import Settings, TierOptions
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, ShardKey, Tier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Fault, Faulty
from tests.contract.suite import found
from tests.core.virtual import LoopClock, on_virtual_time, turns

ATTEMPT = Attempt(10, 1, 1)

Scenario = Callable[["Bench"], Coroutine[Any, Any, None]]


class Bench:
    """A node tier and a shared one, and who deletes there."""

    def __init__(self, grace_s: float | None, faults: list[Fault]) -> None:
        self.node = MemoryTier("node", survives="reboot")
        self.shared = Faulty(MemoryTier("shared", scope="shared", survives="node-loss"), faults)
        tiers: list[Tier] = [self.node, self.shared]
        self.catalog = Catalog("run", tiers)
        mover: Any = SimpleNamespace(host=None)
        options = {"shared": TierOptions(delete_grace_s=grace_s)}
        chain = Chain("run", tiers, mover, self.catalog, LoopClock(), Settings(), options)
        self.tasks: list[asyncio.Task[Any]] = []
        self.lost = False
        self.events = EventLog(chain.clock)
        owner: Any = SimpleNamespace(writership=self)
        self.deleter = Deleter(chain, owner, self.events, self.keep, set())

    async def require(self, tier: Tier, step: int) -> None:
        if self.lost:
            raise RunBusy("another writer has the run")

    def keep(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        self.tasks.append(asyncio.ensure_future(work))
        return self.tasks[-1]

    async def have(self, tier: Tier, attempt: Attempt = ATTEMPT) -> Manifest:
        shard = ShardKey(CheckpointKey("run", attempt.folder), "model.safetensors")
        reservation = await tier.reserve(shard, 100)
        assert isinstance(reservation, Reservation)
        assert await tier.commit(RecordKey("run", f"{attempt.folder}/{rank_file(0)}"), b"{}", shards=[reservation])
        manifest = Manifest(
            run_id="id", step=attempt.step, attempt=attempt.folder, world=1, parts={"model": 100}, covers=[0],
            digests=[0], made=0.0,
        )  # fmt: skip
        assert await tier.commit(RecordKey("run", f"{attempt.folder}/manifest.json"), encode(manifest))
        return manifest

    def told(self) -> list[str]:
        return [entry.what for entry in self.events.entries]


def deleting(
    scenario: Callable[[Bench], Coroutine[Any, Any, None]],
    grace_s: float | None = None,
    faults: list[Fault] | None = None,
) -> None:
    async def main() -> None:
        bench = Bench(grace_s, faults or [])
        try:
            await scenario(bench)
        finally:
            bench.deleter.stop()
            await asyncio.gather(*bench.tasks, return_exceptions=True)

    on_virtual_time(main)


async def names(tier: Tier, attempt: Attempt = ATTEMPT) -> set[str]:
    return {name for folder, name, _ in await found(tier) if folder == attempt.folder and name}


@pytest.mark.parametrize("grace_s", [None, 5.0, 7200.0])
def test_on_a_shared_tier_the_files_stay_for_a_while(grace_s: float | None) -> None:
    async def scenario(bench: Bench) -> None:
        manifest = await bench.have(bench.shared)
        lease = await bench.shared.lease([ShardKey(CheckpointKey("run", ATTEMPT.folder), "model.safetensors")])
        await bench.deleter.delete(ATTEMPT, bench.shared, manifest, "too old")
        assert await names(bench.shared) == {"model.safetensors", DELETED}
        marker = await bench.shared.fetch(RecordKey("run", f"{ATTEMPT.folder}/{DELETED}"))
        assert marker is not None and decode(marker, Deleted).reason == "too old"
        grace = GRACE_S if grace_s is None else grace_s
        await asyncio.sleep(grace - 1)
        assert await names(bench.shared) == {"model.safetensors", DELETED}
        await asyncio.sleep(2)
        assert await names(bench.shared) == set() and bench.deleter.freed.is_set()
        assert bench.told() == ["deleted", "freed"]
        await lease.close()

    deleting(scenario, grace_s)


def test_on_a_node_tier_and_with_no_grace_they_go_at_once() -> None:
    async def scenario(bench: Bench) -> None:
        for tier in (bench.node, bench.shared):
            await bench.deleter.delete(ATTEMPT, tier, await bench.have(tier), "too old")
            assert await names(tier) == set()
        assert bench.told() == ["deleted", "deleted"]

    deleting(scenario, 0.0)


def test_who_needs_room_waits_a_minute_at_most() -> None:
    async def scenario(bench: Bench) -> None:
        assert bench.deleter.hurry(bench.shared) is None
        others = [Attempt(20, 1, 2), Attempt(30, 1, 3)]
        for attempt in others:
            await bench.deleter.delete(attempt, bench.shared, await bench.have(bench.shared, attempt), "too old")
            await asyncio.sleep(10)
        left = bench.deleter.hurry(bench.shared)
        assert left == pytest.approx(HURRIED_S - 20, abs=1)
        bench.deleter.freed.clear()
        await bench.deleter.freed.wait()
        assert await names(bench.shared, others[0]) == set() and await names(bench.shared, others[1]) != set()
        await asyncio.sleep(HURRIED_S)
        assert await names(bench.shared, others[1]) == set() and not bench.deleter.waiting

    deleting(scenario)


@pytest.mark.parametrize("kind", ["error", "lost answer"])
@pytest.mark.parametrize(("operation", "nth"), [("commit", 3), ("drop", 1)])
def test_a_deletion_that_fails_leaves_the_checkpoint_or_word_that_there_was_one(
    operation: Any, nth: int, kind: Any
) -> None:
    """Else whoever comes next would take the files for a save that nobody can be reading."""

    async def scenario(bench: Bench) -> None:
        manifest = await bench.have(bench.shared)
        with pytest.raises(TierError):
            await bench.deleter.delete(ATTEMPT, bench.shared, manifest, "too old")
        left = await names(bench.shared)
        assert "model.safetensors" in left and left & {"manifest.json", DELETED}
        if "manifest.json" not in left:
            assert await bench.deleter.waits(ATTEMPT, bench.shared)
            await asyncio.sleep(GRACE_S - 1)
            assert "model.safetensors" in await names(bench.shared)
            await asyncio.sleep(2)
            assert await names(bench.shared) == set()

    deleting(scenario, faults=[Fault(operation, nth, kind)])


def test_a_checkpoint_that_comes_again_is_spared() -> None:
    async def scenario(bench: Bench) -> None:
        await bench.deleter.delete(ATTEMPT, bench.shared, await bench.have(bench.shared), "too old")
        await bench.deleter.spare(ATTEMPT, bench.shared)
        await bench.deleter.spare(ATTEMPT, bench.shared)
        await asyncio.sleep(2 * GRACE_S)
        assert await names(bench.shared) == {"model.safetensors"}

    deleting(scenario)


def test_what_another_writer_has_is_left_alone() -> None:
    async def scenario(bench: Bench) -> None:
        manifest = await bench.have(bench.shared)
        await bench.deleter.delete(ATTEMPT, bench.shared, manifest, "too old")
        bench.lost = True
        await asyncio.sleep(2 * GRACE_S)
        assert await names(bench.shared) == {"model.safetensors", DELETED}
        with pytest.raises(RunBusy):
            await bench.deleter.delete(ATTEMPT, bench.node, None, "too old")

    deleting(scenario)


def test_a_tier_that_cannot_free_stops_nothing() -> None:
    other = Attempt(20, 1, 2)

    async def scenario(bench: Bench) -> None:
        for attempt in (ATTEMPT, other):
            await bench.deleter.delete(attempt, bench.shared, await bench.have(bench.shared, attempt), "too old")
        await asyncio.sleep(2 * GRACE_S)
        await turns()
        assert await names(bench.shared, other) == set() and await names(bench.shared) != set()

    deleting(scenario, faults=[Fault("drop", 3, "error")])
