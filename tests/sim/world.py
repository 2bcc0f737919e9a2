"""A world from a seed: nodes, tiers, processes that train and die, and everything that can go wrong with them.

    python -m tests.sim.world SEED [SEED ...]

runs single seeds and says what happened. A seed is one history; the same seed is the same history.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import itertools
import logging
import random
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from unittest import mock

from stepwell import commit, epochs
from stepwell.errors import RunBusy
from stepwell.format.records import EpochRecord
from stepwell.jobs import Job
from tests.sim.chaos import NODES, Chaos
from tests.sim.invariants import Invariants
from tests.sim.loop import SimLoop, Stuck, Timeline
from tests.sim.medium import Medium
from tests.sim.model import Broken, Gap, Model, Saved
from tests.sim.process import CHUNK_BYTES, RUN, Process, Restored, Setup
from tests.sim.training import EXIT_S, Training
from tests.sim.weather import Weather

#: callbacks that a history has before its world calms down
EVENTS_MIN = 1000
#: virtual seconds that calm weather may need to finish what was begun
CALM_S = 3000.0
#: what a save may take to a disk without trouble
SAVE_S = 2.0
CHAINS = (("disk",), ("disk", "pfs"), ("disk", "pfs"), ("host", "disk", "pfs"), ("host", "disk", "pfs"))


@dataclass(slots=True)
class Outcome:
    """What a history was like."""

    seed: int
    events: int
    saves: int
    acknowledged: int
    processes: int
    kills: int
    gap: bool  # it ended early, in the known gap
    trace: str  # of all that happened; equal for equal histories


class World:
    """One history."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.timeline = Timeline(self._child())
        self.timeline.after_event = self._after_event
        self.model = Model()
        kinds = self.rng.choice(CHAINS)
        storage = [kind for kind in kinds if kind != "host"]
        retain = {kind: self.rng.randint(1, 3) for kind in storage if self.rng.random() < 0.4}
        self.setup = Setup(kinds, self.rng.choice((4, 8, 12, 24)) * CHUNK_BYTES, retain)
        self.places = {kind: self._place(kind) for kind in storage}
        self.media = [medium for medium, _ in self.places.values()]
        self.invariants = Invariants(RUN, self.model, retain)
        self.invariants.watch(self.media)
        self.invariants.overtaken = self._overtaken
        self.training, self.chaos = Training(self), Chaos(self)
        self.processes: list[Process] = []
        self.by_loop: dict[SimLoop, Process] = {}
        self.kills = 0
        self._pids = itertools.count(1000)
        self.numbers = itertools.count(1)
        self._trace = hashlib.blake2b(digest_size=16)

    def _child(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def _place(self, kind: str) -> tuple[Medium, Weather]:
        room = self.rng.choice((None, None, 40 << 20, 120 << 20))
        rate = self.rng.choice((0.0, 0.0, 0.01, 0.05, 0.15))
        return Medium(kind, room_bytes=room), Weather(self._child(), rate)

    def note(self, *what: object) -> None:
        """Enters something that happened into the trace."""
        self._trace.update(f"{self.timeline.now:.9f} {what}\n".encode())
        log.debug("%.6f %s", self.timeline.now, what)

    # -- processes -----------------------------------------------------------------------------------

    def spawn(self, work: Callable[[Process], object], *, reads_only: bool = False) -> Process:
        pid = next(self._pids)
        loop = self.timeline.new_loop(f"process-{pid}")
        process = Process(
            loop, pid, self.rng.choice(NODES), self.setup, self.places, self._child(), reads_only=reads_only
        )
        self.processes.append(process)
        self.by_loop[loop] = process
        process.run(work)  # type: ignore[arg-type]
        self.note("start", pid, process.node)
        return process

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.loop.dead]

    def kill(self, process: Process) -> None:
        self.note("kill", process.pid)
        self.kills += 1
        process.kill()

    def bury(self) -> None:
        """Processes that came to their end by themselves."""
        for process in self.alive:
            if process.ended:
                self.note("end", process.pid, str(type(process.failure).__name__))
                process.kill()

    def started(self, pid: int) -> float | None:
        """Stands for the operating system's list of processes."""
        found = [process for process in self.alive if process.pid == pid]
        return found[0].started if found else None

    def describe(self, job: Job, wall: float) -> EpochRecord:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimLoop)
        return self.by_loop[loop].describe(job, wall)

    def _overtaken(self) -> bool:
        loop = asyncio._get_running_loop()
        owner = self.by_loop[loop].writer.owner if isinstance(loop, SimLoop) else None
        if owner is None or not owner.taken or owner.writership.lost:  # who knows of it does nothing any more
            return False
        return owner.writership.epoch < self.invariants.newest_epoch

    def _after_event(self, loop: SimLoop) -> None:
        process = self.by_loop[loop]
        for saved in process.saves:
            for tier in self.setup.kinds:
                if tier not in saved.told and saved.handle.done(tier):
                    saved.told.add(tier)
                    self.note("acknowledged", saved.number, saved.handle.checkpoint, tier)
                    self.invariants.acknowledged(saved, tier)
                    self._check_speed(process, saved, tier)
            if saved.handle.error is not None and not saved.failed:
                saved.failed = True
                self._check_failure(process, saved.handle.error)
        self.invariants.check()
        if process.broken is not None:
            raise process.broken
        if loop.errors:
            raise Broken(f"nobody handled {loop.errors[0]}")

    def _check_failure(self, process: Process, error: BaseException) -> None:
        others = (other for other in self.processes if other is not process and other.ended_at >= process.started)
        if isinstance(error, RunBusy) and not any(others):
            raise Broken(f"{process} is alone, and was told: {error}")

    def _check_speed(self, process: Process, saved: Saved, tier: str) -> None:
        """Trouble on the tiers below must not hold up a save."""
        if tier != process.chain.first.info.name or not saved.undisturbed or process.paused_at >= saved.asked_at:
            return
        seconds = self.timeline.now - saved.asked_at
        if self.places[tier][1].troubled_at < process.started and seconds > SAVE_S:
            raise Broken(f"{saved} took {seconds:.1f} s to {tier}, which had no trouble")

    # -- the history ---------------------------------------------------------------------------------

    def run(self) -> Outcome:
        gap = False
        with simulated(self):
            try:
                self._go_wild()
                self._calm_down()
                self._check_end()
            except Gap as found:
                self.note("gap", str(found))
                gap = True
            finally:
                for process in self.alive:
                    process.kill()
        acknowledged = sum(bool(saved.told) for saved in self.model.saves)
        return Outcome(
            seed=self.seed,
            events=self.timeline.events,
            saves=len(self.model.saves),
            acknowledged=acknowledged,
            processes=len(self.processes),
            kills=self.kills,
            gap=gap,
            trace=self._trace.hexdigest(),
        )

    def _go_wild(self) -> None:
        events_max = EVENTS_MIN + self.rng.randrange(EVENTS_MIN)
        while self.timeline.events < events_max:
            self.bury()
            if not self.alive:
                self.spawn(self.training.train)
            self.timeline.step()
            if self.rng.random() < 0.008:
                self.chaos.happen()

    def _calm_down(self) -> None:
        """Nothing goes wrong any more; who lives comes to an end."""
        self.note("calm")
        calm_at = self.timeline.now
        for medium, weather in self.places.values():
            weather.clear_up()
            medium.room_bytes = None
        if self.rng.random() < 0.5:
            for process in self.alive:
                self.kill(process)
        for process in self.alive:
            self._wait_for(process)
            self._check_ended(process)
            self._check_closed(process, calm_at)
        self.bury()

    def _check_closed(self, process: Process, calm_at: float) -> None:
        """Whoever closes in calm weather, and waits, leaves its newest checkpoint on the last tier."""
        owner = process.writer.owner
        if process.closing_at < calm_at or process.exit_s < EXIT_S or not owner.taken or owner.writership.lost:
            return
        newest = self.invariants.newest_first()[:1]
        mine = {saved.attempt for saved in process.saves}
        for attempt in newest:
            last = self.media[-1]
            if attempt in mine and self.invariants.good(attempt) and last not in self.invariants.committed()[attempt]:
                raise Broken(f"{process} was closed, and {attempt.folder} is not on {last.name}")

    def _wait_for(self, process: Process) -> None:
        until = self.timeline.now + CALM_S
        self.timeline.run_until(lambda: process.ended or self.timeline.now > until)
        if not process.ended:
            raise Broken(f"{process} has not ended within {CALM_S} s of calm weather")

    def _check_ended(self, process: Process) -> None:
        """A process that came to its end holds nothing any more, once what hung has ended, too."""
        until = self.timeline.now + CALM_S
        with contextlib.suppress(Stuck):
            self.timeline.run_until(lambda: not process.held or self.timeline.now > until)
        if process.held:
            raise Broken(f"{process} has ended, and still holds {process.held}")

    def _check_end(self) -> None:
        """In calm weather the newest good checkpoint comes back, and saving goes on and reaches the last tier."""
        self._check_newest(reads_only=True)
        writer = self.spawn(self.training.train_one)
        self._wait_for(writer)
        if writer.failure is not None:
            raise Broken(f"a save in calm weather failed: {writer.failure!r}") from writer.failure
        self._check_ended(writer)
        last = writer.saves[-1]
        storage = [kind for kind in self.setup.kinds if kind != "host"]
        if not last.told >= set(storage):
            raise Broken(f"{last} got only to {sorted(last.told)} in calm weather")
        self.bury()
        restored = self._check_newest(reads_only=True)
        if restored is None or restored.attempt != last.attempt:
            raise Broken(f"{last} is the newest, but {restored and restored.attempt.folder} was restored")

    def _check_newest(self, *, reads_only: bool) -> Restored | None:
        """A restore that nothing disturbs brings the newest that is good somewhere, and names those passed over."""
        newest = self.invariants.newest_first()
        good = [attempt for attempt in newest if self.invariants.good(attempt)]
        got: list[Restored | None] = []

        async def look(process: Process) -> None:
            await process.start()
            try:
                got.append(await process.restore())
            finally:
                await process.close(1.0)

        process = self.spawn(look, reads_only=reads_only)
        self._wait_for(process)
        self._check_ended(process)
        self.bury()
        if not got:
            if good or not newest:
                raise Broken(f"{process} could not restore {good[:1]}: {process.failure!r}")
            return None
        [restored] = got
        self.training.check_restored(process, restored, set(newest))
        found = None if restored is None else restored.attempt
        if found != (good[0] if good else None):
            raise Broken(f"{process} restored {found} instead of {good[:1]}")
        missed = [a.step for a in newest[: newest.index(found)]] if found is not None else []
        if restored is not None and sorted(restored.skipped) != sorted(missed):
            raise Broken(f"{process} passed over steps {missed}, and said {sorted(restored.skipped)}")
        return restored


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """What the product asks of the machine is answered by the world."""
    rng = world._child()
    judge = functools.partial(epochs.judge, started=world.started)
    with (
        mock.patch.object(epochs, "describe_self", world.describe),
        mock.patch.object(commit, "describe_self", world.describe),
        mock.patch.object(epochs, "judge", judge),
        mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128))),
    ):
        yield


log = logging.getLogger("stepwell.sim")


def run_seed(seed: int) -> Outcome:
    """Raises Broken, and whatever else goes wrong, with the seed in its notes."""
    quiet = logging.getLogger("stepwell")
    level = quiet.level
    if level == logging.NOTSET:
        quiet.setLevel(logging.CRITICAL)  # failures are what this is about
    try:
        return World(seed).run()
    except BaseException as error:
        error.add_note(f"in the simulated history of seed {seed}")
        raise
    finally:
        quiet.setLevel(level)


def main() -> None:
    logging.basicConfig(level=logging.DEBUG, format="%(name)s %(message)s", stream=sys.stdout)
    for argument in sys.argv[1:]:
        logging.getLogger("stepwell").setLevel(logging.DEBUG)
        print(run_seed(int(argument)))


if __name__ == "__main__":
    main()
