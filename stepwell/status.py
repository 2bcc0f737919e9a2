"""What a store can say of itself at any moment, from its books: no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stepwell.chain import Chain
from stepwell.edges import STUCK_S, EdgeStatistics
from stepwell.errors import StepwellError
from stepwell.format.names import Attempt
from stepwell.saving import SaveRecord
from stepwell.tiers.base import Tier
from stepwell.writer import RunWriter

Health = Literal["up", "stuck", "failing", "absent"]


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier. Health: `stuck` if an operation is overdue, `failing` while what failed there waits to be tried
    again, `absent` if it did not answer the last scan."""

    name: str
    driver: str
    health: Health
    detail: str  # why, if it is not up
    last_error: str | None
    newest_step: int | None  # newest checkpoint committed there
    backlog: tuple[int, ...]  # steps that must still get there
    backlog_bytes: int
    in_flight_bytes: int
    used_bytes: int
    free_bytes: int | None
    capacity_bytes: int | None
    ready_bytes: int | None  # of the host tier: memory that has been taken from the system so far
    retry_in_s: float | None


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The store as a whole."""

    run: str
    tiers: tuple[TierStatus, ...]
    edges: tuple[EdgeStatistics, ...]
    saves_failed: int
    saves_skipped: int  # given up so that training need not wait: on_pressure = "skip"
    last_error: str | None
    unsaved_seconds: float  # how long nothing that was saved has become durable; 0.0 if everything is

    def tier(self, name: str) -> TierStatus:
        return next(tier for tier in self.tiers if tier.name == name)


async def status_of(chain: Chain, writer: RunWriter, record: SaveRecord) -> StoreStatus:
    """The status now."""
    edges = tuple(edge.statistics() for edge in chain.mover.edges.all())
    tiers = tuple(_tier(chain, writer, tier, edges) for tier in chain.tiers)
    error = None if record.last_error is None else str(record.last_error)
    return StoreStatus(chain.run, tiers, edges, record.failed, record.skipped, error, record.unsaved_seconds)


def _tier(chain: Chain, writer: RunWriter, tier: Tier, edges: tuple[EdgeStatistics, ...]) -> TierStatus:
    info, usage = tier.info, tier.usage()
    flusher = writer.flushers.get(info.name)
    goals = flusher.goals if flusher is not None else []
    saves = [save for save in writer.saver.under_way if tier is chain.first and not save.failed]
    touching = [edge for edge in edges if info.name in (edge.source, edge.target)]
    oldest = max((edge.oldest_s for edge in touching if edge.target == info.name), default=0.0)
    trouble, last_error = _trouble(chain, writer, tier)
    absent = chain.catalog.absent.get(info.name)
    health: Health = "up"
    detail = ""
    if absent is not None:
        health, detail = "absent", absent
    elif oldest > STUCK_S:
        health, detail = "stuck", f"an operation has taken {oldest:.0f} s"
    elif trouble is not None:
        health, detail = "failing", str(trouble)
    held = [a.step for a in chain.catalog.newest_first() if any(h.tier is tier for h in chain.catalog.holdings[a])]
    return TierStatus(
        name=info.name,
        driver=info.driver,
        health=health,
        detail=detail,
        last_error=None if last_error is None else str(last_error),
        newest_step=max(held, default=None),
        backlog=tuple(sorted([*(goal.attempt.step for goal in goals), *(save.step for save in saves)])),
        backlog_bytes=sum(_size(chain, goal.attempt) for goal in goals) + sum(save.nbytes for save in saves),
        in_flight_bytes=sum(edge.in_flight_bytes for edge in touching),
        used_bytes=usage.physical_bytes,
        free_bytes=usage.free_bytes,
        capacity_bytes=info.capacity_bytes,
        ready_bytes=chain.host.arena.ready_bytes if tier is chain.host and chain.host is not None else None,
        retry_in_s=max(0.0, flusher.next_try_at - chain.clock.monotonic()) if flusher and flusher.failing else None,
    )


def _trouble(chain: Chain, writer: RunWriter, tier: Tier) -> tuple[StepwellError | None, StepwellError | None]:
    """(what the tier fails with now, what it failed with last)."""
    places = (writer.flushers.get(tier.info.name), writer.saver if tier is chain.first else None)
    errors = [(place.failing, place.last_error) for place in places if place is not None and place.last_error]
    failing = next((error for now, error in errors if now), None)
    return failing, failing or next((error for _, error in errors), None)


def _size(chain: Chain, attempt: Attempt) -> int:
    held = chain.catalog.holdings.get(attempt, [])
    return max((sum(h.files.values()) for h in held), default=0)
