"""What is read, for whom: one shard's bytes, from the tiers that hold it, and what became of that."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stepwell.edges import STATE
from stepwell.native import BLOCK_BYTES, Mark, PieceMap
from stepwell.tiers.base import ShardKey, Tier
from stepwell.tiers.host import Priority

Crcs = np.ndarray[Any, np.dtype[np.uint32]]


@dataclass(slots=True)
class Healing:
    """What a read found bad, and where it got the bytes instead."""

    bad: dict[tuple[str, ShardKey], str] = field(default_factory=dict)  # (tier, shard) -> what was wrong
    unread: set[tuple[str, ShardKey]] = field(default_factory=set)  # of these, where a read may work later
    read_bytes: dict[str, int] = field(default_factory=dict)  # tier -> bytes that came from it

    def took(self, tier: str, size_bytes: int) -> None:
        self.read_bytes[tier] = self.read_bytes.get(tier, 0) + size_bytes


@dataclass(slots=True)
class Caller:
    """Who reads. Once it is gone, reads that it has left behind put nothing into its memory any more."""

    gone: bool = False
    _running: set[asyncio.Task[None]] = field(default_factory=set)

    def note(self, task: asyncio.Task[None]) -> None:
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def settled(self) -> None:
        """Returns once none of its reads is on its way. What others do with the same shards is not waited for."""
        while self._running:
            await asyncio.wait(self._running)


@dataclass(frozen=True, slots=True)
class Reading:
    """What to read of one shard: from where, against which checksums, for whom."""

    key: ShardKey
    tiers: Sequence[Tier]  # nearest first; all that hold it
    crcs: Crcs | None  # of every block of the shard; None where there are none
    healing: Healing
    priority: Priority
    pieces: PieceMap | None = None  # where in host memory the bytes go; None: nowhere
    gpu_pieces: Sequence[tuple[int, PieceMap]] = ()  # where in GPUs' memory they go: each GPU with its map
    marks: Mapping[int, Mark] = field(default_factory=dict)  # of each GPU: copies to it come after that
    target: str = STATE  # the end of the edge
    write_limit: float | None = None  # of all writing there, in bytes a second; None: what limits is the reading
    cached_as: Hashable = None  # how the arena knows the shard; None: by its key
    caller: Caller = field(default_factory=Caller)
    size: int = 0  # bytes of the shard, if chunks of it are to stay
    stays: bool = False  # whether whole chunks that are read stay in the arena, where there is room for them
    from_memory: bool = True  # whether what the arena holds serves; False: the tiers themselves are looked at

    @property
    def known_as(self) -> Hashable:
        return self.key if self.cached_as is None else self.cached_as

    @property
    def delivers(self) -> bool:
        """Whether the bytes go to memory of the caller's; else they are only verified, or kept."""
        return self.pieces is not None or bool(self.gpu_pieces)

    def first(self, host: Tier | None) -> Tier | None:
        """Where bytes come from that are not in the arena."""
        return next((tier for tier in self.tiers if tier is not host), None)

    def crcs_of(self, start: int, length: int) -> Crcs | None:
        return None if self.crcs is None else self.crcs[start // BLOCK_BYTES : -(-(start + length) // BLOCK_BYTES)]
