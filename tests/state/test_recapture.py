"""Captures of the same objects again: recalled where only values have changed, and right whatever has."""

from __future__ import annotations

import copy
import gc
import sys
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.errors import StateError
from stepwell.state import PlanCache, Snapshot, capture, recall
from stepwell.state.cache import UNUSED_MAX
from stepwell.state.modules import ModuleProvider
from stepwell.state.optim import OptimizerProvider
from stepwell.state.watch import Watch
from tests.state.changes import CHANGES, Change, Odd, Other, make_state, modules_of, stepped
from tests.state.memory import files_of
from tests.state.standing import standing


def same(found: Snapshot, right: Snapshot) -> None:
    assert found.encoded_skeleton() == right.encoded_skeleton()
    assert found.plan.structure == right.plan.structure and found.plan.aliases == right.plan.aliases
    for shard, other in zip(found.shards, right.shards, strict=True):
        assert (shard.file, shard.header, shard.size) == (other.file, other.header, other.size)
        for name in ("offsets", "leaves", "lazy", "device", "gpus"):
            assert np.array_equal(getattr(shard, name), getattr(other, name))
    for leaf, tensor in enumerate(right.tensors):
        if right.addresses[leaf] != found.addresses[leaf]:  # made anew by each walk
            assert found.plan.structure.names[leaf].startswith("rng"), found.plan.structure.names[leaf]
        assert found.tensors[leaf].data_ptr() == found.addresses[leaf] and tensor.shape == found.tensors[leaf].shape
        assert found.tensors[leaf].grad_fn is None
    assert found.parts == right.parts and found.sidecars == right.sidecars


def usual(state: dict[str, Any]) -> dict[str, Any]:
    """Only modules and optimizers, as most states are: those of the state."""
    found = {key: each for key, each in state.items() if isinstance(each, torch.nn.Module | torch.optim.Optimizer)}
    return {"a": state["nets"]["a"], **found} if "nets" in state else found


def check(state: dict[str, Any], plans: PlanCache, times: int) -> None:
    """The cached and the fresh capture agree, in what they find and in what they refuse."""
    for _ in range(times):
        generator = torch.get_rng_state()
        try:
            right = capture(state)
        except StateError as error:
            with pytest.raises(StateError) as raised:
                capture(state, plans=plans)
            assert str(raised.value) == str(error)
            continue
        found = capture(state, plans=plans)
        torch.set_rng_state(generator)
        same(found, right)
        assert files_of(found) == files_of(right)


QUICK = settings(deadline=None, derandomize=True, max_examples=100, suppress_health_check=list(HealthCheck))


@given(data=st.data(), kind=st.integers(0, 3), quick=st.booleans())
@QUICK
def test_whatever_changes_the_capture_is_that_of_a_fresh_walk(data: st.DataObject, kind: int, quick: bool) -> None:
    def pick(count: int) -> int:
        return data.draw(st.integers(0, max(count - 1, 0)))

    plans, others, state = PlanCache(), PlanCache(), make_state(kind)
    with pytest.MonkeyPatch.context() as patch:
        if not quick:  # a torch without that function
            patch.setattr(torch._C, "_dynamo", None)
        check(state, plans, 3)
        check(usual(state), others, 3)
        assert plans.memories and others.memories
        for _ in range(data.draw(st.integers(1, 6))):
            CHANGES[pick(len(CHANGES))](state, pick)
            times = pick(3) + 1
            check(state, plans, times)
            check(usual(state), others, times)


@pytest.mark.parametrize("function", CHANGES, ids=lambda f: f.__name__)
@given(data=st.data(), kind=st.integers(0, 3))
@settings(deadline=None, derandomize=True, max_examples=12, suppress_health_check=list(HealthCheck))
def test_each_change(function: Change, data: st.DataObject, kind: int) -> None:
    plans, others, state = PlanCache(), PlanCache(), make_state(kind)
    check(state, plans, 3)
    check(usual(state), others, 3)
    for _ in range(2):
        function(state, lambda count: data.draw(st.integers(0, max(count - 1, 0))))
        check(state, plans, 3)
        check(usual(state), others, 3)


