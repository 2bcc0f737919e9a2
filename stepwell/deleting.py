"""Delete: chosen checkpoints, their manifests first, after checks that no slip of the hand gets past.

A writer that runs does not mind when older checkpoints go. The newest one, the newest one that is whole, and what
is left of saves that were never committed, may be in its hands: before these go, the run is taken over, which a live
writer refuses. The files go at once, on a shared tier too: who deletes by hand wants the room, and waits for no reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepwell.catalog import Catalog, Holding
from stepwell.changing import has_writers, require_writable, taken_over
from stepwell.describing import describe
from stepwell.errors import CheckpointNotFound, ConfigError, StepwellError
from stepwell.format.names import Attempt
from stepwell.places import Named, Opened, Ref, look_up, opened, run_whole, started
from stepwell.retaining import beyond_rules
from stepwell.tiers.base import CheckpointKey
from stepwell.timeline import abandoned


@dataclass(frozen=True, slots=True)
class Doomed:
    """One checkpoint's copy on one tier, to be deleted."""

    step: int
    name: str  # of its folder
    tier: str
    path: Path
    size_bytes: int
    newest: str  # "newest" or "newest whole", if it is that of its run's checkpoints; else ""
    committed: bool  # False: what is left of a save
    why: str = ""  # what the retention rules say; "" if they were not asked


#: of what the references mean: all; what a rewind left behind; what the retention rules of the config let go
Which = Literal["all", "abandoned", "by-policy"]


def plan_deletion(refs: Sequence[Ref], which: Which = "all") -> list[Doomed]:
    """What `delete` with the same references would delete; deletes nothing.

    Raises ConfigError for a whole run with `which` = "all", for a folder that stepwell did not make, and if no
    config has retention rules for "by-policy"; CheckpointNotFound.
    """
    return [doomed for plan in _plans(_look_up(refs, which), which) for doomed in plan]


def delete(
    refs: Sequence[Ref],
    *,
    force: bool = False,
    which: Which = "all",
    before: Callable[[Sequence[Doomed]], None] = lambda _: None,
    on_deleted: Callable[[Doomed], None] = lambda _: None,
) -> None:
    """Deletes checkpoints: a step, a range, a tag, a step folder; on every tier that has them.

    force: also the newest checkpoint of a run, and the newest that is whole. which: of all that the references mean;
    if not all of it, they may be whole runs. All references are checked before anything is deleted.

    Raises what `plan_deletion` raises; ConfigError for the newest one without `force`, or if only another tier can
    tell whether a writer holds the run; RunBusy if one does, and the newest checkpoint, a save that is not committed,
    or what the rules let go would be deleted; TierError if a tier cannot delete.

    before: is told of all that will be deleted, and may raise to stop it. Nothing else is deleted then, whatever the
    references mean by the time that it returns.
    """
    everything = _look_up(refs, which)
    plans = _plans(everything, which)
    for plan in plans:
        check_newest(plan, force)
    before([doomed for plan in plans for doomed in plan])
    for named, plan in zip(everything, plans, strict=True):
        if plan:
            run_whole(_delete(named, plan, on_deleted))


def check_newest(plan: Sequence[Doomed], force: bool) -> None:
    """Raises ConfigError if a run's newest checkpoint, or its newest whole one, would go without `force`."""
    for doomed in plan:
        if doomed.newest and not force:
            raise ConfigError(
                f"step {doomed.step} is the {doomed.newest} checkpoint of its run; nothing was deleted",
                todo="Leave it out, or say --force (force=True)",
                path=str(doomed.path),
            )


