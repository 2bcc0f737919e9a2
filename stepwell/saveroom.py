"""Room for a save: on the first storage tier, and in host memory. Where there is none, it waits, or gives up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from stepwell.chain import Chain, reserve
from stepwell.errors import SaveSkipped, TierFull
from stepwell.format.names import Attempt
from stepwell.hosting import has_room, no_memory, not_hosted, said_of, try_reserve
from stepwell.hostmem import host_budget_bytes, local_ranks
from stepwell.jobs import Job
from stepwell.ownership import Ownership, group_of
from stepwell.saving import Order, Save
from stepwell.shardjob import ShardJob
from stepwell.tiers.base import Refused, Reservation, ShardKey, Tier
from stepwell.tiers.host import HostTier

#: the first and the longest pause between two looks whether other ranks have room for an older save
ORDER_FIRST_S, ORDER_LAST_S = 0.002, 0.1
#: how long other ranks may take to remove what they had begun of a save that was given up: then one more look
OTHERS_S = 1.0


class SaveRoom:
    """Finds room for the saves of one run. Lives on the event loop."""

    def __init__(self, chain: Chain, owner: Ownership, under_way: Sequence[Save]) -> None:
        """under_way: the saves that are not on the first storage tier yet, oldest first."""
        self._chain, self._owner, self._under_way = chain, owner, under_way
        #: waits until room was freed on a tier, at most so long; False if there is nothing to wait for
        self.make_room: Callable[[Tier, float], Awaitable[bool]]
        self.may_free: Callable[[Tier], Awaitable[bool]]
        self.times_freed: Callable[[], int]  # how often something has been freed, on any tier
        #: lets go of a checkpoint in memory alone that a newer one has made superfluous; False: there is none
        self.let_older_go: Callable[[], Awaitable[bool]] = _never
        self.may_hold = False  # whether policies may keep a checkpoint from the first storage tier

    def _check_memory(self, save: Save, order: Order) -> None:
        """Raises SaveSkipped if save() would have to wait until an earlier save is written, and may not."""
        host = self._chain.host
        if not self._skips(order) or self._under_way.index(save) == 0:
            return
        if host is None or host.arena.keepable_bytes < order.snapshot.nbytes:
            raise SaveSkipped(
                f"on_pressure = 'skip': an earlier save is not on {self._chain.first.info.name} yet, and host memory "
                "has no room for another one", todo=_SKIPPED, step=order.step,
            )  # fmt: skip

    def _skips(self, order: Order) -> bool:
        """Whether a save may be given up rather than wait; with several ranks only the leader decides that."""
        return self._chain.settings.on_pressure == "skip" and order.job.leader

    async def on_storage(self, save: Save, order: Order, sizes: Sequence[tuple[ShardKey, int]]) -> list[Reservation]:
        """Room on the first storage tier. While deletes or flushes will make some, save() blocks, or does what
        `on_pressure` says."""
        chain, job = self._chain, order.job
        until = order.began + chain.settings.block_timeout
        if job.world == 1 or chain.first.info.scope != "node":
            return await self._on_storage(order, sizes, until)
        await self._in_order(save, job, until)
        reserved = await self._on_storage(order, sizes, until)
        job.store.put(_has_room(chain, job, order.call, job.rank), b"1")
        return reserved

    async def _in_order(self, save: Save, job: Job, until: float) -> None:
        """Returns once all ranks of this node have room for the older saves: what this one takes might be what another
        rank needs for an older one, and neither would get anywhere."""
        ranks, pause = self._owner.committer.covered(self._chain.first), ORDER_FIRST_S
        older = list(self._under_way[: self._under_way.index(save)])
        while older and self._chain.clock.monotonic() < until:
            older = [each for each in older if each in self._under_way and not self._is_placed(each, job, ranks)]
            if older:
                await self._chain.clock.sleep(pause)
                pause = min(2 * pause, ORDER_LAST_S)

    def _is_placed(self, save: Save, job: Job, ranks: Sequence[int]) -> bool:
        """Whether nobody here needs more room for a save: all have it, it stays in memory, or is given up."""
        if save.held is None or save.checkpoint is None:
            return False
        attempt = Attempt.parse(save.checkpoint)
        if save.held or attempt is None or job.store.poll(given_up(self._chain, job, attempt.call)) is not None:
            return True
        return all(job.store.poll(_has_room(self._chain, job, attempt.call, rank)) is not None for rank in ranks)

    async def _on_storage(self, order: Order, sizes: Sequence[tuple[ShardKey, int]], until: float) -> list[Reservation]:
        chain = self._chain
        others = order.job.world > 1  # who may just be removing what they had begun
        while True:
            freed = self.times_freed()
            try:
                return await reserve(chain.first, sizes)
            except TierFull as error:
                left = until - chain.clock.monotonic()
                if self.times_freed() != freed and left > 0:
                    continue  # the tier may have looked before that
                if self._skips(order) and await self.may_free(chain.first):
                    raise SaveSkipped(f"on_pressure = 'skip': {error.what}", todo=_SKIPPED, step=order.step) from error
                if left > 0 and await self.make_room(chain.first, left):
                    continue
                if not others or left <= 0:
                    raise
                others = False
                await chain.clock.sleep(min(OTHERS_S, left))

    async def in_memory(
        self,
        save: Save,
        order: Order,
        jobs: Sequence[ShardJob],
        before: asyncio.Future[None] | None,
        committed: asyncio.Future[None] | None,
    ) -> list[Reservation] | None:
        """Room in host memory for all of the checkpoint; None if it only passes through. before, committed: the save
        before this one has its draft, and has ended."""
        host = self._chain.host
        if host is None:
            self._check_memory(save, order)
            return None
        if host.grows:
            host.grow(host_budget_bytes(order.snapshot.nbytes, local_ranks()))
        self._check_memory(save, order)
        if save.held:
            return await self._reserve_alone(host, order, jobs, committed)
        if self.may_hold and not has_room(host, jobs):  # what is there alone will not make room by itself
            if committed is not None:
                await asyncio.shield(committed)
            await self.let_older_go()
            if not has_room(host, jobs):
                not_hosted(save, host, said_of(host, jobs))
                return None
        granted = await try_reserve(host, jobs)
        if isinstance(granted, Refused) and before is not None and host.fits([job.size for job in jobs]):
            await asyncio.shield(before)  # an earlier save is still being copied: its promise ends with that
            granted = await try_reserve(host, jobs)
        if isinstance(granted, Refused):
            not_hosted(save, host, granted.detail)
            return None
        return granted

    async def _reserve_alone(
        self, host: HostTier, order: Order, jobs: Sequence[ShardJob], committed: asyncio.Future[None] | None
    ) -> list[Reservation]:
        """Room for what stays in memory alone: there it stays, so nothing else may need that room."""
        while True:
            granted = await try_reserve(host, jobs) if has_room(host, jobs) else None
            if isinstance(granted, list):
                return granted
            if committed is not None and not committed.done():  # then the one before that is superfluous
                await asyncio.shield(committed)
            elif not await self.let_older_go():
                raise no_memory(order.step, said_of(host, jobs) if granted is None else granted.detail)


def given_up(chain: Chain, job: Job, call: int) -> str:
    """Where ranks say in the job's store that a save is given up."""
    return f"{group_of(chain, job)}/call-{call}/given-up"


def _has_room(chain: Chain, job: Job, call: int, rank: int) -> str:
    return f"{group_of(chain, job)}/call-{call}/room-{rank}"


async def _never() -> bool:
    return False


_SKIPPED = "The next save is tried again; on_pressure = 'block' waits for room instead"
