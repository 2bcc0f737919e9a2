"""Restore: choose the newest good checkpoint, match it with the state, read, apply."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from stepwell.agreement import Agreement, Vote
from stepwell.catalog import Catalog
from stepwell.checkpoint import Checkpoint
from stepwell.describing import describe
from stepwell.errors import CheckpointNotFound, CorruptData, StepwellError, TierError
from stepwell.forking import Origin
from stepwell.format.names import Attempt
from stepwell.format.records import RankRecord
from stepwell.jobs import Job
from stepwell.mover import Mover
from stepwell.reader import OpenCheckpoint, fill, open_checkpoint
from stepwell.rollback import Rollbacks, RolledBack
from stepwell.runtime import Runtime
from stepwell.state import Placement, assign
from stepwell.state.skeleton import part_names
from stepwell.tiers.base import ShardKey

log = logging.getLogger("stepwell")

_MIXED = "Tensors of the state may hold a mix of old and restored values: restore again before training on."

#: errors of one checkpoint that an older one may not have
_TRY_OLDER = (CorruptData, TierError, CheckpointNotFound)


T = TypeVar("T")


class Run(Protocol):
    """Runs a coroutine on the event loop and waits for it."""

    def __call__(self, work: Coroutine[Any, Any, T], /) -> T: ...


Start = Callable[[Coroutine[Any, Any, None]], Future[None]]


@dataclass(frozen=True, slots=True)
class Wish:
    """What the caller of restore asked for."""

    state: Mapping[Any, Any]
    step: int | None
    strict: bool | dict[str, bool]
    rename: Any
    allow_pickle: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """What restore did, and what the writer should mend."""

    checkpoint: Checkpoint
    bad: dict[tuple[str, ShardKey], str]  # (tier, shard) -> what was wrong
    record: RankRecord | None  # None: nothing was wrong


def restore(
    mover: Mover,
    catalog: Catalog,
    wish: Wish,
    agreement: Agreement,
    run: Run,
    start: Start,
    origin: Origin | None = None,
    rollbacks: Rollbacks | None = None,
) -> Restored | None:
    """Restores the newest checkpoint that is good on every rank, or the one of `wish.step`, into `wish.state`.

    The newest that holds every part; if none does, the newest of those that hold some. origin: of another run, comes
    after all of this one's. rollbacks: what may be had at once.
    None if every tier answered and none holds a commit. However it ends, nothing is put into the state any more once it
    has.

    Called in the user's thread, because it calls the state's own code (state_dict, load_state_dict); `run` runs
    coroutines on the event loop, `start` only starts them.
    """
    quick = rollbacks if rollbacks is not None and wish.rename is None and rollbacks.knows(wish.step) else None
    if quick is None:
        run(catalog.refresh_patiently(wish.step))
    origin = origin if origin is not None and wish.step in (None, origin.step) else None
    line = _line(catalog, wish, agreement, run, origin)
    if not line:
        return None
    skipped: dict[int, str] = {}
    partial: list[tuple[Catalog, Attempt]] = []
    todo = deque((held_by, attempt, wish.step is None) for held_by, attempt in line)
    touched = False
    while todo:
        held_by, attempt, whole = todo.popleft()
        tried = _try(mover, held_by, wish, agreement.job, attempt, whole, run, start, quick)
        touched = touched or tried.touched
        error = tried.error
        fatal = error is not None and not isinstance(error, _TRY_OLDER)
        vote = agreement.vote(Vote(error is None, str(error or ""), isinstance(error, _Partial), fatal))
        if error is not None and (fatal or (not todo and wish.step is not None)):
            _add_notes(error, touched, skipped)
            raise error
        if vote.ok:
            done = _finished(tried, skipped if wish.step is not None else _newer(skipped, attempt))
            return done if held_by is catalog else replace(done, bad={})  # another run's is its own to mend
        log.log(logging.INFO if vote.partial else logging.ERROR, "step %d is passed over: %s", attempt.step, vote.why)
        skipped[attempt.step] = vote.why
        if vote.partial:
            partial.append((held_by, attempt))
        if not todo:
            todo.extend((*one, False) for one in partial)
            partial.clear()
    nothing = catalog.nothing_good(skipped)
    _add_notes(nothing, touched, {})
    raise nothing


def _newer(steps: Mapping[int, str], attempt: Attempt) -> dict[int, str]:
    return {step: why for step, why in steps.items() if step > attempt.step}


def _add_notes(error: StepwellError, touched: bool, skipped: Mapping[int, str]) -> None:
    for step, why in list(skipped.items())[:5]:
        error.add_note(f"Step {step} was passed over: {why}")
    if touched:
        error.add_note(_MIXED)


def _line(
    catalog: Catalog, wish: Wish, agreement: Agreement, run: Run, origin: Origin | None
) -> list[tuple[Catalog, Attempt]]:
    """What is tried, in this order, each with the catalog of its run."""
    if origin is None:
        return [(catalog, attempt) for attempt in agreement.candidates(lambda: _candidates(catalog, wish.step))]
    run(origin.refresh())
    if agreement.job.leader:
        run(origin.keep())

    def found() -> list[Attempt]:
        own = _candidates(catalog, wish.step, anew=False)
        if not own:
            origin.require()
        return [*own, origin.attempt]

    *own, origin.attempt = agreement.candidates(found)  # the leader's: ranks may have looked at different moments
    return [*((catalog, attempt) for attempt in own), (origin.catalog, origin.attempt)]


def _candidates(catalog: Catalog, step: int | None, *, anew: bool = True) -> list[Attempt]:
    """anew: a step that is not there is an error."""
    known = anew or any(attempt.step == step for attempt in catalog.holdings)
    found = catalog.newest_first() if step is None else catalog.at_step(step) if known else []
    if not found:
        catalog.require_all_tiers("no checkpoint was found")
        if catalog.debris:
            log.warning("%d unfinished saves were found, and no committed checkpoint", len(catalog.debris))
    elif step is None:
        for tier, why in catalog.absent.items():
            log.warning("newer checkpoints than step %d may be on tier %s: %s", found[0].step, tier, why)
    return found


class _Partial(CheckpointNotFound):
    """The checkpoint does not hold every part that was asked for."""


@dataclass(slots=True)
class _Tried:
    """How far this rank came with one checkpoint."""

    placement: Placement | None = None
    opened: OpenCheckpoint | None = None
    found: Checkpoint | None = None  # all has been read
    error: StepwellError | None = None
    rolled: RolledBack | None = None  # what could be had at once

    @property
    def touched(self) -> bool:
        return self.rolled is not None or (self.placement is not None and bool(self.placement.fills))


def _try(
    mover: Mover, catalog: Catalog, wish: Wish, job: Job, attempt: Attempt, whole: bool, run: Run, start: Start,
    quick: Rollbacks | None = None,
) -> _Tried:  # fmt: skip
    """Reads everything into the state's tensors; only plain values and objects are left for `finish`.

    whole: only if it holds every part. After an error, or Ctrl-C, nothing that is still being read gets there.
    """
    tried = _Tried()
    if quick is not None and (rolled := quick.restore(wish.state, attempt, job, run, start)) is not None:
        tried.rolled = rolled
        if not rolled.left:
            return tried
        wish = replace(wish, state=rolled.left)
    parts = part_names(wish.state)

    async def opening() -> None:
        tried.opened = await open_checkpoint(catalog, attempt, job.rank, job.world, parts)

    async def leaving() -> None:
        if tried.opened is not None and tried.found is None:
            await mover.leave(tried.opened.caller)

    async def closing() -> None:
        if tried.opened is not None:
            await tried.opened.close()

    try:
        if whole and (absent := run(_absent_parts(catalog, attempt, parts))):
            raise _Partial(f"it has no part {', '.join(map(repr, absent))}", step=attempt.step)
        run(opening())
        assert tried.opened is not None
        tried.placement = assign(
            tried.opened.read(), wish.state, strict=wish.strict, rename=wish.rename, allow_pickle=wish.allow_pickle
        )
        gpus = tried.placement.gpus
        marks = Runtime.get().gpus.marks(gpus, run) if gpus else {}
        run(fill(mover, tried.opened, tried.placement.fills, marks))
        tried.found = run(describe(catalog, attempt))
    except StepwellError as error:
        tried.error = error
    finally:
        left = start(leaving())
        start(closing())  # by itself: it waits for tiers that may hang
        left.result()
    return tried


def _finished(tried: _Tried, skipped: dict[int, str]) -> Restored:
    """Nothing can fail any more but the state's own code."""
    rolled = tried.rolled
    if rolled is not None and rolled.checkpoint is not None and not rolled.left:
        return Restored(replace(rolled.checkpoint, skipped=skipped, sources=dict(rolled.sources)), {}, None)
    opened, placement, found = tried.opened, tried.placement, tried.found
    assert opened is not None and placement is not None and found is not None
    placement.finish()
    checkpoint = replace(
        found,
        skipped=skipped,
        sources=dict(Counter(opened.healing.read_bytes) + Counter({} if rolled is None else rolled.sources)),
        healed=tuple(f"{key.name} on {tier}" for tier, key in opened.healing.bad),
        missing=tuple(placement.missing),
        unexpected=tuple(placement.unexpected),
    )
    return Restored(checkpoint, dict(opened.healing.bad), opened.record)


async def _absent_parts(catalog: Catalog, attempt: Attempt, parts: Sequence[str]) -> list[str]:
    """Those of `parts` that the checkpoint has on no tier."""
    have = {part for _, manifest in await catalog.manifests(attempt) for part in manifest.parts}
    return [part for part in parts if part not in have]
