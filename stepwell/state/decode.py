"""Nodes back to values. Decoding looks classes up among loaded modules and executes nothing of the file's."""

from __future__ import annotations

import collections
import enum
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np

from stepwell.errors import FormatError, PickleRefused, StepwellError
from stepwell.state.classes import dataclass_class, enum_class, namedtuple_class
from stepwell.state.nodes import children
from stepwell.state.placement import Tensors
from stepwell.state.providers import Context, PerRank, Replicated, provider_named
from stepwell.state.values import DECODERS, Node, numpy_dtype

_FACTORIES: dict[str, Callable[[], Any]] = {
    kind.__name__: kind for kind in (int, float, str, bool, list, dict, tuple, set, bytes, complex)
}


#: what the decoders raise for arguments that make no sense
_DAMAGE = (TypeError, ValueError, LookupError, AttributeError, SyntaxError, ArithmeticError, RuntimeError)


class Decoder:
    """Turns nodes into values, in two steps: `prepare` before the bytes are read, `decode` after."""

    def __init__(self, tensors: Tensors, *, allow_pickle: bool) -> None:
        self.tensors = tensors
        self.allow_pickle = allow_pickle

    def prepare(self, node: Node, key: str) -> None:
        """Asks for the tensors below a node, and raises now what `decode` would raise: unknown classes,
        pickles that are not allowed."""
        if not isinstance(node, list | dict):
            return
        if isinstance(node, dict):
            for name, child in node.items():
                if type(child) is list or type(child) is dict:
                    self.prepare(child, f"{key}.{name}" if key else name)
            return
        tag = node[0]
        if tag == "t":
            self.tensors.want(node[1])
            return
        if tag in ("na", "bt"):
            self.tensors.want_bytes(node[1][1])
            return
        if tag == "pk" and not self.allow_pickle:
            raise PickleRefused(
                f"The value is a pickle of class {node[2]!r}",
                key=key,
                todo="Pass allow_pickle=True if you trust who wrote the checkpoint",
            )
        if tag == "pk":
            self.tensors.want_bytes(node[1][1])
            return
        if tag == "nt":
            namedtuple_class(node[1], _fields(node[2]), key)
        elif tag == "dc":
            dataclass_class(node[1], tuple(node[2::2]), key)
        elif tag == "en":
            enum_class(node[1], key)
        elif tag == "p" and provider_named(node[1]) is None:
            raise FormatError(
                f"The value was saved by a provider named {node[1]!r}, which is not registered here", key=key
            )
        for name, child in children(node):
            self.prepare(child, key if name is None else f"{key}.{name}" if key else name)

    def decode(self, node: Node, key: str) -> Any:
        """The value of a node that was prepared. Raises FormatError for nodes that make no sense."""
        try:
            return self._decode(node, key)
        except StepwellError:
            raise
        except _DAMAGE as error:
            raise FormatError(f"A stored value is damaged ({type(error).__name__}: {error})", key=key) from error

    def _decode(self, node: Node, key: str) -> Any:
        if type(node) is dict:
            return {name: self._decode(child, f"{key}.{name}") for name, child in node.items()}
        if type(node) is not list:
            return node
        tag = node[0]
        if tag == "t":
            return self.tensors.value(node[1])
        special = _SPECIAL.get(tag)
        if special is not None:
            return special(self, node, key)
        return DECODERS[tag](*[self._decode(child, key) for child in node[1:]])

    def _pairs(self, nodes: list[Node], key: str) -> list[tuple[Any, Any]]:
        if len(nodes) % 2:
            raise ValueError("a key without a value")
        out = []
        for index in range(0, len(nodes), 2):
            name = self._decode(nodes[index], key)
            out.append((name, self._decode(nodes[index + 1], f"{key}.{name}")))
        return out

    def _bytes(self, node: list[Any], key: str) -> Any:
        data = self.tensors.bytes_of(node[1][1]).numpy()
        return {"bytes": bytes, "bytearray": bytearray}[node[2]](data)

    def _array(self, node: list[Any], key: str) -> Any:
        flat = self.tensors.bytes_of(node[1][1]).numpy().copy()
        order, shape = node[3], tuple(node[4:])
        array = flat.view(numpy_dtype(node[2])) if flat.size else np.empty(0, numpy_dtype(node[2]))
        return array.reshape(shape, order=order)

    def _objects(self, node: list[Any], key: str) -> Any:
        shape = self._decode(node[1], key)
        flat = np.empty(len(node) - 2, dtype=object)
        for index, child in enumerate(node[2:]):
            flat[index] = self._decode(child, f"{key}.{index}")
        return flat.reshape(shape)

    def _pickle(self, node: list[Any], key: str) -> Any:
        assert self.allow_pickle, "prepare refuses it"
        return pickle.loads(self.tensors.bytes_of(node[1][1]).numpy().tobytes())

    def _namedtuple(self, node: list[Any], key: str) -> Any:
        fields = _fields(node[2])
        if len(fields) != len(node) - 3:
            raise ValueError("a named tuple with too few or too many values")
        cls = namedtuple_class(node[1], fields, key)
        items = [self._decode(child, f"{key}.{name}") for name, child in zip(fields, node[3:], strict=True)]
        return tuple.__new__(cls, items)

    def _dataclass(self, node: list[Any], key: str) -> Any:
        cls = dataclass_class(node[1], tuple(node[2::2]), key)
        value: Any = object.__new__(cls)
        for name, child in zip(node[2::2], node[3::2], strict=True):
            object.__setattr__(value, name, self._decode(child, f"{key}.{name}"))
        return value

    def _enum(self, node: list[Any], key: str) -> Any:
        cls = enum_class(node[1], key)
        if node[2] is not None and node[2] in cls.__members__:
            return cls.__members__[node[2]]
        value = self._decode(node[3], key)
        for member in cls:
            if member.value == value:
                return member
        if not issubclass(cls, enum.Flag) or type(value) is not int:
            raise ValueError(f"{cls.__qualname__} has no member {node[2]!r}")
        return cls(value)  # combined from several members

    def _wrapper(self, node: list[Any], key: str) -> Any:
        return {"replicated": Replicated, "per-rank": PerRank}[node[1]](self._decode(node[2], key))

    def _provided(self, node: list[Any], key: str) -> Any:
        provider = provider_named(node[1])
        assert provider is not None, "prepare refuses it"
        return provider.from_tree(self._decode(node[3], key), None, Context(key, {}))

    def _set(self, node: list[Any], key: str) -> Any:
        items = [self._decode(child, key) for child in node[1:]]
        return set(items) if node[0] == "st" else frozenset(items)


