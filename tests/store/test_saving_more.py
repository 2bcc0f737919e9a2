"""More of saving: tiers that hang, what status says, which steps and metrics are taken, several ranks."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepwell
import stepwell.store
from stepwell import chain
from stepwell.agreement import Agreement
from stepwell.chain import reserve
from stepwell.ending import Ending
from stepwell.errors import ConfigError, SaveFailed, StepwellError
from stepwell.jobs import Job, LocalStore
from stepwell.policies.base import Closing, Event, Move, View
from stepwell.settings import Settings
from stepwell.store import CheckpointStore
from stepwell.tiers.base import CheckpointKey, ShardKey
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state, steps

pytestmark = pytest.mark.usefixtures("short_pauses")


# -- tiers that hang -----------------------------------------------------------------------------


class Silent(FileTier):
    """Does not answer a scan until it may."""

    silent = False

    async def scan(self, run: str) -> Any:
        while self.silent:
            await asyncio.sleep(0.01)
        async for found in super().scan(run):
            yield found


def test_the_first_save_does_not_wait_for_a_scan_longer_than_block_timeout(tmp_path: Path) -> None:
    tier = Silent(tmp_path, name="disk")
    with stepwell.open(run="run", tiers=[host(), tier], block_timeout=0.2) as store:
        tier.silent = True
        began = time.monotonic()
        with pytest.raises(SaveFailed, match=r"step 1.*Some tier hangs; the next save is tried again"):
            store.save(1, state())
        assert time.monotonic() - began < 5
        tier.silent = False
        store.save(1, state()).wait()
        assert steps(store, "disk") == [1]


@pytest.mark.parametrize("operation", ["write", "commit"])
def test_a_tier_that_hangs_keeps_the_tensors_of_no_state_alive(tmp_path: Path, operation: Any) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault(operation, tier._counts[operation] + 1, "stall", times=ALWAYS)]
        value = {"model": {"w": torch.ones(100_000), "t": torch.ones(300, 300).T}}
        alive = [weakref.ref(tensor) for tensor in value["model"].values()]
        save = store.save(2, value)
        save.wait("host")
        value.clear()
        eventually(lambda: not any(ref() is not None for ref in alive))
        assert not save.done()
        release(tier)
        save.wait()
        assert bool((stepwell.load(tmp_path / "disk" / "run")["model"]["t"] == 1).all())


def test_what_an_error_at_the_commit_says(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        store.save(1, state()).wait()
        tier.plan = [Fault("commit", tier._counts["commit"] + 1, errno=errno.EIO)]
        with pytest.raises(SaveFailed, match=r"EIO.*step 2.*Checkpoints from before are untouched.*save again"):
            store.save(2, state()).wait()
        store.save(2, state()).wait()


# -- what status says ----------------------------------------------------------------------------


def test_status_counts_the_saves_that_are_not_on_the_first_tier_yet(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        store.save(1, state()).wait()
        assert store.status().tier("disk").backlog == () and store.status().tier("disk").backlog_bytes == 0
        tier.plan = [Fault("write", 1, "stall", times=ALWAYS)]
        saves = [store.save(step, state()) for step in (2, 3)]
        now = store.status().tier("disk")
        assert now.backlog == (2, 3) and now.backlog_bytes == sum(save.nbytes for save in saves)
        assert store.status().tier("host").backlog == ()
        release(tier)
        saves[1].wait()
        eventually(lambda: store.status().tier("disk").backlog == ())


def test_an_old_error_of_flushes_does_not_hide_that_saves_fail_now(tmp_path: Path) -> None:
    near, far = disk(tmp_path, name="near"), disk(tmp_path, name="far")
    with stepwell.open(run="run", tiers=[host(), near, far]) as store:
        store.save(1, state()).wait("far")
        flusher = store._writer.flushers["near"]
        flusher.last_error = stepwell.errors.TierError("long ago")
        assert store.status().tier("near").health == "up" and "long ago" in str(store.status().tier("near").last_error)
        near.plan = [Fault("reserve", 1, times=ALWAYS)]
        with pytest.raises(SaveFailed):
            store.save(2, state()).wait()
        now = store.status().tier("near")
        assert now.health == "failing" and "injected" in now.detail and "injected" in str(now.last_error)
        near.plan = []
        store.save(2, state()).wait()


# -- steps, words and numbers --------------------------------------------------------------------


@pytest.mark.parametrize("step", [np.int64(5), np.uint8(5), torch.tensor(5), np.array(5)])
def test_a_step_is_any_integer(tmp_path: Path, step: Any) -> None:
    with stepwell.open(tmp_path / "run") as store:
        save = store.save(step, state(5.0)).wait()
        assert save.checkpoint == "step-000000005.1-1" and type(save.step) is int
        store.save(6, state(6.0)).wait()
        target = state(0.0)
        found = store.restore(target, step)
        assert found is not None and found.step == 5 and bool((target["model"]["w"] == 5).all())
        store.flush(step)
        store.rewind(step)
        store.save(step + 2, state()).wait()
        assert [c.step for c in store.checkpoints()] == [5, 7]


@pytest.mark.parametrize(
    "step", [True, np.True_, 5.0, np.float32(5), "5", None, -1, np.int64(-1), torch.tensor([1, 2])]
)
def test_nothing_else_is_a_step(tmp_path: Path, step: Any) -> None:
    with stepwell.open(tmp_path / "run") as store, pytest.raises(ConfigError, match="a step is an integer from 0, not"):
        store.save(step, state())


@pytest.mark.parametrize("metric", [torch.zeros(2), np.zeros(2), "no number", None, 10**400, [1.0]])
def test_a_metric_that_is_no_number_is_refused_by_name(tmp_path: Path, metric: Any) -> None:
    with stepwell.open(tmp_path / "run") as store:
        with pytest.raises(ConfigError, match="metric 'loss' is not a number"):
            store.save(1, state(), metrics={"loss": metric})
        store.save(1, state(), metrics={"loss": torch.tensor(0.5)}, tags="good").wait()
        assert store.checkpoints()[0].metrics == {"loss": 0.5} and list(store.checkpoints()[0].tags) == ["good"]


def test_a_rewind_that_a_failed_save_could_not_carry_out_ends_with_the_next_restore(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with stepwell.open(run="run", tiers=[host(), tier]) as store:
        for step in (10, 20):
            store.save(step, state(step)).wait()
        store.rewind(10)
        tier.plan = [Fault("reserve", tier._counts["reserve"] + 1)]
        with pytest.raises(SaveFailed):
            store.save(15, state()).wait()
        found = store.restore(state())  # of step 20: the rewind was never committed
        assert found is not None and found.step == 20
        store.save(21, state()).wait()
        assert [c.step for c in store.checkpoints()] == [10, 20, 21]


# -- the end -------------------------------------------------------------------------------------


class Faint:
    """A policy with a fault."""

    def decide(self, event: Event, view: View) -> list[Move]:
        if isinstance(event, Closing):
            raise RuntimeError("a fault of the policy")
        return []


def test_a_dropped_store_is_freed_whatever_goes_wrong_at_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    freed = threading.Event()
    free = Ending._free

    async def noted(ending: Ending, patience_s: float) -> None:
        await free(ending, patience_s)
        freed.set()

    monkeypatch.setattr(Ending, "_free", noted)
    store = stepwell.open(run="run", tiers=[host(), disk(tmp_path)], policies=[Faint()])
    store.save(1, state()).wait()
    del store
    assert freed.wait(20)
    assert "a fault of the policy" in caplog.text


# -- several ranks -------------------------------------------------------------------------------


@contextlib.contextmanager
def ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[list[CheckpointStore], list[Faulty]]]:
    """Two ranks as two stores of this process, on one shared folder."""
    shared, own = LocalStore(), threading.local()
    monkeypatch.setattr(stepwell.store, "current_job", lambda: Job(own.rank, 2, shared, None, 0))
    (tmp_path / "disk").mkdir()
    tiers = [Faulty(FileTier(tmp_path / "disk", name="disk", scope="shared"), []) for _ in range(2)]
    stores = [CheckpointStore("run", [tier], "w", Settings(rank_timeout_seconds=1e6)) for tier in tiers]
    for rank, store in enumerate(stores):
        save = store.save

        def as_rank(*arguments: Any, rank: int = rank, save: Any = save) -> stepwell.Save:
            own.rank = rank
            found: stepwell.Save = save(*arguments)
            return found

        monkeypatch.setattr(store, "save", as_rank)
    try:
        yield stores, tiers
    finally:
        for store in stores:
            with contextlib.suppress(StepwellError):
                store.close()


def test_ranks_do_not_wait_for_a_leader_that_cannot_take_the_run_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks(tmp_path, monkeypatch) as (stores, tiers):
        tiers[0].plan = [Fault("commit", 1)]
        saves: list[stepwell.Save] = []
        threads = [threading.Thread(target=lambda s=s: saves.append(s.save(1, state()))) for s in stores]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(saves) == 2
        for save in saves:
            with pytest.raises(SaveFailed, match="injected"):
                save.wait(timeout=5)


def test_ranks_are_told_what_keeps_the_leader_from_restoring(tmp_path: Path) -> None:
    shared = LocalStore()
    leader, other = (Agreement(Job(rank, 2, shared, None, 0), "g", 20.0, asyncio.run) for rank in range(2))

    def look() -> list[Any]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leader.candidates(look)
    with pytest.raises(StepwellError, match="rank 0 cannot restore: KeyboardInterrupt"):
        other.candidates(list)


# -- room that is given back ---------------------------------------------------------------------


def test_room_that_was_granted_goes_back_even_if_nobody_waits_for_that(tmp_path: Path) -> None:
    tier = disk(tmp_path, [Fault("reserve", 2), Fault("abort", 1, "stall")])
    shards = [(ShardKey(CheckpointKey("run", "step-000000001.1-1"), name), 5000) for name in ("a", "b")]

    async def cancelled() -> int:
        await tier.start()
        others = set(chain._returning)  # of loops that tests have ended in the middle
        asking = asyncio.ensure_future(reserve(tier, shards))
        while len(tier.hit) < 2:
            await asyncio.sleep(0.001)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled() and tier.usage().in_flight_bytes == 5000
        tier.release()
        while chain._returning - others:
            await asyncio.sleep(0.001)
        left = tier.usage().in_flight_bytes
        await tier.close()
        return left

    assert asyncio.run(cancelled()) == 0
