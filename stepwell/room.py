"""Room on a tier for a save that finds none: who may make some, and how long it is worth waiting for."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from stepwell.chain import Chain
from stepwell.deletion import Deleter
from stepwell.ownership import Ownership
from stepwell.policies.base import Pressure
from stepwell.steering import Steering
from stepwell.tiers.base import Tier

#: how often a rank that does not delete on a tier looks for room there
LOOK_S = 0.5
#: how often one that does looks whether somebody else has made room
AGAIN_S = 5.0


class Room:
    """Of one run's writer. Lives on the event loop."""

    def __init__(
        self, chain: Chain, owner: Ownership, deleter: Deleter, steering: Steering, holding: Collection[object]
    ) -> None:
        """holding: saves that have room on the first tier, until it is decided what follows from them."""
        self._chain, self._owner, self._deleter, self._steering = chain, owner, deleter, steering
        self._holding = holding

    def may_drop(self, tier: str) -> bool:
        """Of all ranks that see the tier, the lowest deletes there."""
        return self._owner.committer.covered(self._chain.named(tier))[0] == self._owner.job.rank

    async def may_free(self, tier: Tier) -> bool:
        """Whether there will be room on the first tier: earlier saves, once they are there, may let others go."""
        return bool(self._holding) or await self._steering.may_free(tier)

    async def make(self, tier: Tier, patience_s: float) -> bool:
        """A save finds no room on `tier`: whether, within so many seconds, some was freed or it is worth another look.
        False, at once, if there is nothing to wait for."""
        pressure, freed = self._chain.settings.on_pressure, self._deleter.freed
        if pressure == "skip" or not self._owner.taken:
            return False
        if not self.may_drop(tier.info.name):  # another rank deletes there, and only a scan shows what that has freed
            await self._chain.clock.sleep(min(patience_s, LOOK_S))
            await self._chain.catalog.refresh()
            return True
        freed.clear()
        if pressure == "newest-wins":
            await self._steering.on(Pressure(tier.info.name))
        if self._deleter.hurry(tier) is None and not await self.may_free(tier):
            return freed.is_set()  # what was going when it was looked for may be gone by now
        waiting = asyncio.ensure_future(freed.wait())
        sleeping = asyncio.ensure_future(self._chain.clock.sleep(min(patience_s, AGAIN_S)))
        try:
            done, _ = await asyncio.wait([waiting, sleeping], return_when=asyncio.FIRST_COMPLETED)
            return waiting in done or patience_s > AGAIN_S
        finally:
            waiting.cancel()
            sleeping.cancel()
