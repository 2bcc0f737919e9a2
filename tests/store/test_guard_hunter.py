"""The hunter of torn snapshots: whatever training changes while saves are copied, each comes back as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from stepwell.tiers.base import Tier
from tests.store.guarded import OptimizerOf, Training, differences, frozen, opened, slow_disk
from tests.store.helpers import disk, host


def _memory_for_all(path: Path) -> list[Tier]:
    return [host(128), disk(path)]


def _memory_for_little(path: Path) -> list[Tier]:
    return [host(5), slow_disk(path, 300e6)]


def _no_memory(path: Path) -> list[Tier]:
    return [slow_disk(path, 600e6)]


PLACES = {"large memory": _memory_for_all, "small memory, slow disk": _memory_for_little, "no host tier": _no_memory}


def _hunt(tiers: list[Tier], make: OptimizerOf, seed: int, saves: int, two: bool) -> None:
    chance, training = random.Random(seed), Training(make, seed, two=two)
    expected = {}
    with opened(tiers) as store:
        for optimizer in training.optimizers:
            store.guard(optimizer)
        for _ in range(saves):
            for _ in range(chance.choice([1, 1, 1, 2])):
                training.train()
            if chance.random() < 0.3:
                training.forward()
            expected[training.step] = frozen(training.state)
            save = store.save(training.step, training.state)
            if chance.random() < 0.2:
                save.wait()
            if chance.random() < 0.3:
                training.update(chance.randrange(len(training.optimizers)))
        training.train()
        target = Training(make, seed + 1, two=two)
        for step, state in expected.items():
            found = store.restore(wanted := {**target.state, "beside": {**target.state["beside"]}}, step=step)
            assert found is not None and found.step == step
            assert differences(state, frozen(wanted)) == []


@pytest.mark.parametrize("tiers", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("seed", [1, 2])
def test_every_save_comes_back_as_it_was_when_it_was_called(
    tmp_path: Path, tiers: Callable[[Path], list[Tier]], seed: int
) -> None:
    _hunt(tiers(tmp_path), torch.optim.AdamW, seed, 10, two=seed % 2 == 0)


KINDS: dict[str, OptimizerOf] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "one by one": lambda p: torch.optim.Adam(p, foreach=False, amsgrad=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_optimizer_is_waited_for(tmp_path: Path, make: OptimizerOf) -> None:
    _hunt(_memory_for_little(tmp_path), make, 3, 5, two=False)
