"""A shard on its way from the state: where its bytes are, and who waits until they are copied."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from stepwell.native import BLOCK_BYTES, Done, Latch, Mark, PieceMap, Ticket
from stepwell.ranges import Array
from stepwell.reading import Crcs
from stepwell.tiers.base import ShardKey


@dataclass(frozen=True, slots=True)
class ChunkCover:
    """What waits for one chunk. urgent: save() does."""

    urgent: bool = True
    host: tuple[Latch, ...] = ()  # go down once the chunk's bytes in host memory are copied
    gpu: Mapping[int, tuple[Latch, ...]] = field(default_factory=dict)  # once copies from that GPU are under way


UNGUARDED = ChunkCover()


class Source(Protocol):
    """Where a shard's bytes come from: the state's memory."""

    def pieces(self, start: int, stop: int) -> PieceMap:
        """Those in host memory; all else is a hole."""

    def gpu_pieces(self, start: int, stop: int) -> Sequence[tuple[int, PieceMap]]:
        """Those in GPUs' memory, of each GPU that has any."""

    def has_host_pieces(self, start: int, stop: int) -> bool: ...

    def borders(self) -> tuple[Array, np.ndarray[Any, np.dtype[np.bool_]]]:
        """Where each piece begins, with the end of the last one, and whether it is in a GPU's memory."""


class Packed(Protocol):
    """A shard whose bytes are being copied within their GPU's memory, or some of them."""

    map: PieceMap  # of the file, in the copy; holes where there is none
    header_bytes: int  # the file's first ones, which are no state
    ticket: Ticket  # done once the tensors of the GPU are copied
    packed: asyncio.Future[Done] | None  # the same; None: there are none
    stays: bool  # it is to have what comes from host memory, too
    broken: bool  # `mirror` has failed

    def has(self, start: int, stop: int) -> bool:
        """Whether bytes [start, stop) of the file are in the copy."""

    def mirror(self, address: int, start: int, length: int) -> asyncio.Future[Done]:
        """Adds what of these bytes came from host memory, from `address`, where all of them are."""


@dataclass(slots=True)
class ShardJob:
    """A shard on its way from the state to a tier. `crcs` is filled as its blocks are copied."""

    key: ShardKey
    size: int
    source: Source
    cover: Sequence[ChunkCover] | None = None  # of each chunk; None: the caller of save() waits for all
    marks: Mapping[int, Mark] = field(default_factory=dict)  # of each GPU: copies from there come after it
    packed: Packed | None = None  # chunks come from there as far as it has them
    crcs: Crcs = field(init=False)

    def __post_init__(self) -> None:
        self.crcs = np.zeros(-(-self.size // BLOCK_BYTES), np.uint32)
