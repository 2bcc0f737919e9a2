"""CuPy arrays, for which a class stands that speaks DLPack as they do."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from stepwell.errors import KeyMismatch
from stepwell.state import capture
from tests.state.memory import Saved


class ndarray:
    """An array that can do no more than is needed."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self.array = array
        self.shape, self.strides = array.shape, array.strides

    def copy(self) -> ndarray:
        return ndarray(self.array.copy())

    def __dlpack__(self, **options: Any) -> Any:
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.array.__dlpack_device__()


ndarray.__module__ = "cupy"


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(ndarray=ndarray, asarray=ndarray)
    monkeypatch.setitem(sys.modules, "cupy", made)
    return made


ARRAYS: list[np.ndarray[Any, Any]] = [
    np.arange(6, dtype=np.float32).reshape(2, 3),
    np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    np.arange(10, dtype=np.float64)[::2],
    np.array(True),
    np.ones((0, 2), np.complex64),
]


def test_an_array_is_stored_from_its_own_memory(cupy: SimpleNamespace) -> None:
    array = np.ones((64, 64), np.float32)
    snapshot = capture({"part": {"a": ndarray(array)}})
    assert snapshot.addresses.tolist() == [array.ctypes.data]
    assert Saved({"model": {"a": ndarray(array)}}).labels()["a"][1].shape == (64, 64)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}")
def test_an_array_comes_back(array: np.ndarray[Any, Any], cupy: SimpleNamespace) -> None:
    loaded = Saved({"part": {"a": ndarray(array)}}).load()["part"]["a"]
    assert type(loaded) is ndarray and loaded.array.dtype == array.dtype and np.array_equal(loaded.array, array)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda array: f"{array.dtype}")
def test_an_array_is_filled_where_it_is(array: np.ndarray[Any, Any], cupy: SimpleNamespace) -> None:
    live = ndarray(np.zeros_like(array))
    state = {"part": {"a": live}}
    Saved({"part": {"a": ndarray(array)}}).restore(state)
    assert state["part"]["a"] is live and np.array_equal(live.array, array)


OTHERS: list[np.ndarray[Any, Any]] = [
    np.zeros((3, 2), np.float32),
    np.zeros((2, 3)),
    np.zeros((2, 6), np.float32)[:, ::-2],
]


@pytest.mark.parametrize("live", OTHERS, ids=["shape", "dtype", "strides"])
def test_another_kind_of_array_is_replaced(live: np.ndarray[Any, Any], cupy: SimpleNamespace) -> None:
    before = live.copy()
    state = {"part": {"a": ndarray(live)}}
    Saved({"part": {"a": ndarray(ARRAYS[0])}}).restore(state)
    assert np.array_equal(state["part"]["a"].array, ARRAYS[0]) and np.array_equal(live, before)


def test_strides_below_zero_are_copied_away(cupy: SimpleNamespace) -> None:
    array = np.arange(4.0)[::-1]
    assert np.array_equal(Saved({"part": {"a": ndarray(array)}}).load()["part"]["a"].array, array)


def test_without_cupy_it_is_a_numpy_array() -> None:
    assert "cupy" not in sys.modules
    saved = Saved({"part": {"a": ndarray(ARRAYS[0])}})
    with pytest.warns(UserWarning, match="comes back as a NumPy array"):
        loaded = saved.load()["part"]["a"]
    assert type(loaded) is np.ndarray and np.array_equal(loaded, ARRAYS[0])


def test_a_tensor_takes_an_array_and_the_other_way_round(cupy: SimpleNamespace) -> None:
    state: dict[str, Any] = {"part": {"a": torch.zeros(2, 3)}}
    Saved({"part": {"a": ndarray(ARRAYS[0])}}).restore(state)
    assert state["part"]["a"].tolist() == ARRAYS[0].tolist()
    state = {"part": {"a": ndarray(np.zeros((2, 3), np.float32))}}
    Saved({"part": {"a": torch.from_numpy(ARRAYS[0])}}).restore(state)
    assert np.array_equal(state["part"]["a"].array, ARRAYS[0])
    with pytest.raises(KeyMismatch, match="here a CuPy array"):
        Saved({"part": {"a": {"b": torch.ones(1)}}}).restore({"part": {"a": ndarray(ARRAYS[0])}})
