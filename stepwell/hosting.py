"""Room in host memory for a save, and what is said where there is none."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.errors import NotPlanned, TierFull
from stepwell.saving import Save
from stepwell.shardjob import ShardJob
from stepwell.tiers.base import Refused, Reservation, Tier
from stepwell.tiers.host import HostTier
from stepwell.units import format_bytes


async def try_reserve(tier: Tier, jobs: Sequence[ShardJob]) -> list[Reservation] | Refused:
    """Room for all shards, or none and why."""
    granted: list[Reservation] = []
    for job in jobs:
        answer = await tier.reserve(job.key, job.size)
        if isinstance(answer, Refused):
            for reservation in granted:
                await tier.abort(reservation)
            return answer
        granted.append(answer)
    return granted


def _needed_bytes(host: HostTier, jobs: Sequence[ShardJob]) -> int:
    slot = host.arena.slot_bytes
    return sum(-(-job.size // slot) * slot for job in jobs)


def has_room(host: HostTier, jobs: Sequence[ShardJob]) -> bool:
    """Whether all shards can be kept beside what only memory has, and what saves under way were promised."""
    awaited_bytes = host.awaited_slots * host.arena.slot_bytes  # what has come of their promises is kept already
    return _needed_bytes(host, jobs) <= host.arena.keepable_bytes - awaited_bytes


def said_of(host: HostTier, jobs: Sequence[ShardJob]) -> str:
    """The numbers, in words."""
    needed, free = format_bytes(_needed_bytes(host, jobs)), format_bytes(host.arena.keepable_bytes)
    return f"{needed} needed, {free} of the arena's {format_bytes(host.arena.capacity_bytes)} can be kept"


def not_hosted(save: Save, tier: Tier, why: str) -> None:
    """The checkpoint only passes through: waits for it in this memory end."""
    name, kind = tier.info.name, tier.info.driver
    save.not_planned(name, NotPlanned(
        f"the checkpoint does not stay in {'GPU' if kind == 'gpu' else kind} memory: {why}",
        todo=f"Give the {kind} tier more memory, or wait for another tier", step=save.step, tier=name,
    ))  # fmt: skip


def no_memory(step: int, detail: str = "the system has less than was promised") -> TierFull:
    """What a save fails with that was to stay in memory."""
    return TierFull(
        f"the checkpoint was to stay in host memory, which has no room for it: {detail}",
        todo="Give the host tier room for three checkpoints, or let more of them go down (flush)", step=step,
    )  # fmt: skip
