"""What all parts of a run's writer share: the tiers in their order, and what moves bytes between them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from stepwell.catalog import Catalog
from stepwell.clock import Clock
from stepwell.errors import StepwellError, TierFull, TierUnavailable
from stepwell.format.names import Attempt
from stepwell.mover import Mover
from stepwell.settings import Settings, TierOptions
from stepwell.sharing import Sharing
from stepwell.tiers.base import RecordKey, Refused, Reservation, ShardKey, Tier
from stepwell.tiers.gpu import GpuTier
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
    options: Mapping[str, TierOptions] = field(default_factory=dict)  # by the tiers' names
    sharing: Sharing | None = None  # what is done with a shared host tier

    @property
    def host(self) -> HostTier | None:
        """The tier in host memory, if checkpoints are kept there."""
        return self.mover.host

    @property
    def gpu(self) -> GpuTier | None:
        """The tier in the memory of this process's GPU, if there is one."""
        return self.mover.gpu

    @property
    def storage(self) -> list[Tier]:
        """The tiers that outlive the process, nearest first."""
        return [tier for tier in self.tiers if tier is not self.mover.host and tier is not self.mover.gpu]

    @property
    def first(self) -> Tier:
        """Where a save must be for it to be durable."""
        return self.storage[0]

    @property
    def authority(self) -> Tier:
        """Where it is decided who writes the run."""
        return self.tiers[-1]

    def option(self, tier: Tier) -> TierOptions:
        return self.options.get(tier.info.name, TierOptions())

    def named(self, name: str) -> Tier:
        return next(tier for tier in self.tiers if tier.info.name == name)

    def record(self, attempt: Attempt, name: str) -> RecordKey:
        """A small file in the checkpoint's folder."""
        return RecordKey(self.run, f"{attempt.folder}/{name}")


async def _ours() -> bool:
    return True


async def reserve(
    tier: Tier, shards: Sequence[tuple[ShardKey, int]], *, resume: bool = False,
    ours: Callable[[], Awaitable[bool]] = _ours,
) -> list[Reservation]:  # fmt: skip
    """Room for all shards, or none: raises TierFull or TierUnavailable with the numbers.

    resume: files of an earlier try are gone on with; they stay when the tier fails, for the next one. ours: asked
    before files are given back: what has been there for a while another writer may have committed meanwhile.
    """
    asked = [asyncio.ensure_future(tier.reserve(key, size, resume=resume)) for key, size in shards]
    try:
        answers = await asyncio.gather(*asked, return_exceptions=True)
    except asyncio.CancelledError:
        for each in asked if not resume else ():  # those that are granted already have nobody else to give them back
            each.add_done_callback(partial(_give_back, tier))
        raise
    granted = [answer for answer in answers if isinstance(answer, Reservation)]
    for answer in answers:
        if isinstance(answer, Reservation):
            continue
        if granted and (isinstance(answer, Refused) or not resume) and await ours():
            await asyncio.wait([_start_abort(tier, reservation) for reservation in granted])
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


_returning: set[asyncio.Task[None]] = set()  # so that nobody collects them before they are done


def _give_back(tier: Tier, asked: asyncio.Future[Reservation | Refused]) -> None:
    if asked.cancelled() or asked.exception() is not None:
        return
    answer = asked.result()
    if isinstance(answer, Reservation):
        _start_abort(tier, answer)


def _start_abort(tier: Tier, reservation: Reservation) -> asyncio.Task[None]:
    """It goes on whatever becomes of who waits for it."""
    task = asyncio.ensure_future(_abort(tier, reservation))
    _returning.add(task)
    task.add_done_callback(_returning.discard)
    return task


async def _abort(tier: Tier, reservation: Reservation) -> None:
    with contextlib.suppress(StepwellError):  # the room comes back when the tier does
        await tier.abort(reservation)
