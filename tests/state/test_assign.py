"""Restoring in place: identity, strictness, names, casts."""

from __future__ import annotations

import collections
import dataclasses
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from stepwell.errors import KeyMismatch
from stepwell.state import PerRank, Replicated, assign
from stepwell.state.dtypes import DTYPE
from tests.state.memory import Saved, assert_same


def test_in_place_keeps_identity_pointer_and_flag() -> None:
    saved = Saved(
        {
            "model": {
                "w": torch.nn.Parameter(torch.ones(3)),
                "f": torch.ones(2, requires_grad=True),
                "t": torch.ones(2, 3),
            }
        }
    )
    live: dict[Any, Any] = {
        "model": {
            "w": torch.nn.Parameter(torch.zeros(3), requires_grad=False),
            "f": torch.zeros(2, requires_grad=True),
            "t": torch.zeros(3, 2).t(),
        }
    }
    before = {name: (id(t), t.data_ptr(), t.requires_grad, t.stride()) for name, t in live["model"].items()}
    placement = saved.restore(live)
    after = {name: (id(t), t.data_ptr(), t.requires_grad, t.stride()) for name, t in live["model"].items()}
    assert before == after
    assert all(bool((tensor == 1).all()) for tensor in live["model"].values())
    direct = {fill.tensor.data_ptr() for fill in placement.fills}
    assert live["model"]["w"].data_ptr() in direct and live["model"]["t"].data_ptr() not in direct


def test_nothing_changes_before_finish_except_by_fills() -> None:
    saved = Saved({"model": {"w": torch.ones(3), "n": 5}, "list": [1, 2]})
    live: dict[str, Any] = {"model": {"w": torch.zeros(3), "n": 0}, "list": [9]}
    placement = assign(saved.skeleton, live)
    assert_same(live, {"model": {"w": torch.zeros(3), "n": 0}, "list": [9]})
    placement.finish()
    with pytest.raises(RuntimeError, match="finished"):
        placement.finish()


@pytest.mark.parametrize("part", ["model", "optimizer"])
def test_strict_reports_all_differences_and_touches_nothing(part: str) -> None:
    saved = Saved({part: {"both": torch.ones(2), "extra": torch.ones(2), "shape": torch.ones(2), "more": 3}})
    live: dict[Any, Any] = {part: {"both": torch.zeros(2), "lost": torch.zeros(1), "shape": torch.zeros(3), "also": 4}}
    with pytest.raises(KeyMismatch) as caught:
        assign(saved.skeleton, live)
    assert sorted(caught.value.missing) == [f"{part}.also", f"{part}.lost"]
    assert sorted(caught.value.unexpected) == [f"{part}.extra", f"{part}.more"]
    assert caught.value.mismatched == [f"{part}.shape"]
    assert "[2]" in str(caught.value) and "[3]" in str(caught.value)
    assert torch.equal(live[part]["both"], torch.zeros(2))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        placement = saved.restore(live, strict=False)
    assert sorted(placement.missing) == [f"{part}.also", f"{part}.lost"]
    assert sorted(placement.unexpected) == [f"{part}.extra", f"{part}.more"]
    assert placement.mismatched == [f"{part}.shape"]
    assert torch.equal(live[part]["both"], torch.ones(2)) and torch.equal(live[part]["shape"], torch.zeros(3))


def test_strict_can_be_chosen_per_part() -> None:
    saved = Saved({"model": {"a": torch.ones(1), "b": torch.ones(1)}, "ema": {"a": torch.ones(1)}})
    live: dict[Any, Any] = {"model": {"a": torch.zeros(1)}, "ema": {"a": torch.zeros(1)}}
    assert saved.restore(live, strict={"model": False}).unexpected == ["model.b"]
    with pytest.raises(KeyMismatch):
        assign(saved.skeleton, live, strict={"ema": False})


def test_fewer_parts_are_fine_and_absent_parts_are_missing() -> None:
    saved = Saved({"model": {"a": torch.ones(1)}, "other": {"b": torch.ones(1)}})
    live: dict[Any, Any] = {"model": {"a": torch.zeros(1)}}
    assert saved.restore(live).unexpected == []
    with pytest.raises(KeyMismatch) as caught:
        assign(saved.skeleton, {**live, "sched": {"x": 1}})
    assert caught.value.missing == ["sched"]
    assert saved.restore({**live, "sched": {"x": 1}}, strict=False).missing == ["sched"]


@pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod."])
@pytest.mark.parametrize("saved_has_it", [True, False])
def test_a_prefix_mismatch_is_loud_and_hints_at_the_rule(prefix: str, saved_has_it: bool) -> None:
    plain = {f"layer{index}.w": torch.full((2,), float(index)) for index in range(20)}
    longer = {prefix + name: tensor for name, tensor in plain.items()}
    source, target = (longer, plain) if saved_has_it else (plain, longer)
    saved = Saved({"model": source})
    live: dict[Any, Any] = {"model": {name: torch.zeros(2) for name in target}}
    for strict in (True, False):
        with pytest.raises(KeyMismatch) as caught:
            assign(saved.skeleton, live, strict=strict)
        assert f"'{prefix}'" in str(caught.value) and "rename" in str(caught.value)
        assert "and 10 more" in str(caught.value) and len(caught.value.missing) == 20
    saved.restore(live, rename={prefix: ""} if saved_has_it else {"": prefix})
    assert_same(list(live["model"].values()), list(plain.values()))


def test_few_matches_warn() -> None:
    names = [f"l{index}" for index in range(10)]
    saved = Saved({"model": {"l0": torch.ones(1), **{f"module.{name}": torch.ones(1) for name in names}}})
    with pytest.warns(UserWarning, match="only 1 of 10"):
        saved.restore({"model": {name: torch.zeros(1) for name in names}}, strict=False)


RENAMES: list[Any] = [
    {"old.": "new."},
    {"old.*.w": "new.*.w", "old.*": "new.*"},
    lambda name: name.replace("old", "new"),
    {"nothing": "x", "old.?.w": "new.0.w", "old": "new"},
]


@pytest.mark.parametrize("rename", RENAMES)
def test_rename_by_prefix_pattern_or_function_flat_and_nested(rename: Any) -> None:
    saved = Saved({"model": {"old": {"0": {"w": torch.ones(2), "n": 1}}, "same": torch.ones(1)}})
    flat: dict[str, Any] = {"model": {"new.0.w": torch.zeros(2), "new.0.n": 0, "same": torch.zeros(1)}}
    nested: dict[str, Any] = {"model": {"new": {"0": {"w": torch.zeros(2), "n": 0}}, "same": torch.zeros(1)}}
    saved.restore(flat, rename=rename)
    saved.restore(nested, rename=rename)
    assert flat["model"]["new.0.n"] == 1 and torch.equal(flat["model"]["new.0.w"], torch.ones(2))
    assert_same(nested["model"], {"new": {"0": {"w": torch.ones(2), "n": 1}}, "same": torch.ones(1)})
    renamed = saved.load(part="model", rename=rename)
    assert set(renamed) == {"new.0.w", "new.0.n", "same"}


def test_keys_choose_what_is_restored() -> None:
    saved = Saved({"model": {"a": {"w": torch.ones(1), "b": torch.ones(1)}, "c": torch.ones(1)}})
    live: dict[Any, Any] = {"model": {"a": {"w": torch.zeros(1), "x": torch.zeros(1)}, "c": torch.zeros(1)}}
    placement = saved.restore(live, keys="a.w")
    assert placement.missing == placement.unexpected == []
    assert live["model"]["a"]["w"] == 1 and live["model"]["c"] == 0


def test_casts_are_reported_and_right() -> None:
    values = torch.randn(50)
    saved = Saved({"model": {"w": values, "same": values, "i": torch.arange(3)}})
    live: dict[Any, Any] = {
        "model": {
            "w": torch.zeros(50, dtype=torch.bfloat16),
            "same": torch.zeros(50),
            "i": torch.zeros(3, dtype=torch.int32),
        }
    }
    assert saved.restore(live).cast == ["model.w", "model.i"]
    assert torch.equal(live["model"]["w"], values.bfloat16())
    assert live["model"]["i"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "pair",
    [
        (torch.zeros(2, dtype=torch.complex64), torch.zeros(2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.uint8).view(DTYPE["int4"])),
        (torch.zeros(2), torch.zeros(1).expand(2)),
        (torch.zeros(2), torch.eye(2).to_sparse()),
        (torch.zeros(2), {"x": torch.zeros(2)}),
        ([torch.zeros(2)], torch.zeros(2)),
        ([torch.zeros(2)] * 2, [torch.zeros(2)] * 3),
        (np.zeros(2), torch.zeros(2)),
    ],
    ids=range(8),
)
def test_what_cannot_be_converted_is_mismatched(pair: tuple[Any, Any]) -> None:
    saved = Saved({"model": {"w": pair[0], "z": torch.zeros(1)}})
    with pytest.raises(KeyMismatch) as caught:
        assign(saved.skeleton, {"model": {"w": pair[1], "z": torch.zeros(1)}})
    assert caught.value.mismatched == ["model.w"]


def test_placeholders_take_whatever_was_saved() -> None:
    state = {"a": {"x": torch.ones(2), "y": [1, (2,)]}, "b": [torch.ones(1), 5], "c": (1, 2), "d": torch.ones(1)}
    saved = Saved({"p": state, "q": {"n": 1}})
    inner: dict[str, Any] = {}
    items: list[Any] = []
    live: dict[str, Any] = {"p": {"a": inner, "b": items, "c": None, "d": None}, "q": None}
    saved.restore(live)
    assert_same(live["p"], state)
    assert live["q"] == {"n": 1}
    assert live["p"]["a"] is inner and live["p"]["b"] is items


