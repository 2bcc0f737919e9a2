"""The whole chain, host -> nvme -> pfs: order, retention, eviction, restarts, and a kill in the middle of a flush."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import StepwellError
from stepwell.policies.base import Policy
from stepwell.policies.evict import LRU
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.policies.retain import Best, Retain
from stepwell.runtime import Runtime
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.pfs import PfsTier
from stepwell.tiers.wrap import Event, Fault, Faulty, Traced
from tests.core.moving import Scarce
from tests.store.helpers import ALWAYS, eventually, host, steps
from tests.store.scripts import Scripts

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    for name in ("nvme", "pfs"):
        (tmp_path / name).mkdir()


def nvme(folder: Path, plan: list[Fault] | None = None) -> Faulty:
    return Faulty(FileTier(folder / "nvme", name="nvme", reading="direct"), plan or [])


def pfs(folder: Path, plan: list[Fault] | None = None) -> Faulty:
    return Faulty(PfsTier(folder / "pfs", reading="direct", delete_pause_s=0), plan or [])


def state(value: int, mebibytes: int = 8) -> dict[str, Any]:
    return {"model": {"w": torch.full((mebibytes * MIB // 4 - 2048,), float(value))}}  # its file has so many chunks


def blank(mebibytes: int = 8) -> dict[str, Any]:
    return state(0, mebibytes)


def is_step(found: dict[str, Any], value: int) -> bool:
    return bool((found["model"]["w"] == value).all())


def release(tier: Faulty) -> None:
    Runtime.get().loop.call_soon_threadsafe(tier.release)


def folders(root: Path) -> list[int]:
    """The steps whose folders are there."""
    return sorted(int(path.name[5:14]) for path in (root / "run").glob("step-*"))


# -- down --------------------------------------------------------------------------------------------


def test_tiers_acknowledge_in_order_each_without_waiting_for_the_next(tmp_path: Path) -> None:
    near, far = (make(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)]) for make in (nvme, pfs))
    with stepwell.open(run="run", tiers=[host(), near, far]) as store:
        save = store.save(1, state(1))
        save.wait("host", timeout=20)
        assert not save.done("nvme") and not save.done("pfs") and folders(tmp_path / "pfs") == []
        release(near)
        save.wait("nvme", timeout=20)
        assert not save.done("pfs") and steps(store, "nvme") == [1] and steps(store, "pfs") == []
        again = store.save(2, state(2))
        again.wait("nvme", timeout=20)  # a stuck pfs delays nothing above it
        release(far)
        save.wait("pfs", timeout=20)
        again.wait("pfs", timeout=20)
        seconds = save.report().tier_seconds
        assert seconds["host"] < seconds["nvme"] < seconds["pfs"]
        assert steps(store, "host") == steps(store, "nvme") == steps(store, "pfs") == [1, 2]
    assert torch.equal(stepwell.load(tmp_path / "pfs" / "run@2", part="model")["w"], state(2)["model"]["w"])


def test_each_tier_keeps_its_last_ones(tmp_path: Path) -> None:
    policies: list[Policy] = [FlushRule("pfs"), FlushNewest("pfs"), Retain("nvme", last=2), Retain("pfs", last=3)]
    with stepwell.open(run="run", tiers=[host(), nvme(tmp_path), pfs(tmp_path)], policies=policies) as store:
        for step in range(1, 7):
            store.save(step, state(step)).wait("pfs", timeout=20)
        eventually(lambda: folders(tmp_path / "nvme") == [5, 6] and steps(store, "pfs") == [4, 5, 6])
        assert steps(store, "nvme") == [5, 6]
        found = blank()
        assert store.restore(found, 4) is not None and is_step(found, 4)


def test_what_a_store_notes_is_decided_on_at_once(tmp_path: Path) -> None:
    """No save needs to come before a metric, or the end of a keep, lets a checkpoint go."""
    policies: list[Policy] = [Retain("nvme", best=[Best("acc", "max", 1)])]
    with stepwell.open(run="run", tiers=[host(), nvme(tmp_path)], policies=policies) as store:
        for step in range(1, 5):
            store.save(step, state(step)).wait("nvme", timeout=20)
        store.keep(2)
        for step in range(1, 5):
            store.annotate(step, metrics={"acc": 1.0 / step})
        eventually(lambda: folders(tmp_path / "nvme") == [1, 2, 4])  # the best, the kept, the newest
        store.keep(2, keep=False)
        eventually(lambda: folders(tmp_path / "nvme") == [1, 4])


def test_nothing_is_deleted_above_while_the_pfs_is_stuck(tmp_path: Path) -> None:
    policies: list[Policy] = [FlushRule("pfs"), FlushNewest("pfs"), Retain("nvme", last=1)]
    far = pfs(tmp_path, [Fault("write", 1, "stall", times=ALWAYS)])
    with stepwell.open(run="run", tiers=[host(16), nvme(tmp_path), far], policies=policies) as store:
        for step in range(1, 5):
            store.save(step, state(step)).wait("nvme", timeout=20)
        assert folders(tmp_path / "nvme") == [1, 2, 3, 4]  # although host memory had each of them for a while
        release(far)
        eventually(lambda: folders(tmp_path / "nvme") == [4])
        eventually(lambda: steps(store, "pfs") == [1, 2, 3, 4])


# -- up ----------------------------------------------------------------------------------------------


def test_after_an_eviction_chunks_come_partly_from_memory_and_partly_from_disk(tmp_path: Path) -> None:
    memory = host(20)  # keeps 17 chunks
    with stepwell.open(run="run", tiers=[memory, nvme(tmp_path), pfs(tmp_path)]) as store:
        store.save(1, state(1)).wait("pfs", timeout=20)
        store.save(2, state(2, 12)).wait("pfs", timeout=20)
        assert memory.arena.evicted_bytes >= 2 * MIB
        assert steps(store, "host") == [2] and steps(store, "nvme") == [1, 2]
        found = blank()
        checkpoint = store.restore(found, 1)
        assert checkpoint is not None and is_step(found, 1)
        assert set(checkpoint.sources) == {"host", "nvme"} and sum(checkpoint.sources.values()) >= 8 * MIB - 8192
        assert checkpoint.healed == ()
        assert memory.arena.in_use == 0


def test_a_reader_meanwhile_sees_only_whole_checkpoints(tmp_path: Path) -> None:
    policies: list[Policy] = [FlushRule("pfs"), FlushNewest("pfs"), Retain("nvme", last=2), Retain("pfs", last=2)]
    stop, seen, wrong = threading.Event(), list[int](), list[str]()

    def read() -> None:
        tiers = [FileTier(tmp_path / "nvme", name="nvme", read_only=True, reading="direct")]
        with stepwell.open(run="run", tiers=tiers, mode="r") as store:
            while not stop.is_set():
                found = blank()
                checkpoint = store.restore(found)
                if checkpoint is not None:
                    seen.append(checkpoint.step)
                    if not is_step(found, checkpoint.step):
                        wrong.append(f"step {checkpoint.step} is mixed")

    with stepwell.open(run="run", tiers=[host(16), nvme(tmp_path), pfs(tmp_path)], policies=policies) as store:
        store.save(1, state(1)).wait()
        reader = threading.Thread(target=read)
        reader.start()
        try:
            eventually(lambda: bool(seen))
            for step in range(2, 9):
                store.save(step, state(step)).wait("pfs", timeout=20)
            eventually(lambda: 8 in seen)
        finally:
            stop.set()
            reader.join()
    assert not wrong and seen == sorted(seen)


# -- restart -----------------------------------------------------------------------------------------


def written(events: list[Event], step: int) -> int:
    """Chunks of a step's model that were written."""
    name = f"step-{step:09d}"
    return sum(e.operation == "write" and e.phase == "complete" and name in e.detail for e in events)


