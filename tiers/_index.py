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
from functools import lru_cache
from typing import Any

import numpy as np

from stepwell.native import fence

ROW = np.dtype(
    [
        ("generation", "<u8"),  # grows with each filling; a reader that sees it change has read another chunk
        ("shard", "V16"),  # digest of the shard's key
        ("chunk", "<u4"),  # number of the chunk in its shard
        ("length", "<u4"),  # bytes of it that count
        ("owner", "<u4"),  # process id of who fills it
        ("state", "u1"),  # SlotState
        ("dirty", "u1"),  # 1: no other tier has it yet
        ("pad", "V2"),
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

    def filling(self, slot: int, name: str, chunk: int, length: int, *, dirty: bool = True) -> None:
        """A free slot gets a chunk of the shard of that name."""
        row = self.rows[slot]
        row["generation"] += 1
        row["shard"] = np.void(bytes.fromhex(name))
        row["chunk"], row["length"], row["owner"], row["dirty"] = chunk, length, self._pid, dirty
        row["state"] = SlotState.FILLING

    def filled(self, slot: int) -> None:
        """Its bytes are there; so is all that the row says of them. A kill at any moment leaves it right."""
        assert self.rows[slot]["state"] == SlotState.FILLING
        fence()
        self.rows[slot]["state"] = SlotState.FILLED

    def clean(self, slot: int) -> None:
        """Another tier has the chunk, too."""
        self.rows[slot]["dirty"] = False

    def free(self, slot: int) -> None:
        """Before anything else is put there."""
        self.rows[slot]["state"] = SlotState.FREE
        fence()

    def generation_of(self, slot: int) -> int:
        """Tells this filling of the slot from all others."""
        return int(self.rows[slot]["generation"])

    def state(self, slot: int) -> SlotState:
        return SlotState(int(self.rows[slot]["state"]))


class OwnIndex(Index):
    """Of memory that no other process sees: nothing needs to be right there but the generations."""

    def __init__(self, count: int) -> None:
        self._generations = [0] * count

    def grow(self, count: int) -> None:
        self._generations += [0] * (count - len(self._generations))

    def filling(self, slot: int, name: str, chunk: int, length: int, *, dirty: bool = True) -> None:
        self._generations[slot] += 1

    def filled(self, slot: int) -> None:
        pass

    def clean(self, slot: int) -> None:
        pass

    def free(self, slot: int) -> None:
        pass

    def generation_of(self, slot: int) -> int:
        return self._generations[slot]


@lru_cache(maxsize=1024)
def name_of(shard: Hashable) -> str:
    """What stands for a shard's key in every process: 32 hexadecimal digits."""
    return hashlib.blake2b(str(shard).encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()
