"""What is warm: chunks that an open store of this process holds in memory, found by the file they are of.

A shard of the store's own run is known by its key. Any other file is known by its real path, size, time and
inode, so that one that was changed since is another file.
"""

from __future__ import annotations

import operator
import os
from collections.abc import AsyncIterator, Hashable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, SupportsIndex

from stepwell import refs
from stepwell.catalog import Catalog
from stepwell.chain import Chain
from stepwell.ending import open_stores
from stepwell.errors import ConfigError
from stepwell.foreign import chosen_attempt, weight_files
from stepwell.format.names import Attempt
from stepwell.format.records import Manifest
from stepwell.jobs import current_job
from stepwell.mover import Mover
from stepwell.prefetching import Prefetch, Wanted, into_host
from stepwell.reader import OpenCheckpoint, open_checkpoint
from stepwell.runtime import Runtime
from stepwell.tiers.base import CheckpointKey, ShardKey, Tier
from stepwell.tiers.file import FileTier
from stepwell.writer import RunWriter

if TYPE_CHECKING:
    from stepwell.store import CheckpointStore

#: what a prefetch is asked for: a step of the store's run, `@latest` and the like of it, or any path
Ref = SupportsIndex | str | os.PathLike[str]


def file_name(path: Path) -> Hashable:
    """How an arena knows a file that is no shard of its run."""
    stat = os.stat(path)
    return ("file", os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)


def warm_mover(
    runtime: Runtime,
    root: Path,
    keys: Sequence[ShardKey],
    attempt: Attempt | None = None,
    manifest: Manifest | None = None,
) -> tuple[Mover | None, dict[ShardKey, Hashable]]:
    """The mover of an open store that has chunks of these shards, whose files lie at `root`, and how it knows them.

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
            arena = store.mover.arena
            own = attempt is not None and manifest is not None and _knows(store, attempt, manifest)
            names: dict[ShardKey, Hashable] = {}
            for key in keys:
                if own and arena.chunks(ShardKey(CheckpointKey(store.run, key.checkpoint.attempt), key.name)):
                    names[key] = ShardKey(CheckpointKey(store.run, key.checkpoint.attempt), key.name)
                elif key in files and arena.chunks(files[key]):
                    names[key] = files[key]
            if names:
                return store.mover, names
        return None, {}

    return runtime.run(look())


def _knows(store: CheckpointStore, attempt: Attempt, manifest: Manifest) -> bool:
    """Whether a store holds this very checkpoint: the digests cover the checksum of every block. A run that was
    deleted and begun again may have another one of the same name."""
    for tier in store.tiers:
        known = store.catalog.known_manifest(attempt, tier)
        if known is not None and (known.run_id, known.digests) == (manifest.run_id, manifest.digests):
            return True
    return False


@asynccontextmanager
async def shards_of(store: CheckpointStore, ref: Ref, rank: int, world: int) -> AsyncIterator[list[Wanted]]:
    """The shards that a reference means, readable until the context is left."""
    async with AsyncExitStack() as stack:
        if _is_own(ref):
            attempt = await own_attempt(store, ref)
            opened = await open_checkpoint(store.catalog, attempt, rank, world)
            stack.push_async_callback(opened.close)
            yield _wanted(opened, None)
            return
        assert not isinstance(ref, SupportsIndex)
        place = refs.find(ref)
        tier = FileTier(place.folder.parent, name="disk", read_only=True)
        await tier.start()
        stack.push_async_callback(tier.close)
        yield await _plain(tier, place) if place.kind == "plain" else await _foreign(tier, place, stack)


def _is_own(ref: Ref) -> bool:
    return isinstance(ref, SupportsIndex) or (isinstance(ref, str) and ref.startswith("@"))


async def own_attempt(store: CheckpointStore, ref: Ref) -> Attempt:
    """The checkpoint of the store's run that a reference means. Raises CheckpointNotFound."""
    if not _is_own(ref):
        raise ConfigError(
            f"only checkpoints of run {store.run} can be brought up to a storage tier, not {os.fspath(str(ref))!r}",
            todo="Give a step, '@latest' or the like; `stepwell cp` copies others",
        )
    select = str(operator.index(ref)) if isinstance(ref, SupportsIndex) else str(ref)[1:]
    return await chosen_attempt(store.catalog, select, store.run)


def _wanted(opened: OpenCheckpoint, root: Path | None) -> list[Wanted]:
    wanted = []
    for held in opened.held:
        name = None if root is None else file_name(root / str(held.key))
        wanted.append(Wanted(held.key, held.shard.size, held.tiers, held.shard.crcs(), name))
    return wanted


async def _foreign(tier: Tier, place: refs.Place, stack: AsyncExitStack) -> list[Wanted]:
    catalog = Catalog(place.folder.name if place.kind == "run" else "", [tier])
    attempt = await chosen_attempt(catalog, place.select, str(place.folder), place)
    opened = await open_checkpoint(catalog, attempt, 0, 1)
    stack.push_async_callback(opened.close)
    return _wanted(opened, place.folder.parent)


async def _plain(tier: Tier, place: refs.Place) -> list[Wanted]:
    sizes = {f.name: f.size_bytes async for f in tier.scan(place.folder.name) if not f.attempt}
    names = [place.file] if place.file else await weight_files(tier, place.folder, sizes)
    if not names:
        raise ConfigError("there is no safetensors file", path=str(place.folder))
    key = CheckpointKey("", place.folder.name)
    return [Wanted(ShardKey(key, name), sizes[name], [tier], None, file_name(place.folder / name)) for name in names]


def start_prefetch(
    store: CheckpointStore, runtime: Runtime, chain: Chain, writer: RunWriter, wanted: Sequence[Ref], tier: Tier
) -> Prefetch:
    """Brings what is wanted up to `tier`, one reference after the other, in the background."""
    handle = Prefetch()
    job = current_job()

    async def up() -> None:
        for ref in wanted:
            if tier is chain.host:
                async with shards_of(store, ref, job.rank, job.world) as shards:
                    await into_host(chain, shards, handle)
            else:
                await writer.lift(await own_attempt(store, ref), tier, job)

    handle.follow(runtime.start(up()))
    return handle
