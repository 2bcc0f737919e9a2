"""Modules, optimizers and the other objects of a training job."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from stepwell.errors import ConfigError, KeyMismatch
from stepwell.state import RNG, Context, assign, capture, register_provider
from tests.state.memory import Saved, assert_same


class Net(nn.Module):
    """Tied weights, a batch norm, a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.norm(self.embed(x)))
        return out


def compiled(module: nn.Module) -> Any:
    """Wrapped as torch.compile does, without the cost of a real backend."""
    return torch.compile(module, backend="eager")


def trained(dtype: torch.dtype = torch.float32, steps: int = 3) -> tuple[Net, torch.optim.AdamW]:
    torch.manual_seed(steps)
    net = Net().to(dtype)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, optimizer, steps)
    return net, optimizer


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.arange(10)).float().square().mean().backward()
        optimizer.step()


def test_a_module_is_stored_like_its_state_dict_and_filled_in_place() -> None:
    net, _ = trained()
    saved = Saved({"model": net})
    assert set(saved.labels()) == set(net.state_dict()) - {"head.weight"}
    loaded = saved.load()["model"]
    assert_same(loaded, {name: tensor.detach() for name, tensor in net.state_dict().items()})
    other = Net()
    pointer = other.embed.weight.data_ptr()
    other.embed.weight.requires_grad_(False)
    saved.restore({"model": other})
    assert other.embed.weight.data_ptr() == pointer and other.head.weight is other.embed.weight
    assert not other.embed.weight.requires_grad
    assert_same(dict(other.state_dict()), dict(net.state_dict()))


def test_modules_dicts_and_state_dicts_restore_each_other() -> None:
    net, _ = trained()
    target = Net()
    Saved({"model": net.state_dict()}).restore({"model": target})
    assert_same(dict(target.state_dict()), dict(net.state_dict()))
    plain = {name: torch.zeros_like(tensor) for name, tensor in net.state_dict().items()}
    Saved({"model": net}).restore({"model": plain})
    assert_same(plain, dict(net.state_dict()))


class Own(nn.Module):
    """A child that a user called "module"."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2)


def test_names_are_canonical_in_every_wrapper() -> None:
    inner = Own()
    for wrapped in (compiled(inner), nn.DataParallel(inner), compiled(nn.DataParallel(inner))):
        saved = Saved({"model": wrapped})
        assert set(saved.labels()) == {"module.weight", "module.bias"}
        target = Own()
        saved.restore({"model": compiled(target)})
        assert_same(dict(target.state_dict()), dict(inner.state_dict()))


def test_meta_modules_become_real() -> None:
    net, _ = trained()
    with torch.device("meta"):
        target = Net()
    Saved({"model": net}).restore({"model": target})
    assert target.head.weight is target.embed.weight
    assert_same(target.embed.weight, net.embed.weight)
    assert not target.norm.running_mean.is_meta  # type: ignore[union-attr]  # it has one


class Hooked(nn.Linear):
    """Loads in its own way."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.calls = 0
        self.extra = "none"

    def get_extra_state(self) -> Any:
        return {"extra": self.extra, "t": torch.ones(1)}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]

    def _load_from_state_dict(self, *args: Any, **options: Any) -> None:
        self.calls += 1
        super()._load_from_state_dict(*args, **options)


def test_modules_with_hooks_and_extra_state_load_themselves() -> None:
    source: Any = nn.Sequential(Hooked(), nn.Linear(2, 1))
    source[0].extra = "saved"
    saved = Saved({"model": compiled(source)})
    target: Any = nn.Sequential(Hooked(), nn.Linear(2, 1))
    pointer = target[1].weight.data_ptr()
    saved.restore({"model": target})
    assert target[0].calls == 1 and target[0].extra == "saved" and target[1].weight.data_ptr() == pointer
    assert torch.equal(target[0].weight, source[0].weight)
    with pytest.raises(KeyMismatch, match=r"1\.more"):
        target[1].register_parameter("more", nn.Parameter(torch.zeros(1)))
        saved.restore({"model": target})


def test_module_differences_are_reported_before_anything_changes() -> None:
    saved = Saved({"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))})
    target: Any = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 1))
    before = target[0].weight.clone()
    with pytest.raises(KeyMismatch) as caught:
        assign(saved.skeleton, {"model": target})
    assert caught.value.missing == ["model.2.weight", "model.2.bias"]
    assert caught.value.mismatched == ["model.1.weight", "model.1.bias"]
    assert torch.equal(target[0].weight, before)
    outer = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)))
    saved.restore({"model": outer}, rename={"": "0."})


