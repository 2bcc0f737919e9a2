"""What a prefetch is asked for: a reference, and of it which chunks of which shards, wherever they lie."""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import SupportsIndex

import numpy as np

from stepwell import refs
from stepwell.catalog import Catalog
from stepwell.errors import ConfigError, KeyMismatch
from stepwell.foreign import chosen_attempt, plain_shard, weight_files
from stepwell.format.names import Attempt
from stepwell.mover import Mover
from stepwell.ranges import plan_reads
from stepwell.reader import OpenCheckpoint, open_checkpoint
from stepwell.reading import Crcs
from stepwell.shards import Layout
from stepwell.state import foreign
from stepwell.state.build import labels_of
from stepwell.tiers.base import CheckpointKey, ShardKey, Tier
from stepwell.tiers.file import FileTier

#: a step of the store's run, `@latest` and the like of it, or any path that `stepwell.load` takes
Ref = SupportsIndex | str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class Choice:
    """What of a checkpoint is wanted; as `stepwell.load` says it, but for several parts."""

    parts: tuple[str, ...] | None = None
    keys: tuple[str, ...] = ("*",)

    @classmethod
    def of(cls, parts: str | Sequence[str] | None, keys: str | Sequence[str]) -> Choice:
        """Raises ConfigError for what is no list of texts."""
        named = [parts] if isinstance(parts, str) else parts
        patterns = [keys] if isinstance(keys, str) else list(keys)
        for what, texts in (("parts", named), ("keys", patterns)):
            if texts is not None and (not texts or not all(isinstance(text, str) for text in texts)):
                raise ConfigError(f"{what}={texts!r}", todo="Give a list of texts, or leave it out")
        return cls(None if named is None else tuple(named), tuple(patterns))

    @property
    def everything(self) -> bool:
        return "*" in self.keys

    def check(self, there: Collection[str], step: int | None) -> None:
        """Raises KeyMismatch for parts that are not `there`."""
        if unknown := sorted(set(self.parts or ()) - set(there)):
            raise KeyMismatch(
                f"the checkpoint has no part {', '.join(unknown)}",
                missing=unknown, todo=f"It has {', '.join(sorted(there))}", step=step,
            )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Wanted:
    """One shard that can be read. cached_as: how the arena knows it, if not by its key."""

    key: ShardKey
    size: int
    tiers: Sequence[Tier]
    crcs: Crcs | None
    cached_as: Hashable = None

    @property
    def name(self) -> Hashable:
        return self.key if self.cached_as is None else self.cached_as


Opening = Callable[[], AbstractAsyncContextManager[Sequence[Wanted]]]


@dataclass(frozen=True, slots=True, eq=False)
class Item:
    """What a reference stands for: its chunks in their order, and how to open the shards that they are of."""

    label: str
    names: tuple[Hashable, ...]  # of its shards
    chunks: tuple[tuple[int, int, int], ...]  # (place in `names`, number, length in bytes)
    open: Opening

    def __repr__(self) -> str:
        return f"<Item {self.label}: {len(self.chunks)} chunks>"


def is_own(ref: Ref) -> bool:
    """Whether a reference is to a checkpoint of the store's own run."""
    return isinstance(ref, SupportsIndex) or (isinstance(ref, str) and ref.startswith("@"))


async def own_attempt(catalog: Catalog, ref: Ref) -> Attempt:
    """The checkpoint of the catalog's run that a reference means. Raises CheckpointNotFound, ConfigError."""
    if not is_own(ref):
        raise ConfigError(
            f"only checkpoints of run {catalog.run} can be brought up to a storage tier, not {os.fspath(str(ref))!r}",
            todo="Give a step, '@latest' or the like; `stepwell cp` copies others",
        )
    select = str(operator.index(ref)) if isinstance(ref, SupportsIndex) else str(ref)[1:]
    return await chosen_attempt(catalog, select, catalog.run)


async def resolve(mover: Mover, catalog: Catalog, ref: Ref, rank: int, world: int, choice: Choice) -> Item:
    """What a reference stands for now. Raises CheckpointNotFound, KeyMismatch for parts and keys that are not there,
    and what else opening it raises."""
    if is_own(ref):
        return await item_of(mover, catalog, await own_attempt(catalog, ref), rank, world, choice)
    assert not isinstance(ref, SupportsIndex)
    place = refs.find(ref)
    if place.kind == "plain":
        return await _plain(mover, place, choice, os.fspath(ref))
    async with _foreign(place, None, choice) as opened:
        return await _item(
            mover, opened, choice, os.fspath(ref), place.folder.parent,
            lambda: _wanted_foreign(place, opened.attempt, choice),
        )  # fmt: skip


async def item_of(mover: Mover, catalog: Catalog, attempt: Attempt, rank: int, world: int, choice: Choice) -> Item:
    """As `resolve`, of a checkpoint of the catalog's run."""
    async with _own(catalog, attempt, rank, world, choice) as opened:
        return await _item(
            mover,
            opened,
            choice,
            f"step {attempt.step}",
            None,
            lambda: _wanted_own(catalog, attempt, rank, world, choice),
        )


def file_name(path: Path) -> Hashable:
    """How an arena knows a file that is no shard of its run: one that was changed since is another file."""
    stat = os.stat(path)
    return ("file", os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ino)


# -- checkpoints of stepwell's -----------------------------------------------------------


@asynccontextmanager
async def _own(
    catalog: Catalog, attempt: Attempt, rank: int, world: int, choice: Choice
) -> AsyncIterator[OpenCheckpoint]:
    opened = await open_checkpoint(catalog, attempt, rank, world, choice.parts)
    try:
        yield opened
    finally:
        await opened.close()


