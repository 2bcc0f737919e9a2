"""Memory that has no bytes, and a copier that only takes time: what moves in the lab are sizes and moments."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from stepwell.native import AsyncEngine, Done, Job, PieceMap
from stepwell.ranges import Array
from stepwell.runtime import COPY_THREADS
from stepwell.state import Snapshot

#: in front of a shard's tensors
_HEADER = bytes(4096)
#: addresses begin where no real memory does
_FIRST_ADDRESS = 1 << 40


class Region:
    """Stands for `stepwell.native.Region`: addresses, and nothing behind them."""

    _next = _FIRST_ADDRESS

    def __init__(self, size: int) -> None:
        self.address, self.size = Region._next, size
        Region._next += -(-size // 4096) * 4096 + 4096

    def populate(self, offset: int, length: int) -> None:
        pass

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        raise AssertionError("the lab's memory has no bytes")

    def close(self) -> None:
        pass


class Copier:
    """Stands for the engine that copies and checksums: as many threads, which share `bytes_per_s`."""

    def __init__(self, bytes_per_s: float) -> None:
        self._thread_bytes_per_s = bytes_per_s / COPY_THREADS
        self._free_at = [0.0] * COPY_THREADS

    def start(self, jobs: Sequence[Job]) -> list[asyncio.Future[Done]]:
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Done]] = []
        for job in jobs:
            assert job.after is None, "the lab's tiers are not linked"
            future: asyncio.Future[Done] = loop.create_future()
            futures.append(future)
            parts = [job.length] if job.slots is None else np.diff(job.slots.offsets).tolist()  # a thread takes one
            loop.call_at(max(map(self._take, parts)), _end, job, future)
        return futures

    def _take(self, length: int) -> float:
        """When the thread that is free first will have copied so much."""
        thread = self._free_at.index(min(self._free_at))
        end = max(asyncio.get_running_loop().time(), self._free_at[thread]) + length / self._thread_bytes_per_s
        self._free_at[thread] = end
        return end

    async def run(self, jobs: Sequence[Job]) -> list[Done]:
        futures = self.start(jobs)
        if futures:
            await asyncio.wait(futures)
        return [future.result() for future in futures]

    def engine(self) -> AsyncEngine:
        """Itself, in the type that a runtime has."""
        return cast(AsyncEngine, self)


def _end(job: Job, future: asyncio.Future[Done]) -> None:
    if not future.done():
        future.set_result(Done(job, job.length, 0))


@dataclass(frozen=True, slots=True)
class _Plan:
    """What the writer asks of a shard's plan."""

    file: str
    size: int
    header: bytes = _HEADER
    leaves: np.ndarray[Any, np.dtype[np.uint32]] = field(default_factory=lambda: np.zeros(0, np.uint32))


class _NoBytes:
    """A shard's source, and where one is read to."""

    def pieces(self, start: int, stop: int) -> PieceMap:
        return NOWHERE

    def gpu_pieces(self, start: int, stop: int) -> list[tuple[int, PieceMap]]:
        return []

    def borders(self) -> tuple[Array, np.ndarray[Any, np.dtype[np.bool_]]]:
        raise AssertionError("nothing here is in a GPU's memory")

    def has_host_pieces(self, start: int, stop: int) -> bool:
        return True


#: memory that takes time to copy from and to
NOWHERE = cast(PieceMap, object())


@dataclass(frozen=True, slots=True)
class LabSnapshot:
    """A state that is only sizes: a shard for each part."""

    shards: list[_Plan]
    parts: dict[str, list[str]]
    part_bytes: dict[str, int]

    @property
    def nbytes(self) -> int:
        return sum(shard.size for shard in self.shards)

    def encoded_skeleton(self) -> bytes:
        return b"{}"

    def source(self, index: int) -> _NoBytes:
        return _NoBytes()

    def as_snapshot(self) -> Snapshot:
        return cast(Snapshot, self)


def snapshot_of(parts: Mapping[str, int], rank: int = 0, world: int = 1) -> LabSnapshot:
    """The state of one rank. parts: bytes by name. Names of files are those that a save gives."""
    ending = f".rank{rank:05d}-of-{world:05d}" if world > 1 else ""
    shards, files = [], {}
    for number, (part, size) in enumerate(parts.items()):
        clean = "".join(c if c.isalnum() or c in "-_." else "_" for c in part)[:96].lstrip(".") or "part"
        file = f"{clean}{f'-{number}' if clean != part else ''}{ending}.safetensors"
        shards.append(_Plan(file, max(1, size)))
        files[part] = [file]
    return LabSnapshot(shards, files, dict(parts))
