"""Stores on shared host memory: what a process that was killed leaves, and whether the next one may believe it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import stepwell
from stepwell.policies.evict import LRU
from stepwell.tiers import _shm
from stepwell.tiers.base import CheckpointKey, ChunkIO, Result, ShardKey, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.shared import SharedHostTier
from tests.store.helpers import eventually, state, steps

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


class Stuck(FileTier):
    """A disk that takes nothing any more once it is stuck."""

    stuck = False

    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        if self.stuck:
            await asyncio.Event().wait()
        return await super().write(chunks)


@dataclass(frozen=True)
class Place:
    """Where a run is: its disk, and its memory."""

    disk: Path
    memory: Path

    def tiers(self) -> list[Tier]:
        host = SharedHostTier(
            LRU(), 64 * MIB, arena=_shm.arena_name("host", "run", 0, str(self.disk)), run="run", root=self.memory,
            chunk_bytes=MIB, ahead=False,
        )  # fmt: skip
        return [host, Stuck(self.disk, name="disk", reading="direct")]

    def open(self, mode: str = "w") -> stepwell.CheckpointStore:
        return stepwell.open(run="run", tiers=self.tiers(), mode=mode)  # type: ignore[arg-type]

    def die(self, on_disk: Sequence[int], in_memory: Sequence[int], size: int = 100_000) -> None:
        """A process saves these steps, the latter to a disk that is stuck, and is killed. size: of a state, in numbers
        of 8 bytes."""
        steps = f"{list(on_disk)!r}, {list(in_memory)!r}, {size}"
        call = f"save_and_die({str(self.disk)!r}, {str(self.memory)!r}, {steps})"
        code = f"from tests.store.test_shared_memory import *\n{call}"
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=100, check=False)
        assert done.returncode == -signal.SIGKILL


def save_and_die(disk: str, memory: str, on_disk: Sequence[int], in_memory: Sequence[int], size: int) -> None:
    store = Place(Path(disk), Path(memory)).open()
    last = store.tiers[-1]
    assert isinstance(last, Stuck)
    for step in on_disk:
        store.save(step, state(step, size)).wait()
    last.stuck = True
    for step in in_memory:
        save = store.save(step, state(step, size)).wait(survives="process", timeout=60)
        assert save.done("host") and not save.done("disk")
    os.kill(os.getpid(), signal.SIGKILL)


def keep_in_budget(disk: str, memory: str) -> None:
    """Saves and restores more than the memory holds; prints the most that it took beyond what was there before."""

    def anonymous() -> int:
        rows = Path("/proc/self/status").read_text().splitlines()
        return next(int(row.split()[1]) << 10 for row in rows if row.startswith("RssAnon"))

    held = state(0, 16 << 20)
    held["model"]["w"] += 1
    most, before = 0, anonymous()
    with Place(Path(disk), Path(memory)).open() as store:
        for step in range(1, 9):
            store.save(step, held).wait()
            store.restore(held, step=max(1, step - 3))
            arena = sum(found.size_bytes for found in _shm.arenas(memory))
            most = max(most, arena + anonymous() - before)
    print(most)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    memory = Path(tempfile.mkdtemp(dir=_shm.ROOT, prefix="stepwell-test-"))
    (tmp_path / "disk").mkdir()
    yield Place(tmp_path / "disk", memory)
    shutil.rmtree(memory)


def restored(store: stepwell.CheckpointStore) -> tuple[int, float, set[str]] | None:
    """(step, value, tiers that it came from)."""
    into = state(0)
    found = store.restore(into)
    return None if found is None else (found.step, float(into["model"]["w"].unique()), set(found.sources))


def arena_of(store: stepwell.CheckpointStore) -> SharedHostTier:
    host = store.tiers[0]
    assert isinstance(host, SharedHostTier) and host.owned
    return host


def test_what_only_memory_had_is_restored_and_gets_down(place: Place) -> None:
    place.die([1], [2, 3])
    with place.open() as store:
        assert restored(store) == (3, 3.0, {"host"})
        store.save(4, state(4)).wait()
        eventually(lambda: steps(store, "disk") == [1, 2, 3, 4])
        host = arena_of(store)
        for folder in os.listdir(place.disk / "run"):
            key = ShardKey(CheckpointKey("run", folder), "model.safetensors")
            eventually(lambda key=key: not host.arena.is_dirty(key))  # type: ignore[misc]
    for found in _shm.arenas(place.memory):
        _shm.remove(found.folder)
    with place.open() as store:
        assert restored(store) == (4, 4.0, {"disk"})
        assert store.restore(state(0), step=2) is not None


def test_a_drain_gets_it_down_without_a_save(place: Place) -> None:
    place.die([1], [2, 3])
    with place.open() as store:
        assert restored(store) == (3, 3.0, {"host"})
        report = store.drain("60s")
        assert report.newest == {"disk": 3} and not report.cut


def test_so_does_closing(place: Place) -> None:
    place.die([1], [2])
    with place.open() as store:
        assert restored(store) == (2, 2.0, {"host"})
    with stepwell.open(place.disk / "run", mode="r") as store:
        assert restored(store) == (2, 2.0, {"disk"})


def test_memory_full_of_what_is_nowhere_else_does_not_stop_the_next_process(place: Place) -> None:
    """Case: trainers that are killed again and again before their disk has what they saved."""
    size = 1_500_000  # 12 of the 56 slots that may be kept
    for left in ([1, 2], [3], [4]):
        place.die([], left, size)
    with place.open() as store:
        assert arena_of(store).arena.cached_bytes == 48 * MIB
        store.save(5, state(5, size)).wait(timeout=30)
        eventually(lambda: steps(store, "disk") == [1, 2, 3, 4, 5])


def test_the_budget_holds_with_all_that_it_takes(place: Place) -> None:
    call = f"keep_in_budget({str(place.disk)!r}, {str(place.memory)!r})"
    code = f"from tests.store.test_shared_memory import *\n{call}"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, timeout=100, check=True, capture_output=True, text=True
    )
    assert 48 * MIB < int(done.stdout.split()[-1]) <= 64 * MIB * 1.02 + 64 * MIB


def test_a_reader_finds_it_too_and_leaves_it_to_the_next_writer(place: Place) -> None:
    place.die([1], [2])
    with place.open(mode="r") as store:
        assert restored(store) == (2, 2.0, {"host"})
    with place.open() as store:
        assert restored(store) == (2, 2.0, {"host"})
        store.save(3, state(3)).wait()
        eventually(lambda: steps(store, "disk") == [1, 2, 3])


def test_a_run_that_was_deleted_does_not_come_back(place: Place, caplog: pytest.LogCaptureFixture) -> None:
    place.die([1], [2])
    shutil.rmtree(place.disk / "run")
    with place.open() as store:
        assert restored(store) is None
        store.save(1, state(7)).wait()
        assert restored(store) == (1, 7.0, {"host"})
    assert "is of another run that was named run" in caplog.text


def test_nor_does_it_when_another_one_took_its_name_meanwhile(place: Place) -> None:
    place.die([1], [2])
    shutil.rmtree(place.disk / "run")
    with stepwell.open(place.disk / "run") as other:
        other.save(1, state(7)).wait()
    with place.open() as store:
        assert restored(store) == (1, 7.0, {"disk"})


def test_a_checkpoint_that_was_deleted_does_not_come_back(place: Place) -> None:
    place.die([1, 2], [])
    [folder] = place.disk.glob("run/step-000000002.*")
    shutil.rmtree(folder)
    with place.open() as store:
        assert restored(store) == (1, 1.0, {"host"})
        assert steps(store, "host") == [1]


def test_what_another_writer_has_overtaken_is_not_restored(place: Place) -> None:
    place.die([1], [2, 3])
    with stepwell.open(place.disk / "run") as other:  # on another node, which does not see this memory
        assert restored(other) == (1, 1.0, {"disk"})
        other.save(2, state(7)).wait()
    with place.open() as store:
        assert restored(store) == (2, 7.0, {"disk"})
        store.save(3, state(8)).wait()
        assert steps(store, "disk") == [1, 2, 3] and steps(store, "host") == [1, 3]
        assert not any(slot.dirty for slot in arena_of(store).arena._slots), "what was overtaken would stay for ever"
    with place.open() as store:
        assert restored(store) == (3, 8.0, {"host"})
