"""Listings: which runs lie under a folder, what a run holds, and what is inside one checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from stepwell import refs
from stepwell.arenas import checkpoints_of, roots_of
from stepwell.catalog import Catalog, Debris
from stepwell.checkpoint import Checkpoint
from stepwell.config import Config
from stepwell.describing import describe, read_manifests
from stepwell.errors import CheckpointNotFound, StepwellError
from stepwell.format.names import MANIFEST, RUN_FILE, Attempt, rank_file
from stepwell.format.records import Manifest, RankRecord, RunRecord, ShardRecord, decode
from stepwell.places import Named, Opened, opened
from stepwell.plainfiles import SUFFIX, read_header, weight_files
from stepwell.tiers.base import RecordKey

if TYPE_CHECKING:
    from stepwell.shards import Layout

#: how deep below a folder runs are looked for: root/team/run
DEPTH = 3
#: how many checkpoints of a line of descent are looked at
ANCESTORS = 5


@dataclass(frozen=True, slots=True)
class Here:
    """A folder that holds checkpoints: a run, or plain safetensors files."""

    kind: Literal["run", "plain"]
    path: Path
    size_bytes: int
    checkpoints: int  # that have a manifest; 0 for plain files
    unfinished: int  # step folders without one
    newest_step: int | None
    newest_at: float | None  # when that was committed or the newest file was changed: seconds since 1970


@dataclass(slots=True)
class RunListing:
    """What a run holds."""

    run: str
    folder: Path
    tiers: list[str]
    checkpoints: list[Checkpoint] = field(default_factory=list)  # by rising step, abandoned ones too
    unreadable: dict[str, str] = field(default_factory=dict)  # checkpoint, or copy -> why its manifest cannot be read
    debris: list[Debris] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)  # tier -> why it does not answer
    in_memory: dict[str, str] = field(default_factory=dict)  # checkpoint that no tier has -> its arena here
    asked: str = ""  # which of its checkpoints the reference means, as it says it; "": all


# -- under a folder ----------------------------------------------------------------------


def find_here(root: Path) -> Iterator[Here]:
    """The runs and plain folders under `root`, itself included, by path. Reads no file, only folders.

    What cannot be read, and links to folders, are passed over below `root`; `root` itself raises OSError.
    """
    for kind, folder, names in find_folders(root):
        yield _run(folder, names) if kind == "run" else _plain(folder, names)


def find_folders(root: Path) -> Iterator[tuple[Literal["run", "plain"], Path, Sequence[str]]]:
    """As `find_here`, without a look into step folders: what each is, where, and the names in it."""
    yield from _folders(root, sorted(os.listdir(root)), DEPTH)


def _folders(
    folder: Path, names: Sequence[str], depth: int
) -> Iterator[tuple[Literal["run", "plain"], Path, Sequence[str]]]:
    kind = refs.kind_of(folder.name, names)
    if kind == "run" or kind == "plain":
        yield kind, folder, names
    if kind == "run" or kind == "step" or not depth:
        return
    for name in names:
        below = folder / name
        if name.startswith(".") or os.path.islink(below):
            continue
        try:
            inside = sorted(os.listdir(below))
        except OSError:
            continue
        yield from _folders(below, inside, depth - 1)


def _run(folder: Path, names: Sequence[str]) -> Here:
    committed: list[tuple[int, float]] = []
    size = unfinished = 0
    for name in names:
        attempt = Attempt.parse(name)
        if attempt is None:
            continue
        made = None
        for file, stat in _files(folder / name):
            size += stat.st_size
            if file == MANIFEST:
                made = stat.st_mtime
        if made is None:
            unfinished += 1
        else:
            committed.append((attempt.step, made))
    step, made = max(committed, default=(None, None))
    return Here("run", folder, size, len(committed), unfinished, step, made)


def _plain(folder: Path, names: Sequence[str]) -> Here:
    found = [stat for file, stat in _files(folder) if file.endswith(SUFFIX)]
    newest = max((stat.st_mtime for stat in found), default=None)
    return Here("plain", folder, sum(stat.st_size for stat in found), 0, 0, None, newest)


def _files(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
    """The files of a folder that can be looked at; a writer or a deletion may take some away meanwhile."""
    with suppress(OSError), os.scandir(folder) as listing:
        for entry in listing:
            with suppress(OSError):
                if entry.is_file():
                    yield entry.name, entry.stat()


def config_roots(config: Config) -> list[Path]:
    """The folders of the config's tiers that are there, nearest first."""
    return [Path(tier.path) for tier in config.tiers if tier.path is not None and Path(tier.path).is_dir()]


