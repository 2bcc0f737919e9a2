"""Optimizers: state under the names of the parameters, where their model is in the same state.

torch's own load_state_dict casts floating-point state to the parameter's dtype (fp32 moments of a bf16
parameter come back bf16). It is called, since optimizers do their own work in it, and afterwards each tensor
that it cast or copied is replaced by the one that was meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from stepwell.state.encode import join
from stepwell.state.modules import parameter_names
from stepwell.state.nodes import is_leaf, mapping_of
from stepwell.state.providers import Context, register_provider
from stepwell.state.values import Node
from stepwell.state.whereabouts import gpu_of

if TYPE_CHECKING:
    from stepwell.state.match import Finisher, Matcher


def names_in_state(state: Mapping[Any, Any], cache: dict[str, Any]) -> dict[int, str]:
    """id of each parameter of the state's modules -> name. Of several modules only the first names plainly."""
    names: dict[int, str] | None = cache.get("parameter names")
    if names is None:
        names = cache["parameter names"] = {}
        taken: set[str] = set()
        for key, module in modules_in(state):
            for identity, name in parameter_names(module).items():
                unique = name if name not in taken else f"{key}.{name}"
                taken.add(unique)
                names.setdefault(identity, unique)
    return names


def modules_in(state: Mapping[Any, Any]) -> list[tuple[str, torch.nn.Module]]:
    """The modules that are parts of a state, or lie in dicts of it, with their names."""
    out: list[tuple[str, torch.nn.Module]] = []
    todo: list[tuple[str, Any]] = [(str(key), value) for key, value in state.items()]
    while todo:
        key, value = todo.pop(0)
        value = getattr(value, "value", value) if type(value).__name__ in ("Replicated", "PerRank") else value
        if isinstance(value, torch.nn.Module):
            out.append((key, value))
        elif isinstance(value, dict) and len(value) <= 64:  # a dict of modules, not one of tensors
            todo += [(f"{key}.{name}", item) for name, item in value.items()]
    return out


class OptimizerProvider:
    """The tree is the optimizer's state_dict, with names in place of numbers where all parameters have one."""

    name = "optimizer"

    def to_tree(self, obj: Any, context: Context) -> Any:
        tree = obj.state_dict()
        names = self._names(obj, tree, context)
        if names is None:
            return tree
        return {
            **tree,
            "state": {names.get(key, key): value for key, value in tree["state"].items()},
            "param_groups": [
                {**group, "params": [names[number] for number in group["params"]]} for group in tree["param_groups"]
            ],
        }

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        if existing is not None:
            existing.load_state_dict(tree)
            return existing
        return tree

    def _names(self, obj: Any, tree: Any, context: Context) -> dict[int, str] | None:
        """number in the state_dict -> name; None if some parameter has none, or the tree is unusual."""
        if not _usual(tree):
            return None
        known = names_in_state(context.state, context.cache)
        names: dict[int, str] = {}
        for group, packed in zip(obj.param_groups, tree["param_groups"], strict=True):
            for parameter, number in zip(group["params"], packed["params"], strict=True):
                name = known.get(id(parameter))
                if name is None:
                    return None
                names[number] = name
        return names if len(set(names.values())) == len(names) else None

    def match(self, matcher: Matcher, node: Node, target: Any, name: str) -> Finisher:
        """Matches parameter by parameter, so that state that exists is filled where it is."""
        live = target.state_dict()
        saved = mapping_of(node) or {}
        groups = _groups(saved.get("param_groups"))
        if groups is None or not _usual(live) or "state" not in saved:
            tree = matcher.build(node, name)
            return lambda: _loaded(target, tree())
        context = Context(matcher.full(name), matcher.state, cache=matcher.cache)
        numbers = self._numbers(matcher, groups, live, self._names(target, live, context), name)
        if numbers is None:
            return matcher.keep(node, target, name, _sizes(groups, live))
        if len(groups) != len(live["param_groups"]):
            matcher.keep(node, target, join(name, "param_groups"), _sizes(groups, live))
        homes = _homes(target, live)
        state = mapping_of(saved["state"]) or {}
        entries, apart = self._entries(matcher, state, live["state"], groups, numbers, homes, name)
        settings = [
            {
                key: self._value(matcher, child, here.get(key), join(name, key))
                for key, child in group.items()
                if key != "params"
            }
            for (group, _), here in zip(groups, target.param_groups, strict=False)
        ]
        apart_settings = {
            key: matcher.build(child, join(name, key))
            for key, child in saved.items()
            if key not in ("state", "param_groups")
        }

        def finish() -> Any:
            state = {number: value for number, value in live["state"].items() if number not in numbers.values()}
            state |= {key: step() for key, step in apart.items()}
            state |= {number: {key: step() for key, step in steps.items()} for number, steps in entries.items()}
            packed = [dict(group) for group in live["param_groups"]]
            for group, steps in zip(packed, settings, strict=False):
                group.update({key: step() for key, step in steps.items()})
            tree = {key: step() for key, step in apart_settings.items()}
            return _loaded(target, {**live, **tree, "state": state, "param_groups": packed})

        return finish

    def _numbers(
        self, matcher: Matcher, groups: Groups, live: Any, names: dict[int, str] | None, name: str
    ) -> dict[Any, int] | None:
        """key of a parameter in the saved tree -> its number here; None if nothing tells."""
        here = [list(group["params"]) for group in live["param_groups"]]
        there = [keys for _, keys in groups]
        if names is not None and all(isinstance(key, str) for keys in there for key in keys):
            by_name = {text: number for number, text in names.items()}
            out: dict[Any, int] = {}
            for key in (key for keys in there for key in keys):
                new = matcher.rename(key) if matcher.rename is not None else key
                if new in by_name:
                    out[key] = by_name[new]
                elif new is not None and matcher.keys(matcher.part, new):
                    matcher.report.unexpected.append(matcher.full(join(name, f"state.{new}")))
            found = set(out.values())
            matcher.report.missing += [
                matcher.full(join(name, f"state.{text}")) for number, text in names.items() if number not in found
            ]
            return out
        if [len(keys) for keys in there] != [len(keys) for keys in here]:
            return None
        return {key: number for old, new in zip(there, here, strict=True) for key, number in zip(old, new, strict=True)}

    def _entries(
        self,
        matcher: Matcher,
        saved: dict[Any, Node],
        live: Any,
        groups: Groups,
        numbers: dict[Any, int],
        homes: dict[int, torch.device],
        name: str,
    ) -> tuple[dict[int, dict[str, Finisher]], dict[Any, Finisher]]:
        """(number here -> how each value of its state is made, state that belongs to no parameter)."""
        parameters = {key for _, keys in groups for key in keys}
        entries: dict[int, dict[str, Finisher]] = {}
        apart: dict[Any, Finisher] = {}
        for key, node in saved.items():
            prefix = join(name, f"state.{key}")
            values = mapping_of(node)
            if key not in parameters:
                apart[key] = matcher.build(node, prefix)
            elif key in numbers and values is not None:
                existing, home = live.get(numbers[key], {}), homes.get(numbers[key])
                entries[numbers[key]] = {
                    field: self._value(
                        matcher, child, existing.get(field), f"{prefix}.{field}", None if field == "step" else home
                    )
                    for field, child in values.items()
                }
        return entries, apart

    def _value(
        self, matcher: Matcher, node: Node, existing: Any, name: str, home: torch.device | None = None
    ) -> Finisher:
        """In place if a tensor of the same kind is there; what was saved otherwise, a tensor on the device `home`."""
        if isinstance(existing, torch.Tensor) and type(node) is list and node[0] == "t":
            leaf = matcher.tensors.leaves[node[1]]
            if leaf.dtype == existing.dtype and leaf.shape == tuple(existing.shape):
                return matcher.match(node, existing, name)
        matcher.report.matched += 1
        if home is not None and is_leaf(node):
            matcher.tensors.want(node[1], home)
        return matcher.build(node, name)


