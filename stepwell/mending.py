"""Repair: shards that a restore found bad on a tier are written again from a tier with good bytes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping

from stepwell.chain import Chain, reserve
from stepwell.errors import StepwellError
from stepwell.format.names import Attempt
from stepwell.format.records import RankRecord, Repair, encode
from stepwell.mover import Healing, Reading
from stepwell.tiers.base import RecordKey, ShardKey
from stepwell.tiers.host import Priority

log = logging.getLogger("stepwell")

Bad = Mapping[tuple[str, ShardKey], str]  # (tier, shard) -> what was wrong


class Mender:
    """Only the run's writer may repair, so what is noted before it has taken the run over waits for that."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
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
        for (name, key), wrong in bad.items():
            target = chain.named(name)
            sources = [h.tier for h in chain.catalog.holdings[attempt] if h.tier is not target]
            shard = next(s for s in record.shards if s.file == key.name)
            if target.info.read_only or target is chain.host or not sources:
                continue
            # the bad file may hold the only good bytes of a block that is bad elsewhere: it goes only after
            # every block of the other copies was found good
            await chain.mover.verify(sources, key, shard.size, shard.crcs())
            await target.drop([key])
            [reserved] = await reserve(target, [(key, shard.size)])
            try:
                reading = Reading(key, sources, shard.crcs(), Healing(), Priority.FLUSH, target=name)
                await chain.mover.copy(reading, target, shard.size)
                note = Repair(file=key.name, wrong=wrong, made=chain.clock.wall())
                place = RecordKey(chain.run, f"{attempt.folder}/repair-{uuid.uuid4().hex[:8]}.json")
                await target.commit(place, encode(note), shards=[reserved])
            except BaseException:
                await chain.mover.settled([key])
                await target.abort(reserved)
                raise
            log.warning("%s on tier %s was bad and has been written again", key, name)