def _fields(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _counter(decoder: Decoder, node: list[Any], key: str) -> Any:
    out: collections.Counter[Any] = collections.Counter()
    out.update(dict(decoder._pairs(node[1:], key)))
    return out


def _defaultdict(decoder: Decoder, node: list[Any], key: str) -> Any:
    factory = None if node[1] is None else _FACTORIES[node[1]]
    return collections.defaultdict(factory, decoder._pairs(node[2:], key))


_SPECIAL: dict[str, Callable[[Decoder, list[Any], str], Any]] = {
    "d": lambda decoder, node, key: dict(decoder._pairs(node[1:], key)),
    "od": lambda decoder, node, key: collections.OrderedDict(decoder._pairs(node[1:], key)),
    "ct": _counter,
    "dd": _defaultdict,
    "dq": lambda decoder, node, key: collections.deque(
        (decoder._decode(child, key) for child in node[2:]), maxlen=node[1]
    ),
    "l": lambda decoder, node, key: [decoder._decode(child, f"{key}.{n}") for n, child in enumerate(node[1:])],
    "u": lambda decoder, node, key: tuple(decoder._decode(child, f"{key}.{n}") for n, child in enumerate(node[1:])),
    "bt": Decoder._bytes,
    "na": Decoder._array,
    "no": Decoder._objects,
    "pk": Decoder._pickle,
    "nt": Decoder._namedtuple,
    "dc": Decoder._dataclass,
    "en": Decoder._enum,
    "w": Decoder._wrapper,
    "p": Decoder._provided,
    "st": Decoder._set,
    "fs": Decoder._set,
}


def decode_plain(node: Node) -> Any:
    """The value of a node without tensors, such as a key."""
    empty = Tensors.__new__(Tensors)
    empty.leaves = []
    return Decoder(empty, allow_pickle=False).decode(node, "")


def decode_key(node: Node) -> Any:
    """The key of a dict that a node stands for."""
    key = decode_plain(node) if type(node) is list else node
    try:
        hash(key)
    except TypeError as error:
        raise FormatError(f"A stored key is damaged ({error})") from error
    return key
