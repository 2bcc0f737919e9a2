"""Modules, optimizers, and dicts and lists of many tensors that an earlier walk met: how their tensors are found again,
and when they are not what they were."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stepwell.native._objects import picked
from stepwell.state.again import Again
from stepwell.state.alias import Places
from stepwell.state.encode import Encoder, join
from stepwell.state.prints import OptimizerPrint, look_again, look_at_optimizer_again
from stepwell.state.providers import provider_for, registrations
from stepwell.state.values import encode_value

_Met = tuple[list[Any], Sequence[torch.Tensor]]  # an object's node, and its tensors


class Walk(Protocol):
    """One walk over a state that is known in part."""

    def look_again(self, module: torch.nn.Module, seen: Any) -> list[Any] | None:
        """As the function, once for each module and fingerprint of it."""

    @property
    def same_names(self) -> bool:
        """Whether the modules of the state give all parameters the names that they had."""


class Changed(Exception):
    """The state is not what the memory is about."""


class Kind:
    """A class, and the provider that serves it."""

    def __init__(self, cls: type, provider: str) -> None:
        self._class, self._provider = cls, provider
        self._bases: Any = None  # at the last look, as the next
        self._registrations = 0

    def is_of(self, value: Any) -> bool:
        """Whether a value is of that class, which is served by that provider still."""
        if type(value) is not self._class:
            return False
        if self._bases is not self._class.__mro__ or self._registrations != len(registrations):
            provider = provider_for(self._class)
            if provider is None or provider.name != self._provider:
                return False
            self._bases, self._registrations = self._class.__mro__, len(registrations)
        return True


@dataclass(frozen=True, slots=True)
class KnownModule:
    """A module that the last walk met: its leaves are `places` of what `look_at_module` lists."""

    kind: Kind
    first: int
    node: list[Any]
    seen: Any
    places: Places

    def recall(self, walk: Walk, encoder: Encoder, value: torch.nn.Module, name: str) -> list[Any]:
        tensors = walk.look_again(value, self.seen)
        if tensors is None:
            raise Changed
        add(encoder, picked(tensors, self.places))
        return self.node

    def at_once(self, value: torch.nn.Module) -> _Met | None:
        tensors = look_again(value, self.seen)
        return None if tensors is None else (self.node, picked(tensors, self.places))


@dataclass(frozen=True, slots=True)
class KnownOptimizer:
    """An optimizer that the last walk met: the leaves of its state come first, then those of its settings."""

    kind: Kind
    first: int
    node: list[Any]
    seen: OptimizerPrint
    params: list[Any]  # of each group, the node of its parameters
    settings: list[Settings | None]  # of each group, if they are plain values
    again: Again[Any, list[Any]]

    def recall(self, walk: Walk, encoder: Encoder, value: Any, name: str) -> list[Any]:
        tensors = look_at_optimizer_again(value, self.seen, self.again)
        if tensors is None or not walk.same_names:
            raise Changed
        add(encoder, tensors)
        nodes = self._settings_of(value, lambda group, inner: encoder.encode(group, join(name, inner)))
        assert nodes is not None, "what is not known is encoded"
        return self._node_with(nodes)

    def at_once(self, value: Any) -> _Met | None:
        """None, too, if its settings must be encoded."""
        tensors = look_at_optimizer_again(value, self.seen, self.again)
        nodes = None if tensors is None else self._settings_of(value, None)
        return None if tensors is None or nodes is None else (self._node_with(nodes), tensors)

    def _settings_of(self, value: Any, encode: Callable[[dict[Any, Any], str], Any] | None) -> list[Any] | None:
        """The node of each group's settings; None if some must be encoded, and cannot be."""
        nodes = []
        for index, (group, seen) in enumerate(zip(value.param_groups, self.settings, strict=True)):
            settings = {key: item for key, item in group.items() if key != "params"}
            node: Any = None if seen is None else seen.node_of(settings)
            if node is None:
                if encode is None:
                    return None
                node = encode(settings, f"param_groups.{index}")
            nodes.append(node)
        return nodes

    def _node_with(self, settings: list[Any]) -> list[Any]:
        """settings: of each group, their node, which becomes the group's."""
        for node, params in zip(settings, self.params, strict=True):
            if type(node) is dict:
                node["params"] = params
            else:
                node += ["params", params]
        return [*self.node[:3], {"state": self.node[3]["state"], "param_groups": ["l", *settings]}]


_STRINGS = frozenset({str})
_FIXED = frozenset({bool, int, float, str, type(None)})


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of an optimizer's group that are plain values, which never change, and their node."""

    values: dict[str, Any]
    node: dict[str, Any]

    @classmethod
    def of(cls, group: Mapping[Any, Any], node: Any) -> Settings | None:
        values = {key: value for key, value in group.items() if key != "params"}
        if type(node) is not dict or not all(map(_is_fixed, values.values())):
            return None
        return cls(values, {key: item for key, item in node.items() if key != "params"})

    def node_of(self, values: dict[Any, Any]) -> dict[str, Any] | None:
        """The node of settings under the same keys, of which numbers may have become others, as a scheduler's do; None
        if they must be encoded."""
        if not _same_keys(values, list(self.values)):
            return None
        node = self.node.copy()
        for key, value, old in zip(values, values.values(), self.values.values(), strict=True):
            if value is not old:
                if type(value) is not float:
                    return None
                node[key] = encode_value(value)
        return node


def _same_keys(entries: dict[Any, Any], strings: list[str]) -> bool:
    return list(entries) == strings and _STRINGS.issuperset(map(type, entries))


def _is_fixed(value: Any) -> bool:
    return type(value) in _FIXED or (type(value) is tuple and _FIXED.issuperset(map(type, value)))


@dataclass(frozen=True, slots=True)
class KnownMany:
    """A dict or list of plain tensors that the last walk met."""

    first: int
    count: int
    node: Any
    keys: list[str] | None  # None: a list

    def recall(self, walk: Walk, encoder: Encoder, value: Any, name: str) -> Any:
        tensors = value if self.keys is None else value.values()
        if len(tensors) != self.count or (self.keys is not None and not _same_keys(value, self.keys)):
            raise Changed
        add(encoder, tensors)  # that they are tensors, and plain ones, is seen when they are compared
        return self.node


#: what a part of most states is
Part = KnownModule | KnownOptimizer
Known = Part | KnownMany


def add(encoder: Encoder, tensors: Collection[torch.Tensor]) -> None:
    """Their names are known: strings by the thousand need not even be touched."""
    first, count = len(encoder.tensors), len(tensors)
    encoder.recalled.append((first, first + count))
    encoder.tensors += tensors
    encoder.names += [""] * count
