"""The store: what users hold. Synchronous, from any thread; the work happens on the background loop."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, SupportsIndex, TypeVar

from stepwell.agreement import Agreement
from stepwell.catalog import Catalog, Debris
from stepwell.chain import Chain
from stepwell.checkpoint import Checkpoint
from stepwell.clock import Clock, SystemClock
from stepwell.describing import describe_all
from stepwell.ending import Ending, open_stores
from stepwell.errors import ConfigError, NotPlanned, SaveFailed, StateError, StoreClosed, WaitTimeout
from stepwell.files import read_sidecars
from stepwell.jobs import Job, current_job
from stepwell.line import Line
from stepwell.mover import Mover
from stepwell.policies.base import Policy
from stepwell.prefetching import Prefetch
from stepwell.restoring import Wish, restore
from stepwell.runtime import Runtime
from stepwell.saving import Order, Save, SaveRecord, check_metrics, check_step
from stepwell.settings import Settings
from stepwell.state import PlanCache, capture
from stepwell.status import StoreStatus, status_of
from stepwell.tiers.base import Tier
from stepwell.tiers.host import HostTier
from stepwell.warm import Ref, start_prefetch
from stepwell.writer import RunWriter

T = TypeVar("T")
SKIP_S = 1.0  # how long a loop that is busy may take to note that a save was given up
log = logging.getLogger("stepwell")


class CheckpointStore:
    """Checkpoints of one run on a chain of tiers. Made by `stepwell.open`.

    A context manager: leaving it closes the store, which waits for the saves that are under way.
    """

    def __init__(
        self,
        run: str,
        tiers: Sequence[Tier],
        mode: Literal["w", "r"],
        settings: Settings,
        policies: Sequence[Policy] = (),
        clock: Clock | None = None,
    ) -> None:
        self.run, self.mode = run, mode
        self.tiers = tuple(tiers)
        self._pid = os.getpid()
        self._settings = settings
        self._clock = clock or SystemClock()
        self._runtime = Runtime.get()
        self.catalog = Catalog(run, tiers)
        self._plans = PlanCache()
        self._calls = 0
        self._restores = 0
        self._line = Line(run)
        self._saves: list[Save] = []  # those that were not settled at the last look, and the newest
        self._ordering = threading.RLock()  # saves of several threads get their numbers one after the other
        self._record = SaveRecord(self._clock, settings.max_unsaved)
        self._runtime.run(self._start(policies))
        self.ending = Ending(self._runtime, self._chain, self._writer, settings.exit_timeout)
        open_stores.add(self)

    async def _start(self, policies: Sequence[Policy]) -> None:
        started: list[Tier] = []
        try:
            for tier in self.tiers:
                await tier.start()
                started.append(tier)
        except BaseException:
            for tier in started:
                await tier.close()
            raise
        host = next((tier for tier in self.tiers if isinstance(tier, HostTier)), None)
        arena = host.arena if host is not None else self._runtime.staging()
        self.mover = Mover(self._runtime.copier, arena, host)
        chain = Chain(self.run, self.tiers, self.mover, self.catalog, self._clock, self._settings)
        self._chain = chain
        self._writer = RunWriter(chain, policies)

    def _wait(self, work: Coroutine[Any, Any, T], timeout: float | None = None, what: str = "the call") -> T:
        try:
            self._check_open()
        except StoreClosed:
            work.close()
            raise
        return self._runtime.run(work, timeout, what)

    def _check_open(self) -> None:
        if self._pid != os.getpid():
            raise StoreClosed("this store was opened in the parent of this process", todo="Open it again", run=self.run)
        if self.ending.closed:
            raise StoreClosed("the store is closed", todo="Open it again", run=self.run)

    # -- saving --------------------------------------------------------------------------

    def save(
        self,
        step: SupportsIndex,
        state: Mapping[Any, Any],
        *,
        metrics: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        files: Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]] | None = None,
    ) -> Save:
        """Saves `state` as the checkpoint of `step`; returns when the state may change again.

        state: parts by name; what a part may hold: docs/api.md. metrics: numbers by name, for `best` and
        retention. tags: words to find the checkpoint by. files: sidecars, such as a tokenizer's, by name
        or as paths.

        The save goes on in the background: see the returned `Save`. Raises StateError, before any file is
        made, for a value that cannot be saved; StepExists for a step at or below an existing one unless an
        older step was restored before; SaveFailed, once, if this process's first save failed, and as long as nothing
        has become durable for `max_unsaved` (this save then goes on all the same). Blocks at most `block_timeout`;
        then this checkpoint is skipped, and says so.
        """
        began = self._clock.monotonic()
        self._check_open()
        self._check_writable()
        job, limit, call = current_job(), self._settings.block_timeout, 0
        save: Save | None = None
        try:
            with self._ordering:
                self._calls += 1  # also of a call that raises: all ranks count alike, whatever happens to one of them
                call = self._calls
                save = self._order(began, job, call, step, state, metrics, tags, files)
                self._begin(save)
            if not save.copied_within(limit):
                self._leave(save, limit)
        except BaseException as error:
            if save is not None:
                self._leave(save, None)
            else:
                self._runtime.loop.call_soon_threadsafe(self._writer.give_up, call, job, error)
            raise
        save.blocked_seconds = self._clock.monotonic() - began
        self._record.check_unsaved()
        return save

    def _begin(self, save: Save) -> None:
        """Whatever interrupts this between two lines: `_leave` puts it right."""
        self._saves = [s for s in self._saves if not s.settled] + [save]
        self._line.go_on(save.step)
        self._record.began(save)
        self.ending.newest = save
        save.running = self._runtime.start(self._writer.save(save))

    def _leave(self, save: Save, blocked_s: float | None) -> None:
        """save() ends before the state is copied. The loop hears of it before the caller can change the state."""
        try:
            noted = self._runtime.start(self._writer.skip(save, blocked_s))
            concurrent.futures.wait([noted], SKIP_S)  # the next call must know of it
        finally:
            if save.running is not None:
                save.running.cancel()

    def _order(
        self,
        began: float,
        job: Job,
        call: int,
        step: SupportsIndex,
        state: Mapping[Any, Any],
        metrics: Mapping[str, Any] | None,
        tags: Sequence[str],
        files: Mapping[str, str | os.PathLike[str]] | Sequence[str | os.PathLike[str]] | None,
    ) -> Save:
        """The save, with all that the state's memory is needed for but the copying."""
        self._record.check_first()
        step = check_step(step)
        rewind_to = self._check_line(step)
        snapshot = capture(state, rank=job.rank, world=job.world, plans=self._plans)
        order = Order(
            call=call,
            step=step,
            job=job,
            snapshot=snapshot,
            metrics=check_metrics(metrics),
            tags=[tags] if isinstance(tags, str) else [str(tag) for tag in tags],
            files={**snapshot.sidecars, **read_sidecars(files)},
            began=began,
            made=self._clock.wall(),
            capture_seconds=self._clock.monotonic() - began,
            rewind_to=rewind_to,
            let_go=snapshot.let_go,
            line=self._line.number,
        )
        save = Save(order, self.tiers)
        save.line_before = self._line.place
        return save

    def _check_writable(self) -> None:
        if self.mode == "r":
            raise ConfigError("this store was opened for reading", todo="Open it with mode='w' to save", run=self.run)

    def _check_line(self, step: int) -> int | None:
        """The step to rewind to before saving `step`, if any."""
        self._line.take_back(self._saves)
        if self._line.newest is None:
            try:
                self._wait(self.catalog.refresh(), self._settings.block_timeout, "looking for its newest checkpoint")
            except WaitTimeout as error:
                todo = "Some tier hangs; the next save is tried again"
                raise SaveFailed(f"the checkpoint was skipped: {error}", todo=todo, step=step, run=self.run) from error
            self._line.newest = max((a.step for a in self.catalog.newest_first()), default=-1)
        return self._line.check(step)

    def rewind(self, step: SupportsIndex) -> None:
        """Starts a new timeline after `step`: later checkpoints stay loadable by number, but are abandoned.

        Takes effect with the next save. Raises CheckpointNotFound if `step` has no checkpoint.
        """
        self._check_writable()
        step = check_step(step)
        self._wait(self.catalog.refresh())
        self.catalog.at_step(step)
        self._note_base(step)

    def _note_base(self, step: int) -> None:
        newest = max((a.step for a in self.catalog.newest_first()), default=step)
        with self._ordering:
            self._line.go_back(step, newest, self._saves)

    # -- restoring -----------------------------------------------------------------------

    def restore(
        self,
        state: Mapping[Any, Any],
        step: SupportsIndex | None = None,
        *,
        strict: bool | dict[str, bool] = True,
        rename: Any = None,
        allow_pickle: bool = False,
        timeout: float | None = None,
    ) -> Checkpoint | None:
        """Restores into `state`, in place: the newest good checkpoint that has every part asked for, or `step`.

        Tensors keep their identity; modules, optimizers and other stateful objects are loaded; plain
        values of dicts and lists are replaced. strict: raise KeyMismatch, before anything is touched, if
        keys differ (or per part: {"model": False}). rename: saved name -> name here, by prefix or pattern,
        or a function. allow_pickle: unpickle values that can be stored in no other way, if you trust them.
        timeout: seconds for all of it.

        Returns None only if every tier answered and none holds a commit of this run. Raises
        NoGoodCheckpoint with the reasons per step, TierUnavailable, CheckpointNotFound for a `step` that
        does not exist.
        """
        step = None if step is None else check_step(step)
        if not isinstance(state, Mapping):
            raise StateError(
                f"the state is a {type(state).__name__}, not a dict of parts", todo='Give restore({"model": model})'
            )
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        job = current_job()

        def run(work: Coroutine[Any, Any, T]) -> T:
            left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
            return self._wait(work, left, "restore")

        self._settle(timeout)
        wish = Wish(state, step, strict, rename, allow_pickle)
        self._restores += 1
        group = f"stepwell/{self.run}/{self._settings.open_number}/{job.restarts}/restore-{self._restores}"
        agreement = Agreement(job, group, self._settings.rank_timeout_seconds, run)
        done = restore(self.mover, self.catalog, wish, agreement, run, self._runtime.start)
        if done is None:
            return None
        self._note_base(done.checkpoint.step)
        if done.bad and self.mode == "w":
            self._runtime.loop.call_soon_threadsafe(self._writer.repair, done.bad, done.record)
        return done.checkpoint

    def _settle(self, timeout: float | None = None) -> None:
        """Waits until this store's own saves are on some tier, so that a restore sees them; errors are their own."""
        deadline = None if timeout is None else self._clock.monotonic() + timeout
        for save in self._saves:
            for tier in self.tiers:
                left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
                with contextlib.suppress(NotPlanned):
                    with contextlib.suppress(SaveFailed, WaitTimeout):
                        save.wait(tier.info.name, timeout=left)
                    break

    def prefetch(self, refs: Ref | Sequence[Ref], to: str = "host") -> Prefetch:
        """Brings checkpoints up before they are asked for; returns at once, with a handle for progress, wait, cancel.

        refs: one or several, the most urgent first: a step of this run, `@latest`, `@best:METRIC`, `@TAG` of it, or
        any path that `stepwell.load` takes. to: the host tier, where this store and `stepwell.load` then find the
        chunks in memory, until their room is needed; or a storage tier, for checkpoints of this run.
        """
        wanted = [refs] if isinstance(refs, SupportsIndex | str | os.PathLike) else list(refs)
        tier = next((t for t in self.tiers if t.info.name == to), None)
        if tier is None:
            names = ", ".join(t.info.name for t in self.tiers)
            raise ConfigError(f"there is no tier {to!r}", todo=f"The tiers are {names}")
        self._check_open()
        return start_prefetch(self, self._runtime, self._chain, self._writer, wanted, tier)

    # -- looking -------------------------------------------------------------------------

    def checkpoints(self, *, abandoned: bool = False) -> list[Checkpoint]:
        """The run's checkpoints, by step; with `abandoned`, those that rewinds left behind, too."""

        async def listed() -> list[Checkpoint]:
            await self.catalog.refresh()
            wanted = list(self.catalog.holdings) if abandoned else self.catalog.newest_first()
            return await describe_all(self.catalog, sorted(wanted, key=lambda a: (a.step, a)))

        return self._wait(listed())

    def latest(self, tier: str | None = None) -> Checkpoint | None:
        """The newest checkpoint, or the newest that `tier` holds; None if there is none."""
        found = [c for c in self.checkpoints() if tier is None or tier in c.tiers]
        return found[-1] if found else None

    def debris(self) -> list[Debris]:
        """What saves that are not committed have left on the tiers, one that is under way included.

        A writer removes it once its owner is certainly dead.
        """

        async def found() -> list[Debris]:
            await self.catalog.refresh()
            return list(self.catalog.debris)

        return self._wait(found())

    def flush(
        self, step: SupportsIndex | None = None, to: str | None = None, *, parts: Sequence[str] | None = None
    ) -> None:
        """Copies a checkpoint (default the newest) down to tier `to` (default the last), and waits.

        parts: only those; the copy there is then partial.
        """
        self._check_writable()
        step = None if step is None else check_step(step)
        self._settle()
        target = self.tiers[-1] if to is None else next((t for t in self.tiers if t.info.name == to), None)
        if target is None:
            raise ConfigError(
                f"there is no tier {to!r}", todo=f"The tiers are {', '.join(t.info.name for t in self.tiers)}"
            )

        async def down() -> None:
            await self.catalog.refresh()
            found = self.catalog.newest_first() if step is None else self.catalog.at_step(step)
            if not found:
                raise ConfigError("there is no checkpoint to flush", run=self.run)
            await self._writer.flush(found[0], target, current_job(), parts)

        self._wait(down())

    def status(self) -> StoreStatus:
        """Tiers, backlog, health, last errors, and the newest durable step of each tier, as of now. No I/O."""
        return self._wait(status_of(self._chain, self._writer, self._record))

    # -- the end -------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Waits until all saves are on every tier that they go to, the newest first, then gives the run up. Idempotent.

        At most `timeout` seconds (default `exit_timeout`); what is not there by then is left to the next store that
        opens the run. Raises SaveFailed if the newest save failed, WaitTimeout if it is not on the last tier in time.
        After Ctrl-C the store is still open; leaving the interpreter then waits for it once more.
        """
        if self._pid == os.getpid() and not self.ending.closed:
            self.ending.close(self._settings.exit_timeout if timeout is None else timeout)

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif self._pid == os.getpid() and not self.ending.closed:
            self.ending.close_after_error()

    def __repr__(self) -> str:
        tiers = " -> ".join(tier.info.name for tier in self.tiers)
        closed = ", closed" if self.ending.closed else ""
        return f"<CheckpointStore run {self.run!r}, mode {self.mode!r}, {tiers}{closed}>"

    def __del__(self) -> None:
        """A store that is dropped without being closed finishes its saves and frees its threads and files."""
        ending = getattr(self, "ending", None)  # it is not there if opening failed
        if ending is not None and self._pid == os.getpid():
            ending.drop()
