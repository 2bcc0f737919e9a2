"""What goes down, in which order, and what is given up: each rule by examples, then against its own words."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.policies.base import (
    Cancel,
    CheckpointView,
    Closing,
    Committed,
    Event,
    Flush,
    Idle,
    Noted,
    Opened,
    Policy,
    Pressure,
    View,
)
from stepwell.policies.flush import DropBacklog, FlushNewest, FlushRule, side_by_side
from tests.policies.views import PARTS, TIERS, checkpoint, subsets, view, views


def flushed(policy: Policy, event: Event, seen: View) -> list[str]:
    moves = [move for move in policy.decide(event, seen) if isinstance(move, Flush)]
    assert all(move.tier == policy.tier and move.reason and move.policy for move in moves)  # type: ignore[attr-defined]
    return [move.checkpoint for move in moves]


def cancelled(policy: Policy, event: Event, seen: View) -> list[tuple[str, str]]:
    moves = [move for move in policy.decide(event, seen) if isinstance(move, Cancel)]
    assert all(move.reason and move.policy for move in moves)
    return [(move.checkpoint, move.tier) for move in moves]


# -- every checkpoint --------------------------------------------------------------------------------


def test_a_new_checkpoint_goes_down_to_each_tier_below() -> None:
    made = view(checkpoint(100, ["host"]))
    for tier in ("nvme", "pfs"):
        assert flushed(FlushRule(tier), Committed("step-100", "host"), made) == ["step-100"]


def test_what_is_there_or_promised_is_not_asked_for_again() -> None:
    seen = view(checkpoint(100, ["nvme", "pfs"]), checkpoint(200, ["nvme"]), promised=[("step-200", "pfs")])
    assert flushed(FlushRule("pfs"), Committed("step-200", "nvme"), seen) == []


def test_what_is_promised_to_another_tier_is_still_due_here() -> None:
    seen = view(checkpoint(200, ["host"]), promised=[("step-200", "nvme")])
    assert flushed(FlushRule("pfs"), Committed("step-200", "host"), seen) == ["step-200"]


def test_a_restart_asks_for_what_is_newer_than_the_newest_there_newest_first() -> None:
    left = [checkpoint(step, ["nvme"]) for step in (100, 300, 400)]
    seen = view(*left, checkpoint(200, ["nvme", "pfs"]))
    assert flushed(FlushRule("pfs"), Opened(), seen) == ["step-400", "step-300"]
    for event in (Closing(), Pressure("nvme")):  # for these there are other policies
        assert FlushRule("pfs").decide(event, seen) == []


def test_what_retention_deleted_is_not_flushed_again() -> None:
    seen = view(checkpoint(100, ["nvme"]), checkpoint(200, ["nvme", "pfs"]), checkpoint(300, ["nvme", "pfs"]))
    assert flushed(FlushRule("pfs"), Committed("step-300", "pfs"), seen) == []
    prefetched = view(checkpoint(100, ["host", "nvme"]), checkpoint(300, ["nvme", "pfs"]))
    assert flushed(FlushRule("pfs"), Committed("step-100", "host"), prefetched) == []


def test_a_commit_that_a_newer_one_overtook_still_goes_down() -> None:
    for places in (["nvme"], ["host", "nvme"]):
        seen = view(checkpoint(100, places), checkpoint(200, ["nvme", "pfs"]))
        assert flushed(FlushRule("pfs"), Committed("step-100", "nvme"), seen) == ["step-100"]


def test_a_failed_flush_is_asked_for_again_although_a_newer_one_waits() -> None:
    seen = view(checkpoint(100, ["nvme"]), checkpoint(200, ["nvme"]), promised=[("step-200", "pfs")])
    assert flushed(FlushRule("pfs"), Opened(), seen) == ["step-100"]


def test_abandoned_ones_are_never_flushed_and_hide_nothing() -> None:
    seen = view(checkpoint(900, ["nvme", "pfs"], abandoned=True), checkpoint(500, ["nvme"]))
    assert flushed(FlushRule("pfs"), Opened(), seen) == ["step-500"]
    gone = view(checkpoint(900, ["nvme"], abandoned=True))
    assert flushed(FlushRule("pfs"), Committed("step-900", "nvme"), gone) == []


def test_a_partial_copy_is_completed_and_a_partial_promise_is_not_enough() -> None:
    seen = view(checkpoint(100, ["nvme"], partial=["pfs"]))
    assert flushed(FlushRule("pfs"), Opened(), seen) == ["step-100"]
    promised = view(checkpoint(100, ["nvme"]), promised={("step-100", "pfs"): frozenset({"model"})})
    assert flushed(FlushRule("pfs"), Opened(), promised) == ["step-100"]


def test_a_copy_that_is_only_further_down_or_partial_cannot_be_flushed() -> None:
    assert flushed(FlushRule("nvme"), Opened(), view(checkpoint(100, ["pfs"]))) == []
    assert flushed(FlushRule("pfs"), Opened(), view(checkpoint(100, partial=["nvme"]))) == []


def test_a_tier_that_is_not_there_is_named() -> None:
    for policy in (FlushRule("tape"), FlushNewest("tape")):
        with pytest.raises(ConfigError, match="no tier 'tape'.*host, nvme, pfs"):
            policy.decide(Opened(), view())


# -- windows -----------------------------------------------------------------------------------------


def test_the_first_of_a_window_of_steps_goes_and_no_other() -> None:
    policy = FlushRule("pfs", every_steps=1000)
    first = checkpoint(49, ["nvme"])
    assert flushed(policy, Committed("step-49", "nvme"), view(first)) == ["step-49"]
    there = checkpoint(49, ["nvme", "pfs"])
    assert flushed(policy, Committed("step-999", "nvme"), view(there, checkpoint(999, ["nvme"]))) == []
    assert flushed(policy, Committed("step-1001", "nvme"), view(there, checkpoint(1001, ["nvme"]))) == ["step-1001"]
    waiting = view(there, checkpoint(1001, ["nvme"]), checkpoint(1049, ["nvme"]), promised=[("step-1001", "pfs")])
    assert flushed(policy, Committed("step-1049", "nvme"), waiting) == []


def test_of_the_windows_that_were_left_behind_each_first_goes_the_newest_window_first() -> None:
    left = [checkpoint(step, ["nvme"]) for step in (1010, 1020, 3010, 3020, 3030, 4500)]
    seen = view(checkpoint(40, ["pfs"]), *left)
    assert flushed(FlushRule("pfs", every_steps=1000), Opened(), seen) == ["step-4500", "step-3010", "step-1010"]


def test_if_the_first_of_a_window_cannot_go_the_next_one_does() -> None:
    seen = view(checkpoint(1010, partial=["nvme"]), checkpoint(1020, ["nvme"]), checkpoint(1030, ["nvme"]))
    assert flushed(FlushRule("pfs", every_steps=1000), Opened(), seen) == ["step-1020"]


def test_a_commit_that_is_late_goes_only_if_its_window_is_still_empty() -> None:
    late, event = checkpoint(1010, ["nvme"]), Committed("step-1010", "nvme")
    policy = FlushRule("pfs", every_steps=1000)
    assert flushed(policy, event, view(late, checkpoint(2010, ["nvme", "pfs"]))) == ["step-1010"]
    assert flushed(policy, event, view(late, checkpoint(1020, ["nvme", "pfs"]))) == []


def test_after_a_rewind_windows_go_on_from_what_counts() -> None:
    policy = FlushRule("pfs", every_steps=1000)
    behind = [checkpoint(step, ["nvme", "pfs"], abandoned=True, name=f"old{step}") for step in (1010, 2010)]
    seen = view(checkpoint(10, ["nvme", "pfs"]), *behind, checkpoint(1005, ["nvme"]))
    assert flushed(policy, Committed("step-1005", "nvme"), seen) == ["step-1005"]


def test_windows_of_seconds_go_by_when_saves_were_made() -> None:
    policy = FlushRule("pfs", every_s=600)
    made = [checkpoint(step, ["nvme"], made=at) for step, at in ((1, 5), (2, 599), (3, 600), (4, 1900))]
    assert flushed(policy, Opened(), view(*made)) == ["step-4", "step-3", "step-1"]


def test_a_clock_that_was_set_back_or_forward_begins_a_window_and_hides_none() -> None:
    policy = FlushRule("pfs", every_s=600)
    there = checkpoint(1, ["nvme", "pfs"], made=9000)
    back = [checkpoint(2, ["nvme"], made=5400), checkpoint(3, ["nvme"], made=5500)]
    assert flushed(policy, Committed("step-2", "nvme"), view(there, back[0])) == ["step-2"]
    down = checkpoint(2, ["nvme", "pfs"], made=5400)
    assert flushed(policy, Committed("step-3", "nvme"), view(there, down, back[1])) == []
    again = checkpoint(4, ["nvme"], made=9000)  # the same number as the first window, but a later one
    assert flushed(policy, Committed("step-4", "nvme"), view(there, down, back[1], again)) == ["step-4"]


# -- parts, idle, newest wins ------------------------------------------------------------------------


def test_only_the_parts_that_are_asked_for_go() -> None:
    policy = FlushRule("pfs", parts=["optimizer", "model", "ema"])
    [move] = policy.decide(Committed("step-1", "nvme"), view(checkpoint(1, ["nvme"])))
    assert isinstance(move, Flush) and move.parts == ("model", "optimizer")
    [move] = policy.decide(Opened(), view(checkpoint(1, ["nvme"], parts=["model", "optimizer"])))
    assert isinstance(move, Flush) and move.parts is None  # that is all of it
    assert policy.decide(Opened(), view(checkpoint(1, ["nvme"], parts=["sched"]))) == []


def test_whoever_sent_the_parts_they_count_and_other_parts_do_not() -> None:
    policy, new = FlushRule("pfs", every_steps=100, parts=["model"]), checkpoint(20, ["nvme"])
    assert flushed(policy, Opened(), view(checkpoint(10, ["pfs"]), new)) == []
    assert flushed(policy, Opened(), view(checkpoint(10, partial=["pfs"]), new)) == []
    assert flushed(policy, Opened(), view(checkpoint(10, partial=["pfs"], some=["sched"]), new)) == ["step-20"]
    assert flushed(policy, Opened(), view(checkpoint(10, ["pfs"], parts=["sched"]), new)) == ["step-20"]
    nearer = checkpoint(10, ["nvme"])
    for promised, due in ((None, []), ({"model", "sched"}, []), ({"sched"}, ["step-10"])):
        seen = view(nearer, new, promised={("step-10", "pfs"): promised and frozenset(promised)})
        assert flushed(policy, Opened(), seen) == due


def test_a_later_one_that_another_rule_has_asked_for_serves_the_window() -> None:
    """It was in memory before it was decided where the first goes, which the other rule does not want."""
    steps, seconds, event = FlushRule("pfs", every_steps=10), FlushRule("pfs", every_s=600), Committed("step-9", "nvme")
    made = [checkpoint(5, ["pfs"], made=1), checkpoint(9, ["nvme"], made=600)]
    assert flushed(steps, event, view(*made)) == []
    assert flushed(seconds, event, view(*made)) == ["step-9"]
    made.append(checkpoint(11, ["host"], made=700))
    assert flushed(steps, event, view(*made)) == ["step-11"]
    assert flushed(seconds, event, view(*made, promised=[("step-11", "pfs")])) == []


def test_parts_may_come_from_a_partial_copy() -> None:
    seen = view(checkpoint(10, partial=["nvme"], some=["model", "sched"]))
    assert flushed(FlushRule("pfs", parts=["model"]), Opened(), seen) == ["step-10"]
    assert flushed(FlushRule("pfs", parts=["model", "optimizer"]), Opened(), seen) == []


def test_when_idle_means_when_idle() -> None:
    policy, made = FlushRule("pfs", idle=True), [checkpoint(10, ["nvme"]), checkpoint(20, ["nvme"])]
    assert flushed(policy, Committed("step-20", "nvme"), view(*made)) == []
    assert flushed(policy, Idle("nvme"), view(*made)) == []
    assert flushed(policy, Idle("pfs"), view(*made)) == ["step-20", "step-10"]
    assert flushed(policy, Noted("step-10"), view(*made, idle=["pfs"])) == ["step-20", "step-10"]
    assert flushed(policy, Closing(), view(*made, idle=["pfs"])) == []


def test_where_the_newest_wins_only_it_goes_and_older_ones_are_taken_back() -> None:
    policy = FlushRule("pfs", newest_wins=True)
    made = [checkpoint(step, ["nvme"]) for step in (10, 20, 30, 40)]
    event, queue = Committed("step-40", "nvme"), [(f"step-{step}", "pfs") for step in (10, 20, 30)]
    seen = view(*made, promised=queue, running=queue[:1])
    assert flushed(policy, event, seen) == ["step-40"]
    assert cancelled(policy, event, seen) == queue[1:]
    moves = policy.decide(event, seen)
    assert isinstance(moves[0], Flush), "the new one is promised before older ones are taken back"
    after = view(*made, promised=[queue[0], ("step-40", "pfs")])
    assert policy.decide(Noted("step-10"), after) == [], "what was taken back is asked for again"


def test_a_late_commit_does_not_win_over_a_newer_one() -> None:
    seen = view(checkpoint(10, ["nvme"]), checkpoint(20, ["nvme", "pfs"]))
    assert FlushRule("pfs", newest_wins=True).decide(Committed("step-10", "nvme"), seen) == []


def test_the_newest_takes_nothing_back_that_another_rule_has_asked_for() -> None:
    made, model = [checkpoint(10, ["nvme"]), checkpoint(20, ["nvme"])], frozenset({"model"})
    event, key = Committed("step-20", "nvme"), ("step-10", "pfs")
    models = FlushRule("pfs", parts=["model"], newest_wins=True)
    assert cancelled(models, event, view(*made, promised={key: None})) == []
    assert cancelled(models, event, view(*made, promised={key: model})) == [key]
    assert cancelled(FlushRule("pfs", newest_wins=True), event, view(*made, promised={key: model})) == []
    elsewhere = view(*made, promised={("step-10", "nvme"): None})
    assert cancelled(FlushRule("pfs", newest_wins=True), event, elsewhere) == []


@pytest.mark.parametrize("other", [{}, {"every_steps": 20}, {"every_steps": 20, "newest_wins": True}])
def test_what_another_rule_of_the_tier_counts_on_is_not_taken_back_only_to_be_asked_for_again(
    other: dict[str, Any],
) -> None:
    newest, others = FlushRule("pfs", newest_wins=True), FlushRule("pfs", **other)
    side_by_side([newest, others])
    made = [checkpoint(step, ["nvme"]) for step in (10, 20, 30)]
    queue = [("step-10", "pfs"), ("step-20", "pfs")]
    event = Committed("step-30", "nvme")
    given_up = cancelled(newest, event, view(*made, promised=queue))
    assert ("step-20", "pfs") not in given_up and (other or not given_up)
    left = [key for key in [*queue, ("step-30", "pfs")] if key not in given_up]
    assert others.decide(Noted("step-10"), view(*made, promised=left)) == []


# -- closing and pressure ----------------------------------------------------------------------------


def test_closing_gets_the_newest_down_complete_and_only_that() -> None:
    policy = FlushNewest("pfs")
    left = [checkpoint(100, ["nvme", "pfs"]), checkpoint(200, ["nvme"]), checkpoint(300, ["nvme"])]
    assert flushed(policy, Closing(), view(*left)) == ["step-300"]
    for event in (Opened(), Committed("step-300", "nvme"), Idle("pfs"), Pressure("nvme")):
        assert policy.decide(event, view(*left)) == []
    newer_below = view(checkpoint(100, ["nvme"]), checkpoint(200, ["pfs"]))
    assert flushed(policy, Closing(), newer_below) == []


def test_closing_completes_what_is_there_or_promised_in_part() -> None:
    policy, part = FlushNewest("pfs"), view(checkpoint(100, ["nvme"], partial=["pfs"]))
    [move] = policy.decide(Closing(), part)
    assert (move.checkpoint, move.parts) == ("step-100", None)
    promised = view(checkpoint(100, ["nvme"]), promised={("step-100", "pfs"): frozenset({"model"})})
    assert flushed(policy, Closing(), promised) == ["step-100"]
    assert flushed(policy, Closing(), view(checkpoint(100, ["nvme"]), promised=[("step-100", "pfs")])) == []


def test_without_room_the_backlog_is_dropped_but_for_what_is_newest_or_moving() -> None:
    made = [checkpoint(step, ["nvme"]) for step in (10, 20, 30, 40)]
    queue = [(c.name, "pfs") for c in made]
    seen = view(*made, promised=queue, running=queue[:1])
    assert cancelled(DropBacklog(), Pressure("nvme"), seen) == queue[1:3]
    assert DropBacklog().decide(Pressure("host"), seen) == [], "nothing of it is in host memory"
    assert DropBacklog().decide(Committed("step-40", "nvme"), seen) == []


def test_of_each_kind_of_promise_the_newest_stays() -> None:
    made = [checkpoint(step, ["nvme"]) for step in (10, 20, 30, 40)]
    model = frozenset({"model"})
    kinds: dict[tuple[str, str], frozenset[str] | None] = {
        ("step-10", "pfs"): None, ("step-20", "pfs"): None, ("step-30", "pfs"): model, ("step-40", "pfs"): model,
    }  # fmt: skip
    dropped = cancelled(DropBacklog(), Pressure("nvme"), view(*made, promised=kinds))
    assert dropped == [("step-10", "pfs"), ("step-30", "pfs")]


# -- what is refused, and what people see ------------------------------------------------------------


@pytest.mark.parametrize("every", [0, -1, True, 2.5, "3"])
def test_windows_that_make_no_sense_are_refused(every: Any) -> None:
    with pytest.raises(ConfigError, match="every_steps=.*pfs.*at least 1"):
        FlushRule("pfs", every_steps=every)
    if every in (0, -1, "3") or every is True:
        with pytest.raises(ConfigError, match="every_s=.*pfs.*above 0"):
            FlushRule("pfs", every_s=every)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 0.0])
def test_seconds_are_finite(seconds: float) -> None:
    with pytest.raises(ConfigError, match="every_s="):
        FlushRule("pfs", every_s=seconds)


def test_contradictions_are_refused() -> None:
    with pytest.raises(ConfigError, match="steps and of seconds.*two rules"):
        FlushRule("pfs", every_steps=10, every_s=10)
    no_lists: list[Any] = [[], "model"]
    for parts in no_lists:
        with pytest.raises(ConfigError, match="parts=.*list"):
            FlushRule("pfs", parts=parts)


def test_rules_tell_what_they_do() -> None:
    rule = FlushRule("pfs", every_steps=100, parts=["optimizer", "model"], idle=True, newest_wins=True)
    assert repr(rule) == "<FlushRule to pfs: every 100 steps, only model, optimizer, when idle, newest wins>"
    assert repr(FlushRule("nvme", every_s=600)) == "<FlushRule to nvme: every 10 min>"
    assert repr(FlushRule("nvme", every_s=0.5)) == "<FlushRule to nvme: every 0.5 s>"
    assert repr(FlushRule("nvme")) == "<FlushRule to nvme: every checkpoint>"
    assert "at closing" in repr(FlushNewest("pfs")) and "newest wins" in repr(DropBacklog())
    [move] = FlushRule("pfs", every_steps=100).decide(Opened(), view(checkpoint(1, ["nvme"])))
    assert move.reason == "the first in its window of 100 steps" and move.policy == "flush to pfs: every 100 steps"


# -- against the words -------------------------------------------------------------------------------


def events(seen: View) -> st.SearchStrategy[Event]:
    names = st.sampled_from([c.name for c in seen.checkpoints] or ["none"])
    tiers = st.sampled_from(TIERS)
    return st.one_of(
        st.builds(Committed, names, tiers), st.builds(Idle, tiers), st.builds(Noted, names),
        st.builds(Pressure, tiers), st.just(Opened()), st.just(Closing()),
    )  # fmt: skip


RULES = st.builds(
    lambda tier, window, parts, idle, newest_wins: FlushRule(
        tier, parts=parts and sorted(parts), idle=idle, newest_wins=newest_wins, **window
    ),
    st.sampled_from(TIERS),
    st.sampled_from([{}, {"every_steps": 1}, {"every_steps": 4}, {"every_s": 10}]),
    st.none() | subsets((*PARTS, "ema"), 1),
    st.booleans(),
    st.booleans(),
)


def due_by_the_words(tier: str, event: Event, seen: View) -> list[CheckpointView]:
    """The rule without a cadence once more, written the long way round."""
    nearer = TIERS[: TIERS.index(tier)]
    order = {c.name: (c.step, i) for i, c in enumerate(seen.checkpoints)}
    due = []
    for c in seen.checkpoints:
        passed = any(
            tier in o.complete_on and not o.abandoned and order[o.name] > order[c.name] for o in seen.checkpoints
        )
        lowest = max((t for t in TIERS if t in c.complete_on), key=TIERS.index, default=None)
        first = isinstance(event, Committed) and (event.checkpoint, event.tier) == (c.name, lowest)
        if c.abandoned or tier in c.complete_on or not any(t in c.complete_on for t in nearer):
            continue
        if not passed or first:
            due.append(c)
    due.sort(key=lambda c: order[c.name], reverse=True)
    return [c for c in due if seen.promised.get((c.name, tier), frozenset()) is not None]


@given(views(), st.sampled_from(TIERS), st.data())
def test_exactly_what_the_rule_says_is_flushed(seen: View, tier: str, data: st.DataObject) -> None:
    event = data.draw(events(seen).filter(lambda event: not isinstance(event, Closing | Pressure)))
    assert flushed(FlushRule(tier), event, seen) == [c.name for c in due_by_the_words(tier, event, seen)]


@given(views(), RULES, st.data())
def test_whatever_the_rule_it_asks_for_no_more_than_one_of_a_window(
    seen: View, rule: FlushRule, data: st.DataObject
) -> None:
    """And for nothing that is there, abandoned, without the parts, or in a window that is served already."""
    moves = [move for move in rule.decide(data.draw(events(seen)), seen) if isinstance(move, Flush)]
    by_name = {c.name: c for c in seen.checkpoints}
    asked = [by_name[move.checkpoint] for move in moves]
    assert all(not c.abandoned for c in asked) and len({c.name for c in asked}) == len(asked)
    for move, c in zip(moves, asked, strict=True):
        wanted = c.parts if rule.parts is None else c.parts & rule.parts
        assert wanted and (move.parts is None) == (wanted == c.parts) and wanted == frozenset(move.parts or c.parts)
        assert not wanted <= (c.parts if rule.tier in c.complete_on else c.parts_on.get(rule.tier, frozenset()))
    if rule.every_steps is not None:
        served = [c.step // rule.every_steps for c in seen.line() if serves(c, rule, seen)]
        windows = [c.step // rule.every_steps for c in asked]
        assert len(set(windows + served)) == len(windows) + len(set(served))
        assert windows == sorted(windows, reverse=True)


def serves(c: CheckpointView, rule: FlushRule, seen: View) -> bool:
    wanted = c.parts if rule.parts is None else c.parts & rule.parts
    promised = seen.promised.get((c.name, rule.tier), frozenset())
    there = c.parts if rule.tier in c.complete_on else c.parts_on.get(rule.tier, frozenset())
    whole = rule.tier in c.complete_on or promised is None
    return bool(wanted) and (whole or (wanted < c.parts and (wanted <= there or wanted <= (promised or frozenset()))))


@given(views(), st.sampled_from(TIERS))
def test_closing_asks_for_at_most_the_newest_flushable_one(seen: View, tier: str) -> None:
    moves = flushed(FlushNewest(tier), Closing(), seen)
    nearer = frozenset(TIERS[: TIERS.index(tier)])
    order = {c.name: (c.step, i) for i, c in enumerate(seen.checkpoints)}
    above = [c for c in seen.checkpoints if not c.abandoned and c.complete_on & nearer]
    newest = max(above, key=lambda c: order[c.name], default=None)
    assert moves in ([], [newest.name] if newest else [])
    if newest and not moves:
        done = tier in newest.complete_on or seen.promised.get((newest.name, tier), frozenset()) is None
        assert done or any(order[c.name] > order[newest.name] for c in seen.on(tier))
