"""What an earlier process left in shared memory, and nowhere else: it gets down to the first storage tier.

Its chunks are the only ones, so eviction leaves them alone until that is done. A job of several ranks brings down
what every rank still has; what only some of them have can never be whole again, and its memory is given back.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from stepwell.chain import Chain
from stepwell.errors import WaitTimeout
from stepwell.flushing import Flusher
from stepwell.format.names import Attempt
from stepwell.jobs import wait_for
from stepwell.ownership import Ownership, group_of
from stepwell.tiers.base import CheckpointKey, ShardKey

#: of the newest checkpoints so many are looked at; memory holds fewer
LOOK_MAX = 64

log = logging.getLogger("stepwell")


class _Left(msgspec.Struct):
    """What one rank found."""

    whole: list[str]  # checkpoints of which it has its part, in memory or on a storage tier
    lacking: list[str]  # those of them that are in its memory alone


async def rescue(chain: Chain, owner: Ownership, flusher: Flusher) -> list[Attempt]:
    """Asks for the flushes to the first storage tier, whose queue `flusher` is; returns what they are of. The run was
    just taken over, and nothing has been saved in its new epoch but by this process."""
    host, catalog = chain.host, chain.catalog
    if host is None or host.info.survives == "nothing":
        return []
    old = [attempt for attempt in catalog.newest_first() if attempt.epoch < owner.writership.epoch]
    line = old[:LOOK_MAX]
    here = [
        a
        for a in catalog.holdings
        if a.epoch < owner.writership.epoch and any(h.tier is host for h in catalog.holdings[a])
    ]
    down = {attempt for attempt in {*here, *line} if await _is_down(chain, attempt)}
    for attempt in here:
        if attempt in down:
            _clean(chain, attempt)
    lacking = [attempt for attempt in here if attempt in line and attempt not in down]
    agreed = await _agreed(chain, owner, [a for a in line if a in down or a in here], lacking)
    if agreed is None:
        return []
    for attempt in sorted(here):
        if len(catalog.holdings.get(attempt, [])) == 1 and attempt not in agreed:
            log.warning(
                "step %d was in memory only, and %s: its memory is free again", attempt.step,
                "not every rank still has its part of it" if attempt in line else "a rewind has left it behind",
            )  # fmt: skip
            catalog.remove(attempt, host)
            await host.drop([CheckpointKey(chain.run, attempt.folder)])
    for attempt in agreed:
        log.warning("step %d is in memory only: an earlier process did not get it to %s", attempt.step,
                    chain.first.info.name)  # fmt: skip
        flusher.want(attempt)
    return agreed


async def _is_down(chain: Chain, attempt: Attempt) -> bool:
    """Whether any tier but memory has all of it: then retention may have let it go from the others."""
    manifests = await chain.catalog.manifests(attempt)
    return any(tier in chain.storage and not manifest.absent for tier, manifest in manifests)


def _clean(chain: Chain, attempt: Attempt) -> None:
    """Another tier has it: its chunks in memory may go."""
    assert chain.host is not None
    for holding in chain.catalog.holdings.get(attempt, []):
        if holding.tier is not chain.host:
            for file in holding.files:
                chain.host.arena.clean(ShardKey(CheckpointKey(chain.run, attempt.folder), file))


async def _agreed(chain: Chain, owner: Ownership, whole: list[Attempt], lacking: list[Attempt]) -> list[Attempt] | None:
    """What every rank has and at least one has in memory alone, oldest first; the same on all ranks. None if not all
    of them have answered."""
    job = owner.job
    mine = _Left([attempt.folder for attempt in whole], [attempt.folder for attempt in lacking])
    told = [mine]
    if job.world > 1:
        prefix, patience_s = f"{group_of(chain, job)}/rescue", chain.settings.rank_timeout_seconds
        job.store.put(f"{prefix}/{job.rank}", msgspec.json.encode(mine))
        asked = (wait_for(job.store, f"{prefix}/{rank}", patience_s, f"rank {rank}") for rank in range(job.world))
        try:
            told = [msgspec.json.decode(data, type=_Left) for data in await asyncio.gather(*asked)]
        except WaitTimeout as error:
            log.warning("what is in memory only stays there: %s", error)
            return None
    everywhere = set.intersection(*(set(left.whole) for left in told))
    somewhere = {folder for left in told for folder in left.lacking}
    found = (Attempt.parse(folder) for folder in everywhere & somewhere)
    return sorted(attempt for attempt in found if attempt is not None)