# -- a run -------------------------------------------------------------------------------


async def list_run(named: Named) -> RunListing:
    """Every checkpoint that the reference means, by rising step, and what is no checkpoint.

    A tier that does not answer is left out, and named.
    """
    async with opened(named, all_tiers=False) as run:
        out = RunListing(run.run, named.place.folder, [tier.info.name for tier in run.tiers])
        out.absent = dict(run.catalog.absent)
        out.asked = named.place.select if named.place.selected else ""
        await read_manifests(run.catalog, run.chosen)
        for attempt in run.chosen:
            try:
                out.checkpoints.append(await describe(run.catalog, attempt))
            except CheckpointNotFound:  # deleted since the scan
                continue
            except StepwellError as error:
                out.unreadable[attempt.folder] = error.what
            else:
                out.unreadable |= await _bad_copies(run.catalog, attempt, out.checkpoints[-1].tiers)
        if not named.place.selected:
            out.debris = sorted(run.catalog.debris, key=lambda d: (d.attempt.step, d.attempt))
            out.in_memory = in_memory_alone(run)
        return out


def in_memory_alone(run: Opened) -> dict[str, str]:
    """Checkpoint -> the shared arena of this machine that alone has it, by rising step. The next writer here restores
    the newest of them, if no writer has overtaken it."""
    config, above = run.named.config, run.named.place.folder.parent
    tier_roots = [above] if config is None else [Path(tier.path) for tier in config.tiers if tier.path is not None]
    found = checkpoints_of(run.run, tier_roots, roots_of(None, config)) if run.run else {}
    known = {attempt.folder for attempt in run.catalog.holdings}
    return {folder: found[folder] for folder in sorted(found.keys() - known)}


async def _bad_copies(catalog: Catalog, attempt: Attempt, good: Sequence[str]) -> dict[str, str]:
    """Why the manifest of a checkpoint cannot be read on the tiers that have one and are not `good`."""
    found: dict[str, str] = {}
    for holding in catalog.holdings.get(attempt, []):
        tier = holding.tier.info.name
        if tier not in good:
            try:
                await catalog.manifest(attempt, holding.tier)
            except CheckpointNotFound:
                continue
            except StepwellError as error:
                found[f"{attempt.folder} on {tier}"] = error.what
    return found


# -- a checkpoint ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tensor:
    """One stored tensor."""

    name: str  # its part, and its dotted key inside
    dtype: str
    shape: tuple[int, ...]
    file: str


@dataclass(slots=True)
class Inside:
    """All that the records say of one checkpoint."""

    checkpoint: Checkpoint
    manifest: Manifest
    folders: dict[str, str]  # tier -> where it lies
    files: dict[str, int]  # on the nearest tier
    ranks: dict[int, RankRecord]
    ancestors: list[str] = field(default_factory=list)  # what it goes on from, nearest first, as `_ancestors` says
    forked_from: str | None = None  # where its run began, if it is a fork
    wrong: list[str] = field(default_factory=list)  # records that cannot be read, files that are not as they say


async def look_inside(run: Opened, attempt: Attempt) -> Inside:
    """Reads the checkpoint's records. Raises StepwellError if its manifest is good nowhere."""
    catalog = run.catalog
    manifest = await catalog.manifest(attempt)
    held = catalog.holdings[attempt]
    folders = {h.tier.info.name: _path(h.tier.info.detail.get("path", "?"), run.run, attempt) for h in held}
    inside = Inside(await describe(catalog, attempt), manifest, folders, dict(sorted(held[0].files.items())), {})
    inside.ancestors = await _ancestors(catalog, manifest)
    inside.forked_from = await _forked_from(run)
    for rank in manifest.covers:
        try:
            inside.ranks[rank] = await _rank(catalog, attempt, rank)
        except StepwellError as error:
            inside.wrong.append(str(error))
    for holding in held:
        tier = holding.tier.info.name
        if tier in inside.checkpoint.complete_on:
            inside.wrong += [f"{what} (tier {tier})" for what in _misfits(inside.ranks.values(), holding.files)]
    return inside


