"""The index of a shared arena: the rows of `_index`, in a file that other processes map, too.

Only the owner writes. A header of one page comes first, its magic number last of all, so that a file whose maker was
killed is seen to be none. A row's state says FILLED after all else is there, and FREE before anything is changed:
whenever the owner dies, what a row says is true.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stepwell.native import Mapping, allocate, fence
from stepwell.tiers._index import ROW, Index, SlotState
from stepwell.tiers._shm import INDEX, HeldFile

MAGIC, VERSION = b"stepwell", 1
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("version", "<u4"),
        ("row_bytes", "<u4"),
        ("slot_bytes", "<u8"),
        ("count", "<u8"),  # of rows
        ("generation", "<u8"),  # grows with each owner
        ("boot", "S36"),  # of the kernel: what is found after another start was put there by hand
    ]
)
HEADER_BYTES = 4096
assert HEADER.itemsize <= HEADER_BYTES


class Unusable(Exception):
    """What is there is no index that can be gone on with: the message says why."""


@dataclass(frozen=True, slots=True)
class Row:
    """What a slot holds, as its row said at one moment."""

    slot: int
    state: SlotState
    generation: int
    name: str  # of the shard: see `name_of`
    chunk: int
    length: int
    dirty: bool


def _boot() -> bytes:
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()[:36]
    return b""


def _size(count: int) -> int:
    size = HEADER_BYTES + count * ROW.itemsize
    return -(-size // HEADER_BYTES) * HEADER_BYTES


class _Mapped:
    """The file's header and rows, where they are mapped."""

    def __init__(self, file: HeldFile, *, writable: bool) -> None:
        size = os.fstat(file.fd).st_size
        if size < _size(1):
            raise Unusable(f"the index has only {size} bytes")
        self.map = Mapping(file.fd, 0, size // HEADER_BYTES * HEADER_BYTES, writable=writable)
        self.header: np.ndarray[Any, Any] = np.frombuffer(self.map.view(0, HEADER.itemsize), HEADER)
        self.rows: np.ndarray[Any, Any] = np.frombuffer(self.map.view(HEADER_BYTES), np.uint8)
        self.rows = self.rows[: len(self.rows) // ROW.itemsize * ROW.itemsize].view(ROW)

    def check(self) -> None:
        """Raises Unusable unless this is an index of this version."""
        header = self.header[0]
        if bytes(header["magic"]) != MAGIC:
            raise Unusable("the index was never finished, or is damaged")
        if (header["version"], header["row_bytes"]) != (VERSION, ROW.itemsize):
            raise Unusable(f"the index is of version {header['version']}, and this is {VERSION}")
        if header["count"] > len(self.rows):
            raise Unusable(f"the index was cut off: {len(self.rows)} of {header['count']} rows are there")
        if bytes(header["boot"]) != _boot():
            raise Unusable("the index was made before the machine was started")

    def look(self, slot: int) -> Row:
        row = self.rows[slot].copy()
        return Row(
            slot, SlotState(int(row["state"])), int(row["generation"]), bytes(row["shard"]).hex(),
            int(row["chunk"]), int(row["length"]), bool(row["dirty"]),
        )  # fmt: skip


class SharedIndex(Index):
    """The owner's. Kept from an earlier owner if that can be, else made anew by `wipe` and another call."""

    def __init__(self, folder: Path, slot_bytes: int, count: int) -> None:
        """Goes on with the index in the folder, or makes one, with rows for `count` slots at least.

        Raises Unusable if the one that is there cannot be gone on with, OSError (ENOSPC) if there is no room.
        """
        file = HeldFile(folder / INDEX, os.O_RDWR | os.O_CREAT)
        try:
            fresh = os.fstat(file.fd).st_size == 0
            if not fresh:
                _check_file(file, slot_bytes)
            allocate(file.fd, 0, _size(max(count, 1)))
            self._mapped = _Mapped(file, writable=True)
        finally:
            file.close()
        header = self._mapped.header[0]
        if fresh:
            header["version"], header["row_bytes"], header["slot_bytes"] = VERSION, ROW.itemsize, slot_bytes
            header["boot"] = _boot()
            fence()
            header["magic"] = MAGIC
        header["count"] = max(int(header["count"]), count)
        header["generation"] += 1
        self.generation = int(header["generation"])
        self.rows = self._mapped.rows
        self._pid = os.getpid()

    def grow(self, count: int) -> None:
        """It has rows for the whole capacity from the start."""
        assert count <= len(self.rows)

    def found(self) -> Iterator[Row]:
        """What was there when it was opened, but for free slots. Raises Unusable for a row that cannot be."""
        limit = int(self._mapped.header[0]["count"])
        slot_bytes = int(self._mapped.header[0]["slot_bytes"])
        for slot in np.flatnonzero(self.rows[:limit]["state"]):
            try:
                row = self._mapped.look(int(slot))
            except ValueError as error:
                raise Unusable(f"row {slot} of the index is damaged") from error
            if row.length > slot_bytes:
                raise Unusable(f"row {slot} of the index is damaged")
            yield row

    def close(self) -> None:
        """The file stays. Nothing may look at the rows any more. Idempotent."""
        self.rows = np.zeros(0, ROW)
        self._mapped.map.close()


def _check_file(file: HeldFile, slot_bytes: int) -> None:
    mapped = _Mapped(file, writable=False)
    try:
        mapped.check()
        found = int(mapped.header[0]["slot_bytes"])
        if found != slot_bytes:
            raise Unusable(f"its slots have {found} bytes, and now {slot_bytes} are wanted")
    finally:
        mapped.map.close()


class IndexView:
    """The index as another process than the owner sees it.

    Whoever copies from a slot looks at its row before and, after `stepwell.native.fence`, again: what was copied is
    good if both say the same, and FILLED.
    """

    def __init__(self, folder: Path) -> None:
        """Raises Unusable, OSError if there is none."""
        file = HeldFile(folder / INDEX, os.O_RDONLY)
        try:
            self._mapped = _Mapped(file, writable=False)
        finally:
            file.close()
        try:
            self._mapped.check()
        except Unusable:
            self._mapped.map.close()
            raise
        self.slot_bytes = int(self._mapped.header[0]["slot_bytes"])

    @property
    def generation(self) -> int:
        """Of the owner: it changes when the arena is adopted."""
        return int(self._mapped.header[0]["generation"])

    @property
    def count(self) -> int:
        """Slots that this view knows of."""
        return len(self._mapped.rows)

    def look(self, slot: int) -> Row:
        """A slot's row as it is now. Raises IndexError for one that this view does not know of."""
        return self._mapped.look(slot)

    def close(self) -> None:
        """Idempotent. Nothing may be looked at any more."""
        self._mapped.map.close()
