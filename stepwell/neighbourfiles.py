"""Where the owner of a shared arena finds the files that clients name: on its own tiers, or in folders it opens."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from stepwell.errors import StepwellError
from stepwell.talking import Source, root_of
from stepwell.tiers.base import CheckpointKey, ShardKey, Tier
from stepwell.tiers.file import FileTier

#: folders that are kept open
PLACES_MAX = 8
#: how long the end waits for them; one that hangs is not waited for
CLOSE_S = 2.0


class Places:
    """The tiers that clients' files lie on: this process's own, and folders that are opened for reading."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._own = {root: tier for tier in tiers if (root := root_of(tier)) is not None}
        self._opened: dict[str, asyncio.Future[FileTier]] = {}
        self._closing: set[asyncio.Task[None]] = set()

    async def find(self, sources: Sequence[Source]) -> tuple[Source | None, list[Tier]]:
        """The nearest source, and all tiers that have the shard under the same key."""
        first: Source | None = None
        tiers: list[Tier] = []
        for source in sources:
            if first is not None and key_of(source) != key_of(first):
                continue
            with contextlib.suppress(StepwellError):  # the client will see for itself
                tiers.append(self._own.get(source.root) or await self._open(source.root))
                first = first or source
        return first, tiers

    async def _open(self, root: str) -> Tier:
        opening = self._opened.pop(root, None)
        if opening is None or (opening.done() and opening.exception() is not None):
            opening = asyncio.ensure_future(_started(root))
        self._opened[root] = opening  # the one used last comes last
        while len(self._opened) > PLACES_MAX:
            self._let_go(self._opened.pop(next(iter(self._opened))))
        return await asyncio.shield(opening)

    def _let_go(self, opening: asyncio.Future[FileTier]) -> None:
        task = asyncio.ensure_future(_ended(opening))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        while self._opened:
            self._let_go(self._opened.popitem()[1])
        if self._closing:
            await asyncio.wait(set(self._closing), timeout=CLOSE_S)


async def _started(root: str) -> FileTier:
    tier = FileTier(root, name="disk", read_only=True)
    await tier.start()
    return tier


async def _ended(opening: asyncio.Future[FileTier]) -> None:
    with contextlib.suppress(StepwellError):
        await (await opening).close()


def key_of(source: Source) -> ShardKey:
    """The shard's key on the tier that the source names."""
    return ShardKey(CheckpointKey(source.run, source.attempt), source.name)
