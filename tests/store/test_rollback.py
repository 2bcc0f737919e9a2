"""Instant rollback: a step that GPU memory still holds, into the objects that were saved, without a record being read;
and whatever differs from what was saved comes back the usual way."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stepwell
from stepwell import reader
from stepwell.errors import WaitTimeout
from stepwell.native import TRIP_FREE, Op, trip_library
from stepwell.tiers.base import ShardKey
from stepwell.tiers.gpu import GpuTier, HeldShard
from tests.fakecuda import ENGINE, FakeCuda
from tests.store.gpubench import Bench, benches, opened, ops


@pytest.fixture
def bench(driver: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with benches(driver, monkeypatch) as made:
        yield made


class Net:
    """A model and its optimizer on a GPU, and what stands beside them in a state."""

    def __init__(self, bench: Bench, **beside: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(64, 300), torch.nn.BatchNorm1d(300), torch.nn.Linear(300, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.train()
        bench.on.put([self.model, self.optimizer])
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, **beside}

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(4, 64)).square().sum().backward()
        self.optimizer.step()

    def now(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"{number}.{key}": tensor.clone() for key, tensor in entry.items()}
        return found

    def train_and_save(self, store: stepwell.CheckpointStore, steps: int = 4) -> dict[int, dict[str, torch.Tensor]]:
        """Some steps in GPU memory; what the state was at each."""
        seen = {}
        for step in range(1, steps + 1):
            self.train()
            seen[step] = self.now()
            store.save(step, self.state).wait("gpu")
        self.train()
        return seen

    def require(self, expected: dict[str, torch.Tensor]) -> None:
        now = self.now()
        assert now.keys() == expected.keys()
        assert not [name for name, tensor in expected.items() if not torch.equal(tensor, now[name])]


def trip() -> None:
    """Torch is about to fail for want of memory."""
    free = getattr(ctypes.CDLL(trip_library()), TRIP_FREE)
    free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
    free(None, 0, 0, None)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was opened to be restored the usual way."""
    found: list[object] = []
    real = reader.open_checkpoint

    async def noted(*arguments: Any, **more: Any) -> Any:
        found.append(arguments[1])
        return await real(*arguments, **more)

    monkeypatch.setattr("stepwell.restoring.open_checkpoint", noted)
    return found


def test_the_same_objects_are_restored_without_a_record(bench: Bench, tmp_path: Path, records: list[object]) -> None:
    with opened(tmp_path) as store:
        net = Net(bench, epoch=3)
        seen = net.train_and_save(store)
        before = [id(tensor) for tensor in net.model.parameters()]
        for step in (4, 2, 3):
            done = store.restore(net.state, step=step)
            assert done is not None and done.step == step and set(done.sources) <= {"gpu", "host"}
            assert done.sources["gpu"] > 100_000 and not done.missing and not done.unexpected
            net.require(seen[step])
        assert not records and [id(tensor) for tensor in net.model.parameters()] == before


def test_training_goes_on_from_there_as_it_did(bench: Bench, tmp_path: Path, records: list[object]) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        net.train_and_save(store)
        assert store.restore(net.state, step=2) is not None
        torch.manual_seed(5)
        net.train()
        straight = net.now()
        assert store.restore(net.state, step=2) is not None
        torch.manual_seed(5)
        net.train()
        net.require(straight)
        assert not records
        store.save(3, net.state).wait("nvme")  # a rewind
        net.train()
        assert store.restore(net.state, step=3) is not None
        net.require(straight)


def _lr(net: Net) -> None:
    net.optimizer.param_groups[0]["lr"] = 0.5


def _flag(net: Net) -> None:
    net.state["count"] = True  # which is equal to the 1 that was saved


def _zero(net: Net) -> None:
    net.state["zero"] = -0.0


def _more(net: Net) -> None:
    net.state["nested"]["list"].append(4)


def _array(net: Net) -> None:
    net.state["array"][:] = 9


def _bytes(net: Net) -> None:
    net.state["bytes"] = bytes(6000)


def _strided(net: Net) -> None:
    net.state["strided"]["t"].zero_()


def _random(net: Net) -> None:
    torch.rand(3)


def _beside() -> dict[str, Any]:
    return {
        "count": 1, "zero": 0.0, "nested": {"list": [1, 2, {"x": (1, "a")}]}, "array": np.arange(50.0),
        "bytes": bytes([7]) * 6000, "strided": {"t": torch.arange(60.0).reshape(6, 10).t()}, "rng": stepwell.RNG(),
    }  # fmt: skip


