"""Before a run is changed by hand: may it be changed, and does nobody else write it meanwhile?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from stepwell.catalog import Catalog
from stepwell.clock import SystemClock
from stepwell.epochs import Writership
from stepwell.errors import ConfigError, TierError
from stepwell.format.names import EPOCHS, RUN_FILE
from stepwell.jobs import Job, LocalStore
from stepwell.places import is_run
from stepwell.tiers.base import Tier


def require_writable(tier: Tier) -> None:
    """Raises TierError, before anything is changed, where nothing can be."""
    if tier.info.read_only:
        why = tier.info.detail.get("access", "it was opened for reading").partition(";")[0]
        raise TierError(
            f"Tier {tier.info.name} cannot be changed: {why}",
            todo="Allow writing in this folder, also for a change inside of a run in it",
            path=tier.info.detail.get("path"),
        )


def has_writers(run: str, tiers: Sequence[Tier]) -> bool:
    """Whether a writer holds the run, or has held it: it must be taken over before anything of it is touched.

    Raises ConfigError if that can only be seen on another tier than these: who writes is noted on the last one.
    """
    folders = [Path(tier.info.detail["path"], run) for tier in tiers if "path" in tier.info.detail]
    if not any(is_run(folder) for folder in folders):
        return False
    if not any((folder / EPOCHS).is_dir() for folder in folders):
        raise ConfigError(
            "this folder is one tier of a run; who writes the run is noted on its last tier, not here",
            todo=f"Name the last tier's folder, or set STEPWELL_CONFIG and name the run alone: {run!r}. If nobody "
            f"writes it any more, delete {RUN_FILE} here first",
            path=str(folders[-1]),
        )
    return True


@asynccontextmanager
async def taken_over(catalog: Catalog, tier: Tier) -> AsyncIterator[int]:
    """Holds a run: nobody else writes it meanwhile. Gives the epoch. Raises RunBusy if somebody does."""
    writership = Writership(catalog.run, tier, Job(0, 1, LocalStore(), None, 0), SystemClock())
    epoch = await writership.acquire()
    try:
        await catalog.refresh()
        catalog.require_all_tiers("the run cannot be taken over")  # what is not on the list counts no more
        await writership.publish_seen([attempt.folder for attempt in catalog.holdings], alone=len(catalog.tiers) == 1)
        writership.start_beating()
        yield epoch
    finally:
        await writership.close()
