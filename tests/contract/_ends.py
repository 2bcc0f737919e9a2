"""Ends: operations refused for their names, cancelled at every await, or asked of a closed tier."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import pytest

from stepwell.errors import ConfigError, StepwellError, TierUnavailable
from stepwell.tiers.base import CheckpointKey, ChunkIO, RecordKey, Reservation, ShardKey, Tier
from tests.contract._place import (
    CHECKPOINT,
    MANIFEST,
    NEW,
    NEW_MANIFEST,
    OTHER,
    PAGE,
    SHARD,
    Memory,
    Place,
    chunks_of,
    data_of,
    found,
    get,
    perform,
    put,
    save,
)


@dataclass
class Step:
    """One operation to be cancelled, on a driver that holds SHARD committed and OTHER reserved."""

    name: str
    call: Callable[[Tier, Reservation], Awaitable[object]]


async def _write_other(tier: Tier) -> None:
    memory = Memory(9000, bytes(9000))  # alive until the tier has let go of it
    await tier.write(chunks_of(OTHER, 9000, memory, PAGE))


async def _lease_and_close(tier: Tier) -> None:
    async with await tier.lease([SHARD]):
        pass


CANCELLED = (
    Step("reserve", lambda tier, reservation: tier.reserve(NEW, 5000)),
    Step("write", lambda tier, reservation: _write_other(tier)),
    Step("commit", lambda tier, reservation: tier.commit(NEW_MANIFEST, b"[1]", shards=[reservation])),
    Step("fetch", lambda tier, reservation: tier.fetch(MANIFEST)),
    Step("beat", lambda tier, reservation: tier.beat(RecordKey("run", "epochs/1.beat"), b"alive")),
    Step("abort", lambda tier, reservation: tier.abort(reservation)),
    Step("drop", lambda tier, reservation: tier.drop([CHECKPOINT])),
    Step("read", lambda tier, reservation: get(tier, SHARD, 9000, PAGE)),
    Step("lease", lambda tier, reservation: _lease_and_close(tier)),
)


class EndsContract:
    """Wrong names, cancellation, and `close`."""

    @pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../x", "nul\0", "x" * 256, "/etc"])
    def test_names_that_are_no_names(self, place: Place, name: str) -> None:
        async def scenario(tier: Tier) -> None:
            for shard in (ShardKey(CHECKPOINT, name), ShardKey(CheckpointKey("run", name), "x")):
                with pytest.raises(ConfigError):
                    await tier.reserve(shard, 1)
            for record in (RecordKey("run", f"{name}/x/y"), RecordKey("..", "x"), RecordKey("run", "../x")):
                with pytest.raises(ConfigError):
                    await tier.commit(record, b"")
            with pytest.raises(ConfigError):
                await tier.drop([CheckpointKey("run", name)])

        perform(place, scenario)

    @pytest.mark.parametrize("step", CANCELLED, ids=lambda step: str(step.name))
    def test_cancelled_at_every_await(self, place: Place, step: Step) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(9000))
            for turns in range(12):
                reservation = await put(tier, OTHER, data_of(9000))
                task = asyncio.ensure_future(step.call(tier, reservation))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await task
                except (asyncio.CancelledError, StepwellError):
                    pass
                assert place.peek_record(NEW_MANIFEST) in (None, b"[1]")
                if step.name == "commit" and place.peek_record(NEW_MANIFEST) is not None:
                    break  # it went through: OTHER belongs to it now
                if step.name == "drop":
                    break  # SHARD is not there any more
                await tier.abort(reservation)  # waits for what goes on in the background
                if place.peek_record(NEW_MANIFEST) is not None:
                    assert place.peek(OTHER) == data_of(9000)
                    break

        async def after(tier: Tier) -> None:
            if place.persistent:
                there = {name for _, name, _ in await found(tier)}
                assert not [name for name in there if name.endswith((".tmp", ".claim"))]
                assert place.peek(NEW) is None

        perform(place, scenario)
        perform(place, after)

    def test_a_cancelled_reservation_takes_no_room(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            for turns in range(12):
                task = asyncio.ensure_future(tier.reserve(NEW, 5000))
                for _ in range(turns):
                    await asyncio.sleep(0)
                done = task.done()
                task.cancel()
                await asyncio.wait([task])
                if not done:
                    while tier.usage().in_flight_bytes:  # taken back in the background
                        await asyncio.sleep(0)
                else:
                    answer = task.result()
                    assert isinstance(answer, Reservation)
                    await tier.abort(answer)

        perform(place, scenario)
        assert place.peek(NEW) is None

    def test_a_cancelled_reservation_does_not_take_back_the_next_one(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            for turns in range(8):
                task = asyncio.ensure_future(tier.reserve(NEW, 9000))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                reservation = await put(tier, NEW, data_of(5000, turns))
                await asyncio.wait([task])
                record = RecordKey("run", f"{NEW.checkpoint.attempt}/rank-{turns:05}.json")
                assert await tier.commit(record, b"{}", shards=[reservation])
                assert place.peek(NEW) == data_of(5000, turns)
                await tier.drop([NEW])

        perform(place, scenario)

    def test_a_closed_tier_says_so(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            reservation = await put(tier, SHARD, data_of(10))
            await tier.close()
            await tier.close()
            memory = Memory(10)
            calls: Sequence[Callable[[], Awaitable[object]]] = (
                lambda: tier.reserve(NEW, 1),
                lambda: tier.write([ChunkIO(SHARD, 0, 10, memory.address)]),
                lambda: tier.read([ChunkIO(SHARD, 0, 10, memory.address)]),
                lambda: tier.commit(MANIFEST, b"", shards=[reservation]),
                lambda: tier.fetch(MANIFEST),
                lambda: tier.beat(MANIFEST, b""),
                lambda: tier.drop([CHECKPOINT]),
                lambda: tier.lease([SHARD]),
                lambda: found(tier),
            )
            for call in calls:
                with pytest.raises(TierUnavailable):
                    await call()

        perform(place, scenario)
