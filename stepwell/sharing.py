"""What a store does with a shared host tier: it serves others, or is served, and lets go of it for who needs it more.

One process owns the arena. A store that finds it owned asks that process for chunks. A writer must own it to keep its
checkpoints there: if the owner only reads, it hands the arena over; if the owner writes, too, this process works in
private memory, and says so.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

from stepwell.errors import StepwellError
from stepwell.mover import Mover
from stepwell.neighbouring import Neighbouring, asked_for
from stepwell.neighbours import Neighbours
from stepwell.tiers._shm import is_alive
from stepwell.tiers.base import Tier
from stepwell.tiers.shared import SharedHostTier

#: how long a lock that its owner has just let go of is waited for
TAKE_S, TAKE_AGAIN_S = 5.0, 0.05

log = logging.getLogger("stepwell")


class Sharing:
    """One store's part in a shared arena. Lives on the event loop."""

    def __init__(self, mover: Mover, host: SharedHostTier, tiers: Sequence[Tier], mode: Literal["w", "r"]) -> None:
        """mover: gets a neighbour where another process owns the arena. tiers: all of the store, started."""
        self._mover, self._host, self._tiers, self._mode = mover, host, tiers, mode
        self._serving: Neighbours | None = None
        self._served: Neighbouring | None = None
        self._handing_over: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Sharing: {self._serving or self._served or self._host.why}>"

    async def start(self) -> None:
        """Takes the arena from an owner that needs it less; then serves it, or finds who does. Nothing is under way in
        the host tier yet."""
        if self._mode == "w" and self._host.busy:
            await self._take_over()
        elif self._host.busy and not self._is_others:  # whoever had it has let go of it since
            await self._host.try_to_own()
        if self._host.owned:
            await self._serve()
        elif self._is_others:
            await self._be_served()

    @property
    def _is_others(self) -> bool:
        """Whether another process owns the arena. There may also be no room for one."""
        return not self._host.owned and self._host.folder is not None and is_alive(self._host.folder)

    async def _take_over(self) -> None:
        assert self._host.folder is not None
        loop = asyncio.get_running_loop()
        until = loop.time() + TAKE_S
        while not await self._host.try_to_own() and loop.time() < until:
            if self._is_others:  # it may be about to close, or not listen yet: then it is asked again
                await asked_for(self._host.folder)
            await asyncio.sleep(TAKE_AGAIN_S)
        if self._is_others:
            log.warning(
                "tier %s: another process owns the shared memory (%s): what this one saves is kept in private memory, "
                "and ends with it", self._host.info.name, self._host.owner or "nobody knows which",
            )  # fmt: skip

    async def _serve(self) -> None:
        assert self._host.folder is not None
        serving = Neighbours(self._mover, self._host.folder, self._tiers, self._wanted)
        try:
            await serving.start()
        except OSError as error:
            log.warning("tier %s: other processes cannot read from it: %s", self._host.info.name, error)
            return
        self._serving = serving

    async def _be_served(self) -> None:
        assert self._host.folder is not None
        self._served = self._mover.neighbour = Neighbouring(self._host.folder, self._host.arena.slot_bytes)
        await self._served.start()

    def _wanted(self) -> bool:
        """A writer wants the arena: this store lets go of it if it only reads."""
        if self._mode == "w":
            return False
        if self._handing_over is None:
            self._handing_over = asyncio.ensure_future(self._hand_over())
        return True

    async def _hand_over(self) -> None:
        """Clients take their connections' end for the owner's, and find the next one by themselves."""
        serving, self._serving = self._serving, None
        assert serving is not None
        await serving.close()
        try:
            await self._host.release_ownership()
        except StepwellError as error:
            log.warning("tier %s: the shared memory is not handed over: %s", self._host.info.name, error)
        finally:
            if not self._host.owned:
                await self._be_served()
            self._handing_over = None

    async def close(self) -> None:
        """Nobody is served any more, and nothing is lent. Before the tiers are closed. Idempotent."""
        if self._handing_over is not None:
            self._handing_over.cancel()
            await asyncio.wait([self._handing_over])
        self._mover.neighbour = None
        if self._serving is not None:
            await self._serving.close()
        if self._served is not None:
            await self._served.close()


async def share(mover: Mover, tiers: Sequence[Tier], mode: Literal["w", "r"]) -> Sharing | None:
    """Begins what a store does with a shared host tier; None if it has none. The tiers are started, and closed by the
    caller if this raises."""
    host = mover.host
    if not isinstance(host, SharedHostTier):
        return None
    sharing = Sharing(mover, host, tiers, mode)
    try:
        await sharing.start()
    except BaseException:
        await sharing.close()
        raise
    return sharing
