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
import os
import random
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures._base import FINISHED
from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

from stepwell import commit, epochs, notes
from stepwell.errors import RunBusy
from stepwell.format.records import EpochRecord
from stepwell.jobs import Job
from stepwell.lab.loop import SimLoop, Timeline
from stepwell.settings import ON_PRESSURE
from tests.sim.alone import Alone
from tests.sim.calm import Calm
from tests.sim.chaos import NODES, Chaos
from tests.sim.evaluating import Evaluating
from tests.sim.fetching import Fetching
from tests.sim.invariants import Invariants
from tests.sim.judge import Judge, least_grace_s
from tests.sim.medium import Medium
from tests.sim.model import Broken, Gap, Model, Saved
from tests.sim.process import CHUNK_BYTES, EPOCH_S, RUN, Process, Setup
from tests.sim.rules import draw_rules
from tests.sim.training import Training
from tests.sim.weather import Weather

#: callbacks that a history has before its world calms down
EVENTS_MIN = 1000
#: bytes of the places
ROOMS, SMALL_ROOMS = (None, None, 40 << 20, 120 << 20), (24 << 20, 40 << 20)
#: chunks of host memory; where saves stay in it, two of them find room beside its share for staging, and hardly more
CHUNKS, ALONE_CHUNKS = (4, 8, 12, 24), (8, 8, 12, 24)
#: what a save may take to a disk without trouble
SAVE_S = 2.0
CHAINS = (
    ("disk",), ("disk", "pfs"), ("disk", "pfs"), ("host", "disk", "pfs"), ("host", "disk", "pfs"),
    ("disk", "nvme", "pfs"), ("host", "disk", "nvme", "pfs"),
)  # fmt: skip


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
    prefetched: int
    held: int  # saves that stayed in memory
    drained: int  # drains that left nothing behind
    told: Counter[str]  # what writers have logged, and readers have seen, and how often
    trace: str  # of all that happened; equal for equal histories


