"""Notes put on a checkpoint: by a store, and by the commands `keep`, `tag` and `annotate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stepwell.catalog import Catalog
from stepwell.checkpoint import Checkpoint
from stepwell.describing import describe
from stepwell.errors import CheckpointGone, CheckpointNotFound, ConfigError
from stepwell.format.names import RUN_FILE, Attempt
from stepwell.places import Opened, Ref, look_up, opened, run_whole
from stepwell.tiers.base import RecordKey


def check_tags(tags: str | Sequence[str], remove: str | Sequence[str] = ()) -> dict[str, bool]:
    """Tags as a note has them: those to set, and those to take away. Raises ConfigError."""
    asked: dict[str, bool] = {}
    for names, there in ((tags, True), (remove, False)):
        for name in [names] if isinstance(names, str) else names:
            if not isinstance(name, str) or not name:
                raise ConfigError(f"{name!r} cannot be a tag", todo="Give a word, such as 'release'")
            if asked.setdefault(name, there) is not there:
                raise ConfigError(f"the tag {name!r} is to be set and taken away at once", todo="Say one of them")
    return asked


async def mark(
    catalog: Catalog,
    attempt: Attempt,
    *,
    metrics: Mapping[str, float | str | None] | None = None,
    tags: Mapping[str, bool] | None = None,
    keep: bool | None = None,
) -> Checkpoint:
    """Notes something of a checkpoint that the last scan saw, durably; returns the checkpoint as it is then.

    Raises TierError if this user may not write notes; ConfigError if this is not the run's last tier; CheckpointGone
    if it was deleted before the keep was there.
    """
    await _require_last_tier(catalog)
    await catalog.notes.add(attempt, metrics=metrics, tags=tags, keep=keep)
    if keep:
        await catalog.refresh()
        if attempt not in catalog.holdings:
            raise CheckpointGone(
                "it was deleted before it could be kept", todo="Keep another one", run=catalog.run, step=attempt.step
            )
    return await describe(catalog, attempt)


async def _require_last_tier(catalog: Catalog) -> None:
    """Notes on another tier would be seen by nobody who opens all of them."""
    tier = catalog.notes.tier
    if tier is None or tier.info.name in catalog.absent or catalog.epochs.get(tier.info.name):
        return
    if await tier.fetch(RecordKey(catalog.run, RUN_FILE)) is not None:
        raise ConfigError(
            "this folder is one tier of a run, and notes lie on the run's last tier",
            todo=f"Name the last tier's folder, or open the config file with run={catalog.run!r}",
            path=tier.info.detail.get("path"),
        )


def mark_all(
    ref: Ref,
    *,
    metrics: Mapping[str, float | str | None] | None = None,
    tags: Mapping[str, bool] | None = None,
    keep: bool | None = None,
) -> list[Checkpoint]:
    """As `mark`, of the checkpoint or the range that a reference means; of a run without `@`, of the newest.

    Raises CheckpointNotFound, ConfigError for what is no checkpoint of a run, and what `mark` raises.
    """
    named = look_up(ref)

    async def marked() -> list[Checkpoint]:
        async with opened(named) as run:
            return [await mark(run.catalog, each, metrics=metrics, tags=tags, keep=keep) for each in _chosen(run)]

    if named.place.kind == "plain":
        raise ConfigError("these files are no checkpoint of a run", todo="Name a run", path=str(named.place.folder))
    return run_whole(marked())


def _chosen(run: Opened) -> list[Attempt]:
    place = run.named.place
    if not run.run:
        raise ConfigError(
            "this copy of a checkpoint belongs to no run", todo="Name it in its run", path=str(place.folder)
        )
    chosen = run.chosen
    if place.kind == "run" and not place.selected:
        chosen = run.catalog.newest_first()[:1]
    if not chosen:
        raise CheckpointNotFound("no checkpoint matches", todo="See stepwell ls", path=str(place.folder))
    return chosen
