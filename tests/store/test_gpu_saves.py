"""Saves from GPUs, on a driver and in memory that stand for them: every update comes in the order of a stream, and
each step that is restored must be the state as it was, in that order, at its save."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import stepwell
from stepwell.errors import SaveFailed
from tests.fakecuda import ENGINE, FakeCuda
from tests.gpus import stand_in
from tests.state.standing import Standing

CONFIG = """
[[tier]]
name = "host"
driver = "host"
capacity = "{capacity}"

[[tier]]
name = "nvme"
driver = "file"
path = "{path}"
flush = {flush}
"""


class Bench:
    """A store, and tensors on two GPUs that are set to one value each by what is enqueued on the training stream."""

    def __init__(self, driver: FakeCuda, on: Standing, stream: int, seed: int) -> None:
        self.driver, self.on, self.stream = driver, on, stream
        self.choose = random.Random(seed)
        self.tensors: list[list[torch.Tensor]] = []  # of each group, which is updated as one
        self.values: list[list[int]] = []  # what the tensors will be once all that is enqueued has run

    def group(self, count: int, gpu: int) -> list[torch.Tensor]:
        # none under 4 KiB: torch puts those aside, and here it does so at once, not in the order of the stream
        sizes = [self.choose.choice((4096, 5000, 9000, 100_000, 3_000_000)) for _ in range(count)]
        made = [self.on.put(torch.zeros(size, dtype=torch.uint8), gpu) for size in sizes]
        self.tensors.append(made)
        self.values.append([0] * count)
        return made

    def update(self, number: int) -> None:
        """Enqueued, like an optimizer's kernels: it may run much later."""
        for at, tensor in enumerate(self.tensors[number]):
            value = self.values[number][at] = self.choose.randrange(256)
            self.driver.write(self.stream, tensor.data_ptr(), value, tensor.nbytes)

    def state(self) -> dict[str, Any]:
        return {f"part{n}": {f"t{at}": t for at, t in enumerate(group)} for n, group in enumerate(self.tensors)}

    def expected(self) -> list[list[int]]:
        return [list(values) for values in self.values]

    def check(self, store: stepwell.CheckpointStore, step: int, expected: list[list[int]]) -> None:
        blank = {
            f"part{n}": {f"t{at}": torch.full_like(t, 77) for at, t in enumerate(group)}
            for n, group in enumerate(self.tensors)
        }
        assert store.restore(blank, step=step) is not None
        for n, values in enumerate(expected):
            for at, value in enumerate(values):
                tensor = blank[f"part{n}"][f"t{at}"]
                assert bool((tensor == value).all()), f"step {step}, tensor {n}.{at} is not all {value}"


