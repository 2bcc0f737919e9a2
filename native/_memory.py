"""Memory that the engines move bytes to and from."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import TracebackType

from stepwell.native._engine import ffi, lib
from stepwell.native._jobs import ALIGN_BYTES


class Region:
    """Private memory of `size` bytes (rounded up to 4096), in huge pages where the system gives them.

    Nothing is taken from the system before `populate` or the first touch. Close it only when no job uses
    it; a region that is collected closes itself.
    """

    def __init__(self, size: int) -> None:
        if size <= 0:
            raise ValueError(f"a region needs at least one byte, not {size}")
        self.size = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        address = lib.sw_region_new(self.size)
        if address < 0:
            raise OSError(-address, f"mapping {self.size} bytes of memory: {os.strerror(-address)}")
        self.address = address
        self._on_close: list[Callable[[], None]] = []
        self._free = weakref.finalize(self, lib.sw_region_free, address, self.size)
        self._free.atexit = False  # jobs may still be running then

    def populate(self, offset: int, length: int) -> None:
        """Makes these bytes' pages present, keeping their content; takes about 0.2 s per GiB.

        Raises OSError (ENOMEM, EFAULT) if the system does not have the memory.
        """
        self._check(offset, length)
        result = lib.sw_region_populate(self.address + offset, length) if length else 0
        if result:
            raise OSError(-result, f"making {length} bytes of memory ready: {os.strerror(-result)}")

    def view(self, offset: int = 0, length: int | None = None) -> memoryview:
        """The bytes as a writable memoryview. It must not be used after the region is closed."""
        length = self.size - offset if length is None else length
        self._check(offset, length)
        return memoryview(ffi.buffer(ffi.cast("char *", self.address + offset), length))

    def close(self) -> None:
        """Gives the memory back, and takes it from the engines that it is registered with. Idempotent."""
        for withdraw in self._on_close:
            withdraw()
        self._on_close.clear()
        self._free()

    def _check(self, offset: int, length: int) -> None:
        if not self._free.alive:
            raise ValueError("the region is closed")
        if offset < 0 or length < 0 or offset + length > self.size:
            raise ValueError(f"bytes {offset} to {offset + length} are not in a region of {self.size}")

    def __enter__(self) -> Region:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Region of {self.size} bytes{'' if self._free.alive else ', closed'}>"
