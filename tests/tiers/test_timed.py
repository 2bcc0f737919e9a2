"""Calls that are not answered are given up, cleaned up once they are, and never in the way of close or exit."""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import TierError, TierUnavailable
from stepwell.tiers import _files, _folders, _timed, file
from stepwell.tiers.base import ChunkIO, RecordKey, Reservation, Tier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.pfs import PfsTier
from stepwell.tiers.wrap import Fault, Faulty, Timed
from tests.contract.suite import CHECKPOINT, MANIFEST, NEW, SHARD, Memory, data_of, found, get, put, save
from tests.resources import comes_back_to, describe_files, in_use
from tests.tiers.helpers import on, pfs, refusing, started, tree

SHORT_S = 0.4


class Hang:
    """A blocking call that hangs until `release`, and then does what it should."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self._gate = threading.Event()
        self.begun = threading.Event()

    def __call__(self, *arguments: Any) -> Any:
        self.begun.set()
        self._gate.wait()
        return self._call(*arguments)

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any, str], Hang]]:
    """Makes a function hang; all go on when the test ends."""
    hanging: list[Hang] = []

    def make(where: Any, name: str) -> Hang:
        hanging.append(Hang(getattr(where, name)))
        monkeypatch.setattr(where, name, hanging[-1])
        return hanging[-1]

    yield make
    for each in hanging:
        each.release()


def timed(root: Path, timeout_s: float = SHORT_S) -> PfsTier:
    return pfs(root, engine="threads", timeout_s=timeout_s)


CALLS: dict[str, Callable[[Tier, Reservation], Awaitable[object]]] = {
    "reserve": lambda tier, reservation: tier.reserve(NEW, 10),
    "commit": lambda tier, reservation: tier.commit(MANIFEST, b"{}", shards=[reservation]),
    "fetch": lambda tier, reservation: tier.fetch(MANIFEST),
    "beat": lambda tier, reservation: tier.beat(RecordKey("run", "epochs/1.beat"), b""),
    "abort": lambda tier, reservation: tier.abort(reservation),
    "drop": lambda tier, reservation: tier.drop([CHECKPOINT]),
    "lease": lambda tier, reservation: tier.lease([SHARD]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_not_answered_is_given_up_by_name(name: Any) -> None:
    async def scenario(tier: Timed) -> None:
        reservation = await put(tier, SHARD, data_of(10))
        with pytest.raises(TierUnavailable, match=f"did not answer within {SHORT_S} s") as caught:
            await CALLS[name](tier, reservation)
        assert caught.value.errno == errno.ETIMEDOUT and caught.value.where["call"] == name
        assert "run" in str(caught.value.where["key"])

    first = 2 if name == "reserve" else 1
    on(Timed(Faulty(MemoryTier(), [Fault(name, first, "stall")]), SHORT_S), scenario)


def test_chunks_are_not_cut_off() -> None:
    """Their memory belongs to the tier until it answers."""

    async def scenario(tier: Timed) -> None:
        faulty = tier.tier
        assert isinstance(faulty, Faulty)
        saving = asyncio.ensure_future(put(tier, SHARD, data_of(5000)))
        _, pending = await asyncio.wait([saving], timeout=3 * SHORT_S)
        assert pending
        faulty.release()
        await saving

    on(Timed(Faulty(MemoryTier(), [Fault("write", 1, "stall")]), SHORT_S), scenario)


def test_a_timeout_of_the_tiers_own_stays_its_own() -> None:
    class Slow(MemoryTier):
        async def fetch(self, record: RecordKey) -> bytes | None:
            raise TimeoutError("mine")

    async def scenario(tier: Tier) -> None:
        with pytest.raises(TimeoutError, match="mine"):
            await tier.fetch(MANIFEST)

    on(Timed(Slow(), 60), scenario)


def test_a_commit_has_time_for_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_timed, "SYNC_BYTES_PER_S_MIN", 100)

    async def scenario(tier: Timed) -> None:
        with pytest.raises(TierUnavailable, match=f"within {SHORT_S + 0.1} s"):
            await tier.commit(MANIFEST, b"{}", shards=[Reservation(SHARD, 10)])

    on(Timed(Faulty(MemoryTier(), [Fault("commit", 1, "stall")]), SHORT_S), scenario)


# -- a file system that hangs --------------------------------------------------------------------------


def test_a_reservation_that_was_given_up_is_taken_back(root: Path, hang: Callable[[Any, str], Hang]) -> None:
    before = in_use()

    async def scenario(tier: PfsTier) -> None:
        await save(tier, SHARD, data_of(10))
        creating = hang(_files, "create")
        with pytest.raises(TierUnavailable, match="reserve.*step-000000002"):
            await tier.reserve(NEW, 5000)
        assert await get(tier, SHARD, 10) == data_of(10)  # others go on
        creating.release()
        while tier.usage().in_flight_bytes:
            await asyncio.sleep(0)
        await save(tier, NEW, data_of(20))
        assert await get(tier, NEW, 20) == data_of(20)

    on(timed(root), scenario)
    assert comes_back_to(before), describe_files()


def test_a_commit_that_was_given_up_may_still_succeed(root: Path, hang: Callable[[Any, str], Hang]) -> None:
    async def scenario(tier: PfsTier) -> None:
        reservation = await put(tier, SHARD, data_of(5000))
        finishing = hang(_files, "finish")
        with pytest.raises(TierUnavailable, match="commit"):
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
        finishing.release()
        while await tier.fetch(MANIFEST) is None:
            await asyncio.sleep(0)
        assert not await tier.commit(MANIFEST, b"{}", shards=[reservation])
        assert await get(tier, SHARD, 5000) == data_of(5000)

    on(timed(root, 0.2), scenario)


def test_nothing_is_written_into_a_commit_that_was_given_up(root: Path, hang: Callable[[Any, str], Hang]) -> None:
    """It goes on: a late write would not be durable, or would leave its padding in a committed file."""

    async def scenario(tier: PfsTier) -> None:
        reservation = await put(tier, SHARD, data_of(5000))
        finishing = hang(_files, "finish")
        with pytest.raises(TierUnavailable, match="commit"):
            await tier.commit(MANIFEST, b"{}", shards=[reservation])
        memory = Memory(5000, bytes(5000))
        [result] = await tier.write([ChunkIO(SHARD, 0, 5000, memory.address)])
        assert result.error is not None and result.error.errno == errno.EBUSY
        finishing.release()
        while await tier.fetch(MANIFEST) is None:
            await asyncio.sleep(0)
        assert await get(tier, SHARD, 5000) == data_of(5000)

    on(timed(root, 0.2), scenario)


def test_what_a_failed_commit_held_can_be_written_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(tier: PfsTier) -> None:
        reservation = await put(tier, SHARD, data_of(5000))
        with monkeypatch.context() as patch:
            patch.setattr(_files, "finish", refusing(errno.EINTR))
            with pytest.raises(TierError):
                await tier.commit(MANIFEST, b"{}", shards=[reservation])
        memory = Memory(5000, bytes(5000))
        [result] = await tier.write([ChunkIO(SHARD, 0, 5000, memory.address)])
        assert result.error is None and await tier.commit(MANIFEST, b"{}", shards=[reservation])
        assert await get(tier, SHARD, 5000) == bytes(5000)

    on(timed(root, 60), scenario)


def test_a_close_that_is_cancelled_goes_on(root: Path, hang: Callable[[Any, str], Hang]) -> None:
    async def main() -> None:
        tier = timed(root, 60)
        await tier.start()
        creating = hang(_files, "create")
        reserving = asyncio.ensure_future(tier.reserve(NEW, 10))
        while not creating.begun.is_set():
            await asyncio.sleep(0)
        closing = asyncio.ensure_future(tier.close())
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        creating.release()
        await asyncio.wait([reserving])
        assert tier.files._closing is not None
        await tier.files._closing

    before = in_use()
    asyncio.run(main())
    assert comes_back_to(before), describe_files()


def test_a_listing_that_hangs(root: Path, hang: Callable[[Any, str], Hang]) -> None:
    async def scenario(tier: PfsTier) -> None:
        await save(tier, SHARD, data_of(10))
        for name in ("list_run", "list_folders"):
            listing = hang(_folders, name)
            with pytest.raises(TierUnavailable, match="scan"):
                await found(tier)
            listing.release()
            assert len(await found(tier)) == 2

    on(timed(root, 0.1), scenario)


def test_a_start_that_hangs_is_given_up_and_found_done_by_the_next(
    root: Path, hang: Callable[[Any, str], Hang]
) -> None:
    async def main() -> None:
        checking = hang(_folders, "check_root")
        tier = timed(root, 0.1)
        for _ in range(2):
            with pytest.raises(TierUnavailable, match="start"):
                await tier.start()
        checking.release()
        async with started(tier):
            await save(tier, SHARD, data_of(10))
            assert len(tier.files._medium._engines) == 2  # nothing was opened twice

    before = in_use()
    asyncio.run(main())
    assert comes_back_to(before), describe_files()


def test_close_of_a_hung_tier_returns_and_a_start_that_ends_later_opens_nothing(
    root: Path, hang: Callable[[Any, str], Hang], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file, "CLOSE_S", 0.05)
    monkeypatch.setattr(file, "CLOSE_HUNG_S", 0.01)

    async def main() -> None:
        checking = hang(_folders, "space")  # the last call of a start
        tier = timed(root)
        with pytest.raises(TierUnavailable):
            await tier.start()
        begin = time.monotonic()
        await tier.close()
        assert time.monotonic() - begin < 2
        checking.release()
        while tier.files._calls._tasks:
            await asyncio.sleep(0)
        with pytest.raises(TierUnavailable, match="closed"):
            await tier.fetch(MANIFEST)

    before = in_use()
    asyncio.run(main())
    assert comes_back_to(before), describe_files()


def test_close_takes_a_few_seconds_at_most() -> None:
    assert file.CLOSE_S + 2 * file.CLOSE_HUNG_S <= 6


def test_a_process_ends_although_every_call_hangs(root: Path) -> None:
    script = """
