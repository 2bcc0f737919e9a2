"""The file driver keeps the contract with each of its engines and ways of access."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from stepwell.native import probe_uring
from stepwell.tiers.base import RecordKey, ShardKey, Tier
from stepwell.tiers.file import FileTier
from tests.contract.suite import Place, TierContract

WAYS: dict[str, dict[str, Any]] = {
    "ring-direct": {"engine": "io_uring", "reading": "direct"},
    "ring-buffered": {"engine": "io_uring", "direct": False},
    "threads-direct": {"engine": "threads", "reading": "direct"},
    "threads-buffered": {"engine": "threads", "direct": False},
}


def content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


class FilePlace(Place):
    def __init__(self, root: Path, options: dict[str, Any]) -> None:
        self.root = root
        self.options = options

    def make(self, *, capacity_bytes: int | None = None) -> Tier:
        return FileTier(self.root, capacity_bytes=capacity_bytes, **self.options)

    def path(self, shard: ShardKey) -> Path:
        return self.root / shard.checkpoint.run / shard.checkpoint.attempt / shard.name

    def peek(self, shard: ShardKey) -> bytes | None:
        return content(self.path(shard))

    def poke(self, shard: ShardKey, data: bytes) -> None:
        with self.path(shard).open("r+b") as file:
            file.write(data)

    def remove(self, shard: ShardKey) -> None:
        self.path(shard).unlink()

    def peek_record(self, record: RecordKey) -> bytes | None:
        return content(self.root / record.run / record.name)

    def reality(self, run: str) -> set[tuple[str, str, int]]:
        base = self.root / run
        there = set()
        for folder, folders, names in os.walk(base):
            where = "" if folder == str(base) else os.path.basename(folder)
            for name in names:
                try:
                    there.add((where, name, os.stat(os.path.join(folder, name)).st_size))
                except FileNotFoundError:  # deleted under our eyes
                    continue
            if where and not names and not folders:
                there.add((where, "", 0))
        return there


class TestFile(TierContract):
    @pytest.fixture(params=WAYS)
    def place(self, request: pytest.FixtureRequest, tmp_path: Path) -> Place:
        if request.param.startswith("ring") and not probe_uring()[0]:
            pytest.skip(f"no io_uring: {probe_uring()[1]}")
        return FilePlace(tmp_path / "root", WAYS[request.param])
