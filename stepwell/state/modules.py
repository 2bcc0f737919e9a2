"""nn.Module: tensors under canonical names, filled in place unless the module restores itself in its own way.

Canonical names are those of the plain module: what torch.compile, DDP, FSDP and activation checkpointing put in
between is left out, found by walking the modules (a user's own child may be called "module").
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from stepwell.errors import KeyMismatch
from stepwell.state.providers import Context, register_provider
from stepwell.state.values import Node

if TYPE_CHECKING:
    from stepwell.state.match import Finisher, Matcher

#: class that wraps one module -> the name of that child
_WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.distributed.fsdp.fully_sharded_data_parallel.FullyShardedDataParallel": "_fsdp_wrapped_module",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": "_checkpoint_wrapped_module",
}
HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "get_extra_state", "set_extra_state")
#: of a class, the methods by which its modules save and load
methods_of: Callable[[type], tuple[Any, ...]] = attrgetter(*METHODS, "_load_from_state_dict")
_LOADERS = (torch.nn.Module._load_from_state_dict, _NormBase._load_from_state_dict)


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor of a module: where it hangs and what it is called."""

    name: str
    owner: torch.nn.Module
    attribute: str
    tensor: torch.Tensor

    def replace(self, tensor: torch.Tensor) -> None:
        """Puts another tensor there."""
        if isinstance(tensor, torch.nn.Parameter):
            self.owner._parameters[self.attribute] = tensor
        else:
            self.owner._buffers[self.attribute] = tensor


def wrapped_child(kind: type, children: Container[str]) -> str | None:
    """The child that a module of this class only wraps; None if it is no wrapper."""
    for cls in kind.__mro__:
        child = _WRAPPERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if child and child in children:
            return child
    return None


def walk(module: torch.nn.Module, prefix: str = "", full: str = "") -> Iterator[tuple[str, str, torch.nn.Module]]:
    """(canonical prefix, prefix in state_dict(), module) of a module and all inside it, wrappers left out."""
    child = wrapped_child(type(module), module._modules)
    if child is not None:
        inner = module._modules[child]
        assert inner is not None
        yield from walk(inner, prefix, f"{full}{child}.")
        return
    yield prefix, full, module
    for name, inner in module._modules.items():
        if inner is not None:
            yield from walk(inner, f"{prefix}{name}.", f"{full}{name}.")


def slots(module: torch.nn.Module) -> list[Slot]:
    """All parameters and persistent buffers, as state_dict() would list them."""
    out: list[Slot] = []
    for prefix, _, owner in walk(module):
        for name, tensor in owner._parameters.items():
            if tensor is not None:
                out.append(Slot(prefix + name, owner, name, tensor))
        for name, buffer in owner._buffers.items():
            if buffer is not None and name not in owner._non_persistent_buffers_set:
                out.append(Slot(prefix + name, owner, name, buffer))
    return out


def is_custom(module: torch.nn.Module) -> bool:
    """The module, or one inside it, saves or loads in its own way, so its own methods must be asked."""
    for _, _, inner in walk(module):
        if any(getattr(inner, hooks, None) for hooks in HOOKS):
            return True
        if has_own_methods(type(inner)) or not vars(inner).keys().isdisjoint(METHODS):
            return True
        if any(tensor is not None and is_lazy(tensor) for tensor in inner._parameters.values()):
            return True
    return False


def has_own_methods(cls: type[torch.nn.Module]) -> bool:
    """The class saves or loads its modules in its own way."""
    *methods, loader = methods_of(cls)
    *usual, _ = methods_of(torch.nn.Module)
    return not all(map(is_, methods, usual)) or loader not in _LOADERS


def parameter_names(module: torch.nn.Module) -> dict[int, str]:
    """id of each parameter -> its first canonical name."""
    out: dict[int, str] = {}
    for prefix, _, owner in walk(module):
        for name, tensor in owner._parameters.items():
            if tensor is not None:
                out.setdefault(id(tensor), prefix + name)
    return out


