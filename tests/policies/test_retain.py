from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.errors import ConfigError
from stepwell.policies.base import CheckpointView, Committed, Opened, View
from stepwell.policies.retain import KeepLast
from tests.policies.views import TIERS, checkpoint, view, views


def dropped(policy: KeepLast, seen: View) -> list[str]:
    moves = policy.decide(Opened(), seen)
    assert all(move.tier == policy.tier for move in moves)
    return [move.checkpoint for move in moves]


def test_the_newest_stay_by_step_whatever_their_names_and_order() -> None:
    steps = [(10000, "a"), (9900, "z"), (800, "m"), (10100, "b")]
    seen = view(*(checkpoint(step, ["nvme"], name=name) for step, name in steps))
    assert dropped(KeepLast("nvme", 2), seen) == ["m", "z"]
    assert dropped(KeepLast("nvme", 4), seen) == []


def test_only_its_own_tier_counts() -> None:
    seen = view(checkpoint(1, ["nvme"]), checkpoint(2, ["pfs"]), checkpoint(3, ["nvme", "pfs"]))
    assert dropped(KeepLast("nvme", 1), seen) == ["step-1"]
    assert dropped(KeepLast("pfs", 1), seen) == ["step-2"]
    assert dropped(KeepLast("host", 1), seen) == []


def test_partial_ones_are_counted_apart() -> None:
    complete = [checkpoint(step, ["pfs"]) for step in (10, 20, 30)]
    partial = [checkpoint(step, ["nvme"], partial=["pfs"]) for step in (25, 35, 45)]
    assert dropped(KeepLast("pfs", 2), view(*complete, *partial)) == ["step-10", "step-25"]


def test_abandoned_ones_neither_count_nor_go() -> None:
    seen = view(*(checkpoint(step, ["nvme"], abandoned=step > 20) for step in (10, 20, 30, 40)))
    assert dropped(KeepLast("nvme", 2), seen) == []
    assert dropped(KeepLast("nvme", 1), seen) == ["step-10"]


def test_kept_ones_count_but_never_go() -> None:
    seen = view(*(checkpoint(step, ["nvme"], kept=step in (10, 40)) for step in (10, 20, 30, 40)))
    assert dropped(KeepLast("nvme", 2), seen) == ["step-20"]


def test_every_event_tells_the_same_and_the_reason_names_what_stays() -> None:
    seen = view(*(checkpoint(step, ["nvme"]) for step in (10, 20, 30)))
    policy = KeepLast("nvme", 2)
    assert policy.decide(Committed("step-30", "pfs"), seen) == policy.decide(Opened(), seen)
    assert policy.decide(Opened(), seen)[0].reason == "beyond the last 2 complete checkpoints on nvme (steps 20, 30)"


@pytest.mark.parametrize("last", [0, -1, True, 2.5, "3", None])
def test_a_number_that_keeps_nothing_is_refused(last: Any) -> None:
    with pytest.raises(ConfigError, match="nvme.*at least 1"):
        KeepLast("nvme", last)


@given(views(), st.sampled_from(TIERS), st.integers(1, 5))
def test_a_copy_goes_exactly_if_enough_newer_ones_of_its_kind_stay(seen: View, tier: str, last: int) -> None:
    def kind(c: CheckpointView) -> str | None:
        return (
            None
            if c.abandoned
            else "complete"
            if tier in c.complete_on
            else "partial"
            if tier in c.partial_on
            else None
        )

    order = {c.name: (c.step, i) for i, c in enumerate(seen.checkpoints)}
    goes = set()
    for c in seen.checkpoints:
        newer = [o for o in seen.checkpoints if kind(o) == kind(c) and order[o.name] > order[c.name]]
        if kind(c) and not c.kept and len(newer) >= last:
            goes.add(c.name)
    assert set(dropped(KeepLast(tier, last), seen)) == goes
