"""A tier's queue: order, joins, tries with growing pauses, who is told when, hurry and close."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from stepwell.backoff import FIRST_S, JITTER, LAST_S, Backoff
from stepwell.errors import CorruptData, StepwellError, StoreClosed, TierError, TierUnavailable
from stepwell.flushing import COMMITS_MAX, TELL_AFTER, Flusher, Goal, OutOfTurn
from stepwell.format.names import Attempt
from stepwell.tiers.host import Priority
from stepwell.tiers.memory import MemoryTier
from tests.core.virtual import LoopClock, on_virtual_time, turns

OWN = TierError("this checkpoint alone")  # not `retry`: the tier itself answers
AWAY = TierUnavailable("the tier is away")


class Middle(random.Random):
    """Pauses without jitter."""

    def random(self) -> float:
        return 0.5


class Work:
    """What the flusher does: one second a checkpoint, with errors by step, and a log of all tries."""

    def __init__(self) -> None:
        self.tries: list[tuple[float, int]] = []
        self.errors: dict[int, list[Exception]] = {}  # step -> what its next tries fail with
        self.always: Exception | None = None
        self.committing: Callable[[Goal], bool] = lambda goal: False
        self.release = asyncio.Event()

    async def once(self, goal: Goal) -> None:
        step = goal.attempt.step
        self.tries.append((asyncio.get_running_loop().time(), step))
        await asyncio.sleep(1)
        if self.always is not None:
            raise self.always
        if self.errors.get(step):
            raise self.errors[step].pop(0)
        if self.committing(goal):
            goal.copied.set()
            goal.aside.set()
            await self.release.wait()

    @property
    def steps(self) -> list[int]:
        return [step for _, step in self.tries]


def attempt(step: int) -> Attempt:
    return Attempt(1, step, step)


def flusher_of(work: Work) -> Flusher:
    return Flusher(MemoryTier("far"), work.once, LoopClock(), Backoff(Middle()))


def test_first_come_first_served_within_a_priority() -> None:
    async def scenario() -> None:
        work = Work()
        flusher = flusher_of(work)
        goals = [flusher.want(attempt(step)) for step in (5, 3, 4)]
        goals += [
            flusher.want(attempt(9), priority=Priority.PREFETCH),
            flusher.want(attempt(7), priority=Priority.RESTORE),
        ]
        await asyncio.gather(*(goal.wait() for goal in goals))
        assert work.steps == [7, 5, 3, 4, 9]
        assert flusher.goals == [] and not flusher.failing
        await flusher.close()

    on_virtual_time(scenario)


def test_asking_again_joins_and_may_move_it_forward() -> None:
    async def scenario() -> None:
        work = Work()
        flusher = flusher_of(work)
        first = [flusher.want(attempt(step)) for step in (1, 2, 3)]
        await turns()  # step 1 is on its way
        assert flusher.want(attempt(1)) is first[0]
        assert flusher.want(attempt(3), priority=Priority.RESTORE) is first[2]
        assert flusher.want(attempt(3), priority=Priority.PREFETCH) is first[2]
        await flusher.idle()
        assert work.steps == [1, 3, 2]
        assert flusher.want(attempt(1)) is not first[0]  # it is done: this is another flush
        await flusher.idle()
        assert work.steps == [1, 3, 2, 1]
        await flusher.close()

    on_virtual_time(scenario)


@pytest.mark.parametrize("count", range(6))
def test_joining_at_the_moment_it_ends_never_hangs(count: int) -> None:
    async def scenario() -> None:
        work = Work()
        flusher = flusher_of(work)
        first = flusher.want(attempt(1))
        await turns(3)
        await asyncio.sleep(1)
        await turns(count)
        await flusher.want(attempt(1)).wait()
        await first.wait()
        assert len(work.tries) in (1, 2)
        await flusher.close()

    on_virtual_time(scenario)


def test_two_goals_of_one_checkpoint_are_not_on_their_way_together() -> None:
    async def scenario() -> None:
        work = Work()
        work.committing = lambda goal: goal.parts is not None
        flusher = flusher_of(work)
        some, all_, other = flusher.want(attempt(1), ["b", "a"]), flusher.want(attempt(1)), flusher.want(attempt(2))
        assert some is not all_ and flusher.want(attempt(1), ["a", "b"]) is some
        await other.wait()
        assert work.steps == [1, 2]  # the second goal of step 1 waits until the first has committed
        work.release.set()
        await all_.wait()
        assert work.steps == [1, 2, 1]
        await flusher.close()

    on_virtual_time(scenario)


@pytest.mark.parametrize("drained", [False, True])
def test_a_goal_that_lets_others_of_its_checkpoint_pass_comes_after_them(drained: bool) -> None:
    """Whatever their priorities and places: another rank has begun with them."""

    async def scenario() -> None:
        work = Work()
        work.errors[1] = [OutOfTurn()]
        flusher = flusher_of(work)
        done: list[tuple[str, ...] | None] = []
        flusher.on_done = lambda goal: done.append(goal.parts)
        mine = flusher.want(attempt(1), priority=Priority.RESTORE)
        await turns()
        assert len(work.tries) == 1
        other = flusher.want(attempt(1), ["a"])
        if drained:
            flusher.arrange([mine], held=[other])
        await mine.wait()
        assert done == [("a",), None]
        assert mine.tries == other.tries == 0  # nothing has failed
        await flusher.close()

    on_virtual_time(scenario)


def test_a_try_that_waits_for_other_ranks_holds_up_no_other_goal() -> None:
    async def scenario() -> None:
        work = Work()
        flusher = flusher_of(work)
        waiting, release = asyncio.Event(), asyncio.Event()
        once = work.once

        async def first_waits(goal: Goal) -> None:
            if goal.attempt.step == 1:
                goal.aside.set()
                waiting.set()
                await release.wait()
            await once(goal)

        flusher._flush_once = first_waits
        first, second = flusher.want(attempt(1)), flusher.want(attempt(2))
        await waiting.wait()
        await second.wait()
        assert not first.done.done()
        release.set()
        await first.wait()
        await flusher.close()

    on_virtual_time(scenario)


def test_commits_may_wait_for_others_while_the_next_is_copied_but_not_without_end() -> None:
    async def scenario() -> None:
        work = Work()
        work.committing = lambda goal: True
        flusher = flusher_of(work)
        goals = [flusher.want(attempt(step)) for step in range(COMMITS_MAX + 6)]
        await asyncio.sleep(500)
        assert len(work.tries) == COMMITS_MAX
        work.release.set()
        await asyncio.gather(*(goal.wait() for goal in goals))
        await flusher.close()

    on_virtual_time(scenario)


# -- failures ----------------------------------------------------------------------------------------


def test_pauses_grow_and_are_forgotten_when_it_works_again() -> None:
    async def scenario() -> None:
        work = Work()
        work.errors[1] = [AWAY] * 10
        flusher = flusher_of(work)
        goal = flusher.want(attempt(1))
        await goal.done
        gaps = [later - earlier - 1 for (earlier, _), (later, _) in zip(work.tries, work.tries[1:], strict=False)]
        assert gaps == pytest.approx([0.5, 1, 2, 4, 8, 16, 32, 60, 60, 60])
        assert not flusher.failing and isinstance(flusher.last_error, TierUnavailable)
        work.errors[2] = [AWAY]
        await flusher.want(attempt(2)).wait()
        assert work.tries[-1][0] - work.tries[-2][0] == pytest.approx(1.5)
        await flusher.close()

    on_virtual_time(scenario)


def test_whoever_waits_is_told_after_some_tries_and_it_goes_on() -> None:
    async def scenario() -> None:
        work = Work()
        work.errors[1] = [OWN] * 5
        flusher = flusher_of(work)
        goal = flusher.want(attempt(1))
        with pytest.raises(TierError, match="this checkpoint alone"):
            await goal.wait()
        assert len(work.tries) == goal.tries == TELL_AFTER and flusher.failing and flusher.goals == [goal]
        with pytest.raises(TierError):
            await goal.wait()  # at once: nothing has changed
        assert len(work.tries) == TELL_AFTER
        await goal.done
        await goal.wait()
        assert len(work.tries) == 6
        await flusher.close()

    on_virtual_time(scenario)


def test_asking_again_after_a_failure_tries_again_at_once() -> None:
    async def scenario() -> None:
        work = Work()
        work.errors[1] = [OWN] * 7
        flusher = flusher_of(work)
        goal = flusher.want(attempt(1))
        while len(work.tries) < 7 or goal.running:
            await asyncio.sleep(1)
        asked = asyncio.get_running_loop().time()
        assert flusher.next_try_at > asked + 10
        again = flusher.want(attempt(1), priority=Priority.RESTORE)
        await again.wait()  # its eighth try works
        assert again is goal and work.tries[-1][0] == asked
        await flusher.close()

    on_virtual_time(scenario)


@pytest.mark.parametrize("closing", [False, True])
@pytest.mark.parametrize("priority", [Priority.RESTORE, Priority.FLUSH])
def test_a_checkpoint_that_always_fails_does_not_hold_up_the_others(priority: Priority, closing: bool) -> None:
    async def scenario() -> None:
        work = Work()
        work.errors[1] = [OWN] * 1000
        flusher = flusher_of(work)
        bad = flusher.want(attempt(1), priority=priority)
        good = [flusher.want(attempt(step)) for step in (2, 3)]
        if closing:
            flusher.hurry()
        await asyncio.gather(*(goal.wait() for goal in good))
        assert work.steps.count(1) <= 2 and flusher.goals == [bad]
        await flusher.close()

    on_virtual_time(scenario)


def test_a_tier_that_is_away_fails_all_that_wait_and_keeps_the_order() -> None:
    async def scenario() -> None:
        work = Work()
        work.always = AWAY
        flusher = flusher_of(work)
        goals = [flusher.want(attempt(step)) for step in (1, 2, 3)]
        for goal in goals:
            with pytest.raises(TierUnavailable):
                await goal.wait()
        assert work.steps == [1] * TELL_AFTER
        await flusher.idle()
        work.always = None
        await asyncio.gather(*(goal.done for goal in goals))
        assert work.steps[-3:] == [1, 2, 3]
        await flusher.close()

    on_virtual_time(scenario)


@pytest.mark.parametrize("error", [CorruptData("bad everywhere"), ZeroDivisionError("a fault of ours")], ids=str)
def test_what_trying_again_does_not_mend_is_given_up_and_said(error: Exception) -> None:
    async def scenario() -> None:
        work = Work()
        work.errors[1] = [error]
        flusher = flusher_of(work)
        bad, good = flusher.want(attempt(1)), flusher.want(attempt(2))
        with pytest.raises(type(error), match=str(error)):
            await bad.wait()
        await good.wait()
        assert work.tries == [(0.0, 1), (1.0, 2)] and not flusher.failing and flusher.goals == []
        await flusher.close()

    on_virtual_time(scenario)


def test_what_could_not_be_read_is_tried_again_a_few_times() -> None:
    unread = CorruptData("no tier could be read")
    unread.retry = True

    async def scenario() -> None:
        work = Work()
        work.errors = {1: [unread] * (TELL_AFTER - 1), 2: [unread] * TELL_AFTER}
        flusher = flusher_of(work)
        passing, lasting = flusher.want(attempt(1)), flusher.want(attempt(2))
        await passing.wait()
        with pytest.raises(CorruptData):
            await lasting.wait()
        assert work.steps.count(1) == work.steps.count(2) == TELL_AFTER and flusher.goals == []
        await flusher.close()

    on_virtual_time(scenario)


# -- the end -----------------------------------------------------------------------------------------


def test_hurry_ends_the_pause_and_takes_the_newest_first() -> None:
    async def scenario() -> None:
        work = Work()
        work.always = AWAY
        flusher = flusher_of(work)
        goals = [flusher.want(attempt(step)) for step in (3, 1, 2)]
        await asyncio.sleep(100)
        assert set(work.steps) == {3} and flusher.next_try_at > asyncio.get_running_loop().time()
        work.always, before = None, len(work.tries)
        flusher.hurry()
        await flusher.idle()
        assert work.tries[before:] == [(100.0, 3), (101.0, 2), (102.0, 1)]
        assert all(goal.done.done() for goal in goals)
        await flusher.close()

    on_virtual_time(scenario)


def test_hurry_in_the_moment_when_a_pause_begins_is_not_missed() -> None:
    async def scenario() -> None:
        work = Work()
        work.errors[1] = [AWAY] * 12
        flusher = flusher_of(work)
        goal = flusher.want(attempt(1))
        while len(work.tries) < 12 or goal.running:
            await asyncio.sleep(0.25)
        work.errors[1].clear()
        woken = asyncio.get_running_loop().time()
        flusher._wake.set()  # the worker looks again, and pauses again
        await turns(3)
        flusher.hurry()
        await goal.wait()
        assert work.tries[-1][0] == woken
        await flusher.close()

    on_virtual_time(scenario)


def test_idle_after_hurry_waits_for_new_tries_but_not_for_success() -> None:
    async def scenario() -> None:
        work = Work()
        work.always = AWAY
        flusher = flusher_of(work)
        flusher.want(attempt(1))
        await asyncio.sleep(200)
        before = len(work.tries)
        flusher.hurry()
        await flusher.idle()
        assert len(work.tries) == before + TELL_AFTER and len(flusher.goals) == 1
        await flusher.close()

    on_virtual_time(scenario)


@pytest.mark.parametrize("after", [0.0, 0.5, 1.2, 30.0])
def test_close_gives_up_what_is_not_there_and_says_why(after: float) -> None:
    async def scenario() -> None:
        work = Work()
        work.errors[1] = [OWN] * 1000
        flusher = flusher_of(work)
        goal, told = flusher.want(attempt(1)), asyncio.ensure_future(flusher.want(attempt(1)).wait())
        await asyncio.sleep(after)
        await flusher.close()
        await flusher.close()
        with pytest.raises(StepwellError):
            await told
        with pytest.raises(StoreClosed, match="The next store that opens this run goes on"):
            goal.done.result()
        if after > 1:
            assert "this checkpoint alone" in str(goal.done.exception())
        with pytest.raises(StoreClosed):
            flusher.want(attempt(2))
        await flusher.idle()
        before = len(work.tries)
        await asyncio.sleep(1000)
        assert len(work.tries) == before

    on_virtual_time(scenario)


# -- pauses ------------------------------------------------------------------------------------------


def test_pauses_double_to_their_limit_with_jitter_and_never_end() -> None:
    backoff = Backoff(random.Random(1))
    for number in range(3000):  # two days of failures
        pause, middle = backoff.failed(), min(LAST_S, FIRST_S * 2 ** min(number, 20))
        assert middle * (1 - JITTER) <= pause <= middle * (1 + JITTER)
    backoff.succeeded()
    assert backoff.failed() <= FIRST_S * (1 + JITTER)
