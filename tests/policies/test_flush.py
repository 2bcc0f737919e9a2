from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.policies.base import CheckpointView, Closing, Committed, Event, Opened, View
from stepwell.policies.flush import FlushAll
from tests.policies.views import TIERS, checkpoint, view, views


def flushed(policy: FlushAll, event: Event, seen: View) -> list[str]:
    moves = policy.decide(event, seen)
    assert all(move.tier == policy.tier and move.parts is None and policy.tier in move.reason for move in moves)
    return [move.checkpoint for move in moves]


def test_a_checkpoint_goes_down_from_the_first_tier_to_each_lower_one() -> None:
    made = view(checkpoint(100, ["host"]))
    for tier in ("nvme", "pfs"):
        assert flushed(FlushAll(tier), Committed("step-100", "host"), made) == ["step-100"]


def test_what_is_there_or_promised_is_not_asked_for_again() -> None:
    seen = view(checkpoint(100, ["nvme", "pfs"]), checkpoint(200, ["nvme"]), promised=[("step-200", "pfs")])
    assert flushed(FlushAll("pfs"), Committed("step-200", "nvme"), seen) == []


def test_a_promise_to_another_tier_does_not_count() -> None:
    seen = view(checkpoint(200, ["host"]), promised=[("step-200", "nvme")])
    assert flushed(FlushAll("pfs"), Committed("step-200", "host"), seen) == ["step-200"]


def test_opening_takes_up_what_an_earlier_process_left_newest_first() -> None:
    steps = [(100, ["nvme"]), (200, ["nvme", "pfs"]), (300, ["nvme"]), (400, ["nvme"])]
    seen = view(*(checkpoint(step, on) for step, on in steps))
    assert flushed(FlushAll("pfs"), Opened(), seen) == ["step-400", "step-300"]


def test_what_retention_deleted_is_not_flushed_again() -> None:
    seen = view(checkpoint(100, ["nvme"]), checkpoint(200, ["nvme", "pfs"]), checkpoint(300, ["nvme", "pfs"]))
    assert flushed(FlushAll("pfs"), Committed("step-300", "pfs"), seen) == []
    prefetched = view(checkpoint(100, ["host", "nvme"]), checkpoint(300, ["nvme", "pfs"]))
    assert flushed(FlushAll("pfs"), Committed("step-100", "host"), prefetched) == []


def test_a_commit_that_a_newer_one_overtook_still_goes_down() -> None:
    for places in (["nvme"], ["host", "nvme"]):
        seen = view(checkpoint(100, places), checkpoint(200, ["nvme", "pfs"]))
        assert flushed(FlushAll("pfs"), Committed("step-100", "nvme"), seen) == ["step-100"]


def test_abandoned_ones_are_never_flushed_and_hide_nothing() -> None:
    seen = view(checkpoint(900, ["nvme", "pfs"], abandoned=True), checkpoint(500, ["nvme"]))
    assert flushed(FlushAll("pfs"), Opened(), seen) == ["step-500"]
    gone = view(checkpoint(900, ["nvme"], abandoned=True))
    assert flushed(FlushAll("pfs"), Committed("step-900", "nvme"), gone) == []


def test_a_partial_copy_is_completed() -> None:
    seen = view(checkpoint(100, ["nvme"], partial=["pfs"]))
    assert flushed(FlushAll("pfs"), Opened(), seen) == ["step-100"]


def test_a_copy_that_is_only_further_down_or_partial_cannot_be_flushed() -> None:
    assert flushed(FlushAll("nvme"), Opened(), view(checkpoint(100, ["pfs"]))) == []
    assert flushed(FlushAll("pfs"), Opened(), view(checkpoint(100, partial=["nvme"]))) == []


def test_closing_gets_the_newest_down_and_only_that() -> None:
    left = view(checkpoint(100, ["nvme", "pfs"]), checkpoint(200, ["nvme"]), checkpoint(300, ["nvme"]))
    assert flushed(FlushAll("pfs"), Closing(), left) == ["step-300"]
    newer_below = view(checkpoint(100, ["nvme"]), checkpoint(200, ["pfs"]))
    assert flushed(FlushAll("pfs"), Closing(), newer_below) == []


def test_a_tier_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match="no tier 'tape'.*host, nvme, pfs"):
        FlushAll("tape").decide(Opened(), view())


def due_by_the_words(tier: str, event: Event, seen: View) -> list[CheckpointView]:
    """The rule once more, written the long way round."""
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
    return [c for c in due if (c.name, tier) not in seen.promised]


@given(views(), st.sampled_from(TIERS), st.data())
def test_exactly_what_the_rule_says_is_flushed(seen: View, tier: str, data: st.DataObject) -> None:
    names = st.sampled_from([c.name for c in seen.checkpoints] or ["none"])
    committed = data.draw(st.none() | st.builds(Committed, names, st.sampled_from(TIERS)))
    event: Event = committed or Opened()
    assert flushed(FlushAll(tier), event, seen) == [c.name for c in due_by_the_words(tier, event, seen)]


@given(views(), st.sampled_from(TIERS))
def test_closing_asks_for_at_most_the_newest_flushable_one(seen: View, tier: str) -> None:
    moves = flushed(FlushAll(tier), Closing(), seen)
    nearer = frozenset(TIERS[: TIERS.index(tier)])
    order = {c.name: (c.step, i) for i, c in enumerate(seen.checkpoints)}
    above = [c for c in seen.checkpoints if not c.abandoned and c.complete_on & nearer]
    newest = max(above, key=lambda c: order[c.name], default=None)
    assert moves in ([], [newest.name] if newest else [])
    if newest and not moves:
        done = tier in newest.complete_on or (newest.name, tier) in seen.promised
        assert done or any(order[c.name] > order[newest.name] for c in seen.on(tier))
