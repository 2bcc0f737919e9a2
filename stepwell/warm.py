"""What is warm: chunks that an open store of this process holds in memory, found by the file they are of.

A shard of the store's own run is known by its key. Any other file is known by its real path, size, time and
inode, so that one that was changed since is another file.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from stepwell.ending import open_stores
from stepwell.format.names import Attempt
from stepwell.format.records import Manifest
from stepwell.mover import Mover
from stepwell.runtime import Runtime
from stepwell.tiers.base import CheckpointKey, ShardKey
from stepwell.tiers.shared import SharedHostTier
from stepwell.wanted import file_name

if TYPE_CHECKING:
    from stepwell.store import CheckpointStore


def warm_mover(
    runtime: Runtime,
    root: Path,
    keys: Sequence[ShardKey],
    attempt: Attempt | None = None,
    manifest: Manifest | None = None,
) -> tuple[Mover | None, dict[ShardKey, Hashable]]:
    """The mover of an open store that has chunks of these shards in memory, whose files lie at `root`, or whose
    prefetches have announced them, or that shares its memory with other processes; how its arena knows each of them.

    attempt, manifest: the checkpoint that they are of, if they are stepwell's. Call it from outside of the loop.
    """
    stores = [store for store in list(open_stores) if store.mover.host is not None and not store.ending.closed]
    if not stores:
        return None, {}
    files: dict[ShardKey, Hashable] = {}
    for key in keys:
        with suppress(OSError):  # whoever reads it will say what is wrong
            files[key] = file_name(root / str(key))

    async def look() -> tuple[Mover | None, dict[ShardKey, Hashable]]:
        for store in stores:
            own = attempt is not None and manifest is not None and _knows(store, attempt, manifest)
            names: dict[ShardKey, Hashable] = dict(files)
            found = shares = _shares(store)
            for key in keys:
                known = ShardKey(CheckpointKey(store.run, key.checkpoint.attempt), key.name) if own else None
                if known is not None and (shares or _has(store, known)):
                    names[key] = known
                    found = True
                else:  # under its file's name in any case: what is read may stay in memory, and must be found again
                    found = found or (key in files and _has(store, files[key]))
            if found and len(names) == len(set(keys)):
                return store.mover, names
        return None, {}

    return runtime.run(look())


def _shares(store: CheckpointStore) -> bool:
    """Whether what is read may be in another process's memory, or stays in this one's for others."""
    host = store.mover.host
    return store.mover.neighbour is not None or (isinstance(host, SharedHostTier) and host.owned)


def _has(store: CheckpointStore, name: Hashable) -> bool:
    gpu = store.mover.gpu
    if gpu is not None and gpu.arena.chunks(name):
        return True
    return bool(store.mover.arena.chunks(name)) or store.ahead.wants(name)


def _knows(store: CheckpointStore, attempt: Attempt, manifest: Manifest) -> bool:
    """Whether a store holds this very checkpoint: the digests cover the checksum of every block. A run that was
    deleted and begun again may have another one of the same name."""
    for tier in store.tiers:
        known = store.catalog.known_manifest(attempt, tier)
        if known is not None and (known.run_id, known.digests) == (manifest.run_id, manifest.digests):
            return True
    return False
