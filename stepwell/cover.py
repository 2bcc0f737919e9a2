"""Cover: which bytes of a save may still be copied after save() has returned, and who waits for which of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from stepwell.errors import StateError, StepwellError
from stepwell.native import Gathering, Latch
from stepwell.native._objects import numbers, picked
from stepwell.shardjob import ChunkCover
from stepwell.stash import Aside
from stepwell.state import ShardPlan, Snapshot
from stepwell.state.whereabouts import HOST

#: owners are numbers: of a guard, or of several that cover the same tensors; these are of bytes that no guard covers,
#: and of those that never change (a file's header)
UNCOVERED, FIXED = -1, -2
#: smaller tensors are copied before save() returns, as DESIGN.md says: optimizers keep numbers in them
COVERED_BYTES_MIN = 4096

Owners = np.ndarray[Any, np.dtype[np.intp]]
Place = tuple[int, int]  # (owner, GPU or HOST)
Latches = dict[Place, Latch]
#: sets of latches that are made before a save needs them; saves follow each other, few are under way at once
_READY_MAX = 2
_VERSION: Any = torch._C.TensorBase._version


@dataclass(frozen=True, slots=True)
class Layout:
    """What is worked out once for a plan and the guards of its leaves: for each shard, who waits for each chunk."""

    chunks: list[list[tuple[bool, frozenset[Place]]]]  # of each shard: (urgent, whose bytes are in it)
    counts: Mapping[Place, int]  # how many chunks have bytes of theirs
    urgent: bool  # whether save() must wait for any chunk
    _ready: list[Latches] = field(default_factory=list)  # shared by threads: taken and put one at a time

    @classmethod
    def of(cls, shards: Sequence[ShardPlan], owners: Owners, places: Owners, chunk_bytes: int) -> Layout:
        """owners: of each leaf, its owner. places: of each leaf, its GPU or HOST."""
        chunks = [_chunks(shard, owners, places, chunk_bytes) for shard in shards]
        counts = Counter(place for shard in chunks for _, found in shard for place in found)
        return cls(chunks, counts, any(urgent for shard in chunks for urgent, _ in shard))

    def latches(self) -> Latches:
        """One for each place, for one save."""
        try:
            return self._ready.pop()
        except IndexError:
            return self._new()

    def make_ready(self) -> None:
        """Makes latches for a later save. Each one is a native call, which gives the interpreter away: the thread
        that calls save() might get it back much later."""
        if len(self._ready) < _READY_MAX:
            self._ready.append(self._new())

    def _new(self) -> Latches:
        return {place: Latch(count) for place, count in self.counts.items()}


def _chunks(shard: ShardPlan, owners: Owners, places: Owners, chunk_bytes: int) -> list[tuple[bool, frozenset[Place]]]:
    mine = np.concatenate(([FIXED], owners[shard.leaves]))
    there = np.concatenate(([HOST], places[shard.leaves]))
    pairs, kinds = np.unique(np.stack((mine, there)), axis=1, return_inverse=True)
    kinds = kinds.reshape(-1)
    starts = np.arange(0, shard.size, chunk_bytes, dtype=np.uint64)
    stops = np.minimum(starts + np.uint64(chunk_bytes), np.uint64(shard.size))
    first = np.searchsorted(shard.offsets, starts, side="right") - 1
    last = np.searchsorted(shard.offsets, stops, side="left")
    known: dict[tuple[int, ...], tuple[bool, frozenset[Place]]] = {}  # most chunks are alike
    out = []
    for begin, end in zip(first.tolist(), last.tolist(), strict=True):
        key = tuple(set(kinds[begin:end].tolist()))
        if key not in known:
            found = [(int(owner), int(place)) for owner, place in pairs[:, key].T]
            known[key] = (
                any(owner == UNCOVERED for owner, _ in found),
                frozenset(each for each in found if each[0] >= 0),
            )
        out.append(known[key])
    return out


class Cover:
    """Of one save: latches that go down as its chunks are copied, and whether tensors have changed too early.

    Safe to use from any thread. No lock: a signal handler may wait for the event loop while the thread that it
    interrupts is in here.
    """

    def __init__(
        self,
        layout: Layout,
        snapshot: Snapshot,
        leaves: Sequence[Leaves],
        owners: Sequence[tuple[Any, ...]],
        at_hand: tuple[Leaves, list[torch.Tensor]] | None = None,
        aside: Aside | None = None,
    ) -> None:
        """leaves: of each owner, those that it covers; their tensors must not change before they are copied, or before
        their update is let through. owners: the guards that each of them stands for. at_hand: some leaves, maybe
        one of these, with their tensors. aside: what else of the save is in memory that it gives back."""
        self.urgent, self.owners = layout.urgent, owners
        self.latches = layout.latches()
        self._aside = aside
        self._layout, self._names = layout, snapshot.plan.structure.names
        known, tensors = at_hand or (None, [])
        self._watched = {
            owner: _Watched(mine, tensors if mine is known else mine.of(snapshot.tensors), snapshot.versions)
            for owner, mine in enumerate(leaves)
        }
        self._error: StepwellError | None = None

    @property
    def gatherings(self) -> Mapping[int, Gathering]:
        """GPU -> what is copied there by the save's mark."""
        return {} if self._aside is None else self._aside.gatherings

    def chunks(self, shard: int) -> list[ChunkCover]:
        """What waits for each chunk of a shard."""
        made: dict[tuple[bool, frozenset[Place]], ChunkCover] = {}
        return [made.get(each) or made.setdefault(each, self._chunk(*each)) for each in self._layout.chunks[shard]]

    def _chunk(self, urgent: bool, found: frozenset[Place]) -> ChunkCover:
        gpu: dict[int, tuple[Latch, ...]] = {}
        for owner, place in sorted(found):
            if place != HOST:
                gpu[place] = (*gpu.get(place, ()), self.latches[owner, place])
        host = tuple(self.latches[each] for each in sorted(found) if each[1] == HOST)
        return ChunkCover(urgent, host, gpu)

    def waits_for(self, owner: int) -> list[tuple[int, Latch]]:
        """The latches of an owner, each with its place."""
        return [(place, latch) for (each, place), latch in self.latches.items() if each == owner]

    def let_through(self, owner: int) -> None:
        """Looks, for the last time, whether its tensors are still those of the save: an update changes them now."""
        watched = self._watched.get(owner)
        if watched is not None:
            if (leaf := watched.changed()) is not None:
                self.spoil(_changed(self._names[leaf]))  # first: who finds nothing left to look at must find this
            self._watched.pop(owner, None)

    def spoil(self, why: StepwellError) -> None:
        """The snapshot is not to be used: what is copied from now on need not be the state of its save."""
        self._error = self._error or why

    def copied(self) -> StepwellError | None:
        """All is copied. Returns why the snapshot is not to be used, if so. For the event loop."""
        for owner in tuple(self._watched):
            watched = self._watched.get(owner)
            leaf = None if watched is None else watched.changed()
            # an update that was let through meanwhile has looked by itself, and may be what has changed it
            if self._watched.pop(owner, None) is not None and leaf is not None:
                self.spoil(_changed(self._names[leaf]))
        if self._aside is not None:  # of a save that has failed some may still be read: that memory serves no other
            self._aside.give_back()
            self._aside = None
        return self._error

    def end(self) -> None:
        """Nobody waits any more: all is copied, or the save has failed. Idempotent."""
        self._watched.clear()
        for latch in self.latches.values():
            latch.open()
        self._layout.make_ready()


