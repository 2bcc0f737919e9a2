"""The walk over a state: typed JSON nodes for the tree, and a flat list of its tensors.

The walk is optimistic, since it meets 20,000 tensors in a few milliseconds: plain tensors are only listed. If
the list then turns out to hold sparse, quantised or meta tensors, `capture` walks again with `careful` set, and
each tensor is looked at where its key is known.
"""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import enum
import pickle
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from torch.nn.parameter import Parameter, is_lazy

from stepwell.errors import StateError
from stepwell.state import values
from stepwell.state.classes import class_name, require_saveable
from stepwell.state.dtypes import DTYPE, QUANTISED
from stepwell.state.providers import Context, PerRank, Replicated, provider_for, provider_named
from stepwell.state.values import Node

#: containers inside containers; JSON parsers and Python's own stack have limits a little above
DEPTH_MAX = 100
#: dicts and lists of so many plain tensors are remembered as a whole
_MANY = 32
_PLAIN = frozenset({torch.Tensor, Parameter})
_STRINGS = frozenset({str})
_SELF = frozenset({type(None), bool})
_FACTORIES = {kind: kind.__name__ for kind in (int, float, str, bool, list, dict, tuple, set, bytes, complex)}


@dataclasses.dataclass(frozen=True, slots=True)
class Provided:
    """An object with a provider, or a dict or list of many plain tensors, its node, and the range of its leaves."""

    value: Any
    name: str
    node: Node
    first: int
    stop: int


class Recall(Protocol):
    """Knows the nodes of objects from an earlier walk."""

    def node_of(self, encoder: Encoder, value: Any, name: str, provider: str) -> list[Any] | None:
        """The object's node; its leaves are added to the encoder's. None if the object must be walked over."""

    def node_of_many(self, encoder: Encoder, value: dict[Any, Any] | list[Any], name: str) -> Node | None:
        """The same for what may be a dict or list of many plain tensors."""


