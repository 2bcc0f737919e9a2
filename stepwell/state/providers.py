"""How objects that are not plain data become trees of plain data and tensors, and come back.

A provider is registered for a type; it serves that type and its subclasses (the nearest in the method
resolution order wins). Providers compose: a tree may hold objects that have providers of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from stepwell.errors import ConfigError


class _Nothing:
    """What `Provider.live` answers when nothing can be filled in place."""

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()


@dataclass
class Context:
    """What a provider may know beside its object."""

    key: str  # dotted name of the object in the state
    state: Mapping[Any, Any]  # the whole state that is saved or restored
    strict: bool = True
    rename: Callable[[str], str | None] | None = None  # saved name -> target's name, inside this part
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[str] = field(default_factory=list)
    cache: dict[str, Any] = field(default_factory=dict)  # shared by all objects of one capture or restore


@runtime_checkable
class Provider(Protocol):
    """Saves and restores objects of one type."""

    name: str  # written into checkpoints: it must not change

    def to_tree(self, obj: Any, context: Context) -> Any:
        """The object as plain data, tensors (not copied) and objects with providers."""

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        """The object from such a tree. `existing` is the live object to restore into, or None: make a new
        one, or answer the tree where that is all that can be done."""


@runtime_checkable
class InPlaceProvider(Provider, Protocol):
    """A provider whose objects hold tensors that can be filled where they are."""

    def live(self, existing: Any, context: Context) -> Any:
        """A tree like that of `to_tree` whose tensors are the live ones, to be filled and then given to
        `from_tree`; None or an empty container stands for "build what was saved". NOTHING if everything must
        be built. `saved` is a tree of the saved keys, whose leaves say nothing. Nothing may be changed yet;
        differences are appended to the context's lists."""


@dataclass(frozen=True)
class Replicated:
    """Marks a value as equal on all ranks. It is recorded; every rank still stores its copy."""

    value: Any


@dataclass(frozen=True)
class PerRank:
    """Marks a value as each rank's own. on_resize(values of all saved ranks, rank, world) shall make this rank's
    value when the world size changed; it is not called yet, since restores at another world size raise."""

    value: Any
    on_resize: Callable[[list[Any], int, int], Any] | None = None


_by_type: dict[type | str, Provider] = {}
_by_name: dict[str, Provider] = {}
#: of all registrations for types, what for: while there are no more, `provider_for` gives a class the same answer
registrations: list[type | str] = []


def register_provider(kind: type | str, provider: Provider) -> None:
    """Registers a provider for a type, or for a `module.Class` that need not be imported yet.

    A second registration of a type replaces the first. Raises ConfigError if another provider has this name.
    """
    known = _by_name.get(provider.name)
    if known is not None and type(known) is not type(provider):
        raise ConfigError(f"A provider named {provider.name!r} is registered already", todo="Choose another name")
    if isinstance(kind, type) and kind in (object, torch.Tensor, dict, list, tuple):
        raise ConfigError(f"{kind.__name__} is saved by stepwell itself", todo="Register a subclass")
    _by_type[kind] = provider
    registrations.append(kind)
    _by_name[provider.name] = provider


def register_named(provider: Provider) -> None:
    """A provider that the walk chooses by itself, not by the type of the object."""
    _by_name[provider.name] = provider


def provider_for(cls: type) -> Provider | None:
    """The provider for instances of a class; None if there is none."""
    for base in cls.__mro__[:-1]:
        found = _by_type.get(base) or _by_type.get(f"{base.__module__}.{base.__qualname__}")
        if found is not None:
            return found
    if callable(getattr(cls, "state_dict", None)) and callable(getattr(cls, "load_state_dict", None)):
        return _by_name["stateful"]
    return None


def provider_named(name: str) -> Provider | None:
    """The provider that wrote a tree; None if it is not registered in this process."""
    return _by_name.get(name)


class StatefulProvider:
    """Anything with state_dict and load_state_dict: schedulers, GradScaler, data loaders."""

    name = "stateful"

    def to_tree(self, obj: Any, context: Context) -> Any:
        return obj.state_dict()

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        if existing is None:
            return tree
        existing.load_state_dict(tree)
        return existing


register_named(StatefulProvider())