class Leaves:
    """Some leaves of a plan."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = numbers
        self.places = np.array(numbers, np.intp)

    def of(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Theirs, of those of all leaves."""
        return picked(tensors, self.places)


class _Watched:
    """Tensors that one owner covers, with their versions at the save."""

    def __init__(self, leaves: Leaves, tensors: list[torch.Tensor], known: bytes | None) -> None:
        """known: the versions of all leaves of the plan, if they were told already."""
        self._leaves, self._tensors = leaves.numbers, tensors
        if known is None:
            self._versions = _versions(tensors)
        else:
            self._versions = np.frombuffer(known, np.int64)[leaves.places].tobytes()

    def changed(self) -> int | None:
        """A leaf that is not what it was; None if there is none."""
        now = _versions(self._tensors)
        if now == self._versions:
            return None
        then, later = (np.frombuffer(each, np.int64) for each in (self._versions, now))
        return self._leaves[int(np.flatnonzero(then != later)[0])]


def _versions(tensors: list[torch.Tensor]) -> bytes:
    try:
        return numbers(tensors, _VERSION)
    except RuntimeError:  # inference tensors count none
        counted = [0 if tensor.is_inference() else tensor._version for tensor in tensors]
        return np.array(counted, np.int64).tobytes()


def _changed(name: str) -> StateError:
    return StateError(
        "the tensor was changed after save() and before an update of its guard was announced, so the snapshot may hold "
        "a mix",
        key=name,
        todo="Call store.before_update() before such a change, or do not guard that tensor",
    )
