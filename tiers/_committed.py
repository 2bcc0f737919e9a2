"""The records of a shared arena: what was committed there, a file for each, and which shards it commits.

A file is made under another name and renamed, so it is there whole or not at all: that is enough for memory, which
outlives a process and no power failure. A line of JSON comes before the bytes, with their checksum.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from dataclasses import dataclass
from pathlib import Path

from stepwell.native import crc32c
from stepwell.tiers._shm import RECORDS
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey

log = logging.getLogger("stepwell")

_NEW = ".new"


@dataclass(frozen=True, slots=True)
class Stored:
    """One record, and the shards that it commits with their sizes."""

    key: RecordKey
    data: bytes
    shards: tuple[tuple[ShardKey, int], ...] = ()

    @property
    def checkpoint(self) -> CheckpointKey:
        return CheckpointKey(self.key.run, self.key.name.rpartition("/")[0])


class Records:
    """The folder of records of one arena. Only its owner writes there."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / RECORDS
        self._folder.mkdir(mode=0o700, exist_ok=True)

    def __repr__(self) -> str:
        return f"<Records in {self._folder}>"

    def load(self) -> list[Stored]:
        """All that are there. What cannot be read is removed, with a warning: nothing counts on it."""
        found = []
        for path in sorted(self._folder.iterdir()):
            try:
                found.append(_decode(path.read_bytes()))
            except (ValueError, KeyError, TypeError) as error:
                if path.suffix != _NEW:
                    log.warning("a record in shared memory is damaged and not used: %s: %s", path, error)
                path.unlink()
        return found

    def put(self, record: Stored) -> None:
        """Raises OSError (ENOSPC); nothing has changed then."""
        path = self._path(record.key)
        new = path.with_suffix(_NEW)
        try:
            new.write_bytes(_encode(record))
            os.replace(new, path)
        except OSError:
            new.unlink(missing_ok=True)
            raise

    def lose(self, key: RecordKey) -> None:
        """Idempotent."""
        self._path(key).unlink(missing_ok=True)

    def _path(self, key: RecordKey) -> Path:
        told = f"{key.run}\0{key.name}".encode("utf-8", "surrogateescape")
        return self._folder / hashlib.blake2b(told, digest_size=16).hexdigest()


def _encode(record: Stored) -> bytes:
    head = {
        "run": record.key.run,
        "name": record.key.name,
        "size": len(record.data),
        "crc32c": crc32c(record.data),
        "shards": [[key.checkpoint.run, key.checkpoint.attempt, key.name, size] for key, size in record.shards],
    }
    return json.dumps(head).encode() + b"\n" + record.data


def _decode(data: bytes) -> Stored:
    head_line, _, body = data.partition(b"\n")
    head = json.loads(head_line)
    if (len(body), crc32c(body)) != (head["size"], head["crc32c"]):
        raise ValueError("its bytes are not those that were written")
    shards = tuple(
        (ShardKey(CheckpointKey(run, attempt), name), int(size)) for run, attempt, name, size in head["shards"]
    )
    return Stored(RecordKey(head["run"], head["name"]), body, shards)
