"""The arena's index: one row a slot, in one block of memory of fixed layout.

The layout is what a shared arena will hold beside its slots, so that other processes can read it: fixed width,
no pointers, a generation that changes whenever a slot is filled anew, and the id of who fills it. A private
arena uses the same rows; what only one process needs (who uses a slot, which chunk is where) is derived from them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Hashable
from enum import IntEnum
from typing import Any

import numpy as np

ROW = np.dtype(
    [
        ("generation", "<u8"),  # grows with each filling; a reader that sees it change has read another chunk
        ("shard", "V16"),  # digest of the shard's key
        ("chunk", "<u4"),  # number of the chunk in its shard
        ("length", "<u4"),  # bytes of it that count
        ("owner", "<u4"),  # process id of who fills it
        ("state", "u1"),  # SlotState
        ("pad", "V3"),
    ]
)
assert ROW.itemsize == 40


class SlotState(IntEnum):
    """In the order in which a slot passes through them."""

    FREE = 0
    FILLING = 1
    FILLED = 2


class Index:
    """The rows of `count` slots, all free."""

    def __init__(self, count: int) -> None:
        self.rows: np.ndarray[Any, Any] = np.zeros(count, ROW)
        self._pid = os.getpid()

    def grow(self, count: int) -> None:
        """Rows for `count` slots; never fewer than there are."""
        if count <= len(self.rows):
            return
        rows = np.zeros(count, ROW)
        rows[: len(self.rows)] = self.rows
        self.rows = rows

    def filling(self, slot: int, shard: Hashable, chunk: int, length: int) -> None:
        row = self.rows[slot]
        row["generation"] += 1
        row["shard"] = np.void(digest(shard))
        row["chunk"], row["length"], row["owner"], row["state"] = chunk, length, self._pid, SlotState.FILLING

    def filled(self, slot: int) -> None:
        assert self.rows[slot]["state"] == SlotState.FILLING
        self.rows[slot]["state"] = SlotState.FILLED

    def free(self, slot: int) -> None:
        self.rows[slot]["state"] = SlotState.FREE

    def state(self, slot: int) -> SlotState:
        return SlotState(int(self.rows[slot]["state"]))


def digest(shard: Hashable) -> bytes:
    """16 bytes that stand for a shard's key."""
    return hashlib.blake2b(str(shard).encode("utf-8", "surrogateescape"), digest_size=16).digest()
