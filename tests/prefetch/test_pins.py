"""Pins: what stays in memory, what that leaves to others, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

import stepwell
from stepwell.errors import CheckpointNotFound, ConfigError, StepwellError, StoreClosed, TierFull
from tests.prefetch.helpers import calls, check, check_books, here, hold, let_go, model, moved_bytes, state
from tests.store.helpers import disk, eventually, host


def test_what_is_pinned_is_brought_and_stays(tmp_path: Path) -> None:
    memory = host(24)  # 21 may stay
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as store:
        one, two, three = (model(tmp_path, number) for number in range(3))
        store.prefetch(two).wait(20)
        store.pin(one).wait(20)
        before = moved_bytes(store)
        pinned = set(calls(lambda: memory.arena.pinned))
        assert len(pinned) == 9 and pinned <= set(here(memory))
        for number, path in enumerate((one, two, three)):
            store.prefetch(path).wait(20)
            check(path, number)
        store.save(1, state(1.0)).wait()
        assert pinned <= set(here(memory))
        store.pin(one).wait(20)
        store.unpin(one)
        assert set(calls(lambda: memory.arena.pinned)) == pinned  # pinned twice
        store.unpin(one)
        assert not calls(lambda: memory.arena.pinned)
        check(one, 0)
        assert moved_bytes(store) - before == (three / "model.safetensors").stat().st_size
        for path in (two, three):
            store.prefetch(path).wait(20)
        assert not pinned <= set(here(memory))  # like others again
        check_books(memory)


def test_pins_that_do_not_fit_are_refused_with_the_numbers(tmp_path: Path) -> None:
    memory = host(24)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as store:
        models = [model(tmp_path, number) for number in range(3)]
        for path in models[:2]:
            store.pin(path).wait(20)
        with pytest.raises(TierFull, match=r"9.00 MiB do not fit into the host tier.*21.0 MiB, 18.0 MiB of it pinned"):
            store.pin(models[2])
        with pytest.raises(TierFull, match="do not fit"):
            store.prefetch(models[2]).wait(20)
        assert len(calls(lambda: memory.arena.pinned)) == 18
        save = store.save(1, state(1.0))  # in waves: staging is never pinned
        save.wait(timeout=20)
        store.unpin(models[0])
        store.pin(models[2]).wait(20)
        check_books(memory)


def test_steps_parts_and_keys_can_be_pinned_and_saves_get_what_is_left(tmp_path: Path) -> None:
    memory = host(40)  # 35 may stay; a checkpoint has 15 chunks
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as store:
        for step in (1, 2):
            store.save(step, state(float(step))).wait()
        store.pin(1, parts="model").wait(20)
        assert len(calls(lambda: memory.arena.pinned)) == 9
        for step in range(3, 8):
            store.save(step, state(float(step))).wait("host")
        held = calls(lambda: memory.arena.pinned.keys())
        assert set(held) <= set(here(memory))
        store.pin("@latest", keys="optimizer.m").wait(20)
        store.unpin("@latest")
        store.unpin(1)
        with pytest.raises(StepwellError, match="1 is not pinned.*Pinned are: none"):
            store.unpin(1)
        with pytest.raises(CheckpointNotFound):
            store.pin(99)


def test_a_load_that_comes_first_does_not_make_up_for_what_is_pinned(tmp_path: Path) -> None:
    memory = host(24)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as store:
        path = model(tmp_path, 1)
        slots = hold(store, 21)  # nothing that is read stays
        handle = store.pin(path)
        check(path, 1)
        assert not handle.done() and handle.progress.done_bytes == 0
        let_go(store, slots)
        handle.wait(20)
        assert set(calls(lambda: memory.arena.pinned)) <= set(here(memory))
        check_books(memory)


def test_a_pin_that_does_not_come_holds_nothing(tmp_path: Path) -> None:
    memory = host(24)
    with stepwell.open(run="run", tiers=[memory, disk(tmp_path)], policies=[]) as store:
        path = model(tmp_path, 1)
        slots = hold(store, 21)
        handle = store.pin(path)
        assert len(calls(lambda: memory.arena.pinned)) == 9
        handle.cancel()
        with pytest.raises(StoreClosed, match="cancelled"):
            handle.wait(20)
        eventually(lambda: not calls(lambda: memory.arena.pinned))
        let_go(store, slots)
        with pytest.raises(StepwellError, match="is not pinned"):
            store.unpin(path)
        check_books(memory)
    with stepwell.open(run="run", tiers=[disk(tmp_path)], policies=[]) as store:
        with pytest.raises(ConfigError, match="no host tier"):
            store.pin(path)
