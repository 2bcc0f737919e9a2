"""Instant rollback: a step that this process saved, and that GPU memory still holds, into the same objects.

A restore has to read records, match names and hand values to the state's own code, which takes longer than copying tens
of gigabytes within a GPU. None of that is needed for parts of a state that are recognised as those that were saved,
down to every plain value: there, only tensors differ. All others go the usual way.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch

from stepwell.catalog import Catalog
from stepwell.checkpoint import Checkpoint
from stepwell.describing import describe
from stepwell.errors import StepwellError
from stepwell.format.names import Attempt
from stepwell.jobs import Job
from stepwell.mover import Mover
from stepwell.native import Mark, PieceMap
from stepwell.ranges import Array, Read, plan_reads
from stepwell.reading import Caller, Crcs, Healing, Reading
from stepwell.runtime import Runtime
from stepwell.state import PlanCache, ShardPlan, Snapshot, capture
from stepwell.state.plan import Plan
from stepwell.tiers.base import CHUNK_BYTES, CheckpointKey, ShardKey
from stepwell.tiers.host import Priority
from stepwell.unpacking import Unpacking, begin, end

#: hooks of optimizers that a restore must call
_HOOKS = ("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks")
#: objects whose tensors go by names that come from the other parts
_BOUND = (b'"module"', b'"optimizer"')


@dataclass(frozen=True, slots=True, eq=False)
class _Saved:
    """What was saved, but for the tensors' bytes."""

    plan: Plan
    tree: list[Any]
    crcs: list[Crcs]  # of each shard


@dataclass(frozen=True, slots=True)
class RolledBack:
    """What a rollback has done."""

    checkpoint: Checkpoint | None  # None: it did not succeed, but may have changed tensors
    sources: Mapping[str, int]  # tier -> bytes
    left: Left  # the parts that must still be restored


class Left(dict[Any, Any]):
    """Some parts of a state; a value that takes the place of a part takes it in the state, too."""

    def __init__(self, state: Mapping[Any, Any], keys: Sequence[Any]) -> None:
        super().__init__((key, state[key]) for key in keys)
        self._state = state

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._state[key] = value  # type: ignore[index]  # a part that is no object needs a state that can be changed


