"""Which chunks go first when a tier needs room: LRU, and all built-in policies by name.

An eviction policy follows `stepwell.tiers.base.EvictionPolicy`: it ranks, and removes nothing itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from stepwell.policies.announced import Announced
from stepwell.policies.evict_cost import CostAware
from stepwell.policies.s3fifo import S3FIFO
from stepwell.tiers.base import Chunk, EvictionPolicy

__all__ = ["EVICTION", "LRU", "default_eviction"]


@dataclass(slots=True)
class _Resident:
    """What is here of one shard."""

    chunks: dict[int, Chunk] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)  # of those that are not set aside; rising, the tail at the end

    def take(self, index: int) -> None:
        """Out of the indices, if it is there."""
        if self.indices and self.indices[-1] == index:
            self.indices.pop()
            return
        place = bisect_left(self.indices, index)
        if place < len(self.indices) and self.indices[place] == index:
            del self.indices[place]


class LRU:
    """Least recently used shard first, and of a shard the tail first, so that the kept prefix stays useful.

    A use of any chunk is a use of its whole shard: a reader goes on to the others. So it is if nothing of a shard may
    go when its turn comes: it is being read or written, or waited for, and is not asked about again before all others
    were. A chunk is known by shard and index. Each call costs a dict access, and a binary search where a chunk is
    neither entered nor left at the tail.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self._shards: OrderedDict[Hashable, _Resident] = OrderedDict()  # least recently used first
        self._expected: set[tuple[Hashable, int]] = set()  # chunks that a state spoke of and that have not entered yet

    def __repr__(self) -> str:
        chunks = sum(len(resident.chunks) for resident in self._shards.values())
        return f"<LRU: {chunks} chunks of {len(self._shards)} shards, {self.resident_bytes} bytes>"

    def entered(self, chunk: Chunk) -> None:
        """A chunk has become resident. Entering again replaces what was known of it."""
        resident = self._shards.setdefault(chunk.shard, _Resident())
        before = resident.chunks.get(chunk.index)
        if before is None:
            insort(resident.indices, chunk.index)
        self.resident_bytes += chunk.size_bytes - (before.size_bytes if before else 0)
        resident.chunks[chunk.index] = chunk
        if (chunk.shard, chunk.index) in self._expected:
            self._expected.remove((chunk.shard, chunk.index))
        else:
            self._shards.move_to_end(chunk.shard)

    def used(self, chunk: Chunk) -> None:
        """A chunk was read. One that has left meanwhile is no error."""
        if chunk.shard in self._shards:
            self._shards.move_to_end(chunk.shard)

    def left(self, chunk: Chunk) -> None:
        """A chunk is gone. Idempotent."""
        resident = self._shards.get(chunk.shard)
        known = resident.chunks.pop(chunk.index, None) if resident else None
        if resident is None or known is None:
            return
        self.resident_bytes -= known.size_bytes
        resident.take(chunk.index)
        if not resident.chunks:
            del self._shards[chunk.shard]

    def set_aside(self, chunk: Chunk) -> None:
        """It is no victim until `bring_back`, and costs the search for others nothing."""
        resident = self._shards.get(chunk.shard)
        if resident is not None and chunk.index in resident.chunks:
            resident.take(chunk.index)

    def bring_back(self, chunk: Chunk) -> None:
        """It stands at its place in its shard again."""
        resident = self._shards.get(chunk.shard)
        if resident is not None and chunk.index in resident.chunks:
            resident.take(chunk.index)
            insort(resident.indices, chunk.index)

    def victims(self, needed_bytes: int, may_go: Callable[[Chunk], bool]) -> Iterator[Chunk]:
        """Chunks may enter, be used and leave while this runs: it goes on with what is still there, in the
        order that shards had at its start."""
        self._settle()
        found_bytes = 0
        for shard, resident in list(self._shards.items()):
            if found_bytes >= needed_bytes:
                return
            position, before_bytes = len(resident.indices), found_bytes
            while found_bytes < needed_bytes and position > 0:
                index = resident.indices[position - 1]
                chunk = resident.chunks[index]
                if may_go(chunk):
                    found_bytes += chunk.size_bytes
                    yield chunk
                position = bisect_left(resident.indices, index)
            if found_bytes == before_bytes and self._shards.get(shard) is resident:
                self._shards.move_to_end(shard)

    def state(self) -> Any:
        self._settle()
        named = ((shard, resident) for shard, resident in self._shards.items() if isinstance(shard, str))
        return {"policy": "lru", "shards": [[shard, sorted(resident.chunks)] for shard, resident in named]}

    def resume(self, state: Any) -> None:
        try:
            if state["policy"] != "lru":
                return
            chunks = [(str(shard), int(index)) for shard, indices in state["shards"] for index in indices]
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        self._expected.update(chunks)
        for shard, _ in chunks:
            self._shards.setdefault(shard, _Resident())

    def _settle(self) -> None:
        """What did not enter by now is not there any more."""
        if self._expected:
            for shard in {shard for shard, _ in self._expected}:
                resident = self._shards.get(shard)
                if resident is not None and not resident.chunks:
                    del self._shards[shard]
            self._expected.clear()


#: the built-in policies, by the names that the config file has for them; the first is the default
EVICTION: dict[str, Callable[[], EvictionPolicy]] = {"s3-fifo": S3FIFO, "lru": LRU, "cost-aware": CostAware}


def default_eviction() -> Announced:
    """What a store takes where nothing else is said."""
    return Announced(S3FIFO())
