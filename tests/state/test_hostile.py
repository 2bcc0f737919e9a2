"""Skeletons from anywhere: a clear error, never a crash, never memory that is not theirs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.errors import FormatError, PickleRefused, StepwellError
from stepwell.state import assign, build, tensors
from tests.state.memory import Saved, fill

BASE = torch.arange(20.0)
STATE = {
    "model": {"a": BASE[:12], "b": BASE[8:], "c": torch.zeros(2, 3).t(), "d": [1, (2.5, "x"), {3: None}]},
    "other": {"n": b"b", "s": {1}, "t": torch.float32, "c2": BASE[:12]},
}


def skeleton() -> dict[str, Any]:
    return copy.deepcopy(Saved(STATE).skeleton)


def change(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(raw: Any) -> None:
        for step in path[:-1]:
            raw = raw[step]
        raw[path[-1]] = value

    return apply


BROKEN: dict[str, Callable[[dict[str, Any]], Any]] = {
    "newer": change("version", value=99),
    "no tree": lambda raw: raw.pop("tree"),
    "no tensors": lambda raw: raw.pop("tensors"),
    "tree no dict": change("tree", value=["l", 1]),
    "parts": change("parts", value=["model"]),
    "twice": change("parts", value=["model", "model"]),
    "negative shape": change("tensors", 0, 2, value=[-1]),
    "huge shape": change("tensors", 0, 2, value=[2**62, 4]),
    "float shape": change("tensors", 0, 2, value=[1.5]),
    "dtype": change("tensors", 0, 1, value="float1"),
    "dtype module": change("tensors", 0, 1, value="nn"),
    "label": change("tensors", 0, 0, value=5),
    "same label": change("tensors", 1, 0, value="a"),
    "leaf index": change("tree", 2, "a", value=["t", 99]),
    "leaf negative": change("tree", 2, "a", value=["t", -1]),
    "leaf text": change("tree", 2, "a", value=["t", "0"]),
    "group offset": change("tensors", 1, 3, "in", value=[0, 4000, [1]]),
    "group strides": change("tensors", 1, 3, "in", value=[0, 0, [2**40]]),
    "group overlap": change("tensors", 1, 3, "in", value=[0, 0, [0]]),
    "group negative": change("tensors", 1, 3, "in", value=[0, -32, [1]]),
    "group missing": change("tensors", 1, 3, "in", value=[7, 0, [1]]),
    "group size": change("groups", value=[2**50]),
    "strides": change("tensors", 2, 3, value={"strides": [100, 1]}),
    "notes": change("tensors", 2, 3, value={"what": 1}),
    "tie to later": change("tensors", 0, 3, value={"of": 1}),
    "tie shape": change("tensors", 3, 2, value=[5]),
    "unknown tag": change("tree", 4, "t", value=["zz", 1]),
    "bad value": change("tree", 4, "n", value=["b", "%%%"]),
    "bad count": change("tree", 4, "n", value=["rg", 1, 2, 3, 4, 5]),
    "odd dict": change("tree", 4, "n", value=["d", 1]),
    "empty node": change("tree", 4, "n", value=[]),
    "unhashable": change("tree", 4, "n", value=["st", ["l", 1]]),
    "numpy object": change("tree", 4, "n", value=["ns", "'|O'", "AAAAAAAAAAA="]),
    "numpy code": change("tree", 4, "n", value=["nd", "__import__('os').system('true')"]),
    "factory": change("tree", 4, "n", value=["dd", "eval"]),
    "provider": change("tree", 4, "n", value=["p", "nobody", "x:y", {}]),
    "class": change("tree", 4, "n", value=["dc", 5, "x", 1]),
    "layout": change("tree", 4, "n", value=["ly", "load"]),
    "path": change("tree", 4, "n", value=["pp", "exec", "x"]),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_damage_is_a_format_error(kind: str) -> None:
    raw = skeleton()
    BROKEN[kind](raw)
    with pytest.raises(FormatError):
        fill(build(raw), Saved(STATE).files)


def test_deep_nesting_is_a_format_error() -> None:
    raw = skeleton()
    node: Any = 1
    for _ in range(900):
        node = ["l", node]
    raw["tree"][4]["n"] = node
    with pytest.raises(FormatError):
        build(raw).finish()
    with pytest.raises(FormatError):
        assign(raw, {"other": {"n": [1]}}, strict=False).finish()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=8,
)
TAGS = (
    "t i f c s b B bt l u d od dd ct dq st fs nt dc en sz dt dv ly sl rg el ns na no pp dm tm da td tz zi de fr uu "
    "nd p w pk"
)
NODES = st.tuples(st.sampled_from(TAGS.split()), st.lists(JSON, max_size=4)).map(lambda pair: [pair[0], *pair[1]])
RAW = Saved(STATE)


@given(node=NODES | JSON, row=st.none() | JSON)
@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
def test_any_node_and_row_gives_a_value_or_one_of_our_errors(node: Any, row: Any) -> None:
    raw = copy.deepcopy(RAW.skeleton)
    raw["tree"][4]["n"] = node
    if row is not None:
        raw["tensors"][2] = row
    for attempt in (
        lambda: fill(build(raw, allow_pickle=False), RAW.files),
        lambda: fill(assign(raw, {"other": {"n": [1], "s": None}}, strict=False), RAW.files),
        lambda: tensors(raw),
    ):
        try:
            attempt()
        except (StepwellError, PickleRefused):
            pass
        except (AssertionError, KeyError):
            if row is None:
                raise  # with another row, the helper finds that it does not fit the file
