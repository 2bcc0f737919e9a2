"""How often to save, and how often to flush to each tier: intervals by a multi-level model of failures.

The model. A save blocks training for a moment; all else happens beside it. So what a checkpoint costs on the first tier
is the time that `save` blocks, not the time until it is durable, and on a further tier what training slows down while
the flush runs (`interference` of the flush's time). What flushing takes bounds the interval from below: more often than
one flush after the other cannot be kept. A failure of a kind is recovered from the nearest tier whose copies outlive
it. It costs the work since the newest copy there (half an interval, on average, and the time that a copy takes to get
there), the restart and the restore. With costs c_i for each checkpoint on tier i, intervals T_i, and rates r_j of the
failures that are recovered from tier i(j) with its lag l and the recovery R:

    time / work = (1 + sum c_i / T_i) / (1 - sum r_j (T_i(j) / 2 + l_i(j) + R_j))

For one level and l = R = 0 its minimum is at T = sqrt(2 c M) to first order, M = 1 / r (Young); Daly has higher orders,
which `daly_s` gives; the minimum here agrees with them while c is much below M. With several levels each tier's
interval follows its own cost and its own failures, T_i = sqrt(2 c_i / r_i), as in Di et al., in whole multiples of the
interval of saves, which is the pattern of Moody et al.

- J. W. Young. A first order approximation to the optimum checkpoint interval. CACM 17(9), 1974.
- J. T. Daly. A higher order estimate of the optimum checkpoint interval for restart dumps. FGCS 22(3), 2006.
- A. Moody, G. Bronevetsky, K. Mohror, B. R. de Supinski. Design, modeling, and evaluation of a scalable multi-level
  checkpointing system. SC 2010.
- S. Di, M. S. Bouguerra, L. Bautista-Gomez, F. Cappello. Optimization of multi-level checkpoint model for large scale
  HPC applications. IPDPS 2014.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from stepwell.config import Config
from stepwell.errors import ConfigError
from stepwell.lab.observed import STRENGTHS
from stepwell.lab.setup import host_bytes, simulated, survives_of
from stepwell.lab.speeds import Speeds
from stepwell.tiers.base import Survives

#: how much of the time a flush may be under way; the rest is for restores, retries and slower days
BUSY_MAX = 0.8
#: steps between saves that are tried: so many in even proportions, and again so many around the best of them
_TRIED = 400
#: of a host tier, what checkpoints may take; the rest is for staging
_KEPT_SHARE = 7 / 8
#: in place of how many saves go by between two flushes: only the last one is flushed, since no failure needs more
AT_CLOSE = 0


@dataclass(frozen=True, slots=True)
class Level:
    """A tier as the model sees it. lag_s: from `save` to the commit there; flush_s: of that, the last leg; always:
    it gets every save."""

    name: str
    survives: Survives
    cost_s: float
    flush_s: float
    lag_s: float
    read_s: float
    always: bool = False


@dataclass(frozen=True, slots=True)
class Failures:
    """Mean seconds between failures of one kind, and which tier they are recovered from (None: from none)."""

    kind: str
    between_s: float
    tier: str | None


@dataclass(frozen=True, slots=True)
class Interval:
    """For one tier: a checkpoint each `steps` steps, `seconds` apart; bound: the flush takes as long. None: no failure
    is recovered from this tier alone, so that the newest one at the end will do."""

    tier: str
    steps: int | None
    seconds: float | None
    bound: bool
    busy: float  # of the time, what the way there is busy


@dataclass(frozen=True, slots=True)
class Plan:
    """What is recommended. overhead: of the time without saves and failures; its parts add up to it to first order."""

    intervals: list[Interval]  # the first is that of `save`
    overhead: float
    saving: float  # of it: blocked, and slowed down
    losing: float  # of it: lost work
    recovering: float  # of it: restarts and restores
    blocked_s: float  # of one save
    failures: list[Failures]
    levels: list[Level]

    @property
    def every_steps(self) -> int:
        steps = self.intervals[0].steps
        assert steps is not None
        return steps


def levels_of(
    config: Config, speeds: Speeds, state_bytes: int, *, ranks: int, memory_bytes: int, interference: float
) -> list[Level]:
    """The tiers whose copies outlive something, with a state of so many bytes on this node, of all its ranks together.

    Raises ConfigError if the speed of a tier is not known.
    """
    config, part = simulated(config), state_bytes / ranks
    hosts = [tier for tier in config.tiers if tier.driver == "host"]
    storage = [tier for tier in config.tiers if tier.driver != "host"]
    kept = bool(hosts) and host_bytes(hosts[0], ranks, memory_bytes, int(part)) * _KEPT_SHARE >= part
    blocked, lag = part / speeds.copy_bytes_per_s, 0.0
    made: list[Level] = []
    for number, tier in enumerate(storage):
        speed = speeds.of(tier.name)
        limits = [speed.write_bytes_per_s, *(each for each in (tier.bandwidth, tier.bandwidth_per_job) if each)]
        flush = state_bytes / min(limits) + speed.record_s
        lag = lag + flush if number else max(flush, blocked)  # there copying and writing overlap, chunk by chunk
        cost = interference * flush if number else blocked if kept else lag
        read = state_bytes / speed.read_bytes_per_s + speed.record_s
        made.append(Level(tier.name, survives_of(tier), cost, flush, lag, read, always=not number))
    if kept and hosts[0].shared:  # it costs what `save` blocks, and the tier below it nothing more
        host = Level(hosts[0].name, survives_of(hosts[0]), blocked, blocked, blocked, blocked, always=True)
        made = [host, replace(made[0], cost_s=0.0), *made[1:]]
    return made


def make_plan(
    levels: Sequence[Level], iteration_s: float, between_s: Mapping[str, float], *, restart_s: float = 60.0
) -> Plan:
    """The intervals with the least expected time for the same work. levels: nearest first, as `levels_of` gives them.

    between_s: mean seconds between failures, by what a copy must survive to be there ("process", "reboot",
    "node-loss"). Raises ConfigError if no plan can keep up with failures, or no tier outlives any of them.
    """
    failures = [Failures(kind, mean, _recovered_from(levels, kind)) for kind, mean in between_s.items()]
    if all(each.tier is None for each in failures):
        kinds = ", ".join(each.kind for each in failures) or "none"
        raise ConfigError(f"no tier outlives these failures: {kinds}", todo="Say which there are: --failure process=2d")

    def best_of(tried: Iterable[int]) -> tuple[float, int, tuple[int, ...]]:
        return min(
            (_time(levels, failures, _seconds(levels, steps * iteration_s, windows), restart_s), steps, windows)
            for steps in tried
            for windows in _windows(levels, failures, steps * iteration_s)
        )

    coarse = _tried(levels, iteration_s)
    at = coarse.index(best_of(coarse)[1])
    low, high = coarse[max(0, at - 1)], coarse[min(at + 1, len(coarse) - 1)]
    best = best_of({*range(low, high + 1, max(1, (high - low) // _TRIED)), coarse[at]})
    if not math.isfinite(best[0]):
        raise ConfigError("failures come faster than training can recover", todo="See --restart, and the tiers' speeds")
    return _told(levels, failures, iteration_s, restart_s, best)


def _recovered_from(levels: Sequence[Level], kind: str) -> str | None:
    order = [str(each) for each in STRENGTHS]
    strong = (level.name for level in levels if STRENGTHS.index(level.survives) >= order.index(kind))
    return next(strong, None)


def _least_s(level: Level) -> float:
    return level.flush_s / BUSY_MAX


def _tried(levels: Sequence[Level], iteration_s: float) -> list[int]:
    """Steps between two saves: some one by one, then in even proportions, from what can be kept on."""
    least_s = max(_least_s(level) for level in levels if level is levels[0] or level.always)
    least = max(1, math.ceil((least_s - levels[0].cost_s) / iteration_s))
    most = max(least + 1, math.ceil(30 * 86400 / iteration_s))
    ratio = (most / least) ** (1 / _TRIED)
    return sorted({*range(least, least + 64), *(round(least * ratio**power) for power in range(_TRIED))})


def _windows(levels: Sequence[Level], failures: Sequence[Failures], save_s: float) -> list[tuple[int, ...]]:
    """For each tier below the first: one checkpoint of how many saves. The two nearest to its own optimum, together
    with those of the other tiers."""
    interval_s = save_s + levels[0].cost_s
    choices: list[list[int]] = []
    for level in levels[1:]:
        if level.always:
            choices.append([1])
            continue
        rate = sum(1 / each.between_s for each in failures if each.tier == level.name)
        least = max(1, math.ceil(_least_s(level) / interval_s))
        if not rate:
            choices.append([AT_CLOSE])
            continue
        wanted = math.sqrt(2 * level.cost_s / rate) / interval_s
        choices.append(sorted({max(least, math.floor(wanted)), max(least, math.ceil(wanted))}))
    return list(itertools.product(*choices))


def _seconds(levels: Sequence[Level], save_s: float, windows: Sequence[int]) -> list[float]:
    """The interval of each tier, with what `save` blocks in it."""
    interval_s = save_s + levels[0].cost_s
    return [interval_s, *(math.inf if window == AT_CLOSE else window * interval_s for window in windows)]


def _shares(
    levels: Sequence[Level], failures: Sequence[Failures], intervals: Sequence[float], restart_s: float
) -> tuple[float, float, float]:
    """(saving, losing, recovering): the model's sums. Costs are per second of work, the others per second."""
    work_s = intervals[0] - levels[0].cost_s
    saving = levels[0].cost_s / work_s
    for level, interval in zip(levels[1:], intervals[1:], strict=True):
        saving += level.cost_s / interval * (intervals[0] / work_s)
    losing = recovering = 0.0
    for level, interval in zip(levels, intervals, strict=True):
        rate = sum(1 / each.between_s for each in failures if each.tier == level.name)
        losing += rate * (interval / 2 + level.lag_s) if rate else 0.0
        recovering += rate * (restart_s + level.read_s)
    return saving, losing, recovering


