"""How much work a failure costs: what trained since the newest checkpoint that outlives it, averaged over the run."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class Copy:
    """A checkpoint on a tier. work: of the training, when it was saved, in seconds."""

    tier: str
    order: int  # of the saves; a later one is the newer checkpoint
    work: float
    at: float
    gone: float = math.inf  # when the tier was lost


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time in which the work grew second by second: from a start, or the end of a restore, to a failure or the end."""

    begin: float
    end: float
    work: float  # at its beginning


@dataclass(frozen=True, slots=True)
class Exposure:
    """Seconds of work that a failure costs: on average over its moments, and at the worst one."""

    mean_s: float
    max_s: float


def exposure(stretches: Sequence[Stretch], copies: Sequence[Copy], tiers: Collection[str]) -> Exposure:
    """What a failure costs that only copies on `tiers` outlive. Exact: the loss is linear between commits."""
    alive = [copy for copy in copies if copy.tier in tiers]
    total = time = worst = 0.0
    for stretch in stretches:
        moments = {stretch.begin, stretch.end}
        moments |= {at for copy in alive for at in (copy.at, copy.gone) if stretch.begin < at < stretch.end}
        edges = sorted(moments)
        for begin, end in zip(edges, edges[1:], strict=False):
            there = [copy for copy in alive if copy.at <= begin and copy.gone > begin]
            base = max(there, key=lambda copy: copy.order).work if there else 0.0
            last = max(0.0, stretch.work + end - stretch.begin - base)
            first = max(0.0, last - (end - begin))
            total += (last**2 - first**2) / 2  # nothing is lost where the copy is of later work
            worst = max(worst, last)
        time += stretch.end - stretch.begin
    return Exposure(total / time if time else 0.0, worst)
