"""What objects consist of, asked natively."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from typing import Any

import pytest

from stepwell.native._objects import entries, identities, look


class Thing:
    def __init__(self, **inner: Any) -> None:
        self.inner: Any = inner
        self.held: Any = {}
        self.noted: Any = set()


class Other(Thing):
    pass


def asked(root: object, levels_max: int = 5) -> Any:
    return look(root, levels_max, "inner", ("held",), ("noted",), ("own",))


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
    change(root)
    assert asked(root)[0] != before


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
    assert entries(outer) == ([2, "a", "b", None, 0], ["k", "l"], [1, None])
    for odd in ({"k": 3}, {"k": OrderedDict(a=1)}, {"k": {1: 2}}):
        assert entries(odd) is None
    assert entries([]) is None  # type: ignore[arg-type]


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


def test_what_is_noted_in_another_form_is_left_to_python() -> None:
    """Its size and its items may be code that changes what is looked at."""

    class Odd:
        def __len__(self) -> int:
            raise RuntimeError("nobody asks")

    root = _tree()
    root.inner["b"].noted = Odd()
    assert asked(root) is None
