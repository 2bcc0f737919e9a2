"""Hints: addresses of what a capture looks at. That they may be wrong is tested where they are used."""

from __future__ import annotations

from collections import UserDict

import numpy as np
import torch

from stepwell.state.hints import NO_HINTS, of_entries, of_tensors
from stepwell.state.prints import hints_of_module, look_again, look_at_module


def _first(words: bytes, each: int) -> list[int]:
    return [word & ~63 for word in np.frombuffer(words, np.uint64).tolist()[::each]]


def test_each_tensor_and_dict_has_hints_of_its_own() -> None:
    tensors = [torch.ones(3), torch.nn.Parameter(torch.ones(2, 2)), torch.tensor(1.0)]
    assert _first(*of_tensors(tensors)) == [id(tensor) & ~63 for tensor in tensors]
    outer = {tensor: {"a": tensor, "b": 5, "c": tensor, "d": None} for tensor in tensors}
    assert _first(*of_entries(outer)) == [id(tensor) & ~63 for tensor in tensors]
    assert of_entries({}) == of_tensors([]) == NO_HINTS


def test_tensors_without_memory_have_none() -> None:
    assert of_tensors([torch.ones(3), torch.eye(3).to_sparse()]) == NO_HINTS


def test_a_module_has_them_in_the_order_in_which_it_is_looked_at() -> None:
    shared = torch.nn.Linear(2, 2)
    inner = torch.nn.Sequential(shared, torch.nn.ReLU())
    model = torch.nn.Sequential(inner, shared)
    model.register_module("none", None)
    order = [model, inner, shared, shared, inner[1]]
    assert _first(*hints_of_module(model)) == [id(module) - 32 & ~63 for module in order]
    look = look_at_module(model)
    assert look is not None
    seen, tensors = look
    again = look_again(model, seen, hints_of_module(model))
    assert again is not None and list(map(id, again)) == list(map(id, tensors))
    model.add_module("more", torch.nn.ReLU())
    assert look_again(model, seen, NO_HINTS) is None


def test_modules_of_an_unusual_kind_have_none() -> None:
    inside_itself = torch.nn.Sequential(torch.nn.Linear(2, 2))
    inside_itself.add_module("me", inside_itself)
    bare = torch.nn.Linear(2, 2)
    del bare._buffers
    for model in (inside_itself, bare):
        assert hints_of_module(model) == NO_HINTS


def test_what_is_no_dict_has_none_of_its_own() -> None:
    odd = torch.nn.Linear(2, 2)
    odd.__dict__["_parameters"] = UserDict(odd._parameters)
    words, each = hints_of_module(odd)
    assert len(words) == 8 * each and 0 in np.frombuffer(words, np.uint64)
