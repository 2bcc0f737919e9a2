"""Checkpoints as users see them, from the catalog. Needs no torch: the command line lists with it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from stepwell.catalog import Catalog
from stepwell.checkpoint import Checkpoint, from_manifest
from stepwell.errors import CheckpointNotFound, StepwellError
from stepwell.format.names import Attempt
from stepwell.timeline import abandoned

log = logging.getLogger("stepwell")

#: a file system that is far away answers each only after a while
MANIFESTS_AT_ONCE = 32


async def describe(catalog: Catalog, attempt: Attempt) -> Checkpoint:
    """One checkpoint. Raises the last tier's error if no tier has a good manifest of it."""
    manifest = await catalog.manifest(attempt)
    tiers, complete_on = [], []
    for holding in list(catalog.holdings.get(attempt, [])):
        name = holding.tier.info.name
        try:
            complete = (await catalog.manifest(attempt, holding.tier)).complete
        except StepwellError as error:  # without a good manifest it is no commit; verify says what is wrong
            log.warning("%s", error)
            continue
        tiers.append(name)
        if complete:
            complete_on.append(name)
    found = from_manifest(catalog.run, manifest, tiers, complete_on, abandoned(attempt, catalog.rewinds))
    notes = catalog.notes
    return replace(
        found,
        name=attempt.folder,
        metrics=notes.metrics(attempt, found.metrics),
        tags=notes.tags(attempt, found.tags),
        kept=notes.kept(attempt),
    )


async def read_manifests(catalog: Catalog, attempts: Sequence[Attempt]) -> None:
    """Reads them into the catalog, many at once. Of what cannot be read it is told when it is asked for."""
    copies = [(attempt, held.tier) for attempt in attempts for held in catalog.holdings.get(attempt, [])]
    for begin in range(0, len(copies), MANIFESTS_AT_ONCE):
        some = copies[begin : begin + MANIFESTS_AT_ONCE]
        await asyncio.gather(*(catalog.manifest(*copy) for copy in some), return_exceptions=True)


async def describe_all(catalog: Catalog, attempts: Iterable[Attempt]) -> list[Checkpoint]:
    """Those of the checkpoints that are there: one that was deleted since the scan is left out, and one whose
    manifest cannot be read is left out with a warning."""
    found = []
    attempts = list(attempts)
    await read_manifests(catalog, attempts)
    for attempt in attempts:
        try:
            found.append(await describe(catalog, attempt))
        except CheckpointNotFound:
            continue
        except StepwellError as error:
            log.warning("%s", error)
    return found