class Pair(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Module(), torch.nn.Module()
        for name, owner in (("p", self.a), ("q", self.a), ("r", self.b)):
            owner.register_parameter(f"{name}w", torch.nn.Parameter(torch.ones(2)))
            owner.register_buffer(f"{name}b", torch.ones(2))
            owner.add_module(f"{name}m", torch.nn.Linear(2, 2))


def _moved(a: dict[Any, Any], b: dict[Any, Any]) -> None:
    """The last of one becomes the first of the next, so that both together look as before."""
    key, value = a.popitem()
    entries = {key: value, **b}
    b.clear()
    b.update(entries)


@pytest.mark.parametrize("what", ["_parameters", "_buffers", "_modules", "groups", "state", "keys", "parts"])
def test_what_goes_from_one_to_the_next_is_seen(what: str) -> None:
    model = Pair()
    optimizer = torch.optim.SGD([{"params": list(model.a.parameters())}, {"params": list(model.b.parameters())}], lr=1)
    entries: Any = optimizer.state
    p, q, r = model.a.pw, model.a.qw, model.b.rw
    entries.update({p: {"x": torch.ones(1), "y": torch.ones(1)}, q: {"z": torch.ones(1)}})
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "one": {"v": torch.ones(1), "w": torch.ones(1)},
        "two": {},
    }
    plans, others = PlanCache(), PlanCache()
    check(state, plans, 3)
    check(usual(state), others, 3)
    if what == "groups":
        optimizer.param_groups[1]["params"].insert(0, optimizer.param_groups[0]["params"].pop())
    elif what == "state":
        _moved(entries[p], entries[q])
    elif what == "keys":
        entries[r] = entries.pop(q)
    elif what == "parts":
        _moved(state["one"], state["two"])
    else:
        _moved(getattr(model.a, what), getattr(model.b, what))
    check(state, plans, 3)
    check(usual(state), others, 3)


def _renamed(entries: dict[Any, Any], key: str, name: str) -> None:
    kept = {name if old == key else old: value for old, value in entries.items()}
    entries.clear()
    entries.update(kept)


def _swapped(entries: dict[Any, Any], one: str, two: str) -> None:
    entries[one], entries[two] = entries[two], entries[one]


SMALL: dict[str, Callable[[Pair], object]] = {
    "child": lambda model: _renamed(model.a._modules, "qm", "new"),
    "parameter": lambda model: _renamed(model.a._parameters, "qw", "new"),
    "buffer": lambda model: _renamed(model.b._buffers, "rb", "new"),
    "transient": lambda model: _renamed(model.b._buffers, "nob", "new"),
    "no child": lambda model: _swapped(model.b._modules, "rm", "nom"),
    "no parameter": lambda model: _swapped(model.b._parameters, "rw", "now"),
    "no buffer": lambda model: _swapped(model.b._buffers, "rb", "nob"),
    "new child": lambda model: model.b._modules.update(nom=torch.nn.Linear(2, 2)),
    "new parameter": lambda model: model.b._parameters.update(now=torch.nn.Parameter(torch.ones(2))),
    "new buffer": lambda model: model.b._buffers.update(nob=torch.ones(2)),
    "class": lambda model: setattr(model.a.qm, "__class__", Other),
    "root": lambda model: setattr(model, "__class__", type("Renamed", (Pair,), {})),
    "way": lambda model: setattr(model.a.qm, "__class__", Odd),
    "hook": lambda model: cast(Any, model.a.qm)._register_state_dict_hook(lambda *arguments: None),
    "changing hook": lambda model: cast(Any, model.a.qm)._register_state_dict_hook(lambda m, tree, *_: tree.clear()),
    "method": lambda model: setattr(model.a.qm, "_save_to_state_dict", lambda *arguments: None),
    "tie": lambda model: setattr(model.a, "pw", model.b.rw),
    "kept": lambda model: model.a._non_persistent_buffers_set.clear(),
}


@pytest.mark.parametrize("change", SMALL.values(), ids=SMALL)
def test_small_differences_are_seen(change: Callable[[Pair], object]) -> None:
    model = Pair()
    model.a._non_persistent_buffers_set.add("pb")
    model.b.register_parameter("now", None)
    model.b.register_buffer("nob", None)
    model.b.add_module("nom", None)
    optimizer = stepped(torch.optim.SGD(model.parameters(), lr=1, momentum=0.5))
    state = {"model": model, "optimizer": optimizer}
    plans = PlanCache()
    check(state, plans, 3)
    assert plans.memories
    change(model)
    check(state, plans, 3)


def test_a_class_that_gets_another_way_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    state, plans = {"model": torch.nn.Sequential(Other(2, 2))}, PlanCache()
    check(state, plans, 3)
    monkeypatch.setattr(Other, "_save_to_state_dict", lambda *arguments: None)
    check(state, plans, 3)


def test_a_key_of_a_plain_dict_is_seen_to_be_another() -> None:
    state, plans = {"one": {"u": torch.ones(2), "v": torch.ones(2)}}, PlanCache()
    check(state, plans, 3)
    _renamed(state["one"], "v", "w")
    check(state, plans, 3)


