"""What is remembered of a capture, so that the next one of the same objects need not walk over them again.

Modules and optimizers of the usual kind are recognised by their fingerprints (see `prints`), dicts and lists of many
tensors by their keys: their nodes, names and the order of their tensors are taken over, and the live tensors are looked
up in it. All else, plain values and settings such as learning rates too, is encoded anew, unless it is the very same
object of a kind that does not change. Then the tensors are compared in everything that a plan depends on (`Watch`), and
their addresses. A memory refers to no tensor and no module, so that it keeps none alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import numpy as np
import torch

from stepwell.native._objects import numbers, picked
from stepwell.state import whereabouts
from stepwell.state.again import Again
from stepwell.state.alias import Array
from stepwell.state.encode import Encoder, Provided, join
from stepwell.state.known import Changed, Kind, Known, KnownMany, KnownModule, KnownOptimizer, Part, Settings
from stepwell.state.layouts import PLAIN
from stepwell.state.optim import modules_in
from stepwell.state.plan import Plan
from stepwell.state.prints import (
    entries_at_a_glance,
    look_again,
    look_at_module,
    look_at_optimizer,
    study_module,
)
from stepwell.state.structure import Span
from stepwell.state.watch import NO_GLANCE, Glance, Watch, tensors_at_a_glance
from stepwell.state.whereabouts import places_of

_POINTER: Any = torch._C.TensorBase.data_ptr
_Look = tuple[Any, list[Any]]


def _has_names(encoder: Encoder, names: list[str]) -> bool:
    """Whether the walk gives all that it does not recall these names."""
    at = 0
    for first, stop in (*encoder.recalled, (len(names), len(names))):
        if encoder.names[at:first] != names[at:first]:
            return False
        at = stop
    return len(encoder.names) == len(names)


class Recalling:
    """One walk with a memory; the encoder's `recall`. Raises Changed once the memory does not fit."""

    def __init__(self, memory: Memory, state: Mapping[Any, Any]) -> None:
        self.memory, self._state = memory, state
        self._again: dict[tuple[int, int], list[Any] | None] = {}
        self._same_names: bool | None = None

    def node_of_part(self, encoder: Encoder, key: Any, value: Any, name: str) -> list[Any] | None:
        """The node of a part that is a module or optimizer, as all of most states are, without what the walk asks of
        other values. None if it must be walked over. The key is its own node then."""
        known = self.memory.objects.get(name)
        if not isinstance(known, Part) or not known.kind.is_of(value):
            return None
        if type(key) is not str or key != name or not key.isascii():
            return None
        return self.node_of(encoder, value, name, known.node[1])

    def node_of(self, encoder: Encoder, value: Any, name: str, provider: str) -> list[Any] | None:
        known = self.memory.objects.get(name)
        if known is None:
            return None
        if isinstance(known, KnownMany) or known.first != len(encoder.tensors) or known.node[1] != provider:
            raise Changed
        return known.recall(self, encoder, value, name)

    def node_of_many(self, encoder: Encoder, value: dict[Any, Any] | list[Any], name: str) -> Any:
        known = self.memory.objects.get(name)
        if known is None:
            return None
        if not isinstance(known, KnownMany) or known.first != len(encoder.tensors):
            raise Changed
        if (known.keys is None) != (type(value) is list):
            raise Changed
        return known.recall(self, encoder, value, name)

    def look_again(self, module: torch.nn.Module, seen: Any) -> list[Any] | None:
        """As the function, once for each module and fingerprint of it."""
        key = id(module), id(seen)
        if key not in self._again:
            self._again[key] = look_again(module, seen)
        return self._again[key]

    @property
    def same_names(self) -> bool:
        """Whether the modules of the state give all parameters the names that they had."""
        if self._same_names is None:
            modules, known = modules_in(self._state), self.memory.modules
            self._same_names = len(modules) == len(known) and all(
                key == old and self.look_again(module, seen) is not None
                for (key, module), (old, seen) in zip(modules, known, strict=True)
            )
        return self._same_names


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What a capture leaves behind for the next one."""

    plan: Plan
    modules: list[tuple[str, Any]]  # fingerprints of all of the state, as they give parameters their names
    objects: dict[str, Known]  # dotted name -> what is recognised there
    watch: Watch
    alone: frozenset[int]  # leaves that a walk gives as new objects
    graphs: list[int]  # leaves that keep a graph alive unless they are detached
    addresses: Array  # every snapshot's: not to be changed
    again: Again[list[torch.Tensor], Glance]
    parts: frozenset[str]
    whole: list[tuple[str, Part]] | None  # of each part, if all are such and nothing else has names

    def all_of(self, state: Mapping[Any, Any]) -> tuple[list[Any], list[torch.Tensor]] | None:
        """The tree and the tensors of a state, all of whose parts are known modules and optimizers, as most are. None
        if it must be walked over: that takes longer, and tells more."""
        if self.whole is None or len(state) != len(self.whole):
            return None
        tree: list[Any] = ["d"]
        tensors: list[torch.Tensor] = []
        for (name, known), (key, value) in zip(self.whole, state.items(), strict=True):
            if type(key) is not str or key != name or known.first != len(tensors) or not known.kind.is_of(value):
                return None
            met = known.at_once(value)
            if met is None:
                return None
            tree += (key, met[0])
            tensors += met[1]
        return tree, tensors

    def knows(self, encoder: Encoder, spans: Sequence[Span]) -> bool:
        """Whether the walk has met all that the plan is about, and nothing else, but for the tensors themselves."""
        structure = self.plan.structure
        return (
            _has_names(encoder, structure.names)
            and spans == structure.spans
            and encoder.replicated == structure.replicated
            and sorted(encoder.classes.items()) == structure.subclasses
        )

    def look_at(self, tensors: list[torch.Tensor]) -> tuple[Array, Glance] | None:
        """Where they are, `addresses` itself while nothing has moved, and what a glance told; None if they are not the
        ones that the plan is about."""
        moved: list[Array] = []

        def closely(tensors: list[torch.Tensor]) -> Glance | None:
            found = self._addresses_of(tensors)
            if found is None or not self._are_same(tensors):
                return None
            if found == self.addresses.tobytes():
                return NO_GLANCE
            moved.append(np.frombuffer(found, np.uint64))  # nobody can change it
            return None

        glance = self.again.look(tensors, closely)
        if (glance is None and not moved) or not self._are_where_they_were(tensors):
            return None
        return (self.addresses, glance) if glance is not None else (moved[0], NO_GLANCE)

    def _addresses_of(self, tensors: list[torch.Tensor]) -> bytes | None:
        try:
            return numbers(tensors, _POINTER)
        except Exception:  # they have no pointer, are no tensors, or whatever a class of its own raises
            return None

    def _are_same(self, tensors: list[torch.Tensor]) -> bool:
        try:
            return self.watch.fits(tensors)
        except (AttributeError, RuntimeError, TypeError):  # an optimizer's state holds something else now
            return False

    def _are_where_they_were(self, tensors: list[torch.Tensor]) -> bool:
        if whereabouts.stand_in is None:  # a tensor knows its device
            return True
        return places_of(tensors, list(map(attrgetter("is_cpu"), tensors))) == self.plan.structure.places


def remember(encoder: Encoder, plan: Plan, addresses: Array) -> Memory | None:
    """The memory of a walk; None if nothing of it could be recognised.

    encoder: as the walk left it, with the tensors that it found.
    """
    looks: dict[int, _Look | None] = {}
    modules: list[tuple[str, Any]] = []
    for key, module in modules_in(encoder.state):
        look = looks[id(module)] = look_at_module(module)
        if look is None:
            return None
        modules.append((key, look[0]))
    counts = Counter(each.name for each in encoder.provided)
    live = list(encoder.tensors)
    objects: dict[str, Known] = {}
    alone: list[int] = []
    for each in encoder.provided:
        if counts[each.name] > 1:
            continue
        names = plan.structure.names[each.first : each.stop]
        known = _many(each) or _module(each, names, looks, live) or _optimizer(each, live)
        if known is not None:
            objects[each.name] = known
        if isinstance(known, KnownModule):
            alone += range(each.first, each.stop)
    memory = Memory(
        plan=plan,
        modules=modules,
        objects=objects,
        watch=Watch(live),
        alone=frozenset(alone),
        graphs=[leaf for leaf, tensor in enumerate(live) if tensor.requires_grad and type(tensor) is torch.Tensor],
        addresses=addresses,
        again=tensors_at_a_glance(),
        parts=frozenset(span.part for span in plan.structure.spans),
        whole=_whole(plan, modules, objects),
    )
    recalling = Recalling(memory, encoder.state)
    right = all(_is_right(known, name, recalling, encoder, live) for name, known in objects.items())
    return memory if right and set(PLAIN).issuperset(map(type, live)) else None


def _whole(plan: Plan, modules: list[tuple[str, Any]], objects: Mapping[str, Known]) -> list[tuple[str, Part]] | None:
    structure = plan.structure
    parts = [(span.part, objects.get(span.part)) for span in structure.spans]
    known = [(name, part) for name, part in parts if isinstance(part, Part)]
    named = [(name, part.seen) for name, part in known if isinstance(part, KnownModule)]
    if len(known) != len(parts) or len(named) != len(modules) or structure.replicated or structure.subclasses:
        return None
    plain = all(name.isascii() for name, _ in known)  # others are not their keys' own nodes
    same = all(name == key and seen is look for (name, seen), (key, look) in zip(named, modules, strict=True))
    return known if plain and same else None


def _many(each: Provided) -> KnownMany | None:
    if type(each.value) not in (dict, list):
        return None
    keys = list(each.value) if type(each.value) is dict else None
    return KnownMany(each.first, len(each.value), each.node, keys)


def _module(
    each: Provided, names: list[str], looks: dict[int, _Look | None], live: list[torch.Tensor]
) -> KnownModule | None:
    if each.node[1] != "module":
        return None
    look, studied = looks.get(id(each.value)) or look_at_module(each.value), study_module(each.value)
    if look is None or studied is None or not studied[0].plain:
        return None
    order = studied[0].order()
    if [join(each.name, name) for name, _ in order] != names:
        return None
    places = np.array([place for _, place in order], np.intp)
    live[each.first : each.stop] = picked(look[1], places)
    return KnownModule(Kind(type(each.value), "module"), each.first, each.node, look[0], places)


def _optimizer(each: Provided, live: list[torch.Tensor]) -> KnownOptimizer | None:
    tree, look = each.node[3], look_at_optimizer(each.value) if each.node[1] == "optimizer" else None
    if look is None or type(tree) is not dict or list(tree) != ["state", "param_groups"]:
        return None
    seen, values = look
    stop = each.first + len(values)
    parameters = {id(parameter) for group in each.value.param_groups for parameter in group["params"]}
    if not parameters.issuperset(map(id, each.value.state)) or not all(map(is_, values, live[each.first : stop])):
        return None
    params = [node["params"] if type(node) is dict else node[-1] for node in tree["param_groups"][1:]]
    settings = [Settings.of(*pair) for pair in zip(each.value.param_groups, tree["param_groups"][1:], strict=True)]
    kind = Kind(type(each.value), "optimizer")
    return KnownOptimizer(kind, each.first, each.node, seen, params, settings, entries_at_a_glance())


def _is_right(known: Known, name: str, recalling: Recalling, walked: Encoder, live: Sequence[torch.Tensor]) -> bool:
    """What is recalled is what the walk has found. Checked once, before it is relied on."""
    [each] = [each for each in walked.provided if each.name == name]
    probe = Encoder(walked.state)
    probe.tensors, probe.names = list(live[: each.first]), walked.names[: each.first]
    try:
        node = known.recall(recalling, probe, each.value, name)
    except Changed:
        return False
    if node != each.node or len(probe.tensors) != each.stop:
        return False
    return _has_names(probe, walked.names[: each.stop]) and all(map(is_, probe.tensors, live))
