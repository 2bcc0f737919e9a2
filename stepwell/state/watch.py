"""Tensors that were seen before: whether they are what a plan depends on, told at a glance or by asking them."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch

from stepwell.native._objects import picked, study_tensors, tensors_again
from stepwell.state.again import Again
from stepwell.state.layouts import PLAIN, tensor_layout

#: of each tensor, its version and its storage; see `tensors_again`
Glance = tuple[bytes, list[Any]] | tuple[None, None]
NO_GLANCE: Glance = (None, None)


class Watch:
    """Knows of tensors all that a plan depends on: class, dtype, shape, strides, device, requires_grad, and whether
    they are conjugated or negated. Holds none of them."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        first: dict[int, int] = {}
        for at, tensor in enumerate(tensors):
            first.setdefault(id(tensor), at)
        self._places = np.array(list(first.values()), np.int64)
        self._repeats = [(at, first[id(tensor)]) for at, tensor in enumerate(tensors) if first[id(tensor)] != at]
        self._kinds: Any = None
        self._check = self._checker(picked(tensors, self._places))

    def _checker(self, tensors: Sequence[torch.Tensor]) -> Any:
        sizes, strides = [list(tensor.shape) for tensor in tensors], [list(tensor.stride()) for tensor in tensors]
        try:  # what torch.compile uses; it asks all in one call, which takes 60 ns a tensor
            guards: Any = torch._C._dynamo.guards
            with torch.enable_grad():
                return guards.TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        except (AttributeError, TypeError, RuntimeError, SystemError):  # another torch has it otherwise, or not at all
            self._kinds = _kinds(tensors)
            return lambda *now: _kinds(now) == self._kinds

    def fits(self, tensors: list[torch.Tensor]) -> bool:
        """Whether these are the same, one by one, and the same object wherever two were."""
        if len(tensors) != len(self._places) + len(self._repeats):
            return False
        if not torch.is_grad_enabled():  # requires_grad would count for nothing
            with torch.enable_grad():
                return self._are_same(tensors)
        return self._are_same(tensors)

    def _are_same(self, tensors: list[torch.Tensor]) -> bool:
        if not self._repeats:
            return bool(self._check(*tensors))
        return all(tensors[at] is tensors[of] for at, of in self._repeats) and bool(
            self._check(*picked(tensors, self._places))
        )


def _kinds(tensors: Sequence[torch.Tensor]) -> list[Any]:
    asked = attrgetter("dtype", "shape", "requires_grad", "device", "layout")
    methods = (torch.Tensor.stride, torch.Tensor.is_conj, torch.Tensor.is_neg)
    return [len(set(map(id, tensors))), list(map(type, tensors)), list(map(asked, tensors))] + [
        list(map(method, tensors)) for method in methods
    ]


def tensors_at_a_glance() -> Again[list[torch.Tensor], Glance]:
    """What the tensors that one memory knows say at a glance."""
    return Again(_study_tensors, _tensors_again)


def _study_tensors(tensors: list[torch.Tensor]) -> bytearray | None:
    layout = tensor_layout()
    return None if layout is None else study_tensors(tensors, PLAIN, layout)


def _tensors_again(tensors: list[torch.Tensor], record: bytearray) -> Glance | None:
    layout = tensor_layout()
    assert layout is not None, "there is a record"
    return tensors_again(tensors, record, layout)
