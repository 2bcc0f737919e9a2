"""Deleting copies of checkpoints: what commits them first, their files once nobody can be reading them any more.

On a shared tier a reader on another node may just have opened the checkpoint, so its files stay for a while
(`delete_grace`) after the manifest and the ranks' records have gone. A save that finds no room there shortens that
to HURRIED_S. The marker DELETED comes before all that: beside a manifest it means nothing, and wherever a deletion
stops, whoever finds files without a manifest frees them likewise.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from stepwell.chain import Chain, Keep
from stepwell.errors import StepwellError
from stepwell.events import EventLog
from stepwell.format.names import DELETED, MANIFEST, Attempt, rank_file
from stepwell.format.records import Deleted, Manifest, encode
from stepwell.ownership import Ownership
from stepwell.tiers.base import CheckpointKey, RecordKey, Tier

log = logging.getLogger("stepwell")

#: how long readers on other nodes may take to open a checkpoint's files, unless a tier's delete_grace says otherwise
GRACE_S = 1800.0
#: and that when somebody needs the room
HURRIED_S = 60.0

Copy = tuple[Attempt, str]  # a checkpoint, and the tier that the copy is on


class Deleter:
    """Deletes on the tiers of one run. Lives on the event loop."""

    def __init__(
        self, chain: Chain, owner: Ownership, events: EventLog, keep: Keep, busy: set[tuple[str, str]]
    ) -> None:
        """busy: (checkpoint, tier) of copies that nobody else may touch meanwhile."""
        self._chain, self._owner, self.events, self._keep, self.busy = chain, owner, events, keep, busy
        self._deleted_at: dict[Copy, float] = {}  # copies whose files are still there
        self._hurried: set[str] = set()  # tiers on which somebody needs room
        self._worker: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self.freed = asyncio.Event()  # something was: whoever waits for room clears it before it looks
        self.times_freed = 0  # whoever was refused room sees by it whether there may be some meanwhile

    def note_freed(self) -> None:
        """Something was freed on a tier, or will be without anybody's doing."""
        self.times_freed += 1
        self.freed.set()

    def grace_s(self, tier: Tier) -> float:
        """How long a deleted copy's files stay on a tier."""
        chosen = self._chain.option(tier).delete_grace_s
        if chosen is not None:
            return chosen
        return GRACE_S if tier.info.scope == "shared" else 0.0

    async def delete(self, attempt: Attempt, tier: Tier, manifest: Manifest | None, reason: str) -> None:
        """Returns when the checkpoint is no more on `tier`; its files may follow later.

        manifest: the copy's, if it is known. Raises what the tier raises, and RunBusy if another writer has the run.
        """
        chain = self._chain
        await self._owner.writership.require(tier, attempt.step)
        log.info("deleting step %d from %s: %s", attempt.step, tier.info.name, reason)
        if manifest is None or self.grace_s(tier) <= 0:
            await tier.drop([CheckpointKey(chain.run, attempt.folder)])
            self.events.add("deleted", attempt, tier.info.name, reason)
            self.note_freed()
            return
        await tier.commit(self._marker(attempt), encode(Deleted(reason=reason, made=chain.clock.wall())))
        await self._owner.writership.require(tier, attempt.step)
        names = [MANIFEST, *(rank_file(rank) for rank in manifest.covers)]
        await tier.drop([chain.record(attempt, name) for name in names])
        self.events.add("deleted", attempt, tier.info.name, reason)
        self.free_later(attempt, tier)

    def _marker(self, attempt: Attempt) -> RecordKey:
        return self._chain.record(attempt, DELETED)

    async def waits(self, attempt: Attempt, tier: Tier) -> bool:
        """Whether files without a manifest are those of a deleted checkpoint: then they go when its grace is over, and
        nobody else may remove them."""
        if await tier.fetch(self._marker(attempt)) is None:
            return False
        self.free_later(attempt, tier)
        return True

    def free_later(self, attempt: Attempt, tier: Tier) -> None:
        """Frees a deleted copy's files when its grace is over."""
        self._deleted_at.setdefault((attempt, tier.info.name), self._chain.clock.monotonic())
        self._wake.set()
        if self._worker is None:
            self._worker = self._keep(self._work())

    async def spare(self, attempt: Attempt, tier: Tier) -> None:
        """The checkpoint comes to `tier` again: what is left of its files there stays. Raises RunBusy."""
        spared = self._deleted_at.pop((attempt, tier.info.name), None) is not None  # before anything else can begin
        await self._owner.writership.require(tier, attempt.step)
        if spared:
            self._wake.set()
            await tier.drop([self._marker(attempt)])

    def hurry(self, tier: Tier) -> float | None:
        """Somebody needs room on `tier`: in how many seconds the next files there are freed; None if none wait."""
        name = tier.info.name
        waiting = [copy for copy in self._deleted_at if copy[1] == name]
        if not waiting:
            return None
        self._hurried.add(name)
        self._wake.set()
        return max(0.0, min(self._due(copy) for copy in waiting) - self._chain.clock.monotonic())

    @property
    def waiting(self) -> Mapping[Copy, float]:
        """Deleted copies whose files are still there -> when that was, in monotonic seconds."""
        return self._deleted_at

    def _due(self, copy: Copy) -> float:
        grace = self.grace_s(self._chain.named(copy[1]))
        return self._deleted_at[copy] + (min(grace, HURRIED_S) if copy[1] in self._hurried else grace)

    async def _work(self) -> None:
        while self._deleted_at:
            copy = min(self._deleted_at, key=self._due)
            pause = self._due(copy) - self._chain.clock.monotonic()
            if pause > 0:
                await self._pause(pause)
                continue
            del self._deleted_at[copy]
            await self._free(*copy)
            if not any(tier == copy[1] for _, tier in self._deleted_at):
                self._hurried.discard(copy[1])
            self.note_freed()
        self._worker = None

    async def _pause(self, seconds: float) -> None:
        self._wake.clear()
        waits = [asyncio.ensure_future(self._chain.clock.sleep(seconds)), asyncio.ensure_future(self._wake.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()

    async def _free(self, attempt: Attempt, name: str) -> None:
        tier = self._chain.named(name)
        self.busy.add((attempt.folder, name))
        try:
            await self._owner.writership.require(tier, attempt.step)
            await tier.drop([CheckpointKey(self._chain.run, attempt.folder)])
            self.events.add("freed", attempt, name)
        except StepwellError as error:  # the next writer finds the marker
            log.warning("freeing what was step %d on %s failed: %s", attempt.step, name, error)
        finally:
            self.busy.discard((attempt.folder, name))

    def hurry_all(self) -> None:
        """The store is being closed: what has waited for HURRIED_S goes now, and younger ones are left to the next
        writer, so that nobody waits for them."""
        for _, name in list(self._deleted_at):
            self.hurry(self._chain.named(name))

    def stop(self) -> None:
        if self._worker is not None:
            self._worker.cancel()
