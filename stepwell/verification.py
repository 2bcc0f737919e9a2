"""Before the last copy above goes: is the copy below really good? (`verify_after_flush`)"""

from __future__ import annotations

import logging

from stepwell import native
from stepwell.chain import Chain
from stepwell.errors import CorruptData, StepwellError, TierError
from stepwell.events import EventLog
from stepwell.format.names import Attempt
from stepwell.format.records import Manifest, RankRecord
from stepwell.mending import Mender
from stepwell.reader import read_record
from stepwell.reading import Healing
from stepwell.tiers.base import CheckpointKey, ShardKey, Tier

log = logging.getLogger("stepwell")


class Verifier:
    """Checks copies that a flush has made, each once. Lives on the event loop."""

    def __init__(self, chain: Chain, mender: Mender, events: EventLog) -> None:
        self._chain, self._mender, self._events = chain, mender, events
        self._good: dict[tuple[Attempt, str], Manifest] = {}  # of which copy: a flush may bring more parts later

    async def repair(self) -> None:
        """Writes again what was found bad."""
        await self._mender.mend()

    async def check_below(self, attempt: Attempt, tier: Tier) -> None:
        """Before the copy on `tier` is deleted. Raises StepwellError if it is the last one above a copy that is bad,
        which is then repaired from it."""
        chain = self._chain
        at = chain.storage.index(tier) if tier in chain.storage else 0
        while True:  # while one is checked another may be made
            holders = [h.tier for h in chain.catalog.holdings.get(attempt, []) if h.tier in chain.storage]
            if any(chain.storage.index(holder) < at for holder in holders):
                return  # there is another one above
            unsure = [
                holder
                for holder in holders
                if chain.storage.index(holder) > at
                and chain.option(holder).verify_after_flush is not None
                and not self._is_good(attempt, holder)
            ]
            if not unsure:
                return
            await self._check(attempt, unsure[0])

    def _is_good(self, attempt: Attempt, tier: Tier) -> bool:
        good = self._good.get((attempt, tier.info.name))
        return good is not None and good is self._chain.catalog.known_manifest(attempt, tier)

    async def _check(self, attempt: Attempt, tier: Tier) -> None:
        chain, began = self._chain, self._chain.clock.monotonic()
        manifest = await chain.catalog.manifest(attempt, tier)
        chain.catalog.begin_reading(attempt)  # no other copy goes meanwhile
        try:
            for rank in manifest.covers:
                record, _ = await read_record(chain.catalog, attempt, rank, Healing())
                await self._check_rank(attempt, tier, record, record.files_of(manifest.parts))
        finally:
            chain.catalog.end_reading(attempt)
        if manifest is not chain.catalog.known_manifest(attempt, tier):
            return  # it has been replaced meanwhile
        self._good[attempt, tier.info.name] = manifest
        self._events.add("verified", attempt, tier.info.name, seconds=chain.clock.monotonic() - began)

    async def _check_rank(self, attempt: Attempt, tier: Tier, record: RankRecord, files: set[str]) -> None:
        chain, name = self._chain, tier.info.name
        whole = chain.option(tier).verify_after_flush == "digest"
        for shard in record.shards:
            if shard.file not in files:
                continue
            key = ShardKey(CheckpointKey(chain.run, attempt.folder), shard.file)
            # the last block of a file that is not as long as it should be cannot be read
            first = 0 if whole else (shard.size - 1) // native.BLOCK_BYTES * native.BLOCK_BYTES
            try:
                await chain.mover.verify([tier], key, shard.size, shard.crcs(), first=first)
            except (CorruptData, TierError) as error:
                self._mender.note({(name, key): str(error)}, record)
                raise StepwellError(
                    f"the copy on {name} is bad, so the one above it stays: {error}", step=attempt.step, tier=name
                ) from error
