"""A workload played against a config, on the real mover, policies, arena and commit protocol in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from stepwell.config import Config
from stepwell.errors import SaveSkipped
from stepwell.hostmem import cgroup_limit_bytes
from stepwell.jobs import Job, LocalStore
from stepwell.lab.loop import Timeline
from stepwell.lab.observed import Observed
from stepwell.lab.outcome import Exposed, Outcome, ReadsSeen, SaveSeen, SavesSeen, TierSeen
from stepwell.lab.process import Brought, Process, Setup
from stepwell.lab.setup import put_there, set_up, survives_of
from stepwell.lab.speeds import Speeds
from stepwell.lab.synthetic import LEVELS
from stepwell.lab.trace import Workload, duration_s, pauses
from stepwell.saving import Save
from stepwell.tiers.host import HostTier
from stepwell.tracing import Closed, Event, Loaded, Prefetched, Restored, Saved, Start

T = TypeVar("T")
#: of what went wrong, so many lines are told
_TROUBLE_MAX = 5
_DAY_S = 86400.0


def simulate(
    config: Config, workload: Workload, speeds: Speeds, *, memory_bytes: int | None = None,
    failures: Mapping[str, float] | None = None, seed: int = 0,
) -> Outcome:  # fmt: skip
    """Plays `workload` against `config`. All ranks are on one node; the tiers are as fast as `speeds` says.

    memory_bytes: what the job may use of the node's; default what it may use of this machine's. failures: mean
    seconds between those of each level ("process", "reboot", "node-loss"), to weigh what they cost.
    """
    memory = cgroup_limit_bytes() if memory_bytes is None else memory_bytes
    setup = set_up(config, workload, speeds, memory)
    simulation = _Simulation(config, setup, workload, seed)
    with _quiet():
        try:
            return simulation.run(failures or {})
        finally:
            simulation.end()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What the product would tell the operator of a simulated run is in the outcome."""
    log, thread = logging.getLogger("stepwell"), threading.get_ident()

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread  # a real store of this process has its loop in another one

    log.addFilter(of_others)
    try:
        yield
    finally:
        log.removeFilter(of_others)


class _Rank:
    """One rank's processes, one after the other, and what they did."""

    def __init__(self, number: int, events: Sequence[Event]) -> None:
        self.number, self.events = number, events
        self.process: Process | None = None
        self.all: list[Process] = []
        self.restores: list[tuple[float, Brought]] = []
        self.loads: list[tuple[float, Brought]] = []


