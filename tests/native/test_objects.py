"""What objects consist of, asked natively."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stepwell.native._objects import entries, identities, look, numbers, picked, put_together, untracked


class Thing:
    def __init__(self, **inner: Any) -> None:
        self.inner: Any = inner
        self.held: Any = {}
        self.noted: Any = set()


class Other(Thing):
    pass


def asked(root: object, levels_max: int = 5, known: list[Any] | None = None) -> Any:
    return look(root, levels_max, "inner", ("held",), ("noted",), ("own",), known)


def _tree() -> Thing:
    root = Thing(a=Thing(), none=None, b=Thing(c=Other()))
    root.held = {"x": 1.5, "y": None}
    root.inner["b"].inner["c"].held = {"z": "value"}
    return root


def test_all_is_listed_level_by_level() -> None:
    trace, kinds, lists = asked(_tree())
    assert lists == [[1.5, None, "value"]]
    assert kinds == {Thing, Other}
    expected = [Thing, 3, "a", "none", None, "b", 2, "x", "y", None, Thing, 0, 0, Thing, 1, "c", 0, Other, 0, 1, "z"]
    assert trace == expected


CHANGES: dict[str, Any] = {
    "key": lambda root: root.inner["b"].held.update(new=1),
    "kind": lambda root: setattr(root.inner["a"], "__class__", Other),
    "value that is None": lambda root: root.held.update(x=None),
    "no value any more": lambda root: root.held.update(y=1),
    "child": lambda root: root.inner.update(none=Thing()),
    "noted": lambda root: root.inner["a"].noted.add("x"),
    "own": lambda root: setattr(root.inner["b"].inner["c"], "own", 1),
    "moved": lambda root: root.inner["a"].held.update(root.inner["b"].inner["c"].held.popitem() for _ in range(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_trace_tells_changes(change: Any) -> None:
    root = _tree()
    before = asked(root)[0]
    assert asked(root)[0] == before
    trace, kinds, lists = asked(root, known=before)
    assert trace is before and not kinds and lists == asked(root)[2]
    change(root)
    assert asked(root)[0] != before and asked(root, known=before) is None


@pytest.mark.parametrize(
    "root",
    [
        3,
        object(),
        Thing(a=3),
        Thing(a=Thing(b=Thing(c=Thing(d=Thing(e=Thing()))))),
    ],
    ids=["number", "no attributes", "number inside", "deep"],
)
def test_other_kinds_are_told(root: object) -> None:
    assert asked(root) is None


@pytest.mark.parametrize("name", ["inner", "held", "noted"])
@pytest.mark.parametrize("value", [None, 3, OrderedDict(a=1), {1: 2}, "absent"], ids=str)
def test_attributes_of_other_kinds_are_told(name: str, value: Any) -> None:
    root = Thing()
    if value == "absent":
        delattr(root, name)
    else:
        setattr(root, name, value)
    if name == "noted" and isinstance(value, dict):
        assert asked(root)[0][-2:] == ["noted", frozenset(value)]
    else:
        assert asked(root) is None


def test_entries_of_dicts_in_a_dict() -> None:
    outer: Any = defaultdict(dict, {"k": {"a": 1, "b": None}, "l": {}})
    assert entries(outer, None) == ([2, "a", "b", None, 0], ["k", "l"], [1, None])
    for odd in ({"k": 3}, {"k": OrderedDict(a=1)}, {"k": {1: 2}}):
        assert entries(odd, None) is None
    assert entries([], None) is None  # type: ignore[arg-type]


def test_identities_are_equal_for_the_same_objects_in_the_same_order() -> None:
    objects: list[Any] = [Thing(), None, 3, Thing()]
    width = tuple.__itemsize__
    found = identities(objects)
    assert [int.from_bytes(found[at : at + width], sys.byteorder) for at in range(0, len(found), width)] == [
        *map(id, objects)
    ]
    assert identities([*objects]) == found != identities(objects[::-1])
    assert identities([]) == b""
    with pytest.raises(TypeError, match="a list"):
        identities((1,))  # type: ignore[arg-type]


def test_entries_are_compared_with_a_known_trace() -> None:
    outer: Any = {"k": {"a": 1, "b": None}, "l": {"c": 2}}
    known: Any = entries(outer, None)
    assert entries(outer, known[0]) == known
    for other in (
        {"k": {"a": 1, "b": None}},
        {**outer, "m": {}},
        {**outer, "l": {"d": 2}},
        {**outer, "l": {"c": None}},
    ):
        assert entries(other, known[0]) is None
    with pytest.raises(TypeError, match="a trace"):
        entries(outer, ())  # type: ignore[arg-type]


def test_numbers_of_attributes_and_methods() -> None:
    values = [3, -5, 2**40, True]
    assert _signed(numbers(values, int.real)) == values
    assert _signed(numbers(tuple(values), int.bit_length)) == [each.bit_length() for each in values]
    assert _signed(numbers([1.0, 2.5], float.__int__)) == [1, 2]
    assert numbers([], int.real) == b""
    assert numbers([2**64 + 7], int.real) == (7).to_bytes(8, sys.byteorder)


def _signed(words: bytes) -> list[int]:
    return list(np.frombuffer(words, np.int64).tolist())


@pytest.mark.parametrize(
    ("objects", "question"),
    [([1, 2.5], int.real), ([1.5], float.real), ({1}, int.real), ([1], int), ([1], 3), ([OrderedDict()], dict.keys)],
    ids=["another class", "no integer", "no list", "no descriptor", "no question", "no number"],
)
def test_numbers_of_what_has_none(objects: Any, question: Any) -> None:
    with pytest.raises(TypeError):
        numbers(objects, question)


class Refusing:
    __slots__ = ("number",)


def test_what_asking_raises_comes_through() -> None:
    with pytest.raises(AttributeError):
        numbers([Refusing()], Refusing.number)  # type: ignore[attr-defined]


def test_pieces_are_put_together() -> None:
    data = np.arange(200, dtype=np.uint8)
    starts, sizes = [150, 3, 60, 0], [7, 0, 30, 1]
    sources = np.array(starts, np.uint64) + np.uint64(data.ctypes.data)
    out = np.zeros(39, np.uint8)
    put_together(out.ctypes.data, sources, np.array(sizes, np.uint64))
    pieces = [data[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert out.tolist() == [*np.concatenate(pieces).tolist(), 0]


@given(items=st.lists(st.text()), data=st.data())
def test_some_of_a_list(items: list[str], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(items) - 1))) if items else []
    assert picked(items, np.array(places, np.intp)) == [items[place] for place in places]


@pytest.mark.parametrize("place", [-1, 3, 2**62])
def test_a_place_outside_a_list(place: int) -> None:
    with pytest.raises(IndexError):
        picked([1, 2, 3], np.array([0, place], np.intp))


def test_what_is_noted_in_another_form_is_left_to_python() -> None:
    """Its size and its items may be code that changes what is looked at."""

    class Odd:
        def __len__(self) -> int:
            raise RuntimeError("nobody asks")

    root = _tree()
    root.inner["b"].noted = Odd()
    assert asked(root) is None


def test_the_garbage_collector_looks_at_an_untracked_object_no_more() -> None:
    class Plain:
        def __init__(self, value: list[str]) -> None:
            self.value = value

    made = Plain(["kept"])
    assert gc.is_tracked(made) and untracked(made) is made and not gc.is_tracked(made)
    assert untracked(made) is made and untracked(5) == 5  # again; what never was
    gone = weakref.ref(made)
    gc.collect()
    assert made.value == ["kept"] and gone() is made
    del made
    assert gone() is None