def _time(levels: Sequence[Level], failures: Sequence[Failures], intervals: Sequence[float], restart_s: float) -> float:
    """Expected time for each second of work; infinite where failures come faster than it goes on."""
    saving, losing, recovering = _shares(levels, failures, intervals, restart_s)
    return (1 + saving) / (1 - losing - recovering) if losing + recovering < 1 else math.inf


def _told(
    levels: Sequence[Level], failures: Sequence[Failures], iteration_s: float, restart_s: float,
    best: tuple[float, int, tuple[int, ...]],
) -> Plan:  # fmt: skip
    time, steps, windows = best
    seconds = _seconds(levels, steps * iteration_s, windows)
    told = []
    for level, interval, window in zip(levels, seconds, (1, *windows), strict=True):
        if window == AT_CLOSE:
            told.append(Interval(level.name, None, None, False, 0.0))
            continue
        bound = interval - seconds[0] < _least_s(level) if window > 1 else interval - iteration_s < _least_s(level)
        told.append(Interval(level.name, steps * window, interval, bound, level.flush_s / interval))
    saving, losing, recovering = _shares(levels, failures, seconds, restart_s)
    return Plan(
        told, time - 1, saving, losing, recovering, levels[0].cost_s, [*failures], [*levels]
    )  # fmt: skip


# -- one level ---------------------------------------------------------------------------


def young_s(cost_s: float, between_s: float) -> float:
    """Young 1974: work between two checkpoints, to first order."""
    return math.sqrt(2 * cost_s * between_s)


def daly_s(cost_s: float, between_s: float) -> float:
    """Daly 2006, equation 37: work between two checkpoints, to higher order; `between_s` if a checkpoint costs more
    than twice of it."""
    if cost_s >= 2 * between_s:
        return between_s
    ratio = cost_s / (2 * between_s)
    return math.sqrt(2 * cost_s * between_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s
