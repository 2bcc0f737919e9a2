"""Watch: checkpoints of a run as they become committed on a tier, whoever writes them, found by looking again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from stepwell.catalog import Catalog
from stepwell.checkpoint import Checkpoint
from stepwell.describing import describe
from stepwell.errors import CheckpointNotFound, StepwellError, TierUnavailable
from stepwell.format.names import Attempt
from stepwell.tiers.base import Tier
from stepwell.timeline import abandoned

log = logging.getLogger("stepwell")

#: between two looks at whether the store was closed meanwhile
_ENDED_LOOK_S = 0.2


async def watch(
    catalog: Catalog,
    tier: Tier,
    *,
    after: int | None,
    poll_s: float,
    timeout_s: float | None,
    ended: Callable[[], bool] = lambda: False,
) -> AsyncIterator[Checkpoint]:
    """Each checkpoint that is on `tier`, or gets there later, once; those that are seen together in the order in which
    they were saved. One that is deleted before its turn is left out, and so are those that a rewind left behind.

    after: leaves out steps up to this one, unless they are saved anew while this runs. Ends after `timeout_s` without
    news, and once `ended` says so. Raises TierUnavailable if the tier does not answer when the time is over.
    """
    loop = asyncio.get_running_loop()
    news = _News(catalog, tier, after)
    news_at, look_at = loop.time(), loop.time()
    while not ended():
        if loop.time() >= look_at:
            look_at = loop.time() + poll_s
            await news.look()
        found = await news.next()
        if found is not None:
            yield found
            news_at = loop.time()
            continue
        if timeout_s is not None and loop.time() >= news_at + timeout_s:
            why = catalog.absent.get(tier.info.name)
            if why is not None:
                raise TierUnavailable(f"nothing can be seen on tier {tier.info.name}: {why}", run=catalog.run)
            return
        left_s = look_at - loop.time()
        if timeout_s is not None:
            left_s = min(left_s, news_at + timeout_s - loop.time())
        await asyncio.sleep(max(0.0, min(left_s, _ENDED_LOOK_S)))


class _News:
    """What has been seen of a run, and what is new."""

    def __init__(self, catalog: Catalog, tier: Tier, after: int | None) -> None:
        self._catalog, self._tier, self._after = catalog, tier, after
        self._seen: set[Attempt] = set()
        self._new: list[Attempt] = []
        self._begun: Attempt | None = None  # the newest of all that were there when the watch began
        self._looked = False  # whether the tier has answered once

    async def look(self) -> None:
        catalog = self._catalog
        await catalog.refresh()
        if self._tier.info.name in catalog.absent:
            return
        if not self._looked:
            self._looked, self._begun = True, max(catalog.holdings, default=None)
        self._new = sorted(
            attempt
            for attempt, held in catalog.holdings.items()
            if attempt not in self._seen
            and any(holding.tier is self._tier for holding in held)
            and self._wanted(attempt)
            and not abandoned(attempt, catalog.rewinds)
        )

    def _wanted(self, attempt: Attempt) -> bool:
        if self._after is None or attempt.step > self._after:
            return True
        return self._begun is not None and attempt > self._begun  # saved again, after a rewind

    async def next(self) -> Checkpoint | None:
        """The next that is new, as of the last look."""
        while self._new:
            attempt = self._new.pop(0)
            try:
                found = await describe(self._catalog, attempt)
            except CheckpointNotFound:
                pass  # deleted, or just being made whole: then a later look finds it again
            except StepwellError as error:  # the next look finds it again
                log.warning("%s", error)
            else:
                self._seen.add(attempt)
                return found
        return None
