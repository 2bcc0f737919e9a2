"""Restore: choose the newest good checkpoint, match it with the state, read, apply."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from stepwell.agreement import Agreement, Vote
from stepwell.catalog import Catalog
from stepwell.checkpoint import Checkpoint
from stepwell.describing import describe
from stepwell.errors import CheckpointNotFound, CorruptData, StepwellError, TierError
from stepwell.format.names import Attempt
from stepwell.format.records import RankRecord
from stepwell.jobs import Job
from stepwell.mover import Mover
from stepwell.reader import OpenCheckpoint, fill, open_checkpoint
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


Start = Callable[[Coroutine[Any, Any, None]], object]


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
    record: RankRecord


def restore(
    mover: Mover, catalog: Catalog, wish: Wish, agreement: Agreement, run: Run, start: Start
) -> Restored | None:
    """Restores the newest checkpoint that is good on every rank, or the one of `wish.step`, into `wish.state`.

    None if every tier answered and none holds a commit. Called in the user's thread, because it calls the
    state's own code (state_dict, load_state_dict); `run` runs coroutines on the event loop, `start` only
    starts them.
    """
    run(catalog.refresh())
    candidates = agreement.candidates(lambda: _candidates(catalog, wish.step))
    if not candidates:
        return None
    skipped: dict[int, str] = {}
    touched = False
    for attempt in candidates:
        last = attempt == candidates[-1]
        tried = _try(mover, catalog, wish, agreement.job, attempt, last, run, start)
        touched = touched or tried.touched
        error = tried.error
        fatal = error is not None and not isinstance(error, _TRY_OLDER)
        vote = agreement.vote(Vote(error is None, str(error or ""), fatal))
        if error is not None and (fatal or (last and wish.step is not None)):
            if touched:
                error.add_note(_MIXED)
            raise error
        if vote.ok:
            return _finished(catalog, attempt, tried, skipped, run)
        log.error("step %d cannot be restored: %s", attempt.step, vote.why)
        skipped[attempt.step] = vote.why
    nothing = catalog.nothing_good(skipped)
    if touched:
        nothing.add_note(_MIXED)
    raise nothing


def _candidates(catalog: Catalog, step: int | None) -> list[Attempt]:
    found = catalog.newest_first() if step is None else catalog.at_step(step)
    if not found:
        catalog.require_all_tiers("no checkpoint was found")
        if catalog.debris:
            log.warning("%d unfinished saves were found, and no committed checkpoint", len(catalog.debris))
    return found


@dataclass(slots=True)
class _Tried:
    """How far this rank came with one checkpoint."""

    placement: Placement | None = None
    opened: OpenCheckpoint | None = None
    error: StepwellError | None = None

    @property
    def touched(self) -> bool:
        return self.placement is not None and bool(self.placement.fills)


def _try(
    mover: Mover, catalog: Catalog, wish: Wish, job: Job, attempt: Attempt, last: bool, run: Run, start: Start
) -> _Tried:
    """Reads everything into the state's tensors; only plain values and objects are left for `finish`."""
    tried = _Tried()
    parts = part_names(wish.state)
    try:
        absent = run(_absent_parts(catalog, attempt, parts))
        if absent and not last and wish.step is None:
            raise CheckpointNotFound(f"it has no part {', '.join(map(repr, absent))}", step=attempt.step)
        tried.opened = run(open_checkpoint(mover, catalog, attempt, job.rank, job.world, parts))
        try:
            tried.placement = assign(
                tried.opened.read(), wish.state, strict=wish.strict, rename=wish.rename, allow_pickle=wish.allow_pickle
            )
            run(fill(mover, tried.opened, tried.placement.fills))
        finally:
            start(tried.opened.close(mover))
    except StepwellError as error:
        tried.error = error
    return tried


def _finished(catalog: Catalog, attempt: Attempt, tried: _Tried, skipped: dict[int, str], run: Run) -> Restored:
    opened, placement = tried.opened, tried.placement
    assert opened is not None and placement is not None
    placement.finish()
    checkpoint = replace(
        run(describe(catalog, attempt)),
        skipped=skipped,
        sources=dict(opened.healing.read_bytes),
        healed=tuple(f"{key.name} on {tier}" for tier, key in opened.healing.bad),
        missing=tuple(placement.missing),
        unexpected=tuple(placement.unexpected),
    )
    return Restored(checkpoint, dict(opened.healing.bad), opened.record)


async def _absent_parts(catalog: Catalog, attempt: Attempt, parts: Sequence[str]) -> list[str]:
    """Those of `parts` that the checkpoint has on no tier."""
    have: set[str] = set()
    for holding in catalog.holdings.get(attempt, []):
        try:
            have |= set((await catalog.manifest(attempt, holding.tier)).parts)
        except StepwellError:
            continue
    return [part for part in parts if part not in have]
