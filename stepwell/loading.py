"""`stepwell.load`: new tensors from any reference, whole, by part, by key, or slices of single tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from stepwell import refs
from stepwell.catalog import Catalog, Holding
from stepwell.errors import ConfigError, CorruptData, FormatError, KeyMismatch
from stepwell.format.names import MANIFEST, Attempt
from stepwell.format.records import Manifest, decode
from stepwell.format.safetensors import Header, TensorEntry, parse_header
from stepwell.mover import Mover
from stepwell.ranges import slice_runs
from stepwell.reader import OpenCheckpoint, OpenShards, fill, fill_runs, open_checkpoint, read_bytes
from stepwell.restoring import describe
from stepwell.runtime import Runtime
from stepwell.shards import OpenShard, header_layout
from stepwell.state import build, foreign, tensors
from stepwell.state.dtypes import DTYPE, loaded_as
from stepwell.state.skeleton import Skeleton
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey, Tier
from stepwell.tiers.file import FileTier

Index = slice | tuple[slice, ...]
Keys = str | Sequence[str] | Mapping[str, Index]

#: how much of a foreign file is read to find its header; most headers are shorter
_HEADER_GUESS_BYTES = 1 << 20


def load(
    ref: str | os.PathLike[str],
    part: str | None = None,
    keys: Keys = "*",
    device: str | torch.device = "cpu",
    dtype: torch.dtype | None = None,
    rename: Any = None,
    *,
    allow_pickle: bool = False,
) -> dict[Any, Any]:
    """Loads a checkpoint into new tensors, in this process alone; writes nothing beside the data.

    ref: see `stepwell.refs`. part: only this one, without its name in front. keys: a pattern or patterns of
    dotted names (`*.weight`); or {key: slice or slices}, which loads only those rows and reads only the
    blocks that they lie in (a flat dict comes back). device, dtype: where tensors go, and what floating
    point tensors become. rename: saved name -> name in the result.

    Every byte of a stepwell checkpoint is verified. Raises CheckpointNotFound, FormatError, CorruptData,
    KeyMismatch for a key that is not there, PickleRefused.
    """
    place = refs.find(ref)
    runtime = Runtime.get()
    if place.kind == "plain":
        return _load_plain(runtime, place, keys, torch.device(device), dtype, rename)
    root, run = (place.folder.parent, place.folder.name) if place.kind == "run" else (place.folder.parent, "")
    tier = FileTier(root, name="disk", read_only=True)
    runtime.run(tier.start())
    try:
        return _load_from(runtime, tier, run, place, part, keys, device, dtype, rename, allow_pickle)
    finally:
        runtime.run(tier.close())


def _load_from(
    runtime: Runtime,
    tier: Tier,
    run: str,
    place: refs.Place,
    part: str | None,
    keys: Keys,
    device: str | torch.device,
    dtype: torch.dtype | None,
    rename: Any,
    allow_pickle: bool,
) -> dict[Any, Any]:
    mover = Mover(runtime.copier, runtime.staging())
    catalog = Catalog(run, [tier])
    attempt = runtime.run(_choose(catalog, tier, place))
    opened = runtime.run(open_checkpoint(mover, catalog, attempt, 0, 1, None if part is None else [part]))
    try:
        skeleton = opened.read()
        if isinstance(keys, Mapping):
            return runtime.run(
                _load_slices(mover, opened, _labelled(opened, skeleton, part), keys, torch.device(device), dtype)
            )
        placement = build(
            skeleton, part=part, keys=keys, rename=rename, device=device, dtype=dtype, allow_pickle=allow_pickle
        )
        runtime.run(fill(mover, opened, placement.fills))
    finally:
        runtime.run(opened.close(mover))
    result: dict[Any, Any] = placement.finish()
    return result


async def _choose(catalog: Catalog, tier: Tier, place: refs.Place) -> Attempt:
    if place.kind == "step":
        return await _step_folder(catalog, tier, place.folder)
    await catalog.refresh()
    catalog.require_all_tiers("the run cannot be listed")
    if place.select.isdecimal():
        return catalog.at_step(int(place.select))[0]
    newest = catalog.newest_first()
    if place.select == "latest" and newest:
        return newest[0]
    found = [await describe(catalog, attempt) for attempt in reversed(newest)]
    chosen = refs.choose(found, place.select, str(place.folder))
    return next(a for a in newest if a.folder == chosen.name)


async def _step_folder(catalog: Catalog, tier: Tier, folder: Path) -> Attempt:
    """A step folder, wherever it was copied to and whatever it is called now."""
    data = await tier.fetch(RecordKey("", f"{folder.name}/{MANIFEST}"))
    if data is None:
        raise FormatError(
            "this save was never committed: it has no manifest.json",
            todo="Load another checkpoint of the run",
            path=str(folder),
        )
    manifest = decode(data, Manifest, path=str(folder / MANIFEST))
    named = Attempt.parse(manifest.attempt)
    if named is None:
        raise FormatError(f"the manifest names no checkpoint: {manifest.attempt!r}", path=str(folder / MANIFEST))
    attempt = Attempt(named.epoch, named.call, named.step, None if folder.name == manifest.attempt else folder.name)
    holding = Holding(tier)
    async for found in tier.scan(folder.name):
        if not found.attempt:
            holding.files[found.name] = found.size_bytes
    catalog.holdings[attempt] = [holding]
    return attempt


# -- slices ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Stored:
    """A tensor in a shard."""

    shard: OpenShard
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def empty(self) -> torch.Tensor:
        """New memory for all of it."""
        return torch.empty(self.shape, dtype=self.dtype)


def _labelled(opened: OpenCheckpoint, skeleton: Skeleton, part: str | None) -> dict[str, _Stored]:
    """Dotted key -> where its tensor is stored."""
    found: dict[str, _Stored] = {}
    for leaf in tensors(skeleton).values():
        if part is not None and leaf.part != part:
            continue
        key = leaf.key if part is not None else f"{leaf.part}.{leaf.key}"
        for shard in opened.shards:
            if leaf.label in shard.layout.labels:
                found[key] = _Stored(shard, shard.layout.span(leaf.label)[0], DTYPE[leaf.dtype], leaf.shape)
    return found


async def _load_slices(
    mover: Mover,
    opened: OpenShards,
    known: Mapping[str, _Stored],
    keys: Mapping[str, Index],
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    if unknown := [key for key in keys if key not in known]:
        raise KeyMismatch(
            f"{len(unknown)} keys are not in the checkpoint: {', '.join(unknown[:5])}",
            missing=unknown,
            step=opened.step,
        )
    result: dict[str, torch.Tensor] = {}
    for key, index in keys.items():
        at = known[key]
        slices = index if isinstance(index, tuple) else (index,)
        if len(slices) > len(at.shape):
            raise ConfigError(f"{len(slices)} slices for a tensor of {len(at.shape)} dimensions", key=key)
        try:
            shape, offsets, length = slice_runs(at.shape, at.dtype.itemsize, slices)
        except ValueError as error:
            raise ConfigError(str(error), key=key) from None
        tensor = torch.empty(shape, dtype=at.dtype)
        addresses = np.arange(len(offsets), dtype=np.uint64) * np.uint64(length) + np.uint64(tensor.data_ptr())
        lengths = np.full(len(offsets), length, np.uint64)
        await fill_runs(mover, opened, at.shard, offsets + np.uint64(at.begin), lengths, addresses, tensor)
        result[key] = _placed(tensor, device, dtype)
    return result


def _placed(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.to(device=device, dtype=wanted)


# -- plain safetensors files -------------------------------------------------------------


def _load_plain(
    runtime: Runtime,
    place: refs.Place,
    keys: Keys,
    device: torch.device,
    dtype: torch.dtype | None,
    rename: Any,
) -> dict[Any, Any]:
    """Any folder of safetensors files, such as Hugging Face's. They carry no checksums."""
    tier = FileTier(place.folder.parent, name="disk", read_only=True)
    mover = Mover(runtime.copier, runtime.staging())
    runtime.run(tier.start())
    try:
        found = runtime.run(_open_plain(mover, tier, place))
        opened = OpenShards(step=None, shards=[shard for shard, _ in found])
        entries = {label: (shard, entry) for shard, header in found for label, entry in header.entries.items()}
        if isinstance(keys, Mapping):
            known = {label: _stored(shard, entry) for label, (shard, entry) in entries.items()}
            return runtime.run(_load_slices(mover, opened, known, keys, device, dtype))
        skeleton = foreign({label: entry for label, (_, entry) in entries.items()})
        placement = build(skeleton, part="model", keys=keys, rename=rename, device=device, dtype=dtype)
        runtime.run(fill(mover, opened, placement.fills))
    finally:
        runtime.run(tier.close())
    result: dict[Any, Any] = placement.finish()
    if entries and not result:
        raise KeyMismatch(f"no tensor matches {keys}", todo=f"There are {', '.join(list(entries)[:5])}")
    return result