class Rollbacks:
    """Remembers the saves that are in GPU memory, and restores from there."""

    def __init__(self, mover: Mover, catalog: Catalog, plans: PlanCache) -> None:
        self._mover, self._catalog, self._plans = mover, catalog, plans
        self._saved: dict[Attempt, _Saved] = {}
        self._targets: _Targets | None = None  # of the last rollback: the next one is seldom into other tensors

    def note(self, attempt: Attempt, snapshot: Snapshot, crcs: list[Crcs]) -> None:
        """A save is in GPU memory. Those that are there no more are forgotten. On the event loop."""
        for known in [known for known in self._saved if not self._is_there(known)]:
            del self._saved[known]
        self._saved[attempt] = _Saved(snapshot.plan, snapshot.tree, crcs)

    def knows(self, step: int | None) -> bool:
        """Whether a step is known to be there, so that there is no need to ask the tiers for it."""
        return any(attempt.step == step and self._is_there(attempt) for attempt in list(self._saved))

    def _is_there(self, attempt: Attempt) -> bool:
        return any(holding.tier is self._mover.gpu for holding in self._catalog.holdings.get(attempt, ()))

    def restore(
        self, state: Mapping[Any, Any], attempt: Attempt, job: Job, run: Callable[[Coroutine[Any, Any, Any]], Any],
        start: Callable[[Coroutine[Any, Any, None]], Future[None]],
    ) -> RolledBack | None:  # fmt: skip
        """Restores what of `state` it can; None: nothing. run, start: as `restoring.restore` has them.

        Called in the user's thread. Raises what `run` raises; what was not copied by then stays out of the state.
        """
        saved = self._saved.get(attempt)
        if saved is None or not self._is_there(attempt) or any(map(_listens, state.values())):
            return None
        try:
            snapshot = capture(state, rank=job.rank, world=job.world, plans=self._plans)
        except StepwellError:
            return None
        if snapshot.plan is not saved.plan:
            return None
        left = _left(saved, snapshot)
        keys = [key for number, key in enumerate(state) if number in left]
        if len(keys) == len(state):
            return None
        targets = self._targets
        if targets is None or not targets.are_of(snapshot, left):
            targets = self._targets = _Targets.of(snapshot, left)
        caller, healing = Caller(), Healing()
        marks = Runtime.get().gpus.marks(saved.plan.gpus, run)
        try:
            found: Checkpoint | None = run(self._copy(attempt, saved, snapshot, targets, marks, caller, healing))
        except BaseException:
            start(self._mover.leave(caller)).result()
            raise
        if found is None:
            return RolledBack(None, {}, Left(state, list(state)))
        return RolledBack(found, healing.read_bytes, Left(state, keys))

    async def _copy(
        self, attempt: Attempt, saved: _Saved, snapshot: Snapshot, targets: _Targets, marks: Mapping[int, Mark],
        caller: Caller, healing: Healing,
    ) -> Checkpoint | None:  # fmt: skip
        """None if the usual way has to do it after all: the copy in GPU memory is not whole any more, say."""
        catalog = self._catalog
        key = CheckpointKey(catalog.run, attempt.folder)
        tiers = [holding.tier for holding in catalog.holdings.get(attempt, ())]
        readings = [
            Reading(
                ShardKey(key, shard.file), tiers, crcs, healing, Priority.RESTORE, gpu_pieces=fill.pieces, marks=marks,
                caller=caller, size=shard.size,
            )
            for fill, shard, crcs in zip(targets.fills, saved.plan.shards, saved.crcs, strict=True)
        ]  # fmt: skip
        begun: list[Unpacking] = []
        catalog.begin_reading(attempt)
        try:
            try:
                if not self._begin(targets, readings, snapshot, begun):
                    return None
                found = await describe(catalog, attempt)  # while they are copied
                await self._copy_host(targets, readings, snapshot)
            finally:  # one that goes on must not write to what the usual way restores
                await end(self._mover, begun)
            return found
        except StepwellError:
            return None
        finally:
            catalog.end_reading(attempt)

    def _begin(
        self, targets: _Targets, readings: Sequence[Reading], snapshot: Snapshot, begun: list[Unpacking]
    ) -> bool:
        """Each shard's copy is under way before the next one is looked at. False if GPU memory has not all of them
        any more."""
        for fill, reading in zip(targets.fills, readings, strict=True):
            if not fill.lengths:
                continue
            unpacking = begin(self._mover, reading, fill.lengths, snapshot) if len(fill.lengths) == 1 else None
            if unpacking is None:
                return False
            begun.append(unpacking)
        return True

    async def _copy_host(self, targets: _Targets, readings: Sequence[Reading], snapshot: Snapshot) -> None:
        """What is not on a GPU."""
        copying = [
            self._mover.get(
                replace(reading, gpu_pieces=(), pieces=PieceMap(shard.offsets, fill.host, keep=snapshot)), fill.reads
            )
            for fill, shard, reading in zip(targets.fills, targets.plan.shards, readings, strict=True)
            if fill.host is not None
        ]
        for error in await asyncio.gather(*copying, return_exceptions=True) if copying else ():
            if isinstance(error, BaseException):
                raise error