class ModuleProvider:
    """The tree is a flat dict: canonical name -> tensor, as in a state_dict."""

    name = "module"

    def to_tree(self, obj: Any, context: Context) -> Any:
        if not is_custom(obj):
            return {slot.name: slot.tensor.detach() for slot in slots(obj)}
        names = _Names(obj)
        return {names.canonical(key): value for key, value in obj.state_dict().items()}

    def from_tree(self, tree: Any, existing: Any, context: Context) -> Any:
        if existing is None:
            return tree
        names = _Names(existing)
        existing.load_state_dict({names.full(key): value for key, value in tree.items()})
        return existing

    def match(self, matcher: Matcher, node: Node, target: torch.nn.Module, name: str) -> Finisher:
        """In place where possible. Built in; third-party providers have `live` for the same purpose."""
        custom = is_custom(target)
        names = _Names(target) if custom else None
        whole = {names.canonical(key) for key in target.state_dict()} if names is not None else ()
        saved = matcher.flat(node, name, whole)
        if saved is None:
            return matcher.keep(node, target, name, "saved something else, here a module")
        if names is not None:
            return self._load_itself(matcher, saved, target, names, name)
        todo: list[Finisher] = []
        fresh: dict[int, torch.Tensor] = {}  # one new tensor for a meta tensor that hangs in two places
        found = slots(target)
        for slot in found:
            key = f"{name}.{slot.name}" if name else slot.name
            if not matcher.keys(matcher.part, key):
                continue
            if slot.name not in saved:
                matcher.note_missing(slot.tensor, key)
                continue
            todo.append(_placing(slot, matcher.match(saved[slot.name], slot.tensor, key), fresh))
        known = {slot.name for slot in found}
        for key, child in saved.items():
            if key not in known:
                matcher.note_unexpected(child, f"{name}.{key}" if name else key)

        def finish() -> torch.nn.Module:
            for step in todo:
                step()
            return target

        return finish

    def _load_itself(
        self, matcher: Matcher, saved: dict[str, Node], target: torch.nn.Module, names: _Names, name: str
    ) -> Finisher:
        values = {key: matcher.build(child, f"{name}.{key}" if name else key) for key, child in saved.items()}
        matcher.report.matched += len(values)

        def finish() -> torch.nn.Module:
            tree: Any = OrderedDict((names.full(key), value()) for key, value in values.items())
            tree._metadata = getattr(target.state_dict(), "_metadata", None)  # versions that loaders ask for
            try:
                target.load_state_dict(tree, strict=matcher.strict)
            except RuntimeError as error:
                raise KeyMismatch(f"The module refused its state: {error}", key=matcher.full(name)) from error
            return target

        return finish


def _placing(slot: Slot, step: Finisher, fresh: dict[int, torch.Tensor]) -> Finisher:
    def finish() -> None:
        value = step()
        if value is not slot.tensor:
            slot.replace(fresh.setdefault(id(slot.tensor), value))

    return finish


class _Names:
    """Canonical names and those of state_dict(), for modules whose own methods are called."""

    def __init__(self, module: torch.nn.Module) -> None:
        pairs = [(full, prefix) for prefix, full, _ in walk(module)]
        self._pairs = sorted(pairs, key=lambda pair: -len(pair[0]))
        self._back = sorted(pairs, key=lambda pair: -len(pair[1]))

    def canonical(self, key: str) -> str:
        """What a key of state_dict() is called in checkpoints."""
        return next((prefix + key[len(full) :] for full, prefix in self._pairs if key.startswith(full)), key)

    def full(self, key: str) -> str:
        """What a checkpoint's name is called in state_dict()."""
        return next((full + key[len(prefix) :] for full, prefix in self._back if key.startswith(prefix)), key)


register_provider(torch.nn.Module, ModuleProvider())
