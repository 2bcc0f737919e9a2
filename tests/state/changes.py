"""States of all kinds, and what may happen to them between two captures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stepwell.state import RNG, Replicated


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = torch.nn.Linear(width, 4, bias=width > 2)
        self.norm = torch.nn.BatchNorm1d(4)
        self.register_buffer("scale", torch.ones(width))
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.register_buffer("none", None)
        self.child: torch.nn.Module | None = None


class Other(torch.nn.Linear):
    pass


class Odd(torch.nn.Linear):
    def get_extra_state(self) -> Any:
        return {"odd": 1}


def stepped(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer, after a step with gradients of one."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def make_state(kind: int = 0) -> dict[str, Any]:
    """One of four kinds: other optimizers, a compiled model, modules in a dict."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), Block(2), torch.nn.ModuleList([Block(3), Block(2)]))
    model[1].child = torch.nn.Linear(3, 3)
    made: Any = torch.optim.AdamW if kind % 2 else lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)
    groups = list(model.parameters())
    optimizer = stepped(made([{"params": groups[:3]}, {"params": groups[3:], "lr": 0.5}]))
    state: dict[str, Any] = {
        "model": torch.compile(model, backend="eager") if kind == 2 else model,
        "optimizer": optimizer,
        "sched": torch.optim.lr_scheduler.StepLR(optimizer, 3),
        "plain": {"w": torch.ones(3, 3), "g": torch.ones(2, requires_grad=True), "n": 1, "list": [torch.ones(1)]},
    }
    if kind == 3:
        state = {"nets": {"a": model, "b": Replicated(torch.nn.Linear(2, 2))}, **state, "rng": RNG()}
        del state["model"]
    return state


def modules_of(state: dict[str, Any]) -> list[torch.nn.Module]:
    roots = [state["model"]] if "model" in state else [state["nets"]["a"], state["nets"]["b"].value]
    return [module for root in roots for module in root.modules()]


ODD = torch.ones(2)
Change = Callable[[dict[str, Any], Callable[[int], int]], object]
#: each is given the state and a function that picks a number below its argument
CHANGES: list[Change] = []


def change(function: Change) -> Change:
    CHANGES.append(function)
    return function


def _parameter(state: dict[str, Any], pick: Callable[[int], int]) -> tuple[torch.nn.Module, str, torch.Tensor]:
    found = [
        (module, name, tensor)
        for module in modules_of(state)
        for name, tensor in module._parameters.items()
        if tensor is not None
    ]
    return found[pick(len(found))]


def _buffer(state: dict[str, Any], pick: Callable[[int], int]) -> tuple[torch.nn.Module, str]:
    found = [(module, name) for module in modules_of(state) for name in module._buffers]
    return found[pick(len(found))] if found else (modules_of(state)[0], "new")


def _entry(state: dict[str, Any], pick: Callable[[int], int]) -> dict[str, Any]:
    found = list(state["optimizer"].state.values())
    return found[pick(len(found))] if found else {}


