"""Guards: tensors change only in updates that are announced, so saves may copy them while training goes on.

The idea of lazy snapshots is that of DataStates-LLM (Maurya et al., HPDC 2024): between two updates a model's
parameters and its optimizer's state do not change, so a save need not wait for their copies; the next update waits
for what is not copied yet. Here each update waits only for the saves whose tensors it overwrites.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch

from stepwell.cover import COVERED_BYTES_MIN, FIXED, UNCOVERED, Cover, Layout, Leaves, Owners
from stepwell.errors import ConfigError, StateError
from stepwell.native import Latch
from stepwell.saving import Save
from stepwell.stash import Stash
from stepwell.state import Snapshot
from stepwell.state.alias import Array
from stepwell.state.optim import modules_in
from stepwell.state.plan import Plan
from stepwell.state.whereabouts import HOST

_params = itemgetter("params")
#: what `guard` takes
Guarded = torch.optim.Optimizer | torch.nn.Module | torch.Tensor


class Guard:
    """Tensors that change only in announced updates; `remove()` ends that. Made by `store.guard`."""

    def __init__(self, guards: Guards, what: Sequence[Guarded], hook: bool) -> None:
        self._guards, self._what = guards, list(what)
        self._handles: list[Any] = []
        self._stepping: set[int] = set()
        me = weakref.ref(self)
        for each in what if hook else ():
            if isinstance(each, torch.optim.Optimizer):
                self._handles += [
                    each.register_step_pre_hook(_hook(me, Guard._before_step)),
                    each.register_step_post_hook(_hook(me, Guard._after_step)),
                    each.register_load_state_dict_pre_hook(_hook(me, Guard._before_load)),
                ]

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]  # cheaper than is_available
        if initialized and torch.cuda.is_current_stream_capturing():
            raise ConfigError(
                f"a step of {type(optimizer).__name__} is being captured in a CUDA graph, whose replays tell nobody",
                todo="Use store.guard(optimizer, hook=False), and call store.before_update() before each replay",
            )
        self._guards.before_update(self)
        self._stepping.add(id(optimizer))

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._stepping.discard(id(optimizer))

    def _before_load(self, optimizer: torch.optim.Optimizer) -> None:
        self._guards.before_update(self)

    @property
    def is_updating(self) -> bool:
        """Whether a step is under way, or has failed half-way: a save in it, by a closure, another hook or a signal
        handler, cannot count on the tensors."""
        return bool(self._stepping)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is guarded now, as plain tensors of this rank."""
        for each in self._what:
            if isinstance(each, torch.Tensor):
                yield _local(each)
            elif isinstance(each, torch.nn.Module):
                yield from map(_local, each.parameters())
            else:
                for group in each.param_groups:
                    yield from map(_local, group["params"])
                for state in each.state.values():
                    yield from map(_local, filter(_is_tensor, state.values() if isinstance(state, dict) else ()))

    def memory(self) -> dict[int, int]:
        """Where the tensors lie: address -> bytes."""
        found: dict[int, int] = {}
        for tensor in self.tensors():
            try:
                address = tensor.data_ptr()
            except RuntimeError:  # sparse, say: no memory of its own
                continue
            found[address] = max(found.get(address, 0), tensor.nbytes)
        return found

    def signature(self) -> tuple[int, ...]:
        """Differs when tensors may have come or gone; costs next to nothing."""
        return tuple(
            len(each.state) + sum(map(len, map(_params, each.param_groups)))
            for each in self._what
            if isinstance(each, torch.optim.Optimizer)
        )

    def remove(self) -> None:
        """Waits for what is being copied lazily; later saves copy these tensors before they return. Idempotent."""
        self._guards.before_update(self)
        self._guards.remove(self)
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __repr__(self) -> str:
        return f"<Guard of {', '.join(type(each).__name__ for each in self._what)}>"


