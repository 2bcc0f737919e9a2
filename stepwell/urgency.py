"""What can be in time, and so goes first: decided from sizes and measured rates, on all ranks alike."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from stepwell.edges import EdgeStatistics
from stepwell.errors import WaitTimeout
from stepwell.format.names import Attempt
from stepwell.jobs import Job, wait_for
from stepwell.tiers.base import Tier

#: how long ranks wait for each other's word on how long everything takes; then each has its own order
AGREE_S = 1.0


@dataclass(frozen=True, slots=True)
class Need:
    """A checkpoint, or some parts of it, that should get to a tier."""

    attempt: Attempt
    parts: tuple[str, ...] | None = None
    seconds: float = 0.0  # that it takes alone, as far as is known


def in_order(needs: Sequence[Need], left_s: float) -> tuple[list[Need], list[Need]]:
    """(what can be there in time, and the rest), each in the order of `needs`, which is that of their worth."""
    fits: list[Need] = []
    rest: list[Need] = []
    used_s = 0.0
    for need in needs:
        if used_s + need.seconds <= left_s:
            used_s += need.seconds
            fits.append(need)
        else:
            rest.append(need)
    return fits, rest


def rate_to(tier: Tier, edges: Sequence[EdgeStatistics]) -> float | None:
    """Bytes a second that were measured on all ways to a tier together, and its limit; None: nothing is known."""
    ways = [edge for edge in edges if edge.target == tier.info.name and edge.moved_bytes and edge.bytes_per_s > 0]
    busy_s = sum(way.moved_bytes / way.bytes_per_s for way in ways)
    known = [sum(way.moved_bytes for way in ways) / busy_s] if busy_s > 0 else []
    if tier.info.write_bytes_per_s is not None:
        known.append(tier.info.write_bytes_per_s)
    return min(known, default=None)


class Needs(msgspec.Struct):
    """How long everything takes a rank, or the slowest of all."""

    seconds: dict[str, float]  # by the flush's name, the same on all ranks
    left_s: float


async def slowest(job: Job, key: str, mine: Needs) -> Needs:
    """What all ranks go by: an order of their own each would leave half of this and half of that. The leader's word
    on what it has heard in time; this rank's own if there is none.

    key: begins the keys of this question in the job's store; used for no other.
    """
    store = job.store
    store.put(f"{key}/{job.rank}", msgspec.json.encode(mine))
    if not job.leader:
        try:
            answer = await wait_for(store, f"{key}/all", 2 * AGREE_S, "the leader's order")
        except WaitTimeout:
            return mine
        return msgspec.json.decode(answer, type=Needs)
    asked = (wait_for(store, f"{key}/{rank}", AGREE_S, f"rank {rank}'s needs") for rank in range(job.world))
    heard = [each for each in await asyncio.gather(*asked, return_exceptions=True) if isinstance(each, bytes)]
    ranks = [msgspec.json.decode(data, type=Needs) for data in heard]
    names = {name for needs in ranks for name in needs.seconds}
    longest = {name: max(needs.seconds.get(name, 0.0) for needs in ranks) for name in sorted(names)}
    agreed = Needs(longest, min(needs.left_s for needs in ranks))
    store.put(f"{key}/all", msgspec.json.encode(agreed))
    return agreed