async def _ancestors(catalog: Catalog, manifest: Manifest) -> list[str]:
    """Folders of the checkpoints that a checkpoint goes on from, the nearest first: ANCESTORS of them, or until one is
    not there any more. The last one of a fork is its parent, RUN@FOLDER."""
    line: list[str] = []
    parent = manifest.parent
    while parent is not None and len(line) < ANCESTORS:
        line.append(parent)
        attempt = Attempt.parse(parent)
        if attempt is None or attempt not in catalog.holdings:
            break
        try:
            parent = (await catalog.manifest(attempt)).parent
        except StepwellError:
            break
    return line


async def _forked_from(run: Opened) -> str | None:
    for tier in reversed(run.tiers):
        try:
            data = await tier.fetch(RecordKey(run.run, RUN_FILE)) if run.run else None
            if data is not None and (began := decode(data, RunRecord).forked_from) is not None:
                return began
        except StepwellError:  # verify says what is wrong with it
            continue
    return None


def _misfits(ranks: Iterable[RankRecord], files: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with the sizes of the shards; what they hold is for `verify` to check."""
    for shard in (shard for record in ranks for shard in record.shards):
        size = files.get(shard.file)
        if size is None:
            yield f"{shard.file} is missing"
        elif size != shard.size:
            yield f"{shard.file} has {size} bytes instead of {shard.size}"


def _path(root: str, run: str, attempt: Attempt) -> str:
    return os.path.join(root, run, attempt.folder) if run else os.path.join(root, attempt.folder)


async def _rank(catalog: Catalog, attempt: Attempt, rank: int) -> RankRecord:
    name = f"{attempt.folder}/{rank_file(rank)}"
    for holding in catalog.holdings[attempt]:
        data = await holding.tier.fetch(RecordKey(catalog.run, name))
        if data is not None:
            return decode(data, RankRecord, path=name)
    raise StepwellError("a rank's record is missing", todo="See stepwell verify", path=name)


def tensors_of(record: RankRecord) -> list[Tensor]:
    """Every tensor of a rank, with its dtype and shape as they were saved. Imports torch."""
    from stepwell.shards import recorded_layout
    from stepwell.state.skeleton import read_skeleton, tensors

    skeleton = read_skeleton(msgspec.json.decode(record.skeleton), f"rank record {record.rank}")
    where = {label: s.file for s in record.shards for label in recorded_layout(s, skeleton.leaves).labels}
    return [
        Tensor(f"{leaf.part}.{leaf.key}" if leaf.key else leaf.part, leaf.dtype, leaf.shape, where.get(label, "?"))
        for label, leaf in tensors(skeleton).items()
    ]


def count_dtypes(record: RankRecord) -> dict[str, int]:
    """How many stored tensors there are of each dtype. Needs no torch; {} for a skeleton that is not understood."""
    counts: dict[str, int] = {}
    try:
        for _, dtype, _, *notes in msgspec.json.decode(record.skeleton)["tensors"]:
            if not (notes and notes[0].get("of") is not None):
                counts[dtype] = counts.get(dtype, 0) + 1
    except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError):
        return {}
    return counts


def plain_tensors(folder: Path, only: str | None) -> list[Tensor]:
    """Every tensor of a folder of safetensors files, with safetensors' own names of dtypes. Raises FormatError."""
    files, _ = weight_files(folder, only)
    return [
        Tensor(entry.label, entry.dtype, entry.shape, name)
        for name in files
        for entry in read_header(folder / name).entries.values()
    ]


def layout_of(record: RankRecord, shard: ShardRecord) -> Layout:
    """Where in a shard each tensor lies. Imports torch; raises FormatError for a record that does not add up."""
    from stepwell.shards import recorded_layout
    from stepwell.state.skeleton import read_skeleton

    skeleton = read_skeleton(msgspec.json.decode(record.skeleton), f"rank record {record.rank}")
    return recorded_layout(shard, skeleton.leaves)
