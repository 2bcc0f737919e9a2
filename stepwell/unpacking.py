"""Restores from the GPU tier: whole shards, copied within the GPU's memory, past host memory and its slots."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stepwell.fetching import raise_failed
from stepwell.mover import Mover
from stepwell.native import Done, Job, Op
from stepwell.reading import Reading
from stepwell.tiers._calls import settle
from stepwell.tiers.base import ShardKey
from stepwell.tiers.gpu import Device, GpuTier, HeldShard


@dataclass(frozen=True, slots=True)
class Unpacking:
    """A shard on its way from GPU memory, where the tier keeps it as long."""

    reading: Reading
    tier: GpuTier
    device: Device
    held: HeldShard
    length: int  # what goes to the caller's memory
    copying: asyncio.Future[Done]


def begin(mover: Mover, reading: Reading, lengths: Mapping[int, int], keep: object = None) -> Unpacking | None:
    """Begins to copy what of a shard goes to the memory of the GPU whose tier holds all of it, in one job.

    lengths: the bytes that go to each GPU. keep: owns the memory. None if there is no such GPU.
    """
    tier, shard = mover.gpu, reading.known_as
    device = None if tier is None else tier.device
    targets = dict(reading.gpu_pieces)
    if tier is None or device is None or device.index not in targets or reading.caller.gone:
        return None
    held = tier.hold(shard, reading.size) if isinstance(shard, ShardKey) else None
    if held is None:
        return None
    job = Job(
        Op.UNPACK, length=reading.size, pieces=targets[device.index], slots=held.map,
        mark=reading.marks.get(device.index), keep=keep,
    )  # fmt: skip
    copying = _start(device, job, held)
    mover.follow(copying)
    return Unpacking(reading, tier, device, held, lengths[device.index], copying)


def _start(device: Device, job: Job, held: HeldShard) -> asyncio.Future[Done]:
    try:
        [copying] = device.across.start([job])
    except BaseException:
        held.release()
        raise
    copying.add_done_callback(lambda done: held.release())
    return copying


async def end(mover: Mover, begun: Sequence[Unpacking]) -> None:
    """Returns once all are done. Raises StepwellError if one of them failed."""
    try:
        for each in begun:  # not before: it takes longer than to begin a copy
            each.held.used()
    finally:
        await settle([each.copying for each in begun])
    for each in begun:
        gpu = mover.gpus.get(each.device.index)
        raise_failed(each.copying.result(), gpu.trouble(each.device.across))
        each.reading.healing.took(each.tier.info.name, each.length)


async def unpack(mover: Mover, reading: Reading, lengths: Mapping[int, int]) -> int | None:
    """As `begin`, to its end. Returns the GPU's index, None if there is none. Raises StepwellError if the copy
    fails."""
    begun = begin(mover, reading, lengths)
    if begun is None:
        return None
    await end(mover, [begun])
    return begun.device.index
