"""Restores from the GPU tier: whole shards, copied within the GPU's memory, past host memory and its slots."""

from __future__ import annotations

from collections.abc import Mapping

from stepwell.fetching import raise_failed
from stepwell.mover import Mover
from stepwell.native import Job, Op
from stepwell.reading import Reading
from stepwell.tiers._calls import settle
from stepwell.tiers.base import ShardKey


async def unpack(mover: Mover, reading: Reading, lengths: Mapping[int, int]) -> int | None:
    """Copies what of a shard goes to the memory of the GPU whose tier holds all of it, in one job.

    lengths: the bytes that go to each GPU. Returns the GPU's index, None if there is none. Raises StepwellError if the
    copy fails.
    """
    tier, shard = mover.gpu, reading.known_as
    device = None if tier is None else tier.device
    targets = dict(reading.gpu_pieces)
    if tier is None or device is None or device.index not in targets or reading.caller.gone:
        return None
    held = tier.hold(shard, reading.size) if isinstance(shard, ShardKey) else None
    if held is None:
        return None
    try:
        job = Job(
            Op.UNPACK, length=reading.size, pieces=targets[device.index], slots=held.map,
            mark=reading.marks.get(device.index),
        )  # fmt: skip
        [copying] = device.across.start([job])
        mover.follow(copying)
        await settle([copying])
        gpu = mover.gpus.get(device.index)
        raise_failed(copying.result(), gpu.trouble(device.across))
    finally:
        held.release()
    reading.healing.took(tier.info.name, lengths[device.index])
    return device.index
