"""Repair: shards that a restore found bad on a tier are written again from a tier with good bytes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence

from stepwell import native
from stepwell.chain import Chain, reserve
from stepwell.errors import CorruptData, StepwellError
from stepwell.format.names import MANIFEST, Attempt, rank_file
from stepwell.format.records import Manifest, RankRecord, Repair, ShardRecord, decode, encode
from stepwell.ownership import Ownership
from stepwell.reading import Healing, Reading
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey, Tier
from stepwell.tiers.host import Priority

log = logging.getLogger("stepwell")

Bad = Mapping[tuple[str, ShardKey], str]  # (tier, shard) -> what was wrong


class Mender:
    """Only the run's writer may repair, so what is noted before it has taken the run over waits for that."""

    def __init__(self, chain: Chain, owner: Ownership, busy: set[tuple[str, str]]) -> None:
        """busy: (checkpoint, tier) of copies that nobody else may touch meanwhile."""
        self._chain, self._owner, self._busy = chain, owner, busy
        self._todo: list[tuple[Bad, RankRecord]] = []

    def note(self, bad: Bad, record: RankRecord) -> None:
        self._todo.append((bad, record))

    async def mend(self) -> None:
        """Repairs what was noted; what cannot be repaired is logged."""
        while self._todo:
            bad, record = self._todo.pop(0)
            try:
                await self._write_again(bad, record)
            except StepwellError as error:
                log.error("could not repair %s: %s", ", ".join(f"{key} on {tier}" for tier, key in bad), error)

    async def _write_again(self, bad: Bad, record: RankRecord) -> None:
        chain = self._chain
        attempt = Attempt.parse(record.attempt)
        assert attempt is not None
        chain.catalog.begin_reading(attempt)  # its good copies must stay meanwhile
        try:
            await self._write_all(attempt, bad, record)
        finally:
            chain.catalog.end_reading(attempt)

    async def _write_all(self, attempt: Attempt, bad: Bad, record: RankRecord) -> None:
        chain = self._chain
        for (name, key), wrong in bad.items():
            target = chain.named(name)
            held = {
                h.tier: h.files
                for h in chain.catalog.holdings.get(attempt, [])
                if (attempt.folder, h.tier.info.name) not in self._busy
            }
            sources = [tier for tier in held if tier is not target]
            shard = next(s for s in record.shards if s.file == key.name)
            if target not in held or target.info.read_only or target not in chain.storage or not sources:
                continue
            files = dict(held[target])  # the catalog may lose sight of them: a tier does not answer each scan
            if (attempt.folder, name) in self._busy or await self._is_good(target, key, shard):
                continue
            if not await self._is_whole_elsewhere(attempt, sources):
                log.warning("%s on tier %s stays bad: no other tier has all parts of the checkpoint", key, name)
                continue
            # the bad file may hold the only good bytes of a block that is bad elsewhere: it goes only after
            # every block of the other copies was found good
            await chain.mover.verify(sources, key, shard.size, shard.crcs())
            self._busy.add((attempt.folder, name))
            try:
                await self._replace(target, attempt, record.rank, shard, files, sources, wrong)
            finally:
                self._busy.discard((attempt.folder, name))
            log.warning("%s on tier %s was bad and has been written again", key, name)

    async def _is_whole_elsewhere(self, attempt: Attempt, sources: Sequence[Tier]) -> bool:
        """While one shard is written again the copy is not committed: a crash then takes its other parts, too."""
        manifests = await self._chain.catalog.manifests(attempt)
        return any(not m.absent for tier, m in manifests if tier in sources and tier in self._chain.storage)

    async def _is_good(self, tier: Tier, key: ShardKey, shard: ShardRecord) -> bool:
        """Whether what was wrong has passed: an error of the disk or the network, not of the bytes."""
        try:
            await self._chain.mover.verify([tier], key, shard.size, shard.crcs())
        except CorruptData:
            return False
        return True

    async def _replace(
        self, target: Tier, attempt: Attempt, rank: int, shard: ShardRecord, files: dict[str, int],
        sources: Sequence[Tier], wrong: str,
    ) -> None:  # fmt: skip
        """Writes the shard again. Until that is done the checkpoint is not committed there: no moment, and no crash,
        leaves a manifest beside a shard that is not whole, on which the deletion of the good copy could rely."""
        chain = self._chain
        key = ShardKey(CheckpointKey(chain.run, attempt.folder), shard.file)
        manifest = RecordKey(chain.run, f"{attempt.folder}/{MANIFEST}")
        own = RecordKey(chain.run, f"{attempt.folder}/{rank_file(rank)}")
        commits, told = await target.fetch(manifest), await target.fetch(own)
        words = decode(commits, Manifest) if commits is not None else None
        if commits is None or words is None or told is None or native.crc32c(told) not in words.digests:
            raise CorruptData("its records are bad, too", path=str(own), tier=target.info.name)
        await self._owner.writership.require(target, attempt.step)
        chain.catalog.remove(attempt, target)
        await target.drop([manifest])
        await target.drop([own, key])
        [reserved] = await reserve(target, [(key, shard.size)])
        try:
            reading = Reading(key, sources, shard.crcs(), Healing(), Priority.FLUSH, target=target.info.name)
            await chain.mover.copy(reading, target, shard.size)
            note = Repair(file=key.name, wrong=wrong, made=chain.clock.wall())
            place = RecordKey(chain.run, f"{attempt.folder}/repair-{uuid.uuid4().hex[:8]}.json")
            await target.commit(place, encode(note), shards=[reserved])
        except BaseException:
            await chain.mover.settled([key])
            await target.abort(reserved)
            raise
        await target.commit(own, told)
        await target.commit(manifest, commits)
        chain.catalog.add(attempt, target, files, words)
