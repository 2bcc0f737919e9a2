"""Drains: the newest first, what cannot be there in time last, within a limit that holds whatever a tier does."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stepwell
from stepwell import backoff, draining
from stepwell.edges import EdgeStatistics
from stepwell.errors import ConfigError, SaveFailed, WaitTimeout
from stepwell.format.names import Attempt
from stepwell.tiers.base import Tier, TierInfo
from stepwell.tiers.file import FileTier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.pfs import PfsTier
from stepwell.tiers.wrap import Event, Fault, Faulty, Traced
from stepwell.urgency import Need, in_order, rate_to
from tests.store.helpers import ALWAYS, disk, eventually, host, release, steps

MIB = 1 << 20
#: a limit on a test's drain that it never needs
LONG = "60s"


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def state(value: int, mebibytes: int = 8) -> dict[str, Any]:
    return {"model": {"w": torch.full((mebibytes * MIB // 4 - 2048,), float(value))}}  # its file has so many chunks


def opened(tiers: Sequence[Tier], **settings: Any) -> stepwell.CheckpointStore:
    """A store that does not wait long for a tier that hangs."""
    return stepwell.open(run="run", tiers=tiers, **{"exit_timeout": 20.0, **settings})


def folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    return path


def pfs(path: Path, plan: Sequence[Fault] = (), name: str = "pfs", rate: float | None = None) -> Faulty:
    return Faulty(PfsTier(folder(path / name), name=name, write_bytes_per_s=rate, delete_pause_s=0), list(plan))


def committed(events: Sequence[Event]) -> list[tuple[int, str]]:
    """(step, tier) of the manifests in the order in which they were published."""
    done = [e for e in events if e.operation == "commit" and e.phase == "complete" and "manifest.json" in e.detail]
    return [(int(e.detail.split("step-")[1][:9]), e.tier) for e in done]


def begun(events: Sequence[Event]) -> list[tuple[int, str]]:
    """(step, tier) of the checkpoints in the order in which their first bytes were written."""
    writes = [e for e in events if e.operation == "write" and "step-" in e.detail]
    return list(dict.fromkeys((int(e.detail.split("step-")[1][:9]), e.tier) for e in writes))


def written(events: Sequence[Event], step: int) -> int:
    """Chunks of a step that were written."""
    return sum(e.operation == "write" and e.phase == "complete" and f"step-{step:09d}" in e.detail for e in events)


# -- the order -----------------------------------------------------------------------------------


needs = st.lists(st.floats(0, 100), max_size=12).map(
    lambda all_s: [Need(Attempt(1, call, 100 - call), None, seconds) for call, seconds in enumerate(all_s)]
)


@given(needs=needs, left_s=st.floats(0, 200))
def test_what_fits_goes_first_and_nothing_is_lost(needs: list[Need], left_s: float) -> None:
    fits, rest = in_order(needs, left_s)
    assert sorted([*fits, *rest], key=needs.index) == needs
    for some in (fits, rest):
        assert some == sorted(some, key=needs.index)
    assert sum(need.seconds for need in fits) <= left_s
    for late in rest:  # it would not have fitted in between, either
        before = sum(need.seconds for need in fits if needs.index(need) < needs.index(late))
        assert before + late.seconds > left_s


def edge(target: str, moved: int, rate: float, source: str = "nvme") -> EdgeStatistics:
    return EdgeStatistics(source, target, 0, 0, moved, 0, rate, 0.0)


def test_the_rate_is_that_of_all_ways_together_and_never_above_the_limit() -> None:
    tier = MemoryTier(name="pfs")
    assert rate_to(tier, [edge("nvme", 100, 10.0)]) is None
    assert rate_to(tier, [edge("pfs", 0, 0.0)]) is None
    assert rate_to(tier, [edge("pfs", 100, 10.0), edge("pfs", 300, 30.0, "host")]) == 20.0
    tier.info = TierInfo("pfs", "memory", "process", "nothing", write_bytes_per_s=5.0)
    assert rate_to(tier, []) == 5.0 == rate_to(tier, [edge("pfs", 100, 10.0)])


# -- what gets down ------------------------------------------------------------------------------


def test_the_newest_overtakes_an_older_one_that_is_being_flushed_and_whose_bytes_stay(tmp_path: Path) -> None:
    events: list[Event] = []
    far = pfs(tmp_path, [Fault("write", 4, "stall")])
    tiers: list[Tier] = [host(), disk(tmp_path, name="near"), Traced(far, events.append)]
    with opened(tiers) as store:
        store.save(1, state(1)).wait("near")
        eventually(lambda: written(events, 1) == 7)
        store.save(2, state(2)).wait("near")
        far.plan = []
        eventually(lambda: store.status().tier("pfs").backlog == (1, 2))
        _later(lambda: (2, "pfs") in committed(events), far)
        report = store.drain(LONG)
        assert committed(events) == [(2, "pfs"), (1, "pfs")]
        assert report.done == {"pfs": [2, 1]} and report.newest == {"near": 2, "pfs": 2} and report.cut == []
        assert written(events, 1) == 8 and written(events, 2) == 8  # nothing was written twice
        store.save(3, state(3)).wait("pfs", timeout=60)  # saving goes on


def _later(when: Callable[[], bool], far: Faulty) -> None:
    """Ends the stalls of `far` when that is so."""

    def work() -> None:
        eventually(when)
        release(far)

    threading.Thread(target=work).start()


def test_what_cannot_be_there_in_time_lets_others_pass(tmp_path: Path) -> None:
    rate = 32 * MIB
    with opened([host(), disk(tmp_path, name="near"), pfs(tmp_path, rate=rate)]) as store:
        store.save(1, state(1, 1)).wait("pfs")
        store.save(2, state(2, 2)).wait("near")
        store.save(3, state(3, 40)).wait("near")
        report = store.drain(1.0)
        assert report.newest == {"near": 3, "pfs": 2}
        [cut] = report.cut
        assert (cut.step, cut.tier) == (3, "pfs") and re.search(r"it takes .* s at .*iB/s, and", cut.why)
        assert 0 < cut.bytes_left < 40 * MIB  # begun all the same, with the time that was left
        assert "Newest: step 3 on near, step 2 on pfs. Not there: step 3 on pfs (" in str(report)
        assert store.drain(LONG).newest == {"near": 3, "pfs": 3}


def test_the_nearest_tier_that_outlives_the_node_comes_first_then_the_last_then_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backoff, "FIRST_S", 30.0)  # nothing is tried again before the drain
    events: list[Event] = []
    away = [pfs(tmp_path, [Fault("reserve", 1, times=ALWAYS)], name) for name in ("middle", "last")]
    tiers = [host(), disk(tmp_path, name="near"), *(Traced(tier, events.append) for tier in away)]
    with opened(tiers) as store:
        for step in (1, 2):
            store.save(step, state(step, 1)).wait("near")

        def both_pause() -> bool:
            status = [store.status().tier(name) for name in ("middle", "last")]
            return all(each.backlog == (1, 2) and each.retry_in_s is not None for each in status)

        eventually(both_pause)
        for tier in away:
            tier.plan = []
        report = store.drain(LONG)
        assert report.done == {"middle": [2, 1], "last": [2, 1]} and not report.cut
    order = begun(events)  # what is copied gives way to the next one, and commits may overtake each other
    assert order.index((2, "middle")) < order.index((2, "last"))
    assert order.index((2, "middle")) < order.index((1, "middle"))
    assert order.index((2, "last")) < order.index((1, "last"))


def test_a_near_tier_that_hangs_does_not_keep_the_newest_from_the_last_one(tmp_path: Path) -> None:
    stuck = pfs(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)], "middle")
    with opened([host(), disk(tmp_path, name="near"), stuck, pfs(tmp_path)]) as store:
        store.save(1, state(1, 1)).wait("near")
        report = store.drain(2.0)
        assert report.newest == {"near": 1, "pfs": 1} and [cut.tier for cut in report.cut] == ["middle"]
        release(stuck)


def test_the_newest_gets_down_whatever_policies_say(tmp_path: Path) -> None:
    with opened([disk(tmp_path, name="near"), pfs(tmp_path)], policies=[]) as store:
        for step in (1, 2):
            store.save(step, state(step, 1)).wait("near")
        save = store.save(3, state(3, 1))
        report = store.drain(LONG)
        assert report.done == {"near": [3], "pfs": [3]} and report.newest == {"near": 3, "pfs": 3}
        assert save.done("pfs") and steps(store, "pfs") == [3]


# -- what does not -------------------------------------------------------------------------------


def test_a_stuck_tier_holds_nobody_up_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "SLOW_S", 0.05)
    far = pfs(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)])
    with opened([disk(tmp_path, name="near"), far]) as store:
        save = store.save(1, state(1, 1))
        save.wait("near")
        began = time.monotonic()
        report = store.drain("500ms")
        assert 0.4 < time.monotonic() - began < 20 and report.seconds < 20
        [cut] = report.cut
        assert cut.bytes_left > MIB // 2 and "an operation there has taken" in cut.why
        far.plan = []
        release(far)
        assert store.drain(LONG).done == {"pfs": [1]} and save.done("pfs")


def test_a_failing_tier_is_tried_again_and_then_told(tmp_path: Path, short_pauses: None) -> None:
    far = pfs(tmp_path, [Fault("reserve", 1, times=ALWAYS)])
    with opened([disk(tmp_path, name="near"), far]) as store:
        store.save(1, state(1, 1)).wait("near")
        report = store.drain(LONG)  # ends before its time
        [cut] = report.cut
        assert (cut.step, cut.tier) == (1, "pfs") and "injected" in cut.why
        far.plan = []
        assert store.drain(LONG).newest["pfs"] == 1


def test_saves_under_way_are_waited_for_and_one_that_hangs_is_told(tmp_path: Path) -> None:
    near = disk(tmp_path, name="near")
    with opened([host(), near, pfs(tmp_path)], policies=[]) as store:
        store.save(1, state(1, 1)).wait("near")
        near.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        save = store.save(2, state(2, 1))
        report = store.drain(1.0)
        assert report.newest == {"near": 1, "pfs": 1} and report.done == {"pfs": [1]}
        assert [(cut.step, cut.tier, cut.why) for cut in report.cut] == [(2, "near", "it is still being saved")]
        near.plan = []
        release(near)
        report = store.drain(LONG)
        assert report.newest == {"near": 2, "pfs": 2} and save.done("pfs")


def test_a_save_that_fails_is_told_and_raises_in_its_own_wait(tmp_path: Path, short_pauses: None) -> None:
    near = disk(tmp_path, name="near")
    with opened([near, pfs(tmp_path)]) as store:
        store.save(1, state(1, 1)).wait("near")
        near.plan = [Fault("reserve", 1, times=ALWAYS)]
        save = store.save(2, state(2, 1))
        report = store.drain(LONG)
        assert report.newest == {"near": 1, "pfs": 1}
        assert [cut.step for cut in report.cut] in ([2], [])  # [] if it had failed before the drain began
        with pytest.raises(SaveFailed):
            save.wait()
        near.plan = []
        store.save(2, state(2, 1))


def test_nothing_durable_for_too_long_raises_as_save_does(tmp_path: Path) -> None:
    near = disk(tmp_path, name="near")
    with opened([host(), near, pfs(tmp_path)], max_unsaved=0.2) as store:
        store.save(1, state(1, 1)).wait("near")
        near.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        store.save(2, state(2, 1))
        with pytest.raises(SaveFailed, match="max_unsaved"):
            store.drain("500ms")
        release(near)
        near.plan = []


# -- who may, and when ---------------------------------------------------------------------------


def test_a_store_that_has_not_saved_brings_down_what_earlier_ones_left(tmp_path: Path) -> None:
    with opened([disk(tmp_path, name="near")]) as store:
        store.save(1, state(1, 1)).wait("near")
    with opened([disk(tmp_path, name="near"), pfs(tmp_path)]) as store:
        assert store.drain(LONG).newest == {"near": 1, "pfs": 1}
        epochs = sorted((tmp_path / "pfs" / "run" / "epochs").glob("*.json"))
    with opened([disk(tmp_path, name="near"), pfs(tmp_path)]) as store:
        report = store.drain(LONG)
        assert report.done == {} and report.cut == [] and "nothing had to get down" in str(report)
        assert sorted((tmp_path / "pfs" / "run" / "epochs").glob("*.json")) == epochs  # not taken over for nothing


def test_a_run_without_checkpoints_is_left_alone(tmp_path: Path) -> None:
    with opened([disk(tmp_path, name="near"), pfs(tmp_path)]) as store:
        report = store.drain()
        assert (report.done, report.newest, report.cut) == ({}, {}, [])
        assert not (tmp_path / "pfs" / "run").exists()


def test_readers_are_refused_and_so_are_bad_times(tmp_path: Path) -> None:
    with opened([FileTier(folder(tmp_path / "near"), name="near")]) as store:
        with pytest.raises(ConfigError, match="'soon' is not a time"):
            store.drain("soon")
        with pytest.raises(ConfigError, match="out of range"):
            store.drain(0)
    with opened([FileTier(tmp_path / "near", name="near", read_only=True)], mode="r") as store:
        with pytest.raises(ConfigError, match="for reading"):
            store.drain()


def test_a_report_is_a_record_and_reads_well() -> None:
    report = draining.DrainReport(
        {"nvme": [7], "pfs": [6, 5, 4, 3, 2]}, {"nvme": 7, "pfs": 6}, [draining.Cut(7, "pfs", 3 << 20, "no time")], 2.0
    )
    assert str(report) == (
        "drained for 2 s: step 7 to nvme; steps 6, 5, …, 2 to pfs. Newest: step 7 on nvme, step 6 on pfs. "
        "Not there: step 7 on pfs (3.00 MiB left: no time)"
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.seconds = 1.0  # type: ignore[misc]


def test_a_drain_beside_a_close_that_gives_up(tmp_path: Path) -> None:
    far = pfs(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)])
    store = opened([disk(tmp_path, name="near"), far])
    store.save(1, state(1, 1)).wait("near")
    assert store.drain(0.3).cut
    with pytest.raises(WaitTimeout):
        store.close(0.5)
    release(far)