def test_optimizers_use_parameter_names() -> None:
    net, optimizer = trained()
    saved = Saved({"model": net, "optimizer": optimizer})
    assert "optimizer.state.norm.weight.exp_avg" in saved.labels()
    other = Net()
    turned = torch.optim.AdamW(list(other.parameters())[::-1], lr=7.0)  # another order: names decide
    saved.restore({"model": other, "optimizer": turned})
    for (name, old), new in zip(net.named_parameters(), other.parameters(), strict=True):
        assert_same(turned.state[new], optimizer.state[old], name)
    assert turned.param_groups[0]["lr"] == 1e-2


def test_training_goes_on_as_if_nothing_had_happened() -> None:
    net, optimizer = trained()
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    saved = Saved({"model": net, "optimizer": optimizer, "sched": schedule})
    other = Net()
    fresh = torch.optim.AdamW(other.parameters(), lr=5.0)
    other_schedule = torch.optim.lr_scheduler.OneCycleLR(fresh, 0.3, total_steps=50)
    saved.restore({"model": other, "optimizer": fresh, "sched": other_schedule})
    for model, opt, sched in ((net, optimizer, schedule), (other, fresh, other_schedule)):
        for _ in range(4):
            train(model, opt, 1)
            sched.step()
    assert_same(dict(other.state_dict()), dict(net.state_dict()))


def test_fp32_state_of_bf16_parameters_stays_fp32_and_in_place() -> None:
    net, optimizer = trained(torch.bfloat16)
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-5
    saved = Saved({"model": net, "optimizer": optimizer})
    for fresh in (True, False):
        other, target = trained(torch.bfloat16, steps=0 if fresh else 2)
        if not fresh:
            for state in target.state.values():
                state["exp_avg"] = state["exp_avg"].float()
        before = {name: id(tensor) for state in target.state.values() for name, tensor in state.items()}
        saved.restore({"model": other, "optimizer": target})
        for old, new in zip(net.parameters(), other.parameters(), strict=True):
            assert_same(target.state[new], optimizer.state[old])
            assert target.state[new]["exp_avg"].dtype == torch.float32
        if not fresh:
            assert {name: id(tensor) for state in target.state.values() for name, tensor in state.items()} == before


def test_optimizers_without_their_model_use_numbers() -> None:
    net, optimizer = trained()
    saved = Saved({"optimizer": optimizer})
    assert "optimizer.state.0.exp_avg" in saved.labels()
    assert list(saved.load()["optimizer"]["state"]) == [0, 1, 2]
    other, target = trained(steps=1)
    for state in ({"optimizer": target}, {"model": other, "optimizer": target}):
        saved.restore(state, strict={"model": False} if "model" in state else True)
        for old, new in zip(net.parameters(), other.parameters(), strict=True):
            assert_same(target.state[new], optimizer.state[old])
    named = Saved({"model": net, "optimizer": optimizer})
    _, alone = trained(steps=1)
    named.restore({"optimizer": alone})
    assert_same(list(alone.state.values()), list(optimizer.state.values()))
    with pytest.raises(KeyMismatch, match="groups"):
        assign(saved.skeleton, {"optimizer": torch.optim.AdamW([torch.zeros(1, requires_grad=True)])})


def test_state_of_parameters_frozen_later_is_kept() -> None:
    net, optimizer = trained()
    net.embed.weight.requires_grad_(False)
    saved = Saved({"model": net, "optimizer": optimizer})
    other, target = Net(), None
    other.embed.weight.requires_grad_(False)
    target = torch.optim.AdamW(other.parameters())
    saved.restore({"model": other, "optimizer": target})
    assert_same(target.state[other.embed.weight], optimizer.state[net.embed.weight])


def test_optimizer_differences_are_reported_by_name() -> None:
    net, optimizer = trained()
    saved = Saved({"model": net, "optimizer": optimizer})
    smaller: Any = nn.ModuleDict({"embed": nn.Embedding(10, 8), "extra": nn.Linear(1, 1, bias=False)})
    target = torch.optim.AdamW(smaller.parameters())
    with pytest.raises(KeyMismatch) as caught:
        assign(saved.skeleton, {"model": smaller, "optimizer": target}, strict={"model": False})
    assert caught.value.missing == ["optimizer.state.extra.weight"]
    assert caught.value.unexpected == ["optimizer.state.norm.weight", "optimizer.state.norm.bias"]
    saved.restore({"model": smaller, "optimizer": target}, strict=False)
    assert_same(target.state[smaller["embed"].weight], optimizer.state[net.embed.weight])


