"""Who may write a run: the decision as a plain function, and taking over on a virtual clock."""

import asyncio

import pytest

from stepwell.epochs import BEAT_S, STILL_S, Writership, judge
from stepwell.errors import RunBusy
from stepwell.format.names import epoch_file
from stepwell.format.records import Beat, EpochRecord, Seen, decode, encode
from stepwell.jobs import Job, LocalStore
from stepwell.tiers.base import RecordKey
from stepwell.tiers.memory import MemoryTier


def writer(**changes: object) -> EpochRecord:
    base = {
        "token": "old",
        "user": "ann",
        "host": "node1",
        "boot": "b1",
        "pid_space": "pid:[1]",
        "pid": 100,
        "pid_started": 5.0,
        "made": 0.0,
    }
    return EpochRecord(**{**base, **changes})  # type: ignore[arg-type]


ME = writer(token="me", pid=200, pid_started=9.0)


def ask(
    old: EpochRecord, beat: Beat | None = None, me: EpochRecord = ME, alive: float | None = None, held: bool = False
) -> str:
    return judge(old, beat, me, started=lambda pid: alive, held_here=lambda token: held)


def test_a_closed_writer_is_replaced_at_once() -> None:
    assert ask(writer(host="far"), Beat(token="old", count=9, state="closed")) == "take"


def test_another_writers_closed_mark_does_not_count() -> None:
    assert ask(writer(host="far"), Beat(token="other", count=9, state="closed")) == "watch"


def test_a_dead_process_is_replaced_at_once() -> None:
    assert ask(writer()) == "take"


def test_a_process_id_used_again_is_a_dead_process() -> None:
    assert ask(writer(), alive=77.0) == "take"


def test_a_living_process_is_watched() -> None:
    assert ask(writer(), alive=5.0) == "watch"


@pytest.mark.parametrize("place", [{"host": "node2"}, {"boot": "b2"}, {"pid_space": "pid:[2]"}])
def test_what_cannot_be_seen_from_here_is_watched(place: dict[str, object]) -> None:
    assert ask(writer(**place)) == "watch"


def test_an_earlier_restart_of_the_same_job_is_replaced_at_once() -> None:
    me = writer(token="me", pid=200, job="j1", restarts=1)
    assert ask(writer(host="far", job="j1"), me=me) == "take"
    assert ask(writer(host="far", job="j2"), me=me) == "watch"


def test_another_store_of_this_process_is_busy_while_it_is_open() -> None:
    here = writer(pid=200, pid_started=9.0)
    assert ask(here, held=True) == "busy"
    assert ask(here, held=False) == "take"


class FakeClock:
    """Time that passes only by sleeping; something may happen at each sleep."""

    def __init__(self) -> None:
        self.now = 0.0
        self.each_sleep: list[object] = []

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds
        for act in self.each_sleep:
            await act()  # type: ignore[operator]
        await asyncio.sleep(0)


JOB = Job(0, 1, LocalStore(), None, 0)


async def tier_with(old: EpochRecord) -> MemoryTier:
    tier = MemoryTier()
    await tier.start()
    await tier.commit(RecordKey("run", epoch_file(1)), encode(old))
    await tier.beat(RecordKey("run", epoch_file(1, "beat")), encode(Beat(token=old.token, count=1)))
    return tier


def test_a_heartbeat_that_stands_still_long_enough_frees_the_run() -> None:
    async def main() -> None:
        tier, clock = await tier_with(writer(host="far")), FakeClock()
        mine = Writership("run", tier, JOB, clock)
        assert await mine.acquire() == 2
        assert clock.now >= STILL_S
        await mine.close()

    asyncio.run(main())


def test_a_heartbeat_that_moves_is_busy_and_names_the_writer() -> None:
    async def main() -> None:
        tier, clock = await tier_with(writer(host="far", job="j9")), FakeClock()
        beats = iter(range(2, 1000))

        async def beat() -> None:
            await tier.beat(RecordKey("run", epoch_file(1, "beat")), encode(Beat(token="old", count=next(beats))))

        clock.each_sleep.append(beat)
        with pytest.raises(RunBusy, match="user ann, host far, pid 100, job j9"):
            await Writership("run", tier, JOB, clock).acquire()
        assert clock.now <= 2 * BEAT_S

    asyncio.run(main())


def test_two_that_start_together_never_hold_one_epoch() -> None:
    async def main() -> None:
        tier = MemoryTier()
        await tier.start()
        one, two = Writership("run", tier, JOB, FakeClock()), Writership("run", tier, JOB, FakeClock())
        got = await asyncio.gather(one.acquire(), two.acquire(), return_exceptions=True)
        numbers = [g for g in got if isinstance(g, int)]
        assert len(set(numbers)) == len(numbers) >= 1
        assert all(isinstance(g, int | RunBusy) for g in got)
        await one.close()
        await two.close()

    asyncio.run(main())


def test_a_writer_notices_that_the_run_was_taken() -> None:
    async def main() -> None:
        tier = MemoryTier()
        await tier.start()
        mine = Writership("run", tier, JOB, FakeClock())
        await mine.acquire()
        assert await mine.still_ours()
        await tier.commit(RecordKey("run", epoch_file(2)), encode(writer()))
        assert not await mine.still_ours()
        await mine.close()

    asyncio.run(main())


def test_closing_lets_the_next_writer_in_at_once() -> None:
    async def main() -> None:
        tier, clock = MemoryTier(), FakeClock()
        await tier.start()
        first = Writership("run", tier, JOB, clock)
        await first.acquire()
        await first.close()
        second = Writership("run", tier, JOB, clock)
        assert await second.acquire() == 2
        assert clock.now == 0.0
        await second.publish_seen(["b", "a"], alone=False)
        data = await tier.fetch(RecordKey("run", epoch_file(2, "seen.json")))
        assert data is not None and decode(data, Seen).attempts == ["a", "b"]
        await second.close()

    asyncio.run(main())


def test_an_epoch_file_that_was_never_whole_is_passed_over() -> None:
    async def main() -> None:
        tier = MemoryTier()
        await tier.start()
        await tier.commit(RecordKey("run", epoch_file(1)), b'{"token": "ol')
        mine = Writership("run", tier, JOB, FakeClock())
        assert await mine.acquire() == 2
        await mine.close()

    asyncio.run(main())


def test_step_folders_that_were_copied_without_their_epochs_are_older_than_what_follows() -> None:
    async def main() -> None:
        tier = MemoryTier()
        await tier.start()
        await tier.commit(RecordKey("run", "step-000000100.7-3/rank-00000.json"), b"{}")
        mine = Writership("run", tier, JOB, FakeClock())
        assert await mine.acquire() == 8
        await mine.close()
        again = Writership("run", tier, JOB, FakeClock())
        assert await again.acquire() == 9
        await again.close()

    asyncio.run(main())
