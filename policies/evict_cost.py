"""Cost-aware eviction: what is cheap to fetch again and seldom used leaves memory first."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

from stepwell.policies.s3fifo import GHOSTS_MAX, SAME_USE_SHARE, Key, by_shard, of_shards
from stepwell.tiers.base import Chunk

__all__ = ["CostAware"]

#: what fetching a byte again takes where nobody has measured it: a second for each GB, as a busy disk
FETCH_S_PER_BYTE = 1e-9


@dataclass(slots=True, eq=False)
class _Item:
    """One chunk. chunk: None while it is only known from a state."""

    uses: int
    chunk: Chunk | None = None
    fetch_s: float = 0.0  # as measured when it came; an adopted chunk is not measured again
    touched: int = 0  # when it was used or entered, by the bytes that were touched in all
    listed: float | None = None  # its worth, if it stands in its shard's list
    chosen: float | None = None  # named as a victim at that rank, and not used since
    aside: bool = False

    @property
    def worth(self) -> float:
        """Uses times what a byte of it costs to fetch: GreedyDual-Size-Frequency's F × C / S."""
        assert self.chunk is not None
        size_bytes = max(1, self.chunk.size_bytes)
        return self.uses * (self.fetch_s / size_bytes if self.fetch_s > 0 else FETCH_S_PER_BYTE)


@dataclass(slots=True, eq=False)
class _Shard:
    """The chunks of one shard. It was touched when the clock stood at `base`."""

    number: int  # decides between shards of the same rank: the older one first
    base: float
    items: dict[int, _Item] = field(default_factory=dict)
    order: list[tuple[float, int]] = field(default_factory=list)  # (-worth, index), rising: who goes first is last
    queued: float | None = None  # the rank at which it stands in the heap; its true one is not lower

    @property
    def rank(self) -> float:
        return self.base - self.order[-1][0]

    def put(self, index: int) -> None:
        item = self.items[index]
        if not item.aside:
            item.listed = item.worth
            insort(self.order, (-item.listed, index))

    def take(self, index: int) -> None:
        item = self.items[index]
        if item.listed is not None:
            del self.order[bisect_left(self.order, (-item.listed, index))]
            item.listed = None


