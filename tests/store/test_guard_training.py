"""Guards in real training: closures, scalers, accumulation, compiled steps, loads; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from stepwell import ConfigError, SaveFailed
from tests.store.guarded import Stuck, Training, differences, frozen, opened
from tests.store.helpers import disk, host

IDS = torch.arange(8)


def _backward(training: Training) -> torch.Tensor:
    loss: torch.Tensor = training.net(IDS).square().mean()
    loss.backward()  # type: ignore[no-untyped-call]
    return loss


def _closure(training: Training) -> None:
    optimizer = training.optimizers[0]

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return _backward(training)

    optimizer.step(closure)  # type: ignore[arg-type]  # LBFGS takes tensors


def _scaler(training: Training) -> None:
    scaler = torch.amp.GradScaler("cpu")
    for _ in range(2):  # gradients add up
        scaler.scale(training.net(IDS).square().mean()).backward()
    scaler.unscale_(training.optimizers[0])
    scaler.step(training.optimizers[0])
    scaler.update()


def _compiled(training: Training) -> None:
    optimizer = training.optimizers[0]

    @torch.compile(backend="eager")  # type: ignore[untyped-decorator, unused-ignore]
    def train() -> None:
        _backward(training)
        optimizer.step()

    train()


def _compiled_step(training: Training) -> None:
    _backward(training)
    torch.compile(training.optimizers[0].step, backend="eager")()


WAYS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Training], None]]] = {
    "closure": (lambda p: torch.optim.LBFGS(p, max_iter=2, history_size=2), _closure),
    "scaler and accumulation": (lambda p: torch.optim.AdamW(p), _scaler),
    "compiled training": (lambda p: torch.optim.Adam(p), _compiled),
    "compiled step": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), _compiled_step),
    "load_state_dict": (lambda p: torch.optim.Adam(p), lambda t: _load(t)),
}


def _load(training: Training) -> None:
    optimizer = training.optimizers[0]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    training.update()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what torch.compile imports
@pytest.mark.parametrize(("make", "update"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("first", [True, False], ids=["state is made meanwhile", "state is there"])
def test_each_way_of_updating_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool,
    make: Callable[[Any], torch.optim.Optimizer], update: Callable[[Training], None],
) -> None:  # fmt: skip
    training = Training(make)
    if not first:
        update(training)
    stuck = Stuck(tmp_path, monkeypatch, mebibytes=48)  # what no guard covers has room
    with opened(stuck.tiers) as store:
        store.guard(training.optimizers[0])
        large = {"large": torch.nn.Parameter(torch.ones(24 << 20))}  # before the model: it takes the room
        guard = store.guard(large["large"])
        expected = frozen(training.net), frozen(training.optimizers[0])
        save = store.save(1, {"a": large, "model": training.net, "optimizer": training.optimizers[0]})
        assert not save.copied.done()
        update(training)
        assert stuck.waits >= 1
        stuck.go()
        save.wait()
        guard.remove()
        target = Training(make, 1)
        store.restore({"model": target.net, "optimizer": target.optimizers[0]})
        assert differences(expected[0], frozen(target.net)) == []
        if first is False and "LBFGS" not in type(target.optimizers[0]).__name__:
            assert differences(expected[1], frozen(target.optimizers[0])) == []


def test_a_save_in_the_middle_of_a_step_is_copied_before_it_returns(tmp_path: Path) -> None:
    """By a closure: the optimizer changes its parameters afterwards, and tells nobody again."""
    parameter = torch.nn.Parameter(torch.zeros(1 << 20))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    with opened([host(), disk(tmp_path)]) as store:
        store.guard(optimizer)

        def closure() -> float:
            parameter.grad = torch.ones_like(parameter)
            assert store.save(1, {"model": {"w": parameter}}).captured.done()
            return 0.0

        optimizer.step(closure)
        target = {"model": {"w": torch.ones(1 << 20)}}
        store.restore(target)
        assert not target["model"]["w"].any() and (parameter == -1).all()


def test_a_module_that_is_loaded_into_fails_the_save_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    training, stuck = Training(torch.optim.Adam), Stuck(tmp_path, monkeypatch)
    with opened(stuck.tiers) as store:
        store.guard(training.optimizers[0])
        save = store.save(1, {"model": training.net})
        training.net.load_state_dict(copy.deepcopy(training.net.state_dict()))
        stuck.go()
        with pytest.raises(SaveFailed, match="before_update"):
            save.wait()
        with pytest.raises(SaveFailed, match="first save"):
            store.save(2, {"model": training.net})
        store.save(3, {"model": training.net}).wait()


class FlatParameter(torch.nn.Parameter):
    """Of FSDP1, by name."""


class FullyShardedDataParallel(torch.nn.Module):
    """Likewise."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(64, 64)


class _Rewriting(torch.optim.SGD):
    def eval(self) -> None: ...


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (lambda: torch.optim.SGD([FlatParameter(torch.ones(4))]), "FSDP1"),
        (lambda: FullyShardedDataParallel(), "FSDP1"),
        (lambda: _Rewriting([torch.nn.Parameter(torch.ones(4))]), r"_Rewriting\.eval\(\)"),
        (lambda: torch.nn.Sequential(torch.nn.Embedding(4, 4, max_norm=1.0)), r"Sequential\.0.*max_norm"),
        (lambda: {"w": torch.ones(4)}, "a dict cannot be guarded"),
    ],
)
def test_what_cannot_be_guarded_is_refused_by_name(tmp_path: Path, what: Callable[[], Any], words: str) -> None:
    with opened([host(), disk(tmp_path)]) as store:
        with pytest.raises(ConfigError, match=words):
            store.guard(what())
        with pytest.raises(ConfigError, match="nothing to guard"):
            store.guard()


def test_a_model_that_rewrites_guarded_weights_is_refused_when_it_is_saved(tmp_path: Path) -> None:
    free, guarded = (torch.nn.Embedding(64, 64, max_norm=1.0) for _ in range(2))
    linear = torch.nn.Linear(64, 64)
    with opened([host(), disk(tmp_path)]) as store:
        store.guard(torch.optim.SGD(linear.parameters()))
        store.save(1, {"model": torch.nn.ModuleList([free, linear])}).wait()  # its weight is copied before
        guard = store.guard(torch.optim.SGD(guarded.parameters()))
        with pytest.raises(ConfigError, match=r"model\.0 is an Embedding with max_norm"):
            store.save(2, {"model": torch.nn.ModuleList([guarded, linear])})
        guard.remove()
        store.save(3, {"model": torch.nn.ModuleList([guarded, linear])}).wait()
