"""Saves by way of GPU memory are never torn, and let training go on before anything has crossed the bus."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.errors import NotPlanned
from stepwell.native import Op
from tests.fakecuda import FakeCuda
from tests.store.gpubench import MIB, Bench, Bus, benches, opened, ops
from tests.store.helpers import eventually


@pytest.fixture(params=[True, False], ids=["kernels", "copies"])
def bench(request: pytest.FixtureRequest, driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with benches(driver, monkeypatch, kernels=request.param) as made:
        yield made


#: of how many states the GPU tier has room, what the host tier has, and how many tensors there are
ROOM = {"room for all": (8, "96MiB", 14), "for one and a half": (1.5, "96MiB", 14), "for a half": (0.5, "96MiB", 14)}
ROOM["in waves"] = (1.5, "34MiB", 32)


@pytest.mark.parametrize("guarded", [True, False], ids=["guard", "no guard"])
@pytest.mark.parametrize("room", ROOM)
def test_no_snapshot_is_torn_whenever_training_goes_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: str, guarded: bool
) -> None:
    states, host, count = ROOM[room]
    choose = bench.choose = random.Random(f"{room} {guarded}")
    done = ops(monkeypatch)
    bench.add(count, sizes=(4096, 5000, 100_000, 900_000, 1_500_000))
    with opened(tmp_path, f"{max(4, int(states * (bench.gpu_bytes / MIB + 3)))}MiB", host) as store:
        if guarded:
            store.guard(*bench.tensors)
        saves = {1: (store.save(1, bench.state()).wait("nvme"), bench.expected())}  # now all memory is ready
        for step in range(2, 7):
            bench.driver.slow(choose.choice((0.0, 0.0, 0.0003)))
            saves[step] = store.save(step, bench.state()), bench.expected()
            for _ in range(choose.randrange(3)):
                store.before_update()
                bench.update()
        bench.driver.slow(0.0)
        saves[6][0].wait("nvme")
        sources = {step: bench.check(store, step, expected) for step, (_, expected) in reversed(saves.items())}
        there = [found.step for found in store.checkpoints(tier="gpu")]
        assert all(sources[step].get("gpu", 0) >= bench.gpu_bytes for step in there), sources
        assert done[Op.PACK]
        if room in ("room for all", "for a half"):
            assert there == (list(saves) if room == "room for all" else [])


def test_an_update_goes_on_before_anything_has_crossed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        bench.add(9)
        store.guard(*bench.tensors)
        state = bench.state(cpu=False)
        store.save(1, state).wait("nvme")
        with Bus(monkeypatch) as bus:
            bench.update()
            expected, save = bench.expected(), store.save(2, state)
            store.before_update()
            bench.update()
            bench.driver.finish(bench.stream)  # the stream waits for nothing that has to cross
            eventually(lambda: bool(bus.held))
            assert not save.done("gpu") and not save.done("host")
        save.wait("gpu").wait("nvme")
        assert bench.check(store, 2, expected, cpu=False) == {"gpu": bench.gpu_bytes}


def test_without_a_guard_save_returns_before_anything_has_crossed(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        bench.add(9)
        store.save(1, bench.state(cpu=False)).wait("nvme")
        with Bus(monkeypatch) as bus:
            bench.update()
            expected, save = bench.expected(), store.save(2, bench.state(cpu=False))
            bench.update()
            eventually(lambda: bool(bus.held))
            assert not save.done("gpu")
        save.wait("nvme")
        assert bench.check(store, 2, expected, cpu=False) == {"gpu": bench.gpu_bytes}


def test_where_there_is_room_for_a_part_the_last_chunks_cross_from_slots(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of the tensors there does not wait until they have crossed; that of the others does."""
    with opened(tmp_path, "6MiB") as store:
        bench.add(12, sizes=(900_000,))
        store.guard(*bench.tensors)
        state = bench.state(cpu=False)
        for step in (1, 2):  # the first one finds no memory that is ready
            store.save(step, state).wait("nvme")
        done = ops(monkeypatch)
        bench.update()
        expected, save = bench.expected(), store.save(3, state)
        with pytest.raises(NotPlanned, match=r"does not stay in GPU memory.*can be promised"):
            save.wait("gpu")
        save.wait("nvme")
        assert done[Op.PACK] == 1
        assert "gpu" not in bench.check(store, 3, expected, cpu=False)