@change
def _values(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    with torch.no_grad():
        _parameter(state, pick)[2].add_(1)


@change
def _step(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    state["sched"].last_epoch += 1
    state["optimizer"].param_groups[0]["lr"] = float(pick(5))
    state["plain"]["n"] += pick(3)


DATA = [
    torch.Tensor.t,
    torch.Tensor.half,
    torch.Tensor.clone,
    torch.neg,
    torch._neg_view,
    lambda t: t.view(torch.int32),
]


@change
def _data(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    tensor = _parameter(state, pick)[2]
    how = pick(len(DATA))
    if how != 5 or tensor.dtype is torch.float32 and not tensor.requires_grad:
        tensor.data = (DATA[how] if tensor.dim() <= 2 else torch.Tensor.clone)(tensor.data)  # type: ignore[operator]


@change
def _grad(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    tensor = [_parameter(state, pick)[2], state["plain"]["w"], state["plain"]["g"]][pick(3)]
    if tensor.is_floating_point():
        tensor.requires_grad_(not tensor.requires_grad)


@change
def _new_parameter(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    module, name, tensor = _parameter(state, pick)
    shape = tuple(tensor.shape) if pick(2) else (2, 2)
    module._parameters[name] = torch.nn.Parameter(torch.full(shape, 7.0)) if pick(4) else None


@change
def _tie(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    module, name, _ = _parameter(state, pick)
    module._parameters[name] = _parameter(state, pick)[2]  # type: ignore[assignment]


@change
def _swap(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    (a, first, x), (b, second, y) = _parameter(state, pick), _parameter(state, pick)
    a._parameters[first], b._parameters[second] = y, x  # type: ignore[assignment]


@change
def _new_buffer(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    module, name = _buffer(state, pick)
    other, shared = _buffer(state, pick)
    made = [None, torch.ones(3), torch.ones(2, requires_grad=True), other._buffers.get(shared)][pick(4)]
    module._buffers[name if pick(3) else f"new{pick(2)}"] = made


@change
def _persistent(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    module, name = _buffer(state, pick)
    module._non_persistent_buffers_set ^= {name}


@change
def _modules(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    modules = modules_of(state)
    module = modules[pick(len(modules))]
    names = [name for name in module._modules if name != "_orig_mod"]
    name = names[pick(len(names))] if names and pick(3) else "added"
    kind = pick(5)
    if kind == 0:
        module._modules.pop(name, None)
    elif kind == 1:
        module._modules[name] = torch.nn.Linear(2, 2)
    elif kind == 2:
        module._modules[name] = None
    elif kind == 3:
        leaves = [
            each for each in modules if not each._modules and each is not module
        ]  # shared, but never inside itself
        module._modules[name] = leaves[pick(len(leaves))] if leaves else None
    elif name in module._modules:
        module._modules[f"renamed{pick(2)}"] = module._modules.pop(name)


@change
def _own_way(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    modules = modules_of(state)
    module, kind = modules[pick(len(modules))], pick(4)
    if kind == 0:
        hooked: Any = module
        hooked._register_state_dict_hook(lambda module, tree, prefix, _: tree.update({f"{prefix}odd": ODD}))
    elif kind == 1:
        listening: Any = module
        listening.register_load_state_dict_post_hook(lambda module, keys: None)
    elif kind == 2:
        module.get_extra_state = lambda: {"n": 5}  # type: ignore[method-assign]
    else:
        module._state_dict_hooks.clear()
        module.__dict__.pop("get_extra_state", None)


@change
def _optimizer_state(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    entry, states = _entry(state, pick), state["optimizer"].state
    keys = list(entry)
    key = keys[pick(len(keys))] if keys else "made"
    kind = pick(8)
    if kind == 0:
        entry[key] = torch.zeros(3)
    elif kind == 1:
        entry[key] = [None, 0.5, True, [torch.ones(2)]][pick(4)]
    elif kind == 2:
        entry.pop(key, None)
    elif kind == 3:
        entry[key] = entry.pop(key, torch.ones(1))  # last now
    elif kind == 4 and states:
        first = next(iter(states))
        states[first] = states.pop(first)
    elif kind == 5 and states:
        states.pop(list(states)[pick(len(states))])
    elif kind == 6:
        states["apart"] = torch.ones(2)
    elif key in entry and isinstance(entry[key], torch.Tensor) and entry[key].dim() == 2:
        entry[key].data = entry[key].data.t()


@change
def _optimizer_groups(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    groups = state["optimizer"].param_groups
    kind = pick(6)
    if kind == 0:
        groups[0]["lr"] = torch.tensor(0.25)
    elif kind == 1:
        groups[-1][["extra", "é", "\ud800"][pick(3)]] = (1, float("nan"))
    elif kind == 2:
        groups[0]["params"].append(torch.nn.Parameter(torch.ones(2)))
    elif kind == 3 and groups[0]["params"]:
        groups[-1]["params"].append(groups[0]["params"].pop())
    elif kind == 4:
        groups[0]["params"].reverse()
    else:
        state["optimizer"].register_state_dict_post_hook(lambda optimizer, tree: {**tree, "more": 1})


@change
def _plain(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    made = [torch.ones(3, 3), state["plain"]["w"], state["plain"]["g"], _parameter(state, pick)[2], 5, torch.eye(3).t()]
    state["plain"][["w", "new", "g2"][pick(3)]] = made[pick(len(made))]
    if not isinstance(state["plain"]["w"], torch.Tensor):
        state["plain"]["w"] = torch.ones(3, 3)


@change
def _parts(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    kind = pick(4)
    if kind == 0:
        state["second"] = torch.nn.Linear(2, 2)
    elif kind == 1 and "model" in state:
        state["again"] = state["model"]
    elif kind == 2:
        state.pop("second", None)
    else:
        state["optimizer"] = state.pop("optimizer")  # last now


@change
def _classes(state: dict[str, Any], pick: Callable[[int], int]) -> None:
    found = [module for module in modules_of(state) if isinstance(module, torch.nn.Linear)]
    if found:
        found[pick(len(found))].__class__ = [torch.nn.Linear, Other, Odd][pick(3)]
    if "second" in state:
        state["second"] = [torch.nn.Linear, Other, Odd][pick(3)](2, 2)
