"""Taking a shared arena: where it lies, whether it is free to be taken, and how large it can be there. May block.

A small /dev/shm, as containers have it (64 MiB): if at least half of the capacity has room, the arena takes what there
is; with less, saves would hardly be faster than the disk, and private memory serves better. Arenas without an owner
make room first, those whose owner came first before the others.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

from stepwell.errors import TierError, TierUnavailable
from stepwell.native import memory_kind
from stepwell.tiers import _shm

log = logging.getLogger("stepwell")

#: below this part of what was asked for, private memory serves better
ENOUGH_SHARE = 0.5
#: of a tmpfs that has no limit: what the machine has counts, and that is looked at elsewhere
NO_LIMIT_BYTES = 1 << 62
#: of the mount, beside the slots: index and records; no more than one part in eight
BESIDE_BYTES, BESIDE_SHARE = 16 << 20, 8


@dataclass(frozen=True, slots=True)
class Place:
    """Where an arena is."""

    root: Path
    folder: Path
    slots: Path | None = None  # the file of slots, where it is not in the folder
    page_bytes: int = 4096
    kind: str = "tmpfs"

    @staticmethod
    def find(root: Path, name: str) -> Place:
        """Raises TierUnavailable if `root` is not in memory, or not there."""
        try:
            descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                kind, page_bytes = memory_kind(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _wrong(f"cannot share memory at {root}: {error.strerror}", root) from error
        if kind == "hugetlbfs":  # nothing can be written to a file there, so that holds the slots alone
            away = _shm.user_folder(root)
            return Place(root, _shm.user_folder() / name, away / f"{name}.slots", page_bytes, kind)
        if kind != "tmpfs":
            raise _wrong(f"{root} is not in memory", root)
        return Place(root, _shm.user_folder(root) / name)


def _wrong(what: str, root: Path) -> TierUnavailable:
    error = TierUnavailable(what, todo="Set the host tier's path to a tmpfs or hugetlbfs mount", path=str(root))
    error.retry = False
    return error


@dataclass(frozen=True, slots=True)
class Claim:
    """An arena that this process owns, and how large it can be; without a lock, why it owns none."""

    lock: _shm.Lock | None
    capacity_bytes: int = 0
    why: str = ""
    busy: bool = False  # a live process has it


def claim(place: Place, capacity_bytes: int) -> Claim:
    """Takes the arena, if nobody has it and there is room. Raises TierUnavailable for folders not to be trusted."""
    if place.slots is not None:
        _shm.make_folder(place.slots.parent)
    lock = _shm.try_to_lock(place.folder)
    if lock is None:
        owner = _shm.read_owner(place.folder) or "nobody knows which"
        return Claim(None, why=f"it belongs to a live process ({owner})", busy=True)
    room_bytes = _make_room(place, capacity_bytes)
    if room_bytes >= capacity_bytes:
        return Claim(lock, capacity_bytes)
    what = (
        f"{place.root} has room for {room_bytes >> 20} MiB, and the host tier wants {capacity_bytes >> 20} MiB. Give "
        "it more (of a container: docker run --shm-size), set the tier's path to a larger mount, or its capacity lower"
    )
    if room_bytes < capacity_bytes * ENOUGH_SHARE:
        lock.close()
        return Claim(None, why=what)
    log.warning("shared memory is small: %s", what)
    return Claim(lock, room_bytes)


def _make_room(place: Place, capacity_bytes: int) -> int:
    """What the arena can have; arenas without an owner are removed as far as it needs that."""
    room_bytes = _room(place)
    dead = [found for found in _shm.arenas(place.folder.parent.parent) if not found.alive]
    for found in sorted(dead, key=lambda each: each.owner.since if each.owner else 0.0):
        if room_bytes >= capacity_bytes:
            break
        if found.folder == place.folder:
            continue
        try:
            freed = _shm.remove(found.folder)
        except (TierError, OSError):  # somebody has taken it, or was faster
            continue
        log.warning("removed %s, which had no owner: its %d MiB are needed", found.folder, freed >> 20)
        room_bytes = _room(place)
    return room_bytes


def free(root: Path) -> int:
    """Bytes that are free on a mount."""
    there = os.statvfs(root)
    return there.f_bavail * there.f_frsize if there.f_blocks else NO_LIMIT_BYTES


def _room(place: Place) -> int:
    there, free_bytes = os.statvfs(place.root), free(place.root)
    taken = _shm.size_bytes(place.folder)
    beside = 0 if place.slots is not None else min(BESIDE_BYTES, there.f_blocks * there.f_frsize // BESIDE_SHARE)
    return max(0, free_bytes + taken - beside)
