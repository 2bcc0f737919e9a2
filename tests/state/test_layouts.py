"""Where the metadata of tensors and the versions of dicts lie: proven here, and what is told of tensors at a glance."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.native._objects import study_tensors, tensors_again
from stepwell.state import PlanCache, capture, layouts
from stepwell.state.layouts import PLAIN, Layout, dict_version_at, tensor_layout
from tests.state.changes import make_state, stepped
from tests.state.memory import files_of

Tensor = torch.Tensor
LAYOUT: Any = tensor_layout()


def study(*tensors: Any) -> bytearray | None:
    return study_tensors([*tensors], PLAIN, LAYOUT)


def again(record: bytearray | None, *tensors: Any) -> tuple[bytes, list[Any]] | None:
    assert record is not None
    return tensors_again([*tensors], record, LAYOUT)


def test_both_are_known_here() -> None:
    assert LAYOUT is not None
    assert dict_version_at() is not None or sys.version_info >= (3, 13)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_it_is_found_out_in_any_mode(mode: Any) -> None:
    with mode():
        assert tensor_layout.__wrapped__() == LAYOUT


ODD: dict[str, Callable[[], Any]] = {
    "subclass": lambda: torch.ones(2).as_subclass(type("Mine", (Tensor,), {})),
    "number": lambda: 3,
    "sparse": lambda: torch.eye(3).to_sparse(),
    "inference": lambda: torch.inference_mode()(torch.ones)(2),
}


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_tensors_of_other_kinds_are_not_recorded(make: Callable[[], Any]) -> None:
    good = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    assert study(*good) is not None
    assert study(*good, make()) is None and study(make()) is None


def test_other_tensors_are_not_found() -> None:
    one, other = torch.ones(2), torch.ones(2)
    record = study(one, other)
    assert again(record, one, other) is not None
    for tensors in ((other, one), (one,), (one, other, other), (one, one), (one, 3)):
        assert again(record, *tensors) is None
    assert again(study()) == (b"", [])


def test_references_are_counted() -> None:
    tensor, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    things = [tensor, parameter, tensor.untyped_storage(), parameter.untyped_storage(), None, True, False, Tensor]
    before = list(map(sys.getrefcount, things))
    for _ in range(300):
        record = study(tensor, parameter)
        assert again(record, tensor, parameter) is not None and again(record, parameter, tensor) is None
        assert study(tensor, 3) is None
    after = list(map(sys.getrefcount, things))
    assert [now - old for now, old in zip(after, before, strict=True) if abs(now - old) > 20] == []


# -- whatever happens to tensors ---------------------------------------------------------------------

DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64)
Operation = Callable[[Any, list[Any]], object]


def _facts(tensor: Tensor) -> list[Any]:
    asked = (
        tensor.data_ptr(),
        tensor.shape,
        tensor.stride(),
        tensor.dtype,
        tensor.requires_grad,
        tensor.storage_offset(),
    )
    return [*asked, tensor.is_conj(), tensor.is_neg(), tensor.untyped_storage().data_ptr()]


def _set_data(make: Callable[[Any], Tensor]) -> Operation:
    return lambda tensor, kept: setattr(tensor, "data", make(tensor.detach()))


def _backward(tensor: Tensor, kept: list[Any]) -> None:
    with torch.enable_grad():
        torch.autograd.backward((tensor * 1).abs().sum())


#: each is given a tensor and where to keep references; after these it must look as before
KEEPING: list[Operation] = [
    lambda tensor, kept: tensor.mul_(1),
    lambda tensor, kept: tensor[..., :1].zero_(),
    lambda tensor, kept: tensor.detach().fill_(0),
    lambda tensor, kept: kept.extend([tensor, tensor.detach(), tensor.view(-1), tensor.untyped_storage()]),
    lambda tensor, kept: kept.clear(),
    _backward,
    lambda tensor, kept: setattr(tensor, "grad" if tensor.requires_grad else "extra", None),
    lambda tensor, kept: setattr(tensor, "grad" if tensor.requires_grad else "extra", torch.ones_like(tensor)),
]
OPERATIONS: list[Operation] = [
    *KEEPING,
    _set_data(torch.clone),
    _set_data(lambda tensor: tensor.view(-1)),
    _set_data(lambda tensor: tensor.unsqueeze(0) if tensor.ndim < 5 else tensor.flatten(1)),
    _set_data(lambda tensor: tensor[1:]),
    _set_data(lambda tensor: tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)),
    _set_data(lambda tensor: tensor.view(torch.int16)),
    _set_data(Tensor.conj),
    lambda tensor, kept: tensor.set_(torch.ones_like(tensor)),
    lambda tensor, kept: tensor.set_(kept[0]),
    lambda tensor, kept: tensor.resize_(3, 2),
    lambda tensor, kept: tensor.transpose_(-1, -2),
    lambda tensor, kept: tensor.squeeze_(),
    lambda tensor, kept: tensor.as_strided_((1, 2), (2, 1), 0),
    lambda tensor, kept: tensor.requires_grad_(not tensor.requires_grad),
    lambda tensor, kept: tensor.detach_(),
    lambda tensor, kept: tensor.detach().untyped_storage().resize_(1 << 12),
]
WAYS: list[Callable[[Tensor], Tensor]] = [
    lambda tensor: tensor,
    lambda tensor: torch.nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
    lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    lambda tensor: tensor.transpose(0, -1) if tensor.ndim else tensor,
    lambda tensor: tensor[1:] if tensor.ndim else tensor[None],
]


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=300, suppress_health_check=list(HealthCheck))
def test_whatever_happens_what_is_told_is_right(data: st.DataObject) -> None:
    tensors: list[Any] = []
    kept: list[Any] = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape = data.draw(st.lists(st.integers(0, 3), max_size=5))
        tensor = torch.zeros(shape, dtype=data.draw(st.sampled_from(DTYPES)))
        for way in data.draw(st.lists(st.sampled_from(WAYS), max_size=2)):
            tensor = way(tensor)
        tensors.append(tensor)
    record, before, must = study(*tensors), list(map(_facts, tensors)), True
    for _ in range(data.draw(st.integers(1, 12))):
        operation, tensor = data.draw(st.sampled_from(OPERATIONS)), data.draw(st.sampled_from(tensors))
        must &= operation in KEEPING
        try:
            with torch.no_grad():
                operation(tensor, kept)
        except (RuntimeError, IndexError):  # not with this one
            pass
        found = again(record, *tensors)
        assert found is not None or not must
        if found is None:
            record, before, must = study(*tensors), list(map(_facts, tensors)), True
            found = again(record, *tensors)
        assert found is not None and before == list(map(_facts, tensors))
        assert np.frombuffer(found[0], np.int64).tolist() == [tensor._version for tensor in tensors]
        assert [each.data_ptr() for each in found[1]] == [each.untyped_storage().data_ptr() for each in tensors]


MORE: dict[str, Operation] = {
    "shape": _set_data(lambda tensor: tensor.view(3, 2, 1, 1, 1, 1)),
    "strides": lambda tensor, kept: tensor.transpose_(0, 1),
}


@pytest.mark.parametrize("what", MORE)
def test_tensors_of_more_dimensions_are_seen_to_change_or_are_not_recorded(what: str) -> None:
    tensor = torch.zeros(2, 3, 1, 1, 1, 1) if what != "strides" else torch.zeros(9, 9, 3, 3, 3, 3)[:3, :3]
    record, before = study(tensor), _facts(tensor)
    with torch.no_grad():
        MORE[what](tensor, [])
    assert _facts(tensor) != before
    assert record is None or again(record, tensor) is None


# -- what is not proven -------------------------------------------------------------------------------


TENSORS, DICTS = "stepwell.state.watch.tensor_layout", "stepwell.state.prints.dict_version_at"


@pytest.mark.parametrize("unknown", [[], [TENSORS], [DICTS], [TENSORS, DICTS]], ids=str)
def test_captures_are_right_also_where_nothing_is_proven(unknown: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in unknown:
        monkeypatch.setattr(name, lambda: None)
    plans, state = PlanCache(), make_state(1)
    for number in range(6):
        stepped(state["optimizer"])
        if number == 4:
            state["model"].get_parameter("0.weight").data = torch.full((3, 3), 2.0)
        found, right = capture(state, plans=plans), capture(state)
        assert found.encoded_skeleton() == right.encoded_skeleton() and files_of(found) == files_of(right)
        assert (found.versions is not None) == (number == 3 and TENSORS not in unknown)
    assert plans.memories


Wrong = Callable[[Layout], dict[str, int]]
WRONG: dict[str, Wrong] = {
    "no sizes": lambda good: {"size": 48},
    "no tensor type": lambda good: {"size": good.size - 24},
    "too much": lambda good: {"size": good.size + 8},
    "another counter": lambda good: {"counter_at": good.counter_at - 4},
    "counter as storage": lambda good: {"storage_at": good.version_at},
    "no storage": lambda good: {"storage_at": good.gradients_at},
    "its references": lambda good: {"data_at": 8},
    "what never changes": lambda good: {"data_at": good.data_at + 8},
    "no gradients": lambda good: {"gradients_at": good.gradients_at + 8},
    "no object": lambda good: {"torch_at": good.torch_at + 8},
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_a_wrong_layout_is_not_believed(wrong: Wrong, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_found", lambda: LAYOUT)
    assert tensor_layout.__wrapped__() == LAYOUT
    monkeypatch.setattr(layouts, "_found", lambda: LAYOUT._replace(**wrong(LAYOUT)))
    assert tensor_layout.__wrapped__() is None


@pytest.mark.parametrize("word", [0, 2, 4, 5])
def test_a_wrong_version_of_dicts_is_not_believed(word: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_only", lambda found: word)
    assert dict_version_at.__wrapped__() is None


def test_what_cannot_be_found_out_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "_usable_bytes", lambda address: 0)
    assert tensor_layout.__wrapped__() is None
