"""`on_pressure`: what a save does when those before it are not down yet."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

import stepwell
from stepwell.epochs import Writership
from stepwell.jobs import current_job
from stepwell.policies.base import Cancel, Policy, View
from stepwell.policies.flush import DropBacklog, FlushNewest, FlushRule
from stepwell.policies.retain import Retain
from stepwell.runtime import Runtime
from stepwell.settings import Settings
from stepwell.store import CheckpointStore
from stepwell.tiers.base import Refused, Reservation, ShardKey, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.wrap import Fault, Faulty, Wrapper
from tests.store.helpers import ALWAYS, disk, eventually, host, release, state, steps

SIZE = 500_000  # numbers of a state: 4 MB
ROOM = 10 << 20  # of the near tier: two checkpoints


def opened(path: Path, far: Faulty, pressure: str, last: int = 1, block_s: float = 20.0) -> CheckpointStore:
    (path / "near").mkdir(exist_ok=True)
    near = FileTier(path / "near", name="near", capacity_bytes=ROOM)
    policies: list[Policy] = [FlushRule("far"), FlushNewest("far"), DropBacklog(), Retain("near", last=last)]
    settings = Settings(on_pressure=pressure, block_timeout=block_s)
    return CheckpointStore("run", [near, far], "w", settings, policies)


def events(store: CheckpointStore, what: str) -> list[int]:
    return [entry.step for entry in store._writer.events.entries if entry.what == what]


def test_block_waits_until_a_flush_has_made_room(tmp_path: Path) -> None:
    far = disk(tmp_path, [Fault("write", 1, "stall")], name="far")
    with opened(tmp_path, far, "block") as store:
        store.save(1, state(1, SIZE)).wait("near")
        store.save(2, state(2, SIZE)).wait("near")
        eventually(lambda: bool(far.hit))
        release_later(far)
        store.save(3, state(3, SIZE)).wait("far")  # blocks until step 1 is down and can go
        assert store.status().saves_skipped == 0 and steps(store, "far") == [1, 2, 3]


def release_later(far: Faulty) -> None:
    threading.Timer(0.3, release, [far]).start()


class Behind(Wrapper):
    """Says that there is no room when that is not true any more."""

    meanwhile: Callable[[], Awaitable[None]]

    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        answer = await self.tier.reserve(shard, size_bytes, resume=resume)
        if isinstance(answer, Refused):
            await self.meanwhile()
        return answer


@pytest.mark.parametrize(
    ("pressure", "moment"),
    [
        ("block", "gone"),
        ("skip", "gone"),
        ("newest-wins", "gone"),
        ("block", "undecided"),
        ("newest-wins", "undecided"),
        ("block", "looked for"),
        ("newest-wins", "looked for"),
    ],
)
def test_room_that_comes_while_there_is_said_to_be_none_is_taken(
    tmp_path: Path, pressure: str, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = disk(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)], name="far")
    (tmp_path / "near").mkdir()
    near = Behind(FileTier(tmp_path / "near", name="near", capacity_bytes=ROOM))
    policies: list[Policy] = [FlushRule("far"), FlushNewest("far"), Retain("near", last=1)]
    with CheckpointStore("run", [near, far], "w", Settings(on_pressure=pressure), policies) as store:

        async def until(there: Callable[[], bool]) -> None:
            while not there():
                await asyncio.sleep(0.001)

        def on_near() -> list[int]:
            held = store.catalog.holdings.items()
            return [attempt.step for attempt, copies in held if any(copy.tier is near for copy in copies)]

        async def meanwhile() -> None:
            if moment == "gone":
                release(far)
                await until(lambda: on_near() == [2] and not store._writer.busy)
                return
            views = store._writer.steering.views
            look, looks = views.look, 0

            async def late() -> View:
                nonlocal looks
                looks += 1
                if moment == "looked for" and looks == 1:  # by whoever asks whether something may go
                    release(far)
                    await until(lambda: not store._writer.flushers["far"].goals)
                    return views.now()
                await asyncio.sleep(0.1)
                return await look()

            monkeypatch.setattr(views, "look", late)
            if moment == "undecided":
                release(far)
                await until(lambda: not store._writer.flushers["far"].goals)

        near.meanwhile = meanwhile
        store.save(1, state(1, SIZE)).wait("near")
        store.save(2, state(2, SIZE)).wait("near")
        eventually(lambda: bool(far.hit))
        store.save(3, state(3, SIZE)).wait("near")
        assert store.status().saves_skipped == store.status().saves_failed == 0


def test_what_is_being_read_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And goes as soon as it is not, although nothing else happens then."""
    monkeypatch.setattr("stepwell.room.AGAIN_S", 60.0)
    (tmp_path / "near").mkdir()
    near = Faulty(FileTier(tmp_path / "near", name="near", capacity_bytes=ROOM), [])
    policies: list[Policy] = [FlushRule("far"), Retain("near", last=1)]
    with CheckpointStore("run", [near, disk(tmp_path, name="far")], "w", Settings(), policies) as store:
        store.save(1, state(1, SIZE)).wait("far")
        near.plan = [Fault("read", 1, "stall", times=ALWAYS)]
        target = state(0, SIZE)
        reader = threading.Thread(target=store.restore, args=(target, 1), daemon=True)
        reader.start()
        eventually(lambda: bool(near.hit))
        near.plan = []  # only that one
        room = store._writer.saver.room
        make = room.make_room

        async def waits(tier: Tier, patience_s: float) -> bool:
            release_later(near)
            return await make(tier, patience_s)

        monkeypatch.setattr(room, "make_room", waits)
        store.save(2, state(2, SIZE)).wait("far")
        store.save(3, state(3, SIZE)).wait("near")
        reader.join()
        assert near.hit and torch.equal(target["model"]["w"], state(1, SIZE)["model"]["w"])


