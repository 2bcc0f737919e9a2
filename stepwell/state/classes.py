"""Classes that a checkpoint names: found only among the modules that are loaded already, never imported."""

from __future__ import annotations

import dataclasses
import enum
import sys
from typing import Any

from stepwell.errors import FormatError, StateError


def class_name(cls: type) -> str:
    """`module:qualname`."""
    return f"{cls.__module__}:{cls.__qualname__}"


def loaded_class(name: str) -> type | None:
    """The class of this name, if its module is loaded."""
    module_name, _, path = name.partition(":")
    found: Any = sys.modules.get(module_name)
    for attribute in path.split("."):
        found = getattr(found, "__dict__", {}).get(attribute)  # not getattr: a module's __getattr__ may import
    return found if isinstance(found, type) else None


def require_saveable(cls: type, key: str) -> str:
    """The name of a class whose instances can be built again by name; StateError if there is no such name."""
    name = class_name(cls)
    if loaded_class(name) is not cls:
        raise StateError(
            f"{cls.__qualname__} cannot be found by its name, so its values could not be loaded again",
            key=key,
            todo="Define the class at the top level of a module, or save its fields as a dict",
        )
    return name


def namedtuple_class(name: str, fields: tuple[str, ...], key: str) -> type:
    """The named tuple class with exactly these fields."""
    cls = _require(name, key)
    if not (issubclass(cls, tuple) and getattr(cls, "_fields", None) == fields):
        raise _changed(name, key)
    return cls


def dataclass_class(name: str, fields: tuple[str, ...], key: str) -> type:
    """The dataclass with exactly these fields, in any order."""
    cls = _require(name, key)
    if not dataclasses.is_dataclass(cls) or {field.name for field in dataclasses.fields(cls)} != set(fields):
        raise _changed(name, key)
    return cls


def enum_class(name: str, key: str) -> type[enum.Enum]:
    """The Enum of this name."""
    cls = _require(name, key)
    if not issubclass(cls, enum.Enum):
        raise _changed(name, key)
    return cls


def _require(name: str, key: str) -> type:
    cls = loaded_class(name)
    if cls is None:
        raise StateError(
            f"The value is of class {name!r}, which is not loaded",
            key=key,
            todo=f"Import the module {name.partition(':')[0]!r} first; loading imports nothing by itself",
        )
    return cls


def _changed(name: str, key: str) -> FormatError:
    return FormatError(f"The class {name!r} is not what it was when the value was saved", key=key)
