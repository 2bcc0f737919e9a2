"""Dicts and lists of many tensors, and plain settings of optimizers, captured again: recalled, and right whatever has
changed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.state import PlanCache, capture, encode, known
from tests.state.changes import CHANGES, make_state, stepped
from tests.state.test_recapture import check, same

COUNT = 40


@given(data=st.data(), kind=st.integers(0, 3))
@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=list(HealthCheck))
def test_whatever_changes_where_all_dicts_are_remembered(data: st.DataObject, kind: int) -> None:
    def pick(count: int) -> int:
        return data.draw(st.integers(0, max(count - 1, 0)))

    plans, state = PlanCache(), make_state(kind)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "_MANY", 1)
        check(state, plans, 3)
        for _ in range(data.draw(st.integers(1, 6))):
            CHANGES[pick(len(CHANGES))](state, pick)
            check(state, plans, pick(3) + 1)


class Text(str):
    """Equal to a plain one, and saved otherwise."""


def _loose() -> dict[str, Any]:
    return {
        "model": {f"w{n}": torch.full((n % 5 + 1,), float(n)) for n in range(COUNT)},
        "rest": [torch.full((2,), n) for n in range(COUNT)],
    }


@pytest.fixture
def recalled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the dicts and lists that were recalled."""
    found: list[str] = []
    kept = known.KnownMany.recall

    def note(self: Any, recalling: Any, encoder: Any, value: Any, name: str) -> Any:
        node = kept(self, recalling, encoder, value, name)
        found.append(name)
        return node

    monkeypatch.setattr(known.KnownMany, "recall", note)
    return found


def test_what_only_changes_in_value_is_recalled(recalled: list[str]) -> None:
    plans, state = PlanCache(), _loose()
    for _ in range(2):
        capture(state, plans=plans)
    recalled.clear()
    for _ in range(3):
        state["model"]["w3"].add_(1)
        state["model"] = {key: tensor.clone() for key, tensor in state["model"].items()}  # another dict, elsewhere
        found = capture(state, plans=plans)
    assert recalled == ["model", "rest"] * 3
    same(found, capture(state))


def test_a_module_with_many_tensors_is_recalled_as_one(recalled: list[str]) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(COUNT)))
    optimizer = stepped(torch.optim.SGD(model.parameters(), lr=1, momentum=0.5))
    plans, state = PlanCache(), {"model": model, "optimizer": optimizer}
    check(state, plans, 3)
    assert [*plans.memories[0].objects] == ["model", "optimizer"] and recalled == []


def _reordered(entries: dict[str, Any]) -> None:
    entries["w1"] = entries.pop("w1")


def _renamed(entries: dict[str, Any], name: str = "other") -> None:
    kept = {name if key == "w7" else key: value for key, value in entries.items()}
    entries.clear()
    entries.update(kept)


LOOSE: dict[str, Callable[[dict[str, Any]], object]] = {
    "order": lambda state: _reordered(state["model"]),
    "key": lambda state: _renamed(state["model"]),
    "kind of key": lambda state: _renamed(state["model"], Text("w7")),
    "dtype": lambda state: state["model"].update(w2=state["model"]["w2"].half()),
    "no tensor": lambda state: state["model"].update(w2=1.5),
    "nothing": lambda state: state["model"].update(w2=None),
    "parameter": lambda state: state["model"].update(w2=torch.nn.Parameter(torch.ones(3))),
    "tie": lambda state: state["model"].update(w2=state["model"]["w7"]),
    "inner dict": lambda state: state["model"].update(w2={"w": torch.ones(3)}),
    "other key": lambda state: state["model"].update({3: state["model"].pop("w39")}),
    "fewer": lambda state: state["model"].pop("w39"),
    "longer list": lambda state: state["rest"].append(torch.ones(2)),
    "swapped in a list": lambda state: state["rest"].reverse(),
    "value in a list": lambda state: state["rest"].__setitem__(3, 7),
    "a list for a dict": lambda state: state.update(model=[*state["model"].values()]),
    "a dict for a list": lambda state: state.update(rest={str(n): t for n, t in enumerate(state["rest"])}),
    "an object": lambda state: state.update(rest=torch.nn.Linear(2, 2)),
    "one before": lambda state: state.update(model={"new": torch.ones(1), **state["model"]}),
}


@pytest.mark.parametrize("change", LOOSE.values(), ids=LOOSE)
def test_changes_of_a_dict_or_list_are_seen(change: Callable[[dict[str, Any]], object]) -> None:
    plans, state = PlanCache(), _loose()
    check(state, plans, 3)
    assert [*plans.memories[0].objects] == ["model", "rest"]
    change(state)
    check(state, plans, 3)


SETTINGS: list[dict[str, Any]] = [
    {"lr": 0.25},
    {"lr": math.nan},
    {"lr": -math.inf},
    {"lr": -0.0},
    {"lr": 1},
    {"lr": True},
    {"lr": torch.tensor(0.5)},
    {"lr": None},
    {"lr": "\ud800"},
    {"nesterov": 1},
    {"betas": (0.5, 0.25)},
    {"betas": [0.5]},
    {"more": 1},
]


@pytest.mark.parametrize("new", SETTINGS, ids=str)
def test_changes_of_settings_are_seen(new: dict[str, Any]) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = stepped(torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.5))
    optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    plans, state = PlanCache(), {"model": model, "optimizer": optimizer}
    check(state, plans, 3)
    optimizer.param_groups[0].update(new)
    check(state, plans, 3)
    optimizer.param_groups[0]["lr"] = 0.125
    check(state, plans, 3)


def test_settings_that_go_from_one_group_to_the_next_are_seen() -> None:
    model = torch.nn.Linear(2, 2)
    groups = [{"params": [model.weight], "lr": 0.5}, {"params": [model.bias], "lr": 0.25}]
    optimizer = stepped(torch.optim.SGD(groups, momentum=0.5))
    plans, state = PlanCache(), {"model": model, "optimizer": optimizer}
    check(state, plans, 3)
    first, second = optimizer.param_groups
    first["lr"], second["lr"] = second["lr"], first["lr"]
    check(state, plans, 3)
