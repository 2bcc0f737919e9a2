"""Memory that the engines move bytes to and from."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from types import TracebackType
from typing import Self

from stepwell.native._engine import ffi, lib
from stepwell.native._jobs import ALIGN_BYTES


class _Mapped:
    """Memory that this process has mapped. Close it only when no job uses it; one that is collected closes itself."""

    def __init__(self, address: int, size: int, free: Callable[[int, int], None]) -> None:
        if address < 0:
            raise OSError(-address, f"mapping {size} bytes of memory: {os.strerror(-address)}")
        self.address, self.size = address, size
        self._on_close: list[Callable[[], None]] = []
        self._free = weakref.finalize(self, free, address, size)
        self._free.atexit = False  # jobs may still be running then

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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.size} bytes{'' if self._free.alive else ', closed'}>"


class Region(_Mapped):
    """Private memory of `size` bytes (rounded up to 4096), in huge pages where the system gives them.

    Nothing is taken from the system before `populate` or the first touch.
    """

    def __init__(self, size: int) -> None:
        if size <= 0:
            raise ValueError(f"a region needs at least one byte, not {size}")
        size = -(-size // ALIGN_BYTES) * ALIGN_BYTES
        super().__init__(lib.sw_region_new(size), size, lib.sw_region_free)

    def populate(self, offset: int, length: int) -> None:
        """Makes these bytes' pages present, keeping their content; takes about 0.2 s per GiB.

        Raises OSError (ENOMEM, EFAULT) if the system does not have the memory.
        """
        self._check(offset, length)
        _raise_for(lib.sw_region_populate(self.address + offset, length) if length else 0, length)


class Mapping(_Mapped):
    """`size` bytes of a file in memory, from `offset` on, shared with all that map it; forked children do not.

    Both are multiples of the file system's page. The file may be shorter: bytes that are not there yet must not be
    touched before `populate`. The descriptor stays the caller's, and open as long as anything is populated.
    """

    def __init__(self, fd: int, offset: int, size: int, *, writable: bool = True) -> None:
        super().__init__(lib.sw_map_new(fd, offset, size, writable), size, _unmap_in(os.getpid()))
        self._fd, self._offset = fd, offset

    def populate(self, offset: int, length: int) -> None:
        """Takes fresh memory for these bytes from the system, in place of what they were; in huge pages, where these
        bytes are some and the system has them. Devices that a dead process has set to work may still write to the old
        memory, which is theirs alone then.

        Raises OSError (ENOSPC, ENOMEM, EFAULT) if the system does not have the memory; it has taken none then.
        """
        self._check(offset, length)
        at = self._offset + offset
        _raise_for(lib.sw_map_punch(self._fd, at, length), length)
        if not lib.sw_map_huge(self._fd, self.address + offset, at, length):
            return
        failed = lib.sw_map_allocate(self._fd, at, length) or lib.sw_region_populate(self.address + offset, length)
        if failed:
            lib.sw_map_punch(self._fd, at, length)
        _raise_for(failed, length)

    def enter(self, offset: int, length: int) -> None:
        """Makes these bytes, which are there, quick to read. Raises OSError (EFAULT) if they are not."""
        self._check(offset, length)
        _raise_for(lib.sw_map_enter(self.address + offset, length), length)


def _raise_for(result: int, length: int) -> None:
    if result:
        raise OSError(-result, f"making {length} bytes of memory ready: {os.strerror(-result)}")


def _unmap_in(pid: int) -> Callable[[int, int], None]:
    def unmap(address: int, size: int) -> None:
        if os.getpid() == pid:  # a forked child has something else there, or nothing
            lib.sw_region_free(address, size)

    return unmap


def memory_kind(fd: int) -> tuple[str, int]:
    """The kind of memory that a file or folder lies in ("tmpfs", "hugetlbfs"; "" if it is on a disk), and the bytes of
    its pages. Raises OSError."""
    page_bytes = ffi.new("uint64_t *")
    kind = lib.sw_memory_kind(fd, page_bytes)
    if kind < 0:
        raise OSError(-kind, os.strerror(-kind))
    return ("", "tmpfs", "hugetlbfs")[kind], int(page_bytes[0])


def give_back(fd: int, offset: int, length: int) -> None:
    """Frees the memory of these bytes of a file, which keeps its size; they read as zeros. Raises OSError."""
    _raise_for(lib.sw_map_punch(fd, offset, length), length)


def allocate(fd: int, offset: int, length: int) -> None:
    """Memory for these bytes of a file, which grows if need be. Raises OSError (ENOSPC)."""
    _raise_for(lib.sw_map_allocate(fd, offset, length), length)


def fence() -> None:
    """Other processes see what is stored from now on after what was stored before. Loads keep that order, too."""
    lib.sw_map_fence()
