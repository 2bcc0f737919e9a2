"""What stays on a tier: each rule by examples, the cases of real life, then unions against their own words."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.policies.base import CheckpointView, Closing, Committed, Noted, Opened, View
from stepwell.policies.retain import Best, Retain
from stepwell.promises import refusal
from tests.policies.views import TIERS, checkpoint, view, views


def dropped(policy: Retain, seen: View) -> list[str]:
    moves = policy.decide(Opened(), seen)
    assert all(move.tier == policy.tier and move.reason and move.policy for move in moves)
    return [move.checkpoint for move in moves]


def steps(policy: Retain, seen: View) -> list[int]:
    return sorted(c.step for c in seen.checkpoints if c.name in dropped(policy, seen))


# -- the last ones -----------------------------------------------------------------------------------


def test_the_newest_stay_by_step_whatever_their_names_and_order() -> None:
    numbers = [(10000, "a"), (9900, "z"), (800, "m"), (10100, "b")]
    seen = view(*(checkpoint(step, ["nvme"], name=name) for step, name in numbers))
    assert dropped(Retain("nvme", last=2), seen) == ["m", "z"]
    assert dropped(Retain("nvme", last=4), seen) == []


def test_only_its_own_tier_counts() -> None:
    seen = view(checkpoint(1, ["nvme"]), checkpoint(2, ["pfs"]), checkpoint(3, ["nvme", "pfs"]))
    assert dropped(Retain("nvme", last=1), seen) == ["step-1"]
    assert dropped(Retain("pfs", last=1), seen) == ["step-2"]
    assert dropped(Retain("host", last=1), seen) == []


def test_partial_ones_are_counted_apart() -> None:
    complete = [checkpoint(step, ["pfs"]) for step in (10, 20, 30)]
    partial = [checkpoint(step, ["nvme"], partial=["pfs"]) for step in (25, 35, 45)]
    assert dropped(Retain("pfs", last=2), view(*complete, *partial)) == ["step-10", "step-25"]
    assert dropped(Retain("pfs", every_steps=20), view(*complete, *partial)) == ["step-35"]


def test_abandoned_ones_neither_count_nor_go() -> None:
    seen = view(*(checkpoint(step, ["nvme"], abandoned=step > 20) for step in (10, 20, 30, 40)))
    assert dropped(Retain("nvme", last=2), seen) == []
    assert dropped(Retain("nvme", last=1), seen) == ["step-10"]


def test_kept_ones_count_but_never_go() -> None:
    seen = view(*(checkpoint(step, ["nvme"], kept=step in (10, 40)) for step in (10, 20, 30, 40)))
    assert dropped(Retain("nvme", last=2), seen) == ["step-20"]


# -- windows -----------------------------------------------------------------------------------------


def test_the_first_of_each_window_stays() -> None:
    seen = view(*(checkpoint(step, ["pfs"]) for step in (1563, 3126, 4689, 6252, 7815, 9378, 10941)))
    assert steps(Retain("pfs", every_steps=5000), seen) == [3126, 4689, 7815, 9378]


def test_windows_of_seconds_are_not_fooled_by_a_clock_that_was_set_back() -> None:
    times = [0, 100, 3700, 3800, 200, 300, 3900, 4000]
    seen = view(*(checkpoint(i, ["pfs"], made=at) for i, at in enumerate(times)))
    assert steps(Retain("pfs", every_s=3600), seen) == [1, 3, 5]


def test_a_window_stays_closed_when_others_have_gone_from_this_tier() -> None:
    seen = view(*(checkpoint(i, ["pfs"] if i != 2 else ["nvme"], made=at) for i, at in enumerate([0, 100, 3700, 200])))
    assert steps(Retain("pfs", every_s=3600), seen) == [1], "step 3 is in the third window, for step 2 began another"


# -- the best, tags, ages ----------------------------------------------------------------------------


def scored(*scores: float | None, tier: str = "pfs") -> list[CheckpointView]:
    return [checkpoint(i, [tier], metrics={} if score is None else {"acc": score}) for i, score in enumerate(scores)]


def test_the_best_stay_and_of_equal_ones_the_newer() -> None:
    seen = view(*scored(0.5, 0.9, 0.7, 0.9, 0.7, 0.8))
    assert steps(Retain("pfs", best=[Best("acc", "max", 1)]), seen) == [0, 1, 2, 4]
    assert steps(Retain("pfs", best=[Best("acc", "max", 4)]), seen) == [0, 2]
    assert steps(Retain("pfs", best=[Best("acc", "min", 2)]), seen) == [1, 2, 3]


def test_what_has_no_metric_yet_stays_and_takes_no_place() -> None:
    seen = view(*scored(0.5, None, 0.9, None))
    policy = Retain("pfs", best=[Best("acc", "max", 1)])
    assert steps(policy, seen) == [0]
    later = view(*scored(0.5, 0.95, 0.9, 0.1))
    assert [move.checkpoint for move in policy.decide(Noted("step-1"), later)] == ["step-0", "step-2"]


def test_nan_is_never_the_best() -> None:
    seen = view(*scored(math.nan, 0.3, -math.inf, 0.5, 0.4))
    for mode, goes in (("min", 3), ("max", 1)):
        assert steps(Retain("pfs", best=[Best("acc", mode, 1)]), seen) == [goes]  # type: ignore[arg-type]


def test_several_metrics_each_with_its_best() -> None:
    metrics = [{"acc": 0.9, "loss": 3.0}, {"acc": 0.5, "loss": 2.0}, {"acc": 0.1, "loss": 1.0}]
    seen = view(*(checkpoint(i, ["pfs"], metrics=each) for i, each in enumerate(metrics)))
    assert steps(Retain("pfs", best=[Best("acc", "max"), Best("loss", "min")]), seen) == [1]


def test_tagged_ones_stay() -> None:
    seen = view(*(checkpoint(i, ["pfs"], tags=tags) for i, tags in enumerate([(), ("a",), ("b", "c"), (), ()])))
    assert steps(Retain("pfs", tagged=["a", "c"]), seen) == [0, 3]
    assert steps(Retain("pfs", tagged=["b"]), seen) == [0, 1, 3]
    assert steps(Retain("pfs", tagged=True), seen) == [0, 3]


def test_younger_ones_stay_and_a_clock_ahead_does_no_harm() -> None:
    seen = view(*(checkpoint(i, ["pfs"], made=at) for i, at in enumerate([1000, 5000, 4000, 99999])), wall=8000)
    assert steps(Retain("pfs", newer_than_s=4000), seen) == [0, 2]


def test_the_newest_copy_of_what_it_holds_stays_or_it_would_be_flushed_again() -> None:
    complete = [checkpoint(i, ["pfs"], metrics={"acc": 0.0}) for i in (1, 2)]
    models = [checkpoint(i, partial=["pfs"], metrics={"acc": 0.0}) for i in (3, 5, 6)]
    sched = [checkpoint(i, partial=["pfs"], some=["sched"], metrics={"acc": 0.0}) for i in (0, 4)]
    policy = Retain("pfs", tagged=True)
    assert steps(policy, view(*complete, *models, *sched)) == [0, 1, 3, 5]
    assert policy.explain(view(*complete))["step-2"] == "stays: the newest here"
    last = checkpoint(7, ["pfs"])
    assert steps(policy, view(*complete, *models, *sched, last)) == [0, 1, 2, 3, 4, 5, 6]


def test_rules_are_a_union() -> None:
    made = [checkpoint(step, ["pfs"], metrics={"acc": float(step == 300)}) for step in range(100, 1300, 100)]
    made[0] = replace(made[0], tags=("release",))
    policy = Retain("pfs", last=2, every_steps=500, best=[Best("acc", "max", 1)], tagged=["release"])
    assert steps(policy, view(*made)) == [200, 400, 600, 700, 800, 900]


# -- what people see ---------------------------------------------------------------------------------


def test_every_event_tells_the_same_and_the_reason_names_all_rules() -> None:
    made = [checkpoint(step, ["nvme"], metrics={"eval/acc": step / 100}) for step in (10, 20, 30, 40)]
    policy = Retain("nvme", last=2, every_steps=1000, best=[Best("eval/acc", "max", 2)])
    [move] = policy.decide(Opened(), view(*made))
    assert move.checkpoint == "step-20" and move.reason == (
        "not among the last 2, not the first in its window of 1000 steps, not among the 2 best by eval/acc"
    )
    for event in (Committed("step-30", "pfs"), Closing(), Noted("step-10")):
        assert policy.decide(event, view(*made)) == [move]


def test_it_explains_each_copy_on_its_tier() -> None:
    made = [
        checkpoint(10, ["nvme"], kept=True), checkpoint(20, ["nvme"]), checkpoint(30, ["nvme"], abandoned=True),
        checkpoint(40, ["nvme"], tags=("good",)), checkpoint(15, partial=["nvme"]), checkpoint(12, partial=["nvme"]),
        checkpoint(50, ["pfs"]),
    ]  # fmt: skip
    told = Retain("nvme", last=1, tagged=True).explain(view(*made))
    assert told == {
        "step-10": "stays: kept",
        "step-12": "goes: not among the last 1, not tagged (partial copies are counted apart)",
        "step-15": "stays: among the last 1",
        "step-20": "goes: not among the last 1, not tagged",
        "step-30": "stays: abandoned by a rewind, retention leaves it alone",
        "step-40": "stays: among the last 1, tagged",
    }
    assert list(told) == sorted(told)


def test_it_tells_what_it_does() -> None:
    policy = Retain("pfs", last=5, every_s=86400, best=[Best("acc", "max")], newer_than_s=5400, tagged=["b", "a"])
    assert repr(policy) == (
        "<Retain on pfs: among the last 5, or the first in its window of 1 d, or the best by acc, "
        "or younger than 90 min, or tagged a or b>"
    )


def test_a_metric_that_is_missing_is_named() -> None:
    seen = view(*scored(0.5, None))
    assert Retain("pfs", best=[Best("acc", "max")]).explain(seen)["step-1"] == "stays: without acc so far"


@pytest.mark.parametrize("last", [0, -1, True, 2.5, "3"])
def test_a_number_that_keeps_nothing_is_refused(last: Any) -> None:
    with pytest.raises(ConfigError, match="last=.*nvme.*at least 1"):
        Retain("nvme", last=last)
    with pytest.raises(ConfigError, match="count=.*nvme.*at least 1"):
        Retain("nvme", best=[Best("acc", "max", last)])


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({}, "no rule"), ({"tagged": False}, "no rule"), ({"tagged": []}, "no rule"),
        ({"tagged": "release"}, "list of tags"), ({"every_steps": 0}, "every_steps=0"), ({"every_s": -1}, "every_s=-1"),
        ({"newer_than_s": math.nan}, "newer_than_s=nan"), ({"best": [Best("", "max")]}, "metric=''"),
        ({"best": [Best("acc", "most")]}, "mode='most'"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_rules_that_make_no_sense_are_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Retain("nvme", **given)


# -- from real life ----------------------------------------------------------------------------------


def retain_until_still(policy: Retain, seen: View) -> View:
    """Carries out what the promises allow, until nothing more goes."""
    while allowed := [move for move in policy.decide(Opened(), seen) if refusal(move, seen) is None]:
        gone = {move.checkpoint for move in allowed}
        left = [
            replace(c, complete_on=c.complete_on - {policy.tier}, partial_on=c.partial_on - {policy.tier})
            if c.name in gone
            else c
            for c in seen.checkpoints
        ]
        seen = replace(seen, checkpoints=tuple(c for c in left if c.complete_on | c.partial_on))
    return seen


def on(seen: View, tier: str) -> list[int]:
    return [c.step for c in seen.on(tier)]


def test_case_c3_the_old_one_stays_until_the_new_one_is_safe() -> None:
    """keep 1 and a slow flush: at every moment each durable tier that had a whole one has one."""
    old, new = checkpoint(1, ["nvme", "pfs"]), checkpoint(2, ["nvme"])
    under_way = view(old, new, promised=[("step-2", "pfs")], running=[("step-2", "pfs")])
    assert on(retain_until_still(Retain("pfs", last=1), under_way), "pfs") == [1]
    arrived = view(old, checkpoint(2, ["nvme", "pfs"]))
    assert on(retain_until_still(Retain("pfs", last=1), arrived), "pfs") == [2]
    partial = view(old, checkpoint(2, ["nvme"], partial=["pfs"]))  # only some of its parts have arrived
    assert on(retain_until_still(Retain("pfs", last=1), partial), "pfs") == [1]


@pytest.mark.parametrize(
    ("made", "last", "left"),
    [
        (range(800, 1201, 100), 3, [1000, 1100, 1200]),
        (range(9900, 10101, 50), 3, [10000, 10050, 10100]),
        (range(1, 31), 10, list(range(21, 31))),
        ([5], 1, [5]),
    ],
)
def test_case_c4_numbers_are_numbers_and_the_count_is_exact(made: Sequence[int], last: int, left: list[int]) -> None:
    seen = view(*(checkpoint(step, ["nvme"], name=str(step)) for step in made))
    assert on(retain_until_still(Retain("nvme", last=last), seen), "nvme") == left


def test_case_c4_the_newest_and_an_older_best_both_stay() -> None:
    made = [checkpoint(i, ["nvme"], metrics={"acc": acc}) for i, acc in enumerate([0.1, 0.9, math.nan, 0.3, 0.2])]
    policy = Retain("nvme", last=1, best=[Best("acc", "max", 1)])
    assert on(retain_until_still(policy, view(*made)), "nvme") == [1, 2, 4], "of NaN nobody knows how good it is"
    only_best = Retain("nvme", best=[Best("acc", "max", 1)])
    assert 4 in on(retain_until_still(only_best, view(*made)), "nvme"), "the newest is never lost"


def test_case_c5_a_new_line_in_an_old_folder_stays() -> None:
    """The steps of before a rewind neither count nor push out lower new ones."""
    old = [checkpoint(step, ["nvme"], abandoned=True, name=f"old-{step}") for step in (500, 600, 700)]
    new = [checkpoint(step, ["nvme"]) for step in (100, 200)]
    assert on(retain_until_still(Retain("nvme", last=2), view(*old, *new)), "nvme") == [100, 200]


def test_case_c6_times_say_nothing_about_the_order() -> None:
    times = [9000.0, 0.0, 5000.0, 1000.0]
    seen = view(*(checkpoint(i, ["nvme"], made=at) for i, at in enumerate(times)), wall=1e9)
    assert on(retain_until_still(Retain("nvme", last=2), seen), "nvme") == [2, 3]
    untouched = view(*(checkpoint(i, ["nvme"]) for i in range(4)))
    assert on(retain_until_still(Retain("nvme", last=2), untouched), "nvme") == [2, 3]


# -- against the words -------------------------------------------------------------------------------

UNIONS = st.fixed_dictionaries(
    {},
    optional={
        "last": st.integers(1, 3),
        "every_steps": st.integers(1, 5),
        "best": st.lists(
            st.builds(Best, st.just("acc"), st.sampled_from(["min", "max"]), st.integers(1, 2)), max_size=1
        ),
        "newer_than_s": st.integers(1, 40),
        "tagged": st.sampled_from([True, ("release",), ("old", "release")]),
    },
).filter(lambda given: any(given.values()))


def kind(c: CheckpointView, tier: str) -> str:
    if c.abandoned:
        return "abandoned"
    return "complete" if tier in c.complete_on else "partial" if tier in c.partial_on else "elsewhere"


def wanted_by_the_words(c: CheckpointView, tier: str, seen: View, rules: dict[str, Any]) -> bool:
    """Whether any rule wants `c`, written the long way round."""
    numbered = [(o.step, i, o) for i, o in enumerate(seen.checkpoints)]
    in_order = [o for _, _, o in sorted(numbered, key=lambda each: each[:2])]
    peers = [o for o in in_order if kind(o, tier) == kind(c, tier)]
    after = [o for o in in_order[in_order.index(c) + 1 :] if not o.abandoned]
    newer = peers[peers.index(c) + 1 :]
    older = peers[: peers.index(c)]
    if "last" in rules and len(newer) < rules["last"]:
        return True
    if "every_steps" in rules and all(o.step // rules["every_steps"] < c.step // rules["every_steps"] for o in older):
        return True
    holds = None if tier in c.complete_on else c.parts_on[tier]
    if not any(tier in o.complete_on or (holds and holds <= o.parts_on.get(tier, frozenset())) for o in after):
        return True
    for best in rules.get("best", ()):
        sign = 1 if best.mode == "max" else -1
        if best.metric not in c.metrics:
            return True
        known = [o for o in peers if best.metric in o.metrics and o is not c]
        mine = sign * c.metrics[best.metric]
        better = [o for o in known if (sign * o.metrics[best.metric], o in newer) > (mine, False)]
        if len(better) < best.count:
            return True
    if "newer_than_s" in rules and seen.wall < c.made + rules["newer_than_s"]:
        return True
    tagged = rules.get("tagged", ())
    return bool(c.tags) if tagged is True else bool(set(tagged) & set(c.tags))


@given(views(), st.sampled_from(TIERS), UNIONS)
def test_a_copy_goes_exactly_if_no_rule_wants_it(seen: View, tier: str, rules: dict[str, Any]) -> None:
    goes = set()
    for c in seen.checkpoints:
        judged = kind(c, tier) in ("complete", "partial") and not c.kept
        if judged and not wanted_by_the_words(c, tier, seen, rules):
            goes.add(c.name)
    policy = Retain(tier, **rules)
    assert set(dropped(policy, seen)) == goes
    told = policy.explain(seen)
    assert {name for name, words in told.items() if words.startswith("goes: ")} == goes
    assert set(told) == {c.name for c in seen.checkpoints if tier in c.complete_on | c.partial_on}
