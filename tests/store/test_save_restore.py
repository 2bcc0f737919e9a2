"""A checkpoint written and read back, through the public API, on real files and in memory."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

import stepwell
from stepwell.errors import ConfigError, KeyMismatch, SaveFailed, StateError, StepExists, StoreClosed
from stepwell.tiers.file import FileTier
from stepwell.tiers.memory import MemoryTier
from tests.resources import still_alive


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[stepwell.CheckpointStore]:
    tier = MemoryTier() if request.param == "memory" else FileTier(tmp_path)
    with stepwell.open(run="run", tiers=[tier]) as opened:
        yield opened


def training() -> dict[str, Any]:
    """A small real training job after a few steps."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        schedule.step()
    return {"model": model, "optimizer": optimizer, "sched": schedule, "epoch": 2, "seen": [1, 2, (3, None)]}


def tensors_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    found = dict(state["model"].state_dict())
    for i, values in state["optimizer"].state_dict()["state"].items():
        found |= {f"optimizer.{i}.{name}": value for name, value in values.items()}
    return found


def fresh() -> dict[str, Any]:
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(16, 300), torch.nn.ReLU(), torch.nn.Linear(300, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optimizer": optimizer, "sched": schedule, "epoch": 0, "seen": []}


def test_a_training_job_comes_back_bit_for_bit(store: stepwell.CheckpointStore) -> None:
    state = training()
    expected = {name: tensor.clone() for name, tensor in tensors_of(state).items()}
    store.save(10, state, metrics={"loss": 0.25}, tags=["good"]).wait()
    target = fresh()
    weight = target["model"][0].weight
    address = weight.data_ptr()
    checkpoint = store.restore(target)
    assert checkpoint is not None and checkpoint.step == 10
    assert checkpoint.metrics == {"loss": 0.25} and checkpoint.tags == ("good",)
    got = tensors_of(target)
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype and torch.equal(got[name], tensor), name
    assert target["model"][0].weight is weight and weight.data_ptr() == address
    assert target["optimizer"].param_groups[0]["lr"] == state["optimizer"].param_groups[0]["lr"]
    assert target["sched"].last_epoch == 3
    assert target["epoch"] == 2 and target["seen"] == [1, 2, (3, None)]


def test_a_fresh_run_restores_nothing(store: stepwell.CheckpointStore) -> None:
    assert store.restore({"w": torch.zeros(3)}) is None
    assert store.latest() is None and store.checkpoints() == []


def test_what_is_changed_after_save_returns_is_not_in_it(store: stepwell.CheckpointStore) -> None:
    state: dict[str, Any] = {
        "big": torch.arange(3_000_000, dtype=torch.float32),
        "turned": torch.arange(600_000, dtype=torch.float32).reshape(600, 1000).t(),
        "step": torch.tensor(7),
        "array": np.arange(1000),
        "nested": {"list": [1, [2, 3]]},
    }
    before = {"big": state["big"].clone(), "turned": state["turned"].clone()}
    save = store.save(1, state)
    state["big"].zero_()
    state["turned"].zero_()
    state["step"].zero_()
    state["array"][:] = 0
    state["nested"]["list"][1].append(4)
    save.wait()
    target: dict[str, Any] = {
        "big": torch.zeros(3_000_000),
        "turned": torch.zeros(1000, 600),
        "step": torch.tensor(0),
        "array": np.zeros(1000, dtype=np.int64),
        "nested": {"list": []},
    }
    store.restore(target)
    assert torch.equal(target["big"], before["big"]) and torch.equal(target["turned"], before["turned"])
    assert int(target["step"]) == 7 and (target["array"] == np.arange(1000)).all()
    assert target["nested"] == {"list": [1, [2, 3]]}


def test_saves_back_to_back_are_all_whole(store: stepwell.CheckpointStore) -> None:
    weight = torch.zeros(500_000)
    saves = []
    for step in range(1, 6):
        weight.fill_(step)
        saves.append(store.save(step, {"w": weight}))
    for save in saves:
        save.wait()
    for step in range(1, 6):
        target = {"w": torch.zeros(500_000)}
        found = store.restore(target, step)
        assert found is not None and found.step == step and bool((target["w"] == step).all())


def test_steps_go_up_unless_an_older_one_was_restored(store: stepwell.CheckpointStore) -> None:
    state = {"w": torch.ones(4)}
    store.save(5, state).wait()
    store.save(7, state).wait()
    for step in (5, 6, 7):
        with pytest.raises(StepExists, match="restore"):
            store.save(step, state)
    restored = store.restore(state, 5)
    assert restored is not None and restored.step == 5
    with pytest.raises(StepExists):
        store.save(5, state)
    store.save(6, state).wait()
    assert [c.step for c in store.checkpoints()] == [5, 6]
    everything = store.checkpoints(abandoned=True)
    assert [(c.step, c.abandoned) for c in everything] == [(5, False), (6, False), (7, True)]
    newest = store.latest()
    assert newest is not None and newest.step == 6 and newest.timeline == 1
    assert newest.parent == everything[0].name
    again = store.restore(state, 7)  # an abandoned one is still there by number
    assert again is not None and again.abandoned


def test_rewind_starts_a_new_timeline(store: stepwell.CheckpointStore) -> None:
    state = {"w": torch.ones(4)}
    for step in (1, 2, 3):
        store.save(step, state).wait()
    store.rewind(1)
    store.save(2, state).wait()
    assert [c.step for c in store.checkpoints()] == [1, 2]
    store.save(3, state).wait()
    assert [c.step for c in store.checkpoints()] == [1, 2, 3]
    assert len(store.checkpoints(abandoned=True)) == 5


def test_a_state_that_cannot_be_saved_makes_no_file(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        with pytest.raises(StateError, match="layer.weight"):
            store.save(1, {"model": {"layer.weight": torch.empty(3, device="meta")}})
        assert not (tmp_path / "run").exists()
        store.save(1, {"w": torch.ones(2)}).wait()


def test_keys_that_do_not_fit_leave_the_target_alone(store: stepwell.CheckpointStore) -> None:
    store.save(1, {"model": {"a": torch.ones(3), "b": torch.ones(2)}}).wait()
    target = {"model": {"a": torch.zeros(3), "c": torch.zeros(2)}}
    with pytest.raises(KeyMismatch) as caught:
        store.restore(target)
    assert caught.value.missing == ["model.c"] and caught.value.unexpected == ["model.b"]
    assert bool((target["model"]["a"] == 0).all())
    done = store.restore(target, strict=False)
    assert done is not None and done.missing == ("model.c",) and done.unexpected == ("model.b",)
    assert bool((target["model"]["a"] == 1).all())


def test_the_newest_checkpoint_that_holds_every_part_is_taken(store: stepwell.CheckpointStore) -> None:
    store.save(1, {"model": {"a": torch.ones(3)}, "optimizer": {"m": torch.ones(3)}}).wait()
    store.save(2, {"model": {"a": torch.full((3,), 2.0)}}).wait()
    target = {"model": {"a": torch.zeros(3)}, "optimizer": {"m": torch.zeros(3)}}
    found = store.restore(target)
    assert found is not None and found.step == 1 and list(found.skipped) == [2]
    only = store.restore({"model": target["model"]})
    assert only is not None and only.step == 2


def test_a_save_says_what_it_did(store: stepwell.CheckpointStore) -> None:
    save = store.save(3, {"w": torch.ones(1000)})
    assert save.wait(timeout=30) is save and save.done()
    report = save.report()
    assert report.step == 3 and report.bytes >= 4000 and report.error is None
    assert report.blocked_seconds > 0 and list(report.tier_seconds) == [store.tiers[0].info.name]
    with pytest.raises(ConfigError, match="no tier 'tape'"):
        save.wait("tape")


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    store = stepwell.open(tmp_path / "run")
    store.close()
    store.close()
    with pytest.raises(StoreClosed):
        store.save(1, {"w": torch.ones(1)})


def test_readers_cannot_save_and_write_nothing(tmp_path: Path) -> None:
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, {"w": torch.ones(5)}).wait()
    before = sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*"))
    with stepwell.open(tmp_path / "run", mode="r") as reader:
        target = {"w": torch.zeros(5)}
        assert reader.restore(target) is not None
        assert bool((target["w"] == 1).all())
        with pytest.raises(ConfigError, match="reading"):
            reader.save(2, target)
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*")) == before


def test_every_shard_opens_with_safetensors(tmp_path: Path) -> None:
    state = training()
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, state).wait()
    files = list((tmp_path / "run").rglob("*.safetensors"))
    assert any(f.name == "model.safetensors" for f in files)
    names: set[str] = set()
    for file in files:
        with safe_open(file, "pt") as opened:
            names |= {name for name in opened.keys() if opened.get_tensor(name).numel()}  # noqa: SIM118
    weights = state["model"].state_dict()
    assert weights.keys() <= names
    with safe_open(next(f for f in files if f.name == "model.safetensors"), "pt") as opened:
        for name, tensor in weights.items():
            assert torch.equal(opened.get_tensor(name), tensor)


