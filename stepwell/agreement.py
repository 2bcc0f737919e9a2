"""Many ranks restore as one: the leader's list of candidates, and a vote on each.

A checkpoint that one rank cannot use is used by none: ranks that went on from different steps would train a
model that never was. Votes go through the job's store; a world of one asks nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import msgspec

from stepwell.errors import StepwellError
from stepwell.format.names import Attempt
from stepwell.jobs import Job, wait_for


class Vote(msgspec.Struct):
    """What one rank says of one step of a restore."""

    ok: bool
    why: str = ""
    partial: bool = False  # all that is wrong is that it does not hold every part
    fatal: bool = False  # no other checkpoint would help this rank: all ranks raise


class Agreement:
    """One restore, on all ranks of a job."""

    def __init__(self, job: Job, group: str, timeout_s: float, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        """group: begins the keys of this restore; the same on all ranks, used by no other."""
        self.job, self._group, self._timeout_s, self._run = job, group, timeout_s, run
        self._asked = 0

    def candidates(self, found: Callable[[], Sequence[Attempt]]) -> Sequence[Attempt]:
        """What the leader found, in its order. Raises on all ranks if the leader could not look."""
        if self.job.world == 1:
            return found()
        key = f"{self._group}/candidates"
        if self.job.leader:
            try:
                mine = list(found())
            except BaseException as error:  # Ctrl-C, too: the others would wait for nothing
                why = str(error) or type(error).__name__
                self.job.store.put(key, msgspec.json.encode(Vote(False, why, fatal=True)))
                raise
            self.job.store.put(key, msgspec.json.encode([attempt.folder for attempt in mine]))
            return mine
        answer = msgspec.json.decode(self._run(wait_for(self.job.store, key, self._timeout_s, "the leader's choice")))
        if isinstance(answer, dict):
            raise StepwellError(f"rank 0 cannot restore: {answer['why']}", rank=self.job.rank)
        return [attempt for folder in answer if (attempt := Attempt.parse(folder)) is not None]

    def vote(self, mine: Vote) -> Vote:
        """Every rank's word on the same question; the first rank that says no speaks for all.

        Raises on the other ranks if one rank's no is fatal.
        """
        if self.job.world == 1:
            return mine
        self._asked += 1
        prefix = f"{self._group}/vote-{self._asked}"
        self.job.store.put(f"{prefix}/{self.job.rank}", msgspec.json.encode(mine))
        votes = self._run(self._all(prefix))
        for rank, vote in enumerate(votes):
            if vote.fatal and not mine.fatal:
                raise StepwellError(f"rank {rank} cannot restore: {vote.why}", rank=self.job.rank)
        for rank, vote in enumerate(votes):
            if not vote.ok:
                why = vote.why if rank == self.job.rank else f"rank {rank}: {vote.why}"
                return Vote(False, why, partial=all(vote.ok or vote.partial for vote in votes))
        return mine

    async def _all(self, prefix: str) -> list[Vote]:
        waiting = [
            wait_for(self.job.store, f"{prefix}/{rank}", self._timeout_s, f"rank {rank}'s word on the restore")
            for rank in range(self.job.world)
        ]
        return [msgspec.json.decode(data, type=Vote) for data in await asyncio.gather(*waiting)]
