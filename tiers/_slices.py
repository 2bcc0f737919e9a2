"""The memory of an arena, mapped in slices and made ready (populated) slot by slot, in the background."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

#: slots made ready together: few at first, so that these are there soon, then twice as many each time, since a call
#: into the kernel may cost as much as the memory
READY_SLOTS, READY_SLOTS_MAX = 4, 32
#: a slice of memory that is mapped (and later registered) as one; an iovec registered with io_uring ends there
SLICE_BYTES = 1 << 30


class Memory(Protocol):
    """What a slice is made of; `Region` outside of simulation."""

    address: int

    def populate(self, offset: int, length: int) -> None: ...

    def view(self, offset: int = 0, length: int | None = None) -> memoryview: ...

    def close(self) -> None: ...


class SlotMemory(Protocol):
    """Where an arena has its slots' memory from."""

    def prepare_up_to(self, count: int) -> None: ...

    def pin(self, pin: Callable[[int, int], bool], unpin: Callable[[int], object]) -> None: ...

    def unpin(self) -> None: ...

    def is_settled(self, address: int) -> bool: ...

    def view(self, number: int, length: int) -> memoryview: ...

    def stop(self) -> bool: ...

    def close(self) -> None: ...


class Slices:
    """Gives addresses of slots that are ready, in order, on the event loop that asked for them last."""

    def __init__(
        self,
        slot_bytes: int,
        memory: Callable[[int], Memory],
        background: bool,
        on_ready: Callable[[dict[int, int]], None],
        on_short: Callable[[OSError], None],
    ) -> None:
        """background: by a thread of its own. on_ready: told the addresses of slots by their numbers; on_short: that
        the system has no more memory, for now."""
        self._slot_bytes, self._memory, self._background = slot_bytes, memory, background
        self._on_ready, self._on_short = on_ready, on_short
        self._per_slice = SLICE_BYTES // slot_bytes
        self._slices: list[Memory] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._made, self._wanted = 0, 0  # slots made ready, which the loop may not know of yet; slots to make ready
        self._next = 0  # the number of the slot that is made next, unless it was found
        self._found: set[int] = set()
        self._to_enter: deque[int] = deque()  # those of them that are slow to touch yet
        self._preparing = self._closed = False
        self._unpinned: list[tuple[int, int]] = []  # address and bytes of what was made ready together
        self._pinned: list[tuple[int, int]] = []  # those that are pinned, and have left that list
        self._refused: list[tuple[int, int]] = []  # those that could not be
        self._in_pinning = 0  # those that are in none of the three, since a thread is pinning them
        self.on_pinned: Callable[[], None] = lambda: None  # told on the loop that there are more of these two
        self._pin: Callable[[int, int], bool] | None = None
        self._unpin: Callable[[int], object] = lambda address: None

    def find(self, numbers: Collection[int]) -> dict[int, int]:
        """Slots that were made by an earlier process, and keep what they hold: their addresses. Before all others;
        they are counted with those that are ready."""
        assert self._made == 0 and not self._preparing
        for number in numbers:
            self._map(number)
        self._found, self._made = set(numbers), len(numbers)
        self._to_enter.extend(sorted(numbers))
        for first, count in self._stretches(sorted(numbers)):
            self._unpinned.append((self._address(first), count * self._slot_bytes))
        return {number: self._address(number) for number in numbers}

    def pin(self, pin: Callable[[int, int], bool], unpin: Callable[[int], object]) -> None:
        """Has all memory pinned by `pin(address, bytes)`, also what is made ready later, and `unpin`ned at the end. In
        pieces of whole slots: a copy of a device must not cross the border of two. Takes 0.05 s/GiB."""
        with self._lock:
            self._pin, self._unpin = pin, unpin
        self._pin_new()

    def _pin_new(self) -> None:
        while True:
            with self._lock:
                if self._pin is None or self._closed or not self._unpinned:
                    return
                pin, unpin, piece = self._pin, self._unpin, self._unpinned.pop(0)
                self._in_pinning += 1
            pinned = False
            try:
                pinned = pin(*piece)
            finally:
                self._note(pin, unpin, piece, pinned)
            if self._loop is not None:
                self._tell(self.on_pinned)

    def _note(
        self, pin: Callable[[int, int], bool], unpin: Callable[[int], object], piece: tuple[int, int], pinned: bool
    ) -> None:
        """A piece has been pinned, or could not be; or that has been taken back meanwhile."""
        with self._lock:
            if self._pin is pin:
                (self._pinned if pinned else self._refused).append(piece)
                self._in_pinning -= 1
                return
        if pinned:
            unpin(piece[0])
        with self._lock:
            self._unpinned.append(piece)
            self._in_pinning -= 1

    def is_settled(self, address: int) -> bool:
        """Whether the memory there is pinned, or cannot be."""
        with self._lock:
            return any(start <= address < start + size for start, size in (*self._pinned, *self._refused))

    def unpin(self) -> None:
        """Takes `pin` back."""
        with self._lock:
            self._pin, pinned, self._pinned = None, self._pinned, []
            self._unpinned += pinned + self._refused
            self._refused = []
        for address, _ in pinned:
            self._unpin(address)

    def prepare_up_to(self, count: int) -> None:
        """Sees to it that so many slots are ready, or are being made so."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._wanted = max(self._wanted, count)
            if self._preparing or self._closed or (self._wanted <= self._made and not self._to_enter):
                return
            self._preparing = True
        if self._background:
            try:
                threading.Thread(target=self._prepare, name="stepwell-arena", daemon=True).start()
                return
            except RuntimeError:  # the interpreter is being left: Python 3.12 starts no thread then
                pass
        self._prepare()

    def _prepare(self) -> None:
        """Makes slots ready until as many are as are wanted. A thread of its own."""
        count = READY_SLOTS
        while True:
            with self._lock:
                entering = [self._to_enter.popleft() for _ in range(min(READY_SLOTS, len(self._to_enter)))]
                numbers = [] if entering else self._following(min(count, self._wanted - self._made))
                if self._closed or not (entering or numbers):
                    self._preparing = False
                    return
            for number in entering:
                self._enter(number)
            ready: dict[int, int] = {}
            failure: OSError | None = None
            try:
                for first, many in self._stretches(numbers):
                    ready |= self._make(first, many)
            except OSError:  # there may be memory for some of them
                try:
                    for number in numbers:
                        if number not in ready:
                            ready |= self._make(number, 1)
                except OSError as error:
                    failure = error
            count = min(2 * count, READY_SLOTS_MAX)
            with self._lock:
                self._made += len(ready)
                self._next = max(ready, default=self._next - 1) + 1
                if failure is not None:
                    self._preparing, self._wanted = False, self._made
            if ready:
                self._tell(self._on_ready, ready)
            if failure is not None:
                self._tell(self._on_short, failure)
                return

    def _following(self, count: int) -> list[int]:
        """The numbers of the slots that are made next."""
        free = (number for number in itertools.count(self._next) if number not in self._found)
        return list(itertools.islice(free, max(0, count)))

    def _stretches(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """(first, how many) of slots that lie side by side in one slice."""
        found: list[tuple[int, int]] = []
        for number in numbers:
            if found and sum(found[-1]) == number and number % self._per_slice:
                found[-1] = (found[-1][0], found[-1][1] + 1)
            else:
                found.append((number, 1))
        return found

    def _make(self, first: int, count: int) -> dict[int, int]:
        """Memory for slots that lie side by side; their addresses by number."""
        self._map(first).populate(first % self._per_slice * self._slot_bytes, count * self._slot_bytes)
        with self._lock:
            self._unpinned.append((self._address(first), count * self._slot_bytes))
        self._pin_new()
        return {number: self._address(number) for number in range(first, first + count)}

    def _enter(self, number: int) -> None:
        enter = getattr(self._map(number), "enter", None)
        if enter is not None:
            with contextlib.suppress(OSError):  # then it is slow, and whoever reads it will see what is wrong
                enter(number % self._per_slice * self._slot_bytes, self._slot_bytes)

    def _map(self, number: int) -> Memory:
        """The slice of a slot; with all before it."""
        while len(self._slices) <= number // self._per_slice:
            # a whole slice even if the arena is smaller now: it may grow, and untouched memory costs nothing
            self._slices.append(self._memory(self._per_slice * self._slot_bytes))
        return self._slices[number // self._per_slice]

    def _address(self, number: int) -> int:
        return self._map(number).address + number % self._per_slice * self._slot_bytes

    def _tell(self, call: Callable[..., None], *args: object) -> None:
        if not self._background:
            call(*args)
            return
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, *args)
        except RuntimeError:  # the loop was closed meanwhile: nobody waits any more
            pass

    def view(self, number: int, length: int) -> memoryview:
        """The first `length` bytes of a slot."""
        at, within = divmod(number, self._per_slice)
        return self._slices[at].view(within * self._slot_bytes, length)

    def stop(self) -> bool:
        """Makes nothing ready any more, and pins nothing; False while a thread still does."""
        with self._lock:
            self._closed = True
            return not (self._preparing or self._in_pinning)

    def close(self) -> None:
        """Gives the memory back. Nobody uses it, and `stop` has said True. Idempotent."""
        self.unpin()
        for part in self._slices:
            part.close()
        self._slices.clear()
