"""Made-up workloads: seeded, as asked for, and refused where nothing would come of them."""

from __future__ import annotations

import pytest

from stepwell.errors import ConfigError
from stepwell.lab.synthetic import fleet, make, training
from stepwell.lab.trace import duration_s
from stepwell.tracing import Loaded, Restored, Saved, Start

DAY = 86400.0


def test_training_saves_as_often_as_it_is_told_whatever_fails() -> None:
    work = training(
        state=900, every=10, iteration=2.0, saves=200, ranks=3, failures={"process": 500.0, "node-loss": 2000.0}, seed=4
    )
    assert len(work.ranks) == 3
    for number, events in enumerate(work.ranks):
        saved = [event for event in events if isinstance(event, Saved)]
        assert [event.step for event in saved] == [n * 10 for n in range(1, 201)]
        assert {sum(event.parts.values()) for event in saved} == {300}
        starts = [event for event in events if isinstance(event, Start)]
        assert {(start.rank, start.world) for start in starts} == {(number, 3)}
        lost = [start.lost for start in starts[1:]]
        assert len(lost) == sum(isinstance(event, Restored) for event in events) > 0
        assert set(lost) == {"process", "node-loss"}
    failed = len(lost)
    assert duration_s(work.ranks[0]) > 200 * 20.0 + failed * 60.0


def test_failures_come_as_often_as_their_rate_says() -> None:
    work = training(state=9, every=100, iteration=1.0, saves=20000, failures={"process": DAY / 4}, seed=1)
    failed = sum(isinstance(event, Start) for event in work.ranks[0]) - 1
    assert failed == pytest.approx(20000 * 100 / (DAY / 4), rel=0.25)


def test_popular_models_are_asked_for_more_often() -> None:
    work = fleet(models=5, state=100, requests=5000, gap=2.0, seed=3)
    asked = [event.ref for event in work.ranks[0] if isinstance(event, Loaded)]
    counts = [asked.count(name) for name in sorted(work.models)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] / counts[4] == pytest.approx(5.0, rel=0.2)
    assert duration_s(work.ranks[0]) == pytest.approx(10000.0, rel=0.1)


@pytest.mark.parametrize(
    "text", ["training", "training,state=1GB,every=500,iteration=1s,ranks=2", "fleet,models=3,skew=0.5"]
)
def test_the_same_seed_makes_the_same(text: str) -> None:
    one, again, other = (make(text, seed, {"process": 1000.0}) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("trainign", "Did you mean 'training'"),
        ("training,sate=5GB", "Did you mean 'state'"),
        ("training,state", "Write it as"),
        ("training,state=5XB", "unknown unit"),
        ("training,saves=none", "cannot be read"),
        ("fleet,models=0", "too few"),
        ("fleet,ranks=2", "says nothing about a workload of fleet"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make(text, 0, {})


def test_training_that_never_gets_on_is_refused() -> None:
    with pytest.raises(ConfigError, match="fails more often than it can save"):
        make("training,every=1000,iteration=10s,saves=3", 0, {"process": 60.0})
