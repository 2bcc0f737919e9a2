"""Which chunk of all prefetches under way comes next, and whether it may take the place of another one.

Decided here, done by `stepwell.lifting`. Prefetches go in their order; each is a list of entries, wanted one after the
other, and each entry's chunks from the first to the last. All that, and what was brought but not used yet, is the
announced order that eviction respects.

Inside one list the rule is Belady's with bypass ("A study of replacement algorithms for a virtual-storage computer",
IBM Systems Journal 1966), applied ahead of time as the "conservative" algorithm of Cao, Felten, Karlin and Li does ("A
study of integrated prefetching and caching strategies", SIGMETRICS 1995): a chunk is brought as soon as the chunk that
Belady's rule would push out for it has had its last use before, and no earlier. So no more bytes move than if every
chunk were read when it is needed, with the whole future known. Between lists the more urgent one wins.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from stepwell.policies.announced import Announced
from stepwell.prefetching import Prefetch
from stepwell.reading import Caller
from stepwell.tiers.base import Chunk
from stepwell.tiers.host import Arena
from stepwell.wanted import Item

#: prefetches that are over and still announced until their chunks are used; the oldest give way first
PAST_MAX = 64
#: entries that are looked at for one that may go on while those before it must wait
LOOK_MAX = 64

#: a chunk as prefetches know it: the name of its shard, and its number
Key = tuple[Hashable, int]


@dataclass(eq=False, slots=True)
class Entry:
    """One reference of a list. Its chunks are known by their place in `item.chunks`."""

    request: Request
    item: Item
    ordinal: int  # in the list
    count: int  # of chunks that are wanted: the first so many
    again: float = math.inf  # ordinal of the next entry of this item; inf: there is none
    left: set[int] = field(init=False)  # not used yet
    uncounted: set[int] = field(init=False)  # neither used yet nor seen here
    at: int = 0  # all before it are here, or were used
    place: int = 0  # among all entries

    def __post_init__(self) -> None:
        self.left, self.uncounted = set(range(self.count)), set(range(self.count))

    def key(self, index: int) -> Key:
        at, number, _ = self.item.chunks[index]
        return self.item.names[at], number


class Request:
    """One prefetch: a list of entries, the first one the most urgent."""

    def __init__(self, handle: Prefetch, wanted: Sequence[tuple[Item, int]]) -> None:
        """wanted: each reference, and how many of its chunks."""
        self.handle = handle
        self.uses: dict[Item, list[int]] = {}  # item -> the ordinals of its entries
        self._arrange([Entry(self, item, ordinal, count) for ordinal, (item, count) in enumerate(wanted)])

    def _arrange(self, entries: list[Entry]) -> None:
        self.entries = entries
        self.first = 0  # all entries before it have been used
        self.uses.clear()
        for ordinal, entry in enumerate(entries):
            entry.ordinal = ordinal
            self.uses.setdefault(entry.item, []).append(ordinal)
        for entry in entries:
            entry.again = self.after(entry.item, entry.ordinal)

    def passed_over(self, by: Entry) -> list[Entry]:
        """The entries before one that are used no further: whoever used some of their chunks has gone on."""
        return [e for e in self.open_entries() if e.ordinal < by.ordinal and len(e.left) < e.count]

    def overtaken(self, by: Entry) -> bool:
        """One has been used up. Those before it that were not used at all go to the end: it was not their turn."""
        late = {entry for entry in self.open_entries() if entry.ordinal < by.ordinal}
        if late:
            self._arrange([e for e in self.entries if e not in late] + [e for e in self.entries if e in late])
        return bool(late)

    def after(self, item: Item, ordinal: int) -> float:
        """The ordinal of the first entry of an item after this one; inf: there is none."""
        uses = self.uses[item]
        at = bisect_right(uses, ordinal)
        return uses[at] if at < len(uses) else math.inf

    @property
    def left_bytes(self) -> int:
        """Of what was neither used nor seen here yet."""
        return self.handle.progress.total_bytes - self.handle.progress.done_bytes

    def open_entries(self) -> Iterator[Entry]:
        """Those that have chunks which were not used yet."""
        while self.first < len(self.entries) and not self.entries[self.first].left:
            self.first += 1
        return (entry for entry in self.entries[self.first :] if entry.left)


class Lineup:
    """All prefetches into one arena, in order. Lives on the event loop, and moves nothing."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        if not isinstance(arena.eviction, Announced):
            arena.eviction = Announced(arena.eviction)
            for key in (arena.key(name, number) for name in arena.shards() for number in arena.chunks(name)):
                arena.eviction.entered(Chunk(key, *key, arena.slot_bytes))
        self.announced: Announced = arena.eviction
        self.live: list[Request] = []
        self._past: list[Request] = []  # newest first
        self._entries: list[Entry] = []  # all that are announced, in order
        self._starts: list[int] = []  # of each of them: its first place in the announced order
        self._wanting: dict[Key, deque[tuple[Entry, int]]] = {}
        self._of: dict[Hashable, list[Entry]] = {}  # name of a shard -> the entries that want chunks of it
        self.elsewhere: set[Key] = set()  # chunks that another process of this node has for us
        self._taken: set[Key] = set()  # chunks that were used just now: they may still be held
        self._used_by: dict[Key, Caller] = {}  # who used a chunk last: reading it in two pieces is one use

    def add(self, request: Request) -> None:
        self.live.append(request)
        self.live.sort(key=lambda each: each.handle.urgency)
        self._announce()

    def end(self, request: Request, *, done: bool) -> None:
        """It is over. done: what it has brought waits for its use."""
        self.live.remove(request)
        for entry in (entry for past in self._past for entry in past.open_entries()):
            if len(entry.left) < entry.count:  # whoever used some of its chunks has gone on
                entry.left.clear()
        if done and not request.handle.pinned:
            self._past = [request, *self._past][:PAST_MAX]
        self._announce()

    def wants(self, name: Hashable) -> bool:
        """Whether somebody has announced that chunks of this shard will be used."""
        return any(entry.left for entry in self._of.get(name, ()))

    def _announce(self) -> None:
        order: list[Hashable] = []
        self._entries, self._starts, self._wanting, self._of = [], [], {}, {}
        self._past = [request for request in self._past if any(map(self._is_here, request.open_entries()))]
        for entry in (entry for request in (*self.live, *self._past) for entry in request.open_entries()):
            entry.place = len(self._entries)
            self._entries.append(entry)
            self._starts.append(len(order))
            # a pin has no places in the order: no use of a chunk ends it, and what it has brought is never pushed out
            for index in () if entry.request.handle.pinned else sorted(entry.left):
                key = entry.key(index)
                self._wanting.setdefault(key, deque()).append((entry, index))
                order.append(self.arena.key(*key))
            for name in entry.item.names:
                self._of.setdefault(name, []).append(entry)
        self._used_by = {key: caller for key, caller in self._used_by.items() if key in self._wanting}
        self.elsewhere &= self._wanting.keys()
        self.announced.announce(order)  # type: ignore[arg-type]

    def _is_here(self, entry: Entry) -> bool:
        """Whether anything of it is in the arena."""
        names = entry.item.names
        return any(self._has((names[at], number)) for at, number, _ in entry.item.chunks[: entry.count])

    def _has(self, key: Key) -> bool:
        return self.arena.has(*key) or key in self.elsewhere

    # -- what happens --------------------------------------------------------------------

    def used(self, name: Hashable, number: int, caller: Caller) -> bool:
        """A chunk was taken to where it is wanted; True if a prefetch had announced that."""
        key = (name, number)
        waiting = self._wanting.get(key)
        if not waiting or self._used_by.get(key) is caller:
            return False
        self._used_by[key] = caller
        self._taken.add(key)
        entry, index = waiting.popleft()
        if not waiting:
            del self._wanting[key]
        request, begins = entry.request, len(entry.left) == entry.count
        entry.left.discard(index)
        self._count(entry, index)
        self.announced.served(self.arena.key(name, number))
        passed_over = request.passed_over(entry) if begins else []
        for other in passed_over:
            for at in sorted(other.left):
                self._count(other, at)
            other.left.clear()
        if passed_over or (not entry.left and request.overtaken(entry)):
            self._announce()
        return True

    def lost(self, name: Hashable) -> bool:
        """A shard has lost chunks; True if a live prefetch must look after it again."""
        entries = self._of.get(name, ())
        for entry in entries:
            entry.at = 0
        return any(entry.request in self.live for entry in entries)

    def outranks(self, key: Hashable, other: Chunk) -> bool:
        """Whether a chunk is pinned, or wanted earlier than another one, which nobody has announced or who wants it
        later."""
        if key in self.arena.pinned:
            return True
        theirs = self.announced.place(other.key)
        ours = self.announced.place(key)
        return theirs is None or (ours is not None and ours < theirs)

    def _count(self, entry: Entry, index: int) -> None:
        if index in entry.uncounted:
            entry.uncounted.remove(index)
            entry.request.handle.moved(entry.item.chunks[index][2])

    # -- what comes next -----------------------------------------------------------------

    def candidates(self, moving: Container[Key]) -> Iterator[tuple[Entry, int]]:
        """Entries with their first chunk that is neither here nor `moving`, in order, only so many."""
        found = 0
        for request in self.live:
            for entry in request.open_entries():
                index = self._missing(entry, moving)
                if index is not None:
                    yield entry, index
                    found += 1
                    if found >= LOOK_MAX:
                        return

    def _missing(self, entry: Entry, moving: Container[Key]) -> int | None:
        """Also moves `entry.at` on."""
        contiguous = True
        for index in range(entry.at, entry.count):
            key = entry.key(index)
            if index not in entry.left or self._has(key):
                self._count(entry, index)
                if contiguous:
                    entry.at = index + 1
            elif key in moving:
                contiguous = False
            else:
                return index
        return None

    def complete(self, request: Request) -> bool:
        """Whether all of it is here, or was used. True only after `candidates` has passed over it."""
        return all(entry.at >= entry.count for entry in request.open_entries())

    def may_come(self, entry: Entry, pending: int) -> bool:
        """Whether a chunk of an entry may take a slot now, beside `pending` others that will take one."""
        spare = self.arena.keepable_bytes // self.arena.slot_bytes - self.announced.here
        if spare > pending + self.arena.in_use:  # enough that nobody has announced or holds: no need to look for it
            return True
        going = self.arena.going(pending + 1)
        if not going:
            return going is not None
        place = self.announced.place(going[-1].key)
        if place is None:
            return True
        victim = self._at(place)
        if victim.request is not entry.request:
            return victim.place > entry.place
        if victim.ordinal <= entry.ordinal or self._latest(entry, victim.ordinal) > victim.ordinal:
            return False
        return not self._better_soon(victim)

    def _at(self, place: int) -> Entry:
        """Whose place in the announced order it is."""
        return self._entries[bisect_right(self._starts, place) - 1]

    def _better_soon(self, victim: Entry) -> bool:
        """Whether a chunk that is wanted later than those of `victim` was just used, and is only held until it is
        read."""
        self._taken = {key for key in self._taken if self.arena.is_held(*key)}
        places = (self.announced.place(self.arena.key(*key)) for key in self._taken)
        return any(place is None or self._at(place).place > victim.place for place in places)

    def _latest(self, entry: Entry, enough: int) -> float:
        """Of all that would be here at the entry's turn and is wanted before that, when the last one is wanted again;
        or any time after `enough`."""
        request = entry.request
        if entry.again > enough:
            return entry.again
        latest = entry.again
        for other in request.open_entries():
            if other.ordinal >= entry.ordinal:
                break
            again = request.after(other.item, entry.ordinal)
            if again > latest and self._is_here(other):
                latest = again
                if latest > enough:
                    break
        return latest
