"""Whether what an earlier process left in shared memory still is of this run.

Names come again: a run that was deleted and begun anew has the same folder, and its checkpoints may have the same
names. So the run's own record, which is on a storage tier before anything can be saved, is kept in memory, too, and
what belongs to another one is given back. A single checkpoint that other tiers had once, and have no more, was deleted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from stepwell.errors import StepwellError
from stepwell.format.names import RUN_FILE, Attempt
from stepwell.format.records import RunRecord, decode
from stepwell.tiers.base import CheckpointKey, RecordKey, Tier
from stepwell.tiers.shared import SharedHostTier

if TYPE_CHECKING:
    from stepwell.catalog import Holding

#: how long a storage tier may take to say which run it has; a tier that hangs must not keep a store from opening
ASK_S = 5.0

log = logging.getLogger("stepwell")


async def check_run(run: str, tiers: Sequence[Tier]) -> None:
    """Empties a shared host tier that this process owns, if what is there is of another run of that name. If no storage
    tier can say which run this is, what is there stays."""
    host = next((tier for tier in tiers if isinstance(tier, SharedHostTier)), None)
    if host is None or not host.owned:
        return
    key, storage = RecordKey(run, RUN_FILE), [tier for tier in tiers if tier is not host]
    record, sure = await _told(key, storage)
    if record is None and not sure:
        return
    before = _id(await host.fetch(key))
    if before == _id(record) and before is not None:
        return
    if not host.empty:
        log.warning(
            "what is in shared memory is of another run that was named %s: its %d MiB are free again", run,
            host.arena.cached_bytes >> 20,
        )  # fmt: skip
        host.clear()
    if record is not None:
        await host.commit(key, record)


async def _told(key: RecordKey, storage: Sequence[Tier]) -> tuple[bytes | None, bool]:
    """The run's record from the nearest tier that has it; and, if none has, whether it is sure that there is no run."""
    sure = True
    for tier in storage:
        try:
            async with asyncio.timeout(ASK_S):
                data = await tier.fetch(key)
                if _id(data) is not None:
                    return data, True
                async for _ in tier.scan(key.run):  # a folder that was copied without it
                    sure = False
                    break
        except (StepwellError, TimeoutError):
            sure = False
    return None, sure


def _id(data: bytes | None) -> str | None:
    try:
        return None if data is None else decode(data, RunRecord).run_id
    except StepwellError:
        return None


def was_left(tier: Tier) -> bool:
    """Whether what is there may have been left by an earlier process of this node, unseen by any other writer since."""
    return isinstance(tier, SharedHostTier) and tier.owned


async def forget_overtaken(run: str, tier: Tier, found: dict[Attempt, Holding], late: Collection[Attempt]) -> None:
    """Drops from memory, and from what was found there, commits of a writer that had lost the run: they count no more,
    and as the only copies that they may be they would stay for ever."""
    for attempt in [attempt for attempt in found if attempt in late] if was_left(tier) else []:
        if found[attempt].committed:
            del found[attempt]
            await tier.drop([CheckpointKey(run, attempt.folder)])


async def forget_deleted(run: str, holdings: dict[Attempt, list[Holding]], absent: Mapping[str, str]) -> None:
    """Drops checkpoints that were once elsewhere, too, and are left in memory from an earlier process alone."""
    for attempt, held in list(holdings.items()):
        host = held[0].tier
        if absent or len(held) > 1 or not isinstance(host, SharedHostTier):
            continue
        checkpoint = CheckpointKey(run, attempt.folder)
        if host.was_elsewhere(checkpoint):
            log.info("step %d was deleted while nobody had it in memory: it is not kept there alone", attempt.step)
            await host.drop([checkpoint])
            del holdings[attempt]
