"""Commits: records are whole and final, shards become part of a checkpoint or vanish, leases outlive a drop."""

from __future__ import annotations

import asyncio
import errno

import pytest

from stepwell.errors import CheckpointGone, TierError
from stepwell.tiers.base import RecordKey, Reservation, ShardKey, Tier
from tests.contract._place import (
    CHECKPOINT,
    MANIFEST,
    NEW,
    OTHER,
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


class CommitContract:
    """`commit`, `fetch`, `beat`, `abort`, `drop` and `lease`."""

    # -- records -------------------------------------------------------------------------------------

    def test_of_many_writers_of_a_record_one_wins(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            record = RecordKey("run", "epochs/0000001.json")
            texts = [b"%d" % number * 1000 for number in range(10)]
            won = await asyncio.gather(*(tier.commit(record, text) for text in texts))
            assert won.count(True) == 1
            assert await tier.fetch(record) == texts[won.index(True)] == place.peek_record(record)
            assert await found(tier) == {("epochs", "0000001.json", 1000)}

        perform(place, scenario)

    def test_a_record_is_never_replaced(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            record = RecordKey("run", "run.json")
            assert await tier.commit(record, b"first")
            reservation = await put(tier, SHARD, data_of(100))
            assert not await tier.commit(record, b"second", shards=[reservation])
            assert await tier.fetch(record) == b"first"
            assert tier.usage().in_flight_bytes == 100  # still the caller's to abort or to commit otherwise
            assert await tier.commit(MANIFEST, b"{}", shards=[reservation])
            assert place.peek(SHARD) == data_of(100)

        perform(place, scenario)

    def test_a_manifest_without_anything_to_commit_is_refused(self, place: Place) -> None:
        """Whoever deletes a checkpoint need not fear the commit of a writer that has not heard of it."""

        async def scenario(tier: Tier) -> None:
            for _ in range(2):
                with pytest.raises(TierError) as caught:
                    await tier.commit(MANIFEST, b"{}")
                assert caught.value.errno == errno.ENOENT
                assert await tier.fetch(MANIFEST) is None and await found(tier) == set()
                await save(tier, SHARD, data_of(10))
                await tier.drop([CHECKPOINT])

        perform(place, scenario)

    def test_a_record_that_is_not_there(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            assert await tier.fetch(MANIFEST) is None
            assert await found(tier, "another run") == set()
            await tier.drop([MANIFEST, CHECKPOINT, SHARD])

        perform(place, scenario)

    def test_an_empty_record_is_a_record(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            record = RecordKey("run", f"{CHECKPOINT.attempt}/rank-00000.json")
            assert await tier.commit(record, b"")
            assert await tier.fetch(record) == b""
            assert not await tier.commit(record, b"x")

        perform(place, scenario)

    def test_a_beat_replaces(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            beat = RecordKey("run", "epochs/0000001.beat")
            for text in (b"1", b"22", b""):
                await tier.beat(beat, text)
                assert await tier.fetch(beat) == place.peek_record(beat) == text

        perform(place, scenario)

    # -- commit, abort, drop -------------------------------------------------------------------------

    def test_a_commit_needs_its_reservations(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await put(tier, SHARD, data_of(100))
            for wrong in (Reservation(OTHER, 100), Reservation(SHARD, 99)):
                with pytest.raises(TierError):
                    await tier.commit(MANIFEST, b"{}", shards=[wrong])
            assert place.peek_record(MANIFEST) is None

        perform(place, scenario)

    def test_a_committed_shard_is_never_overwritten(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(100))
            with pytest.raises(TierError):
                await tier.reserve(SHARD, 50)
            assert (tier.usage().logical_bytes, tier.usage().in_flight_bytes) == (100, 0)
            assert place.peek(SHARD) == data_of(100)

        perform(place, scenario)

    def test_reserving_again_starts_anew(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await put(tier, SHARD, data_of(9000))
            reservation = await put(tier, SHARD, data_of(10))
            assert tier.usage().in_flight_bytes == 10
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
            assert place.peek(SHARD) == data_of(10)

        perform(place, scenario)

    def test_an_abort_leaves_nothing(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            reservation = await put(tier, SHARD, data_of(5000))
            await tier.abort(reservation)
            await tier.abort(reservation)
            assert place.peek(SHARD) is None and place.reality("run") == set() == await found(tier)
            assert tier.usage().logical_bytes == tier.usage().physical_bytes == 0

        perform(place, scenario)

    def test_an_abort_during_a_write(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            reservation = await tier.reserve(SHARD, 1 << 20)
            assert isinstance(reservation, Reservation)
            memory = Memory(1 << 20, data_of(1 << 20))
            writing = asyncio.ensure_future(tier.write(chunks_of(SHARD, 1 << 20, memory, 64 << 10)))
            await asyncio.sleep(0)
            await tier.abort(reservation)
            await writing
            assert place.peek(SHARD) is None

        perform(place, scenario)

    def test_dropping_a_checkpoint(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(5000))
            await save(tier, NEW, data_of(6000))
            await tier.drop([CHECKPOINT])
            await tier.drop([CHECKPOINT])
            assert place.peek(SHARD) is None and place.peek_record(MANIFEST) is None
            assert place.peek(NEW) == data_of(6000)
            assert tier.usage().logical_bytes == 6000

        perform(place, scenario)

    def test_dropping_shards_and_records(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(5000))
            note = RecordKey("run", "notes/keep.json")
            await tier.commit(note, b"{}")
            await tier.drop([SHARD, note])
            assert place.peek(SHARD) is None and place.peek_record(note) is None
            assert place.peek_record(MANIFEST) == b"{}"

        perform(place, scenario)

    def test_no_moment_shows_a_committed_checkpoint_with_files_missing(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            reservations = [await put(tier, ShardKey(CHECKPOINT, f"{n}.safetensors"), data_of(10)) for n in range(20)]
            await tier.commit(MANIFEST, b"{}", shards=reservations)
            dropping = asyncio.ensure_future(tier.drop([CHECKPOINT]))
            while not dropping.done():
                there = place.reality("run")
                if place.peek_record(MANIFEST) is not None:  # looked at later than the files
                    assert len(there) == 21
                await asyncio.sleep(0)
            await dropping
            assert place.reality("run") == set()

        perform(place, scenario)

    # -- leases --------------------------------------------------------------------------------------

    def test_leased_shards_outlive_a_drop(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(9000))
            first, second = await tier.lease([SHARD]), await tier.lease([SHARD])
            await tier.drop([CHECKPOINT])
            assert place.peek(SHARD) is None
            assert tier.usage().logical_bytes == 0 and tier.usage().physical_bytes >= 9000
            await first.close()
            await first.close()
            assert await get(tier, SHARD, 9000) == data_of(9000)
            await second.close()
            assert tier.usage().physical_bytes == 0
            with pytest.raises(TierError):
                await get(tier, SHARD, 9000)

        perform(place, scenario)

    def test_a_lease_says_what_is_missing(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            with pytest.raises(CheckpointGone):
                await tier.lease([SHARD])
            reservations = [await put(tier, SHARD, data_of(10)), await put(tier, OTHER, data_of(10))]
            await tier.commit(MANIFEST, b"{}", shards=reservations)
            place.remove(OTHER)
            with pytest.raises(TierError, match="optimizer") as caught:
                await tier.lease([SHARD, OTHER])
            assert caught.value.errno == errno.ENOENT
            await tier.drop([MANIFEST])
            with pytest.raises(CheckpointGone):
                await tier.lease([SHARD, OTHER])

        perform(place, scenario)
