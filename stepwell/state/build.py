"""Making new values of a saved state, for readers that have no live one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from stepwell.errors import KeyMismatch
from stepwell.format.collecting import paused
from stepwell.state.decode import Decoder
from stepwell.state.names import KeyFilter, Rename, renamer
from stepwell.state.nodes import PAIRED, children, flat_nodes, key_text, leaf_keys, unwrapped
from stepwell.state.placement import Placement, Tensors
from stepwell.state.skeleton import Skeleton, checked_skeleton
from stepwell.state.values import Node


def build(
    skeleton: Skeleton | Mapping[str, Any],
    *,
    part: str | None = None,
    keys: str | Sequence[str] = "*",
    rename: Rename = None,
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    allow_pickle: bool = False,
) -> Placement:
    """New values for everything that was saved, or for one part, or for the keys that match (fnmatch).

    Modules, optimizers and other stateful objects come back as their state dicts. dtype: what floating-point
    tensors are converted to. `finish` returns {part key: value}, or the value if one part was asked for.
    """
    with paused():
        checked = checked_skeleton(skeleton)
        tensors = Tensors(checked, device=torch.device(device), dtype=dtype)
        decoder = Decoder(tensors, allow_pickle=allow_pickle)
        return _build(checked, tensors, part, KeyFilter(keys), renamer(rename), decoder)


def _build(
    checked: Skeleton,
    tensors: Tensors,
    part: str | None,
    wanted: KeyFilter,
    apply: Callable[[str], str | None] | None,
    decoder: Decoder,
) -> Placement:
    if part is not None and part not in checked.parts:
        raise KeyMismatch(
            f"The checkpoint has no part {part!r}", missing=[part], todo=f"It has {', '.join(checked.parts) or 'none'}"
        )
    _require_all(checked, None if part is None else [part], wanted)
    chosen: list[tuple[Node, Node, str]] = []
    for name, (key, node) in checked.parts.items():
        if part is not None and name != part:
            continue
        kept = node if wanted.everything else _pruned(node, "", partial(wanted, name))
        if kept is _NOTHING and part is None:
            continue
        kept = {} if kept is _NOTHING else kept
        if apply is not None:
            kept = _renamed(kept, apply)
        decoder.prepare(kept, name)
        chosen.append((key, kept, name))
    placement = Placement(tensors.fills())
    placement.cast = _cast(tensors, chosen, tensors.dtype)

    def finish() -> Any:
        values = {decoder.decode(key, name): decoder.decode(node, name) for key, node, name in chosen}
        return values if part is None else next(iter(values.values()))

    placement._finish = finish
    return placement


def labels_of(
    skeleton: Skeleton | Mapping[str, Any], parts: Collection[str] | None, keys: str | Sequence[str]
) -> set[str]:
    """The labels of the tensors that `build` fills, for these parts together (None: all). Raises KeyMismatch."""
    checked, wanted = checked_skeleton(skeleton), KeyFilter(keys)
    if unknown := sorted(set(parts or ()) - set(checked.parts)):
        raise KeyMismatch(
            f"The checkpoint has no part {', '.join(map(repr, unknown))}",
            missing=unknown,
            todo=f"It has {', '.join(checked.parts) or 'none'}",
        )
    _require_all(checked, parts, wanted)
    found: set[str] = set()
    for name, (_, node) in checked.parts.items():
        if parts is None or name in parts:
            kept = node if wanted.everything else _pruned(node, "", partial(wanted, name))
            leaves = () if kept is _NOTHING else leaf_keys(kept, "")
            found |= {checked.leaves[index].label for _, index in leaves}
    return found


def _require_all(checked: Skeleton, parts: Collection[str] | None, wanted: KeyFilter) -> None:
    """Raises KeyMismatch if something that was asked for is not there."""
    if wanted.everything:
        return
    names_shown = parts is None or len(parts) > 1
    chosen = {name: one for name, one in checked.parts.items() if parts is None or name in parts}
    names = [(name, key) for name, (_, node) in chosen.items() for key in _names(node, "")]
    if unmatched := wanted.unmatched(names):
        shown = ", ".join([f"{name}.{key}" if names_shown else key for name, key in names if key][:5])
        raise KeyMismatch(
            f"Nothing in the checkpoint matches {', '.join(unmatched[:5])}",
            missing=unmatched,
            todo=f"There are {shown}" if shown else "",
        )


def _names(node: Node, name: str) -> Iterator[str]:
    """The dotted names of a node and of all in it."""
    yield name
    inner = unwrapped(node)
    entries: Iterable[tuple[str | None, Node]] = ()
    if type(inner) is dict:
        entries = inner.items()
    elif type(inner) is list and inner:
        entries = children(inner)
    for key, child in entries:
        if key is not None:
            yield from _names(child, f"{name}.{key}" if name else key)


def _cast(tensors: Tensors, chosen: list[tuple[Node, Node, str]], dtype: torch.dtype | None) -> list[str]:
    if dtype is None:
        return []
    return [
        key
        for _, node, name in chosen
        for key, index in leaf_keys(node, name)
        if tensors.leaves[index].dtype.is_floating_point and tensors.leaves[index].dtype != dtype
    ]


_NOTHING = object()


def _pruned(node: Node, name: str, wanted: Callable[[str], bool]) -> Node:
    """The node with only those dict entries that are asked for; lists and objects are taken whole or not at all."""
    if name and wanted(name):
        return node
    inner = unwrapped(node)
    if type(inner) is dict:
        kept = {key: _pruned(child, f"{name}.{key}" if name else key, wanted) for key, child in inner.items()}
        kept = {key: child for key, child in kept.items() if child is not _NOTHING}
        return kept if kept else _NOTHING
    if type(inner) is list and inner and inner[0] in PAIRED:
        out = inner[: PAIRED[inner[0]]]
        for at in range(len(out), len(inner) - 1, 2):
            text = key_text(inner[at])
            child = _pruned(inner[at + 1], f"{name}.{text}" if name else text, wanted)
            if child is not _NOTHING:
                out = [*out, inner[at], child]
        return out if len(out) > PAIRED[inner[0]] else _NOTHING
    if not name and wanted(""):
        return node
    return node if any(wanted(key) for key, _ in leaf_keys(node, name)) else _NOTHING


def _renamed(node: Node, apply: Callable[[str], str | None]) -> Node:
    """A flat dict under its new names. Nested dicts become flat, with dotted names, once a name changes."""
    entries = list(flat_nodes(node, ""))
    renamed = [(apply(name), child) for name, child in entries]
    if all(new == old for (new, _), (old, _) in zip(renamed, entries, strict=True)):
        return node
    return {new: child for new, child in renamed if new is not None}