def traced(folder: Path, events: list[Event]) -> list[Tier]:
    return [host(), nvme(folder), Traced(pfs(folder), events.append)]


def test_what_an_earlier_process_left_undone_goes_on_where_it_was(tmp_path: Path) -> None:
    far = pfs(tmp_path, [Fault("write", 4, times=ALWAYS)])
    store = stepwell.open(run="run", tiers=[host(), nvme(tmp_path), far])
    save = store.save(1, state(1))
    save.wait("nvme", timeout=20)
    eventually(lambda: len(far.hit) > 0)
    with pytest.raises(StepwellError):
        store.close(timeout=0.2)
    debris = tmp_path / "pfs" / "run" / "step-000000077.1-9"
    debris.mkdir()
    (debris / "model.safetensors").write_bytes(bytes(5000))
    assert folders(tmp_path / "pfs") == [1, 77] and not list((tmp_path / "pfs").glob("run/*/manifest.json"))

    events: list[Event] = []
    with stepwell.open(run="run", tiers=traced(tmp_path, events)) as store:
        assert store.restore(blank()) is not None
        store.save(2, state(2)).wait("pfs", timeout=20)
        eventually(lambda: steps(store, "pfs") == [1, 2])
        assert written(events, 1) == 8 - 3 and written(events, 2) == 8
        eventually(lambda: not debris.exists())
    with stepwell.open(run="run", tiers=[PfsTier(tmp_path / "pfs", read_only=True)], mode="r") as reader:
        for step in (1, 2):
            found = blank()
            assert reader.restore(found, step) is not None and is_step(found, step)


