"""Calls that may be repeated are, a few times, when the error may pass; and only then."""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from stepwell.errors import TierError, TierFull
from stepwell.native import Ticket
from stepwell.tiers._retrying import BACKOFF_FACTOR, BACKOFF_S, TRIES
from stepwell.tiers.base import ChunkIO, RecordKey, Reservation, Tier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Fault, Faulty, Retrying
from tests.contract.suite import CHECKPOINT, MANIFEST, NEW, SHARD, Memory, chunks_of, data_of, found, get, put, save
from tests.tiers.helpers import disk, on

BEAT = RecordKey("run", "epochs/1.beat")


class Naps:
    """Takes no time to sleep."""

    def __init__(self) -> None:
        self.slept: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.slept.append(seconds)


def retrying(plan: list[Fault], naps: Naps, tier: Tier | None = None, jitter: float = 0.5) -> Retrying:
    return Retrying(Faulty(tier or MemoryTier(), plan), naps, lambda: jitter)


REPEATED: dict[str, Callable[[Tier], Awaitable[object]]] = {
    "fetch": lambda tier: tier.fetch(MANIFEST),
    "beat": lambda tier: tier.beat(BEAT, b"x"),
    "drop": lambda tier: tier.drop([CHECKPOINT]),
    "lease": lambda tier: tier.lease([SHARD]),
    "write": lambda tier: put(tier, NEW, data_of(10)),
    "read": lambda tier: get(tier, SHARD, 5000),
}


@pytest.mark.parametrize("operation", REPEATED)
@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ENOTCONN])
def test_what_may_pass_is_tried_again(operation: Any, number: int) -> None:
    naps = Naps()
    first = 2 if operation == "write" else 1  # the first saves the shard

    async def scenario(tier: Tier) -> None:
        await save(tier, SHARD, data_of(5000))
        await REPEATED[operation](tier)

    on(retrying([Fault(operation, first, errno=number, times=TRIES - 1)], naps), scenario)
    assert naps.slept == pytest.approx([BACKOFF_S * BACKOFF_FACTOR**n for n in range(TRIES - 1)])


@pytest.mark.parametrize("operation", ["fetch", "beat", "drop", "lease"])
@pytest.mark.parametrize(
    "number",
    [errno.ENOSPC, errno.EDQUOT, errno.ENOENT, errno.EEXIST, errno.EROFS, errno.EINVAL, errno.ETIMEDOUT],
)
def test_what_does_not_pass_is_not(operation: Any, number: int) -> None:
    naps = Naps()

    async def scenario(tier: Tier) -> None:
        await save(tier, SHARD, data_of(10))
        with pytest.raises(TierError) as caught:
            await REPEATED[operation](tier)
        assert caught.value.errno == number and not naps.slept

    on(retrying([Fault(operation, 1, errno=number)], naps), scenario)


@pytest.mark.parametrize("operation", ["reserve", "commit", "abort"])
def test_calls_whose_answer_matters_are_their_callers_to_repeat(operation: Any) -> None:
    naps = Naps()

    async def scenario(tier: Tier) -> None:
        with pytest.raises(TierError):
            reservation = await put(tier, SHARD, data_of(10))
            await tier.abort(reservation)
            await tier.commit(MANIFEST, b"{}")
        assert not naps.slept

    on(retrying([Fault(operation, 1)], naps), scenario)


def test_it_gives_up() -> None:
    naps = Naps()

    async def scenario(tier: Retrying) -> None:
        with pytest.raises(TierError) as caught:
            await tier.fetch(MANIFEST)
        assert caught.value.errno == errno.EIO and len(naps.slept) == TRIES - 1
        assert isinstance(tier.tier, Faulty) and len(tier.tier.hit) == TRIES

    on(retrying([Fault("fetch", 1, times=99)], naps), scenario)


@pytest.mark.parametrize(("jitter", "factor"), [(0.0, 0.5), (0.5, 1.0), (0.999, 1.499)])
def test_pauses_differ_between_nodes(jitter: float, factor: float) -> None:
    naps = Naps()
    on(retrying([Fault("fetch", 1)], naps, jitter=jitter), lambda tier: tier.fetch(MANIFEST))
    assert naps.slept == pytest.approx([BACKOFF_S * factor])


def test_only_failed_chunks_are_moved_again() -> None:
    naps = Naps()
    plan = [Fault("write", 2), Fault("write", 3, errno=errno.ENOSPC)]

    async def scenario(tier: Retrying) -> None:
        assert isinstance(await tier.reserve(SHARD, 16_384), Reservation)
        memory = Memory(16_384, data_of(16_384))
        results = await tier.write(chunks_of(SHARD, 16_384, memory, 4096))
        assert [type(result.error) for result in results] == [type(None), type(None), TierFull, type(None)]
        assert len(naps.slept) == 1 and isinstance(tier.tier, Faulty)
        assert tier.tier._counts["write"] == 5  # four, and one again
        written = data_of(16_384)
        assert await get(tier, SHARD, 8192, 4096) == written[:8192]

    on(retrying(plan, naps), scenario)


def test_a_chunk_whose_signal_has_failed_is_not_moved_again(tmp_path: Path) -> None:
    """Those who wait for the signal have been told already."""
    naps = Naps()

    async def scenario(tier: Tier) -> None:
        assert isinstance(await tier.reserve(SHARD, 4096), Reservation)
        memory, signal = Memory(4096), Ticket()
        [result] = await tier.write([ChunkIO(SHARD, 0, 4096, memory.address, None, signal)])
        assert result.error is not None and signal.state == "failed" and not naps.slept

    on(retrying([Fault("write", 1)], naps, disk(tmp_path)), scenario)


def test_a_closed_tier_is_not_asked_again() -> None:
    naps = Naps()

    async def scenario(tier: Tier) -> None:
        await tier.close()
        with pytest.raises(TierError, match="closed"):
            await tier.fetch(MANIFEST)
        assert not naps.slept

    on(retrying([], naps), scenario)


def test_a_scan_is_begun_again_but_not_gone_on_with() -> None:
    naps, fail_at = Naps(), [0, 2]

    class Scanning(MemoryTier):
        async def scan(self, run: str) -> Any:
            limit = fail_at.pop(0) if fail_at else None
            count = 0
            async for each in super().scan(run):
                if count == limit:
                    raise hiccup()
                count += 1
                yield each

    async def scenario(tier: Tier) -> None:
        await save(tier, SHARD, data_of(10))
        await save(tier, NEW, data_of(10))
        with pytest.raises(TierError):
            await found(tier)  # once more after failing at once, then in the middle
        assert len(naps.slept) == 1
        assert len(await found(tier)) == 4

    on(Retrying(Scanning(), naps, lambda: 0.5), scenario)


def hiccup() -> TierError:
    error = TierError("the server has hiccups")
    error.errno = errno.EIO
    return error
