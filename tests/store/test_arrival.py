"""How checkpoints get where they go: what is tried again, what is not planned, and what is said about it."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

import stepwell
from stepwell.errors import NotPlanned, SaveFailed, WaitTimeout
from stepwell.format.names import Attempt
from stepwell.policies.base import Policy
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state

pytestmark = pytest.mark.usefixtures("short_pauses")


# -- what passes ---------------------------------------------------------------------------------


def test_writes_that_fail_for_a_moment_are_repeated_from_host_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = disk(tmp_path, [Fault("write", 2, times=3)])
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        value = state(7.0, 1_000_000)
        save = store.save(1, value)
        value["model"]["w"].zero_()
        save.wait()
        assert len(tier.hit) == 3 and store.status().saves_failed == 0
        assert store.status().tier("disk").health == "up"
        assert save.report().error is None
    assert "writing to disk failed, again in" in caplog.text
    assert bool((stepwell.load(tmp_path / "disk" / "run")["model"]["w"] == 7).all())


def test_writes_that_go_on_failing_fail_the_save_and_the_tier_shows_it(tmp_path: Path) -> None:
    """Case F1."""
    tier = disk(tmp_path, [Fault("write", 2, errno=errno.EINVAL, times=ALWAYS)])
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        store.save(1, state()).wait()
        for step in range(2, 5):
            with pytest.raises(SaveFailed, match="EINVAL"):
                store.save(step, state()).wait()
        status = store.status()
        assert status.tier("disk").health == "failing" and "EINVAL" in status.tier("disk").detail
        assert status.saves_failed == 3 and status.tier("disk").newest_step == 1
        tier.plan = []
        store.save(5, state()).wait()
        assert store.status().tier("disk").health == "up"


def test_a_lower_tier_that_fails_is_tried_again_until_it_works(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, [Fault("reserve", 1, times=ALWAYS)], name="far")
    with stepwell.open(run="run", tiers=[host(), near, far]) as store:
        save = store.save(1, state())
        save.wait("near")
        with pytest.raises(SaveFailed, match="injected.*tier far") as caught:
            save.wait("far", timeout=20)
        assert caught.value.where["step"] == 1
        status = store.status().tier("far")
        assert status.health == "failing" and "injected" in status.detail and status.last_error == status.detail
        assert status.backlog == (1,) and status.backlog_bytes > 400_000 and status.retry_in_s is not None
        assert store.status().saves_failed == 0 and store.status().unsaved_seconds == 0
        store.save(2, state()).wait("near")
        far.plan = []
        eventually(lambda: save.done("far"))
        save.wait("far")
        assert save.report().error is None
    assert {path.name[:14] for path in (tmp_path / "far" / "run").glob("step-*")} == {
        "step-000000001",
        "step-000000002",
    }


def test_a_stalled_lower_tier_delays_nothing_else(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    store = stepwell.open(run="run", tiers=[host(), near, far])
    store.save(1, state()).wait("far")
    far.plan = [Fault("write", 1, "stall", times=ALWAYS)]
    for step in range(2, 8):
        store.save(step, state(step, 1_000_000)).wait("near", timeout=20)
        began = time.monotonic()
        assert store.status().tier("far").newest_step == 1
        assert time.monotonic() - began < 20  # the tier that hangs is not asked
    eventually(lambda: store.status().tier("far").backlog == (2, 3, 4, 5, 6, 7))
    assert store.restore(state(0.0, 1_000_000)) is not None
    began = time.monotonic()
    with pytest.raises(WaitTimeout, match="6 steps .*7. to far.*step 7 on near.*next store"):
        store.close(timeout=0.3)
    assert time.monotonic() - began < 20  # nor waited for longer than was said
    release(far)
    near, far = (Faulty(FileTier(tmp_path / name, name=name), []) for name in ("near", "far"))
    with stepwell.open(run="run", tiers=[host(), near, far]) as store:  # goes on with it
        target = state(0.0, 1_000_000)
        found = store.restore(target)
        assert found is not None and found.step == 7
        store.save(8, state(8.0)).wait("far")


def test_close_raises_while_the_last_tier_fails_and_says_why(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, [Fault("reserve", 1, times=ALWAYS)], name="far")
    store = stepwell.open(run="run", tiers=[host(), near, far])
    store.save(1, state()).wait()
    with pytest.raises(SaveFailed, match="injected.*step 1, tier far"):
        store.close()


# -- what is not planned -------------------------------------------------------------------------


@pytest.mark.parametrize("foreseen", ["at once", "once memory has it"])
def test_waiting_for_a_tier_where_it_is_not_sent_ends_before_the_first_tier_has_it(
    tmp_path: Path, foreseen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    policies: list[Policy] = [FlushRule("far", every_steps=10), FlushNewest("far")]
    with stepwell.open(run="run", tiers=[host(), near, far], policies=policies) as store:
        store.save(2, state()).wait("far")
        near.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        foresee = store._writer.steering.foresee

        async def late(attempt: Attempt, size_bytes: int, parts: Iterable[str]) -> set[str]:
            while attempt not in store.catalog.holdings:
                await asyncio.sleep(0.001)
            return await foresee(attempt, size_bytes, parts)

        if foreseen != "at once":
            monkeypatch.setattr(store._writer.steering, "foresee", late)
        save = store.save(3, state())
        with pytest.raises(NotPlanned, match=r"no policy sends this step there \(step 3, tier far\).*store.flush\(3"):
            save.wait("far", timeout=20)
        assert not save.done("near")
        near.plan = []
        release(near)
        save.wait("near")
        store.flush(3)
        assert [c.tiers for c in store.checkpoints()] == [("host", "near", "far")] * 2
        last = store.save(5, state())
        last.wait("near")
        assert not last.done("far")
    last.wait("far")  # at closing, the newest goes there whatever the cadence
    assert last.done("far")


def test_closing_raises_if_what_it_sends_down_does_not_arrive(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, [Fault("reserve", 1, times=ALWAYS)], name="far")
    store = stepwell.open(run="run", tiers=[host(), near, far], policies=[FlushNewest("far")])
    store.save(1, state()).wait()
    with pytest.raises(SaveFailed, match="injected.*step 1, tier far"):
        store.close()


def test_a_state_larger_than_the_arena_is_not_planned_for_host_memory(tmp_path: Path) -> None:
    with stepwell.open(run="run", tiers=[host(8), disk(tmp_path)]) as store:
        save = store.save(1, state(size=5_000_000))
        with pytest.raises(NotPlanned, match=r"does not stay in host memory.*bytes needed.*step 1, tier host"):
            save.wait("host")
        save.wait()


# -- what is said --------------------------------------------------------------------------------


def test_the_first_save_says_its_size_and_how_many_more_fit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "stepwell")
    with stepwell.open(tmp_path / "run") as store:
        for step in (1, 2):
            store.save(step, state(size=1_000_000)).wait()
    said = [record.getMessage() for record in caplog.records if "more of this size" in record.getMessage()]
    assert len(said) == 1 and said[0].startswith("step 1 is on disk: 3.82 MiB; ") and "free)" in said[0]
