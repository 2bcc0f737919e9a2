"""`stepwell show`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from typing import Any

import msgspec

from stepwell import listing, places
from stepwell.cli._ls import age, checkpoint_document, state_of
from stepwell.cli._output import clean, console, pairs, print_json, say, show_table, table
from stepwell.errors import CheckpointNotFound
from stepwell.explaining import Story, story_of
from stepwell.listing import Inside, Tensor
from stepwell.places import Named, look_up, run_whole
from stepwell.plainfiles import plain_files, read_header, weight_files
from stepwell.units import format_bytes, format_duration


def run(ref: str, tensors: bool, json: bool) -> None:
    named = look_up(ref)
    if named.place.kind == "plain":
        _show_plain(named, tensors, json)
        return
    inside, story, newer = run_whole(_inside(named))
    listed = {rank: listing.tensors_of(record) for rank, record in inside.ranks.items()} if tensors else {}
    if newer:
        say(f"{newer} is newer, and in shared memory alone")
    for wrong in inside.wrong:
        say(wrong)
    if json:
        print_json({**_document(named, inside, listed if tensors else None), **_story_document(story)})
    else:
        _print(inside, listed)
        _print_story(story)


async def _inside(named: Named) -> tuple[Inside, Story, str | None]:
    """Of the newest of a run also what is newer, but in shared memory alone."""
    newer = None
    async with places.opened(named) as run:
        if named.place.kind == "run" and not named.place.selected:
            newest = run.catalog.newest_first()
            if not newest:
                raise CheckpointNotFound("the run has no checkpoint", path=str(named.place.folder))
            attempt = newest[0]
            newer = max((name for name in listing.in_memory_alone(run) if name > attempt.folder), default=None)
        else:
            attempt = places.only(run)
        return await listing.look_inside(run, attempt), await story_of(run.catalog, attempt), newer


# -- a checkpoint of ours ----------------------------------------------------------------


def _document(named: Named, inside: Inside, listed: dict[int, list[Tensor]] | None) -> dict[str, Any]:
    manifest = inside.manifest
    document: dict[str, Any] = {
        "kind": "checkpoint",
        "ref": named.text,
        "run": inside.checkpoint.run,
        "run_id": manifest.run_id,
        **checkpoint_document(inside.checkpoint),
        "absent": manifest.absent,
        "covers": manifest.covers,
        "folders": inside.folders,
        "files": inside.files,
        "ancestors": inside.ancestors,
        "forked_from": inside.forked_from,
        "sidecars": sorted(manifest.files),
        "seconds": manifest.seconds,
        "ranks": [
            {
                "rank": rank,
                "parts": record.part_bytes,
                "shards": {shard.file: shard.size for shard in record.shards},
                "tensor_count": sum(counts.values()),
                "dtypes": counts,
            }
            for rank, record in inside.ranks.items()
            for counts in [listing.count_dtypes(record)]
        ],
        "wrong": inside.wrong,
    }
    if listed is not None:
        document["tensors"] = [_tensor(tensor, rank) for rank, all_of in listed.items() for tensor in all_of]
    return document


def _tensor(tensor: Tensor, rank: int | None = None) -> dict[str, Any]:
    document: dict[str, Any] = {"name": tensor.name, "dtype": tensor.dtype, "shape": tensor.shape, "file": tensor.file}
    return document if rank is None else {**document, "rank": rank}


def _print(inside: Inside, listed: dict[int, list[Tensor]]) -> None:
    checkpoint, manifest = inside.checkpoint, inside.manifest
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.made))
    ranks = f"{manifest.world}" + ("" if len(manifest.covers) == manifest.world else f", here {manifest.covers}")
    rows: list[tuple[str, object]] = [
        ("step", checkpoint.step),
        ("run", f"{checkpoint.run} (id {manifest.run_id})"),
        ("made", f"{made} (age: {age(checkpoint.made)})"),
        ("state", _state(inside)),
        ("size", format_bytes(checkpoint.size)),
        ("ranks", ranks),
        *((f"on {tier}", folder) for tier, folder in inside.folders.items()),
        *((("kept", "yes: retention never deletes it"),) if checkpoint.kept else ()),
        ("tags", ", ".join(checkpoint.tags) or "-"),
        *((f"metric {name}", f"{value:.6g}") for name, value in checkpoint.metrics.items()),
        *_descent(inside),
        *((f"{clean(what)} took", format_duration(seconds)) for what, seconds in manifest.seconds.items()),
    ]
    show_table(pairs([(clean(name), value) for name, value in rows]))
    _print_parts(inside)
    _print_files(inside.files.items())
    for tensors in listed.values():
        _print_tensors(tensors)


def _descent(inside: Inside) -> list[tuple[str, object]]:
    """Timeline, parent, what comes before that, and where the run began."""
    rows: list[tuple[str, object]] = [("timeline", inside.checkpoint.timeline)]
    rows.append(("parent", clean(inside.checkpoint.parent or "-")))
    if before := inside.ancestors[1:]:
        rows.append(("before that", clean(", ".join(before))))
    if inside.forked_from is not None:
        rows.append(("run forked from", clean(inside.forked_from)))
    return rows


def _state(inside: Inside) -> str:
    absent = f", without {', '.join(inside.manifest.absent)}" if inside.manifest.absent else ""
    return state_of(inside.checkpoint) + absent + (", but damaged: see stepwell verify" if inside.wrong else "")


def _story_document(story: Story) -> dict[str, Any]:
    return {
        "events": [msgspec.structs.asdict(entry) for entry in story.events],
        "next": [msgspec.structs.asdict(outlook) for outlook in story.outlook],
    }


def _print_story(story: Story) -> None:
    if story.events:
        shown = table("when", "what", "tier", "why", "took", right=("took",))
        for entry in story.events:
            when = time.strftime("%m-%d %H:%M:%S", time.localtime(entry.at))
            took = format_duration(entry.seconds) if entry.seconds else ""
            shown.add_row(when, entry.what, clean(entry.tier), clean(entry.reason), took)
        console().print()
        show_table(shown)
    if story.outlook:
        shown = table("next, on", "what policies say")
        for outlook in story.outlook:
            shown.add_row(clean(outlook.tier), clean(outlook.reason))
        console().print()
        show_table(shown)


def _print_parts(inside: Inside) -> None:
    shown = table("rank", "part", "size", "tensors", "files", right=("rank", "size", "tensors"))
    for rank, record in inside.ranks.items():
        counts = listing.count_dtypes(record)
        dtypes = ", ".join(f"{count} {dtype}" for dtype, count in counts.items())
        shown.add_row(
            str(rank), "all", format_bytes(sum(record.part_bytes.values())), str(sum(counts.values())), dtypes
        )
        for part, size in record.part_bytes.items():
            files = clean(", ".join(record.parts.get(part, ())))
            shown.add_row(str(rank), clean(part), format_bytes(size), "", files)
    console().print()
    show_table(shown)


def _print_files(files: Iterable[tuple[str, int]]) -> None:
    shown = table("file", "size", right=("size",))
    for name, size in files:
        shown.add_row(clean(name), format_bytes(size))
    console().print()
    show_table(shown)


def _print_tensors(tensors: list[Tensor]) -> None:
    shown = table("tensor", "dtype", "shape", "file")
    for tensor in tensors:
        shape = " x ".join(map(str, tensor.shape)) or "scalar"
        shown.add_row(clean(tensor.name), tensor.dtype, shape, clean(tensor.file))
    console().print()
    show_table(shown)


# -- safetensors files of others ---------------------------------------------------------


def _show_plain(named: Named, tensors: bool, json: bool) -> None:
    folder, only = named.place.folder, named.place.file
    found = listing.plain_tensors(folder, only)
    counts: dict[str, int] = {}
    for tensor in found:
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
    names, wrong = weight_files(folder, only)
    sizes = {name: os.stat(folder / name).st_size for name in names}
    metadata = {name: read_header(folder / name).metadata for name in names}
    for file, what in wrong:
        say(f"{file}: {what}")
    if json:
        document: dict[str, Any] = {
            "kind": "plain",
            "ref": named.text,
            "path": folder,
            "bytes": sum(sizes.values()),
            "files": plain_files(folder, only),
            "shards": sizes,
            "metadata": metadata,
            "tensor_count": len(found),
            "dtypes": counts,
            "wrong": [f"{file}: {what}" for file, what in wrong],
        }
        if tensors:
            document["tensors"] = [_tensor(tensor) for tensor in found]
        print_json(document)
        return
    dtypes = ", ".join(f"{count} {dtype}" for dtype, count in counts.items())
    rows: list[tuple[str, object]] = [
        ("folder", folder),
        ("made by", "others than stepwell: no checksums"),
        ("size", format_bytes(sum(sizes.values()))),
        ("tensors", f"{len(found)}: {dtypes}"),
        *((key, value) for pairs_of in metadata.values() for key, value in pairs_of.items()),
    ]
    show_table(pairs([(clean(name), value) for name, value in rows]))
    _print_files(sizes.items())
    if tensors:
        _print_tensors(found)