Groups = list[tuple[dict[str, Node], list[Any]]]


def _homes(target: Any, live: Any) -> dict[int, torch.device]:
    """number of each parameter on a GPU -> its device: load_state_dict wants its state there."""
    return {
        number: parameter.device
        for group, packed in zip(target.param_groups, live["param_groups"], strict=True)
        for parameter, number in zip(group["params"], packed["params"], strict=True)
        if gpu_of(parameter) is not None
    }


def _usual(tree: Any) -> bool:
    return isinstance(tree, dict) and isinstance(tree.get("state"), dict) and isinstance(tree.get("param_groups"), list)


def _groups(node: Node) -> Groups | None:
    """(settings, parameters' keys) of each saved group."""
    if type(node) is not list or node[0] != "l":
        return None
    out: Groups = []
    for child in node[1:]:
        group = mapping_of(child)
        params = group.get("params") if group is not None else None
        if group is None or type(params) is not list or params[0] != "l":
            return None
        out.append((group, params[1:]))
    return out


def _sizes(groups: Groups, live: Any) -> str:
    there = [len(keys) for _, keys in groups]
    here = [len(group["params"]) for group in live["param_groups"]]
    return f"saved groups of {there} parameters, here {here}"


def _loaded(target: Any, tree: Any) -> Any:
    """load_state_dict, and then the tensors that were meant in place of those that it cast or copied."""
    target.load_state_dict(tree)
    if not _usual(tree):
        return target
    for group, packed in zip(target.param_groups, tree["param_groups"], strict=False):
        for field, value in packed.items():
            if field != "params" and field in group:
                group[field] = _meant(value, group[field])
        for parameter, number in zip(group["params"], packed["params"], strict=False):
            loaded = target.state.get(parameter)
            meant = tree["state"].get(number)
            if isinstance(loaded, dict) and isinstance(meant, dict):
                for field in loaded.keys() & meant.keys():
                    loaded[field] = _meant(meant[field], loaded[field])
    return target


def _meant(value: Any, loaded: Any) -> Any:
    """The value that was given to load_state_dict, on the device where it put it."""
    if isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
        return value.to(loaded.device)
    if type(value) is not type(loaded) or not isinstance(value, list | tuple | dict) or len(value) != len(loaded):
        return loaded
    if isinstance(value, dict):
        return {key: _meant(value[key], item) if key in value else item for key, item in loaded.items()}
    if type(value) in (list, tuple):
        return type(value)(_meant(item, other) for item, other in zip(value, loaded, strict=True))
    return loaded


register_provider(torch.optim.Optimizer, OptimizerProvider())
