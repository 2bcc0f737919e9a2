"""The conformance suite: what every driver must do, run against each of them.

For a driver of yours: write a `Place` for it, subclass `TierContract` with a fixture `place` that returns one,
and run pytest. `TierInfo` and the place's fields choose the tests; nothing is skipped by a driver's name.
A place looks at the medium behind the driver's back, so that a writing bug and its matching reading bug
cannot hide each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import os
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stepwell.errors import CheckpointGone, ConfigError, StepwellError, TierError, TierUnavailable
from stepwell.native import Region, Ticket
from stepwell.tiers.base import (
    CheckpointKey,
    ChunkIO,
    RecordKey,
    Refused,
    Reservation,
    ShardKey,
    Tier,
)

LENGTHS = (0, 1, 511, 512, 4095, 4096, 4097, (8 << 20) + 1)
CANARY = 0xA5
PAGE = 4096

CHECKPOINT = CheckpointKey("run", "step-000000001.1-1")
SHARD = ShardKey(CHECKPOINT, "model.safetensors")
OTHER = ShardKey(CHECKPOINT, "optimizer.rank00000-of-00004.safetensors")
MANIFEST = RecordKey("run", "step-000000001.1-1/manifest.json")

Scenario = Callable[[Tier], Coroutine[Any, Any, None]]


class Place(ABC):
    """A medium and how to reach it without the driver."""

    #: data are there for a second driver object on the same place
    persistent: ClassVar[bool] = True

    @abstractmethod
    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        """A new driver on this place, not started."""

    @abstractmethod
    def peek(self, shard: ShardKey) -> bytes | None:
        """The shard's bytes on the medium; None if it is not there."""

    @abstractmethod
    def poke(self, shard: ShardKey, data: bytes) -> None:
        """Overwrites the shard's bytes on the medium. It is there, at least as long as `data`."""

    @abstractmethod
    def remove(self, shard: ShardKey) -> None:
        """Removes the shard from the medium."""

    @abstractmethod
    def peek_record(self, record: RecordKey) -> bytes | None:
        """The record's bytes on the medium; None if it is not there."""

    @abstractmethod
    def reality(self, run: str) -> set[tuple[str, str, int]]:
        """Everything that is there of a run: folder or "", name, bytes."""


class Memory:
    """Page-aligned memory, filled with a canary, with room for padding and one page more."""

    def __init__(self, size: int, data: bytes = b"") -> None:
        self.region = Region(-(-size // PAGE) * PAGE + 2 * PAGE)
        self.view = self.region.view()
        self.view[:] = bytes([CANARY]) * self.region.size
        self.view[: len(data)] = data
        self.address = self.region.address

    def take(self, size: int) -> bytes:
        return bytes(self.view[:size])

    def untouched_after(self, size: int) -> bool:
        padded = -(-size // PAGE) * PAGE
        return bytes(self.view[padded:]) == bytes([CANARY]) * (self.region.size - padded)


def data_of(size: int, seed: int = 0) -> bytes:
    return random.Random(seed * 1_000_003 + size).randbytes(size)


def chunks_of(shard: ShardKey, size: int, memory: Memory, step: int = 1 << 20) -> list[ChunkIO]:
    return [ChunkIO(shard, at, min(step, size - at), memory.address + at) for at in range(0, size, step)]


async def put(tier: Tier, shard: ShardKey, data: bytes, step: int = 1 << 20) -> Reservation:
    """Reserves and writes a shard."""
    reservation = await tier.reserve(shard, len(data))
    assert isinstance(reservation, Reservation), reservation
    memory = Memory(len(data), data)
    results = await tier.write(chunks_of(shard, len(data), memory, step))
    assert [result.error for result in results] == [None] * len(results)
    return reservation


async def save(tier: Tier, shard: ShardKey, data: bytes) -> None:
    """Reserves, writes and commits a checkpoint of one shard."""
    reservation = await put(tier, shard, data)
    record = RecordKey(shard.checkpoint.run, f"{shard.checkpoint.attempt}/manifest.json")
    assert await tier.commit(record, b"{}", shards=[reservation])


async def get(tier: Tier, shard: ShardKey, size: int, step: int = 1 << 20) -> bytes:
    memory = Memory(size)
    results = await tier.read(chunks_of(shard, size, memory, step))
    for result in results:
        if result.error is not None:
            raise result.error
    assert memory.untouched_after(size)
    return memory.take(size)


async def found(tier: Tier, run: str = "run") -> set[tuple[str, str, int]]:
    return {(each.attempt, each.name, each.size_bytes) async for each in tier.scan(run)}


def perform(place: Place, scenario: Scenario, *, capacity_bytes: int | None = None) -> None:
    """Runs a scenario on a started driver, closes it, and checks that no descriptor is left open."""

    async def main() -> None:
        tier = place.make(capacity_bytes=capacity_bytes)
        await tier.start()
        try:
            await scenario(tier)
        finally:
            await tier.close()

    before = open_files()
    asyncio.run(main())
    if open_files() != before:
        gc.collect()  # a loop's own descriptors may wait for it
    assert open_files() == before, describe_files()


def describe_files() -> str:
    links = []
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            links.append(f"{number}: " + os.readlink(f"/proc/self/fd/{number}"))
    return "\n".join(links)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


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


NEW = ShardKey(CheckpointKey("run", "step-000000002.1-2"), "model.safetensors")
NEW_MANIFEST = RecordKey("run", "step-000000002.1-2/manifest.json")
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


@dataclass
class Model:
    """What a tier holds of one run, kept in the simplest way."""

    run: str
    reserved: dict[ShardKey, Reservation]
    committed: dict[ShardKey, bytes]
    written: dict[ShardKey, bytes]
    manifests: set[CheckpointKey]

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
        assert tier.usage().logical_bytes == sum(sizes) + sum(map(len, self.committed.values()))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "commit", "abort", "drop", "drop_shard"]),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from([0, 1, 4096, 5000, 20_000]),
    ),
    max_size=12,
)


