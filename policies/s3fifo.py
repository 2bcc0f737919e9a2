"""S3-FIFO, chunk by chunk and in bytes: the default of what leaves memory first."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from stepwell.tiers.base import Chunk, untracked

__all__ = ["S3FIFO"]

#: of what is resident, the part that new chunks pass through, as in the paper
SMALL_SHARE = 0.1
#: uses in the small queue that bring a chunk to the main one, where the paper has 2; and the most that are counted
USES_TO_STAY, USES_MAX = 1, 3
#: a chunk is used once, however often it is touched, until so much of what is resident was touched otherwise: one
#: restore may lease it, and read it in several pieces
SAME_USE_SHARE = 0.01
#: the most chunks that are remembered after they have gone; a bound on memory where chunks are tiny
GHOSTS_MAX = 1 << 18

Key = tuple[Hashable, int]  # shard and index


@dataclass(slots=True, eq=False)
class _Run:
    """Chunks of one shard that stand together in a queue."""

    shard: Hashable
    indices: list[int] = field(default_factory=list)  # rising
    fed: int = 0  # when a chunk entered it last, by the bytes that were touched in all
    leaving: bool = False  # its turn has come


_NONE = _Run("")  # of entries that are about to be put into a queue


@dataclass(slots=True, eq=False)
class _Entry:
    """One chunk in a queue. size_bytes and chunk: 0 and None while it is only known from a state."""

    key: Key
    queue: _Queue
    run: _Run
    uses: int = 0
    size_bytes: int = 0
    chunk: Chunk | None = None
    touched: int = 0  # when it was used or entered, by the bytes that were touched in all
    chosen: bool = False  # named as a victim, and not used since: if it leaves now, it was evicted
    aside: bool = False  # in no queue, but its bytes count in that of its own
    named: bool = False  # in no queue, as if it had left, until whoever looks for victims has found enough


class _Queue:
    """Runs, the oldest first. What leaves next is the tail of the oldest one.

    Chunks of a shard join its newest run. Once that is leaving, only what enters while the same load goes on joins it,
    so that of a shard larger than the queue the first chunks stay; else new chunks would go at once, for others' age.
    """

    def __init__(self) -> None:
        self.size_bytes = self.count = 0
        self.runs: OrderedDict[_Run, None] = OrderedDict()
        self.newest: dict[Hashable, _Run] = {}  # by shard

    def put(self, entry: _Entry, still_loading: float = math.inf) -> None:
        """still_loading: a run that was fed since then may be joined although it is leaving."""
        shard, index = entry.key
        run = self.newest.get(shard)
        if run is None or (run.leaving and run.fed < still_loading):
            run = self.newest[shard] = _Run(shard)
            self.runs[run] = None
        run.fed = max(run.fed, entry.touched)
        insort(run.indices, index)
        entry.queue, entry.run = self, run
        self.count += 1
        self.size_bytes += entry.size_bytes

    def put_in_front(self, entry: _Entry) -> None:
        """Into its run again, where that was: of all the first."""
        self.runs[entry.run] = None
        self.runs.move_to_end(entry.run, last=False)
        insort(entry.run.indices, entry.key[1])
        self.count += 1
        self.size_bytes += entry.size_bytes

    def take(self, entry: _Entry) -> None:
        run, index = entry.run, entry.key[1]
        if run.indices[-1] == index:
            run.indices.pop()
        else:
            del run.indices[bisect_left(run.indices, index)]
        if not run.indices:
            del self.runs[run]
            if self.newest.get(run.shard) is run:
                del self.newest[run.shard]
        self.count -= 1
        self.size_bytes -= entry.size_bytes

    def next_out(self) -> Key:
        run = next(iter(self.runs))
        run.leaving = True
        return run.shard, run.indices[-1]


class S3FIFO:
    """S3-FIFO by Yang, Zhang, Qiu, Yue and Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023).

    New chunks enter a small queue. At its end, those that were used meanwhile go on to the main queue, and the
    others are evicted, and remembered in a ghost queue; what enters again while it is remembered goes to the main queue
    at once. At the end of the main queue, a chunk that was used goes round again with one use less. So what is
    loaded once, a scan or a save, pushes out little else.

    Where this differs from the paper:

    - One use in the small queue is enough to stay, not two: a checkpoint or a model is seldom asked for again so soon,
      and is large (benchmarks/results has what that gains).
    - It has no capacity of its own: what is resident when room is asked for is what there is room for. The small queue
      gives way as long as it has a tenth of that; the ghosts are together as large as the rest.
    - Chunks of a shard that enter together stand together, and of such a run the tail goes first, also while it is
      being loaded: so of a shard that is larger than the small queue, the first chunks stay.
    - A chunk whose turn it is and that `may_go` refuses goes to the back of its queue: it is in use, and is not asked
      about again before all others were.
    - Uses that follow each other closely count as one.

    A chunk is known by shard and index. A call costs a few dict accesses, and a binary search where a chunk does not
    enter or leave at the tail of its run; evicting may pass over others first, each of which costs as much.
    """

    def __init__(self) -> None:
        self.resident_bytes = 0
        self._small, self._main = _Queue(), _Queue()
        self._entries: dict[Key, _Entry] = {}
        self._ghosts: OrderedDict[Key, int] = OrderedDict()  # sizes, the oldest first
        self._ghost_bytes = 0
        self._room_bytes = 0  # what there was room for when it was last asked for
        self._touched_bytes = 0
        self._expected = 0  # entries that a state spoke of and that have not entered yet

    def __repr__(self) -> str:
        small, main = (f"{queue.count} chunks of {queue.size_bytes} bytes" for queue in (self._small, self._main))
        return f"<S3FIFO: {small} small, {main} main, {len(self._ghosts)} ghosts>"

    def entered(self, chunk: Chunk) -> None:
        """A chunk has become resident. Entering again replaces what was known of its size."""
        key = (chunk.shard, chunk.index)
        entry = self._entries.get(key)
        self._touched_bytes += chunk.size_bytes
        self.resident_bytes += chunk.size_bytes - (entry.size_bytes if entry else 0)
        if entry is not None:
            self._expected -= entry.chunk is None
            entry.queue.size_bytes += 0 if entry.named else chunk.size_bytes - entry.size_bytes
            entry.chunk, entry.size_bytes = chunk, chunk.size_bytes
            return
        ghost_bytes = self._ghosts.pop(key, None)
        self._ghost_bytes -= ghost_bytes or 0
        queue = self._small if ghost_bytes is None else self._main
        entry = self._entries[key] = untracked(_Entry(key, queue, _NONE, 0, chunk.size_bytes, chunk))
        entry.touched = self._touched_bytes
        queue.put(entry, self._touched_bytes - SMALL_SHARE * self._room_bytes)

    def used(self, chunk: Chunk) -> None:
        """A chunk was read. One that has left meanwhile is no error."""
        entry = self._entries.get((chunk.shard, chunk.index))
        if entry is None:
            return
        self._touched_bytes += entry.size_bytes
        entry.chosen = False
        if self._touched_bytes - entry.touched >= SAME_USE_SHARE * self._room_bytes:
            entry.touched = self._touched_bytes
            entry.uses = min(USES_MAX, entry.uses + 1)

    def left(self, chunk: Chunk) -> None:
        """A chunk is gone. Idempotent."""
        entry = self._entries.pop((chunk.shard, chunk.index), None)
        if entry is None:
            return
        self._expected -= entry.chunk is None
        self.resident_bytes -= entry.size_bytes
        self._out(entry)
        if entry.chosen and entry.queue is self._small:
            self._ghost_bytes += entry.size_bytes - self._ghosts.pop(entry.key, 0)
            self._ghosts[entry.key] = entry.size_bytes
            while self._ghost_bytes > (1 - SMALL_SHARE) * self._room_bytes or len(self._ghosts) > GHOSTS_MAX:
                self._ghost_bytes -= self._ghosts.popitem(last=False)[1]

    def set_aside(self, chunk: Chunk) -> None:
        """It is no victim until `bring_back`, and costs the search for others nothing. Its uses count on."""
        entry = self._entries.get((chunk.shard, chunk.index))
        if entry is not None and not entry.aside:
            self._out(entry)
            entry.aside = True
            entry.queue.size_bytes += entry.size_bytes

    def bring_back(self, chunk: Chunk) -> None:
        """It stands at the back of its queue again."""
        entry = self._entries.get((chunk.shard, chunk.index))
        if entry is not None and entry.aside:
            self._out(entry)
            entry.queue.put(entry)

    def _out(self, entry: _Entry) -> None:
        """Out of its queue, wherever in it or beside it it is."""
        if entry.aside:
            entry.queue.size_bytes -= entry.size_bytes
        elif not entry.named:
            entry.queue.take(entry)
        entry.aside = entry.named = False

    def victims(self, needed_bytes: int, may_go: Callable[[Chunk], bool]) -> Iterator[Chunk]:
        """As the protocol says. Each step looks at the queues as they are then. What is named and not removed
        will be named first again."""
        self._settle()
        self._room_bytes = self.resident_bytes
        found_bytes = 0
        asked: set[Key] = set()
        named: list[_Entry] = []
        try:
            while found_bytes < needed_bytes and (entry := self._next(asked)) is not None:
                asked.add(entry.key)
                assert entry.chunk is not None
                entry.chosen = may_go(entry.chunk)
                if not entry.chosen:
                    _to_the_back(entry)
                    continue
                found_bytes += entry.size_bytes
                entry.queue.take(entry)
                entry.named = True
                named.append(entry)
                yield entry.chunk
        finally:
            for entry in reversed(named):
                if entry.named and self._entries.get(entry.key) is entry:
                    self._out(entry)
                    entry.queue.put_in_front(entry)

    def _next(self, asked: set[Key]) -> _Entry | None:
        """The chunk whose turn it is, after those before it have gone round or on; None if all were asked about."""
        small, main = self._small, self._main
        asked_small = asked_main = 0  # how many in a row, since anything else went round
        while True:
            small_left, main_left = asked_small < small.count, asked_main < main.count
            if small_left and (not main_left or small.size_bytes >= SMALL_SHARE * self._room_bytes):
                entry = self._entries[small.next_out()]
                if entry.key in asked:
                    asked_small += 1
                    _to_the_back(entry)
                elif entry.uses >= USES_TO_STAY:
                    entry.uses = asked_small = asked_main = 0
                    _to_the_back(entry, main)
                else:
                    return entry
            elif main_left:
                entry = self._entries[main.next_out()]
                if entry.key in asked:
                    asked_main += 1
                    _to_the_back(entry)
                elif entry.uses > 0:
                    entry.uses, asked_main = entry.uses - 1, 0
                    _to_the_back(entry)
                else:
                    return entry
            else:
                return None

    # -- beyond a restart ----------------------------------------------------------------

    def state(self) -> Any:
        self._settle()
        return {
            "policy": "s3-fifo",
            "room_bytes": self._room_bytes,
            "small": self._runs_of(self._small),
            "main": self._runs_of(self._main),
            "ghosts": by_shard(self._ghosts),
        }

    def _runs_of(self, queue: _Queue) -> list[Any]:
        """[shard, whether more chunks join it, indices, uses] of each run, the oldest first. What is set aside stands
        behind all others: whoever asked for that is gone after a restart."""
        runs: list[tuple[Hashable, bool, list[int]]] = [
            (run.shard, queue.newest.get(run.shard) is run and not run.leaving, run.indices) for run in queue.runs
        ]
        aside: dict[Hashable, list[int]] = {}
        for entry in self._entries.values():
            if entry.queue is queue and (entry.aside or entry.named):
                aside.setdefault(entry.key[0], []).append(entry.key[1])
        runs += [(shard, True, indices) for shard, indices in aside.items()]
        return [
            [shard, is_open, list(indices), [self._entries[shard, index].uses for index in indices]]
            for shard, is_open, indices in runs
            if isinstance(shard, str)
        ]

    def resume(self, state: Any) -> None:
        fresh = S3FIFO()
        try:
            if state["policy"] == "s3-fifo":
                fresh._read(state)
                vars(self).update(vars(fresh))
        except (KeyError, TypeError, ValueError, OverflowError):
            return

    def _read(self, state: Any) -> None:
        for queue, runs in ((self._small, state["small"]), (self._main, state["main"])):
            for shard, is_open, indices, all_uses in runs:
                queue.newest.pop(str(shard), None)
                for index, uses in zip(indices, all_uses, strict=True):
                    key = (str(shard), int(index))
                    if key not in self._entries:
                        uses = min(USES_MAX, max(0, int(uses)))
                        entry = self._entries[key] = _Entry(key, queue, _NONE, uses)
                        queue.put(entry)
                if not is_open:
                    queue.newest.pop(str(shard), None)
        self._expected = len(self._entries)
        self._ghosts.update((key, max(0, int(size_bytes))) for key, size_bytes in of_shards(state["ghosts"]))
        self._ghost_bytes = sum(self._ghosts.values())
        self._room_bytes = max(0, int(state["room_bytes"]))

    def _settle(self) -> None:
        """What did not enter by now is not there any more."""
        if self._expected:
            for entry in [entry for entry in self._entries.values() if entry.chunk is None]:
                del self._entries[entry.key]
                entry.queue.take(entry)
            self._expected = 0


def by_shard(known: Mapping[Key, Any]) -> list[Any]:
    """[shard, indices, values] of each stretch of chunks of one shard, for a state."""
    made = []
    for shard, items in groupby(known.items(), lambda item: item[0][0]):
        if isinstance(shard, str):
            indices, values = zip(*((key[1], value) for key, value in items), strict=True)
            made.append([shard, list(indices), list(values)])
    return made


def of_shards(stretches: Any) -> Iterator[tuple[Key, Any]]:
    """The chunks again, with what was known of each."""
    for shard, indices, values in stretches:
        for index, value in zip(indices, values, strict=True):
            yield (str(shard), int(index)), value


def _to_the_back(entry: _Entry, queue: _Queue | None = None) -> None:
    """Of its own queue, or of another one."""
    entry.queue.take(entry)
    (queue or entry.queue).put(entry)
