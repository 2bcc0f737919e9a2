"""An eviction policy of a package of its own, for those who always open a checkpoint at its beginning."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import Any

from stepwell.tiers.base import Chunk


class FirstChunks:
    """The first `count` chunks of each shard go last; of all others, what entered first goes first."""

    def __init__(self, *, tier: str, count: int = 1) -> None:
        self.tier, self.count = tier, count
        self._here: dict[tuple[Hashable, int], Chunk] = {}

    def __repr__(self) -> str:
        return f"<FirstChunks on {self.tier}: {self.count} of each shard>"

    def entered(self, chunk: Chunk) -> None:
        self._here[chunk.shard, chunk.index] = chunk

    def used(self, chunk: Chunk) -> None:
        pass

    def left(self, chunk: Chunk) -> None:
        self._here.pop((chunk.shard, chunk.index), None)

    def victims(self, needed_bytes: int, may_go: Callable[[Chunk], bool]) -> Iterator[Chunk]:
        found_bytes = 0
        for chunk in sorted(self._here.values(), key=lambda chunk: chunk.index < self.count):  # stable
            if found_bytes >= needed_bytes:
                return
            if (chunk.shard, chunk.index) in self._here and may_go(chunk):
                found_bytes += chunk.size_bytes
                yield chunk

    def state(self) -> Any:
        return None  # what is there says it all

    def resume(self, state: Any) -> None:
        pass