@pytest.mark.parametrize("change", [_lr, _flag, _zero, _more, _array, _bytes, _strided, _random])
def test_what_differs_comes_back_the_usual_way(bench: Bench, tmp_path: Path, change: Callable[[Net], None]) -> None:
    with opened(tmp_path) as store:
        net = Net(bench, **_beside())
        seen = net.train_and_save(store)
        drawn = torch.random.get_rng_state()
        change(net)
        done = store.restore(net.state, step=4)
        assert done is not None and done.sources["gpu"] > 100_000
        net.require(seen[4])
        state, fresh = net.state, _beside()
        assert net.optimizer.param_groups[0]["lr"] == 0.1
        assert state["count"] == 1 and type(state["count"]) is int and repr(state["zero"]) == "0.0"
        assert state["nested"] == fresh["nested"] and state["bytes"] == fresh["bytes"]
        assert np.array_equal(state["array"], fresh["array"])
        assert torch.equal(state["strided"]["t"], fresh["strided"]["t"]) and not state["strided"]["t"].is_contiguous()
        if change is _random:
            assert not torch.equal(torch.random.get_rng_state(), drawn)  # that of the save, before the last training


def test_other_objects_of_the_same_structure_are_restored(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        seen = net.train_and_save(store)
        other = Net(bench)
        untouched = net.now()
        done = store.restore(other.state, step=3)
        assert done is not None and done.sources["gpu"] > 100_000
        other.require(seen[3])
        net.require(untouched)


def test_ties_and_channels_last(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        tied = torch.nn.Linear(64, 64)
        tied.weight.data = tied.weight.data.contiguous()
        net = Net(bench)
        image = torch.randn(2, 8, 16, 16).to(memory_format=torch.channels_last)
        shared = bench.on.put(torch.randn(5000))
        bench.on.put([tied, image])
        state = {**net.state, "tied": {"a": shared, "b": shared, "head": shared[:100]}, "image": {"i": image}}
        expected = []
        for step in range(1, 5):
            shared.add_(1)
            image.mul_(2)
            expected.append((shared.clone(), image.clone()))
            store.save(step, state).wait("gpu")
        shared.zero_()
        image.zero_()
        for step in (4, 1, 3):
            done = store.restore(state, step=step)
            assert done is not None and "gpu" in done.sources
            assert torch.equal(shared, expected[step - 1][0]) and torch.equal(image, expected[step - 1][1])
            assert state["tied"]["a"] is shared and state["tied"]["head"].data_ptr() == shared.data_ptr()


def test_hooks_and_own_ways_of_loading_are_called(bench: Bench, tmp_path: Path) -> None:
    class Own(torch.optim.SGD):
        loaded = 0

        def load_state_dict(self, state_dict: Any) -> None:
            super().load_state_dict(state_dict)
            self.loaded += 1

    class Custom:
        def __init__(self) -> None:
            self.t, self.loaded = torch.zeros(3000), 0

        def state_dict(self) -> dict[str, Any]:
            return {"t": self.t.clone()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.t, self.loaded = state["t"].clone(), self.loaded + 1

    with opened(tmp_path) as store:
        net, called, custom = Net(bench), list[str](), Custom()
        own = Own(net.model.parameters(), momentum=0.9)
        hooked = bench.on.put(torch.nn.Linear(30, 30))
        hook: Any = hooked.register_load_state_dict_post_hook
        hook(lambda module, keys: called.append("module"))
        net.state |= {"own": own, "custom": custom, "hooked": hooked}
        net.optimizer.register_load_state_dict_post_hook(lambda optimizer: called.append("optimizer"))
        for step in range(1, 5):
            net.train()
            custom.t.fill_(step)
            store.save(step, net.state).wait("gpu")
        seen = net.now()
        net.train()
        custom.t.fill_(99)
        assert store.restore(net.state, step=4) is not None
        net.require(seen)
        assert sorted(called) == ["module", "optimizer"] and own.loaded == 1
        assert custom.loaded == 1 and bool((custom.t == 4).all())


def test_what_was_evicted_meanwhile_comes_from_elsewhere(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path, gpu="4MiB") as store:
        net = Net(bench, ballast={"b": bench.on.put(torch.zeros(1_500_000, dtype=torch.uint8))})
        seen = net.train_and_save(store, steps=5)
        there = [found.step for found in store.checkpoints(tier="gpu")]
        assert 5 in there and 1 not in there
        for step in (1, 5):
            done = store.restore(net.state, step=step)
            assert done is not None and ("gpu" in done.sources) == (step == 5)
            net.require(seen[step])


def test_what_training_has_taken_meanwhile_comes_from_elsewhere(
    bench: Bench, tmp_path: Path, records: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lent memory goes without a word, also that which a rollback has copied from before."""
    monkeypatch.setattr("stepwell.tiers.gpu.LOOK_S", 60.0)  # nobody has looked
    with opened(tmp_path) as store:
        net, seen = Net(bench), {}
        for step in (1, 2):
            seen[step] = net.now()
            store.save(step, net.state).wait("nvme")
            net.train()
        for step in (1, 2):
            done = store.restore(net.state, step=step)
            assert done is not None and "gpu" in done.sources and not records
        trip()
        for step in (2, 1):
            net.train()
            done = store.restore(net.state, step=step)
            assert done is not None and "gpu" not in done.sources and records
            net.require(seen[step])


def test_tensors_that_have_moved_are_restored_where_they_are(
    bench: Bench, tmp_path: Path, records: list[object]
) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        seen = net.train_and_save(store)
        weight = next(net.model.parameters())
        here = weight.data
        there = bench.on.put(here.clone())
        for step, now, other in ((1, here, there), (2, there, here), (3, there, here), (4, here, there)):
            net.train()
            weight.data = now
            before = other.clone()
            assert store.restore(net.state, step=step) is not None
            net.require(seen[step])
            assert torch.equal(now, seen[step]["0.weight"]) and torch.equal(other, before)
        assert not records


def test_a_part_that_differs_only_now_is_left_out_only_now(bench: Bench, tmp_path: Path, records: list[object]) -> None:
    with opened(tmp_path) as store:
        ema = bench.on.put(torch.zeros(5000))
        net = Net(bench, ema={"t": ema, "n": 0})
        for step in range(1, 5):
            net.train()
            ema.fill_(step)
            store.save(step, net.state).wait("gpu")
        seen = net.now()
        for n in (7, 0, 7, 0):
            net.train()
            ema.fill_(99)
            net.state["ema"]["n"] = n
            records.clear()
            done = store.restore(net.state, step=4)
            assert done is not None and bool(records) is (n == 7)
            net.require(seen)
            assert bool((ema == 4).all()) and net.state["ema"]["n"] == 0 and net.state["ema"]["t"] is ema


def test_each_copy_is_under_way_before_the_next_shard_is_looked_at(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        seen = net.train_and_save(store)
        submitted, hold, before = ops(monkeypatch), GpuTier.hold, list[int]()

        def noted(tier: GpuTier, shard: ShardKey, size_bytes: int) -> HeldShard | None:
            before.append(submitted[Op.UNPACK])
            return hold(tier, shard, size_bytes)

        monkeypatch.setattr(GpuTier, "hold", noted)
        assert store.restore(net.state, step=2) is not None
        net.require(seen[2])
        assert before == [0, 1]


def test_a_shard_that_is_gone_when_another_one_is_under_way(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, records: list[object]
) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        seen = net.train_and_save(store)
        hold, asked = GpuTier.hold, list[ShardKey]()

        def gone(tier: GpuTier, shard: ShardKey, size_bytes: int) -> HeldShard | None:
            asked.append(shard)
            return None if len(asked) == 2 else hold(tier, shard, size_bytes)

        monkeypatch.setattr(GpuTier, "hold", gone)
        assert store.restore(net.state, step=2) is not None and records
        net.require(seen[2])
        assert store.restore(net.state, step=4) is not None and len(records) == 1
        net.require(seen[4])


def test_a_copy_that_fails_leaves_it_to_the_usual_way(bench: Bench, tmp_path: Path, records: list[object]) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        seen = net.train_and_save(store)
        bench.driver.fail("cuLaunchKernel", 700, times=1)
        done = store.restore(net.state, step=4)
        assert done is not None and records
        net.require(seen[4])


def test_if_the_usual_way_fails_too_the_error_says_what_the_state_is(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        seen = net.train_and_save(store)
        bench.driver.fail("cuLaunchKernel", 700, times=-1)
        with pytest.raises(stepwell.StepwellError) as error:
            store.restore(net.state, step=4)
        assert any("a mix of old and restored values" in note for note in error.value.__notes__)
        bench.driver.reset()
        assert store.restore(net.state, step=4) is not None
        net.require(seen[4])


def test_a_restore_that_runs_out_of_time_writes_no_more_after_it(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        net.train_and_save(store)
        bench.driver.hold(ENGINE)
        release = threading.Timer(1.0, bench.driver.go)
        release.start()
        with pytest.raises(WaitTimeout):
            store.restore(net.state, step=2, timeout=0.2)
        release.join()
        net.train()
        after = net.now()
        bench.driver.finish(bench.stream)
        net.require(after)
        assert store.mover.gpu is not None and store.mover.gpu.arena.in_use == 0
        assert store.restore(net.state, step=3) is not None


def test_ctrl_c_while_it_copies(bench: Bench, tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        seen = net.train_and_save(store)
        bench.driver.hold(ENGINE)
        interrupt = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
        release = threading.Timer(0.6, bench.driver.go)
        interrupt.start()
        release.start()
        with pytest.raises(KeyboardInterrupt):
            store.restore(net.state, step=2)
        release.join()
        net.train()
        after = net.now()
        bench.driver.finish(bench.stream)
        net.require(after)
        assert store.restore(net.state, step=3) is not None
        net.require(seen[3])


def test_readers_and_newest_restores_go_the_usual_way(bench: Bench, tmp_path: Path, records: list[object]) -> None:
    with opened(tmp_path) as store:
        net = Net(bench)
        seen = net.train_and_save(store)
        done = store.restore(net.state)
        assert done is not None and done.step == 4 and records and "gpu" in done.sources
        net.require(seen[4])
        store.rewind(2)
        store.save(3, net.state).wait("gpu")
        net.train()
        for step, then in ((4, 4), (3, 4)):  # one is abandoned, and still there by its number
            assert store.restore(net.state, step=step) is not None
            net.require(seen[then])
    with opened(tmp_path) as store:
        assert store.restore(net.state, step=4) is not None  # another process, in effect
        net.require(seen[4])
