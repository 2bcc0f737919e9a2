"""The end of a history: nothing goes wrong any more, and everything must come to rest where it should be."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from stepwell.lab.loop import Stuck
from tests.sim.model import Broken, Saved
from tests.sim.process import Process, Restored
from tests.sim.reference import Fact, asked_parts, by_window, is_last, wanted
from tests.sim.rules import Flushing
from tests.sim.training import EXIT_S

if TYPE_CHECKING:
    from tests.sim.world import World

#: virtual seconds that calm weather may need to finish what was begun
CALM_S = 3000.0
#: looks in a row that must find nothing under way, a second apart, and how many there are at most
REST_LOOKS, REST_LOOKS_MAX = 3, 1500
#: ages of checkpoints are looked at only when something happens
AGE_SLACK_S = 3000.0


class Calm:
    """Brings a world to its end and looks at what is left."""

    def __init__(self, world: World) -> None:
        self._world = world

    def fall(self) -> None:
        """Nothing goes wrong any more; who lives comes to an end."""
        world = self._world
        world.note("calm")
        calm_at = world.timeline.now
        for medium, weather in world.places.values():
            weather.clear_up()
            medium.room_bytes = None
        if world.rng.random() < 0.5:
            for process in world.alive:
                world.kill(process)
        for process in world.alive:
            self._wait_for(process)
            self._check_ended(process)
            self._check_closed(process, calm_at)
        world.bury()

    def check(self) -> None:
        """The newest good checkpoint comes back, and saving goes on, reaches the last tier and lets old ones go."""
        world = self._world
        self._check_newest(reads_only=True)
        writer = world.spawn(self._go_on)
        self._wait_for(writer)
        if writer.failure is not None:
            raise Broken(f"a save in calm weather failed: {writer.failure!r}") from writer.failure
        self._check_ended(writer)
        last = writer.saves[-1]
        rules = world.setup.rules
        sure = {
            tier for tier, mine in rules.items() if mine.at_close or tier == next(iter(rules)) and not mine.by_rules
        }
        if not last.told >= sure:
            raise Broken(f"{last} got only to {sorted(last.told)} in calm weather")
        world.bury()
        restored = self._check_newest(reads_only=True)
        if restored is None or restored.attempt != last.attempt:
            raise Broken(f"{last} is the newest, but {restored and restored.attempt.folder} was restored")

    # -- processes come to their end -----------------------------------------------------------------

    def _wait_for(self, process: Process) -> None:
        timeline = self._world.timeline
        until = timeline.now + CALM_S
        timeline.run_until(lambda: process.ended or timeline.now > until)
        if not process.ended:
            raise Broken(f"{process} has not ended within {CALM_S} s of calm weather")

    def _check_ended(self, process: Process) -> None:
        """A process that came to its end holds nothing any more, once what hung has ended, too."""
        timeline = self._world.timeline
        until = timeline.now + CALM_S
        with contextlib.suppress(Stuck):
            timeline.run_until(lambda: not process.held or timeline.now > until)
        if process.held:
            raise Broken(f"{process} has ended, and still holds {process.held}")

    def _check_closed(self, process: Process, calm_at: float) -> None:
        """Whoever closes in calm weather, and waits, leaves its newest checkpoint on the last tier."""
        owner, invariants = process.writer.owner, self._world.invariants
        if process.closing_at < calm_at or process.exit_s < EXIT_S or not owner.taken or owner.writership.lost:
            return
        mine = {saved.attempt for saved in process.saves}
        self._world.memory_alone.check_closed(process)
        last = invariants.media[-1]
        for attempt in invariants.newest_first()[:1]:
            if attempt in mine and invariants.good(attempt) and last not in invariants.committed()[attempt]:
                raise Broken(f"{process} was closed, and {attempt.folder} is not on {last.name}")

    # -- the newest ----------------------------------------------------------------------------------

    def _check_newest(self, *, reads_only: bool) -> Restored | None:
        """A restore that nothing disturbs brings the newest that is good somewhere, and names those passed over."""
        world = self._world
        newest = world.invariants.newest_first()
        good = [attempt for attempt in newest if world.invariants.good(attempt)]
        got: list[Restored | None] = []

        async def look(process: Process) -> None:
            await process.start()
            try:
                got.append(await process.restore())
            finally:
                await process.close(1.0)

        process = world.spawn(look, reads_only=reads_only)
        self._wait_for(process)
        self._check_ended(process)
        world.bury()
        if not got:
            if good or not newest:
                raise Broken(f"{process} could not restore {good[:1]}: {process.failure!r}")
            return None
        [restored] = got
        world.training.check_restored(process, restored, set(newest))
        found = None if restored is None else restored.attempt
        if found != (good[0] if good else None):
            raise Broken(f"{process} restored {found} instead of {good[:1]}")
        missed = [a.step for a in newest[: newest.index(found)]] if found is not None else []
        if restored is not None and sorted(restored.skipped) != sorted(missed):
            raise Broken(f"{process} passed over steps {missed}, and said {sorted(restored.skipped)}")
        return restored

    # -- the rules -----------------------------------------------------------------------------------

    async def _go_on(self, process: Process) -> None:
        """Some steps, with all the time that they need."""
        training = self._world.training
        await process.start()
        try:
            base = await training.go_on(process)
            before = {fact.attempt: fact for fact in self._world.judge.facts(process) if fact.attempt.step <= base}
            step = process.last_step
            for _ in range(process.rng.randint(2, 5)):
                step += process.rng.randint(1, 4)
                saved = await training.save(process, step)
                await process.wait_durable(saved)
                before |= {
                    fact.attempt: fact for fact in self._world.judge.facts(process)
                }  # the takeover may adopt some
                await asyncio.sleep(process.rng.choice((0.0, 0.01, 2.0, 40.0)))
            await self._rest(process)
            if attempt := saved.attempt:
                await process.writer.noted(attempt)  # what could not go when it was last asked for is asked for again
                await self._rest(process)
            self._check_flushed(process, sorted(before.values(), key=lambda fact: fact.order))
            self._check_retained(process)
        finally:
            await process.close(CALM_S / 2)

    async def _rest(self, process: Process) -> None:
        """Returns when nothing is under way any more."""
        writer, quiet = process.writer, 0
        for _ in range(REST_LOOKS_MAX):
            flushing = any(flusher.goals for flusher in writer.flushers.values())
            quiet = 0 if flushing or writer.busy or writer.saving else quiet + 1
            if quiet >= REST_LOOKS:
                return
            await asyncio.sleep(1.0)
        raise Broken(f"{process} does not come to rest: {writer.under_way()}, {sorted(writer.busy)}")

    def _check_flushed(self, process: Process, before: list[Fact]) -> None:
        """The first checkpoint of each window has got to each tier, or one that serves the window in its stead; where
        newer ones may overtake, some one of the newest window has. Only windows that begin in calm weather are looked
        at."""
        saves = [saved for saved in process.saves if saved.told and saved.attempt is not None]
        mine = {saved.attempt for saved in saves}
        older = [fact for fact in before if fact.counts and fact.attempt not in mine]
        line = [*older, *(self._as_fact(saved) for saved in saves)]
        for tier, rules in self._world.setup.rules.items():
            overtaking = any(rule.newest_wins for rule in rules.flush)
            for rule in rules.flush:
                windows = sorted(by_window(rule, line).items())
                for window, facts in windows:
                    if facts[0].attempt not in mine:
                        continue
                    if not (overtaking or rule.idle):
                        facts = [facts[0], *self._in_its_stead(process, tier, rule, facts, line)]
                    elif window != windows[-1][0]:
                        continue
                    if not any(self._was_on(tier, rule, fact) for fact in facts):
                        names = [fact.attempt.folder for fact in facts]
                        raise Broken(f"{rule} sends one of {names} to {tier}, and none was ever there")

    def _in_its_stead(
        self, process: Process, tier: str, rule: Flushing, window: Sequence[Fact], line: Sequence[Fact]
    ) -> list[Fact]:
        """Those of a window that serve it, although they are not the first: another rule sends them to the tier, with
        all that this one wants, and had asked for them when it was decided where the first goes. Saves may be in memory
        before those in front of them are on the first tier, and go down from there at once."""
        others = [other for other in self._world.setup.rules[tier].flush if other is not rule]
        sent = {facts[0].attempt for other in others for facts in by_window(other, line).values()}
        came_before = self._world.judge.came_before
        return [
            fact
            for fact in window[1:]
            if fact.attempt in sent and came_before(process, fact, tier, asked_parts(rule, fact), window[0])
        ]

    def _was_on(self, tier: str, rule: Flushing, fact: Fact) -> bool:
        parts = asked_parts(rule, fact)
        return self._world.invariants.ever.get((tier, fact.attempt), set()) >= (fact.parts if parts is None else parts)

    def _as_fact(self, saved: Saved) -> Fact:
        attempt = saved.attempt
        assert attempt is not None
        parts = frozenset(saved.parts)
        return Fact(attempt, True, parts, {}, {}, frozenset(), False, saved.made)

    def _check_retained(self, process: Process) -> None:
        """What is on a tier is what its rules want; nothing else is left, but what must not go."""
        invariants, judge = self._world.invariants, self._world.judge
        facts = self._as_read(process, judge.facts(process))
        line = [fact for fact in facts if fact.counts]
        for tier, rules in self._world.setup.rules.items():
            if rules.retain is None:
                continue
            if rules.retain.every_s is not None and invariants.garbled:
                continue  # the time of what cannot be read is not known
            stay = wanted(rules.retain, tier, facts, process.wall - AGE_SLACK_S)
            for fact in line:
                spared = fact.kept or fact.attempt in stay or is_last(fact, tier, facts, ())
                unsure = fact.attempt.folder in invariants.garbled or not process.knows(fact.attempt, tier)
                if tier in fact.there and not spared and not unsure:
                    raise Broken(f"{fact.attempt.folder} is still on {tier}, and nothing of {rules.retain} wants it")

    def _as_read(self, process: Process, facts: Sequence[Fact]) -> list[Fact]:
        """Without the copies whose manifests were garbled before the process read them. It must not count on these:
        what their place in a window, or among the best, would let go stays."""
        garbled = self._world.invariants.garbled_manifests()

        def read(fact: Fact, tier: str) -> bool:
            return (tier, fact.attempt.folder) not in garbled or process.has_read(fact.attempt, tier)

        return [replace(f, there={tier: f.there[tier] for tier in f.there if read(f, tier)}) for f in facts]
