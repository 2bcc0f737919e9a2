"""A writer that has lost the run finds it out before it commits or removes anything; what it costs to ask."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from stepwell.epochs import BEAT_S, DOUBT_S, OURS_S, Writership
from stepwell.errors import RunBusy
from stepwell.format.names import epoch_file
from stepwell.jobs import Job, LocalStore
from stepwell.tiers import _records
from stepwell.tiers.base import RecordKey, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.wrap import Fault, Faulty


class Hands:
    """A clock that the test turns."""

    def __init__(self) -> None:
        self.now = 0.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        await asyncio.Event().wait()


class Counting(Faulty):
    """Counts the looks at records."""

    looks = 0

    async def fetch(self, record: RecordKey) -> bytes | None:
        self.looks += 1
        return await super().fetch(record)


Scene = Callable[[Writership, Counting, Tier, Hands], Awaitable[None]]


def play(scene: Scene) -> None:
    async def main() -> None:
        authority, disk, clock = Counting(MemoryTier("pfs"), []), MemoryTier("disk"), Hands()
        await authority.start()
        await disk.start()
        mine = Writership("run", authority, Job(0, 1, LocalStore(), None, 0), clock)
        await mine.acquire()
        authority.looks = 0
        try:
            await scene(mine, authority, disk, clock)
        finally:
            authority.release()
            await mine.close()

    asyncio.run(main())


async def take(tier: Tier) -> None:
    assert await tier.commit(RecordKey("run", epoch_file(2)), b"{}")


def test_on_the_tier_that_decides_it_is_looked_up_each_time() -> None:
    async def scene(mine: Writership, authority: Counting, disk: Tier, clock: Hands) -> None:
        await mine.require(authority, 7)
        await mine.require(authority, 7)
        assert authority.looks == 2
        await take(authority)
        with pytest.raises(RunBusy, match=r"taken this run over.*step 7.*tier pfs"):
            await mine.require(authority, 7)
        with pytest.raises(RunBusy):
            await mine.require(disk, 7)
        assert authority.looks == 3  # once lost, always lost

    play(scene)


def test_on_another_tier_a_young_beat_is_enough() -> None:
    async def scene(mine: Writership, authority: Counting, disk: Tier, clock: Hands) -> None:
        clock.now = OURS_S - 1
        await mine.require(disk, 7)
        assert authority.looks == 0

    play(scene)


def test_a_beat_makes_it_young_again() -> None:
    async def scene(mine: Writership, authority: Counting, disk: Tier, clock: Hands) -> None:
        clock.now = 2 * OURS_S
        mine.start_beating()
        while mine._ours_until <= clock.now:
            await asyncio.sleep(0)
        authority.looks = 0
        clock.now += OURS_S - BEAT_S
        await mine.require(disk, 7)
        assert authority.looks == 0

    play(scene)


def test_who_stood_still_asks_before_it_goes_on() -> None:
    async def scene(mine: Writership, authority: Counting, disk: Tier, clock: Hands) -> None:
        clock.now = OURS_S
        await mine.require(disk, 7)
        assert authority.looks == 1
        await take(authority)
        with pytest.raises(RunBusy):
            await mine.require(disk, 7)

    play(scene)


def test_two_that_ask_at_once_wait_for_one_answer() -> None:
    async def scene(mine: Writership, authority: Counting, disk: Tier, clock: Hands) -> None:
        clock.now = OURS_S
        await take(authority)
        answers = await asyncio.gather(mine.require(disk, 7), mine.require(disk, 8), return_exceptions=True)
        assert [type(answer) for answer in answers] == [RunBusy, RunBusy]
        assert authority.looks == 1

    play(scene)


def test_a_stuck_authority_holds_up_no_other_tier() -> None:
    async def scene(mine: Writership, authority: Counting, disk: Tier, clock: Hands) -> None:
        authority.plan = [Fault("fetch", 1, "stall", times=1000)]
        clock.now = OURS_S
        await mine.require(disk, 7)
        clock.now += DOUBT_S  # it has been waited for: the next one does not wait at all
        waiting = asyncio.ensure_future(mine.require(disk, 8))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert waiting.done()
        assert authority.looks == 1

    play(scene)


def test_a_second_try_of_a_commit_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first may still take its record back: until it ends, nobody is told that the record is there."""

    async def main() -> None:
        record = RecordKey("run", "epochs/0000001.json")
        began, go_on = asyncio.Event(), asyncio.Event()
        publish = _records.publish

        async def failing(path: str, data: bytes, executor: object) -> bool:
            assert await publish(path, data, executor)  # type: ignore[arg-type]
            began.set()
            await go_on.wait()
            Path(path).unlink()
            raise OSError(5, "cannot sync")

        tier = FileTier(tmp_path, name="disk")
        await tier.start()
        with monkeypatch.context() as patch:
            patch.setattr(_records, "publish", failing)
            first = asyncio.ensure_future(tier.commit(record, b"{}"))
            await began.wait()
        second = asyncio.ensure_future(tier.commit(record, b"{}"))
        go_on.set()
        with pytest.raises(OSError):
            await first
        assert await second is True
        assert (tmp_path / "run" / "epochs" / "0000001.json").read_bytes() == b"{}"
        await tier.close()

    asyncio.run(main())