import asyncio, sys, threading
from pathlib import Path
from stepwell.tiers import _files, file
from stepwell.tiers.base import CheckpointKey, ShardKey
from stepwell.tiers.pfs import PfsTier
file.CLOSE_S = file.CLOSE_HUNG_S = 0.05

async def main():
    tier = PfsTier(sys.argv[1], reading="direct", timeout_s=0.4)
    await tier.start()
    _files.create = lambda *arguments: threading.Event().wait()
    for number in range(6):
        try:
            await tier.reserve(ShardKey(CheckpointKey("run", "step-1"), str(number)), 10)
        except OSError as error:
            print(type(error).__name__)
    await tier.close()
    assert all(thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread())

asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["TierUnavailable"] * 6), done.stderr


def test_a_hung_cache_folder_delays_a_start_only_a_moment(
    root: Path, hang: Callable[[Any, str], Hang], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell.tiers import _marker
    from stepwell.tiers import pfs as module

    monkeypatch.setattr(module, "CACHE_S", 0.01)
    gate = threading.Event()
    monkeypatch.setattr(_marker.Memory, "recall", lambda memory: str(gate.wait()))
    monkeypatch.setattr(_marker.Memory, "remember", lambda memory, tier_id: gate.wait())
    try:
        on(timed(root, 60), lambda tier: save(tier, SHARD, data_of(10)))
    finally:
        gate.set()
    assert f"run/{CHECKPOINT.attempt}/manifest.json" in tree(root)
