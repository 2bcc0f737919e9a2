"""Checkpoints named by a path: which attempt of a run is meant, and which files of a foreign folder hold weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from stepwell import refs
from stepwell.catalog import Catalog, Holding
from stepwell.describing import describe_all
from stepwell.errors import CorruptData, FormatError
from stepwell.format.names import MANIFEST, Attempt
from stepwell.format.records import Manifest, decode
from stepwell.format.safetensors import Header, parse_header
from stepwell.mover import Mover
from stepwell.reader import read_bytes
from stepwell.shards import OpenShard, header_layout
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey, Tier

#: how much of a foreign file is read to find its header; most headers are shorter
_HEADER_GUESS_BYTES = 1 << 20


async def chosen_attempt(catalog: Catalog, select: str, where: str, place: refs.Place | None = None) -> Attempt:
    """The attempt that a reference means, from a fresh scan. A step, or the newest, that is just being made whole is
    waited for. Raises CheckpointNotFound, TierUnavailable."""
    if place is not None and place.kind == "step":
        return await _step_folder(catalog, catalog.tiers[0], place.folder)
    if select.isdecimal() or select == "latest":
        await catalog.refresh_patiently(int(select) if select.isdecimal() else None)
    else:
        await catalog.refresh()
    catalog.require_all_tiers("the run cannot be listed")
    if select.isdecimal():
        return catalog.at_step(int(select))[0]
    newest = catalog.newest_first()
    if select == "latest" and newest:
        return newest[0]
    found = await describe_all(catalog, reversed(newest))
    chosen = refs.choose(found, select, where)
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


async def weight_files(tier: Tier, folder: Path, sizes: Mapping[str, int]) -> list[str]:
    """The files that hold the weights: those that an index names, else all safetensors files."""
    for index in sorted(name for name in sizes if name.endswith(".safetensors.index.json")):
        data = await tier.fetch(RecordKey("", f"{folder.name}/{index}"))
        with suppress(msgspec.DecodeError, KeyError, TypeError):
            named = sorted(set(msgspec.json.decode(data or b"")["weight_map"].values()))
            if gone := [name for name in named if name not in sizes]:
                raise CorruptData(f"{index} names files that are not there: {', '.join(gone[:3])}", path=str(folder))
            return named
    return sorted(name for name in sizes if name.endswith(".safetensors"))


async def plain_shard(mover: Mover, tier: Tier, folder: Path, name: str, size: int | None) -> tuple[OpenShard, Header]:
    """A safetensors file of a folder, and its header, which is read. size: None if it is no regular file. Raises
    FormatError."""
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
