"""Deleting without haste: a metadata server that is busy with thousands of unlinks serves nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from stepwell.tiers._folders import commits_first
from stepwell.tiers._wrapper import Wrapper
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey, Tier


class Paced(Wrapper):
    """Drops a checkpoint file by file, its manifest first and at once, with `pause_s` between the files.

    One checkpoint after the other, whoever asks; all other calls, and drops of single files, go by. A drop
    that is cancelled in between leaves a checkpoint that nothing commits: drop it again.
    names_of: the names of a checkpoint's files; sleep: waits so many seconds.
    """

    def __init__(
        self,
        tier: Tier,
        pause_s: float,
        names_of: Callable[[CheckpointKey], Awaitable[Sequence[str]]],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        if pause_s < 0:
            raise ValueError(f"pause_s must not be negative: {pause_s}")
        super().__init__(tier)
        self.pause_s = pause_s
        self._names_of = names_of
        self._sleep = sleep
        self._turn = asyncio.Lock()

    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        for key in what:
            if isinstance(key, CheckpointKey):
                async with self._turn:
                    await self._drop_checkpoint(key)
            else:
                await self.tier.drop([key])

    async def _drop_checkpoint(self, key: CheckpointKey) -> None:
        names = await self._names_of(key) if key.run else ()  # outside of a run the tier refuses
        commits = commits_first(names)
        await self.tier.drop([RecordKey(key.run, f"{key.attempt}/{name}") for name in commits])
        for name in names:
            if name not in commits:
                await self.tier.drop([ShardKey(key, name)])
                await self._sleep(self.pause_s)
        await self.tier.drop([key])
