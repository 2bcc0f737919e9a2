"""A copy of some parts of a checkpoint grows whole, on a tier that never replaces a manifest.

The manifest goes, and a new one comes once the other parts are there. In between, the marker GROWING and what each rank
has added (`grown_file`) tell the next writer what was there, so that it commits that again if this one gets no further.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from stepwell.chain import Chain
from stepwell.errors import CheckpointNotFound, CorruptData, StepwellError, TierError
from stepwell.flushing import Goal
from stepwell.format.names import GROWING, MANIFEST, Attempt, grown_file, rank_file
from stepwell.format.records import Growing, RankRecord, decode, encode
from stepwell.ownership import Ownership, group_of
from stepwell.tiers.base import CheckpointKey, Reservation, ShardKey, Tier


class Growth:
    """Of one run's partial copies. Lives on the event loop."""

    def __init__(self, chain: Chain, owner: Ownership) -> None:
        self._chain, self._owner = chain, owner
        #: (checkpoint, tier) of copies that were to make way, and may have done -> the parts they had
        self.clearing: dict[tuple[Attempt, str], set[str]] = {}

    async def told(self, attempt: Attempt, tier: Tier) -> Growing | None:
        """What is said of a copy that has made way to one of more parts, while neither is committed."""
        said = await tier.fetch(self._chain.record(attempt, GROWING))
        if said is None:
            return None
        try:
            return decode(said, Growing, step=attempt.step, tier=tier.info.name)
        except StepwellError:  # then nothing is known of what is there, and all is copied anew
            await self._owner.writership.require(tier, attempt.step)
            await tier.drop([self._chain.record(attempt, rank_file(self._owner.job.rank))])
            return None

    async def make_way(self, goal: Goal, tier: Tier, record: RankRecord, there: set[str], turn: int | None) -> None:
        """Ends the commit of a copy of some parts (there), so that more can come: a manifest is never replaced.

        Raises CorruptData, before anything is removed, if what it has is not good elsewhere; with several ranks each
        looks at its own shards, and the lowest removes.
        """
        catalog, job, attempt = self._chain.catalog, self._owner.job, goal.attempt
        manifests = await catalog.manifests(attempt)
        if not any(not m.absent and job.rank in m.covers for other, m in manifests if other is not tier):
            raise CheckpointNotFound(
                "only some parts of the checkpoint are there, and no other tier has all of them",
                todo="Delete the partial copy there, then flush again", step=attempt.step, tier=tier.info.name,
            )  # fmt: skip
        sources = [h.tier for h in catalog.holdings.get(attempt, []) if h.tier is not tier]
        files = record.files_of(there)
        for shard in (shard for shard in record.shards if shard.file in files):
            key = ShardKey(CheckpointKey(self._chain.run, attempt.folder), shard.file)
            await self._chain.mover.verify(sources, key, shard.size, shard.crcs())
        committer, prefix = self._owner.committer, self._way(attempt, tier, turn)
        covered = committer.covered(tier)
        if len(covered) > 1:
            goal.aside.set()  # another rank may be at another checkpoint, and wait for this one there
        if job.rank == covered[0]:
            for rank in covered[1:]:
                await committer.word(rank, f"{prefix}/{rank}", f"rank {rank}'s look at step {attempt.step}")
            await self.clear(attempt, tier, record, there, turn)
        else:
            job.store.put(f"{prefix}/{job.rank}", b"1")
            what = f"the removal of the partial copy of step {attempt.step} by rank {covered[0]}"
            await committer.word(covered[0], f"{prefix}/made", what)
            catalog.remove(attempt, tier)

    async def clear(self, attempt: Attempt, tier: Tier, record: RankRecord, there: set[str], turn: int | None) -> None:
        """Removes the manifest of a copy. Its shards stay, to go on from, and the records, from which the next writer
        commits it again if this one gets no further: the marker GROWING, which means nothing beside a manifest, says
        what it had. It also tells other processes that the checkpoint is worth waiting for."""
        job = self._owner.job
        growing = Growing(absent=sorted(set(record.parts) - there), made=self._chain.clock.wall())
        await self._owner.writership.require(tier, attempt.step)
        if (attempt, tier.info.name) not in self.clearing:  # else the manifest may be gone, and the marker must stay
            await self._drop_markers(attempt, tier, self._owner.committer.covered(tier))  # of an earlier growth
        await tier.commit(self._chain.record(attempt, GROWING), encode(growing))
        await self._owner.writership.require(tier, attempt.step)
        self.clearing[attempt, tier.info.name] = there
        self._chain.catalog.remove(attempt, tier)
        await tier.drop([self._chain.record(attempt, MANIFEST)])
        del self.clearing[attempt, tier.info.name]
        job.store.put(f"{self._way(attempt, tier, turn)}/made", b"1")

    def _way(self, attempt: Attempt, tier: Tier, turn: int | None) -> str:
        leader = self._owner.committer.covered(tier)[0]  # another node's tier has turns of its own
        return f"{group_of(self._chain, self._owner.job)}/{attempt.folder}/{tier.info.name}/{leader}/way-{turn}"

    async def add(self, tier: Tier, attempt: Attempt, absent: list[str], added: Sequence[Reservation]) -> None:
        """Makes what this rank adds to a copy durable. Its record is there already, and must not go for that."""
        place = self._chain.record(attempt, grown_file(self._owner.job.rank))
        await self._owner.writership.require(tier, attempt.step)
        await tier.drop([place])  # of a try that got as far, or of an earlier growth
        if not await tier.commit(place, encode(Growing(absent=absent, made=self._chain.clock.wall())), shards=added):
            raise CorruptData("another process writes this attempt", path=str(place), tier=tier.info.name)

    async def end(self, attempt: Attempt, tier: Tier) -> None:
        """Its markers mean nothing any more, and may stay if they must."""
        rank, covered = self._owner.job.rank, self._owner.committer.covered(tier)
        with contextlib.suppress(TierError):
            if rank == covered[0]:
                await self._drop_markers(attempt, tier, covered)

    async def _drop_markers(self, attempt: Attempt, tier: Tier, ranks: Sequence[int]) -> None:
        await tier.drop([self._chain.record(attempt, name) for name in (GROWING, *map(grown_file, ranks))])