def test_plain_values_are_replaced_in_the_same_containers() -> None:
    saved = Saved({"p": {"w": torch.ones(1), "cfg": {"lr": 0.5, "seen": [1, 2, 3], "new": None}, "t": (1, 2)}})
    config: dict[str, Any] = {"seen": [9], "old": 1, "lr": 0}
    seen = config["seen"]
    live: dict[Any, Any] = {"p": {"w": torch.zeros(1), "cfg": config, "t": (5,)}}
    saved.restore(live)
    assert live["p"]["cfg"] is config and config["seen"] is seen
    assert config == {"lr": 0.5, "seen": [1, 2, 3], "new": None} and list(config) == ["lr", "seen", "new"]
    assert live["p"]["t"] == (1, 2)


def test_arrays_are_filled_in_place_where_they_fit() -> None:
    saved = Saved({"p": {"a": np.arange(4.0), "b": np.arange(6).reshape(2, 3).T.copy(order="F"), "c": np.arange(3)}})
    a, b, c = np.zeros(4), np.zeros((3, 2), dtype=int, order="F"), np.zeros(5)
    live: dict[Any, Any] = {"p": {"a": a, "b": b, "c": c}}
    placement = saved.restore(live)
    assert live["p"]["a"] is a and a.tolist() == [0, 1, 2, 3]
    assert a.ctypes.data in {fill.tensor.data_ptr() for fill in placement.fills}
    assert live["p"]["b"] is b and b.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert live["p"]["c"].tolist() == [0, 1, 2]
    frozen = np.zeros(4)
    frozen.flags.writeable = False
    live = {"p": {"a": frozen, "b": b, "c": c}}
    saved.restore(live)
    assert live["p"]["a"] is not frozen and frozen.sum() == 0


def test_typed_keys_find_their_values() -> None:
    milestones = {25: torch.ones(1), "25": torch.zeros(1), None: 1, (1, 2): 2, True: 3}
    saved = Saved({"p": collections.OrderedDict(milestones)})
    live: dict[Any, Any] = {"p": {25: torch.zeros(1), "25": torch.ones(1), None: 0, (1, 2): 0, True: 0}}
    saved.restore(live)
    assert_same(live["p"], milestones)


@dataclasses.dataclass
class Holder:
    weight: torch.Tensor
    note: str


def test_dataclasses_and_sequences_are_filled_in_place() -> None:
    saved = Saved({"p": {"h": Holder(torch.ones(2), "saved"), "l": [torch.ones(1), (torch.ones(1), 7)]}})
    weight, first, second = torch.zeros(2), torch.zeros(1), torch.zeros(1)
    holder = Holder(weight, "live")
    live: dict[Any, Any] = {"p": {"h": holder, "l": [first, (second, 0)]}}
    saved.restore(live)
    assert live["p"]["h"] is holder and holder.weight is weight and holder.note == "saved"
    assert live["p"]["l"][0] is first and live["p"]["l"][1] == (second, 7)
    assert weight.sum() == 2 and first == 1 and second == 1


def test_two_saved_tensors_for_one_live_one_do_not_race() -> None:
    shared = torch.zeros(2)
    saved = Saved({"model": {"a": torch.ones(2), "b": torch.full((2,), 2.0)}})
    placement = saved.restore({"model": {"a": shared, "b": shared}})
    assert shared.tolist() == [2, 2]
    assert len({fill.tensor.data_ptr() for fill in placement.fills}) == 2


def test_meta_targets_are_replaced() -> None:
    saved = Saved({"model": {"w": torch.ones(3)}})
    live: dict[Any, Any] = {"model": {"w": torch.nn.Parameter(torch.empty(3, device="meta", dtype=torch.float64))}}
    placement = saved.restore(live)
    assert placement.cast == ["model.w"]
    assert_same(live["model"]["w"], torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))


def test_wrappers_are_transparent() -> None:
    saved = Saved({"a": Replicated({"w": torch.ones(1)}), "b": PerRank([1]), "c": {"x": 1}})
    weight = torch.zeros(1)
    live: dict[str, Any] = {"a": {"w": weight}, "b": PerRank([0]), "c": Replicated({"x": 0})}
    saved.restore(live)
    assert weight == 1 and live["b"].value == [1] and live["c"].value == {"x": 1}
    assert saved.load()["b"] == PerRank([1])


def test_a_dict_may_be_saved_and_a_top_level_tensor_restored() -> None:
    saved = Saved({"w": torch.ones(2), 0: 5, None: [1]})
    live: dict[Any, Any] = {"w": torch.zeros(2), 0: 1, None: []}
    saved.restore(live)
    assert live["w"].sum() == 2 and live[0] == 5 and live[None] == [1]