class TierContract:
    """Subclass it and give a fixture `place`."""

    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError("a subclass gives the place")

    # -- bytes ---------------------------------------------------------------------------------------

    @pytest.mark.parametrize("size", LENGTHS)
    def test_what_is_written_is_there_and_exactly_as_long(self, place: Place, size: int) -> None:
        async def scenario(tier: Tier) -> None:
            data = data_of(size)
            await save(tier, SHARD, data)
            assert place.peek(SHARD) == data
            assert await get(tier, SHARD, size) == data

        perform(place, scenario)

    def test_what_others_put_there_is_read(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, bytes(10_000))
            place.poke(SHARD, data_of(10_000))
            assert await get(tier, SHARD, 10_000, PAGE) == data_of(10_000)

        perform(place, scenario)

    def test_chunks_come_in_any_order_and_in_many_batches(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            size = (1 << 20) + 77
            data, memory = data_of(size), Memory(size, data_of(size))
            chunks = chunks_of(SHARD, size, memory, 64 << 10)
            random.Random(1).shuffle(chunks)
            reservation = await tier.reserve(SHARD, size)
            assert isinstance(reservation, Reservation)
            halves = await asyncio.gather(tier.write(chunks[:7]), tier.write(chunks[7:]))
            assert all(result.error is None for half in halves for result in half)
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
            assert place.peek(SHARD) == data
            random.Random(2).shuffle(chunks)
            back = Memory(size)
            again = [ChunkIO(SHARD, each.offset, each.length, back.address + each.offset) for each in chunks]
            assert all(result.error is None for result in await tier.read(again))
            assert back.take(size) == data

        perform(place, scenario)

    def test_shards_share_a_batch_and_a_commit(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            first, second = data_of(5000), data_of(6000)
            reservations = [await tier.reserve(SHARD, 5000), await tier.reserve(OTHER, 6000)]
            memories = Memory(5000, first), Memory(6000, second)
            results = await tier.write(chunks_of(SHARD, 5000, memories[0]) + chunks_of(OTHER, 6000, memories[1]))
            assert [result.error for result in results] == [None, None]
            assert await tier.commit(MANIFEST, b"{}", shards=[r for r in reservations if isinstance(r, Reservation)])
            assert (place.peek(SHARD), place.peek(OTHER)) == (first, second)

        perform(place, scenario)

    def test_a_failed_chunk_fails_alone(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            await save(tier, SHARD, data_of(5000))
            memory = Memory(20_000)
            absent = ShardKey(CHECKPOINT, "absent.safetensors")
            good, past, gone = await tier.read(
                [
                    ChunkIO(SHARD, 4096, 904, memory.address),
                    ChunkIO(SHARD, 4096, 905, memory.address + PAGE),
                    ChunkIO(absent, 0, 100, memory.address + 2 * PAGE),
                ]
            )
            assert good.error is None and memory.take(904) == data_of(5000)[4096:]
            assert isinstance(past.error, TierError) and "truncated" in str(past.error) and "4096" in str(past.error)
            assert isinstance(gone.error, TierError) and gone.error.errno == errno.ENOENT
            assert "absent.safetensors" in str(gone.error)

        perform(place, scenario)

    def test_nothing_is_written_outside_of_a_reservation(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            memory = Memory(10_000, data_of(10_000))
            reservation = await tier.reserve(SHARD, 5000)
            assert isinstance(reservation, Reservation)
            inside, past, unknown = await tier.write(
                [
                    ChunkIO(SHARD, 0, 5000, memory.address),
                    ChunkIO(SHARD, 4096, 905, memory.address),
                    ChunkIO(OTHER, 0, 100, memory.address),
                ]
            )
            assert inside.error is None
            assert isinstance(past.error, TierError) and isinstance(unknown.error, TierError)
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
            assert place.peek(SHARD) == data_of(10_000)[:5000]
            late = await tier.write([ChunkIO(SHARD, 0, 100, memory.address + PAGE)])
            assert late[0].error is not None and place.peek(SHARD) == data_of(10_000)[:5000]

        perform(place, scenario)

    # -- tickets -------------------------------------------------------------------------------------

    def test_tickets(self, place: Place) -> None:
        """A linked tier waits for `after` and fires `signal`; another does not even look at them."""

        async def scenario(tier: Tier) -> None:
            reservation = await tier.reserve(SHARD, 5000)
            assert isinstance(reservation, Reservation)
            memory, after, signal = Memory(5000, data_of(5000)), Ticket(), Ticket()
            writing = asyncio.ensure_future(tier.write([ChunkIO(SHARD, 0, 5000, memory.address, after, signal)]))
            if tier.info.linked:
                for _ in range(20):
                    await asyncio.sleep(0)
                assert not writing.done() and signal.state == "pending"
                after.fire()
            assert [result.error for result in await writing] == [None]
            assert signal.state == ("done" if tier.info.linked else "pending")
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
            assert place.peek(SHARD) == data_of(5000)

        perform(place, scenario)

    def test_a_failed_chunk_fails_its_signal(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            if not tier.info.linked:
                return
            await save(tier, SHARD, data_of(100))
            memory, signals = Memory(10_000), [Ticket() for _ in range(4)]
            await tier.read([ChunkIO(SHARD, 0, 101, memory.address, None, signals[0])])
            await tier.read([ChunkIO(OTHER, 0, 10, memory.address, None, signals[1])])
            await tier.write([ChunkIO(OTHER, 0, 10, memory.address, None, signals[2])])
            assert isinstance(await tier.reserve(OTHER, 100), Reservation)
            failed = Ticket()
            failed.fire(False)
            [result] = await tier.write([ChunkIO(OTHER, 0, 10, memory.address, failed, signals[3])])
            assert result.error is not None
            assert [signal.state for signal in signals] == ["failed"] * 4

        perform(place, scenario)

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

    def test_a_record_that_is_not_there(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            assert await tier.fetch(MANIFEST) is None
            assert await found(tier, "another run") == set()
            await tier.drop([MANIFEST, CHECKPOINT, SHARD])

        perform(place, scenario)

    def test_an_empty_record_is_a_record(self, place: Place) -> None:
        async def scenario(tier: Tier) -> None:
            assert await tier.commit(MANIFEST, b"")
            assert await tier.fetch(MANIFEST) == b""
            assert not await tier.commit(MANIFEST, b"x")

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

    # -- room and books ------------------------------------------------------------------------------

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
                for name, *arguments in operations:
                    await getattr(model, name)(tier, *arguments)
                    await model.check(tier, place)

            perform(place, scenario)

        agree()

    # -- wrong use, cancellation, end ----------------------------------------------------------------

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
