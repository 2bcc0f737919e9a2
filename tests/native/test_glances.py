"""Modules and dicts, recorded natively, and found again while nothing of them has changed.

A record that was answered with None is not asked again: see `state/again.py`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.format.collecting import paused
from stepwell.native import _objects
from stepwell.state.layouts import dict_version_at

if dict_version_at() is None:
    pytest.skip("dicts of this interpreter have no version", allow_module_level=True)

VERSION_AT = dict_version_at() or 0
NAMES = ("inner", ("held", "kept"), ("noted", "hooks"), ("own",))


class Thing:
    def __init__(self, **inner: Any) -> None:
        self.inner: Any = inner
        self.held: Any = {}
        self.kept: Any = {}
        self.noted: Any = set()
        self.hooks: Any = OrderedDict()


class Other(Thing):
    pass


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    with paused():
        yield


def study(root: object) -> bytearray | None:
    return _objects.study_modules(root, 5, *NAMES, VERSION_AT)


def looked(root: object) -> Any:
    return _objects.look(root, 5, *NAMES, None)


def again(root: object, record: bytearray | None) -> tuple[list[Any], ...] | None:
    assert record is not None
    return _objects.modules_again(root, record, *NAMES, VERSION_AT)


def identical(found: Any, right: Any) -> bool:
    return list(map(_objects.identities, found)) == list(map(_objects.identities, right))


def _tree() -> Any:
    root: Any = Thing(a=Thing(), none=None, b=Thing(c=Other()))
    root.held = {"x": 1.5, "y": None, "w": [2.5]}
    root.inner["b"].inner["c"].held, root.inner["b"].kept = {"z": ["value"]}, {"x": "kept", "n": None}
    root.inner["a"].noted, root.inner["a"].hooks[3] = {"an", "bn"}, "hook"
    return root


def test_what_is_found_is_what_a_close_look_lists() -> None:
    root = _tree()
    record = study(root)
    for _ in range(3):
        found = again(root, record)
        assert found == ([1.5, None, [2.5], ["value"]], ["kept", None])
        assert identical(found, looked(root)[2])
        for other in (_tree(), root.inner["b"], 3):
            assert again(other, record) is None


CHANGES: dict[str, Callable[[Any], object]] = {
    "new key": lambda root: root.inner["b"].held.update(new=1),
    "order": lambda root: root.held.update(x=root.held.pop("x")),
    "no keys": lambda root: root.inner["b"].kept.clear(),
    "kind": lambda root: setattr(root.inner["a"], "__class__", Other),
    "child": lambda root: root.inner.update(a=Thing()),
    "no child": lambda root: root.inner.clear(),
    "all": lambda root: root.__dict__.update(_tree().__dict__),
    "value": lambda root: root.held.update(x=2.5),
    "equal value": lambda root: root.inner["b"].inner["c"].held.update(z=["value"]),
    "noted more": lambda root: root.inner["a"].noted.add("cn"),
    "noted other": lambda root: root.inner["a"].noted.symmetric_difference_update({"an", "cn"}),
    "other hook": lambda root: root.inner["a"].hooks.update({3: "other"}),
    "own": lambda root: setattr(root.inner["b"].inner["c"], "own", 1),
    "dict": lambda root: setattr(root.inner["b"], "__dict__", dict(root.inner["b"].__dict__)),
    "inner": lambda root: setattr(root, "inner", dict(root.inner)),
    "held": lambda root: setattr(root.inner["b"].inner["c"], "held", {"z": root.inner["b"].inner["c"].held["z"]}),
    "noted": lambda root: setattr(root.inner["a"], "noted", set(root.inner["a"].noted)),
    "noted as a dict": lambda root: setattr(root.inner["b"], "noted", {}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_also_after_many_that_do_not_matter(change: Callable[[Any], object]) -> None:
    root = _tree()
    record, later = study(root), study(root)
    for number in range(100):
        root.unrelated = number
        root.inner["b"].inner["c"].__dict__[f"name {number % 7}"] = [number]
        root.inner["a"].__dict__.pop("name", None) if number % 2 else setattr(root.inner["a"], "name", number)
        assert identical(again(root, later), looked(root)[2])
    change(root)
    assert again(root, record) is None  # straight from what it was
    assert again(root, later) is None


def _with(name: str, value: Any) -> Thing:
    made = Thing()
    setattr(made, name, value)
    return Thing(a=made)


ODD: dict[str, Any] = {
    "no attributes": object(),
    "number inside": Thing(a=3),
    "too deep": Thing(a=Thing(b=Thing(c=Thing(d=Thing(e=Thing()))))),
    "ordered held": _with("held", OrderedDict(a=1)),
    "noted in a list": _with("noted", ["a"]),
    "noted number": _with("noted", {1}),
    "own": _with("own", 1),
}


@pytest.mark.parametrize("root", ODD.values(), ids=ODD)
def test_what_cannot_be_recorded(root: object) -> None:
    assert study(root) is None


def test_objects_that_are_gone_are_not_touched() -> None:
    """Others may have taken their place in memory."""
    for change in [*CHANGES.values()] * 40:
        root = _tree()
        record = study(root)
        change(root)
        others = [_tree() for _ in range(3)]
        assert again(root, record) is None and others


def test_references_are_counted() -> None:
    value, root = object(), Thing(a=Thing(), b=Thing())
    root.held, root.inner["a"].kept = {"x": value}, {"y": value}
    outer: Any = {"k": {"a": value}, "l": {"b": value, "c": None}}
    things = [value, None, root, root.held, root.__dict__, root.noted, root.inner["a"], outer, outer["k"], Thing]
    before = list(map(sys.getrefcount, things))
    for number in range(300):
        record, inner = study(root), _objects.study_entries(outer, VERSION_AT)
        assert inner is not None and again(root, record) == ([value], [value])
        assert _objects.entries_again(outer, inner, VERSION_AT) == [value, value, None]
        root.inner["b"].held[number] = outer["k"][number] = number
        assert again(root, record) is None and _objects.entries_again(outer, inner, VERSION_AT) is None
        root.inner["b"].held.clear()
        del outer["k"][number]
        root.inner["b"].noted = {number}
        assert study(root) is None and _objects.study_entries({"k": outer["k"], "l": 3}, VERSION_AT) is None
        root.inner["b"].noted = set()
    after = list(map(sys.getrefcount, things))
    assert [now - old for now, old in zip(after, before, strict=True) if abs(now - old) > 20] == []


Operation = Callable[[Any, str, Any], object]
#: each is given a thing, a key, and a value
NO_MATTER: list[Operation] = [
    lambda thing, key, value: setattr(thing, key, value),
    lambda thing, key, value: thing.__dict__.pop(key, None),
]
OPERATIONS: list[Operation] = [
    *NO_MATTER,
    lambda thing, key, value: thing.held.update({key: value}),
    lambda thing, key, value: thing.held.pop(key, None),
    lambda thing, key, value: thing.noted.symmetric_difference_update({key}),
    lambda thing, key, value: thing.hooks.update({key: value}),
    lambda thing, key, value: thing.inner.update({key: Thing(a=None, b=Other())}),
    lambda thing, key, value: thing.inner.pop(key, None),
    lambda thing, key, value: setattr(thing, "__class__", Other),
    lambda thing, key, value: setattr(thing, "own", value),
    lambda thing, key, value: thing.__dict__.pop("own", None),
    lambda thing, key, value: setattr(thing, "held", dict(thing.held)),
    lambda thing, key, value: setattr(thing, "__dict__", dict(thing.__dict__)),
]


def _things(root: Any) -> list[Any]:
    return [root, *(thing for child in root.inner.values() if child is not None for thing in _things(child))]


@given(data=st.data())
@settings(deadline=None, derandomize=True, max_examples=300, suppress_health_check=list(HealthCheck))
def test_whatever_happens_what_is_found_is_right(data: st.DataObject) -> None:
    def operate(operations: list[Operation]) -> Operation:
        operation = data.draw(st.sampled_from(operations))
        operation(data.draw(st.sampled_from(_things(root))), data.draw(st.sampled_from("abc")), data.draw(values))
        return operation

    root, values = Thing(), st.sampled_from([None, 1.5, "text"])
    for _ in range(data.draw(st.integers(0, 12))):
        operate(OPERATIONS[:-2])
    record, before = study(root), looked(root)
    assert (record is None) == (before is None or any("own" in vars(thing) for thing in _things(root)))
    matters = False
    for _ in range(data.draw(st.integers(1, 6)) if record is not None else 0):
        matters |= operate(OPERATIONS) not in NO_MATTER
        found, right = again(root, record), looked(root)
        assert found is not None or matters
        if found is None:
            break
        assert right[0] == before[0] and identical(right[2], before[2]) and identical(found, right[2])


# -- dicts in a dict ---------------------------------------------------------------------------------

ENTRIES: dict[str, Callable[[Any], object]] = {
    "outer key": lambda outer: outer.update(new={}),
    "inner replaced": lambda outer: outer.update(k=dict(outer["k"])),
    "empty one replaced": lambda outer: outer.update(m={}),
    "value": lambda outer: outer["l"].update(c=3),
    "equal value": lambda outer: outer["k"].update(a=[1]),
    "inner key": lambda outer: outer["m"].update(new=1),
    "swapped": lambda outer: outer.update(k=outer["l"], l=outer["k"]),
}


@pytest.mark.parametrize("change", ENTRIES.values(), ids=ENTRIES)
def test_a_change_of_entries_is_seen(change: Callable[[Any], object]) -> None:
    outer: Any = defaultdict(dict, {"k": {"a": [1], "b": None}, "l": {"c": 2.5}, "m": {}})
    record = _objects.study_entries(outer, VERSION_AT)
    assert record is not None
    for _ in range(3):
        found = _objects.entries_again(outer, record, VERSION_AT)
        assert found == [[1], None, 2.5] and identical([found], _objects.entries(outer, None)[2:])  # type: ignore[index]
    assert _objects.entries_again(outer.copy(), record, VERSION_AT) is None
    change(outer)
    assert _objects.entries_again(outer, record, VERSION_AT) is None


@pytest.mark.parametrize("outer", [[], 3, {"k": 3}, {"k": OrderedDict(a=1)}, {"k": OrderedDict()}], ids=str)
def test_entries_that_cannot_be_recorded(outer: Any) -> None:
    assert _objects.study_entries(outer, VERSION_AT) is None