def _hook(guard: weakref.ref[Guard], tell: Callable[[Guard, torch.optim.Optimizer], None]) -> Callable[..., None]:
    def told(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        mine = guard()
        if mine is not None:
            tell(mine, optimizer)

    # a compiled step calls it all the same
    hook: Callable[..., None] = torch.compiler.disable(told)  # type: ignore[no-untyped-call]
    return hook


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor's part of this rank; any other tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, torch.Tensor) else tensor


@dataclass(eq=False, slots=True)
class _Lazy:
    """A save that may not have copied all of a guard's tensors yet."""

    save: Save
    cover: Cover
    owner: int  # whose tensors in that save


@dataclass(slots=True, eq=False)
class _Known:
    """What was worked out for the last save of a state; serves the next one if nothing has changed."""

    guards: list[Guard]
    signatures: list[tuple[int, ...]]
    plan: Plan
    same: Array  # of all leaves, those of the last save: captures give the same array again while nothing moves
    where: Array  # the leaves whose addresses matter: others may be new at each save, as RNG states are
    addresses: Array  # of these
    owners: list[tuple[Guard, ...]]  # by their numbers: tensors of several guards wait for none of them alone
    leaves: list[Leaves]  # of each owner
    held: Leaves  # whose memory is read after save() has returned, or while it waits
    stash: Stash
    layout: Layout


#: of all stores: tensors that one of them restores into may be guarded by another
_all: weakref.WeakSet[Guards] = weakref.WeakSet()


def before_updates() -> None:
    """As `Guards.before_update`, for all stores of this process."""
    for guards in list(_all):
        guards.before_update()


class Guards:
    """The guards of one store. Used by training threads, never by the event loop, which must not wait for them."""

    def __init__(
        self,
        chunk_bytes: int,
        limit_s: float,
        give_up: Callable[[Save, float], None],
        release: Callable[[int, Latch], None],
    ) -> None:
        """limit_s: the longest that an update waits for copies; then those saves are given up. release: lets the
        current stream of a GPU go on after the copies that a latch stands for."""
        self._chunk_bytes, self._limit_s, self._give_up, self._release = chunk_bytes, limit_s, give_up, release
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may save while the thread that it interrupts holds it
        self._guards: list[Guard] = []
        self._known: list[_Known] = []  # newest last
        self._lazy: dict[Guard, list[_Lazy]] = {}
        _all.add(self)

    def add(self, what: Sequence[Guarded], hook: bool) -> Guard:
        """Raises ConfigError for what cannot be guarded."""
        for each in what:
            _check(each)
        if not what:
            raise ConfigError("there is nothing to guard", todo="Give an optimizer, a module or tensors")
        guard = Guard(self, what, hook)
        with self._lock:
            self._guards.append(guard)
        return guard

    def remove(self, guard: Guard) -> None:
        with self._lock:
            if guard in self._guards:
                self._guards.remove(guard)
                self._known.clear()
                self._lazy.pop(guard, None)

    # -- a save --------------------------------------------------------------------------

    def cover(self, snapshot: Snapshot, state: Mapping[Any, Any]) -> tuple[Snapshot, Cover | None]:
        """What of a snapshot may be copied later, by which guards; None: nothing. The snapshot returned has copies
        of small tensors that no guard covers."""
        with self._lock:
            guards = [guard for guard in self._guards if not guard.is_updating]
        if not guards:
            return snapshot, None
        known = self._look_up(snapshot, state, guards)
        if not known.layout.counts:
            return snapshot, None
        held = known.held.of(snapshot.tensors)
        snapshot.hold(held)
        moved, aside = known.stash.put_aside(snapshot)
        return moved, Cover(known.layout, snapshot, known.leaves, known.owners, (known.held, held), aside)

    def _look_up(self, snapshot: Snapshot, state: Mapping[Any, Any], guards: list[Guard]) -> _Known:
        signatures, addresses = [guard.signature() for guard in guards], snapshot.addresses
        for known in reversed(self._known):
            if (
                known.plan is snapshot.plan
                and known.guards == guards
                and known.signatures == signatures
                and (known.same is addresses or np.array_equal(known.addresses, addresses[known.where]))
            ):
                known.same = addresses
                return known
        made = self._work_out(snapshot, state, guards, signatures)
        with self._lock:
            self._known = [*(each for each in self._known if each.plan is not snapshot.plan), made][-2:]
        return made

    def _work_out(
        self, snapshot: Snapshot, state: Mapping[Any, Any], guards: list[Guard], signatures: list[tuple[int, ...]]
    ) -> _Known:
        plan = snapshot.plan
        memories = [guard.memory() for guard in guards]
        for name, module in modules_in(state):
            _check_module(module, name, lambda weight: any(weight.data_ptr() in memory for memory in memories))
        owners, sets = _owners(snapshot, memories)
        places = plan.structure.gpus
        stash = Stash(snapshot, owners == UNCOVERED, places)
        left = owners.copy()
        left[stash.leaves] = FIXED
        matters = owners != UNCOVERED
        matters[stash.leaves] = places[stash.leaves] != HOST
        matters[plan.clones] = False
        where = np.flatnonzero(matters).astype(np.uint64)
        leaves = [Leaves(np.flatnonzero(owners == owner).tolist()) for owner in range(len(sets))]
        held = np.flatnonzero(left != FIXED).tolist()
        return _Known(
            guards=guards,
            signatures=signatures,
            plan=plan,
            same=snapshot.addresses,
            where=where,
            addresses=snapshot.addresses[where],
            owners=[tuple(guards[number] for number in numbers) for numbers in sets],
            leaves=leaves,
            held=next((each for each in leaves if each.numbers == held), None) or Leaves(held),
            stash=stash,
            layout=Layout.of(plan.shards, left, places, self._chunk_bytes),
        )

    def follow(self, save: Save) -> None:
        """Updates wait for a save's copies from now on."""
        cover = save.cover
        if cover is None:
            return
        with self._lock:
            for line in self._lazy.values():
                line[:] = [lazy for lazy in line if not lazy.save.copied.done()]
            for owner, guards in enumerate(cover.owners):
                for guard in guards if cover.waits_for(owner) else ():
                    self._lazy.setdefault(guard, []).append(_Lazy(save, cover, owner))
        save.copied.add_done_callback(_held(self))

    # -- an update -----------------------------------------------------------------------

    def before_update(self, guard: Guard | None = None) -> None:
        """Returns when the tensors of a guard (None: of all) may be changed by what the caller does next, on the CPU
        or on the current streams. Does nothing in a forked child: what it changes is a copy of its own."""
        if not self._lazy or self._pid != os.getpid():
            return
        with self._lock:
            lines = list(self._lazy.values()) if guard is None else [self._lazy.get(guard, [])]
            waiting = [lazy for line in lines for lazy in line]
        until = time.monotonic() + self._limit_s
        for lazy in waiting:
            self._let_through(lazy, until)
        with self._lock:  # not before: Ctrl-C may end the waiting, and the next update must wait again
            for line in lines:
                line[:] = [lazy for lazy in line if lazy not in waiting]

    def _let_through(self, lazy: _Lazy, until: float) -> None:
        for place, latch in lazy.cover.waits_for(lazy.owner):
            if not latch.wait(max(0.0, until - time.monotonic())):
                lazy.cover.spoil(StateError("an update could not wait for the copies any longer", step=lazy.save.step))
                self._give_up(lazy.save, self._limit_s)
                return
            if place != HOST:
                self._release(place, latch)
        lazy.cover.let_through(lazy.owner)


def _held(guards: Guards) -> Callable[[Future[None]], None]:
    """Keeps guards, and so their hooks, alive until a save is copied, whatever becomes of its store."""
    held = [guards]
    return lambda copied: held.clear()


def _owners(snapshot: Snapshot, memories: Sequence[Mapping[int, int]]) -> tuple[Owners, list[tuple[int, ...]]]:
    """Of each leaf its owner: a number of the list that is returned, too, which says whose tensor it is, all of it."""
    structure = snapshot.plan.structure
    covered = np.zeros((len(memories), len(structure.names)), np.bool_)
    for row, memory in zip(covered, memories, strict=True):
        for leaf in np.flatnonzero(np.isin(snapshot.addresses, np.fromiter(memory, np.uint64, len(memory)))).tolist():
            row[leaf] = COVERED_BYTES_MIN <= structure.extents[leaf] <= memory[int(snapshot.addresses[leaf])]
    owners = np.full(len(structure.names), UNCOVERED, np.intp)
    owners[snapshot.plan.clones] = FIXED  # nobody else knows them
    sets: list[tuple[int, ...]] = []
    numbers: dict[bytes, int] = {}
    for leaf in np.flatnonzero(covered.any(axis=0)).tolist():
        column = covered[:, leaf]
        number = numbers.setdefault(column.tobytes(), len(sets))
        if number == len(sets):
            sets.append(tuple(np.flatnonzero(column).tolist()))
        owners[leaf] = number
    return owners, sets


def _check(what: Any) -> None:
    """Raises ConfigError, by name, for what changes tensors otherwise than in updates that can be announced."""
    if isinstance(what, torch.optim.Optimizer):
        for method in ("train", "eval"):
            if callable(getattr(what, method, None)):
                raise ConfigError(
                    f"{type(what).__name__}.{method}() rewrites weights outside of its step, so it cannot be guarded",
                    todo="Save without a guard",
                )
        flat = next((p for group in what.param_groups for p in group["params"] if _is_flat(p)), None)
        if flat is not None:
            raise _fsdp1("the parameters are those")
    elif isinstance(what, torch.nn.Module):
        _check_module(what, type(what).__name__, lambda weight: True)
    elif not isinstance(what, torch.Tensor):
        raise ConfigError(f"a {type(what).__name__} cannot be guarded", todo="Give optimizers, modules or tensors")


def _is_flat(parameter: torch.Tensor) -> bool:
    flat = any(cls.__name__ == "FlatParameter" for cls in type(parameter).__mro__)
    return flat or hasattr(parameter, "_is_flat_param")


def _check_module(module: torch.nn.Module, name: str, guarded: Callable[[torch.Tensor], bool]) -> None:
    for inner_name, inner in module.named_modules():
        if any(cls.__name__ == "FullyShardedDataParallel" for cls in type(inner).__mro__):
            raise _fsdp1(f"{name} is")
        rewrites = isinstance(inner, torch.nn.Embedding | torch.nn.EmbeddingBag) and inner.max_norm is not None
        if rewrites and guarded(_local(inner.weight)):
            raise ConfigError(
                f"{'.'.join(filter(None, (name, inner_name)))} is an {type(inner).__name__} with max_norm: its forward "
                "rewrites the weight",
                todo="Leave max_norm out, or save without a guard",
            )


def _fsdp1(what: str) -> ConfigError:
    return ConfigError(
        f"{what} of FSDP1, which moves parameters about during forward and backward",
        todo="Use fully_shard (FSDP2), or save without a guard",
    )
