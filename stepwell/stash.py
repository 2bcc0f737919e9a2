"""What is put aside: small tensors that no guard covers are copied where they are, before save() returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from stepwell.native import Gathering
from stepwell.native._objects import put_together
from stepwell.state import Snapshot
from stepwell.state.alias import Array, Places
from stepwell.state.whereabouts import HOST

#: what is not covered is put aside if it is smaller, and all of it together is no more than that
STASH_BYTES, STASH_BYTES_MAX = 1 << 20, 64 << 20
#: a GPU's memory for copies is kept for later saves if it is no more; these follow each other, few are under way
KEPT_BYTES_MAX, _READY_MAX = 1 << 20, 2


class Stash:
    """Small tensors that no guard covers: their bytes are copied before save() returns, on GPUs in the order of the
    current stream. Made once for a plan and the addresses of its leaves."""

    def __init__(self, snapshot: Snapshot, uncovered: np.ndarray[Any, np.dtype[np.bool_]], places: Places) -> None:
        """Of each leaf: whether no guard covers it, and its GPU or HOST."""
        structure = snapshot.plan.structure
        sizes = structure.sizes.astype(np.intp)
        wanted = uncovered & (sizes > 0) & (sizes < STASH_BYTES)
        wanted[[leaf for leaf, _ in structure.lazy]] = False
        if int(sizes[wanted].sum()) > STASH_BYTES_MAX:
            wanted[:] = False
        self.leaves = np.flatnonzero(wanted)
        there = places[self.leaves]
        self._on_host = _Shelf(self.leaves[there == HOST], snapshot)
        gpus = np.unique(there[there != HOST]).tolist()
        self._on_gpus = {gpu: _Shelf(self.leaves[there == gpu], snapshot) for gpu in gpus}
        self._ready: list[Aside] = []  # shared by threads: taken and put one at a time

    def put_aside(self, snapshot: Snapshot) -> tuple[Snapshot, Aside | None]:
        """The snapshot, with these leaves' bytes in memory of its own; and what of it is still to be copied: by the
        marks of the save."""
        if not len(self.leaves):
            return snapshot, None
        addresses, kept, aside = snapshot.addresses, snapshot.storages, self._take()
        if aside is not None:
            addresses = aside.within(addresses)
            kept += aside.memory
        shelf = self._on_host
        if shelf.total:
            memory = torch.empty(shelf.total, dtype=torch.uint8)
            put_together(memory.data_ptr(), addresses[shelf.leaves], shelf.sizes)
            addresses = addresses.copy()
            addresses[shelf.leaves] = shelf.places_at(memory)
            kept.append(memory)
        return Snapshot(snapshot.plan, snapshot.tree, addresses, snapshot.tensors, kept, snapshot.live), aside

    def _take(self) -> Aside | None:
        try:
            return self._ready.pop()
        except IndexError:
            return Aside(self._on_gpus, self._ready) if self._on_gpus else None


class Aside:
    """Memory of GPUs for one save, and later for another one."""

    def __init__(self, shelves: Mapping[int, _Shelf], ready: list[Aside]) -> None:
        """shelves: of each GPU. ready: where it goes once its save needs it no more."""
        made = {gpu: torch.empty(each.total, dtype=torch.uint8, device=each.device) for gpu, each in shelves.items()}
        self.memory = list(made.values())
        #: GPU -> what the save's mark copies there
        self.gatherings = {gpu: each.gathering(made[gpu]) for gpu, each in shelves.items()}
        self._leaves = np.concatenate([each.leaves for each in shelves.values()])
        self._places = np.concatenate([each.places_at(made[gpu]) for gpu, each in shelves.items()])
        self._ready = ready
        self._seen: tuple[Array | None, Array] = (None, self._places)  # what `within` was given last, and gave

    def within(self, addresses: Array) -> Array:
        """The addresses of all leaves of the plan, with those of its own leaves here. Not to be changed."""
        seen, here = self._seen
        if seen is not addresses:
            here = addresses.copy()
            here[self._leaves] = self._places
            self._seen = addresses, here
        return here

    def give_back(self) -> None:
        """All that its save needed of it has been read."""
        if len(self._ready) < _READY_MAX and sum(memory.nbytes for memory in self.memory) <= KEPT_BYTES_MAX:
            self._ready.append(self)


class _Shelf:
    """Where in one piece of memory each of some leaves lies, one behind the other."""

    def __init__(self, leaves: Places, snapshot: Snapshot) -> None:
        self.leaves = leaves
        self.sizes = snapshot.plan.structure.sizes[leaves].astype(np.uint64)
        self.total = int(self.sizes.sum())
        self.device = snapshot.tensors[int(leaves[0])].device if len(leaves) else None
        self._begins = snapshot.addresses[leaves]
        self._offsets = np.cumsum(self.sizes) - self.sizes

    def places_at(self, memory: torch.Tensor) -> Array:
        return self._offsets + np.uint64(memory.data_ptr())

    def gathering(self, memory: torch.Tensor) -> Gathering:
        return Gathering(memory.data_ptr(), self._begins, self.sizes)
