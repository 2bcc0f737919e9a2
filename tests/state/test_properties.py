"""Random states: captured, written chunk by chunk, read, and equal in every type and bit."""

from __future__ import annotations

import collections
import ctypes
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.state import PlanCache, capture
from tests.state.memory import Saved, assert_same, files_of, raw
from tests.state.test_values import Colour, Config, Point

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(st.characters(), max_size=6)
    | st.text(st.characters(categories=["Cs"]), max_size=2)
    | st.binary(max_size=6)
    | st.sampled_from([Colour.RED, torch.float32, torch.Size([2]), np.float32(0.5), ..., range(3)])
)
ODD_KEYS = st.sampled_from(["25", (1, "a"), 1.5, b"k"])
KEYS = st.none() | st.booleans() | st.integers(-3, 30) | st.text(max_size=4) | ODD_KEYS
FLAT = torch.arange(4096, dtype=torch.float64).view(torch.uint8)


@st.composite
def any_tensor(draw: st.DrawFn) -> torch.Tensor:
    """A view of one small storage, so that ties and overlaps are frequent; any strides; or a tensor of its own."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    if draw(st.booleans()):
        count = torch.Size(shape).numel()
        tensor = (torch.arange(count, dtype=torch.int64) % 2).to(dtype).reshape(shape)
    else:
        storage = (FLAT % 2).view(torch.bool) if dtype is torch.bool else FLAT.view(dtype)
        strides = draw(st.lists(st.integers(0, 6), min_size=len(shape), max_size=len(shape)))
        tensor = storage.as_strided(shape, strides, draw(st.integers(0, 20)))
    if draw(st.booleans()) and tensor.dim() > 1:
        tensor = tensor.transpose(0, 1)
    if dtype.is_complex and draw(st.booleans()):
        tensor = tensor.conj()
    if dtype.is_floating_point and draw(st.booleans()):
        return torch.nn.Parameter(tensor, requires_grad=draw(st.booleans()))
    return tensor


KINDS = st.sampled_from(["f4", ">i2", "?", "c16", "U3", "M8[s]"])
ARRAYS = st.builds(np.zeros, st.lists(st.integers(0, 3), max_size=2), KINDS)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=2).map(collections.OrderedDict)
        | st.builds(Point, inner, inner)
        | st.builds(Config, st.just(0.5), st.just([1]), inner)
        | st.sets(st.integers() | st.text(max_size=2), max_size=3)
    )


TREES = st.recursive(SCALARS | any_tensor() | ARRAYS, containers, max_leaves=12)
STATES = st.dictionaries(KEYS, TREES, max_size=4)
QUICK = settings(deadline=None, derandomize=True, max_examples=120, suppress_health_check=list(HealthCheck))


def blank(value: Any) -> Any:
    """The same structure with other values: what a fresh process has before a restore."""
    if isinstance(value, torch.Tensor):
        made = torch.zeros(value.shape, dtype=value.dtype)
        return torch.nn.Parameter(made, value.requires_grad) if isinstance(value, torch.nn.Parameter) else made
    if isinstance(value, np.ndarray):
        return np.ones_like(value)
    if isinstance(value, dict):
        return type(value)((key, blank(item)) for key, item in value.items())
    if type(value) in (list, tuple):
        return type(value)(map(blank, value))
    if isinstance(value, Config):
        return Config(value.rate, value.layers, blank(value.weight))
    return value if isinstance(value, Point) else type(value)() if isinstance(value, int | str) else value


@given(state=STATES)
@QUICK
def test_what_goes_in_comes_back(state: dict[Any, Any]) -> None:
    saved = Saved(state)
    assert_same(saved.load(), state)


@given(state=STATES)
@QUICK
def test_what_was_there_is_filled_in_place(state: dict[Any, Any]) -> None:
    live = {key: blank(value) for key, value in state.items()}
    before = [(id(t), t.data_ptr()) for t in tensors_in(live)]
    Saved(state).restore(live)
    assert_same(live, state)
    assert [(id(t), t.data_ptr()) for t in tensors_in(live)] == before


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if type(value) in (list, tuple) else ()
    return [tensor for item in items for tensor in tensors_in(item)]


@given(state=STATES, chunk=st.integers(1, 9000))
@QUICK
def test_the_bytes_do_not_depend_on_chunks_or_on_a_cached_plan(state: dict[Any, Any], chunk: int) -> None:
    plans = PlanCache()
    first = capture(state, plans=plans)
    second = capture(state, plans=plans)
    assert first.plan is second.plan
    assert files_of(first) == files_of(second, max(chunk, first.nbytes // 50 + 1))


@given(tensor=any_tensor(), ranges=st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), max_size=4))
@QUICK
def test_any_range_of_a_strided_tensor_is_right(tensor: torch.Tensor, ranges: list[tuple[float, float]]) -> None:
    snapshot = capture({"model": {"pad": torch.ones(3, dtype=torch.float64), "t": tensor}})
    plan = snapshot.shards[0]
    whole = Saved({"model": {"pad": torch.ones(3, dtype=torch.float64), "t": tensor}}).files[plan.file]
    for low, high in ranges:
        start, stop = sorted((int(low * plan.size), int(high * plan.size)))
        pieces = snapshot.source(0).pieces(start, stop)
        for begin, end, address in zip(pieces._offsets[:-1], pieces._offsets[1:], pieces._addresses, strict=True):
            first, last = max(int(begin), start), min(int(end), stop)
            if first < last:
                assert ctypes.string_at(int(address) + first - int(begin), last - first) == whole[first:last]
    assert raw(tensor) in whole