def _stored(shard: OpenShard, entry: TensorEntry) -> _Stored:
    dtype, shape = loaded_as(entry.dtype, entry.shape, entry.end - entry.begin)
    return _Stored(shard, entry.begin, dtype, shape)


async def _open_plain(mover: Mover, tier: Tier, place: refs.Place) -> list[tuple[OpenShard, Header]]:
    sizes = {f.name: f.size_bytes async for f in tier.scan(place.folder.name) if not f.attempt}
    names = [place.file] if place.file else await _weight_files(tier, place.folder, sizes)
    return [await _plain_shard(mover, tier, place.folder, name, sizes.get(name)) for name in names]


async def _weight_files(tier: Tier, folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """The files that hold the weights: those that an index names, else all safetensors files."""
    for index in sorted(name for name in sizes if name.endswith(".safetensors.index.json")):
        data = await tier.fetch(RecordKey("", f"{folder.name}/{index}"))
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            named = sorted(set(msgspec.json.decode(data or b"")["weight_map"].values()))
            if gone := [name for name in named if name not in sizes]:
                raise CorruptData(f"{index} names files that are not there: {', '.join(gone[:3])}", path=str(folder))
            return named
    return sorted(name for name in sizes if name.endswith(".safetensors"))


async def _plain_shard(mover: Mover, tier: Tier, folder: Path, name: str, size: int | None) -> tuple[OpenShard, Header]:
    path = str(folder / name)
    if size is None:
        raise FormatError("not a regular file", path=path)
    key = ShardKey(CheckpointKey("", folder.name), name)
    data = await read_bytes(mover, tier, key, min(size, _HEADER_GUESS_BYTES)) if size else b""
    wanted = 8 + int.from_bytes(data[:8], "little")
    if len(data) < wanted <= min(size, 100_000_008):
        data = await read_bytes(mover, tier, key, wanted)
    header = parse_header(data, size, path)
    return OpenShard(key, size, [tier], header_layout(header), None), header