KILLED = """
import os, signal, sys
from pathlib import Path
os.environ["XDG_CACHE_HOME"] = sys.argv[1] + "/home"
import stepwell
from stepwell.tiers.wrap import Fault, Traced
from tests.store.helpers import host
from tests.store.test_tiers_chain import nvme, pfs, state
folder, count, written = Path(sys.argv[1]), int(sys.argv[2]), 0
def watch(event):
    global written
    if event.operation == "write" and event.phase == "complete":
        written += 1
        if written == count:
            os.kill(os.getpid(), signal.SIGKILL)
far = Traced(pfs(folder, [Fault("write", count + 1, "stall", times=10**9)]), watch)
store = stepwell.open(run="run", tiers=[host(), nvme(folder), far])
store.save(1, state(1)).wait("nvme")
store.close()
"""


@pytest.mark.parametrize("count", [1, 5, 8])
def test_a_kill_in_the_middle_of_a_flush_costs_only_what_was_missing(
    tmp_path: Path, scripts: Scripts, count: int
) -> None:
    ended = scripts.run(KILLED, tmp_path, count)
    assert ended.status == -signal.SIGKILL, ended.err
    assert folders(tmp_path / "pfs") == [1] and not list((tmp_path / "pfs").glob("run/*/manifest.json"))
    events: list[Event] = []
    with stepwell.open(run="run", tiers=traced(tmp_path, events)) as store:
        found = blank()
        assert store.restore(found) is not None and is_step(found, 1)
        store.save(2, state(2)).wait("pfs", timeout=20)
        eventually(lambda: steps(store, "pfs") == [1, 2])
    assert written(events, 1) == 8 - count and written(events, 2) == 8
    with stepwell.open(run="run", tiers=[PfsTier(tmp_path / "pfs", read_only=True)], mode="r") as reader:
        found = blank()
        assert reader.restore(found, 1) is not None and is_step(found, 1)


# -- too little memory -------------------------------------------------------------------------------


def test_memory_that_is_not_to_be_had_costs_the_copy_in_memory_and_nothing_else(tmp_path: Path) -> None:
    scarce: Callable[[int], Any] = Scarce(6 * MIB).make
    memory = HostTier(LRU(), 64 * MIB, chunk_bytes=MIB, memory=scarce)
    with stepwell.open(run="run", tiers=[memory, nvme(tmp_path), pfs(tmp_path)]) as store:
        for step in (1, 2, 3):
            save = store.save(step, state(step))
            save.wait("pfs", timeout=20)
            with pytest.raises(stepwell.NotPlanned, match="does not stay in host memory"):
                save.wait("host", timeout=20)
        assert steps(store, "host") == [] and steps(store, "nvme") == [1, 2, 3]
        found = blank()
        assert store.restore(found) is not None and is_step(found, 3)
        assert memory.arena.in_use == 0 and memory.arena.capacity_bytes == 6 * MIB