class CostAware:
    """GreedyDual-Size-Frequency by Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency
    caching policy" (HP Labs 1998), chunk by chunk: the lowest rank goes first, and rank = clock + uses × seconds to
    fetch it again ÷ bytes. The clock is the rank of what went last, so that old uses lose weight.

    The clock counts as it was when any chunk of the shard was touched, since a reader goes on to the others. Of equal
    chunks of a shard the tail goes first. The uses of what was evicted are remembered as long as the bytes of that are
    not more than what is resident. What does not go when its turn comes counts as touched, and uses that follow each
    other closely count as one.

    A chunk is known by shard and index. A call costs a few binary searches.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self._clock = 0.0
        self._touched_bytes = 0
        self._room_bytes = 0  # what there was room for when it was last asked for
        self._numbers = 0
        self._shards: dict[Hashable, _Shard] = {}
        self._heap: list[tuple[float, int, Hashable]] = []  # (rank, number, shard); old entries stay until they come up
        self._ghosts: OrderedDict[Key, tuple[int, int]] = OrderedDict()  # uses and size, the oldest first
        self._ghost_bytes = 0
        self._resumed = False  # there may be items that a state spoke of and that have not entered yet

    def __repr__(self) -> str:
        chunks = sum(len(shard.items) for shard in self._shards.values())
        return f"<CostAware: {chunks} chunks of {self.resident_bytes} bytes, clock {self._clock:.3g}>"

    def entered(self, chunk: Chunk) -> None:
        """A chunk has become resident. Entering again replaces what was known of its size and cost."""
        self._touched_bytes += chunk.size_bytes
        shard = self._shard(chunk.shard)
        item = shard.items.get(chunk.index)
        if item is None:
            uses, ghost_bytes = self._ghosts.pop((chunk.shard, chunk.index), (0, 0))
            self._ghost_bytes -= ghost_bytes
            item = shard.items[chunk.index] = _Item(uses + 1, touched=self._touched_bytes)
            shard.base = self._clock
        shard.take(chunk.index)
        self.resident_bytes += chunk.size_bytes - (item.chunk.size_bytes if item.chunk else 0)
        item.chunk, item.fetch_s = chunk, chunk.fetch_s or item.fetch_s
        self._put(chunk.shard, chunk.index)

    def _shard(self, name: Hashable) -> _Shard:
        shard = self._shards.get(name)
        if shard is None:
            self._numbers += 1
            shard = self._shards[name] = _Shard(self._numbers, self._clock)
        return shard

    def _put(self, name: Hashable, index: int) -> None:
        shard = self._shards[name]
        shard.put(index)
        if shard.order and (shard.queued is None or shard.rank < shard.queued):
            shard.queued = shard.rank
            heapq.heappush(self._heap, (shard.rank, shard.number, name))

    def used(self, chunk: Chunk) -> None:
        """A chunk was read. One that has left meanwhile is no error."""
        shard, item = self._known(chunk)
        if shard is None or item is None or item.chunk is None:
            return
        self._touched_bytes += item.chunk.size_bytes
        shard.base, item.chosen = self._clock, None
        if self._touched_bytes - item.touched >= SAME_USE_SHARE * self._room_bytes:
            item.touched, item.uses = self._touched_bytes, item.uses + 1
            if item.listed is not None:
                shard.take(chunk.index)
                self._put(chunk.shard, chunk.index)

    def _known(self, chunk: Chunk) -> tuple[_Shard | None, _Item | None]:
        shard = self._shards.get(chunk.shard)
        return shard, shard.items.get(chunk.index) if shard else None

    def left(self, chunk: Chunk) -> None:
        """A chunk is gone. Idempotent."""
        shard, item = self._known(chunk)
        if shard is None or item is None:
            return
        shard.take(chunk.index)
        del shard.items[chunk.index]
        if not shard.items:
            del self._shards[chunk.shard]
        size_bytes = item.chunk.size_bytes if item.chunk else 0
        self.resident_bytes -= size_bytes
        if item.chosen is not None:
            self._clock = max(self._clock, item.chosen)
            self._ghost_bytes += size_bytes - self._ghosts.pop((chunk.shard, chunk.index), (0, 0))[1]
            self._ghosts[chunk.shard, chunk.index] = item.uses, size_bytes
            while self._ghost_bytes > self._room_bytes or len(self._ghosts) > GHOSTS_MAX:
                self._ghost_bytes -= self._ghosts.popitem(last=False)[1][1]

    def set_aside(self, chunk: Chunk) -> None:
        """It is no victim until `bring_back`, and costs the search for others nothing."""
        shard, item = self._known(chunk)
        if shard is not None and item is not None:
            shard.take(chunk.index)
            item.aside = True

    def bring_back(self, chunk: Chunk) -> None:
        """It has its rank again, as if it was touched now."""
        shard, item = self._known(chunk)
        if shard is not None and item is not None and item.aside:
            item.aside, shard.base = False, self._clock
            self._put(chunk.shard, chunk.index)

    def victims(self, needed_bytes: int, may_go: Callable[[Chunk], bool]) -> Iterator[Chunk]:
        """As the protocol says. Each step looks at the ranks as they are then."""
        self._settle()
        self._room_bytes = self.resident_bytes
        found_bytes = 0
        asked: list[tuple[Hashable, int, _Item]] = []  # they stand in no list until this ends
        keys: set[Key] = set()
        try:
            while found_bytes < needed_bytes and (name := self._lowest()) is not None:
                shard = self._shards[name]
                index, rank = shard.order[-1][1], shard.rank
                item = shard.items[index]
                shard.take(index)
                asked.append((name, index, item))
                assert item.chunk is not None
                if (name, index) in keys:  # it left meanwhile, and entered again
                    continue
                keys.add((name, index))
                item.chosen = None
                if may_go(item.chunk):
                    found_bytes += item.chunk.size_bytes
                    item.chosen = rank
                    yield item.chunk
        finally:
            for name, index, item in asked:
                if name in self._shards and self._shards[name].items.get(index) is item:
                    if item.chosen is None:
                        self._shards[name].base = self._clock
                    self._shards[name].take(index)
                    self._put(name, index)

    def _lowest(self) -> Hashable | None:
        """The shard whose next chunk ranks lowest, of those that have one in their list."""
        while self._heap:
            rank, number, name = self._heap[0]
            shard = self._shards.get(name)
            if shard is None or shard.number != number or shard.queued != rank:
                heapq.heappop(self._heap)
            elif not shard.order:
                heapq.heappop(self._heap)
                shard.queued = None
            elif shard.rank > rank:
                shard.queued = shard.rank
                heapq.heapreplace(self._heap, (shard.rank, number, name))
            else:
                return name
        return None

    # -- beyond a restart ----------------------------------------------------------------

    def state(self) -> Any:
        self._settle()
        return {
            "policy": "cost-aware",
            "clock": self._clock,
            "room_bytes": self._room_bytes,
            "shards": [
                [name, shard.base, [[index, item.uses, item.fetch_s] for index, item in shard.items.items()]]
                for name, shard in self._shards.items()
                if isinstance(name, str)
            ],
            "ghosts": by_shard(self._ghosts),
        }

    def resume(self, state: Any) -> None:
        fresh = CostAware()
        try:
            if state["policy"] == "cost-aware":
                fresh._read(state)
                vars(self).update(vars(fresh))
        except (KeyError, TypeError, ValueError, OverflowError):
            return

    def _read(self, state: Any) -> None:
        self._clock = _finite(state["clock"])
        for name, base, items in state["shards"]:
            shard = self._shard(str(name))
            shard.base = _finite(base)
            for index, uses, fetch_s in items:
                shard.items[int(index)] = _Item(max(1, int(uses)), fetch_s=max(0.0, _finite(fetch_s)))
        for key, (uses, size_bytes) in of_shards(state["ghosts"]):
            self._ghosts[key] = int(uses), max(0, int(size_bytes))
        self._ghost_bytes = sum(size_bytes for _, size_bytes in self._ghosts.values())
        self._room_bytes = max(0, int(state["room_bytes"]))
        self._resumed = True

    def _settle(self) -> None:
        """What did not enter by now is not there any more."""
        if self._resumed:
            self._resumed = False
            for name, shard in list(self._shards.items()):
                shard.items = {index: item for index, item in shard.items.items() if item.chunk is not None}
                if not shard.items:
                    del self._shards[name]


def _finite(value: Any) -> float:
    """A number that can be compared with others; else ValueError."""
    number = float(value)
    if not math.isfinite(number):
        raise ValueError
    return number