class _Simulation:
    def __init__(self, config: Config, setup: Setup, workload: Workload, seed: int) -> None:
        self._config, self._setup, self._workload = config, setup, workload
        self._rng = random.Random(seed)
        self._timeline = Timeline(self._rng)
        self._driver = self._timeline.new_loop("driver")
        self._ranks = [_Rank(number, events) for number, events in enumerate(workload.ranks)]
        self._spawned: list[Process] = []
        self._stores: dict[int, LocalStore] = {}  # by how often the job has been restarted
        strengths = {tier.name: survives_of(tier) for tier in config.tiers}
        self._seen = Observed(strengths, lambda: self._timeline.now)
        self._trouble: list[str] = []
        self._closed = True
        self._put_what_was_there()

    def _put_what_was_there(self) -> None:
        """What a trace restores before it has saved anything was there before it began."""
        first = next((event for event in self._workload.ranks[0] if isinstance(event, Saved | Restored)), None)
        if isinstance(first, Restored) and first.parts:
            step = first.step if first.step is not None else first.found or 0
            last = list(self._setup.places.values())[-1]
            put_there(last, self._setup.run, step, first.parts, len(self._ranks))

    # -- playing -----------------------------------------------------------------------------------

    def run(self, failures: Mapping[str, float]) -> Outcome:
        self._finish([self._play(rank) for rank in self._ranks])
        seconds = self._timeline.now
        told = self._tiers(), self._edges()  # before the restores below move bytes
        for process in self._spawned:
            for context in process.loop.errors:
                self._note(f"internal error: {context.get('exception') or context.get('message')}")
        exposed = [self._exposed(level, failures.get(level)) for level in failures or LEVELS if self._saves().asked]
        return Outcome(
            config=self._config.file, workload=self._workload.name, ranks=len(self._ranks), seconds=seconds,
            program_s=max(duration_s(rank.events) for rank in self._ranks), saves=self._saves(), each=self._each(),
            tiers=told[0], edges=told[1], restores=_reads([each for rank in self._ranks for each in rank.restores]),
            loads=_reads([each for rank in self._ranks for each in rank.loads]), failures=self._seen.failures,
            exposed=exposed, closed=self._closed, trouble=[*self._workload.notes, *self._trouble],
        )  # fmt: skip

    def _finish(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """Runs coroutines on the driver's loop to their ends."""
        with self._driver.running():
            tasks = [self._driver.create_task(work) for work in works]
        self._timeline.run_until(
            lambda: all(task.done() for task in tasks) or any(task.done() and task.exception() for task in tasks)
        )
        return [task.result() for task in sorted(tasks, key=lambda task: not (task.done() and task.exception()))]

    async def _on(self, process: Process, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine on a process's loop."""
        done: asyncio.Future[T] = self._driver.create_future()

        def ended(task: asyncio.Task[T]) -> None:
            if (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        with process.loop.running():
            process.loop.create_task(work).add_done_callback(ended)
        return await done

    async def _play(self, rank: _Rank) -> None:
        for pause, event in zip(pauses(rank.events), rank.events, strict=True):
            await asyncio.sleep(pause)
            if isinstance(event, Start):
                await self._start(rank, event.lost or "process")
            elif isinstance(event, Closed):
                await self._close(rank)
            else:
                if rank.process is None:  # a process that opened its store again
                    await self._start(rank, "nothing")
                assert rank.process is not None
                await self._do(rank, rank.process, event)
        await self._close(rank)

    async def _do(self, rank: _Rank, process: Process, event: Saved | Restored | Loaded | Prefetched) -> None:
        began = self._timeline.now
        if isinstance(event, Saved):
            if rank.number == 0:
                self._seen.saving(event.step)
            await self._on(process, process.save(event.step, event.parts))
        elif isinstance(event, Restored):
            brought = await self._on(process, process.restore(event.step, list(event.parts)))
            rank.restores.append((self._timeline.now - began, brought))
            self._note(brought.error)
            if rank.number == 0:
                self._seen.restored(brought.step, self._timeline.now - began)
        elif isinstance(event, Loaded):
            brought = await self._on(process, process.load(event.ref, event.chunks))
            rank.loads.append((self._timeline.now - began, brought))
            self._note(brought.error)
        elif event.wait:
            self._note(await self._on(process, process.prefetch(event.refs, event.to)))
        else:
            with process.loop.running():
                process.loop.create_task(process.prefetch(event.refs, event.to))

    async def _start(self, rank: _Rank, lost: str) -> None:
        """A new process; one that runs is killed, and what a failure of this level takes is gone. Shared memory is left
        to it, also by one that was closed."""
        if rank.process is not None:
            self._kill(rank, rank.process, lost)
        host = rank.all[-1].host if rank.all else None
        if host is not None and not self._seen.outlives(host.info.name, "process" if lost == "nothing" else lost):
            host = None
        store = self._stores.setdefault(len(rank.all), LocalStore())
        process = rank.process = self._spawn(rank.number, store, len(rank.all), host)
        rank.all.append(process)
        await self._on(process, process.start())
        if rank.number == 0:
            process.writer.events.listeners.append(lambda entry: self._seen.heard(process, entry))
            self._seen.started()

    def _kill(self, rank: _Rank, process: Process, lost: str) -> None:
        if rank.number == 0:
            self._seen.ended(process)
        process.kill()
        if rank.number == 0:
            self._seen.failed(lost)
            for name, place in self._setup.places.items():
                if not self._seen.outlives(name, lost):
                    place.lose()

    def _spawn(
        self, rank: int, store: LocalStore, restarts: int, host: HostTier | None, only: Sequence[str] | None = None
    ) -> Process:
        job = Job(rank, len(self._ranks), store, "lab", restarts)  # a later restart takes the run over at once
        loop = self._timeline.new_loop(f"rank {rank}, start {restarts}")
        with loop.running():
            process = Process(loop, self._setup, job, random.Random(self._rng.random()), host, only=only)
        self._spawned.append(process)
        return process

    def end(self) -> None:
        """Nothing goes on after it."""
        for process in self._spawned:
            process.kill()
        self._driver.kill()

    async def _close(self, rank: _Rank) -> None:
        process, rank.process = rank.process, None
        if process is not None:
            if rank.number == 0:
                self._seen.ended(process)
            self._closed = await self._on(process, process.close()) and self._closed

    def _note(self, what: str) -> None:
        if what and what not in self._trouble and len(self._trouble) < _TROUBLE_MAX:
            self._trouble.append(what)

    # -- what came of it ---------------------------------------------------------------------------

    def _processes(self) -> list[Process]:
        return [process for rank in self._ranks for process in rank.all]

    def _saves(self) -> SavesSeen:
        saves = [save for process in self._processes() for save in process.saves]
        first = next(name for name in self._setup.names if name in self._setup.places)
        blocked = [save.blocked_seconds for save in saves]
        skipped = sum(_skipped(save, self._setup.settings.block_timeout) for save in saves)
        for save in saves:
            if save.failed and save.error is not None:
                self._note(str(save.error))
        return SavesSeen(
            asked=len(saves),
            durable=sum(first in save.report().tier_seconds for save in saves),
            skipped=skipped,
            failed=sum(save.failed for save in saves) - skipped,
            blocked_s=sum(blocked),
            blocked_mean_s=sum(blocked) / len(saves) if saves else 0.0,
            blocked_max_s=max(blocked, default=0.0),
        )

    def _each(self) -> list[SaveSeen]:
        found = []
        for rank in self._ranks:
            for report in (save.report() for process in rank.all for save in process.saves):
                found.append(SaveSeen(rank.number, report.step, report.blocked_seconds, report.tier_seconds))
        return found

    def _tiers(self) -> list[TierSeen]:
        reports = [save.report() for process in self._processes() for save in process.saves]
        found = []
        for name in self._setup.names:
            took = [report.tier_seconds[name] for report in reports if name in report.tier_seconds]
            place = self._setup.places.get(name)
            found.append(TierSeen(
                name, self._seen.committed(name), sum(took) / len(took) if took else None, max(took, default=None),
                *((place.written_bytes, place.read_bytes, place.most_bytes) if place is not None else ()),
            ))  # fmt: skip
        return found

    def _edges(self) -> dict[str, int]:
        moved: Counter[str] = Counter()
        with self._driver.running():
            for process in self._processes():
                for edge in process.mover.edges.all():
                    seen = edge.statistics()
                    moved[f"{seen.source} -> {seen.target}"] += seen.moved_bytes
        return {way: size for way, size in moved.items() if size}

    def _exposed(self, level: str, between_s: float | None) -> Exposed:
        lost = self._seen.exposure(level)
        restore_s = self._restore_after(level)
        per_day = None if between_s is None else (lost.mean_s + (restore_s or 0.0)) * _DAY_S / between_s
        return Exposed(level, lost.mean_s, lost.max_s, restore_s, between_s, per_day)

    def _restore_after(self, level: str) -> float | None:
        """How long a new process restores, at the end of it all, from what such a failure has left."""
        left = [name for name in self._setup.places if self._seen.outlives(name, level)]
        parts = next(
            (list(e.parts) for events in self._workload.ranks for e in events if isinstance(e, Saved | Restored)), None
        )
        if not left or parts is None:
            return None

        async def one(rank: _Rank) -> float | None:
            last = rank.all[-1].host if rank.all else None
            host = last if last is not None and self._seen.outlives(last.info.name, level) else None
            process = self._spawn(rank.number, LocalStore(), len(rank.all), host, left)
            began = self._timeline.now
            await self._on(process, process.start())
            brought = await self._on(process, process.restore(None, parts))
            return None if brought.step is None else self._timeline.now - began

        took = self._finish([one(rank) for rank in self._ranks])
        found = [seconds for seconds in took if seconds is not None]
        return max(found) if len(found) == len(took) else None


def _skipped(save: Save, block_timeout_s: float) -> bool:
    """Given up so that training goes on: by on_pressure, or because `save` blocked for block_timeout."""
    return save.failed and (isinstance(save.error, SaveSkipped) or save.blocked_seconds >= block_timeout_s)


def _reads(reads: Sequence[tuple[float, Brought]]) -> ReadsSeen:
    sources: Counter[str] = Counter()
    for _, brought in reads:
        sources.update(brought.sources)
    took = [seconds for seconds, brought in reads if brought.step is not None]
    return ReadsSeen(
        len(reads), sum(brought.step is None for _, brought in reads), sum(took) / len(took) if took else 0.0,
        max(took, default=0.0), dict(sources),
    )  # fmt: skip
