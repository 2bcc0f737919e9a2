"""Planned intervals and overheads: against the closed forms of one level, and against simulated failures of several."""

from __future__ import annotations

import dataclasses
import math
import random
from pathlib import Path

import pytest

from stepwell.errors import ConfigError
from stepwell.lab.plan import BUSY_MAX, Level, Plan, daly_s, levels_of, make_plan, young_s
from tests.lab.helpers import GB, HOST, MEMORY, NVME, PFS, SPEEDS, config

HOUR, DAY = 3600.0, 86400.0
NVME_LEVEL = Level("nvme", "reboot", cost_s=2.0, flush_s=40.0, lag_s=40.0, read_s=30.0, always=True)
PFS_LEVEL = Level("pfs", "node-loss", cost_s=6.0, flush_s=300.0, lag_s=340.0, read_s=200.0)


def failing(plan: Plan, iteration_s: float, restart_s: float, rng: random.Random, work_s: float) -> float:
    """Wall time of `work_s` of training that saves as planned and fails by chance; time without it is `work_s`."""
    step_s = plan.every_steps * iteration_s
    windows = {each.tier: (each.steps or 0) // plan.every_steps for each in plan.intervals}
    levels = {level.name: level for level in plan.levels}
    slow_s = sum(level.cost_s / windows[level.name] for level in plan.levels[1:])  # of flushes, spread over the saves
    due = {each.kind: rng.expovariate(1 / each.between_s) for each in plan.failures}
    copies: dict[str, list[tuple[float, float]]] = {name: [(0.0, 0.0)] for name in levels}  # (durable at, work)
    now = done = 0.0
    number = 0
    while done < work_s:
        end = now + step_s + plan.levels[0].cost_s + slow_s
        kind = min(due, key=lambda each: due[each])
        if due[kind] < end:
            now = due[kind]
            left = list(levels)[list(levels).index(_tier(plan, kind)) :]
            copies = {
                name: [copy for copy in there if copy[0] <= now and name in left] or [(0.0, 0.0)]
                for name, there in copies.items()
            }
            done = max(copy[1] for there in copies.values() for copy in there)
            now += restart_s + levels[_tier(plan, kind)].read_s
            due = {each: at if at > now else now + rng.expovariate(1 / _mean(plan, each)) for each, at in due.items()}
            continue
        called = end - plan.levels[0].cost_s
        now, done, number = end, done + step_s, number + 1
        for name, level in levels.items():
            if number % windows[name] == 0:
                copies[name].append((called + level.lag_s, done))
            while len(copies[name]) > 1 and copies[name][1][0] <= now:
                del copies[name][0]
    return now


def _tier(plan: Plan, kind: str) -> str:
    tier = next(each.tier for each in plan.failures if each.kind == kind)
    assert tier is not None
    return tier


def _mean(plan: Plan, kind: str) -> float:
    return next(each.between_s for each in plan.failures if each.kind == kind)


def overhead(plan: Plan, iteration_s: float, restart_s: float = 60.0, work_s: float = 600 * DAY) -> float:
    return failing(plan, iteration_s, restart_s, random.Random(7), work_s) / work_s - 1


@pytest.mark.parametrize(("cost_s", "between_s"), [(1.0, HOUR), (5.0, HOUR), (0.5, DAY), (30.0, DAY)])
def test_of_one_level_it_is_what_young_and_daly_say(cost_s: float, between_s: float) -> None:
    level = Level("disk", "reboot", cost_s, flush_s=0.0, lag_s=0.0, read_s=0.0)
    plan = make_plan([level], 0.01, {"process": between_s}, restart_s=0.0)
    work_s = plan.every_steps * 0.01
    assert work_s == pytest.approx(daly_s(cost_s, between_s), rel=0.02)
    assert work_s == pytest.approx(young_s(cost_s, between_s), rel=0.05)
    exact = math.exp((work_s + cost_s) / between_s)  # Daly's time for the same work, without a restart
    assert plan.overhead == pytest.approx(between_s * (exact - 1) / work_s - 1, rel=0.02)


def test_a_checkpoint_that_costs_more_than_two_failures_apart() -> None:
    assert daly_s(21.0, 10.0) == 10.0


def test_several_levels_cost_what_simulated_failures_cost() -> None:
    plan = make_plan([NVME_LEVEL, PFS_LEVEL], 1.2, {"process": 4 * HOUR, "node-loss": DAY})
    assert overhead(plan, 1.2) == pytest.approx(plan.overhead, rel=0.05)
    assert plan.saving + plan.losing + plan.recovering == pytest.approx(plan.overhead, rel=0.05)


def test_other_intervals_cost_more_also_in_simulated_failures() -> None:
    plan = make_plan([NVME_LEVEL, PFS_LEVEL], 1.2, {"process": 4 * HOUR, "node-loss": DAY})
    best = overhead(plan, 1.2, work_s=150 * DAY)
    nvme, pfs = plan.intervals
    assert pfs.steps is not None
    for factor in (0.3, 3.0):
        steps = round(plan.every_steps * factor)
        other = dataclasses.replace(
            plan,
            intervals=[
                dataclasses.replace(nvme, steps=steps),
                dataclasses.replace(pfs, steps=steps * (pfs.steps // plan.every_steps)),
            ],
        )
        assert overhead(other, 1.2, work_s=150 * DAY) > best * 1.1


def test_rarer_failures_and_dearer_checkpoints_are_saved_for_less_often() -> None:
    def every(levels: list[Level], mean_s: float) -> list[int]:
        plan = make_plan(levels, 1.0, {"process": mean_s, "node-loss": 10 * mean_s})
        return [interval.steps or 0 for interval in plan.intervals]

    usual = every([NVME_LEVEL, PFS_LEVEL], DAY)
    assert all(rare > often for rare, often in zip(every([NVME_LEVEL, PFS_LEVEL], 9 * DAY), usual, strict=True))
    dear = [dataclasses.replace(NVME_LEVEL, cost_s=20.0), dataclasses.replace(PFS_LEVEL, cost_s=60.0)]
    assert all(more > less for more, less in zip(every(dear, DAY), usual, strict=True))


def test_no_interval_is_shorter_than_the_flush() -> None:
    free = dataclasses.replace(PFS_LEVEL, cost_s=0.0)
    plan = make_plan([NVME_LEVEL, free], 1.0, {"process": 600.0, "node-loss": 3600.0}, restart_s=0.0)
    for interval, level in zip(plan.intervals, plan.levels, strict=True):
        assert interval.seconds is not None and interval.seconds >= level.flush_s / BUSY_MAX
        assert interval.busy <= BUSY_MAX
    assert plan.intervals[1].bound


def test_a_kind_of_failure_that_no_tier_outlives_is_told_and_not_reckoned() -> None:
    plan = make_plan([NVME_LEVEL], 1.0, {"process": DAY, "node-loss": DAY})
    assert {each.kind: each.tier for each in plan.failures} == {"process": "nvme", "node-loss": None}
    alone = make_plan([NVME_LEVEL], 1.0, {"process": DAY})
    assert (plan.overhead, plan.every_steps) == (alone.overhead, alone.every_steps)
    with pytest.raises(ConfigError, match="no tier outlives these failures: node-loss"):
        make_plan([NVME_LEVEL], 1.0, {"node-loss": DAY})
    with pytest.raises(ConfigError, match="--failure"):
        make_plan([NVME_LEVEL], 1.0, {})


def test_a_tier_that_no_failure_needs_gets_the_newest_at_the_end() -> None:
    plan = make_plan([NVME_LEVEL, PFS_LEVEL], 1.0, {"process": DAY})
    assert (plan.intervals[1].steps, plan.intervals[1].busy) == (None, 0.0)
    assert plan.overhead == make_plan([NVME_LEVEL], 1.0, {"process": DAY}).overhead


def test_without_failures_of_processes_all_saves_are_for_the_tier_that_outlives_the_node() -> None:
    plan = make_plan([NVME_LEVEL, PFS_LEVEL], 1.0, {"node-loss": DAY})
    assert plan.intervals[0].steps == plan.intervals[1].steps
    assert plan.every_steps == pytest.approx(math.sqrt(2 * 8.0 * DAY), rel=0.05)


def test_failures_that_come_too_fast_are_refused() -> None:
    with pytest.raises(ConfigError, match="faster than training can recover"):
        make_plan([NVME_LEVEL], 1.0, {"process": 60.0})


def test_what_a_save_costs_is_the_copy_and_not_the_flush(tmp_path: Path) -> None:
    def levels(*tiers: str) -> list[Level]:
        return levels_of(
            config(tmp_path, *tiers), SPEEDS, 4 * GB, ranks=2, memory_bytes=MEMORY, interference=0.01
        )  # fmt: skip

    nvme, pfs = levels(HOST, NVME, PFS)
    assert nvme.cost_s == pytest.approx(0.25)  # each rank copies its half, at 8 GB/s
    assert (nvme.flush_s, nvme.lag_s, nvme.read_s) == (2.0, 2.0, 1.0)
    assert (pfs.flush_s, pfs.lag_s, pfs.read_s) == (8.0, 10.0, 4.0)
    assert pfs.cost_s == pytest.approx(0.08)
    waves, _ = levels(HOST.replace("8GiB", "2GiB"), NVME, PFS)
    assert waves.cost_s == 2.0
    limited = levels(HOST, NVME, PFS + 'bandwidth = "100MB/s"\n')[1]
    assert limited.flush_s == pytest.approx(40.0)


def test_shared_host_memory_is_a_level_of_its_own(tmp_path: Path) -> None:
    shared = config(tmp_path, HOST + "shared = true\n", NVME, PFS)
    levels = levels_of(shared, SPEEDS, 4 * GB, ranks=1, memory_bytes=MEMORY, interference=0.01)
    assert [(level.name, level.survives, level.always) for level in levels] == [
        ("host", "process", True), ("nvme", "reboot", True), ("pfs", "node-loss", False),
    ]  # fmt: skip
    plan = make_plan(levels, 1.0, {"process": DAY, "node-loss": 9 * DAY})
    assert plan.failures[0].tier == "host"
    assert plan.intervals[0].steps == plan.intervals[1].steps
    assert plan.blocked_s == pytest.approx(0.5)