@pytest.mark.parametrize("kind", ["SGD", "Adagrad", "RMSprop", "LBFGS", "Adam"])
def test_other_optimizers(kind: str) -> None:
    def make(net: nn.Module) -> Any:
        return getattr(torch.optim, kind)(net.parameters(), lr=torch.tensor(0.1) if kind == "Adam" else 0.1)

    torch.manual_seed(0)
    net, other = nn.Linear(3, 1), nn.Linear(3, 1)
    first, second = make(net), make(other)

    def closure(model: nn.Module, optimizer: Any) -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).square().sum()
        loss.backward()
        return loss

    first.step(lambda: closure(net, first))
    Saved({"model": net, "optimizer": first}).restore({"model": other, "optimizer": second})
    for model, optimizer in ((net, first), (other, second)):
        optimizer.step(lambda model=model, optimizer=optimizer: closure(model, optimizer))
    assert_same(other.weight, net.weight)


def test_a_grad_scaler_and_schedulers_of_schedulers() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    parts: list[Any] = [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.StepLR(optimizer, 2)]
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[3])
    saved = Saved({"scaler": scaler, "sched": schedule})
    state = schedule.state_dict()
    target = torch.amp.GradScaler("cpu")
    optimizer.step()
    schedule.step()
    saved.restore({"scaler": target, "sched": schedule})
    assert target.get_scale() == 512.0 and schedule.last_epoch == state["last_epoch"]


def test_random_states_are_read_at_save_and_set_at_restore() -> None:
    saved = Saved({"rng": RNG()})
    drawn = torch.rand(3), np.random.rand(3), random.random()
    torch.rand(7)
    saved.restore({"rng": RNG()})
    again = torch.rand(3), np.random.rand(3), random.random()
    assert torch.equal(drawn[0], again[0]) and drawn[1].tolist() == again[1].tolist() and drawn[2] == again[2]


def test_generators() -> None:
    state: dict[str, Any] = {"t": torch.Generator().manual_seed(5), "n": np.random.default_rng(5)}
    saved = Saved({"gen": state})
    drawn = torch.rand(2, generator=state["t"]), state["n"].random(2)
    loaded = saved.load()["gen"]
    saved.restore({"gen": state})
    for one in (loaded, state):
        assert torch.equal(torch.rand(2, generator=one["t"]), drawn[0])
        assert one["n"].random(2).tolist() == drawn[1].tolist()


class Money:
    """A type of some third party."""

    def __init__(self, amount: torch.Tensor, currency: str) -> None:
        self.amount = amount
        self.currency = currency


class Dollars(Money):
    """Found through its base class."""


class MoneyProvider:
    """As third parties write them."""

    name = "test-money"

    def to_tree(self, obj: Money, context: Context) -> Any:
        return {"amount": obj.amount, "currency": obj.currency, "inner": nn.Linear(1, 1)}

    def from_tree(self, tree: Any, existing: Money | None, context: Context) -> Money:
        if existing is None:
            return Money(tree["amount"], tree["currency"])
        existing.currency = tree["currency"]
        existing.amount = tree["amount"]
        return existing

    def live(self, existing: Money, context: Context) -> Any:
        return {"amount": existing.amount, "currency": existing.currency, "inner": {}}


def test_third_party_providers() -> None:
    register_provider(Money, MoneyProvider())
    saved = Saved({"p": [Dollars(torch.ones(2), "USD")]})
    amount = torch.zeros(2)
    target = Dollars(amount, "EUR")
    saved.restore({"p": [target]})
    assert target.amount is amount and amount.sum() == 2 and target.currency == "USD"
    assert type(saved.load()["p"][0]) is Money

    class Thief(MoneyProvider):
        """Takes a name that is taken."""

    with pytest.raises(ConfigError):
        register_provider(Money, Thief())
    with pytest.raises(ConfigError):
        register_provider(dict, MoneyProvider())


def test_a_snapshot_does_not_keep_the_module() -> None:
    import gc
    import weakref

    net, _ = trained()
    snapshot = capture({"model": net})
    alive = weakref.ref(net)
    del net
    gc.collect()
    assert alive() is None and snapshot.nbytes
