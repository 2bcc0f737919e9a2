"""Checkpoints brought up to the GPU tier, for models that are to be there at once: whole parts, committed there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from stepwell.chain import Chain, reserve
from stepwell.commit import manifest_of
from stepwell.format.names import MANIFEST, Attempt, rank_file
from stepwell.format.records import encode
from stepwell.jobs import Job
from stepwell.prefetching import Moving
from stepwell.reader import open_checkpoint, read_record
from stepwell.reading import Healing, Reading
from stepwell.tiers.base import CheckpointKey, RecordKey, Reservation, Tier
from stepwell.tiers.gpu import GpuTier
from stepwell.tiers.host import Priority


@dataclass(slots=True)
class _Left:
    """How much is still to come."""

    left_bytes: int | None

    def there(self, size_bytes: int) -> None:
        self.left_bytes = (self.left_bytes or 0) - size_bytes


async def to_gpu(
    chain: Chain, gpu: GpuTier, attempt: Attempt, job: Job, parts: Sequence[str] | None,
    on_try: Callable[[Moving], object],
) -> None:  # fmt: skip
    """Copies this rank's part of a checkpoint, or some parts of it, to GPU memory, verified, and commits it there.

    Raises TierFull if there is no room, TierUnavailable without a GPU, and what reading raises.
    """
    catalog, rank = chain.catalog, job.rank
    if await _has(chain, gpu, attempt, parts):
        return
    opened = await open_checkpoint(catalog, attempt, rank, job.world, parts)
    reserved: list[Reservation] = []
    try:
        _, data = await read_record(catalog, attempt, rank, Healing())
        key = CheckpointKey(catalog.run, attempt.folder)
        await gpu.drop([key])  # other parts of it: a copy is committed as one
        catalog.remove(attempt, gpu)
        sizes = [(held.key, held.shard.size) for held in opened.held]
        reserved = await reserve(gpu, sizes)
        left = _Left(sum(size for _, size in sizes))
        on_try(left)
        for held in opened.held:
            below: list[Tier] = [tier for tier in held.tiers if tier is not gpu]
            reading = Reading(
                held.key, below, held.shard.crcs(), opened.healing, Priority.PREFETCH, target=gpu.info.name,
                caller=opened.caller,
            )  # fmt: skip
            await chain.mover.copy(reading, gpu, held.shard.size, on_there=left.there)
        absent = [] if parts is None else sorted(set(opened.record.parts) - set(parts))
        manifest = manifest_of(attempt, {rank: data}, absent)
        await gpu.commit(RecordKey(catalog.run, f"{attempt.folder}/{rank_file(rank)}"), data)
        await gpu.commit(RecordKey(catalog.run, f"{attempt.folder}/{MANIFEST}"), encode(manifest), shards=reserved)
        gpu.clean(key)
        catalog.add(attempt, gpu, {shard.name: size for shard, size in sizes}, manifest)
        reserved = []
    finally:
        for reservation in reserved:
            await gpu.abort(reservation)
        await opened.close()


async def _has(chain: Chain, gpu: GpuTier, attempt: Attempt, parts: Sequence[str] | None) -> bool:
    """Whether these parts (None: all) are there."""
    if not any(holding.tier is gpu for holding in chain.catalog.holdings.get(attempt, [])):
        return False
    absent = set((await chain.catalog.manifest(attempt, gpu)).absent)
    return not (absent if parts is None else absent & set(parts))