def test_no_graph_stays_alive() -> None:
    state, plans = {"one": torch.ones(2, requires_grad=True) * 2}, PlanCache()
    check(state, plans, 4)
    assert state["one"].grad_fn is not None


WAYS: dict[str, Callable[[Any], object]] = {
    "hook": lambda optimizer: optimizer.register_state_dict_post_hook(lambda _, tree: {**tree, "more": 1}),
    "method": lambda optimizer: setattr(optimizer, "state_dict", lambda: {"more": 1}),
    "setting": lambda optimizer: optimizer.param_groups[0].update(more=torch.ones(3)),
    "no tensor": lambda optimizer: optimizer.state[optimizer.param_groups[0]["params"][0]].update(momentum_buffer=1.5),
    "apart": lambda optimizer: optimizer.state.update(apart=torch.ones(2)),
}


@pytest.mark.parametrize("change", WAYS.values(), ids=WAYS)
def test_another_way_of_an_optimizer_is_seen(change: Callable[[Any], object]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = stepped(torch.optim.SGD(model.parameters(), lr=1, momentum=0.5))
    state, plans = {"model": model, "optimizer": optimizer}, PlanCache()
    check(state, plans, 3)
    change(optimizer)
    check(state, plans, 3)


def test_names_follow_the_parameters_of_a_module_that_saves_itself() -> None:
    model: Any = Pair()
    model._register_state_dict_hook(lambda *arguments: None)
    optimizer = stepped(torch.optim.SGD(model.parameters(), lr=1, momentum=0.5))
    state, plans = {"model": model, "optimizer": optimizer}, PlanCache()
    check(state, plans, 3)
    assert [*plans.memories[0].objects] == ["optimizer"]
    _swapped(model.a._parameters, "pw", "qw")
    check(state, plans, 3)


@pytest.mark.parametrize("tied", [True, False])
def test_one_tensor_in_two_places_is_not_two_over_one_memory(tied: bool) -> None:
    weight, plans = torch.ones(4), PlanCache()
    state = {"model": {"a": weight, "b": weight if tied else weight.detach()}}
    check(state, plans, 3)
    state["model"]["b"] = weight.detach() if tied else weight
    check(state, plans, 3)


# -- that it is recalled, and what is held -----------------------------------------------------------


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of what was walked over."""
    found: list[str] = []
    for cls in (ModuleProvider, OptimizerProvider):
        kept: Any = cls.to_tree

        def to_tree(self: Any, obj: Any, context: Any, kept: Any = kept) -> Any:
            found.append(context.key)
            return kept(self, obj, context)

        monkeypatch.setattr(cls, "to_tree", to_tree)
    return found


@pytest.mark.parametrize("kind", range(4))
def test_what_only_changes_in_value_is_not_walked_over(kind: int, walks: list[str]) -> None:
    plans, state = PlanCache(), make_state(kind)
    for _ in range(2):
        capture(state, plans=plans)
    walks.clear()
    for number in range(4):
        stepped(state["optimizer"])
        state["sched"].last_epoch = state["plain"]["n"] = number
        found = capture(state, plans=plans)
    assert walks == []
    same(found, capture(state))


@pytest.mark.parametrize("kind", range(4))
def test_a_state_of_modules_and_optimizers_is_not_walked_over_at_all(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, state = PlanCache(), usual(make_state(kind))
    for _ in range(2):
        capture(state, plans=plans)
    right, made = capture(state), []
    monkeypatch.setattr(sys.modules[capture.__module__], "_walk", lambda *some, **more: made.append(some))
    stepped(state["optimizer"]).param_groups[0]["lr"] = 0.125
    found = capture(state, plans=plans)
    assert not made and found.live == set(state)
    monkeypatch.undo()
    same(found, capture(state))
    assert found.encoded_skeleton() != right.encoded_skeleton()  # by the learning rate


def test_states_that_alternate_are_both_recalled(walks: list[str]) -> None:
    plans, states = PlanCache(), [make_state(kind) for kind in range(3)]
    for _ in range(2):
        for state in states:
            capture(state, plans=plans)
    walks.clear()
    found = [capture(state, plans=plans) for state in states for _ in range(2)]
    assert walks == []
    for index, state in enumerate(states):
        same(found[2 * index], capture(state))


def test_tensors_elsewhere_need_no_walk(walks: list[str]) -> None:
    plans, state = PlanCache(), make_state(1)
    for number in range(5):
        state["plain"]["w"] = torch.full((3, 3), float(number))
        if number == 3:
            walks.clear()
            for parameter in state["model"].parameters():
                parameter.data = parameter.data.clone()
        same(capture(state, plans=plans), capture(copy.copy(state)))
    assert len(walks) == 2 * 2  # by the fresh captures


@pytest.mark.parametrize("error", [TypeError, RuntimeError, SystemError])
def test_a_torch_whose_own_check_is_another_one(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, walks: list[str]
) -> None:
    def refuse(*tensors: torch.Tensor, **options: object) -> None:
        raise error

    monkeypatch.setattr(torch._C, "_dynamo", SimpleNamespace(guards=SimpleNamespace(TensorGuards=refuse)))
    plans, state = PlanCache(), make_state(1)
    for _ in range(3):
        capture(state, plans=plans)
    walks.clear()
    capture(state, plans=plans)
    assert walks == []
    state["model"].get_parameter("0.weight").data = torch.ones(3, 3).half()
    check(state, plans, 2)


@pytest.mark.parametrize("first", [True, False])
def test_gradients_asked_for_without_gradients_are_seen(first: bool) -> None:
    plans, weight = PlanCache(), torch.nn.Linear(2, 2)
    with torch.no_grad():
        for required in (first, first, first, not first, first):
            weight.weight.requires_grad_(required)
            state = {"model": weight, "w": weight.weight, "p": torch.ones(1)}
            same(capture(state, plans=plans), capture(state))


def test_nothing_is_kept_alive_by_a_memory() -> None:
    plans, state = PlanCache(), make_state(1)
    for _ in range(4):
        snapshot = capture(state, plans=plans)
        snapshot.hold()
        snapshot.let_go()
    assert plans.memories
    tensors = [*state["model"].parameters(), *state["model"].buffers(), state["plain"]["w"]]
    tensors += [tensor for entry in state["optimizer"].state.values() for tensor in entry.values()]
    there: list[weakref.ref[Any]] = [weakref.ref(each) for each in (*tensors, *modules_of(state), state["optimizer"])]
    del state, tensors
    gc.collect()
    assert not [each() for each in there if each() is not None]


def test_memory_that_a_tensor_gives_up_is_held_until_it_is_copied() -> None:
    plans, state = PlanCache(), make_state(1)
    for _ in range(3):
        snapshot = capture(state, plans=plans)
    snapshot.hold()
    right = files_of(snapshot)
    for parameter in state["model"].parameters():
        parameter.data = torch.zeros_like(parameter)
    fresh = [torch.full((4, 4), 9.0) for _ in range(200)]  # would take the memory that became free
    assert files_of(snapshot) == right and len(fresh) == 200
    snapshot.let_go()
    assert snapshot.storages == []


def test_objects_that_are_new_each_time_are_not_remembered_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Counted(Watch):
        def __init__(self, tensors: list[torch.Tensor]) -> None:
            made.append(self)
            super().__init__(tensors)

    monkeypatch.setattr(recall, "Watch", Counted)
    plans = PlanCache()
    for _ in range(2 * UNUSED_MAX):
        state = make_state(1)
        state["optimizer"].state.clear()
        state["optimizer"].param_groups[0]["params"].reverse()
        state["model"].get_parameter("0.weight").data = torch.ones(3, 3)
        keep = [state, *plans.memories]
        capture(state, plans=plans)
    assert len(made) == UNUSED_MAX and plans.memories == () and keep


ODD_ONES: dict[str, Callable[[], Any]] = {
    "without data yet": lambda: torch.nn.LazyLinear(4).weight,
    "sparse": lambda: torch.nn.Parameter(torch.eye(3).to_sparse()),
    "meta": lambda: torch.nn.Parameter(torch.empty(3, 3, device="meta")),
}


@pytest.mark.parametrize("what", ODD_ONES)
def test_what_cannot_say_where_it_is_is_told_as_without_a_memory(what: str) -> None:
    plans, state = PlanCache(), make_state(1)
    for _ in range(3):
        capture(state, plans=plans)
    state["model"].get_submodule("0")._parameters["weight"] = ODD_ONES[what]()
    with pytest.raises((StateError, ValueError)) as fresh:
        capture(state)
    with pytest.raises(fresh.type) as recalled:
        capture(state, plans=plans)
    assert str(recalled.value) == str(fresh.value)


def test_tensors_that_come_to_a_gpu_are_seen() -> None:
    plans, state = PlanCache(), make_state(1)
    with standing() as gpus:
        for _ in range(3):
            capture(state, plans=plans)
        gpus.put(state["model"])
        for _ in range(4):
            found = capture(state, plans=plans)
            same(found, capture(state))
            assert set(found.plan.structure.gpus.tolist()) == {0, -1}
