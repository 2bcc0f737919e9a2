"""What a second capture of the same objects must notice, and what it may reuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from stepwell.errors import StateError
from stepwell.state import PlanCache, capture
from tests.state.memory import Saved, assert_same


def _turn(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.t()


def _negate(tensor: torch.Tensor) -> None:
    tensor.data = torch._neg_view(tensor.data)


def _resize(tensor: torch.Tensor) -> None:
    tensor.data = torch.randn(5, 5)


def _halve(tensor: torch.Tensor) -> None:
    tensor.data = tensor.data.half()


def _require_grad(tensor: torch.Tensor) -> None:
    tensor.requires_grad_()


@pytest.mark.parametrize("change", [_turn, _negate, _resize, _halve, _require_grad], ids=lambda f: f.__name__)
def test_a_tensor_that_changed_its_kind_gets_a_new_plan(change: Callable[[torch.Tensor], None]) -> None:
    """The same objects under the same names: nothing may be concluded from their identity."""
    plans = PlanCache()
    state = {"model": {f"w{index}": torch.randn(4, 4) for index in range(1500)}}
    first = capture(state, plans=plans)
    assert capture(state, plans=plans).plan is first.plan
    change(state["model"]["w700"])
    assert capture(state, plans=plans).plan is not first.plan
    assert_same(Saved(state).load(), state)


def test_the_encoded_skeleton_is_the_skeleton() -> None:
    plans = PlanCache()
    weight = torch.randn(3, 3)
    for step in range(2):  # the second one with a plan that was kept
        state: dict[Any, Any] = {"model": {"a": weight, "tied": weight, "t": torch.ones(2, 3).t()}, 7: [step, "é"]}
        snapshot = capture(state, rank=1, world=2, plans=plans)
        plain = msgspec.json.decode(msgspec.json.encode(snapshot.skeleton))
        assert msgspec.json.decode(snapshot.encoded_skeleton()) == plain
        assert plain["tree"][4][1] == step and plain["rank"] == 1 and len(plain["tensors"]) == 3


def test_names_follow_the_order_of_mixed_dicts() -> None:
    """Dicts of tensors only are read in one go, others one by one; leaves and names must not part."""
    state = {
        "model": {"a": torch.full((1,), 1.0), "b": torch.full((2,), 2.0)},
        "mixed": {"c": torch.full((3,), 3.0), "n": 5, "in": {"d": torch.full((4,), 4.0)}, "e": torch.full((5,), 5.0)},
        "empty": {},
    }
    saved = Saved(state)
    assert [row[0] for row in saved.skeleton["tensors"]] == ["a", "b", "mixed.c", "mixed.in.d", "mixed.e"]
    assert_same(saved.load(), state)


def test_one_unusual_tensor_among_many_is_found() -> None:
    state: dict[str, Any] = {f"w{index}": torch.ones(2) for index in range(1500)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that these will change one day
        quantised = torch.quantize_per_tensor(torch.randn(8), 0.1, 0, torch.qint8)
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    loaded = Saved({"model": state | {"w900": quantised}}).load()["model"]
    assert loaded["w900"].is_quantized and torch.equal(loaded["w900"].int_repr(), quantised.int_repr())
    for odd in (torch.eye(3).to_sparse(), torch.empty(2, device="meta"), nested):
        with pytest.raises(StateError, match="w900"):
            capture({"model": state | {"w900": odd}})
