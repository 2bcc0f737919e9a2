"""Where a run begins: from nothing, from its own newest checkpoint, or from a checkpoint of another run.

A fork copies nothing. Until it has a complete checkpoint of its own on its last tier, it is restored from its parent,
read where that lies, and a note in the parent's run keeps that checkpoint from retention. What the fork was told to
begin from is then ignored, so that a script can say the same at every start.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from stepwell import refs
from stepwell.catalog import Catalog
from stepwell.errors import CheckpointNotFound, ConfigError, StepwellError
from stepwell.foreign import chosen_attempt
from stepwell.format.names import RUN_FILE, Attempt, check_run_name
from stepwell.runtime import Runtime
from stepwell.tiers.base import RecordKey, Tier
from stepwell.tiers.file import FileTier

if TYPE_CHECKING:
    from stepwell.store import CheckpointStore

Resume = Literal["allow", "must", "never"]

log = logging.getLogger("stepwell")


class Origin:
    """The checkpoint of another run that a run begins from. Lives on the event loop."""

    def __init__(self, parent: Parent, catalog: Catalog, attempt: Attempt) -> None:
        self._parent, self.catalog, self.attempt = parent, catalog, attempt
        self._kept = False
        self._letting_go: asyncio.Task[None] | None = None

    @property
    def step(self) -> int:
        return self.attempt.step

    @property
    def name(self) -> str:
        """RUN@FOLDER; the run's path if it lies on other tiers."""
        return f"{self._parent.shown}@{self.attempt.folder}"

    async def refresh(self) -> None:
        await self.catalog.refresh()

    def require(self) -> None:
        """Raises CheckpointNotFound if it is not there any more, TierUnavailable if that cannot be told."""
        if self.attempt not in self.catalog.holdings:
            self.catalog.require_all_tiers(f"{self.name}, where this run begins, is on no tier that answers")
            raise self._parent.missing("it was deleted, or its files are gone")

    async def keep(self) -> None:
        """Keeps it from its own run's retention. Once; where nobody may write, it warns instead."""
        if self._kept:
            return
        self._kept = True
        notes, holder = self.catalog.notes, self._parent.holder
        try:
            if holder in notes.holders(self.attempt) or not await self._has_writer():
                return
            await notes.add(self.attempt, keep=True, holder=holder)
        except StepwellError as error:
            log.warning(
                "%s cannot be kept, and its own run may delete it before this run has a complete checkpoint of its "
                "own: %s. Whoever may write there keeps it with: stepwell keep '%s@%d'",
                self.name, error, self._parent.shown, self.step,
            )  # fmt: skip

    async def _has_writer(self) -> bool:
        """Whether anybody may delete it: a run that was only copied has no retention."""
        last = self.catalog.tiers[-1]
        if self.catalog.epochs.get(last.info.name):
            return True
        if await last.fetch(RecordKey(self.catalog.run, RUN_FILE)) is None:
            return False
        raise ConfigError("this folder is one tier of the run, and notes are read on its last one")

    def follow(self, catalog: Catalog) -> None:
        """From now on: once `catalog` has a complete checkpoint on its last tier, this one is kept no longer."""

        def look() -> None:
            last = catalog.tiers[-1]
            known = (catalog.known_manifest(attempt, last) for attempt in catalog.newest_first())
            if self._letting_go is None and any(manifest is not None and manifest.complete for manifest in known):
                self._letting_go = asyncio.ensure_future(self.let_go())

        catalog.on_commit = look
        look()

    async def let_go(self) -> None:
        """Takes back what `keep` of this process or of an earlier one has said. Never raises StepwellError."""
        holder, notes = self._parent.holder, self.catalog.notes
        try:
            await self.catalog.refresh()
            for attempt in [a for a in self.catalog.holdings if holder in notes.holders(a)]:
                await notes.add(attempt, keep=False, holder=holder)
        except StepwellError as error:  # the next open of the fork tries again
            log.warning("%s is still kept for this fork: %s", self.name, error)

    async def close(self) -> None:
        if self._letting_go is not None:
            await asyncio.wait([self._letting_go])
        if self._parent.own_tier is not None:
            await self._parent.own_tier.close()


@dataclass(frozen=True, slots=True)
class Parent:
    """What `fork_from` names, before anybody has looked for the checkpoint."""

    ref: str
    run: str
    select: str
    folder: str | None  # of the checkpoint, if the reference is its path
    tiers: Sequence[Tier]
    own_tier: Tier | None  # to start and to close, where the fork's own tiers do not hold the parent
    shown: str
    holder: str  # of the note that keeps it
    fork: str

    async def find(self) -> Origin:
        """Raises CheckpointNotFound, TierUnavailable."""
        try:
            if self.own_tier is not None:
                await self.own_tier.start()
            return await self._find()
        except BaseException:
            if self.own_tier is not None:
                await self.own_tier.close()
            raise

    async def _find(self) -> Origin:
        catalog = Catalog(self.run, self.tiers)
        attempt = Attempt.parse(self.folder) if self.folder is not None else None
        if attempt is not None:
            await catalog.refresh()
        else:
            try:
                attempt = await chosen_attempt(catalog, self.select, self.shown)
            except CheckpointNotFound as error:
                raise self.missing(error.what, error.todo) from error
        origin = Origin(self, catalog, attempt)
        origin.require()
        return origin

    def missing(self, what: str, todo: str = "") -> CheckpointNotFound:
        return _missing(self.ref, self.fork, what, todo)


