"""Saved nodes against live values: what is filled in place, what is built anew, what does not fit.

Matching changes nothing. It asks for tensors, notes every difference, and answers with a closure that, once the
bytes are there, brings the live value up to date and returns what should stand in its place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Mapping
from typing import Any

import numpy as np
import torch

from stepwell.state.decode import Decoder
from stepwell.state.encode import join, tensor_over
from stepwell.state.live import flat_slots, has_array, is_plain, real_instead, replaced
from stepwell.state.names import KeyFilter
from stepwell.state.nodes import describe, flat_nodes, is_leaf, is_plain_node, leaf_keys, mapping_of, unwrapped
from stepwell.state.placement import Tensors
from stepwell.state.providers import Context, PerRank, Replicated, provider_for
from stepwell.state.report import Report
from stepwell.state.values import Node, numpy_dtype

Finisher = Callable[[], Any]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})


class Matcher:
    """Matches one part. `rename` maps saved dotted names to those of the target."""

    def __init__(
        self,
        tensors: Tensors,
        decoder: Decoder,
        state: Mapping[Any, Any],
        part: str,
        *,
        strict: bool,
        keys: KeyFilter,
        rename: Callable[[str], str | None] | None,
        cache: dict[str, Any],
    ) -> None:
        self.tensors = tensors
        self.decoder = decoder
        self.state = state
        self.part = part
        self.strict = strict
        self.keys = keys
        self.rename = rename
        self.cache = cache
        self.report = Report()

    def full(self, name: str) -> str:
        """The dotted key, part included."""
        return f"{self.part}.{name}" if name else self.part

    def match(self, node: Node, target: Any, name: str) -> Finisher:
        """What to do so that `target`, at dotted `name` inside the part, becomes what `node` describes."""
        if type(node) is list and node and node[0] == "w":
            node = node[2]
        if isinstance(target, Replicated | PerRank):
            return self._wrapped(node, target, name)
        if target is None:
            return self.build(node, name)
        if isinstance(target, torch.Tensor):
            return self._tensor(node, target, name)
        if isinstance(target, dict):
            return self._dict(node, target, name)
        if isinstance(target, list) or type(target) is tuple:
            return self._sequence(node, target, name)
        if isinstance(target, np.ndarray):
            return self._array(node, target, name)
        provider = provider_for(type(target))
        if provider is not None:
            return self._provided(provider, node, target, name)
        if dataclasses.is_dataclass(target) and not isinstance(target, type):
            return self._dataclass(node, target, name)
        return self.build(node, name)

    def build(self, node: Node, name: str) -> Finisher:
        """A new value, whatever was there."""
        key = self.full(name)
        self.decoder.prepare(node, key)
        return lambda: self.decoder.decode(node, key)

    def keep(self, node: Node, target: Any, name: str, why: str) -> Finisher:
        """Notes that a value does not fit; the target stays as it is."""
        self.report.mismatched[self.full(name)] = why
        return lambda: target

    def _wrapped(self, node: Node, target: Replicated | PerRank, name: str) -> Finisher:
        inner = self.match(node, target.value, name)

        def finish() -> Any:
            value = inner()
            return target if value is target.value else dataclasses.replace(target, value=value)

        return finish

    def _take(self, node: Node, target: Any, name: str) -> bool:
        """The usual case, made quick: the live tensor takes the stored bytes and nothing remains to be done."""
        if type(target) not in _PLAIN or type(node) is not list or node[0] != "t":
            return False
        if not self.tensors.take(node[1], target):
            return False
        self.report.matched += 1
        self.report.targets.append(target)
        return True

    def _tensor(self, node: Node, target: torch.Tensor, name: str) -> Finisher:
        if type(target) not in (torch.Tensor, torch.nn.Parameter):
            provider = provider_for(type(target))
            if provider is not None:
                return self._provided(provider, node, target, name)
        if target.is_quantized and type(node) is list and node[0] == "p":
            return self.build(node, name)
        if type(node) is list and node[0] == "p" and is_leaf(unwrapped(node)):
            node = unwrapped(node)
        if not is_leaf(node):
            return self.keep(node, target, name, f"saved {describe(node)}, here a tensor")
        index = node[1]
        why = self.tensors.fit(index, target)
        if why:
            return self.keep(node, target, name, why)
        self.report.matched += 1
        self.report.targets.append(target)
        if self.tensors.leaves[index].dtype != target.dtype:
            self.report.cast.append(self.full(name))
        if target.is_meta:
            self.tensors.want(index)
            return lambda: real_instead(self.tensors.value(index), target)
        if not self.tensors.take(index, target):
            self.tensors.want_for(index, target)

        def finish() -> torch.Tensor:
            self.tensors.put(index, target)
            return target

        return finish

    def _dict(self, node: Node, target: dict[Any, Any], name: str) -> Finisher:
        node = unwrapped(node)
        if mapping_of(node) is None:
            return self._not_that(node, target, name, "a dict")
        if not target or self._replaceable(node, target):
            return self._replaced(node, target, name)
        if self.rename is not None:
            return self._renamed(node, target, name)
        saved = mapping_of(node) or {}
        todo: list[tuple[Any, Finisher]] = []
        for key, value in target.items():
            inner = join(name, key)
            if key in saved:
                if self._wanted(value, inner) and not self._take(saved[key], value, inner):
                    todo.append((key, self.match(saved[key], value, inner)))
            else:
                self.note_missing(value, inner)
        for key, child in saved.items():
            if key not in target:
                self.note_unexpected(child, join(name, key))
        return _dict_finisher(target, todo)

    def _renamed(self, node: Node, target: dict[Any, Any], name: str) -> Finisher:
        """Matches by dotted names, however saved and live dicts are nested."""
        assert self.rename is not None
        saved: dict[str, Node] = {}
        for old, child in flat_nodes(node, ""):
            new = self.rename(join(name, old) if name else old)
            if new is not None:
                saved[new] = child
        todo: list[Finisher] = []
        seen: set[str] = set()
        for inner, container, key in flat_slots(target, name):
            value = container[key]
            if inner in saved:
                seen.add(inner)
                if self._wanted(value, inner):
                    todo.append(_dict_finisher(container, [(key, self.match(saved[inner], value, inner))]))
            else:
                self.note_missing(value, inner)
        for new, child in saved.items():
            if new not in seen:
                self.note_unexpected(child, new)

        def finish() -> Any:
            for step in todo:
                step()
            return target

        return finish

    def flat(self, node: Node, name: str, whole: Container[str] = ()) -> dict[str, Node] | None:
        """What is inside a dict's node, however nested, under its (renamed) names below `name`; None: no dict."""
        if mapping_of(node) is None:
            return None
        out: dict[str, Node] = {}
        for old, child in flat_nodes(node, "", whole):
            new: str | None = join(name, old)
            if self.rename is not None and new is not None:
                new = self.rename(new)
            if new is not None:
                out[new.removeprefix(f"{name}.") if name else new] = child
        return out

    def _wanted(self, value: Any, name: str) -> bool:
        return isinstance(value, dict | list) or self.keys(self.part, name)

    def note_missing(self, value: Any, name: str) -> None:
        """The checkpoint has nothing for this live value."""
        if isinstance(value, dict) and value:
            for key, child in value.items():
                self.note_missing(child, join(name, key))
        elif not self.keys(self.part, name):
            return
        elif isinstance(value, torch.Tensor):
            self.report.maybe_missing.append((self.full(name), value))
        else:
            self.report.missing.append(self.full(name))

    def note_unexpected(self, node: Node, name: str) -> None:
        """The state has no place for this saved value."""
        names = [key for key, _ in leaf_keys(node, name)] or [name]
        self.report.unexpected += [self.full(key) for key in names if self.keys(self.part, key)]

    def _not_that(self, node: Node, target: Any, name: str, kind: str) -> Finisher:
        if is_plain(target) and is_plain_node(node):
            return self.build(node, name)
        return self.keep(node, target, name, f"saved {describe(node)}, here {kind}")

    def _replaceable(self, node: Node, target: Any) -> bool:
        """Plain values are replaced as a whole, except where arrays can be filled one by one."""
        if not (is_plain_node(node) and is_plain(target)):
            return False
        if not has_array(target):
            return True
        if isinstance(target, dict):
            return (mapping_of(node) or {}).keys() != target.keys()
        return len(node) - 1 != len(target)

    def _replaced(self, node: Node, target: Any, name: str) -> Finisher:
        build = self.build(node, name)
        return lambda: replaced(target, build())

    def _sequence(self, node: Node, target: Any, name: str) -> Finisher:
        node = unwrapped(node)
        tag = node[0] if type(node) is list and node else None
        if tag not in ("l", "u"):
            return self._not_that(node, target, name, "a list") if target else self.build(node, name)
        if not target or self._replaceable(node, target):
            return self._replaced(node, target, name)
        if len(node) - 1 != len(target):
            return self.keep(node, target, name, f"saved {len(node) - 1} items, here {len(target)}")
        items = [
            self.match(child, value, join(name, n))
            for n, (child, value) in enumerate(zip(node[1:], target, strict=True))
        ]

        def finish() -> Any:
            values = [item() for item in items]
            if all(new is old for new, old in zip(values, target, strict=True)):
                return target
            if isinstance(target, list):
                target[:] = values
                return target
            return tuple(values)

        return finish

    def _array(self, node: Node, target: np.ndarray[Any, Any], name: str) -> Finisher:
        if type(node) is not list or node[0] != "na":
            return (
                self._not_that(node, target, name, "an array")
                if type(node) is list and node[0] == "t"
                else self.build(node, name)
            )
        index = node[1][1]
        same = tuple(node[4:]) == target.shape and numpy_dtype(node[2]) == target.dtype and target.flags.writeable
        if not same:
            return self.build(node, name)
        if node[3] == "C" and target.flags.c_contiguous and target.nbytes:
            leaf = self.tensors.leaves[index]
            view = tensor_over(target).view(leaf.dtype).view(leaf.shape)
            if not self.tensors.take(index, view):
                self.tensors.want_for(index, view)

            def finish() -> Any:
                self.tensors.put(index, view)
                return target

            return finish
        build = self.build(node, name)

        def copy() -> Any:
            target[...] = build()
            return target

        return copy

    def _dataclass(self, node: Node, target: Any, name: str) -> Finisher:
        fields = [field.name for field in dataclasses.fields(target)]
        if type(node) is not list or node[0] != "dc" or set(node[2::2]) != set(fields):
            return self.build(node, name)
        todo = [
            (field, self.match(child, getattr(target, field), join(name, field)))
            for field, child in zip(node[2::2], node[3::2], strict=True)
        ]

        def finish() -> Any:
            for field, step in todo:
                value = step()
                if value is not getattr(target, field):
                    object.__setattr__(target, field, value)
            return target

        return finish

    def _provided(self, provider: Any, node: Node, target: Any, name: str) -> Finisher:
        inner = unwrapped(node)
        match = getattr(provider, "match", None)
        if match is not None:
            return match(self, inner, target, name)  # type: ignore[no-any-return]  # built-in providers only
        context = Context(self.full(name), self.state, self.strict, self.rename, cache=self.cache)
        live = getattr(provider, "live", None)
        tree = self.match(inner, live(target, context), name) if live is not None else self.build(inner, name)
        return lambda: provider.from_tree(tree(), target, context)


def _dict_finisher(target: dict[Any, Any], todo: list[tuple[Any, Finisher]]) -> Finisher:
    def finish() -> dict[Any, Any]:
        for key, step in todo:
            value = step()
            if value is not target[key]:
                target[key] = value
        return target

    return finish