class Encoder:
    """One walk over one state. After it, `tensors` and `names` list the leaves in the state's order."""

    def __init__(self, state: Mapping[Any, Any], *, careful: bool = False, recall: Recall | None = None) -> None:
        self.state = state
        self.careful = careful
        self.recall = recall
        self.provided: list[Provided] = []  # what a recall may know, in the order in which the nodes were finished
        self.tensors: list[torch.Tensor] = []
        self.names: list[str] = []  # "" for those of `recalled`
        self.recalled: list[tuple[int, int]] = []  # (first, stop) of leaves that `recall` has added, in their order
        self.classes: dict[int, str] = {}  # leaf -> class, where it is a subclass that plain data cannot tell
        self.replicated: set[int] = set()  # leaves inside Replicated(...)
        self.made: set[int] = set()  # leaves that the walk, or a provider, has made: not the state's own tensors
        self._cache: dict[str, Any] = {}
        self._active: set[int] = set()

    def encode(self, value: Any, name: str) -> Node:
        """The node of any value; raises StateError, naming the key, for what cannot be saved."""
        kind = type(value)
        if kind in _PLAIN:
            return self._leaf(value, name)
        if kind in _SELF:
            return value
        node = values.encode_value(value)
        if node is not None:
            return node
        encoder = _CONTAINERS.get(kind)
        if encoder is None:
            return self._other(value, kind, name)
        return self._nested(encoder, value, name)

    def encode_key(self, key: Any, name: str) -> Node:
        """The node of a dict's key; StateError for keys that are not plain values."""
        count = len(self.tensors)
        node = self.encode(key, name)
        if len(self.tensors) != count:
            raise StateError(f"A key of type {type(key).__qualname__} cannot be saved", key=name)
        return node

    def _nested(self, encoder: Any, value: Any, name: str) -> Node:
        identity = id(value)
        if identity in self._active:
            raise StateError("The value contains itself", key=name, todo="Break the cycle before saving")
        if len(self._active) >= DEPTH_MAX:
            raise StateError(f"The state is nested deeper than {DEPTH_MAX} levels", key=name)
        self._active.add(identity)
        try:
            return encoder(self, value, name)
        finally:
            self._active.discard(identity)

    def _leaf(self, tensor: torch.Tensor, name: str) -> Node:
        if self.careful:
            if tensor.dtype in QUANTISED and tensor.is_quantized:
                return self._provided(tensor, name, "quantised")
            _require_plain(tensor, name)
        self.tensors.append(tensor)
        self.names.append(name)
        return ["t", len(self.tensors) - 1]

    def _dict(self, value: dict[Any, Any], name: str) -> Node:
        if (known := self._known(value, name)) is not None:
            return known
        out: dict[str, Node] = {}
        prefix = f"{name}." if name else ""
        if self.careful or not _has_json_keys(value):
            return self._dict_carefully(value, name)
        tensors, names = self.tensors, self.names
        if _PLAIN.issuperset(map(type, value.values())):
            out = {key: ["t", leaf] for leaf, key in enumerate(value, len(tensors))}
            tensors += value.values()
            names += map(prefix.__add__, value)
            self._note(value, name, out)
            return out
        for key, item in value.items():
            if type(item) in _PLAIN:
                out[key] = ["t", len(tensors)]
                tensors.append(item)
                names.append(prefix + key)
            else:
                out[key] = self.encode(item, prefix + key)
        return out

    def _list(self, value: list[Any], name: str) -> Node:
        if (known := self._known(value, name)) is not None:
            return known
        node = ["l", *self._items(value, name)]
        if _PLAIN.issuperset(map(type, value)) and not self.careful:
            self._note(value, name, node)
        return node

    def _known(self, value: dict[Any, Any] | list[Any], name: str) -> Node | None:
        if self.recall is None or len(value) < _MANY:
            return None
        return self.recall.node_of_many(self, value, name)

    def _note(self, value: dict[Any, Any] | list[Any], name: str, node: Node) -> None:
        """The last leaves are those of a dict or list of plain tensors."""
        if len(value) >= _MANY:
            count = len(self.tensors)
            self.provided.append(Provided(value, name, node, count - len(value), count))

    def _dict_carefully(self, value: Mapping[Any, Any], name: str) -> Node:
        if type(value) is dict and _has_json_keys(value):
            return {key: self.encode(item, join(name, key)) for key, item in value.items()}
        return ["d", *self._pairs(value, name)]

    def _pairs(self, value: Mapping[Any, Any], name: str) -> list[Node]:
        out: list[Node] = []
        for key, item in value.items():
            inner = join(name, key)
            out += self.encode_key(key, inner), self.encode(item, inner)
        return out

    def _items(self, value: Any, name: str) -> list[Node]:
        return [self.encode(item, join(name, index)) for index, item in enumerate(value)]

    def _defaultdict(self, value: Any, name: str) -> Node:
        factory = value.default_factory
        if factory is not None and factory not in _FACTORIES:
            raise StateError(
                f"A defaultdict with the factory {factory!r} cannot be saved",
                key=name,
                todo="Only built-in types can be restored as factories; convert it with dict(...)",
            )
        return ["dd", _FACTORIES.get(factory), *self._pairs(value, name)]

    def _set(self, value: Any, name: str) -> Node:
        nodes = self._items(value, name)
        return ["st" if type(value) is set else "fs", *sorted(nodes, key=repr)]  # equal sets, equal records

    def _bytes(self, value: bytes | bytearray, name: str) -> Node:
        if len(value) <= values.INLINE_BYTES:
            return values.encode_bytes(value)
        return ["bt", self._raw_leaf(np.frombuffer(bytes(value), np.uint8), name), type(value).__name__]

    def _raw_leaf(self, array: np.ndarray[Any, Any], name: str) -> Node:
        self.made.add(len(self.tensors))
        return self._leaf(tensor_over(array), name)

    def _array(self, array: np.ndarray[Any, Any], name: str) -> Node:
        if array.dtype.hasobject:
            if array.dtype == object:
                return ["no", ["sz", *array.shape], *self._items(array.ravel().tolist(), name)]
            return self._pickle(array, name)
        order = "F" if array.flags.f_contiguous and not array.flags.c_contiguous else "C"
        turned = array.T if order == "F" else array
        rows = np.ascontiguousarray(turned).reshape(turned.shape)
        dtype = DTYPE.get(array.dtype.name) if array.dtype.isnative and array.dtype.kind in "biufc" else None
        data = tensor_over(rows)
        self.made.add(len(self.tensors))
        leaf = self._leaf(data if dtype is None else data.view(dtype).view(rows.shape), name)
        return ["na", leaf, values.numpy_dtype_text(array.dtype), order, *array.shape]

    def _other(self, value: Any, kind: type, name: str) -> Node:
        """Objects: what is known by a base class, then providers, then pickle."""
        if isinstance(value, torch.Tensor):
            return self._subclass(value, kind, name)
        if isinstance(value, np.ndarray) and kind in (np.ndarray, np.memmap):
            return self._nested(Encoder._array, value, name)
        if isinstance(value, enum.Enum):
            return ["en", require_saveable(kind, name), value.name, self.encode(value.value, name)]
        if isinstance(value, Replicated | PerRank):
            return self._wrapped(value, name)
        provider = provider_for(kind)
        if provider is not None:
            return self._provided(value, name, provider.name)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self._nested(Encoder._namedtuple, value, name)
        if dataclasses.is_dataclass(value):
            return self._nested(Encoder._dataclass, value, name)
        return self._pickle(value, name)

    def _namedtuple(self, value: Any, name: str) -> Node:
        fields = type(value)._fields
        items = [self.encode(item, join(name, field)) for field, item in zip(fields, value, strict=True)]
        return ["nt", require_saveable(type(value), name), " ".join(fields), *items]

    def _dataclass(self, value: Any, name: str) -> Node:
        out: list[Node] = ["dc", require_saveable(type(value), name)]
        for field in dataclasses.fields(value):
            out += field.name, self.encode(getattr(value, field.name), join(name, field.name))
        return out

    def _wrapped(self, value: Replicated | PerRank, name: str) -> Node:
        before = len(self.tensors)
        node = self.encode(value.value, name)
        if isinstance(value, PerRank):
            return ["w", "per-rank", node]
        self.replicated.update(range(before, len(self.tensors)))
        return ["w", "replicated", node]

    def _subclass(self, tensor: torch.Tensor, kind: type, name: str) -> Node:
        provider = provider_for(kind)
        if provider is not None:
            return self._provided(tensor, name, provider.name)
        if is_lazy(tensor):
            raise StateError(f"The {kind.__name__} has no data yet", key=name, todo="Run the module once before saving")
        if getattr(kind, "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
            raise StateError(
                f"A tensor of class {class_name(kind)} holds its data in its own way",
                key=name,
                todo="Register a provider for the class (stepwell.register_provider)",
            )
        with torch._C.DisableTorchFunctionSubclass():
            plain = tensor.detach().as_subclass(torch.Tensor)
            plain.requires_grad_(tensor.requires_grad)
        self.made.add(len(self.tensors))
        node = self._leaf(plain, name)
        self.classes[len(self.tensors) - 1] = class_name(kind)
        return node

    def _provided(self, value: Any, name: str, provider_name: str) -> Node:
        if self.recall is not None:
            known = self.recall.node_of(self, value, name, provider_name)
            if known is not None:
                return known
        first, before = len(self.tensors), len(self.provided)
        provider = provider_named(provider_name)
        assert provider is not None
        context = Context(name, self.state, cache=self._cache)
        tree = self._nested(lambda self, obj, key: provider.to_tree(obj, context), value, name)
        if tree is value:
            raise StateError(f"The provider {provider_name!r} answered with the object itself", key=name)
        node = ["p", provider_name, class_name(type(value)), self.encode(tree, name)]
        self.made.update(range(first, len(self.tensors)))
        self.provided[before:] = [each for each in self.provided[before:] if each.name != name]  # not its tree
        self.provided.append(Provided(value, name, node, first, len(self.tensors)))
        return node

    def _pickle(self, value: Any, name: str) -> Node:
        try:
            data = pickle.dumps(value, protocol=5)
        except Exception as error:  # whatever the object's own code raises
            raise StateError(
                f"A value of class {class_name(type(value))} cannot be saved ({error})",
                key=name,
                todo="Save plain data, or register a provider for the class (stepwell.register_provider)",
            ) from error
        return ["pk", self._raw_leaf(np.frombuffer(data, np.uint8), name), class_name(type(value))]


def _require_plain(tensor: torch.Tensor, name: str) -> None:
    if tensor.is_meta:
        raise StateError("The tensor is on the meta device and has no data", key=name, todo="Materialise it first")
    if tensor.layout is not torch.strided:
        raise StateError(
            f"A tensor of layout {tensor.layout} cannot be saved", key=name, todo="Save its to_dense() or its parts"
        )
    if tensor.is_nested:
        raise StateError("A nested tensor cannot be saved", key=name, todo="Save the list of its unbind()")
    if tensor.numel() and not tensor.data_ptr():
        raise StateError("The tensor has no data", key=name)


def tensor_over(array: np.ndarray[Any, Any]) -> torch.Tensor:
    """A tensor over the memory of a contiguous array, also of a read-only one (it is only read); keeps it alive."""
    if not array.nbytes:
        return torch.empty(0, dtype=torch.uint8)
    buffer = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    buffer._owner = array  # type: ignore[attr-defined]  # ctypes objects take attributes
    return torch.frombuffer(buffer, dtype=torch.uint8)


def join(name: str, key: object) -> str:
    """The dotted name of an entry."""
    return f"{name}.{key}" if name else str(key)


def _has_json_keys(value: Mapping[Any, Any]) -> bool:
    """All keys are strings that JSON can hold."""
    if not {*map(type, value)} <= _STRINGS:
        return False
    return all(map(str.isascii, value)) or all(values.encode_value(key) is key for key in value)


_CONTAINERS: dict[type, Any] = {
    dict: Encoder._dict,
    list: Encoder._list,
    tuple: lambda encoder, value, name: ["u", *encoder._items(value, name)],
    collections.OrderedDict: lambda encoder, value, name: ["od", *encoder._pairs(value, name)],
    collections.Counter: lambda encoder, value, name: ["ct", *encoder._pairs(value, name)],
    collections.defaultdict: Encoder._defaultdict,
    collections.deque: lambda encoder, value, name: ["dq", value.maxlen, *encoder._items(value, name)],
    set: Encoder._set,
    frozenset: Encoder._set,
    slice: lambda encoder, value, name: ["sl", *encoder._items((value.start, value.stop, value.step), name)],
    bytes: Encoder._bytes,
    bytearray: Encoder._bytes,
    np.ndarray: Encoder._array,
}