class Reluctant(Wrapper):
    """Gives room back only once somebody waits for it."""

    wanted: asyncio.Event

    async def abort(self, reservation: Reservation) -> None:
        await self.wanted.wait()
        await self.tier.abort(reservation)


def test_the_room_of_a_save_that_fails_is_taken_although_the_last_tier_is_stuck(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There it asks whether the run is still its own, before it removes the rest of what it wrote."""
    monkeypatch.setattr("stepwell.savework.GIVE_UP_S", 60.0)
    monkeypatch.setattr("stepwell.room.AGAIN_S", 60.0)
    (tmp_path / "near").mkdir()
    small = FileTier(tmp_path / "near", name="near", capacity_bytes=ROOM * 2 // 3)
    near, far = Reluctant(Faulty(small, [Fault("write", 1, "error")])), disk(tmp_path, name="far")
    near.wanted, done = asyncio.Event(), threading.Event()
    with CheckpointStore("run", [near, far], "w", Settings(block_timeout=20.0), [FlushRule("far")]) as store:
        room = store._writer.saver.room
        make = room.make_room

        async def hangs(writership: Writership) -> bool:
            while not done.is_set():
                await asyncio.sleep(0.01)
            return True

        async def waits(tier: Tier, patience_s: float) -> bool:
            near.wanted.set()
            return await make(tier, patience_s)

        store._runtime.run(store._writer.owner.take(current_job()))
        monkeypatch.setattr(Writership, "still_ours", hangs)
        monkeypatch.setattr(room, "make_room", waits)
        try:
            failed, save = store.save(1, state(1, SIZE)), store.save(2, state(2, SIZE))
            save.wait("near", timeout=15)
        finally:
            done.set()
        with pytest.raises(stepwell.SaveFailed):
            failed.wait("near")
        eventually(lambda: [folder.name[5:14] for folder in (tmp_path / "near/run").glob("step-*")] == ["000000002"])


def test_block_gives_up_in_the_end_and_says_why(tmp_path: Path) -> None:
    far = disk(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)], name="far")
    with opened(tmp_path, far, "block", block_s=0.5) as store:
        store.save(1, state(1, SIZE)).wait("near")
        store.save(2, state(2, SIZE)).wait("near")
        with pytest.raises(stepwell.SaveFailed):
            store.save(3, state(3, SIZE)).wait("near")
        assert steps(store, "near") == [1, 2]
        release(far)
        eventually(lambda: steps(store, "far") == [1, 2] and steps(store, "near") == [2])
        store.save(4, state(4, SIZE)).wait("far")


def test_skip_gives_the_save_up_at_once(tmp_path: Path) -> None:
    far = disk(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)], name="far")
    with opened(tmp_path, far, "skip") as store:
        store.save(1, state(1, SIZE)).wait("near")
        store.save(2, state(2, SIZE)).wait("near")
        skipped = store.save(3, state(3, SIZE))
        with pytest.raises(stepwell.SaveFailed, match="on_pressure") as caught:
            skipped.wait("near")
        assert isinstance(caught.value.__cause__, stepwell.SaveSkipped)
        status = store.status()
        assert (status.saves_skipped, status.saves_failed) == (1, 0) and events(store, "skipped") == [3]
        release(far)
        eventually(lambda: steps(store, "far") == [1, 2] and steps(store, "near") == [2])  # the room is there only then
        store.save(4, state(4, SIZE)).wait("far")


def test_newest_wins_lets_the_oldest_go_that_waits(tmp_path: Path) -> None:
    far = disk(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)], name="far")
    with opened(tmp_path, far, "newest-wins", last=1) as store:
        saves = [store.save(step, state(step, SIZE)) for step in (1, 2)]
        for save in saves:
            save.wait("near")
        eventually(lambda: bool(far.hit))
        release_later(far)
        store.save(3, state(3, SIZE)).wait("far")
    assert 3 in [
        c.step for c in stepwell.open(run="run", tiers=[FileTier(tmp_path / "far", name="far")], mode="r").checkpoints()
    ]


def test_without_anything_to_wait_for_a_full_tier_is_an_error_at_once(tmp_path: Path) -> None:
    for pressure in ("block", "skip", "newest-wins"):
        (tmp_path / pressure).mkdir()
        store = opened(tmp_path / pressure, disk(tmp_path / pressure, name="far"), pressure, last=5)
        for step in (1, 2):
            store.save(step, state(step, SIZE)).wait("far")
        with pytest.raises(stepwell.SaveFailed) as caught:
            store.save(3, state(3, SIZE)).wait("near")
        assert isinstance(caught.value.__cause__, stepwell.TierFull)
        assert store.status().saves_skipped == 0
        with pytest.raises(stepwell.SaveFailed):
            store.close()


def test_skip_when_host_memory_and_disk_are_behind(tmp_path: Path) -> None:
    slow = disk(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)])
    with CheckpointStore("run", [host(24), slow], "w", Settings(on_pressure="skip")) as store:
        first = store.save(1, state(1, 2 * SIZE))
        with pytest.raises(stepwell.SaveFailed, match="on_pressure"):
            store.save(2, state(2, 4 * SIZE)).wait("disk")
        release(slow)
        first.wait("disk")
        store.save(3, state(3, 2 * SIZE)).wait("disk")
        assert steps(store, "disk") == [1, 3]


def test_what_was_taken_back_and_is_asked_for_again_comes_after_what_was_left_is_gone(tmp_path: Path) -> None:
    far = disk(tmp_path, [Fault("drop", 1, "stall", times=ALWAYS)], name="far")
    with CheckpointStore("run", [disk(tmp_path, name="near"), far], "w", Settings(), []) as store:
        store.save(1, state(1)).wait("near")
        [attempt] = store.catalog.holdings
        Runtime.get().loop.call_soon_threadsafe(store._writer._taken_back, Cancel(attempt.folder, "far", "a test"))
        eventually(lambda: len(far.hit) == 2)  # the first is that of an old log
        release_later(far)
        store.flush(1, "far")
    assert (stepwell.load(tmp_path / "far" / "run", part="model")["w"] == 1).all()
