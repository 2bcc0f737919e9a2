"""A shard's bytes as pieces of memory, made contiguous range by range where tensors are not.

Pieces of contiguous tensors in host memory or a GPU's are those tensors' own memory: nothing is copied here. All
others (strided, conjugated, on another device) are holes in the shared maps; `pieces` brings only the rows that a
range touches, so that memory stays bounded however large the tensor is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch

from stepwell.native import PieceMap
from stepwell.state.alias import Array
from stepwell.state.dtypes import RAW
from stepwell.state.plan import ShardPlan

#: rows are brought in blocks of at least one row of at most this size, where the shape allows
_BLOCK_BYTES = 1 << 20


class ShardSource:
    """The bytes of one shard of one snapshot. Holds the tensors for as long as it lives."""

    def __init__(
        self, plan: ShardPlan, addresses: Array, tensors: Sequence[torch.Tensor], storages: Sequence[object] = ()
    ) -> None:
        self.plan = plan
        self._tensors = tensors
        self._keep = (plan, tensors, storages)
        header = np.frombuffer(plan.header, np.uint8)
        own = np.empty(len(plan.leaves) + 1, dtype=np.uint64)
        own[0] = header.ctypes.data
        own[1:] = addresses[plan.leaves]
        own[plan.lazy] = 0
        self._on_gpus = own[plan.device]
        own[plan.device] = 0
        self._map = PieceMap(plan.offsets, own, keep=self._keep)
        self._addresses = own

    def pieces(self, start: int, stop: int) -> PieceMap:
        """A map that covers at least [start, stop) of the file, with holes only where `gpu_pieces` has the bytes.

        The shared map of the whole shard if that range is contiguous memory; else a new one, which owns what
        it had to copy. Callable from any thread.
        """
        self._require(start, stop)
        kinds = self.plan.kinds(start, stop)
        if not kinds.lazy:
            return self._map
        return self._materialise(kinds.pieces.start, kinds.pieces.stop, start, stop, kinds.lazy)

    def gpu_pieces(self, start: int, stop: int) -> list[tuple[int, PieceMap]]:
        """For each GPU that holds bytes of [start, stop): its index, and a map of the whole file in which its memory
        is there and all else is a hole. Callable from any thread."""
        self._require(start, stop)
        gpus = self.plan.kinds(start, stop).gpus
        return [(gpu, self._gpu_maps[gpu]) for gpu in gpus]

    def borders(self) -> tuple[Array, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Where each piece of the file begins, with the end of the last one, and whether it is in a GPU's memory."""
        on_gpu = np.zeros(len(self._addresses), np.bool_)
        on_gpu[self.plan.device] = True
        return self.plan.offsets, on_gpu

    def has_host_pieces(self, start: int, stop: int) -> bool:
        """Whether any byte of [start, stop) is not in a GPU's memory."""
        self._require(start, stop)
        return self.plan.kinds(start, stop).on_host

    def _require(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.plan.size:
            raise ValueError(f"[{start}, {stop}) is not inside {self.plan.file} ({self.plan.size} bytes)")

    @cached_property
    def _gpu_maps(self) -> dict[int, PieceMap]:
        maps: dict[int, PieceMap] = {}
        for gpu in np.unique(self.plan.gpus).tolist():
            here = self.plan.gpus == gpu
            addresses = np.zeros(len(self._addresses), np.uint64)
            addresses[self.plan.device[here]] = self._on_gpus[here]
            maps[gpu] = PieceMap(self.plan.offsets, addresses, keep=self._keep)
        return maps

    def _materialise(self, begin: int, end: int, start: int, stop: int, lazy: frozenset[int]) -> PieceMap:
        """A map of the whole file in which only pieces [begin, end) are memory."""
        offsets = [0]
        addresses: list[int] = []
        if begin > 0:
            offsets.append(int(self.plan.offsets[begin]))
            addresses.append(0)
        keep: list[Any] = [*self._keep]
        for piece in range(begin, end):
            base = int(self.plan.offsets[piece])
            piece_end = int(self.plan.offsets[piece + 1])
            if piece not in lazy:
                offsets.append(piece_end)
                addresses.append(int(self._addresses[piece]))
                continue
            tensor = self._tensors[self.plan.leaves[piece - 1]]
            for at, block in blocks(tensor, max(start - base, 0), min(stop, piece_end) - base):
                if base + at > offsets[-1]:
                    offsets.append(base + at)
                    addresses.append(0)
                offsets.append(base + at + block.nbytes)
                addresses.append(block.data_ptr())
                keep.append(block)
            if offsets[-1] < piece_end:
                offsets.append(piece_end)
                addresses.append(0)
        if offsets[-1] < self.plan.size:
            offsets.append(self.plan.size)
            addresses.append(0)
        return PieceMap(np.array(offsets, np.uint64), np.array(addresses, np.uint64), keep=keep)


def blocks(tensor: torch.Tensor, start: int, stop: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Contiguous CPU copies of the parts of a tensor that hold bytes [start, stop) of its row-major data.

    Yields (offset in bytes, block), in order and without gaps in between; blocks are cut at rows, so they may
    reach a little beyond the range.
    """
    with torch.no_grad():
        tensor = tensor.detach()
        if not tensor.dim():
            yield 0, _raw(tensor.reshape(1))
            return
        axis = 0
        while axis + 1 < tensor.dim() and prod(tensor.shape[axis + 1 :]) * tensor.itemsize > _BLOCK_BYTES:
            axis += 1
        row = prod(tensor.shape[axis + 1 :]) * tensor.itemsize
        outer = row * tensor.shape[axis]
        for number in range(start // outer, -(-stop // outer)):
            part = tensor
            for size, index in _unravel(number, tensor.shape[:axis]):
                assert index < size
                part = part[index]
            base = number * outer
            first = max(start - base, 0) // row
            last = min(-(-(stop - base) // row), tensor.shape[axis])
            yield base + first * row, _raw(part[first:last])


def _unravel(number: int, shape: Sequence[int]) -> list[tuple[int, int]]:
    """(size, index) of each axis for the number-th element of a shape."""
    out: list[tuple[int, int]] = []
    for size in reversed(shape):
        number, index = divmod(number, size)
        out.append((size, index))
    return out[::-1]


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The values, contiguous in CPU memory, as a dtype that torch moves bit for bit."""
    if tensor.is_neg() or tensor.is_conj():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.view(RAW[tensor.itemsize]).contiguous().cpu()


def clone(tensor: torch.Tensor) -> torch.Tensor:
    """The values in new contiguous memory of the same device, bit for bit, in the order of its current stream."""
    with torch.no_grad():
        tensor = tensor.detach()
        if tensor.is_neg() or tensor.is_conj():
            tensor = tensor.resolve_conj().resolve_neg()
        raw = tensor.view(RAW[tensor.itemsize])
        return raw.clone(memory_format=torch.contiguous_format)
