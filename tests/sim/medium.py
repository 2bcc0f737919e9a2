"""What survives: the files of one simulated place, as its processes see them and as a lost node would leave them.

The model of a file system with write-back caches:

- A killed process loses nothing that it had written; a write of its that was under way is torn: any subset of its
  blocks is there.
- A node that goes down loses what it had not synced. Of an unsynced file any subset of blocks is there, each whole
  or garbage, or not even the name; a synced file is as it was at the sync. Unsynced records vanish or stay whole
  (they are synced before they get their name), heartbeats may also be cut off. Unsynced deletions may come undone.
- Blocks and records that lie still may turn into garbage (a flip). Nothing else ever changes by itself.
- Room is finite and shared by all.

Everything here is at once: latency and failures are the tier's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from stepwell.tiers.base import CheckpointKey, Found, RecordKey, ShardKey

Token: TypeAlias = int | bytes
Key: TypeAlias = ShardKey | RecordKey

MANIFEST_PREFIX = "manifest"


@dataclass(eq=False, slots=True)
class File:
    """A shard. Blocks that were never written are not in the maps."""

    size: int
    node: str  # whose memory holds what is not synced
    blocks: dict[int, Token] = field(default_factory=dict)
    synced: dict[int, Token] | None = None  # None: not even the name would be left
    flipped: set[int] = field(default_factory=set)

    @property
    def durable(self) -> bool:
        return self.synced is not None and self.synced == self.blocks


@dataclass(eq=False, slots=True)
class Record:
    data: bytes
    node: str
    durable: bool = False
    before: bytes | None = None  # what is left of a replaced one (a heartbeat) if the new one is not durable
    flipped: bool = False
    clean: bytes | None = None  # what was there before the first flip: somebody may have read that


class Watcher(Protocol):
    """Is told of every change, after it was made."""

    def published(self, medium: Medium, record: RecordKey) -> None: ...

    def written(self, medium: Medium, shard: ShardKey) -> None: ...

    def removed(self, medium: Medium, key: Key) -> None: ...


def garbage(rng: random.Random, like: Token) -> Token:
    return rng.randbytes(len(like)) if isinstance(like, bytes) else rng.getrandbits(63) | 1 << 63


class Medium:
    """One place. `block_bytes` is the grain in which shards are kept."""

    def __init__(self, name: str, block_bytes: int = 1 << 20, room_bytes: int | None = None) -> None:
        self.name, self.block_bytes, self.room_bytes = name, block_bytes, room_bytes
        self.files: dict[ShardKey, File] = {}
        self.records: dict[RecordKey, Record] = {}
        self.watcher: Watcher | None = None
        self._ghosts: dict[Key, File | Record] = {}  # deleted, and not yet for good
        self._temporaries: dict[object, tuple[str, str]] = {}  # records without a name yet -> (run, folder)

    def __repr__(self) -> str:
        return f"<Medium {self.name}: {len(self.files)} files, {len(self.records)} records>"

    # -- looking -------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def committed(self, checkpoint: CheckpointKey) -> bool:
        """Whether a manifest is there."""
        return any(True for _ in self._manifests(checkpoint))

    def _manifests(self, checkpoint: CheckpointKey) -> Iterator[RecordKey]:
        prefix = f"{checkpoint.attempt}/{MANIFEST_PREFIX}"
        return (key for key in self.records if key.run == checkpoint.run and key.name.startswith(prefix))

    def inside(self, checkpoint: CheckpointKey) -> list[Key]:
        """What is in a checkpoint's folder, manifests first."""
        folder = f"{checkpoint.attempt}/"
        records = [key for key in self.records if key.run == checkpoint.run and key.name.startswith(folder)]
        manifests = list(self._manifests(checkpoint))
        shards = [key for key in self.files if key.checkpoint == checkpoint]
        return [*manifests, *(key for key in records if key not in manifests), *shards]

    def folders(self, run: str) -> list[str]:
        """Names of the run's folders, in no order that means anything."""
        keys: list[Key] = [*self.records, *self.files]
        return list(dict.fromkeys(folder for key in keys for r, folder in [_folder(key)] if r == run and folder))

    def listing(self, run: str, folder: str) -> list[Found]:
        """The files of one folder; "": of the run's own."""
        found = [
            Found(folder, key.name.rpartition("/")[2], len(record.data))
            for key, record in self.records.items()
            if _folder(key) == (run, folder)
        ]
        return found + [
            Found(folder, key.name, file.size) for key, file in self.files.items() if _folder(key) == (run, folder)
        ]

    # -- shards --------------------------------------------------------------------------------------

    def create(self, shard: ShardKey, size: int, node: str) -> File:
        """Makes a shard's file anew."""
        if shard in self.files:
            self.remove(shard, durable=False)
        self._ghosts.pop(shard, None)
        file = self.files[shard] = File(size, node)
        self._written(shard)
        return file

    def write(self, shard: ShardKey, file: File, first: int, tokens: list[Token]) -> None:
        """Into an open file; its name may be gone."""
        for at, token in enumerate(tokens):
            file.blocks[first + at] = token
            file.flipped.discard(first + at)
        if self.files.get(shard) is file:
            self._written(shard)

    def sync(self, file: File) -> None:
        file.synced = dict(file.blocks)

    # -- records -------------------------------------------------------------------------------------

    def publish(self, record: RecordKey, data: bytes, node: str) -> bool:
        """Gives a synced record its name; False if there is one. The name is not durable yet."""
        if record in self.records:
            return False
        self._ghosts.pop(record, None)
        self.records[record] = Record(data, node)
        if self.watcher is not None:
            self.watcher.published(self, record)
        return True

    def write_beside(self, record: RecordKey) -> object:
        """The file that is to become the record."""
        temporary = object()
        self._temporaries[temporary] = _folder(record)
        return temporary

    def may_publish(self, record: RecordKey, temporary: object, *, alone: bool) -> bool:
        """False if somebody deleted the checkpoint meanwhile. alone: no shards are committed with it."""
        folder = self._temporaries.pop(temporary, None)
        if folder is None:
            return False
        if not alone or not record.name.rpartition("/")[2].startswith(MANIFEST_PREFIX):
            return True
        prefix = f"{folder[1]}/rank-"
        return any(key.run == folder[0] and key.name.startswith(prefix) for key in self.records)

    def delete_from(self, checkpoint: CheckpointKey) -> list[Key]:
        """What is to be deleted with a checkpoint; records that are only on their way are gone with this call."""
        folder = checkpoint.run, checkpoint.attempt
        self._temporaries = {key: where for key, where in self._temporaries.items() if where != folder}
        return self.inside(checkpoint)

    def replace(self, record: RecordKey, data: bytes, node: str) -> None:
        """A heartbeat's way of writing."""
        old = self.records.get(record)
        before = None if old is None else old.data if old.durable else old.before
        self.records[record] = Record(data, node, before=before)

    # -- deleting ------------------------------------------------------------------------------------

    def remove(self, key: Key, *, durable: bool) -> None:
        gone = self.files.pop(key, None) if isinstance(key, ShardKey) else self.records.pop(key, None)
        if gone is None:
            return
        if not durable:
            self._ghosts[key] = gone
        if self.watcher is not None:
            self.watcher.removed(self, key)

    def sync_folder(self, record: RecordKey) -> None:
        """The record's folder was synced: names in it stay, and what was deleted in it stays deleted."""
        folder = _folder(record)
        for key, there in self.records.items():
            if _folder(key) == folder and not key.name.endswith(".beat"):
                there.durable = True
        for ghost in [key for key in self._ghosts if _folder(key) == folder]:
            del self._ghosts[ghost]

    # -- what the world does -------------------------------------------------------------------------

    def lose_node(self, node: str, rng: random.Random) -> set[str]:
        """A node goes down: its cache is lost. Nobody is told: look at everything. The folders in which records
        have come back that could not be made durable, and were deleted: what they tell of need not be there."""
        watcher, self.watcher = self.watcher, None
        back = self._lose_node(node, rng)
        self.watcher = watcher
        return back

    def _lose_node(self, node: str, rng: random.Random) -> set[str]:
        back = [key for key, ghost in self._ghosts.items() if rng.random() < 0.5 and ghost.node == node]
        for key in back:
            self._bring_back(key, self._ghosts[key])
        self._ghosts.clear()
        for shard, file in list(self.files.items()):
            if file.node == node and not file.durable:
                self._lose_file(shard, file, rng)
        for name, record in list(self.records.items()):
            if record.node == node and not record.durable:
                self._lose_record(name, record, rng)
        return {key.name.rpartition("/")[0] for key in back if isinstance(key, RecordKey)}

    def _bring_back(self, key: Key, ghost: File | Record) -> None:
        if isinstance(key, ShardKey) and isinstance(ghost, File):
            self.files.setdefault(key, ghost)
        elif isinstance(key, RecordKey) and isinstance(ghost, Record):
            self.records.setdefault(key, ghost)

    def _lose_file(self, shard: ShardKey, file: File, rng: random.Random) -> None:
        if file.synced is None and rng.random() < 0.5:
            self.remove(shard, durable=True)
            return
        left = dict(file.synced or {})
        for block, token in file.blocks.items():
            luck = rng.random()
            if left.get(block) != token and luck < 0.6:
                left[block] = token if luck < 0.4 else garbage(rng, token)
        file.blocks, file.synced = left, dict(left)
        self._written(shard)

    def _lose_record(self, key: RecordKey, record: Record, rng: random.Random) -> None:
        luck = rng.random()
        if key.name.endswith(".beat") and luck < 0.3:
            record.data = record.data[: rng.randrange(len(record.data) + 1)]
            record.durable = True
        elif luck < 0.6:
            record.durable = True
        elif record.before is not None:
            record.data, record.durable = record.before, True
        else:
            self.remove(key, durable=True)

    def destroy(self) -> None:
        """The place is lost with all that was there."""
        self.files.clear()
        self.records.clear()
        self._ghosts.clear()

    def flip_block(self, shard: ShardKey, block: int, rng: random.Random) -> None:
        file = self.files[shard]
        token = file.blocks[block] = garbage(rng, file.blocks[block])
        if file.synced is not None:
            file.synced[block] = token
        file.flipped.add(block)
        self._written(shard)

    def flip_record(self, key: RecordKey, rng: random.Random) -> None:
        record = self.records[key]
        record.clean = record.clean or record.data
        at = rng.randrange(len(record.data))
        record.data = record.data[:at] + bytes([record.data[at] ^ 1 << rng.randrange(8)]) + record.data[at + 1 :]
        record.flipped = True

    def _written(self, shard: ShardKey) -> None:
        if self.watcher is not None:
            self.watcher.written(self, shard)


def _folder(key: Key) -> tuple[str, str]:
    if isinstance(key, ShardKey):
        return key.checkpoint.run, key.checkpoint.attempt
    return key.run, key.name.rpartition("/")[0]