@asynccontextmanager
async def _foreign(place: refs.Place, attempt: Attempt | None, choice: Choice) -> AsyncIterator[OpenCheckpoint]:
    """attempt: the checkpoint of the place that was meant before."""
    async with AsyncExitStack() as stack:
        tier = await _tier_of(place, stack)
        catalog = Catalog(place.folder.name if place.kind == "run" else "", [tier])
        if attempt is None or place.kind == "step":
            attempt = await chosen_attempt(catalog, place.select, str(place.folder), place)
        else:
            await catalog.refresh_patiently(attempt.step)
        yield await stack.enter_async_context(_own(catalog, attempt, 0, 1, choice))


@asynccontextmanager
async def _wanted_own(
    catalog: Catalog, attempt: Attempt, rank: int, world: int, choice: Choice
) -> AsyncIterator[Sequence[Wanted]]:
    async with _own(catalog, attempt, rank, world, choice) as opened:
        yield _wanted(opened, None)


@asynccontextmanager
async def _wanted_foreign(place: refs.Place, attempt: Attempt, choice: Choice) -> AsyncIterator[Sequence[Wanted]]:
    async with _foreign(place, attempt, choice) as opened:
        yield _wanted(opened, place.folder.parent)


async def _tier_of(place: refs.Place, stack: AsyncExitStack) -> Tier:
    tier = FileTier(place.folder.parent, name="disk", read_only=True)
    await tier.start()
    stack.push_async_callback(tier.close)
    return tier


def _wanted(opened: OpenCheckpoint, root: Path | None) -> list[Wanted]:
    return [
        Wanted(
            held.key, held.shard.size, held.tiers, held.shard.crcs(),
            None if root is None else file_name(root / str(held.key)),
        )
        for held in opened.held
    ]  # fmt: skip


async def _item(
    mover: Mover, opened: OpenCheckpoint, choice: Choice, label: str, root: Path | None, opening: Opening
) -> Item:
    choice.check(opened.record.parts, opened.step)
    layouts: dict[ShardKey, Layout] = {}
    labels: set[str] = set()
    if not choice.everything:  # many tensors take a while: not on the event loop
        run = asyncio.get_running_loop().run_in_executor
        skeleton = await run(None, opened.read)
        labels = await run(None, partial(labels_of, skeleton, choice.parts, choice.keys))
        layouts = {shard.key: shard.layout for shard in opened.shards}
    shards = _wanted(opened, root)
    numbers = [_numbers(shard.size, mover.arena.slot_bytes, layouts.get(shard.key), labels) for shard in shards]
    return _made(mover, label, shards, numbers, opening)


def _numbers(size: int, chunk_bytes: int, layout: Layout | None, labels: set[str]) -> list[int]:
    """The chunks of a shard that hold tensors of these labels; all of them where it does not matter."""
    if layout is None:
        return list(range(-(-size // chunk_bytes)))
    at = np.array([place for label, place in layout.labels.items() if label in labels], np.intp)
    starts = layout.begins[at]
    reads = plan_reads(starts, layout.ends[at] - starts, size, chunk_bytes)
    return sorted({read.start // chunk_bytes for read in reads})


def _made(
    mover: Mover, label: str, shards: Sequence[Wanted], numbers: Sequence[Sequence[int]], opening: Opening
) -> Item:
    chunk = mover.arena.slot_bytes
    chunks = tuple(
        (place, number, min(chunk, shard.size - number * chunk))
        for place, (shard, wanted) in enumerate(zip(shards, numbers, strict=True))
        for number in wanted
    )
    return Item(label, tuple(shard.name for shard in shards), chunks, opening)


# -- plain safetensors files -------------------------------------------------------------


async def _plain(mover: Mover, place: refs.Place, choice: Choice, label: str) -> Item:
    async with _open_plain(place) as shards:
        layouts: dict[ShardKey, Layout] = {}
        labels: set[str] = set()
        if not choice.everything or choice.parts is not None:
            [tier] = {tier for shard in shards for tier in shard.tiers}
            opened = [await plain_shard(mover, tier, place.folder, s.key.name, s.size) for s in shards]
            skeleton = foreign({label: entry for _, header in opened for label, entry in header.entries.items()})
            labels = labels_of(skeleton, choice.parts, choice.keys)
            layouts = {shard.key: shard.layout for shard, _ in opened}
        numbers = [_numbers(shard.size, mover.arena.slot_bytes, layouts.get(shard.key), labels) for shard in shards]
        return _made(mover, label, shards, numbers, lambda: _open_plain(place))


@asynccontextmanager
async def _open_plain(place: refs.Place) -> AsyncIterator[Sequence[Wanted]]:
    async with AsyncExitStack() as stack:
        tier = await _tier_of(place, stack)
        sizes = {f.name: f.size_bytes async for f in tier.scan(place.folder.name) if not f.attempt}
        names = [place.file] if place.file else await weight_files(tier, place.folder, sizes)
        if not names:
            raise ConfigError("there is no safetensors file", path=str(place.folder))
        key = CheckpointKey("", place.folder.name)
        yield [Wanted(ShardKey(key, name), sizes[name], [tier], None, file_name(place.folder / name)) for name in names]


def distinct(items: Sequence[Item]) -> Mapping[tuple[Hashable, int], int]:
    """The chunks of all of them, each once -> its length in bytes."""
    return {(item.names[at], number): length for item in items for at, number, length in item.chunks}
