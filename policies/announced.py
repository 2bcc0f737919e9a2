"""The order of announced prefetches, respected whatever the policy below says."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

from stepwell.tiers.base import Chunk, EvictionPolicy

__all__ = ["Announced", "SetsAside"]


@runtime_checkable
class SetsAside(Protocol):
    """What an eviction policy may offer besides: chunks that are no victims, and that it need not pass over each time.

    Else a memory full of what is announced would be searched from end to end for each chunk that goes.
    """

    def set_aside(self, chunk: Chunk) -> None:
        """A resident chunk is no victim until it is brought back. Idempotent."""
        ...

    def bring_back(self, chunk: Chunk) -> None:
        """It is a chunk like others again, as if its turn had just been passed over. Idempotent."""
        ...


class Announced:
    """An eviction policy around another one: what is announced goes last, and of that what is wanted last goes first.

    That is Belady's rule, as far as the future is known ("A study of replacement algorithms for a virtual-storage
    computer", IBM Systems Journal 1966). All else goes in the order of `inner`. A call costs what `inner`'s costs and
    a binary search; an announcement is linear in its length and in what is resident.
    """

    def __init__(self, inner: EvictionPolicy) -> None:
        self.inner = inner
        self._aside = inner if isinstance(inner, SetsAside) else None
        self._here: dict[Hashable, Chunk] = {}
        self._order: Sequence[tuple[str, int]] = ()
        self._places: dict[Hashable, deque[int]] = {}  # announced chunk -> where in the order it is wanted, rising
        self._waiting: list[int] = []  # of what is announced and resident: those places, rising
        self._awaited: set[Hashable] = set()  # chunks that entered because they were announced, and were not used yet

    def __repr__(self) -> str:
        return f"<Announced {len(self._waiting)} of {len(self._places)} here, over {self.inner!r}>"

    def announce(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Replaces the announced order: keys of chunks as they will be wanted, the next one first. Of a key that
        occurs more than once the first place counts, until it was `served`."""
        before = [self._order[place] for place in self._waiting]
        self._order = tuple(wanted)
        self._places = {}
        for place, key in enumerate(self._order):
            self._places.setdefault(key, deque()).append(place)
        announced_here = self._places.keys() & self._here.keys()
        self._waiting = sorted(self._places[key][0] for key in announced_here)
        if self._aside is not None:
            for key in before:
                if key not in self._places:
                    self._aside.bring_back(self._here[key])
            for place in self._waiting:
                self._aside.set_aside(self._here[self._order[place]])

    def served(self, key: Hashable) -> None:
        """A chunk was wanted and used: from now on its next place counts. Nothing for what is not announced."""
        places = self._places.get(key)
        if places is None:
            return
        place = places.popleft()
        if not places:
            del self._places[key]
        if (chunk := self._here.get(key)) is not None:
            del self._waiting[bisect_left(self._waiting, place)]
            if places:
                insort(self._waiting, places[0])
            elif self._aside is not None:
                self._aside.bring_back(chunk)

    @property
    def here(self) -> int:
        """How many of the announced chunks are resident."""
        return len(self._waiting)

    def place(self, key: Hashable) -> int | None:
        """Where in the order a chunk is wanted next; None if it is not announced."""
        places = self._places.get(key)
        return places[0] if places else None

    def entered(self, chunk: Chunk) -> None:
        key = (chunk.shard, chunk.index)
        place = self.place(key)
        if key not in self._here and place is not None:
            insort(self._waiting, place)
            self._awaited.add(key)
        self._here[key] = chunk
        self.inner.entered(chunk)
        if self._aside is not None and place is not None:
            self._aside.set_aside(chunk)

    def used(self, chunk: Chunk) -> None:
        """To `inner`, a chunk that was brought before its first use is like one that came with it: that use is no
        second one."""
        key = (chunk.shard, chunk.index)
        if key in self._awaited:
            self._awaited.remove(key)
        else:
            self.inner.used(chunk)

    def left(self, chunk: Chunk) -> None:
        key = (chunk.shard, chunk.index)
        if self._here.pop(key, None) is not None and (place := self.place(key)) is not None:
            del self._waiting[bisect_left(self._waiting, place)]
        self._awaited.discard(key)
        self.inner.left(chunk)

    def victims(self, needed_bytes: int, may_go: Callable[[Chunk], bool]) -> Iterator[Chunk]:
        """As the protocol says; it goes on by the announcement that counted at its start."""
        order, announced, waiting = self._order, self._places, self._waiting

        def goes_first(chunk: Chunk) -> bool:
            return (chunk.shard, chunk.index) not in announced and may_go(chunk)

        found_bytes = 0
        for chunk in self.inner.victims(needed_bytes, goes_first):
            found_bytes += chunk.size_bytes
            yield chunk
        position = len(waiting)
        while found_bytes < needed_bytes and position > 0:
            place = waiting[position - 1]
            waited = self._here.get(order[place])
            if waited is not None and may_go(waited):
                found_bytes += waited.size_bytes
                yield waited
            position = bisect_left(waiting, place)

    def state(self) -> Any:
        """That of `inner`: whoever announced something is gone after a restart."""
        return self.inner.state()

    def resume(self, state: Any) -> None:
        self.inner.resume(state)
