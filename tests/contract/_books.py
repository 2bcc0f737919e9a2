"""Books: room is granted or refused with numbers, and usage and scan agree with the medium and with a model."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import TierError
from stepwell.tiers.base import CheckpointKey, RecordKey, Refused, Reservation, ShardKey, Tier
from tests.contract._place import (
    CHECKPOINT,
    MANIFEST,
    NEW,
    OTHER,
    SHARD,
    Place,
    data_of,
    found,
    get,
    perform,
    put,
    save,
)


@dataclass
class Model:
    """What a tier holds of one run, kept in the simplest way."""

    run: str
    reserved: dict[ShardKey, Reservation]
    committed: dict[ShardKey, bytes]
    written: dict[ShardKey, bytes]
    manifests: set[CheckpointKey]
    before_bytes: int = 0  # of other runs

    def shard(self, attempt: int, name: int) -> ShardKey:
        return ShardKey(CheckpointKey(self.run, f"step-{attempt}"), f"{name}.safetensors")

    async def put(self, tier: Tier, attempt: int, name: int, size: int) -> None:
        shard = self.shard(attempt, name)
        if shard in self.committed:
            with pytest.raises(TierError):
                await tier.reserve(shard, size)
            return
        self.written[shard] = data_of(size, attempt + 10 * name)
        self.reserved[shard] = await put(tier, shard, self.written[shard], 8192)

    async def commit(self, tier: Tier, attempt: int, name: int, size: int) -> None:
        checkpoint = self.shard(attempt, name).checkpoint
        shards = [each for shard, each in self.reserved.items() if shard.checkpoint == checkpoint]
        manifest = RecordKey(self.run, f"{checkpoint.attempt}/manifest.json")
        if checkpoint not in self.manifests and not shards:
            with pytest.raises(TierError):
                await tier.commit(manifest, b"{}")
            return
        done = await tier.commit(manifest, b"{}", shards=shards)
        assert done == (checkpoint not in self.manifests)
        self.manifests.add(checkpoint)
        if done:
            for each in shards:
                del self.reserved[each.shard]
                self.committed[each.shard] = self.written[each.shard]

    async def abort(self, tier: Tier, attempt: int, name: int, size: int) -> None:
        reservation = self.reserved.pop(self.shard(attempt, name), None)
        if reservation is not None:
            await tier.abort(reservation)

    async def drop(self, tier: Tier, attempt: int, name: int, size: int) -> None:
        checkpoint = self.shard(attempt, name).checkpoint
        await tier.drop([checkpoint])
        self.manifests.discard(checkpoint)
        for book in (self.reserved, self.committed):
            for shard in [each for each in book if each.checkpoint == checkpoint]:
                del book[shard]

    async def drop_shard(self, tier: Tier, attempt: int, name: int, size: int) -> None:
        shard = self.shard(attempt, name)
        await tier.drop([shard])
        self.reserved.pop(shard, None)
        self.committed.pop(shard, None)

    async def check(self, tier: Tier, place: Place) -> None:
        there = {(attempt, name): size for attempt, name, size in await found(tier, self.run) if name}
        wanted = {(shard.checkpoint.attempt, shard.name) for shard in (*self.reserved, *self.committed)}
        assert set(there) == wanted | {(checkpoint.attempt, "manifest.json") for checkpoint in self.manifests}
        for shard, data in self.committed.items():
            assert there[shard.checkpoint.attempt, shard.name] == len(data)
            assert place.peek(shard) == data
        sizes = [each.size_bytes for each in self.reserved.values()]
        assert tier.usage().in_flight_bytes == sum(sizes)
        here_bytes = sum(sizes) + sum(map(len, self.committed.values()))
        assert tier.usage().logical_bytes == self.before_bytes + here_bytes


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "commit", "abort", "drop", "drop_shard"]),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from([0, 1, 4096, 5000, 20_000]),
    ),
    max_size=12,
)


class BooksContract:
    """`reserve` within the capacity, `usage` and `scan`."""

    def test_a_full_tier_refuses_with_numbers(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            first = await tier.reserve(SHARD, 64 << 10)
            assert isinstance(first, Reservation)
            refused = await tier.reserve(OTHER, 64 << 10)
            assert isinstance(refused, Refused) and refused.reason == "full"
            assert (refused.needed_bytes, refused.free_bytes) == (64 << 10, 36 << 10)
            assert place.peek(OTHER) is None and tier.usage().in_flight_bytes == 64 << 10
            await tier.abort(first)
            assert isinstance(await tier.reserve(OTHER, 100 << 10), Reservation)

        perform(place, scenario, capacity_bytes=100 << 10)

    def test_racing_reservations_keep_within_the_capacity(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            shards = [ShardKey(CHECKPOINT, f"{number}.safetensors") for number in range(8)]
            answers = await asyncio.gather(*(tier.reserve(shard, 40 << 10) for shard in shards))
            assert sum(isinstance(answer, Reservation) for answer in answers) == 2

        perform(place, scenario, capacity_bytes=100 << 10)

    def test_the_books(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            reservation = await put(tier, SHARD, data_of(5000))
            usage = tier.usage()
            assert (usage.logical_bytes, usage.in_flight_bytes) == (5000, 5000)
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
            usage = tier.usage()
            assert (usage.logical_bytes, usage.in_flight_bytes) == (5000, 0)
            assert 5000 <= usage.physical_bytes <= 8192
            await tier.drop([SHARD])
            assert (tier.usage().logical_bytes, tier.usage().physical_bytes) == (0, 0)

        perform(place, scenario)

    def test_a_scan_equals_reality(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(5000))
            await save(tier, NEW, data_of(0))
            await put(tier, ShardKey(CheckpointKey("run", "step-3"), "half.safetensors"), data_of(8192))
            await tier.commit(RecordKey("run", "run.json"), b"{}")
            await tier.commit(RecordKey("run", "notes/a.json"), b"[]")
            await tier.commit(RecordKey("another", "run.json"), b"{}")
            assert await found(tier) == place.reality("run")
            some = {("", "run.json", 2), ("notes", "a.json", 2), (CHECKPOINT.attempt, SHARD.name, 5000)}
            assert some < await found(tier)
            await tier.drop([CHECKPOINT])
            assert await found(tier) == place.reality("run")

        perform(place, scenario)

    def test_a_second_driver_finds_it_all(self, place: Place) -> None:
        if not place.persistent:
            return

        async def first(tier: Tier) -> None:
            await save(tier, SHARD, data_of(5000))

        async def second(tier: Tier) -> None:
            assert await tier.fetch(MANIFEST) == b"{}"
            assert await get(tier, SHARD, 5000) == data_of(5000)
            with pytest.raises(TierError):
                await tier.reserve(SHARD, 10)
            assert await found(tier) == place.reality("run")
            assert tier.usage().logical_bytes == 5000
            place.remove(SHARD)
            await found(tier)
            assert tier.usage().logical_bytes == 0

        perform(place, first)
        perform(place, second)

    def test_any_sequence_of_operations_agrees_with_the_model(self, place: Place) -> None:
        number = 0

        @settings(max_examples=8, deadline=None, derandomize=True, database=None)
        @given(OPERATIONS)
        def agree(operations: list[tuple[str, int, int, int]]) -> None:
            nonlocal number
            number += 1
            model = Model(f"run-{number}", {}, {}, {}, set())

            async def scenario(tier: Tier) -> None:
                model.before_bytes = tier.usage().logical_bytes
                for name, *arguments in operations:
                    await getattr(model, name)(tier, *arguments)
                    await model.check(tier, place)

            perform(place, scenario)

        agree()
