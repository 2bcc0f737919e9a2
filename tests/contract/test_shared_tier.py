"""The shared host driver keeps the contract, and what was committed is there for the next one on the same arena."""

from __future__ import annotations

import ctypes
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from stepwell.policies.evict import LRU
from stepwell.tiers import _shm
from stepwell.tiers.base import RecordKey, ShardKey, Tier
from stepwell.tiers.host import FIRST_BYTES
from stepwell.tiers.shared import SharedHostTier
from tests.contract.suite import Place, TierContract
from tests.contract.test_host_tier import SLOT_BYTES, HostPlace, arena_bytes

ARENA = "host.run.0.test"


class SharedPlace(HostPlace):
    """Records are read from their files; slots where the arena has them mapped."""

    persistent = True

    def __init__(self, root: Path, background: bool) -> None:
        super().__init__(background)
        self.root = root

    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        capacity = FIRST_BYTES if capacity_bytes is None else arena_bytes(capacity_bytes)
        self.tier = SharedHostTier(
            LRU(), capacity, arena=ARENA, run="run", root=self.root, chunk_bytes=SLOT_BYTES,
            background=self.background, ahead=False,
        )  # fmt: skip
        return self.tier

    def _files(self) -> dict[RecordKey, bytes]:
        found = {}
        for path in (_shm.user_folder(self.root) / ARENA / _shm.RECORDS).iterdir():
            head, _, data = path.read_bytes().partition(b"\n")
            told = json.loads(head)
            found[RecordKey(told["run"], told["name"])] = data
        return found

    def peek_record(self, record: RecordKey) -> bytes | None:
        return self._files().get(record)

    def peek(self, shard: ShardKey) -> bytes | None:
        data = super().peek(shard)
        if data:  # what is mapped is what is in the file
            slots = (_shm.user_folder(self.root) / ARENA / _shm.SLOTS).read_bytes()
            there = [slot.index * SLOT_BYTES for _, slot in sorted(self.tier.arena._of(shard).items())]
            assert b"".join(slots[at : at + SLOT_BYTES] for at in there)[: len(data)] == data
        return data

    def poke(self, shard: ShardKey, data: bytes) -> None:
        for number, address in self.slots(shard).items():
            part = data[number * SLOT_BYTES : (number + 1) * SLOT_BYTES]
            ctypes.memmove(address, part, len(part))

    def reality(self, run: str) -> set[tuple[str, str, int]]:
        books = {**self.tier._books.reserved, **self.tier._books.committed}
        there = {(key.checkpoint.attempt, key.name, size) for key, size in books.items() if key.checkpoint.run == run}
        for record, data in self._files().items():
            if record.run == run:
                folder, _, name = record.name.rpartition("/")
                there.add((folder, name, len(data)))
        return there


class TestShared(TierContract):
    @pytest.fixture(params=["background", "at once"])
    def place(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
        root = Path("/dev/shm") / f"stepwell-test-{tmp_path.parent.name}-{tmp_path.name}"
        root.mkdir()
        try:
            yield SharedPlace(root, request.param == "background")
        finally:
            shutil.rmtree(root)
