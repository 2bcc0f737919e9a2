"""What is brought up ahead of its use: for users' prefetches, for pins, for policies. Lives on the event loop."""

from __future__ import annotations

import asyncio
import bisect
import logging
import operator
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol, SupportsIndex

from stepwell.chain import Chain
from stepwell.errors import CheckpointNotFound, ConfigError
from stepwell.flushing import Goal
from stepwell.format.names import Attempt
from stepwell.jobs import Job
from stepwell.lifting import Lifter
from stepwell.pinning import Pins
from stepwell.prefetching import Prefetch, Urgency
from stepwell.tiers.base import Tier
from stepwell.togpu import to_gpu
from stepwell.units import format_bytes
from stepwell.wanted import Choice, Item, Ref, item_of, own_attempt, resolve

log = logging.getLogger("stepwell")

#: of what policies ask for: it goes after all that users do
LAST_PRIORITY = -(1 << 30)


class Lift(Protocol):
    """Copies a checkpoint of the run up to a storage tier; tells of its place in that tier's queue, if it gets one."""

    def __call__(
        self, attempt: Attempt, tier: Tier, job: Job, parts: Sequence[str] | None, on_goal: Callable[[Goal], object], /
    ) -> Awaitable[None]: ...


class Turns:
    """One at a time, the most urgent first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Urgency, asyncio.Future[None]]] = []
        self._busy = False

    @asynccontextmanager
    async def taken(self, urgency: Urgency) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        bisect.insort(self._waiting, (urgency, turn), key=lambda each: each[0])
        self._give()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self._busy = False
            self._waiting = [each for each in self._waiting if each[1] is not turn]
            self._give()

    def _give(self) -> None:
        while self._waiting and not self._busy:
            _, turn = self._waiting.pop(0)
            if not turn.cancelled():
                self._busy = True
                turn.set_result(None)


class Ahead:
    """Prefetches of one store, to whichever tier, and its pins."""

    def __init__(self, chain: Chain, lift: Lift) -> None:
        self._chain, self._lift = chain, lift
        self.lifter = None if chain.host is None else Lifter(chain.mover, chain.host)
        self.pins = None if self.lifter is None else Pins(self.lifter)
        self._turns: dict[str, Turns] = {}

    async def bring(
        self, refs: Sequence[Ref], tier: Tier, handle: Prefetch, choice: Choice, max_bytes: int | None, job: Job
    ) -> None:
        """Returns once all of a list is on a tier, or was used meanwhile; most urgent first. Raises what went wrong."""
        late = asyncio.ensure_future(handle.warn_when_late())
        try:
            if tier is self._chain.host:
                await self._to_host(refs, handle, choice, max_bytes, job)
            else:
                await self._to_tier(refs, tier, handle, choice, max_bytes, job)
        finally:
            late.cancel()

    async def item(self, ref: Ref, choice: Choice, job: Job) -> Item:
        """What a reference stands for now. Raises CheckpointNotFound, KeyMismatch."""
        return await resolve(self._chain.mover, self._chain.catalog, ref, job.rank, job.world, choice)

    async def _to_host(
        self, refs: Sequence[Ref], handle: Prefetch, choice: Choice, max_bytes: int | None, job: Job
    ) -> None:
        assert self.lifter is not None
        known: dict[object, Item] = {}
        for ref in refs:
            if _text(ref) not in known:
                known[_text(ref)] = await self.item(ref, choice, job)
        await self.lift_items([known[_text(ref)] for ref in refs], handle, max_bytes)

    async def lift_items(self, items: Sequence[Item], handle: Prefetch, max_bytes: int | None = None) -> None:
        """Brings chunks into host memory. Raises ConfigError without a host tier, TierFull."""
        if self.lifter is None:
            names = ", ".join(tier.info.name for tier in self._chain.tiers)
            raise ConfigError("there is no host tier", todo=f"The tiers are {names}")
        wanted, left_out_bytes = self.lifter.fit(items, max_bytes)
        _say_left_out(left_out_bytes, max_bytes)
        size_bytes = sum(length for item, count in wanted for _, _, length in item.chunks[:count])
        handle.expect(size_bytes, left_out_bytes)
        await self.lifter.bring(handle, wanted)

    async def bring_own(self, attempt: Attempt, parts: Sequence[str] | None, job: Job) -> int:
        """Brings parts of a checkpoint of the run (None: all) to host memory when nothing else is to be brought;
        returns how many bytes they are. Raises as `bring`."""
        choice = Choice.of(None if parts is None else list(parts), "*")
        item = await item_of(self._chain.mover, self._chain.catalog, attempt, job.rank, job.world, choice)
        handle = Prefetch(Urgency.of(LAST_PRIORITY, None))
        await self.lift_items([item], handle)
        return handle.progress.total_bytes

    async def _to_tier(
        self, refs: Sequence[Ref], tier: Tier, handle: Prefetch, choice: Choice, max_bytes: int | None, job: Job
    ) -> None:
        if not choice.everything:
            raise ConfigError(
                f"tier {tier.info.name} holds whole parts of checkpoints", todo="Leave keys out, or give parts"
            )
        attempts, used_bytes, left_out_bytes = [], 0, 0
        for ref in refs:
            attempt = await own_attempt(self._chain.catalog, ref)
            size = await self._size_bytes(attempt, choice)  # of all parts: the budget is kept in any case
            if left_out_bytes or (max_bytes is not None and used_bytes + size > max_bytes):
                left_out_bytes += size
                continue
            used_bytes += size
            attempts.append((attempt, size))
        _say_left_out(left_out_bytes, max_bytes)
        handle.expect(used_bytes, left_out_bytes)
        turns, gpu = self._turns.setdefault(tier.info.name, Turns()), self._chain.gpu
        for attempt, size in attempts:
            async with turns.taken(handle.urgency):
                with handle.watching(size) as watch:
                    if gpu is not None and tier is gpu:
                        await to_gpu(self._chain, gpu, attempt, job, choice.parts, watch)
                    else:
                        await self._lift(attempt, tier, job, choice.parts, watch)

    async def _size_bytes(self, attempt: Attempt, choice: Choice) -> int:
        """Of all parts: some tier may have only a few. Raises KeyMismatch for parts that the checkpoint has not,
        CheckpointNotFound."""
        catalog = self._chain.catalog
        manifests = [manifest for _, manifest in await catalog.manifests(attempt)]
        if not manifests:
            raise CheckpointNotFound("no tier has a manifest of it that can be read", step=attempt.step)
        choice.check({part for manifest in manifests for part in manifest.parts}, attempt.step)
        return max(manifest.size for manifest in manifests)

    def wants(self, name: Hashable) -> bool:
        """Whether a prefetch into host memory has announced that chunks of this shard will be used."""
        return self.lifter is not None and self.lifter.lineup.wants(name)

    def close(self) -> None:
        """Ends what comes into host memory; the queues of storage tiers end by themselves."""
        if self.lifter is not None:
            self.lifter.close()


def _text(ref: Ref) -> object:
    """Alike for references that are alike."""
    return operator.index(ref) if isinstance(ref, SupportsIndex) else os.fspath(ref)


def _say_left_out(size_bytes: int, max_bytes: int | None) -> None:
    if size_bytes and max_bytes is not None:
        log.info(
            "a prefetch leaves out %s: its max_bytes is %s", format_bytes(size_bytes), format_bytes(max_bytes)
        )  # fmt: skip