@dataclass(frozen=True, slots=True, eq=False)
class _Targets:
    """Where the bytes of a plan's shards go to in a state's tensors. It keeps none of them alive."""

    plan: Plan
    left: set[int]
    addresses: Array  # of all leaves
    fills: list[_Fill]  # of each shard

    @classmethod
    def of(cls, snapshot: Snapshot, left: set[int]) -> _Targets:
        """left: the numbers of the parts that nothing goes to."""
        plan, wanted = snapshot.plan, snapshot.addresses.copy()
        for number in left:
            span = plan.structure.spans[number]
            wanted[span.first : span.stop] = 0
        return cls(plan, left, snapshot.addresses, [_Fill.of(shard, wanted) for shard in plan.shards])

    def are_of(self, snapshot: Snapshot, left: set[int]) -> bool:
        """Whether all of that is where it was."""
        same = snapshot.plan is self.plan and left == self.left
        if not same or snapshot.addresses is self.addresses:  # which nobody changes
            return same
        return np.array_equal(snapshot.addresses, self.addresses)


@dataclass(frozen=True, slots=True, eq=False)
class _Fill:
    """Of one shard, what goes to a state's tensors."""

    pieces: list[tuple[int, PieceMap]]  # of those on GPUs, each GPU with its map
    lengths: dict[int, int]  # GPU -> bytes
    host: Array | None  # addresses of the pieces that others take
    reads: list[Read]  # which these need

    @classmethod
    def of(cls, shard: ShardPlan, wanted: Array) -> _Fill:
        """wanted: the address of each leaf, 0 for one that stays as it is."""
        own = np.zeros(len(shard.leaves) + 1, np.uint64)  # the header goes nowhere
        own[1:] = wanted[shard.leaves]
        sizes = np.diff(shard.offsets)
        pieces, lengths = [], {}
        for gpu in np.unique(shard.gpus).tolist():
            there = np.zeros_like(own)
            here = shard.device[shard.gpus == gpu]
            there[here] = own[here]
            if there.any():
                pieces.append((gpu, PieceMap(shard.offsets, there)))
                lengths[gpu] = int(sizes[there != 0].sum())
        own[shard.device] = 0
        if not own.any():
            return cls(pieces, lengths, None, [])
        at = np.flatnonzero(own)
        return cls(pieces, lengths, own, plan_reads(shard.offsets[at], sizes[at], shard.size, CHUNK_BYTES))


def _left(saved: _Saved, snapshot: Snapshot) -> set[int]:
    """The numbers of the parts that have to be restored the usual way."""
    plan = saved.plan
    indirect = {leaf for leaf, _ in plan.structure.lazy} | set(plan.clones)
    nodes, before = snapshot.tree[2::2], saved.tree[2::2]
    left = {
        number
        for number, span in enumerate(plan.structure.spans)
        if span.part not in snapshot.live
        or not _is_same(nodes[number], before[number])
        or (not _is_object(nodes[number]) and _has_objects(nodes[number]))
        or any(span.first <= leaf < span.stop for leaf in indirect)
    }
    bound = any(_has_objects(nodes[number]) for number in left)
    return set(range(len(nodes))) if bound else left


def _is_same(node: Any, before: Any) -> bool:
    """Whether they stand for the same values of the same types: to Python True is 1, and -0.0 is 0. Nodes of what a
    capture has recognised are one object, most of the tree."""
    if node is before:
        return True
    if type(node) is not type(before) or node != before:
        return False
    if isinstance(node, dict):
        return list(node) == list(before) and all(map(_is_same, node.values(), before.values()))
    if isinstance(node, list):
        return all(map(_is_same, node, before))
    return not isinstance(node, float) or math.copysign(1.0, node) == math.copysign(1.0, before)


def _is_object(node: Any) -> bool:
    return isinstance(node, list) and node[:1] == ["p"]


def _has_objects(node: Any) -> bool:
    """Whether there are objects in it whose tensors go by names from all of the state."""
    encoded = msgspec.json.encode(node)
    return any(word in encoded for word in _BOUND)


def _listens(value: Any) -> bool:
    """Whether a part is an optimizer that does something of its own when it is loaded."""
    if not isinstance(value, torch.optim.Optimizer):
        return False
    own = type(value).load_state_dict is not torch.optim.Optimizer.load_state_dict or "load_state_dict" in vars(value)
    return own or any(getattr(value, hooks, None) for hooks in _HOOKS)
