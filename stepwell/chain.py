"""What all parts of a run's writer share: the tiers in their order, and what moves bytes between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from stepwell.catalog import Catalog
from stepwell.clock import Clock
from stepwell.errors import TierFull, TierUnavailable
from stepwell.mover import Mover
from stepwell.settings import Settings
from stepwell.tiers.base import Refused, Reservation, ShardKey, Tier
from stepwell.tiers.host import HostTier

#: starts background work and holds on to it until it is done
Keep = Callable[[Coroutine[Any, Any, Any]], asyncio.Task[Any]]


@dataclass(frozen=True, slots=True)
class Chain:
    """One run on its tiers."""

    run: str
    tiers: Sequence[Tier]  # nearest first
    mover: Mover
    catalog: Catalog
    clock: Clock
    settings: Settings

    @property
    def host(self) -> HostTier | None:
        """The tier in host memory, if checkpoints are kept there."""
        return self.mover.host

    @property
    def storage(self) -> list[Tier]:
        """The tiers that outlive the process, nearest first."""
        return [tier for tier in self.tiers if tier is not self.mover.host]

    @property
    def first(self) -> Tier:
        """Where a save must be for it to be durable."""
        return self.storage[0]

    @property
    def authority(self) -> Tier:
        """Where it is decided who writes the run."""
        return self.tiers[-1]

    def named(self, name: str) -> Tier:
        return next(tier for tier in self.tiers if tier.info.name == name)


async def reserve(tier: Tier, shards: Sequence[tuple[ShardKey, int]], *, resume: bool = False) -> list[Reservation]:
    """Room for all shards, or none: raises TierFull or TierUnavailable with the numbers."""
    asked = (tier.reserve(key, size, resume=resume) for key, size in shards)
    answers = await asyncio.gather(*asked, return_exceptions=True)
    granted = [answer for answer in answers if isinstance(answer, Reservation)]
    for answer in answers:
        if isinstance(answer, Reservation):
            continue
        for reservation in granted:
            await tier.abort(reservation)
        if isinstance(answer, Refused):
            kind = TierFull if answer.reason == "full" else TierUnavailable
            raise kind(
                f"no room for the checkpoint: {answer.detail}",
                todo="Older checkpoints are untouched. Free space and save again",
                tier=tier.info.name,
                needed_bytes=answer.needed_bytes or None,
                free_bytes=answer.free_bytes or None,
            )
        raise answer
    return granted
