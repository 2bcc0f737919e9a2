"""Fingerprints of modules and optimizers: what a walk over them depends on, taken without a walk.

Walking a model of 1,000 tensors costs milliseconds, of which the training loop waits for each; most steps change
values only. So the walk's outcome is used again while nothing that it depends on has changed. What that is, is compared
here, by whole lists, made natively, which cost nanoseconds an entry: keys, classes, and the identities of parameters.
Nothing is kept of the objects themselves: equal lists of the identities of objects that live at one time mean that the
same places hold the same objects as each other, which is all that names and ties depend on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat
from operator import attrgetter, is_, itemgetter, methodcaller
from typing import Any, NamedTuple

import torch

from stepwell.native._objects import (
    entries,
    entries_again,
    identities,
    look,
    modules_again,
    study_entries,
    study_modules,
)
from stepwell.state.again import Again
from stepwell.state.layouts import dict_version_at
from stepwell.state.modules import HOOKS, METHODS, has_own_methods, methods_of, wrapped_child

#: a module inside modules; deeper ones, and those inside themselves, are walked over each time
_LEVELS_MAX = 100
_inside: Any = attrgetter("__dict__")
_modules: Any = itemgetter("_modules")
_HELD, _NOTED = ("_parameters", "_buffers"), ("_non_persistent_buffers_set", *HOOKS)
_ASKED = ("_modules", _HELD, _NOTED, METHODS)
_held: Any = itemgetter(*_HELD, *_NOTED)
_values: Any = methodcaller("values")
_KeysView: Any = type({}.keys())
Lists = Sequence[list[Any]]  # of parameters, and of buffers


@dataclass(frozen=True, slots=True)
class Traced:
    """A module as `look` sees it."""

    trace: list[Any]
    classes: set[type]
    ways: list[Any]  # the methods by which these save and load; asked each time: classes change, too
    parameters: bytes  # identities
    again: Again[torch.nn.Module, Lists] = field(compare=False)


def look_at_module(root: torch.nn.Module) -> tuple[Any, list[Any]] | None:
    """A fingerprint, equal to others while nothing that a walk depends on has changed, and the parameters and buffers,
    all of them, as `study_module` lists them; None if it is a kind of its own."""
    found = look(root, _LEVELS_MAX, *_ASKED, None)
    if found is None:
        return study_module(root)
    trace, classes, (parameters, buffers) = found
    seen = Traced(trace, classes, _ways_of(classes), identities(parameters), Again(_study_modules, _modules_again))
    return seen, parameters + buffers


def look_again(root: torch.nn.Module, seen: Any) -> list[Any] | None:
    """The parameters and buffers of a module whose fingerprint is the one that was seen; None if it is another one."""
    if type(seen) is not Traced:
        look_now = look_at_module(root)
        return look_now[1] if look_now is not None and look_now[0] == seen else None

    def closely(root: torch.nn.Module) -> Lists | None:
        found = look(root, _LEVELS_MAX, *_ASKED, seen.trace)
        return found[2] if found is not None and identities(found[2][0]) == seen.parameters else None

    lists = seen.again.look(root, closely)
    if lists is None or not all(map(is_, _ways_of(seen.classes), seen.ways)):
        return None
    parameters, buffers = lists
    return parameters + buffers


def _study_modules(root: torch.nn.Module) -> bytearray | None:
    version_at = dict_version_at()
    return None if version_at is None else study_modules(root, _LEVELS_MAX, *_ASKED, version_at)


def _modules_again(root: torch.nn.Module, record: bytearray) -> Lists | None:
    version_at = dict_version_at()
    assert version_at is not None, "there is a record"
    return modules_again(root, record, *_ASKED, version_at)


def _ways_of(classes: Iterable[type]) -> list[Any]:
    return list(_chained(map(methods_of, classes)))


@dataclass(frozen=True, slots=True)
class ModulePrint:
    """A module and all inside it, level by level: the children of the first one, then those of each of these."""

    classes: list[type]
    children: list[int]
    child_names: list[str]
    absent: list[int]  # which of all children are None
    parameters: list[int]  # how many each module has
    parameter_names: list[str]
    identities: list[int]
    buffers: list[int]
    buffer_names: list[str]
    unset: list[bool]  # buffers that are None
    transient: dict[int, frozenset[str]]  # module -> names of buffers that are not saved
    plain: bool  # no module saves or loads in its own way

    def order(self) -> list[tuple[str, int]]:
        """(canonical name, place among parameters and then buffers) of each tensor that a walk lists, in its order."""
        child, parameter, buffer = map(_starts, (self.children, self.parameters, self.buffers))
        present = sorted({*range(len(self.child_names))}.difference(self.absent))
        number = {place: module for module, place in enumerate(present, 1)}  # place among all children -> module
        out: list[tuple[str, int]] = []

        def visit(module: int, prefix: str) -> None:
            places = range(child[module], child[module] + self.children[module])
            inner = {self.child_names[place]: number[place] for place in places if place in number}
            wrapped = wrapped_child(self.classes[module], inner)
            if wrapped is not None:
                visit(inner[wrapped], prefix)
                return
            for at in range(parameter[module], parameter[module] + self.parameters[module]):
                if self.identities[at] != id(None):
                    out.append((prefix + self.parameter_names[at], at))
            for at in range(buffer[module], buffer[module] + self.buffers[module]):
                name = self.buffer_names[at]
                if not self.unset[at] and name not in self.transient.get(module, ()):
                    out.append((prefix + name, len(self.identities) + at))
            for name, below in inner.items():
                visit(below, f"{prefix}{name}.")

        visit(0, "")
        return out


def _starts(counts: list[int]) -> list[int]:
    return list(accumulate(counts, initial=0))


def study_module(root: torch.nn.Module) -> tuple[ModulePrint, list[Any]] | None:
    """What it consists of, and its parameters and buffers, all of them; None if it is a kind of its own."""
    try:
        return _study(root)
    except (AttributeError, KeyError, TypeError):  # not what a module of torch consists of
        return None


def _study(root: torch.nn.Module) -> tuple[ModulePrint, list[Any]] | None:
    level: list[Any] = [root]
    inside: list[dict[str, Any]] = []
    classes: list[type] = []
    children: list[int] = []
    child_names: list[str] = []
    absent: list[int] = []
    for _ in range(_LEVELS_MAX):
        classes += map(type, level)
        here = list(map(_inside, level))
        inside += here
        below = list(map(_modules, here))
        children += map(len, below)
        child_names += _chained(below)
        found = _values_of(below)
        level = [module for module in found if module is not None]
        if len(level) != len(found):
            start = len(child_names) - len(found)
            absent += [place for place, module in enumerate(found, start) if module is None]
        if not level:
            break
    else:
        return None
    parameters, buffers, transient, *hooks = zip(*map(_held, inside), strict=True)
    held, kept = _values_of(parameters), _values_of(buffers)
    replaced = not all(map(_KeysView.isdisjoint, map(dict.keys, inside), repeat(METHODS)))
    made = ModulePrint(
        classes=classes,
        children=children,
        child_names=child_names,
        absent=absent,
        parameters=list(map(len, parameters)),
        parameter_names=list(_chained(parameters)),
        identities=list(map(id, held)),
        buffers=list(map(len, buffers)),
        buffer_names=list(_chained(buffers)),
        unset=list(map(is_, kept, repeat(None))),
        transient={at: frozenset(names) for at, names in enumerate(transient) if names} if any(transient) else {},
        plain=not (replaced or any(map(any, hooks)) or any(map(has_own_methods, set(classes)))),
    )
    return made, held + kept


def _values_of(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    filled = list(filter(None, dicts))  # most are empty
    if {*map(type, filled)} <= {dict}:
        return list(_chained(map(dict.values, filled)))
    return list(_chained(map(_values, filled)))  # an OrderedDict has an order of its own


def _chained(many: Iterable[Iterable[Any]]) -> Iterable[Any]:
    return chain.from_iterable(many)


class OptimizerPrint(NamedTuple):
    """An optimizer that saves in the usual way, whose state is a dict of tensors for each parameter."""

    cls: type
    groups: list[int]  # parameters in each
    parameters: bytes  # identities
    keys: bytes  # of the state: identities
    states: list[Any]  # the trace of the state


def look_at_optimizer(optimizer: Any) -> tuple[OptimizerPrint, list[Any]] | None:
    """Its fingerprint, and the values of its state; None if it is a kind of its own."""
    found = entries(optimizer.state, None) if _saves_as_usual(optimizer) else None
    if found is None:
        return None
    states, keys, values = found
    return OptimizerPrint(type(optimizer), *_groups_of(optimizer), identities(keys), states), values


def look_at_optimizer_again(optimizer: Any, seen: OptimizerPrint, again: Again[Any, list[Any]]) -> list[Any] | None:
    """The values of its state; None if its fingerprint is not the one that was seen."""
    if not _saves_as_usual(optimizer) or (type(optimizer), *_groups_of(optimizer)) != seen[:3]:
        return None

    def closely(state: Any) -> list[Any] | None:
        found = entries(state, seen.states)
        return found[2] if found is not None and identities(found[1]) == seen.keys else None

    return again.look(optimizer.state, closely)


def entries_at_a_glance() -> Again[Any, list[Any]]:
    """For `look_at_optimizer_again`."""
    return Again(_study_entries, _entries_again)


def _study_entries(state: Any) -> bytearray | None:
    version_at = dict_version_at()
    return None if version_at is None else study_entries(state, version_at)


def _entries_again(state: Any, record: bytearray) -> list[Any] | None:
    version_at = dict_version_at()
    assert version_at is not None, "there is a record"
    return entries_again(state, record, version_at)


def _saves_as_usual(optimizer: Any) -> bool:
    cls = type(optimizer)
    if getattr(cls, "state_dict", None) is not torch.optim.Optimizer.state_dict or "state_dict" in vars(optimizer):
        return False
    return not (
        getattr(optimizer, "_optimizer_state_dict_pre_hooks", None)
        or getattr(optimizer, "_optimizer_state_dict_post_hooks", None)
    )


def _groups_of(optimizer: Any) -> tuple[list[int], bytes]:
    """How many parameters each has, and the identities of all: the parameters themselves need not be touched."""
    groups = [group["params"] for group in optimizer.param_groups]
    lists = [params if type(params) is list else list(params) for params in groups]
    return list(map(len, lists)), b"".join(map(identities, lists))