def _missing(ref: str, fork: str, what: str, todo: str = "") -> CheckpointNotFound:
    remedy = "Bring it back, fork from another checkpoint, or leave out fork_from to begin anew"
    return CheckpointNotFound(
        f"fork_from={ref!r} is not there, and this run has no complete checkpoint of its own yet: {what}",
        todo=f"{todo}. {remedy}" if todo else remedy, run=fork,
    )  # fmt: skip


def begin(store: CheckpointStore, resume: Resume, fork_from: str | os.PathLike[str] | None) -> None:
    """Looks once at what the run has, and lets it begin as was asked. Called in the user's thread.

    Raises CheckpointNotFound for resume="must" without a checkpoint, and for a parent that is not there; ConfigError
    for resume="never" with one, and for a `fork_from` that names no checkpoint of another run; TierUnavailable if a
    tier that does not answer could change that.
    """
    if resume == "allow" and fork_from is None:
        return
    runtime = Runtime.get()
    runtime.run(store.catalog.refresh())
    _check_resume(store.catalog, resume, fork_from is not None)
    if fork_from is None:
        return
    if not runtime.run(_is_complete(store.catalog)):
        store.catalog.require_all_tiers("whether this fork still needs its parent cannot be told")
        store.begin_from(runtime.run(_parent(os.fspath(fork_from), store).find()))
        return
    try:  # what an earlier process could not take back
        origin = runtime.run(_parent(os.fspath(fork_from), store).find())
    except ConfigError:
        raise
    except StepwellError as error:
        log.debug("fork_from=%r is not looked at any more: %s", fork_from, error)
        return
    runtime.run(origin.let_go())
    runtime.run(origin.close())


def _check_resume(catalog: Catalog, resume: Resume, forked: bool) -> None:
    """A fork is no beginning from nothing: resume="must" is content with its parent."""
    place = os.path.join(catalog.tiers[-1].info.detail.get("path", ""), catalog.run)
    if resume == "must" and not forked and not catalog.newest_first():
        catalog.require_all_tiers("resume='must', and no checkpoint was found")
        raise CheckpointNotFound(
            "resume='must', and the run has no checkpoint",
            todo="Check the run's name and its tiers, or open it with resume='allow' to begin anew",
            run=catalog.run, path=place,
        )  # fmt: skip
    if resume == "never" and catalog.holdings:
        newest = max(attempt.step for attempt in catalog.newest_first() or catalog.holdings)
        raise ConfigError(
            f"resume='never', and the run has checkpoints already, up to step {newest}",
            todo="Give the new training a run of its own, or open this one with resume='allow' to go on with it",
            run=catalog.run, path=place,
        )  # fmt: skip
    if resume == "never":
        catalog.require_all_tiers("resume='never', and whether the run has a checkpoint cannot be told")


async def _is_complete(catalog: Catalog) -> bool:
    """Whether the run has a complete checkpoint on its last tier."""
    last = catalog.tiers[-1]
    for attempt in catalog.newest_first():
        if any(holding.tier is last for holding in catalog.holdings.get(attempt, [])):
            try:
                if (await catalog.manifest(attempt, last)).complete:
                    return True
            except StepwellError:  # it is none, then
                continue
    return False


def _parent(ref: str, store: CheckpointStore) -> Parent:
    """Looks at the path; a name that is none is a run on the store's own tiers."""
    folder = None
    try:
        place = refs.find(ref)
    except CheckpointNotFound as error:
        run, _, select = ref.rpartition("@") if "@" in ref else (ref, "", "latest")
        if os.sep in run or run.startswith((".", "~")):
            raise _missing(ref, store.run, error.what) from error
        return _on_own_tiers(ref, check_run_name(run), select, None, store)
    at = place.folder
    if place.kind == "step" and Attempt.parse(at.name) and at.parent.name:
        folder, at = at.name, at.parent
    elif place.kind != "run":
        raise ConfigError(
            f"fork_from={ref!r} is no checkpoint of a run",
            todo="Name one such as 'ckpts/sft@1500'; weights alone are loaded with stepwell.load()", run=store.run,
        )  # fmt: skip
    root = os.path.realpath(at.parent)
    if any(os.path.realpath(tier.info.detail["path"]) == root for tier in store.tiers if "path" in tier.info.detail):
        return _on_own_tiers(ref, at.name, place.select, folder, store)
    own = FileTier(at.parent, name="parent")
    home = os.path.join(store.tiers[-1].info.detail.get("path", ""), store.run)
    return Parent(ref, at.name, place.select, folder, [own], own, str(at), f"fork:{home}", store.run)


def _on_own_tiers(ref: str, run: str, select: str, folder: str | None, store: CheckpointStore) -> Parent:
    if run == store.run:
        raise ConfigError(
            f"fork_from={ref!r} is this run itself",
            todo="Give the fork another run name; store.restore(state, step=…) goes back within a run", run=run,
        )  # fmt: skip
    return Parent(ref, run, select, folder, store.tiers, None, run, f"fork:{store.run}", store.run)
