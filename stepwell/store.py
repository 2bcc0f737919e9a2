"""The store: what users hold. Synchronous, from any thread; the work happens on the background loop."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import signal
import threading
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Literal, SupportsIndex, TypeVar

from stepwell.agreement import Agreement
from stepwell.catalog import Catalog
from stepwell.chain import Chain
from stepwell.checkpoint import Checkpoint, check_metrics
from stepwell.clock import Clock, SystemClock
from stepwell.draining import DrainReport
from stepwell.ending import Ending, open_stores
from stepwell.errors import ConfigError, SaveFailed, StateError, WaitTimeout
from stepwell.files import read_sidecars
from stepwell.forking import Origin
from stepwell.guarding import Guard, Guarded, Guards, before_updates
from stepwell.inherited import check_run
from stepwell.jobs import Job, current_job
from stepwell.line import Line
from stepwell.mover import Mover
from stepwell.policies.base import Policy
from stepwell.preemption import Preemption
from stepwell.restoring import Wish, restore
from stepwell.rollback import Rollbacks
from stepwell.runtime import Runtime
from stepwell.saving import Order, Save, SaveRecord, check_step
from stepwell.settings import Settings, TierOptions
from stepwell.sharing import share
from stepwell.state import PlanCache, capture
from stepwell.tiers.base import Tier
from stepwell.tiers.gpu import GpuTier
from stepwell.tiers.host import HostTier
from stepwell.tracing import Trace
from stepwell.tripwire import tripped
from stepwell.units import parse_duration
from stepwell.warming import Warming
from stepwell.writer import RunWriter

T = TypeVar("T")
DRAIN_GRACE_S = 5.0  # on top of the limit that the loop keeps: an answer that does not come then never comes
SAVES_KEPT = 16  # before it is looked which of them are settled: that takes a lock for each tier of each one
SKIP_S = 1.0  # how long a loop that is busy may take to note that a save was given up
log = logging.getLogger("stepwell")


class CheckpointStore(Warming):
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
        options: Mapping[str, TierOptions] | None = None,
    ) -> None:
        self.run, self.mode = run, mode
        self.tiers = tuple(tiers)
        self._pid = os.getpid()
        self._settings = settings
        self._options = dict(options or {})
        self._clock = clock or SystemClock()
        self._runtime = Runtime.get()
        self.catalog = Catalog(run, tiers)
        self._plans = PlanCache()
        self._calls = 0
        self._restores = 0
        self._line = Line(run)
        self._origin: Origin | None = None
        self._saves: list[Save] = []  # those that were not settled at the last look, and newer ones
        self._ordering = threading.RLock()  # saves of several threads get their numbers one after the other
        self._record = SaveRecord(self._clock, settings.max_unsaved)
        self._trace = Trace(run, settings.trace)
        self._runtime.run(self._start(policies))
        self.ending = Ending(self._runtime, self._chain, self._writer, settings.exit_timeout, writes=mode == "w")
        give_up = partial(_leave, self._runtime, self._writer, waits="an update of guarded tensors")  # not this store's
        self._guards = Guards(self.mover.arena.slot_bytes, settings.block_timeout, give_up, self._runtime.gpus.release)
        self._rollbacks = None if self._chain.gpu is None else Rollbacks(self.mover, self.catalog, self._plans)
        if self._rollbacks is not None:
            self._writer.saver.on_gpu = self._rollbacks.note
        open_stores.add(self)
        if self._writer.steering.looks_ahead:
            self._runtime.start(self._writer.look_ahead(current_job()))

    async def _start(self, policies: Sequence[Policy]) -> None:
        started: list[Tier] = []
        try:
            for tier in self.tiers:
                await tier.start()
                started.append(tier)
            host = next((tier for tier in self.tiers if isinstance(tier, HostTier)), None)
            arena = host.arena if host else self._runtime.staging()
            gpu = next((tier for tier in self.tiers if isinstance(tier, GpuTier)), None)
            if gpu is not None:
                gpu.connect(self._runtime.gpus.device)
                gpu.on_tripped = tripped
            self.mover = Mover(self._runtime.copier, arena, host, self._runtime.gpus, gpu)
            sharing = await share(self.mover, self.tiers, self.mode)
            await check_run(self.run, self.tiers)
        except BaseException:
            for tier in started:
                await tier.close()
            raise
        chain = Chain(
            self.run, self.tiers, self.mover, self.catalog, self._clock, self._settings, self._options, sharing
        )  # fmt: skip
        self._chain = chain
        self._writer = RunWriter(chain, policies)
        self.ahead = self._writer.ahead

    def begin_from(self, origin: Origin) -> None:
        """The run is a fork: as long as it has nothing better of its own, it goes on from `origin`."""
        self._origin = self._writer.owner.origin = origin

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
            if not save.captured_within(limit):
                _leave(self._runtime, self._writer, save, limit)
        except BaseException as error:
            if save is not None:
                _leave(self._runtime, self._writer, save, None)
            else:
                self._runtime.loop.call_soon_threadsafe(self._writer.give_up, call, job, error)
            raise
        save.blocked_seconds = self._clock.monotonic() - began
        self._trace.saved(save, job)
        self._record.check_unsaved()
        return save

    def _begin(self, save: Save) -> None:
        """Whatever interrupts this between two lines: `_leave` puts it right."""
        if len(self._saves) > SAVES_KEPT:
            self._saves = [each for each in self._saves if not each.settled]
        self._saves = [*self._saves, save]
        self._line.go_on(save.step)
        self._record.began(save)
        self.ending.newest = save
        self._guards.follow(save)
        self._runtime.call(self._writer.begin, save)

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
        snapshot, cover = self._guards.cover(snapshot, state)
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
            cover=cover,
            marks=self._runtime.gpus.marks(snapshot.plan.gpus, self._wait, {} if cover is None else cover.gatherings),
            line=self._line.number,
        )
        save = Save(order, self.tiers)
        save.line_before = self._line.place
        return save

    def guard(self, *what: Guarded, hook: bool = True) -> Guard:
        """From now on these tensors change only in updates that are announced, so `save` need not wait for their
        copies: it returns at once, and the next update waits for what is not copied by then.

        what: optimizers (their parameters and their own state; each step is announced by a hook), modules (their
        parameters) or tensors, whose updates `before_update` announces. hook: False leaves an optimizer's steps to
        `before_update`, too, as a step that a CUDA graph replays needs it. Returns a handle with `remove()`.

        What no guard covers (other tensors, tensors under 4 KiB, plain values) is still copied before `save` returns. A
        guarded tensor that is found changed before an update was announced makes the save fail, by name; not seen are
        changes through `.data`, NumPy and custom kernels. Raises ConfigError, by name, for what changes weights
        otherwise: FSDP1, embeddings with max_norm (at the first save), optimizers with train() and eval().
        """
        self._check_writable()
        self._check_open()
        return self._guards.add(what, hook)

    def before_update(self) -> None:
        """Announces a change of guarded tensors by what the caller does next: waits, at most `block_timeout`, until
        copies from host memory are done and those from GPUs are under way, which the current streams then wait for."""
        self._guards.before_update()

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
            begun = -1 if self._origin is None else self._origin.step
            self._line.newest = max((a.step for a in self.catalog.newest_first()), default=begun)
        return self._line.check(step)

    def rewind(self, step: SupportsIndex) -> None:
        """Starts a new timeline after `step`: later checkpoints stay loadable by number, but are abandoned.

        Takes effect with the next save. Raises CheckpointNotFound if `step` has no checkpoint.
        """
        self._check_writable()
        step = check_step(step)
        self._wait(self.catalog.refresh())
        if self._origin is None or step != self._origin.step:
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
        began, job = self._clock.monotonic(), current_job()
        deadline = None if timeout is None else began + timeout

        def run(work: Coroutine[Any, Any, T]) -> T:
            left = None if deadline is None else max(0.0, deadline - self._clock.monotonic())
            return self._wait(work, left, "restore")

        self._settle(timeout)
        before_updates()  # what it restores into may be in saves of other stores, too
        wish = Wish(state, step, strict, rename, allow_pickle)
        self._restores += 1
        group = f"stepwell/{self.run}/{self._settings.open_number}/{job.restarts}/restore-{self._restores}"
        agreement = Agreement(job, group, self._settings.rank_timeout_seconds, run)
        done = restore(
            self.mover, self.catalog, wish, agreement, run, self._runtime.start, self._origin, self._rollbacks
        )
        if done is None:
            return None
        self._note_base(done.checkpoint.step)
        self._trace.restored(began, step, done.checkpoint, state, job)
        if done.record is not None and done.bad and self.mode == "w":
            self._runtime.loop.call_soon_threadsafe(self._writer.repair, done.bad, done.record)
        return done.checkpoint

    # -- moving --------------------------------------------------------------------------

    def flush(
        self, step: SupportsIndex | None = None, to: str | None = None, *, parts: Sequence[str] | None = None
    ) -> None:
        """Copies a checkpoint (default the newest) down to tier `to` (default the last), and waits.

        parts: only those; the copy there is then partial. All ranks of a job call it.

        Raises ConfigError if there is no checkpoint, TierError if the tier keeps failing, CheckpointGone if it was
        deleted meanwhile or another rank cannot do its part, StoreClosed if another rank has closed its store,
        WaitTimeout if it does not come.
        """
        self._check_writable()
        step = None if step is None else check_step(step)
        self._settle()
        target = self.tiers[-1] if to is None else self._named(to)

        async def down() -> None:
            await self.catalog.refresh()
            found = self.catalog.newest_first() if step is None else self.catalog.at_step(step)
            if not found:
                raise ConfigError("there is no checkpoint to flush", run=self.run)
            await self._writer.flush(found[0], target, current_job(), parts)

        self._wait(down())

    def drain(self, within: str | float = "30s") -> DrainReport:
        """Brings down now what matters most: the newest checkpoint first, to the nearest tier that outlives the node,
        then to the last one; then older ones that are on their way. What cannot be there in time lets others pass.

        within: a time such as "30s", or seconds; a preemption shortens it to what is left. Waits for the saves under
        way first. Returns in time whatever a tier does, and says what is where and what is not; that goes on
        afterwards, from the bytes that are there. Every rank of a job calls it.

        Raises SaveFailed if nothing has become durable for `max_unsaved`, RunBusy if somebody else writes the run.
        """
        self._check_writable()
        limit_s = self.ending.within(parse_duration(within))
        report = self._wait(self.ending.drainer.run(limit_s, current_job()), limit_s + DRAIN_GRACE_S, "draining")
        self._record.check_unsaved()
        return report

    # -- the end -------------------------------------------------------------------------

    def handle_preemption(
        self, signals: int | Sequence[int] = (signal.SIGTERM,), grace: str | float = "30s"
    ) -> Preemption:
        """Listens to signals that announce the end of this process; returns a handle with `remove()`. Idempotent.

        The handler notes the time, and calls the one that was there before; the default action is left to a signal
        that comes again, more than a second later. `preempted` then says so, and `close` and `drain` keep within
        what is left of `grace`, counted from the signal. `close` puts the old handlers back.

        Raises ConfigError outside of the main thread, or if other signals or another grace were asked for before.
        """
        self._check_open()
        self.ending.preemption.handle(signals, grace)
        return self.ending.preemption

    def preempted(self, step: SupportsIndex) -> bool:
        """Whether to save and stop now: the same answer on all ranks of a job, which all call it equally often.

        Alone, from the first call after the signal on. With several ranks, whichever has heard it, in the next but
        one at the latest: what ranks give in one call is read in the next, so that none waits long for another.
        False without `handle_preemption`, unless another rank has heard a signal. Raises StepwellError if one is gone.
        """
        self._check_open()
        return self.ending.preemption.preempted(check_step(step), current_job())

    def close(self, timeout: float | None = None) -> None:
        """Waits until all saves are on every tier that they go to, the newest first, then gives the run up. Idempotent.

        At most `timeout` seconds (default `exit_timeout`); what is not there by then is left to the next store that
        opens the run. Raises SaveFailed if the newest save failed, WaitTimeout if it is not on the last tier in time.
        After Ctrl-C the store is still open; leaving the interpreter then waits for it once more.
        """
        if self._pid == os.getpid() and not self.ending.closed:
            with self._trace.closing():
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


def _leave(runtime: Runtime, writer: RunWriter, save: Save, blocked_s: float | None, waits: str = "save()") -> None:
    """Who waits for a save's copies goes on before they are made. The loop hears of it before the state can change."""
    try:
        noted = runtime.start(writer.skip(save, blocked_s, waits))
        concurrent.futures.wait([noted], SKIP_S)  # the next call must know of it
    finally:
        runtime.call(save.abandon)
