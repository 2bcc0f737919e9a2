"""`stepwell.load`: new tensors from any reference, whole, by part, by key, or slices of single tensors."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from stepwell import refs
from stepwell.catalog import Catalog
from stepwell.errors import ConfigError, KeyMismatch, TierUnavailable
from stepwell.foreign import chosen_attempt, plain_shard, weight_files
from stepwell.format.safetensors import Header, TensorEntry
from stepwell.mover import Mover
from stepwell.ranges import slice_runs
from stepwell.reader import OpenCheckpoint, OpenShards, fill, fill_runs, open_checkpoint
from stepwell.runtime import Runtime
from stepwell.shards import OpenShard
from stepwell.state import build, foreign
from stepwell.state.dtypes import contiguous_strides, loaded_as
from stepwell.state.nodes import leaf_keys
from stepwell.state.skeleton import Leaf, Skeleton
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from stepwell.tracing import note_load
from stepwell.warm import warm_mover

T = TypeVar("T")
Index = slice | tuple[slice, ...]
Keys = str | Sequence[str] | Mapping[str, Index]


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
    point tensors become; what goes to a GPU is read straight to it. rename: saved name -> name in the result.

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
    began, staging = time.monotonic(), Mover(runtime.copier, runtime.staging(), gpus=runtime.gpus)
    mover, catalog = staging, Catalog(run, [tier])
    attempt = runtime.run(chosen_attempt(catalog, place.select, str(place.folder), place))
    opened = runtime.run(open_checkpoint(catalog, attempt, 0, 1, None if part is None else [part]))
    try:
        manifest = runtime.run(catalog.manifest(attempt))
        warm, names = warm_mover(runtime, place.folder.parent, [held.key for held in opened.held], attempt, manifest)
        if warm is not None:
            mover = warm
            opened.cached_as.update(names)
        skeleton = opened.read()
        if isinstance(keys, Mapping):
            known, sliced, place_on = _labelled(opened, skeleton, part), keys, torch.device(device)
            return _with(runtime, mover, staging, lambda m: _load_slices(m, opened, known, sliced, place_on, dtype))
        placement = build(
            skeleton, part=part, keys=keys, rename=rename, device=device, dtype=dtype, allow_pickle=allow_pickle
        )
        marks = runtime.gpus.marks(placement.gpus, runtime.run)
        _with(runtime, mover, staging, lambda m: fill(m, opened, placement.fills, marks))
        note_load(place, began, opened, placement.fills)
    finally:
        runtime.run(opened.close())
    result: dict[Any, Any] = placement.finish()
    return result


def _with(runtime: Runtime, mover: Mover, staging: Mover, work: Callable[[Mover], Coroutine[Any, Any, T]]) -> T:
    """Reads with the mover of a store that has chunks in memory; without, if that is closed meanwhile."""
    try:
        return runtime.run(work(mover))
    except TierUnavailable:
        if mover is staging:
            raise
        return runtime.run(work(staging))


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


def _labelled(opened: OpenCheckpoint, skeleton: Skeleton, part: str | None) -> dict[str, _Stored | None]:
    """Dotted key -> where its tensor is stored; None: as the memory of another one, in another order."""
    found: dict[str, _Stored | None] = {}
    for name, (_, node) in skeleton.parts.items():
        if part is not None and name != part:
            continue
        for key, index in leaf_keys(node, name if part is None else ""):
            leaf = skeleton.leaves[index]
            for shard in opened.shards:
                if leaf.label in shard.layout.labels:
                    begin = shard.layout.span(leaf.label)[0]
                    stored = _Stored(shard, begin, leaf.dtype, leaf.shape)
                    found[key] = stored if _in_order(skeleton, leaf) else None
    return found


def _in_order(skeleton: Skeleton, leaf: Leaf) -> bool:
    """The stored bytes are the leaf's own in row-major order, also where another leaf stores them."""
    of, strides = leaf.notes.of, leaf.notes.strides
    if of is None or strides is None:
        return True
    return skeleton.leaves[of].notes.strides is None and strides == contiguous_strides(leaf.shape)


async def _load_slices(
    mover: Mover,
    opened: OpenShards,
    known: Mapping[str, _Stored | None],
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
        if at is None:
            raise ConfigError("the tensor is a view of another one's memory", key=key, todo="Load it whole, by keys=")
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
    began, staging = time.monotonic(), Mover(runtime.copier, runtime.staging(), gpus=runtime.gpus)
    runtime.run(tier.start())
    try:
        found = runtime.run(_open_plain(staging, tier, place))
        warm, names = warm_mover(runtime, place.folder.parent, [shard.key for shard, _ in found])
        mover = warm or staging
        for shard, _ in found:
            shard.cached_as = names.get(shard.key)
        opened = OpenShards(step=None, shards=[shard for shard, _ in found])
        entries = {label: (shard, entry) for shard, header in found for label, entry in header.entries.items()}
        if isinstance(keys, Mapping):
            known: dict[str, _Stored | None] = {label: _stored(*one) for label, one in entries.items()}
            sliced = keys
            return _with(runtime, mover, staging, lambda m: _load_slices(m, opened, known, sliced, device, dtype))
        skeleton = foreign({label: entry for label, (_, entry) in entries.items()})
        placement = build(skeleton, part="model", keys=keys, rename=rename, device=device, dtype=dtype)
        marks = runtime.gpus.marks(placement.gpus, runtime.run)
        _with(runtime, mover, staging, lambda m: fill(m, opened, placement.fills, marks))
        note_load(place, began, opened, placement.fills)
    finally:
        runtime.run(tier.close())
    result: dict[Any, Any] = placement.finish()
    return result


def _stored(shard: OpenShard, entry: TensorEntry) -> _Stored:
    dtype, shape = loaded_as(entry.dtype, entry.shape, entry.end - entry.begin)
    return _Stored(shard, entry.begin, dtype, shape)


async def _open_plain(mover: Mover, tier: Tier, place: refs.Place) -> list[tuple[OpenShard, Header]]:
    sizes = {f.name: f.size_bytes async for f in tier.scan(place.folder.name) if not f.attempt}
    names = [place.file] if place.file else await weight_files(tier, place.folder, sizes)
    return [await plain_shard(mover, tier, place.folder, name, sizes.get(name)) for name in names]