def test_sidecars_travel_with_the_checkpoint(tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text('{"a": 1}')
    with stepwell.open(tmp_path / "run") as store:
        store.save(1, {"w": torch.ones(1)}, files=[tokenizer]).wait()
        with pytest.raises(ConfigError, match="manifest.json"):
            store.save(2, {"w": torch.ones(1)}, files={"manifest.json": tokenizer})
    [copy] = (tmp_path / "run").rglob("tokenizer.json")
    assert copy.read_text() == '{"a": 1}'


def test_a_failed_first_save_makes_the_next_call_raise(tmp_path: Path) -> None:
    class Broken(MemoryTier):
        async def reserve(self, shard: Any, size_bytes: int, *, resume: bool = False) -> Any:
            raise stepwell.TierUnavailable("the tier is gone", tier="memory")

    store = stepwell.open(run="run", tiers=[Broken()])
    save = store.save(1, {"w": torch.ones(1)})
    with pytest.raises(SaveFailed, match="the tier is gone"):
        save.wait()
    with pytest.raises(SaveFailed, match="first save"):
        store.save(2, {"w": torch.ones(1)})
    with pytest.raises(SaveFailed):
        store.close()


def test_nothing_keeps_the_state_alive_after_a_save(store: stepwell.CheckpointStore) -> None:
    tensor = torch.ones(10_000)
    watched = weakref.ref(tensor)
    store.save(1, {"w": tensor}).wait()
    store.restore({"w": torch.zeros(10_000)})
    del tensor
    assert still_alive([watched]) == []


def test_calls_work_inside_a_running_event_loop(store: stepwell.CheckpointStore) -> None:
    import asyncio

    async def notebook() -> None:
        save = await store.save(1, {"w": torch.ones(3)})
        assert save.done()
        target = {"w": torch.zeros(3)}
        store.restore(target)
        assert bool((target["w"] == 1).all())

    asyncio.run(notebook())
