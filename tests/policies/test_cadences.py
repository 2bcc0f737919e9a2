"""Two cadences, with saves at odd steps, at the ends of epochs and by the clock: what goes down, and what stays."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import pytest

from stepwell.policies.base import Closing, Policy
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.policies.retain import Best, Retain
from tests.policies.core import Core

LAST, EVERY = 5, 10_000


def policies() -> list[Policy]:
    """Each 100 steps the model goes to the PFS, each 1000 all of it."""
    return [
        FlushRule("pfs", every_steps=100, parts=["model"]),
        FlushRule("pfs", every_steps=1000),
        FlushNewest("pfs"),
        Retain("nvme", last=3),
        Retain("pfs", last=LAST, every_steps=EVERY, best=[Best("eval/acc", "max", 2)]),
    ]


def by_the_clock(seed: int) -> list[int]:
    """Every 10 minutes, at 0.23 to 0.27 steps a second."""
    pace, step, found = random.Random(seed), 0.0, []
    for _ in range(150):
        step += 600 * pace.uniform(0.23, 0.27)
        found.append(int(step))
    return found


SAVES = {
    "steps 49, 99, ...": list(range(49, 12_000, 50)),
    "epochs of 1563 steps": list(range(1563, 1563 * 41, 1563)),
    "every 10 minutes": by_the_clock(1),
    "every step for a while, then rarely": [*range(180, 420), *range(5000, 30_000, 2500)],
}


def firsts(steps: Iterable[int], window: int) -> list[int]:
    found: dict[int, int] = {}
    for step in sorted(steps):
        found.setdefault(step // window, step)
    return list(found.values())


def at_once(core: Core) -> None:
    core.finish_all()


def slowly(core: Core) -> Callable[[Core], None]:
    """The flushes of a checkpoint are done three saves later."""
    waiting: list[list[tuple[str, str]]] = []

    def work(core: Core) -> None:
        waiting.append([copy for copy in core.promised if not any(copy in batch for batch in waiting)])
        if len(waiting) > 3:
            for copy in waiting.pop(0):
                if copy in core.promised:
                    core.finish(*copy)

    return work


@pytest.mark.parametrize("name", SAVES)
@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize("complete_first", [False, True])
def test_each_cadence_flushes_exactly_the_first_of_each_window(name: str, slow: bool, complete_first: bool) -> None:
    steps, rules = SAVES[name], policies()
    if complete_first:
        rules[0], rules[1] = rules[1], rules[0]
    core = Core(rules)
    work = slowly(core) if slow else at_once
    for i, step in enumerate(steps):
        core.save(step, made=600.0 * i, metrics={"eval/acc": 0.0})
        work(core)
        if core.sent("pfs", "optimizer"):
            assert core.on("pfs"), "once there was a complete one on the last tier there always is one"
    core.finish_all()
    assert core.sent("pfs", "optimizer") == firsts(steps, 1000)
    assert core.sent("pfs", "model") == sorted({*firsts(steps, 100), *firsts(steps, 1000)})
    passed = [step for step in steps if step < (steps[0] // 1000 + 1) * 1000]
    assert core.on("pfs") and core.sent("pfs", "optimizer")[0] == passed[0]

    core.happen(Closing())
    core.finish_all()
    assert core.on("pfs")[-1] == steps[-1], "at closing the newest is on the last tier"


@pytest.mark.parametrize("name", SAVES)
def test_what_stays_is_what_the_config_says(name: str) -> None:
    steps, core = SAVES[name], Core(policies())
    for step in steps:
        core.save(step, metrics={"eval/acc": -abs(step - steps[len(steps) // 2])})
        core.finish_all()
    whole = firsts(steps, 1000)
    best = sorted(whole, key=lambda step: (abs(step - steps[len(steps) // 2]), -step))[:2]
    assert core.on("pfs") == sorted({*whole[-LAST:], *firsts(whole, EVERY), *best})
    assert core.on("nvme") == steps[-3:]


@pytest.mark.parametrize("name", SAVES)
def test_windows_of_time_flush_the_first_of_each_although_the_clock_jumps(name: str) -> None:
    """Saves 10 minutes apart, a window an hour; the clock is set back by two hours, later on by a day and a half."""
    core, shift, begun = Core([FlushRule("pfs", every_s=3600), Retain("nvme", last=2)]), 0, list[int]()
    before = None
    for i, step in enumerate(SAVES[name]):
        shift += {40: -7200, 90: -129_600}.get(i, 0)
        made = 1_000_000 + 600 * i + shift
        if made // 3600 != before:
            before = made // 3600
            begun.append(step)
        core.save(step, made=made)
        core.finish_all()
    assert core.sent("pfs", "model") == begun


@pytest.mark.parametrize("seed", range(20))
def test_crashes_make_no_other_than_the_first_of_a_window_go_down(seed: int) -> None:
    rng, core, steps = random.Random(seed), Core(policies()), SAVES["steps 49, 99, ..."][:120]
    for step in steps:
        core.save(step, metrics={"eval/acc": rng.random()})
        if rng.random() < 0.3:
            core.restart()
        while core.promised and rng.random() < 0.5:
            core.finish(*rng.choice(sorted(core.promised)))
    core.restart()
    core.finish_all()
    assert set(core.sent("pfs", "optimizer")) <= set(firsts(steps, 1000))
    assert core.sent("pfs", "optimizer")[-1] == firsts(steps, 1000)[-1]
    assert core.sent("pfs", "model")[-1] == firsts(steps, 100)[-1]
