"""Budgets: no tier ever holds more than its capacity, or fills a disk that others use; and what saves do meanwhile."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stepwell
from stepwell.errors import NotPlanned, SaveFailed, SaveSkipped, TierFull
from stepwell.policies.base import Policy
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.policies.retain import Retain
from stepwell.settings import Settings, TierOptions
from stepwell.store import CheckpointStore
from stepwell.tiers._books import Books
from stepwell.tiers._writers import KEEP_FREE_BYTES
from stepwell.tiers.base import CheckpointKey, Reservation, ShardKey, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.pfs import PfsTier
from stepwell.tiers.wrap import Event, Fault, Faulty, Traced
from tests.mounts import tmpfs
from tests.store.helpers import ALWAYS, eventually, host, release, steps
from tests.tiers.helpers import disk, no_fallocate, on

MIB = 1 << 20
#: a checkpoint of `state`: one shard, its header filled up to 4 KiB, and no more
SIZE = 8 * MIB
#: on top of whole checkpoints: file systems take some blocks of their own for a file. One checkpoint more than fits
#: would be seen all the same
SLACK = SIZE // 2


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))


def state(value: int) -> dict[str, Any]:
    return {"model": {"w": torch.full(((SIZE - 4096) // 4,), float(value))}}


def taken_bytes(root: Path) -> int:
    """What the shards below a folder take on the disk."""
    found = 0
    for folder, _, names in os.walk(root):
        for name in names:
            if name.endswith(".safetensors"):
                try:
                    found += os.lstat(f"{folder}/{name}").st_blocks * 512
                except FileNotFoundError:  # deleted meanwhile
                    pass
    return found


class Watch:
    """Looks at tiers at the begin and the end of each of their operations, and all the time beside that."""

    def __init__(self) -> None:
        self._tiers: list[tuple[Tier, Path]] = []
        self.highest: dict[str, int] = {}
        self.beyond: list[str] = []

    def on(self, tier: Tier, root: Path) -> Traced:
        self._tiers.append((tier, root))
        return Traced(tier, lambda event: self._operation(tier, root))

    def _operation(self, tier: Tier, root: Path) -> None:
        usage, capacity = tier.usage(), tier.info.capacity_bytes
        assert capacity is not None
        if max(usage.physical_bytes, usage.logical_bytes) > capacity:
            self.beyond.append(f"{tier.info.name} says that it holds {usage} of {capacity}")
        self._look(tier, root)

    def _look(self, tier: Tier, root: Path) -> None:
        name, found, capacity = tier.info.name, taken_bytes(root), tier.info.capacity_bytes
        assert capacity is not None
        self.highest[name] = max(found, self.highest.get(name, 0))
        if found > capacity:
            self.beyond.append(f"{name} holds {found} of {capacity}")

    @contextmanager
    def all_the_time(self) -> Iterator[None]:
        ended = threading.Event()

        def work() -> None:
            while not ended.wait(0.001):
                for tier, root in self._tiers:
                    self._look(tier, root)

        thread = threading.Thread(target=work)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


class Chain:
    """Host memory, a disk and a shared tier, both of them small and watched."""

    def __init__(self, folder: Path, near_bytes: int, far_bytes: int, rate: float | None = None) -> None:
        self.watch = Watch()
        for name in ("near", "far"):
            (folder / name).mkdir()
        near = FileTier(folder / "near", name="near", capacity_bytes=near_bytes, reading="direct")
        shared = PfsTier(
            folder / "far", name="far", capacity_bytes=far_bytes, reading="direct",
            write_bytes_per_s=rate, delete_pause_s=0,
        )  # fmt: skip
        self.far = Faulty(shared, [])
        self.tiers = [host(16), self.watch.on(near, folder / "near"), self.watch.on(self.far, folder / "far")]
        self.policies: list[Policy] = [
            FlushRule("far"), FlushNewest("far"), Retain("near", last=1), Retain("far", last=2)
        ]  # fmt: skip

    def stall(self) -> None:
        """What is written to the shared tier from now on hangs."""
        self.far.plan = [Fault("write", 1, "stall", times=ALWAYS)]

    def go_on(self) -> None:
        self.far.plan = []
        release(self.far)

    def open(self, on_pressure: str = "block", grace_s: float = 0.0) -> CheckpointStore:
        """grace_s: how long deleted files stay on the shared tier."""
        options = {"far": TierOptions(delete_grace_s=grace_s)}
        return CheckpointStore(
            "run", self.tiers, "w", Settings(on_pressure=on_pressure), self.policies, options=options
        )


def happened(store: CheckpointStore, what: str) -> list[tuple[int, str]]:
    """(step, tier) of the entries of that kind in the event log."""
    return [(e.step, e.tier) for e in list(store._writer.events.entries) if e.what == what]


# -- capacity ------------------------------------------------------------------------------------


def test_saves_wait_for_room_and_no_tier_ever_holds_more_than_its_capacity(tmp_path: Path) -> None:
    """on_pressure = "block": saves come faster than they get down, and each of them arrives."""
    chain = Chain(tmp_path, near_bytes=2 * SIZE + SLACK, far_bytes=3 * SIZE + SLACK, rate=100 * MIB)
    with chain.watch.all_the_time(), chain.open(on_pressure="block") as store:
        saves = [store.save(step, state(step)) for step in range(1, 9)]
        for save in saves:
            save.wait("near", timeout=100)
            save.wait("far", timeout=100)
        assert store.status().saves_failed == 0
        eventually(lambda: steps(store, "far") == [7, 8] and steps(store, "near") == [8])
    assert chain.watch.beyond == []
    assert chain.watch.highest["near"] >= 2 * SIZE and chain.watch.highest["far"] >= 3 * SIZE  # it was filled
    assert torch.equal(stepwell.load(tmp_path / "far" / "run@8")["model"]["w"], state(8)["model"]["w"])


def test_files_that_wait_for_their_grace_count(tmp_path: Path) -> None:
    """A deleted checkpoint whose files stay for readers still takes its room; a flush waits until they are freed."""
    chain = Chain(tmp_path, near_bytes=4 * SIZE + SLACK, far_bytes=3 * SIZE + SLACK)
    with chain.watch.all_the_time(), chain.open(grace_s=0.3) as store:
        for step in range(1, 7):
            store.save(step, state(step)).wait("near", timeout=100)
        eventually(lambda: steps(store, "far") == [5, 6])
        assert len(happened(store, "freed")) >= 2
    assert chain.watch.beyond == []


@given(
    capacity=st.integers(0, 40_000),
    asked=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20_000), st.booleans()), max_size=12),
)
def test_books_in_whole_blocks_never_exceed_their_capacity(capacity: int, asked: list[tuple[int, int, bool]]) -> None:
    books = Books(capacity, 4096)
    for name, size, commits in asked:
        shard = ShardKey(CheckpointKey("run", "step"), str(name))
        if books.over_capacity(shard, size, "tier") is None:
            books.reserve(shard, size)
            if commits:
                books.commit(shard, -(-size // 4096) * 4096)
        blocks = [-(-size // 4096) for book in (books.reserved, books.physical) for size in book.values()]
        assert 4096 * sum(blocks) == books.taken_bytes <= capacity


# -- the disk's own room -------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "small", 64) as folder:
        yield folder


@pytest.mark.parametrize("ahead", [True, False], ids=["fallocate", "no fallocate"])
def test_a_capacity_yields_to_what_other_programs_leave(
    small: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    near = FileTier(small, name="near", capacity_bytes=1 << 40, reading="direct")
    if not ahead:
        monkeypatch.setattr(near._medium, "allocate", no_fallocate)
    least = 64 * MIB // 100  # left to others, whatever happens
    free: list[int] = []

    def look(event: Event) -> None:
        space = os.statvfs(small)
        free.append(space.f_bavail * space.f_frsize)

    tiers = [host(16), Traced(near, look)]
    with stepwell.open(run="run", tiers=tiers, policies=[Retain("near", last=3)]) as store:
        for step in (1, 2, 3, 4, 5):
            store.save(step, state(step)).wait("near", timeout=60)
        eventually(lambda: steps(store, "near") == [3, 4, 5])
        with open(small / "other", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, 35 * MIB)
        with pytest.raises(SaveFailed) as caught:
            store.save(6, state(6)).wait("near", timeout=60)
        full = caught.value.__cause__
        assert isinstance(full, TierFull) and full.where["needed_bytes"] == SIZE
        assert 0 < full.where["free_bytes"] < 5 * MIB  # type: ignore[operator]
        assert store.status().tier("near").free_bytes == full.where["free_bytes"]
        assert steps(store, "near") == [3, 4, 5]
        os.unlink(small / "other")
        store.save(7, state(7)).wait("near", timeout=60)
    assert min(free) >= least
    assert torch.equal(stepwell.load(small / "run@7")["model"]["w"], state(7)["model"]["w"])


@pytest.mark.parametrize("ahead", [True, False], ids=["fallocate", "no fallocate"])
def test_shards_that_ask_together_are_not_promised_the_same_room(
    small: Path, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(tier: FileTier) -> None:
        if not ahead:
            monkeypatch.setattr(tier._medium, "allocate", no_fallocate)
        shards = [ShardKey(CheckpointKey("run", "step-1"), f"{number}.safetensors") for number in range(8)]
        answers = await asyncio.gather(*(tier.reserve(shard, 20 * MIB) for shard in shards))
        granted = [answer for answer in answers if isinstance(answer, Reservation)]
        assert len(granted) == 3
        left = tier.usage().free_bytes
        assert left is not None and left <= 4 * MIB - min(KEEP_FREE_BYTES, 64 * MIB // 100)
        for reservation in granted:
            await tier.abort(reservation)
        assert isinstance(await tier.reserve(shards[0], 60 * MIB), Reservation)

    on(disk(small / "root"), scenario)


# -- pressure ------------------------------------------------------------------------------------


def filled(chain: Chain, store: CheckpointStore, count: int) -> list[stepwell.Save]:
    """The near tier is full of checkpoints that must get to the far one, of which the first is moving and hangs."""
    chain.stall()
    saves = []
    for step in range(1, count + 1):
        saves.append(store.save(step, state(step)).wait("near", timeout=60))
        eventually(lambda: bool(chain.far.hit))
    return saves


def test_skip_says_so_and_saves_again_once_there_is_room(tmp_path: Path) -> None:
    chain = Chain(tmp_path, near_bytes=2 * SIZE + SLACK, far_bytes=3 * SIZE + SLACK)
    with chain.watch.all_the_time(), chain.open(on_pressure="skip") as store:
        saves = filled(chain, store, 2)
        skipped = store.save(3, state(3))
        with pytest.raises(SaveFailed, match="on_pressure = 'skip'") as caught:
            skipped.wait(timeout=60)
        assert isinstance(caught.value.__cause__, SaveSkipped)
        assert happened(store, "skipped") == [(3, "")] and happened(store, "failed") == []
        assert store.status().saves_skipped == 1
        chain.go_on()
        for save in saves:
            save.wait("far", timeout=60)
        eventually(lambda: steps(store, "near") == [2])
        store.save(4, state(4)).wait("far", timeout=60)
    assert chain.watch.beyond == []


def test_the_newest_wins_and_those_dropped_are_reported(tmp_path: Path) -> None:
    chain = Chain(tmp_path, near_bytes=3 * SIZE + SLACK, far_bytes=3 * SIZE + SLACK)
    with chain.watch.all_the_time(), chain.open(on_pressure="newest-wins") as store:
        saves = filled(chain, store, 3)
        newest = store.save(4, state(4)).wait("near", timeout=60)  # although nothing gets down
        with pytest.raises(NotPlanned, match="newer"):
            saves[1].wait("far", timeout=60)
        assert happened(store, "cancelled") == [(2, "far")]
        assert steps(store, "near") == [1, 3, 4] and set(store.status().tier("far").backlog) == {1, 3, 4}
        chain.go_on()
        newest.wait("far", timeout=60)
        eventually(lambda: store.status().tier("far").backlog == () and 4 in steps(store, "far"))
        assert store.status().saves_failed == 0
        assert (2, "far") not in happened(store, "flushed")
    assert chain.watch.beyond == []


def test_blocked_saves_go_on_when_what_hangs_goes_on(tmp_path: Path) -> None:
    chain = Chain(tmp_path, near_bytes=2 * SIZE + SLACK, far_bytes=3 * SIZE + SLACK)
    with chain.watch.all_the_time(), chain.open(on_pressure="block") as store:
        saves = filled(chain, store, 2)

        def go_on_once_it_waits() -> None:
            eventually(lambda: store.status().tier("near").backlog == (3,))
            chain.go_on()

        helper = threading.Thread(target=go_on_once_it_waits)
        helper.start()
        store.save(3, state(3)).wait("far", timeout=60)
        assert all(save.done("far") for save in saves)
        assert store.status().saves_failed == 0 and happened(store, "skipped") == []
        helper.join()
    assert chain.watch.beyond == []
