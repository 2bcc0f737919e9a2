"""Which chunks go first when a tier needs room.

An eviction policy follows `stepwell.tiers.base.EvictionPolicy`: it ranks, and removes nothing itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from stepwell.tiers.base import Chunk

__all__ = ["LRU"]


@dataclass(slots=True)
class _Resident:
    """What is here of one shard."""

    chunks: dict[int, Chunk] = field(default_factory=dict)
    indices: list[int] = field(default_factory=list)  # the same, rising: the tail is at the end


class LRU:
    """Least recently used shard first, and of a shard the tail first, so that the kept prefix stays useful.

    A use of any chunk is a use of its whole shard: a reader goes on to the others. A chunk is known by shard
    and index. Each call costs a dict access, and a binary search where a chunk is neither entered nor left at
    the tail.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self._shards: OrderedDict[Hashable, _Resident] = OrderedDict()  # least recently used first

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
        if resident.indices[-1] == chunk.index:
            resident.indices.pop()
        else:
            del resident.indices[bisect_left(resident.indices, chunk.index)]
        if not resident.chunks:
            del self._shards[chunk.shard]

    def victims(self, needed_bytes: int, may_go: Callable[[Chunk], bool]) -> Iterator[Chunk]:
        """Chunks may enter, be used and leave while this runs: it goes on with what is still there, in the
        order that shards had at its start."""
        found_bytes = 0
        for resident in list(self._shards.values()):
            position = len(resident.indices)
            while found_bytes < needed_bytes and position > 0:
                index = resident.indices[position - 1]
                chunk = resident.chunks[index]
                if may_go(chunk):
                    found_bytes += chunk.size_bytes
                    yield chunk
                position = bisect_left(resident.indices, index)
            if found_bytes >= needed_bytes:
                return
