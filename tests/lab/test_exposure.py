"""Lost work, against what sampling many moments says."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.lab.exposure import Copy, Stretch, exposure


def sampled(stretches: list[Stretch], copies: list[Copy], tiers: set[str], count: int = 4000) -> tuple[float, float]:
    """The mean over evenly spaced moments, and the worst of them."""
    time = sum(stretch.end - stretch.begin for stretch in stretches)
    total = worst = 0.0
    for stretch in stretches:
        share = max(1, round(count * (stretch.end - stretch.begin) / time))
        for number in range(share):
            at = stretch.begin + (number + 0.5) * (stretch.end - stretch.begin) / share
            there = [copy for copy in copies if copy.tier in tiers and copy.at <= at < copy.gone]
            base = max(there, key=lambda copy: copy.order).work if there else 0.0
            lost = max(0.0, stretch.work + at - stretch.begin - base)
            total += lost * (stretch.end - stretch.begin) / share
            worst = max(worst, lost)
    return total / time, worst


moments = st.floats(0, 100, allow_nan=False)


@given(st.lists(st.tuples(moments, st.floats(0.1, 30), st.sampled_from("ab")), max_size=6), st.booleans())
def test_it_is_what_many_failures_would_cost_on_average(saves: list[tuple[float, float, str]], lost: bool) -> None:
    stretches = [Stretch(0.0, 60.0, 0.0), Stretch(70.0, 130.0, 40.0)]
    copies = [Copy(tier, order, at, at + lag) for order, (at, lag, tier) in enumerate(sorted(saves))]
    if lost and copies:
        copies[0].gone = 65.0
    found = exposure(stretches, copies, {"a"})
    mean, worst = sampled(stretches, copies, {"a"})
    assert found.mean_s == pytest.approx(mean, rel=0.02, abs=0.2)
    assert worst - 1e-6 <= found.max_s <= worst + 0.2


def test_a_failure_right_after_a_commit_costs_what_the_commit_took() -> None:
    copies = [Copy("a", n, n * 10.0, n * 10.0 + 2.0) for n in range(1, 6)]
    found = exposure([Stretch(12.0, 52.0, 12.0)], copies, {"a"})
    assert found.mean_s == pytest.approx(5.0 + 2.0)
    assert found.max_s == pytest.approx(12.0)


def test_without_a_copy_everything_is_lost() -> None:
    found = exposure([Stretch(0.0, 10.0, 5.0)], [Copy("a", 1, 3.0, 4.0)], {"b"})
    assert found.mean_s == pytest.approx(10.0) and found.max_s == pytest.approx(15.0)
    assert math.isclose(exposure([], [], {"a"}).mean_s, 0.0)
