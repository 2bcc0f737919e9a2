"""The shape of nodes: which arrays are allowed, and what is inside them."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from stepwell.state.values import DECODERS, Node

#: nodes inside nodes; decoding takes a few of Python's stack frames for each
NODE_DEPTH_MAX = 160

#: tag -> index of the first key of a dict-like node; keys and values alternate
PAIRED = {"d": 1, "od": 1, "ct": 1, "dd": 2}
_LISTED = {"l": 1, "u": 1, "dq": 2, "no": 2}
_INSIDE = {"p": 3, "w": 2, "pk": 1, "bt": 1, "na": 1}
#: tag -> (fewest items, tag included, most; None: any number); leaf tags of `values` are checked when decoded
_LENGTHS: dict[str, tuple[int, int | None]] = {
    "t": (2, 2),
    "dq": (2, None),
    "no": (2, None),
    "p": (4, 4),
    "w": (3, 3),
    "pk": (3, 3),
    "bt": (3, 3),
    "na": (4, None),
    "nt": (3, None),
    "dc": (2, None),
    "en": (4, 4),
}
_TEXTS = {"p": (1, 2), "w": (1,), "pk": (2,), "bt": (2,), "na": (2, 3), "nt": (1, 2), "dc": (1,), "en": (1,)}
_LEAVES = {"pk": 1, "bt": 1, "na": 1}
_TAGS = {*_LENGTHS, *PAIRED, *_LISTED, *DECODERS, "st", "fs", "sl"}


def check_node(node: Node, leaves: int, depth: int = 0) -> None:
    """Raises ValueError unless everything below a node can be walked: known tags, lengths, leaves that exist."""
    if depth > NODE_DEPTH_MAX:
        raise ValueError("it is nested too deeply")
    if type(node) is dict:
        for child in node.values():
            if type(child) is list or type(child) is dict:
                check_node(child, leaves, depth + 1)
        return
    if type(node) is not list:
        return
    tag = node[0] if node and type(node[0]) is str else None
    if tag == "t":
        if len(node) != 2 or type(node[1]) is not int or not 0 <= node[1] < leaves:
            raise ValueError("it names a tensor that it does not have")
        return
    if tag is None or tag not in _TAGS:
        raise ValueError(f"it has a node of an unknown kind {node[:1]!r}")
    _check_form(tag, node)
    for child in node[1:]:
        if type(child) is list or type(child) is dict:
            check_node(child, leaves, depth + 1)


def _check_form(tag: str, node: list[Any]) -> None:
    fewest, most = _LENGTHS.get(tag, (1, None))
    count = len(node)
    if count < fewest or (most is not None and count > most):
        raise ValueError(f"a node of kind {tag!r} has {count} items")
    if tag in PAIRED and (count < PAIRED[tag] or (count - PAIRED[tag]) % 2):
        raise ValueError("a key has no value")
    if any(type(node[at]) is not str for at in _TEXTS.get(tag, ())):
        raise ValueError(f"a node of kind {tag!r} lacks a name")
    if tag in _LEAVES and not is_leaf(node[_LEAVES[tag]]):
        raise ValueError(f"a node of kind {tag!r} has no bytes")
    if tag == "dc" and (count % 2 or any(type(name) is not str for name in node[2::2])):
        raise ValueError("a dataclass has a field without a name or a value")
    if tag == "nt" and len(node[2].split()) != count - 3:
        raise ValueError("a named tuple has too few or too many values")


def is_leaf(node: Node) -> bool:
    """The node is a tensor's."""
    return type(node) is list and bool(node) and node[0] == "t"


def leaf_keys(node: Node, key: str) -> Iterator[tuple[str, int]]:
    """(dotted key, leaf) of every tensor leaf below a node."""
    if type(node) is dict:
        for name, child in node.items():
            if is_leaf(child):
                yield f"{key}.{name}" if key else name, child[1]
            else:
                yield from leaf_keys(child, f"{key}.{name}" if key else name)
    elif is_leaf(node):
        yield key, node[1]
    elif type(node) is list:
        for name, child in children(node):
            yield from leaf_keys(child, key if name is None else f"{key}.{name}" if key else name)


def children(node: list[Any]) -> Iterator[tuple[str | None, Node]]:
    """(name, node) of the nodes directly inside an array node; name None: it has its parent's name."""
    tag = node[0]
    if tag in PAIRED:
        for at in range(PAIRED[tag], len(node), 2):
            yield key_text(node[at]), node[at + 1]
    elif tag in _LISTED:
        for index, child in enumerate(node[_LISTED[tag] :]):
            yield str(index), child
    elif tag in _INSIDE:
        yield None, node[_INSIDE[tag]]
    elif tag == "nt":
        yield from zip(node[2].split(), node[3:], strict=True)
    elif tag == "dc":
        yield from zip(node[2::2], node[3::2], strict=True)
    elif tag in ("st", "fs", "sl"):
        for child in node[1:]:
            yield None, child
    elif tag == "en":
        yield None, node[3]


def key_text(node: Node) -> str:
    """How a key looks in dotted names: like str() of the key that it stands for."""
    if isinstance(node, str):
        return node
    if node is None or isinstance(node, bool | int | float):
        return str(node)
    from stepwell.state.decode import decode_plain  # which needs this module

    return str(decode_plain(node))


def unwrapped(node: Node) -> Node:
    """The tree inside what a provider or a wrapper saved."""
    while type(node) is list and node[0] in ("p", "w"):
        node = node[3] if node[0] == "p" else node[2]
    return node


def mapping_of(node: Node) -> dict[Any, Node] | None:
    """The entries of a dict's node under their true keys; None if it is no dict."""
    if type(node) is dict:
        return node
    first = PAIRED.get(node[0]) if type(node) is list else None
    if first is None:
        return None
    from stepwell.state.decode import decode_key  # which needs this module

    return {decode_key(node[at]): node[at + 1] for at in range(first, len(node), 2)}


def flat_nodes(node: Node, name: str, whole: Container[str] = ()) -> Iterator[tuple[str, Node]]:
    """(dotted name, node) of what is inside nested dicts; an empty dict, or one named in `whole`, stands for itself."""
    if name in whole:
        yield name, node
        return
    inner = unwrapped(node)
    if type(inner) is dict and inner:
        for key, child in inner.items():
            yield from flat_nodes(child, f"{name}.{key}" if name else key, whole)
    elif type(inner) is list and inner[0] in PAIRED and len(inner) > PAIRED[inner[0]]:
        for key, child in children(inner):
            yield from flat_nodes(child, f"{name}.{key}" if name else str(key), whole)
    else:
        yield name, node


def is_plain_node(node: Node) -> bool:
    """There is no tensor and no object inside."""
    if type(node) is dict:
        return all(map(is_plain_node, node.values()))
    if type(node) is not list:
        return True
    if node[0] in ("t", "p"):
        return False
    return node[0] in ("na", "bt", "pk") or all(is_plain_node(child) for _, child in children(node))


_KINDS = {"t": "a tensor", "na": "an array", "l": "a list", "u": "a tuple", "p": "an object", "pk": "a pickle"}


def describe(node: Node) -> str:
    """What a node is, for messages."""
    if type(node) is dict or (type(node) is list and node[0] in PAIRED):
        return "a dict"
    return _KINDS.get(node[0], "a value") if type(node) is list else f"{node!r}"[:40]