def _look_up(refs: Sequence[Ref], which: Which) -> list[Named]:
    found = [look_up(ref) for ref in refs]
    for named in found:
        folder = str(named.place.folder)
        if named.place.kind == "plain":
            raise ConfigError(
                "stepwell did not make this folder and does not delete it; nothing was deleted",
                todo=f"If you are sure: rm -r '{folder}'",
                path=folder,
            )
        if named.place.kind == "step" and Attempt.parse(named.place.folder.name) is None:
            raise ConfigError(
                "this checkpoint was copied or renamed by others than stepwell; nothing was deleted",
                todo=f"If you are sure: rm -r '{folder}'",
                path=folder,
            )
        if named.place.kind == "run" and not named.place.selected and which == "all":
            raise ConfigError(
                "this is a whole run; nothing was deleted",
                todo=f"Name its checkpoints, such as '{named.text}@1200' or '{named.text}@..5000'",
                path=folder,
            )
    return found


def _plans(everything: Sequence[Named], which: Which) -> list[list[Doomed]]:
    """A plan for each reference; what several mean is in the first one's."""
    seen: set[tuple[Path, str]] = set()
    plans: list[list[Doomed]] = []
    for named in everything:
        plan = [doomed for doomed in run_whole(_plan(named, which)) if (doomed.path, doomed.tier) not in seen]
        seen |= {(doomed.path, doomed.tier) for doomed in plan}
        plans.append(plan)
    return plans


async def _plan(named: Named, which: Which) -> list[Doomed]:
    place = named.place
    try:
        async with opened(named) as run:
            newest = await _newest(run.catalog) if run.run else {}
            copies = [(attempt, holding) for attempt in run.chosen for holding in run.catalog.holdings[attempt]]
            why: dict[tuple[Attempt, str], str] = {}
            if which == "by-policy":
                beyond = await beyond_rules(run.catalog, named.config)
                why = {(each.attempt, each.tier.info.name): each.why for each in beyond if each.why_not is None}
                copies = [(attempt, holding) for attempt, holding in copies if (attempt, holding.tier.info.name) in why]
            elif which == "abandoned":
                copies = [(attempt, holding) for attempt, holding in copies if abandoned(attempt, run.catalog.rewinds)]
            return [
                _doomed(run, attempt, holding, newest.get(attempt, ""), why.get((attempt, holding.tier.info.name), ""))
                for attempt, holding in copies
            ]
    except CheckpointNotFound:
        attempt = Attempt.parse(place.folder.name)
        if place.kind != "step" or attempt is None or which != "all":
            raise
        size = sum(file.stat().st_size for file in place.folder.iterdir() if file.is_file())
        return [Doomed(attempt.step, place.folder.name, "disk", place.folder, size, "", False)]


async def _newest(catalog: Catalog) -> dict[Attempt, str]:
    """The newest checkpoint, and, where that one is partial or cannot be read, the newest that is whole."""
    line = catalog.newest_first()
    found = dict.fromkeys(line[:1], "newest")
    for attempt in line:
        try:
            if (await describe(catalog, attempt)).complete_on:
                found.setdefault(attempt, "newest whole")
                break
        except StepwellError:  # it is no checkpoint to go on from
            continue
    return found


def _doomed(run: Opened, attempt: Attempt, holding: Holding, newest: str, why: str) -> Doomed:
    info, size = holding.tier.info, sum(holding.files.values())
    root = Path(info.detail.get("path", "?"))
    # of the newest another copy stays, or the rules would not let this one go
    newest = "" if why else newest
    return Doomed(attempt.step, attempt.folder, info.name, root / run.run / attempt.folder, size, newest, True, why)


async def _delete(named: Named, plan: Sequence[Doomed], on_deleted: Callable[[Doomed], None]) -> None:
    async with AsyncExitStack() as stack:
        run, tiers, _ = await stack.enter_async_context(started(named, read_only=False))
        for tier in tiers:
            if any(doomed.tier == tier.info.name for doomed in plan):
                require_writable(tier)
        if any(doomed.newest or doomed.why or not doomed.committed for doomed in plan) and has_writers(run, tiers):
            await stack.enter_async_context(taken_over(Catalog(run, tiers), tiers[-1]))
        for doomed in plan:
            tier = next(tier for tier in tiers if tier.info.name == doomed.tier)
            await tier.drop([CheckpointKey(run, doomed.name)])
            on_deleted(doomed)
