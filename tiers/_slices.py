"""The memory of an arena, mapped in slices and made ready (populated) slot by slot, in the background."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Protocol

#: slots made ready together: small enough that the first are there soon, large enough to be few calls
READY_SLOTS = 4
#: a slice of memory that is mapped (and later registered) as one; an iovec registered with io_uring ends there
SLICE_BYTES = 1 << 30


class Memory(Protocol):
    """What a slice is made of; `Region` outside of simulation."""

    address: int

    def populate(self, offset: int, length: int) -> None: ...

    def view(self, offset: int = 0, length: int | None = None) -> memoryview: ...

    def close(self) -> None: ...


class Slices:
    """Gives addresses of slots that are ready, in order, on the event loop that asked for them last."""

    def __init__(
        self,
        slot_bytes: int,
        memory: Callable[[int], Memory],
        background: bool,
        on_ready: Callable[[int, list[int]], None],
        on_short: Callable[[OSError], None],
    ) -> None:
        """background: by a thread of its own. on_ready: told the first slot's number and the slots' addresses;
        on_short: that the system has no more memory, for now."""
        self._slot_bytes, self._memory, self._background = slot_bytes, memory, background
        self._on_ready, self._on_short = on_ready, on_short
        self._per_slice = SLICE_BYTES // slot_bytes
        self._slices: list[Memory] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._lock = threading.Lock()
        self._made, self._wanted = 0, 0  # slots made ready, which the loop may not know of yet; slots to make ready
        self._preparing = self._closed = False

    def prepare_up_to(self, count: int) -> None:
        """Sees to it that so many slots are ready, or are being made so."""
        self._loop = asyncio.get_running_loop()
        with self._lock:
            self._wanted = max(self._wanted, count)
            if self._preparing or self._closed or self._wanted <= self._made:
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
        while True:
            with self._lock:
                first = self._made
                last = min(first + READY_SLOTS, self._wanted)
                if first >= last or self._closed:
                    self._preparing = False
                    return
            ready: list[int] = []
            failure: OSError | None = None
            try:
                for number in range(first, last):
                    ready.append(self._make(number))
            except OSError as error:
                failure = error
            with self._lock:
                self._made = first + len(ready)
                if failure is not None:
                    self._preparing, self._wanted = False, self._made
            if ready:
                self._tell(self._on_ready, first, ready)
            if failure is not None:
                self._tell(self._on_short, failure)
                return

    def _make(self, number: int) -> int:
        at, within = divmod(number, self._per_slice)
        if at == len(self._slices):
            # a whole slice even if the arena is smaller now: it may grow, and untouched memory costs nothing
            self._slices.append(self._memory(self._per_slice * self._slot_bytes))
        self._slices[at].populate(within * self._slot_bytes, self._slot_bytes)
        return self._slices[at].address + within * self._slot_bytes

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
        """Makes nothing ready any more; False while the thread still does."""
        with self._lock:
            self._closed = True
            return not self._preparing

    def close(self) -> None:
        """Gives the memory back. Nobody uses it, and `stop` has said True. Idempotent."""
        for part in self._slices:
            part.close()
        self._slices.clear()