@pytest.fixture
def bench(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with stand_in(driver, monkeypatch, kernels=True) as (on, stream):
        yield Bench(driver, on, stream, 1)


def _open(folder: Path, capacity: str = "96MiB", flush: str = "[{ every_steps = 1 }]") -> stepwell.CheckpointStore:
    (folder / "nvme").mkdir(exist_ok=True)
    config = folder / "config.toml"
    config.write_text(CONFIG.format(capacity=capacity, path=folder / "nvme", flush=flush))
    return stepwell.open(config, run="run")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("capacity", ["160MiB", "34MiB"])
def test_no_snapshot_is_torn_whenever_training_goes_on(bench: Bench, tmp_path: Path, seed: int, capacity: str) -> None:
    """The smaller memory cannot keep the state: it goes in waves."""
    choose = bench.choose = random.Random(seed)
    with _open(tmp_path, capacity) as store:
        for gpu in (0, 1, 0):
            store.guard(*bench.group(6, gpu))
        state, saves = bench.state(), {}
        for step in range(1, 13):
            bench.driver.slow(choose.choice((0.0, 0.0, 0.0005)))
            saves[step] = store.save(step, state), bench.expected()
            for _ in range(choose.randrange(3)):
                store.before_update()
                bench.update(choose.randrange(3))
        bench.driver.slow(0.0)
        for step, (save, expected) in saves.items():
            save.wait("nvme")
            bench.check(store, step, expected)


def test_without_a_guard_the_state_may_change_as_soon_as_save_returns(bench: Bench, tmp_path: Path) -> None:
    with _open(tmp_path) as store:
        bench.group(9, 0)
        bench.group(3, 1)
        for step in range(1, 6):
            bench.update(0)
            bench.update(1)
            expected = bench.expected()
            save = store.save(step, bench.state())
            bench.update(0)
            bench.update(1)
            bench.check(store, save.wait("nvme").step, expected)


def test_a_guarded_save_waits_for_no_copy_and_an_update_only_for_its_own(bench: Bench, tmp_path: Path) -> None:
    with _open(tmp_path) as store:
        sizes = {0: 5_000_000, 1: 4_000_000}
        for gpu, size in sizes.items():
            tensor = bench.on.put(torch.zeros(size, dtype=torch.uint8), gpu)
            bench.tensors.append([tensor])
            bench.values.append([0])
        first, second = (store.guard(group[0], hook=False) for group in bench.tensors)
        store.save(1, bench.state()).wait("nvme")
        bench.driver.hold(ENGINE)
        save = store.save(2, bench.state())
        assert not save.copied.done()
        expected = bench.expected()
        store._guards.before_update(first)  # copies from there are enqueued: the stream waits, the caller does not
        bench.update(0)
        assert not save.copied.done() and bench.driver.pending(bench.stream) > 0
        bench.driver.go()
        save.wait("nvme")
        bench.driver.finish(bench.stream)
        second.remove()
        bench.check(store, 2, expected)


def test_what_is_only_in_memory_comes_from_gpus_and_goes_back_to_them(bench: Bench, tmp_path: Path) -> None:
    with _open(tmp_path, "160MiB", "'at-close'") as store:
        bench.group(8, 0)
        guard = store.guard(*bench.tensors[0])
        for step in range(1, 20):
            store.before_update()
            bench.update(0)
            save = store.save(step, bench.state())
        save.wait("host")
        wanted = bench.expected()
        store.before_update()
        bench.update(0)
        done = store.restore(bench.state())
        assert done is not None and done.step == 19 and set(done.sources) == {"host"}
        assert [[int(t[0]) for t in group] for group in bench.tensors] == wanted
        guard.remove()
    with _open(tmp_path, "160MiB", "'at-close'") as store:
        bench.check(store, 19, wanted)


def test_small_tensors_are_put_aside_on_their_gpu(bench: Bench, tmp_path: Path) -> None:
    with _open(tmp_path) as store:
        large = bench.group(3, 0)
        small = [bench.on.put(torch.zeros(size, dtype=torch.uint8), n % 2) for n, size in enumerate((1, 4, 700, 4095))]
        bench.tensors.append(small)
        bench.values.append([0] * len(small))
        store.guard(*large, *small)
        for step in range(1, 5):
            store.before_update()
            for number in (0, 1):
                bench.update(number)
            bench.driver.finish(bench.stream)
            bench.driver.hold(ENGINE)
            save, expected = store.save(step, bench.state()), bench.expected()
            for tensor in small:  # not announced: they are copied already
                bench.driver.write(bench.stream, tensor.data_ptr(), 99, tensor.nbytes)
            bench.driver.finish(bench.stream)
            bench.driver.go()
            save.wait("nvme")
            bench.check(store, step, expected)


@pytest.mark.parametrize("seed", range(3))
def test_tiny_tensors_are_put_aside_in_the_order_of_the_stream(bench: Bench, tmp_path: Path, seed: int) -> None:
    """Nothing announces their updates, which run behind the copies and before those of later saves."""
    choose = bench.choose = random.Random(seed)
    with _open(tmp_path, "160MiB") as store:
        guarded = bench.group(4, 0)
        for gpu in range(2):
            tiny = [bench.on.put(torch.zeros(4, dtype=torch.uint8), gpu) for _ in range(64)]
            bench.tensors.append(tiny)
            bench.values.append([0] * len(tiny))
        store.guard(*guarded, *bench.tensors[1], *bench.tensors[2])
        saves = {}
        for step in range(1, 13):
            bench.driver.slow(choose.choice((0.0, 0.0, 0.0005)))
            saves[step] = store.save(step, bench.state()), bench.expected()
            for number in choose.choices((1, 2), k=2):
                bench.update(number)
            if choose.randrange(2):
                store.before_update()
                bench.update(0)
        bench.driver.slow(0.0)
        [known] = store._guards._known
        assert len(known.stash.leaves) == 128
        for step, (save, expected) in saves.items():
            save.wait("nvme")
            bench.check(store, step, expected)


def test_a_copy_that_fails_fails_the_save_and_the_next_one_is_good(bench: Bench, tmp_path: Path) -> None:
    with _open(tmp_path) as store:
        bench.group(9, 0)
        store.guard(*bench.tensors[0])
        store.save(1, bench.state()).wait("nvme")
        bench.driver.fail("cuMemcpyDtoHAsync_v2", 700)
        failed = store.save(2, bench.state())
        with pytest.raises(SaveFailed, match="D2H"):
            failed.wait("nvme", timeout=30)
        store.before_update()  # waits for nobody
        bench.update(0)
        store.save(3, bench.state()).wait("nvme")
        bench.check(store, 3, bench.expected())
        assert {found.step for found in store.checkpoints()} == {1, 3}
