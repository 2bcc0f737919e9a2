"""What is put aside: small tensors that no guard covers are copied where they are, before save() returns."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stepwell.native import Copies
from stepwell.native._objects import put_together
from stepwell.state import Snapshot
from stepwell.state.alias import Array, Places
from stepwell.state.whereabouts import HOST

#: what is not covered is put aside if it is smaller, and all of it together is no more than that
STASH_BYTES, STASH_BYTES_MAX = 1 << 20, 64 << 20
#: tensors on a GPU that are copied together as numbers, not one by one
TINY_BYTES = 64
#: where they lie in few stretches of memory that are short together, these are copied, with all that lies between
STRETCHES_MAX, STRETCHES_BYTES_MAX = 4, 1 << 20
#: how much memory for copies is kept for later saves; these follow each other, few are under way at once
_READY_MAX = 2
Stretch = tuple[int, int]  # begin and end of memory


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
        there, tiny = places[self.leaves], sizes[self.leaves] <= TINY_BYTES
        self._on_host = _Shelf(self.leaves[there == HOST], sizes)
        self._on_gpu: list[tuple[_Shelf, Callable[[], list[torch.Tensor]]]] = []
        self._near: list[_Near] = []
        self._ready: list[Aside] = []  # shared by threads: taken and put one at a time
        for gpu in np.unique(there[there != HOST]).tolist():
            shelf = _Shelf(self.leaves[(there == gpu) & tiny], sizes)
            near = _near(snapshot, shelf, gpu) if shelf.total else None
            if near is not None:
                self._near.append(near)
            elif shelf.total:
                self._on_gpu.append((shelf, _numbers_of(snapshot, shelf)))
            shelf = _Shelf(self.leaves[(there == gpu) & ~tiny], sizes)
            if shelf.total:
                self._on_gpu.append((shelf, _bytes_of(snapshot, shelf)))

    def put_aside(self, snapshot: Snapshot) -> tuple[Snapshot, Aside | None]:
        """The snapshot, with these leaves' bytes in memory of its own; and what of it is still to be copied: by the
        marks of the save."""
        if not len(self.leaves):
            return snapshot, None
        addresses, kept, aside = snapshot.addresses, snapshot.storages, self._take()
        if aside is not None:
            addresses = aside.within(addresses)
            kept += aside.memory
        if self._on_host.total or self._on_gpu:
            addresses = addresses.copy()
        shelf = self._on_host
        if shelf.total:
            memory = torch.empty(shelf.total, dtype=torch.uint8)
            put_together(memory.data_ptr(), addresses[shelf.leaves], shelf.sizes)
            addresses[shelf.leaves] = shelf.offsets + memory.data_ptr()
            kept.append(memory)
        for shelf, copied in self._on_gpu:
            made = copied()
            addresses[shelf.leaves] = shelf.offsets + made[0].data_ptr()
            kept += made
        return Snapshot(snapshot.plan, snapshot.tree, addresses, snapshot.tensors, kept, snapshot.live), aside

    def _take(self) -> Aside | None:
        try:
            return self._ready.pop()
        except IndexError:
            return Aside(self._near, self._ready) if self._near else None


class Aside:
    """Memory of GPUs for one save, and later for another one."""

    def __init__(self, near: Sequence[_Near], ready: list[Aside]) -> None:
        """ready: where it goes once its save needs it no more."""
        self.memory = [torch.empty(each.total, dtype=torch.uint8, device=each.device) for each in near]
        pairs = [(each, memory.data_ptr()) for each, memory in zip(near, self.memory, strict=True)]
        self.copies = {each.gpu: each.copies_to(address) for each, address in pairs}
        self._leaves = np.concatenate([each.leaves for each in near])
        self._places = np.concatenate([each.offsets + np.uint64(address) for each, address in pairs])
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
        if len(self._ready) < _READY_MAX:
            self._ready.append(self)


class _Shelf:
    """Where in one piece of memory each of some leaves lies, one behind the other."""

    def __init__(self, leaves: Places, sizes: Places) -> None:
        self.leaves, self.sizes = leaves, sizes[leaves].astype(np.uint64)
        self.offsets = np.cumsum(self.sizes) - self.sizes
        self.total = int(self.sizes.sum())


@dataclass(frozen=True)
class _Near:
    """Tiny leaves of a GPU that lie near each other: one behind the other, the stretches around them make a copy."""

    gpu: int
    device: torch.device
    leaves: Places
    offsets: Array  # of each leaf, in the copy
    stretches: list[Stretch]
    total: int

    def copies_to(self, address: int) -> Copies:
        made = []
        for begin, end in self.stretches:
            made.append((address, begin, end - begin))
            address += end - begin
        return Copies(made)


def _near(snapshot: Snapshot, shelf: _Shelf, gpu: int) -> _Near | None:
    """None if they do not, or if nobody can tell what else lies there. An optimizer keeps a number for each parameter;
    torch puts all of them into one segment, if they are made one after the other."""
    begins = snapshot.addresses[shelf.leaves]
    ends = begins + shelf.sizes
    segments = np.array(sorted(segments_of(gpu)), np.uint64).reshape(-1, 2)
    mine = np.searchsorted(segments[:, 0], begins, side="right") - 1
    if not segments.size or mine.min() < 0 or (ends > segments[mine, 1]).any():
        return None
    stretches: list[Stretch] = []
    offsets, total = np.empty_like(begins), 0
    for segment in np.unique(mine):
        inside = mine == segment
        begin, end = int(begins[inside].min()), int(ends[inside].max())
        stretches.append((begin, end))
        offsets[inside] = begins[inside] - np.uint64(begin) + np.uint64(total)
        total += end - begin
    if len(stretches) > STRETCHES_MAX or total > STRETCHES_BYTES_MAX:
        return None
    device = snapshot.tensors[int(shelf.leaves[0])].device
    return _Near(gpu, device, shelf.leaves, offsets, stretches, total)


def segments_of(gpu: int) -> list[Stretch]:
    """Memory of a GPU, each stretch of which is there as long as any tensor in it: what torch has allocated at once.
    Not what it maps piece by piece (expandable segments): it may take a piece away again. Empty if it does not tell."""
    try:
        segments = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):  # another allocator is in its place
        return []
    return [
        (segment["address"], segment["address"] + segment["total_size"])
        for segment in segments
        if segment["device"] == gpu and not segment.get("is_expandable", True)
    ]


def _bytes_of(snapshot: Snapshot, shelf: _Shelf) -> Callable[[], list[torch.Tensor]]:
    """What copies the leaves of a GPU behind each other; gives the copy, and what it needs until it is made."""
    mine = [snapshot.tensors[leaf] for leaf in shelf.leaves.tolist()]
    flat = [each.detach().reshape(-1).view(torch.uint8) for each in mine]
    return lambda: [torch.cat(flat)]


def _numbers_of(snapshot: Snapshot, shelf: _Shelf) -> Callable[[], list[torch.Tensor]]:
    """The same for tiny ones that do not lie near each other. `cat` looks at one after the other, so they are taken at
    once from a view of all memory between the first and the last; nothing else there is read."""
    places, sizes = snapshot.addresses[shelf.leaves].astype(np.int64), shelf.sizes.astype(np.int64)
    first = int(places.min())
    sample = snapshot.tensors[int(shelf.leaves[0])]
    between = _memory_at(first, int((places + sizes).max()) - first, sample)
    inside = np.repeat(places - first - shelf.offsets.astype(np.int64), sizes) + np.arange(shelf.total)
    wanted = torch.from_numpy(inside).to(sample.device)
    return lambda: [torch.take(between, wanted), wanted]


def _memory_at(address: int, size: int, like: torch.Tensor) -> torch.Tensor:
    """Memory of the device that a tensor is on, as it is; owns nothing of it."""
    if not like.is_cuda:
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)
    return torch.as_tensor(_OnGpu(address, size), device=like.device)


class _OnGpu:
    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}
