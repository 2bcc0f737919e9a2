"""Drain: what is saved gets down now, what matters most first, within a limit that holds whatever a tier does.

The queues of the tiers do the work, as always; a drain only gives them an order (see `stepwell.urgency`) and
takes it back at the end, so that what was not finished goes on as before. A flush that is in the way is broken off,
and what it has written stays for its next try. Nothing here waits for a tier: time is looked at from outside.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.chain import Chain
from stepwell.errors import NotPlanned, StepwellError
from stepwell.flushing import Flusher, Goal
from stepwell.format.names import Attempt
from stepwell.jobs import Job
from stepwell.ownership import group_of
from stepwell.saving import Save
from stepwell.tiers.base import Tier
from stepwell.tiers.host import Priority
from stepwell.units import format_bytes, format_duration
from stepwell.urgency import Need, Needs, in_order, rate_to, slowest
from stepwell.writer import RunWriter

#: between two looks at what has no event of its own
LOOK_S = 0.2
#: of the time given, the part that the newest checkpoint has the way to the nearest safe tier for itself: one that
#: hangs must not keep it from the last tier
ALONE_SHARE = 0.5
#: an operation that takes longer is named as the reason why something is not there
SLOW_S = 2.0

log = logging.getLogger("stepwell")


@dataclass(frozen=True, slots=True)
class Cut:
    """A checkpoint that a drain did not get to a tier."""

    step: int
    tier: str
    bytes_left: int  # of this rank's part
    why: str

    def __str__(self) -> str:
        return f"step {self.step} on {self.tier} ({format_bytes(self.bytes_left)} left: {self.why})"


@dataclass(frozen=True, slots=True)
class DrainReport:
    """What a drain got down, and what not. `str` says it in one line."""

    done: dict[str, list[int]]  # tier -> steps that became complete there meanwhile, the newest first
    newest: dict[str, int]  # tier -> its newest complete step now
    cut: list[Cut]  # what is not there, the newest first
    seconds: float

    def __str__(self) -> str:
        done = "; ".join(f"{_steps(steps)} to {tier}" for tier, steps in self.done.items() if steps)
        nothing = "nothing got down" if self.cut else "nothing had to get down"
        newest = ", ".join(f"step {step} on {tier}" for tier, step in self.newest.items())
        words = [
            f"drained for {format_duration(self.seconds)}: {done or nothing}",
            f"Newest: {newest}" if newest else "No tier has a whole checkpoint",
            "Not there: " + ", ".join(map(str, self.cut)) if self.cut else "",
        ]
        return ". ".join(word for word in words if word)


def _steps(steps: Sequence[int]) -> str:
    few = [*map(str, steps)] if len(steps) <= 4 else [str(steps[0]), str(steps[1]), "…", str(steps[-1])]
    return ("step " if len(steps) == 1 else "steps ") + ", ".join(few)


class Drainer:
    """Drains one run, one drain after the other. Lives on the event loop."""

    def __init__(self, chain: Chain, writer: RunWriter) -> None:
        self._chain, self._writer = chain, writer
        self._one = asyncio.Lock()
        self._count = 0  # the same on all ranks, because all call it

    async def run(self, limit_s: float, job: Job) -> DrainReport:
        """Returns after at most `limit_s`, and before that as soon as all is there or has failed often enough.

        Raises RunBusy and other errors of taking the run over, if that has to be done first.
        """
        self._count += 1
        drain = _Drain(self._chain, self._writer, job, limit_s, self._count)
        work = asyncio.ensure_future(self._alone(drain))
        work.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, if it comes too late
        try:
            await asyncio.wait([work], timeout=limit_s)
            if work.done():
                work.result()
        finally:
            work.cancel()
        return drain.report()

    async def _alone(self, drain: _Drain) -> None:
        async with self._one:
            try:
                await drain.get_down()
            finally:
                for flusher in self._writer.flushers.values():
                    flusher.arrange([])


class _Drain:
    """One drain."""

    def __init__(self, chain: Chain, writer: RunWriter, job: Job, limit_s: float, number: int) -> None:
        self._chain, self._writer, self._job = chain, writer, job
        self._began, self._limit_s = chain.clock.monotonic(), limit_s
        self._key = f"{group_of(chain, job)}/drain-{number}"
        self._saves: dict[asyncio.Task[Any], Save] = writer.saving
        self._unsafe = [save for save in self._saves.values() if not save.done(chain.first.info.name)]
        self._goals: dict[Goal, str] = {}  # all that were to be done at any time -> tier
        self._asked: set[tuple[Attempt, str]] = set()
        self._late: dict[Goal, str] = {}  # what was found to take too long, and why
        self._plans: dict[str, tuple[list[Goal], list[Goal]]] = {}  # tier -> (order, those that must not be begun)
        self._planned: set[Goal] = set()
        self._agreed: Needs | None = None

    # -- doing it ------------------------------------------------------------------------

    async def get_down(self) -> None:
        """Returns when nothing is left to wait for."""
        await self._take_over()
        deciding: asyncio.Task[None] | None = None
        try:
            while True:
                saving: list[asyncio.Future[Any]] = [task for task in self._saves if not task.done()]
                if not saving and deciding is None:
                    deciding = asyncio.ensure_future(self._decide())
                self._arrange()
                goals = [goal for goal in self._goals if not goal.told.is_set() and goal.priority < Priority.PREFETCH]
                if deciding is not None and deciding.done() and not goals:
                    return
                waiting = [*saving, *(goal.done for goal in goals)]
                if deciding is not None and not deciding.done():
                    waiting.append(deciding)
                await asyncio.wait(waiting, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if deciding is not None:
                deciding.cancel()

    async def _take_over(self) -> None:
        """A store that has not saved yet takes the run over, if the run's newest checkpoint must get down."""
        chain, writer = self._chain, self._writer
        if writer.owner.taken or self._saves:
            return
        await chain.catalog.refresh()
        await asyncio.gather(*(self._look(tier) for tier in chain.storage))
        newest = self._newest()
        if newest is not None and any(tier.info.name not in self._whole_on(newest) for tier in self._goes_to(newest)):
            await writer.owner.take(self._job)

    async def _look(self, tier: Tier) -> None:
        """Finds the newest whole checkpoint on a tier."""
        catalog = self._chain.catalog
        for attempt in catalog.newest_first():
            if any(holding.tier is tier for holding in catalog.holdings.get(attempt, [])):
                with contextlib.suppress(StepwellError):  # a bad manifest: the next one may be good
                    if (await catalog.manifest(attempt, tier)).complete:
                        return

    async def _decide(self) -> None:
        """What policies want of the saves that have ended; whatever comes of it, what is known goes on."""
        try:
            await self._writer.closing()
        except Exception:
            log.exception("policies could not be asked what must get down")
        if self._job.world > 1:
            self._arrange()
            seconds = {self._name(goal): self._seconds(goal) for goal in self._goals if not goal.done.done()}
            self._agreed = await slowest(self._job, self._key, Needs(seconds, self._left_s()))
            self._planned.clear()

    def _safest(self) -> list[Tier]:
        """Where the newest checkpoint must get: the nearest tier that outlives the node, and the last one."""
        below = self._chain.storage[1:]
        nearest = [tier for tier in below if tier.info.survives == "node-loss"]
        if self._chain.first.info.survives == "node-loss":
            nearest = []
        return list(dict.fromkeys([*nearest[:1], *below[-1:]]))

    def _goes_to(self, newest: Attempt) -> list[Tier]:
        """The same, of this checkpoint: one that is in memory alone goes to the first tier before, which is near."""
        near = [] if self._whole_on(newest) else [self._chain.first]
        return list(dict.fromkeys([*near, *self._safest()]))

    def _left_s(self) -> float:
        return self._began + self._limit_s - self._chain.clock.monotonic()

    def _is_early(self) -> bool:
        return self._left_s() > (1 - ALONE_SHARE) * self._limit_s

    def _line(self) -> dict[Attempt, int]:
        """The checkpoints that count -> their place, the newest first."""
        return {attempt: place for place, attempt in enumerate(self._chain.catalog.newest_first())}

    def _newest(self) -> Attempt | None:
        alone = self._writer.memory.newest()
        left = not self._saves  # by an earlier process, in memory that outlives it
        if alone is not None and (self._writer.saver.room.may_hold or left):
            return alone
        return next((attempt for attempt in self._chain.catalog.newest_first() if self._whole_on(attempt)), None)

    def _arrange(self) -> None:
        """Gives every queue its order. What was decided before stays so: time passes, and must change no order."""
        flushers, newest = self._writer.flushers, self._newest()
        saved = all(task.done() for task in self._saves) or not self._is_early()  # else a newer one is to come
        if newest is not None and saved and self._writer.owner.taken:
            self._want(newest)
        for name, flusher in flushers.items():
            self._goals.update((goal, name) for goal in flusher.goals)
        if not self._goals.keys() <= self._planned:
            self._late = {}
            self._plans = {name: self._plan(flusher) for name, flusher in flushers.items()}
            self._planned = set(self._goals)
        first = self._goes_alone(newest)
        for name, flusher in flushers.items():
            order, barred = self._plans.get(name, ([], []))
            order = sorted(order, key=lambda goal: goal.told.is_set())  # what keeps failing lets others pass
            held = flusher.goals if first is not None and self._goals[first] != name else barred
            flusher.arrange(order, held)

    def _want(self, newest: Attempt) -> None:
        for tier in self._goes_to(newest):
            name = tier.info.name
            if (newest, name) not in self._asked and name not in self._whole_on(newest):
                flusher = self._writer.flushers[name]
                if tier is self._chain.first:
                    flusher.want_alone(newest)
                else:
                    flusher.want(newest)
            self._asked.add((newest, name))

    def _goes_alone(self, newest: Attempt | None) -> Goal | None:
        """The newest checkpoint's flush to the nearest safe tier, as long as nothing else may move."""
        nearest = next((tier.info.name for tier in self._safest()), None)
        if not self._is_early():
            return None
        for goal, tier in self._goals.items():
            if goal.attempt == newest and tier == nearest and goal.parts is None and goal not in self._late:
                return None if goal.told.is_set() or goal.copied.is_set() and goal.running else goal
        return None

    def _plan(self, flusher: Flusher) -> tuple[list[Goal], list[Goal]]:
        line = self._line()
        far = len(line)
        goals = [goal for goal in flusher.goals if goal.priority < Priority.PREFETCH]
        goals.sort(key=lambda goal: (line.get(goal.attempt, far), goal.parts is not None))
        agreed = self._agreed or Needs({}, self._left_s())
        left_s = agreed.left_s
        needs = {Need(g.attempt, g.parts, agreed.seconds.get(self._name(g), self._seconds(g))): g for g in goals}
        fits, rest = in_order(list(needs), left_s)
        partly = {need.attempt for need in fits if need.parts is not None}
        for need in rest:
            self._late[needs[need]] = (
                f"it takes {format_duration(need.seconds)} at {format_bytes(int(self._rate(flusher.tier) or 0))}/s, "
                f"and {format_duration(max(0.0, left_s))} were left"
            )
        # a copy of some parts would have to go before a whole one can come, and that one is not there in time
        barred = [needs[need] for need in rest if need.parts is None and need.attempt in partly]
        return [needs[need] for need in [*fits, *rest] if needs[need] not in barred], barred

    def _name(self, goal: Goal) -> str:
        return "/".join([self._goals[goal], goal.attempt.folder, *(goal.parts or ())])

    def _seconds(self, goal: Goal) -> float:
        rate = self._rate(self._chain.named(self._goals[goal]))
        return self._left_bytes(goal) / rate if rate else 0.0

    def _rate(self, tier: Tier) -> float | None:
        return rate_to(tier, [edge.statistics() for edge in self._chain.mover.edges.all()])

    def _left_bytes(self, goal: Goal) -> int:
        """Of this rank's part; of some parts of it, that of all until a try knows better."""
        if goal.left_bytes is not None:
            return goal.left_bytes
        held = self._chain.catalog.holdings.get(goal.attempt, [])
        mine = f".rank{self._job.rank:05d}-"
        sizes = [
            sum(size for file, size in holding.files.items() if ".rank" not in file or mine in file) for holding in held
        ]
        return max(sizes, default=0)

    # -- telling -------------------------------------------------------------------------

    def _whole_on(self, attempt: Attempt) -> set[str]:
        """The tiers with whole copies of it that outlive the process, as the books say."""
        catalog, storage = self._chain.catalog, self._chain.storage
        tiers = [holding.tier for holding in catalog.holdings.get(attempt, []) if holding.tier in storage]
        known = {tier.info.name: catalog.known_manifest(attempt, tier) for tier in tiers}
        return {name for name, manifest in known.items() if manifest is not None and manifest.complete}

    def report(self) -> DrainReport:
        """As of now. No I/O."""
        names = [tier.info.name for tier in self._chain.storage]
        there = {(goal.attempt.step, tier) for goal, tier in self._goals.items() if _is_down(goal) and not goal.parts}
        there |= {(save.step, names[0]) for save in self._unsafe if save.done(names[0])}
        done = {name: sorted((step for step, tier in there if tier == name), reverse=True) for name in names}
        newest: dict[str, int] = {}
        for attempt in self._chain.catalog.newest_first():
            for name in self._whole_on(attempt):
                newest.setdefault(name, attempt.step)
        cut = [*self._unsaved(), *self._not_down(self._edges())]
        cut.sort(key=lambda each: (-each.step, names.index(each.tier)))
        done = {name: steps for name, steps in done.items() if steps}
        newest = {name: newest[name] for name in names if name in newest}
        return DrainReport(done, newest, cut, self._chain.clock.monotonic() - self._began)

    def _edges(self) -> Mapping[str, float]:
        """Tier -> how long the oldest operation on its way there has taken."""
        oldest: dict[str, float] = {}
        for edge in self._chain.mover.edges.all():
            told = edge.statistics()
            oldest[told.target] = max(oldest.get(told.target, 0.0), told.oldest_s)
        return oldest

    def _unsaved(self) -> list[Cut]:
        first = self._chain.first.info.name
        cut = []
        for task, save in self._saves.items():
            if save.failed:
                cut.append(Cut(save.step, first, save.nbytes, str(save.error)))
            elif not task.done() and not save.done(first):
                cut.append(Cut(save.step, first, save.nbytes, "it is still being saved"))
        return cut

    def _not_down(self, oldest: Mapping[str, float]) -> list[Cut]:
        cut = []
        for goal, tier in self._goals.items():
            if _is_down(goal) or _is_needless(goal) or goal.priority >= Priority.PREFETCH:
                continue
            cut.append(Cut(goal.attempt.step, tier, self._left_bytes(goal), self._why(goal, oldest.get(tier, 0.0))))
        return cut

    def _why(self, goal: Goal, oldest_s: float) -> str:
        error = goal.done.exception() if goal.done.done() else goal.error
        if error is not None:
            return str(error)
        if goal.running and oldest_s > SLOW_S:
            return f"an operation there has taken {format_duration(oldest_s)}"
        if goal in self._late:
            return self._late[goal]
        if goal.running and goal.copied.is_set():
            return "its commit was not through"
        return "there was no more time" if goal.running else "its turn did not come"


def _is_down(goal: Goal) -> bool:
    return goal.done.done() and goal.done.exception() is None


def _is_needless(goal: Goal) -> bool:
    """Whether it was to get there because memory alone had it, and got to another tier."""
    return goal.alone and goal.done.done() and isinstance(goal.done.exception(), NotPlanned)
