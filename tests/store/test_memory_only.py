"""Saves that no rule sends down: they stay in host memory, the newest of them, and get down when it matters."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell import NotPlanned, SaveFailed, viewing
from stepwell.errors import CheckpointNotFound
from stepwell.notes import Notes
from tests.store.helpers import eventually, steps

SIZE = 2 << 20  # floats: 8 MiB, so that host memory holds a known number of them


def config(path: Path, *, host: str = "128MiB", nvme: str = "flush = { every_steps = 5 }", more: str = "") -> Path:
    for name in ("nvme", "pfs"):
        (path / name).mkdir(exist_ok=True)
    file = path / "cluster.toml"
    file.write_text(
        f'{more}\n[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "{host}"\n'
        f'[[tier]]\nname = "nvme"\ndriver = "file"\npath = "{path}/nvme"\n{nvme}\n'
        f'[[tier]]\nname = "pfs"\ndriver = "pfs"\npath = "{path}/pfs"\nflush = {{ every_steps = 10 }}\n'
    )
    return file


@contextmanager
def opened(file: Path, **settings: Any) -> Iterator[stepwell.CheckpointStore]:
    with stepwell.open(file, run="run", **settings) as store:
        yield store


def state(step: int) -> dict[str, Any]:
    model, optimizer = torch.full((SIZE,), float(step)), torch.full((SIZE // 4,), -float(step))
    return {"model": {"w": model}, "optimizer": {"m": optimizer}, "step": step}


def restored(store: stepwell.CheckpointStore, step: int | None = None) -> int:
    """The step that is restored; all of it must be of that step."""
    target = state(-1)
    found = store.restore(target, step=step)
    assert found is not None and target["step"] == found.step
    assert (target["model"]["w"] == found.step).all() and (target["optimizer"]["m"] == -found.step).all()
    return found.step


def folders(path: Path) -> list[int]:
    return sorted(
        int(folder.name[5:14]) for folder in (path / "run").glob("step-*") if (folder / "manifest.json").exists()
    )


def test_what_no_rule_names_stays_in_memory_until_a_newer_one_is_there(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as store:
        for step in range(1, 13):
            save = store.save(step, state(step)).wait("host")
            if step in (1, 5, 10):
                save.wait("nvme")
                assert save.done("nvme")
            else:
                with pytest.raises(NotPlanned, match=rf"no policy sends this step there.*flush\({step}"):
                    save.wait("nvme")
                assert not save.done("nvme") and save.report().error is None
        assert folders(tmp_path / "nvme") == [1, 5, 10]
        eventually(lambda: steps(store, "host")[-1] == 12 and 11 not in steps(store, "host"))
        assert restored(store) == 12
        with pytest.raises(CheckpointNotFound):
            restored(store, 11)
        assert restored(store, 10) == 10
    assert folders(tmp_path / "nvme") == [1, 5, 10, 12] and 12 in folders(tmp_path / "pfs")
    with opened(config(tmp_path)) as store:
        assert restored(store) == 12


@pytest.mark.parametrize("how", ["close", "drain", "flush"])
def test_the_newest_gets_down_at_the_end(tmp_path: Path, how: str) -> None:
    with opened(config(tmp_path)) as store:
        for step in (1, 2, 3):
            save = store.save(step, state(step)).wait("host")
        eventually(lambda: folders(tmp_path / "nvme") == [1])
        assert store._record.unsaved_seconds > 0
        if how == "drain":
            report = store.drain("30s")
            assert report.newest == {"nvme": 3, "pfs": 3} and not report.cut
        elif how == "flush":
            store.flush()
            assert 3 in folders(tmp_path / "pfs")
        if how != "close":
            eventually(lambda: store._record.unsaved_seconds == 0)
    assert save.done("pfs") and 3 in folders(tmp_path / "pfs")


def test_a_preempted_store_gets_the_newest_down(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as store:
        store.save(1, state(1)).wait("nvme")
        store.save(2, state(2))
        store.ending.preemption.handle((signal.SIGUSR1,), "20s")
        store.ending.preemption.note(signal.SIGUSR1)
    assert folders(tmp_path / "nvme") == [1, 2] and 2 in folders(tmp_path / "pfs")


def test_a_flush_by_hand_of_one_in_memory(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as store:
        for step in (1, 2):
            save = store.save(step, state(step)).wait("host")
        store.flush(2, to="nvme")
        store.save(3, state(3)).wait("host")
        assert save.report().error is None and folders(tmp_path / "nvme") == [1, 2]
        assert restored(store, 2) == 2


def test_one_that_is_kept_is_not_let_go_of(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as store:
        for step in (1, 2, 3, 4):
            store.save(step, state(step)).wait("host")
            if step == 2:
                store.keep(2)
        eventually(lambda: folders(tmp_path / "nvme") == [1, 2])
        assert restored(store, 2) == 2


def test_one_that_is_pinned_stays(tmp_path: Path) -> None:
    with opened(config(tmp_path)) as store:
        store.save(1, state(1)).wait("host")
        store.save(2, state(2)).wait("host")
        store.pin(2).wait()
        for step in (3, 4):
            store.save(step, state(step)).wait("host")
        assert {2, 4} <= set(steps(store, "host")) and restored(store, 2) == 2


def test_one_that_is_left_behind_by_a_rewind_frees_its_memory(tmp_path: Path) -> None:
    with opened(config(tmp_path, host="64MiB")) as store:
        for step in (1, 2, 3):
            store.save(step, state(step)).wait("host")
        assert restored(store, 1) == 1
        for step in (2, 3, 4):
            store.save(step, state(step)).wait("host")
        eventually(lambda: [s for s in steps(store, "host") if s != 1] == [4])
        assert restored(store) == 4


@pytest.mark.parametrize(("mebibytes", "fits"), [(88, True), (64, True), (48, False), (32, False)])
def test_memory_for_two_is_enough_and_for_one_it_says_so(tmp_path: Path, mebibytes: int, fits: bool) -> None:
    """A checkpoint takes three slots of 8 MiB, and a staging share of two cannot be kept."""
    with opened(config(tmp_path, host=f"{mebibytes}MiB", nvme="flush = { every_steps = 100 }")) as store:
        store.save(1, state(1)).wait("nvme")
        saves = [store.save(step, state(step)) for step in (2, 3, 4, 5)]
        failures = []
        for save in saves:
            try:
                save.wait("host")
            except SaveFailed as error:
                failures.append(str(error))
        assert bool(failures) != fits and all("room for three checkpoints" in failure for failure in failures)
        store.save(100, state(100)).wait("nvme")
        assert restored(store) == 100


def test_parts_of_one_in_memory_go_down_and_it_is_let_go_of_like_others(tmp_path: Path) -> None:
    rules = 'flush = [{ every_steps = 2, parts = ["model"] }, { every_steps = 100 }]'
    with opened(config(tmp_path, nvme=rules, host="64MiB")) as store:
        for step in range(1, 8):
            store.save(step, state(step)).wait("host")
        eventually(lambda: folders(tmp_path / "nvme") == [1, 2, 4, 6])
        assert restored(store, 1) == 1
        eventually(lambda: [s for s in steps(store, "host") if s > 1] == [7])
        assert restored(store) == 7


@pytest.mark.parametrize(
    ("rule", "window", "least"),
    [('"at-close"', 100, 0), ('{ every = "1h" }', 100, 1), ('{ every_steps = 3, when = "idle" }', 3, 1)],
)
def test_other_rules(tmp_path: Path, rule: str, window: int, least: int) -> None:
    with opened(config(tmp_path, nvme=f"flush = {rule}")) as store:
        for step in range(1, 6):
            store.save(step, state(step)).wait("host")
        eventually(lambda: len(folders(tmp_path / "nvme")) >= least)
        assert restored(store) == 5
        there = folders(tmp_path / "nvme")
        assert len({step // window for step in there}) == len(there)  # of each window one
    assert 5 in folders(tmp_path / "nvme") and 5 in folders(tmp_path / "pfs")


def test_retention_below_counts_only_what_is_there(tmp_path: Path) -> None:
    with opened(config(tmp_path, nvme="flush = { every_steps = 2 }\nretain = { last = 2 }")) as store:
        for step in range(1, 10):
            store.save(step, state(step)).wait("host")
        eventually(lambda: folders(tmp_path / "nvme") == [6, 8])
        assert restored(store) == 9


def test_room_that_is_pinned_for_what_is_not_there_yet_is_no_room_and_nobody_turns_in_circles(tmp_path: Path) -> None:
    with opened(config(tmp_path, host="64MiB", nvme="flush = 'at-close'")) as store:
        arena = store.mover.arena
        store._runtime.loop.call_soon_threadsafe(arena.pin, "another run's model", range(arena.kept_max))
        with pytest.raises(SaveFailed, match="no room for it"):
            store.save(1, state(1)).wait("host", timeout=30)
        store._runtime.loop.call_soon_threadsafe(arena.pin, "another run's model", range(arena.kept_max), -1)
        with pytest.raises(SaveFailed, match="first save"):
            store.save(2, state(2))
        store.save(3, state(3)).wait("host")


@pytest.mark.parametrize("held", [True, False])
def test_a_save_asks_no_tier_for_notes_before_it_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: bool
) -> None:
    """Training waits for its copies; a parallel file system may take any time to answer."""
    with opened(config(tmp_path), block_timeout=20) as store:
        store.save(4, state(4)).wait("pfs")
        store.flush()
        monkeypatch.setattr(viewing, "NOTES_S", 60.0)
        copied, asked = threading.Event(), threading.Event()

        async def refresh(notes: object) -> None:
            asked.set()
            while not copied.is_set():
                await asyncio.sleep(0.01)

        monkeypatch.setattr(Notes, "refresh", refresh)
        try:
            save = store.save(6 if held else 5, state(5))
        finally:
            copied.set()
        save.wait("host" if held else "nvme")
        assert save.report().error is None
        eventually(asked.is_set)  # what follows from it is decided by the newest notes


def test_one_of_which_parts_went_down_stays_whole_in_memory_under_pressure(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "other") as other:
        other.save(1, {"model": {"w": torch.ones(7 * SIZE - 1024)}}).wait()
    rules = 'flush = [{ every_steps = 1, parts = ["model"] }, { every_steps = 100 }]'
    with opened(config(tmp_path, nvme=rules, host="88MiB")) as store:
        store.save(1, state(1)).wait("nvme")
        store.save(2, state(2)).wait("host")
        eventually(lambda: folders(tmp_path / "nvme") == [1, 2])
        prefetch = store.prefetch([f"{tmp_path}/other@1"], to="host")
        eventually(lambda: prefetch.progress.done_bytes >= 6 * 4 * SIZE)  # all that there is room for
        prefetch.cancel()
        assert restored(store) == 2
        for step in (3, 4, 5):
            store.save(step, state(step)).wait("host")
            eventually(lambda step=step: step in folders(tmp_path / "nvme"))  # type: ignore[misc]
        arena = store.mover.arena
        eventually(lambda: sum(slot.dirty for slot in arena._slots) == 3)  # of the newest, and nothing of those before
        assert restored(store) == 5
