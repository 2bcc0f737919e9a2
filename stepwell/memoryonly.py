"""Checkpoints that only host memory has, because no policy has sent them down: the newest stays, older ones go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from stepwell.chain import Chain
from stepwell.format.names import MANIFEST, Attempt
from stepwell.format.records import Manifest
from stepwell.jobs import Job, wait_for
from stepwell.ownership import Ownership, group_of
from stepwell.saving import Save
from stepwell.steering import Steering
from stepwell.tiers.base import CheckpointKey, ShardKey, Tier

#: ranks commit in memory one after the other, and may be killed in between: the one before is then whole on all
KEPT_ALONE, KEPT_TOGETHER = 1, 2
#: how long a save waits for flushes from memory before it looks again
LOOK_S = 0.05


class MemoryOnly:
    """Lets go of them. Lives on the event loop."""

    def __init__(
        self, chain: Chain, owner: Ownership, steering: Steering, saving: Callable[[], Collection[Save]]
    ) -> None:
        """saving: saves under way, until policies have said what follows from them."""
        self._chain, self._owner, self._steering, self._saving = chain, owner, steering, saving

    async def let_older_go(self) -> bool:
        """Frees the memory of all that is superfluous. False if there is none, nor will be: nothing is on its way down
        from memory. A flush that is under way is waited for, for a moment."""
        chain, freed, promised = self._chain, False, False
        for attempt in [a for a in list(chain.catalog.holdings) if self.is_alone(a)] if chain.host is not None else []:
            await chain.catalog.manifests(attempt)  # what other tiers have of it may be more than is known
            if not self.is_alone(attempt) or attempt in self._kept():
                continue
            if attempt.folder in self._going_down():
                promised = True
            elif not self._is_needed(attempt):
                assert chain.host is not None
                chain.catalog.remove(attempt, chain.host)
                await chain.host.drop([CheckpointKey(chain.run, attempt.folder)])
                freed = True
        if promised and not freed:
            await asyncio.sleep(LOOK_S)
        return freed or promised

    def newest(self) -> Attempt | None:
        """The newest checkpoint, if only memory has it."""
        newest = self._newest(1)
        return newest[0] if newest and self.is_alone(newest[0]) else None

    def is_alone(self, attempt: Attempt) -> bool:
        """Whether memory has all of this rank's part, and no other tier is known to have it."""
        host, held = self._chain.host, self._chain.catalog.holdings.get(attempt, [])
        return any(h.tier is host for h in held) and not any(self._is_whole(attempt, h.tier) for h in held)

    async def all_have(self, job: Job, call: int) -> None:
        """Returns once every rank has copied its part of a save to memory: what one of them lacks none commits."""
        if job.world > 1:
            prefix = f"{group_of(self._chain, job)}/call-{call}/in-memory"
            job.store.put(f"{prefix}/{job.rank}", b"1")
            patience_s = self._chain.settings.rank_timeout_seconds
            others = [rank for rank in range(job.world) if rank != job.rank]
            await asyncio.gather(*(wait_for(job.store, f"{prefix}/{r}", patience_s, f"rank {r}") for r in others))

    def _going_down(self) -> set[str]:
        """What is written or flushed from memory, or may be."""
        saving = {save.checkpoint for save in self._saving() if save.checkpoint is not None}
        return saving | {checkpoint for checkpoint, _ in self._steering.promised}

    def _kept(self) -> list[Attempt]:
        together = self._owner.taken and self._owner.job.world > 1
        return self._newest(KEPT_TOGETHER if together else KEPT_ALONE)

    def _newest(self, count: int) -> list[Attempt]:
        """The newest ones that are whole on any tier."""
        found: list[Attempt] = []
        for attempt in self._chain.catalog.newest_first():
            held = self._chain.catalog.holdings[attempt]
            if any(h.tier is self._chain.host or self._is_whole(attempt, h.tier) for h in held):
                found.append(attempt)
                if len(found) == count:
                    break
        return found

    def _is_whole(self, attempt: Attempt, tier: Tier) -> bool:
        """On a tier below memory."""
        manifest: Manifest | None = self._chain.catalog.known_manifest(attempt, tier)
        return tier in self._chain.storage and manifest is not None and not manifest.absent

    def _is_needed(self, attempt: Attempt) -> bool:
        """Whether somebody reads it, keeps it or has pinned it."""
        catalog, host = self._chain.catalog, self._chain.host
        assert host is not None
        if catalog.reading[attempt] or catalog.notes.kept(attempt):
            return True
        key = CheckpointKey(self._chain.run, attempt.folder)
        shards = [ShardKey(key, name) for h in catalog.holdings[attempt] for name in h.files if name != MANIFEST]
        pinned, arena = host.arena.pinned, host.arena
        return bool(pinned) and any(arena.key(s, number) in pinned for s in shards for number in arena.chunks(s))