class World:
    """One history."""

    def __init__(self, seed: int, *, ahead: bool = False, alone: bool = False) -> None:
        """ahead: its trainers prefetch and pin, too. alone: saves may stay in host memory, and processes drain."""
        self.seed, self.ahead, self.alone = seed, ahead, alone
        self.rng = random.Random(seed)
        self.timeline = Timeline(self._child())
        self.timeline.after_event = self._after_event
        self.model = Model()
        kinds = self.rng.choice([chain for chain in CHAINS if "host" in chain or not alone])
        storage = [kind for kind in kinds if kind != "host"]
        small = self.rng.random() < 0.35
        rules = draw_rules(self.rng, storage, small, alone)
        chunks = self.rng.choice(ALONE_CHUNKS if alone else CHUNKS)
        self.setup = Setup(
            kinds, chunks * CHUNK_BYTES, rules, self.rng.choice(ON_PRESSURE),
            save_chunks_max=(chunks - chunks // 8 - 1) // 2 if alone else None, newest_ahead=ahead and seed % 2 == 1,
        )  # fmt: skip
        self.places = {kind: self._place(kind, SMALL_ROOMS if small else ROOMS) for kind in storage}
        self.media = [medium for medium, _ in self.places.values()]
        self.invariants = Invariants(RUN, self.model, lambda: self.timeline.now)
        self.invariants.watch(self.media)
        self.invariants.grace_s = {tier: least_grace_s(rules, tier) for tier in storage}
        self.invariants.overtaken, self.invariants.running = self._overtaken, self._running
        self.judge = Judge(self.invariants, rules)
        self.training, self.evaluating, self.chaos, self.calm = (
            Training(self),
            Evaluating(self),
            Chaos(self),
            Calm(self),
        )
        self.fetching, self.memory_alone = Fetching(self), Alone(self)
        self.processes: list[Process] = []
        self.by_loop: dict[SimLoop, Process] = {}
        self.kills = 0
        self._pids = itertools.count(1000)
        self.numbers = itertools.count(1)
        self._trace = hashlib.blake2b(digest_size=16)

    def _child(self) -> random.Random:
        return random.Random(self.rng.getrandbits(64))

    def _place(self, kind: str, rooms: Sequence[int | None]) -> tuple[Medium, Weather]:
        room = self.rng.choice(rooms)
        rate = self.rng.choice((0.0, 0.0, 0.01, 0.05, 0.15))
        pace = 1.0 if kind == "disk" else self.rng.choice((1.0, 1.0, 30.0, 300.0))
        return Medium(kind, room_bytes=room), Weather(self._child(), rate, pace)

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
        self.judge.watch(process)
        process.run(work)  # type: ignore[arg-type]
        self.note("start", pid, process.node)
        return process

    @property
    def alive(self) -> list[Process]:
        return [process for process in self.processes if not process.loop.dead]

    @property
    def writers(self) -> list[Process]:
        """Those alive that may write the run."""
        return [process for process in self.alive if not process.reads_only]

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

    def _running(self) -> Process | None:
        loop = asyncio._get_running_loop()
        return self.by_loop[loop] if isinstance(loop, SimLoop) else None

    def _overtaken(self) -> bool:
        process = self._running()
        owner = process.writer.owner if process is not None else None
        if owner is None or not owner.taken or owner.writership.lost:  # who knows of it does nothing any more
            return False
        return owner.writership.epoch < self.invariants.newest_epoch

    def _after_event(self, loop: SimLoop) -> None:
        process = self.by_loop[loop]
        for saved in [saved for saved in process.saves if not saved.settled]:
            self._look_at(process, saved)
        if self.alone:
            self.memory_alone.check_memory(process)
        self.invariants.check()
        if process.broken is not None:
            raise process.broken
        if loop.errors:
            raise Broken(f"nobody handled {loop.errors[0]}")

    def _look_at(self, process: Process, saved: Saved) -> None:
        """What its process is told of a save."""
        if saved.handle.error is not None and not saved.failed:
            saved.failed = True
            self._check_failure(process, saved.handle.error)
        for tier, told in saved.handle._futures.items():
            if told._state != FINISHED or saved.looked_at.get(tier) is told:  # asked after each event
                continue
            saved.looked_at[tier] = told
            if tier not in saved.told and saved.handle.done(tier):
                saved.told.add(tier)
                self.note("acknowledged", saved.number, saved.handle.checkpoint, tier)
                stood_still = process.paused_at >= saved.asked_at
                self.invariants.acknowledged(saved, tier, stood_still=stood_still)
                self._check_speed(process, saved, tier)
        saved.settled = len(saved.told) == len(self.setup.kinds)

    def _check_failure(self, process: Process, error: BaseException) -> None:
        writers = (other for other in self.processes if not other.reads_only and other is not process)
        others = (other for other in writers if other.ended_at >= process.started)
        if isinstance(error, RunBusy) and not any(others):
            raise Broken(f"{process} is alone, and was told: {error}")

    def _check_speed(self, process: Process, saved: Saved, tier: str) -> None:
        """Trouble on the tiers below must not hold up a save that finds room."""
        if saved.handle.held or tier != process.chain.first.info.name:
            return
        if not saved.undisturbed or process.paused_at >= saved.asked_at:
            return
        seconds, weather = self.timeline.now - saved.asked_at, self.places[tier][1]
        if weather.full_at >= saved.asked_at:
            return
        if weather.troubled_at < process.started and seconds > SAVE_S:
            raise Broken(f"{saved} took {seconds:.1f} s to {tier}, which had no trouble")

    # -- the history ---------------------------------------------------------------------------------

    def run(self) -> Outcome:
        gap = False
        with simulated(self):
            try:
                self._go_wild()
                self.calm.fall()
                self.calm.check()
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
            prefetched=self.fetching.done,
            held=sum(bool(saved.handle.held and saved.told) for saved in self.model.saves),
            drained=self.memory_alone.drained,
            told=self.judge.told + self.evaluating.seen,
            trace=self._trace.hexdigest(),
        )

    def _go_wild(self) -> None:
        events_max = EVENTS_MIN + self.rng.randrange(EVENTS_MIN)
        while self.timeline.events < events_max:
            self.bury()
            if not self.writers:
                self.spawn(self.training.train)
            self.timeline.step()
            if self.rng.random() < 0.008:
                self.chaos.happen()


@contextlib.contextmanager
def simulated(world: World) -> Iterator[None]:
    """What the product asks of the machine is answered by the world."""
    rng = world._child()
    judge = functools.partial(epochs.judge, started=world.started)
    with (
        mock.patch.object(epochs, "describe_self", world.describe),
        mock.patch.object(commit, "describe_self", world.describe),
        mock.patch.object(epochs, "judge", judge),
        mock.patch.object(notes, "user_name", lambda: "sim"),
        mock.patch.object(notes, "socket", SimpleNamespace(gethostname=lambda: "node")),
        mock.patch.object(notes, "os", SimpleNamespace(getpid=lambda: 1, path=os.path)),
        mock.patch.object(notes, "time", SimpleNamespace(time=lambda: EPOCH_S + world.timeline.now)),
        mock.patch.object(uuid, "uuid4", lambda: uuid.UUID(int=rng.getrandbits(128))),
    ):
        yield


log = logging.getLogger("stepwell.sim")


def run_seed(seed: int, *, ahead: bool = False, alone: bool = False) -> Outcome:
    """Raises Broken, and whatever else goes wrong, with the seed in its notes."""
    quiet = logging.getLogger("stepwell")
    level = quiet.level
    if level == logging.NOTSET:
        quiet.setLevel(logging.CRITICAL)  # failures are what this is about
    try:
        return World(seed, ahead=ahead, alone=alone).run()
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
