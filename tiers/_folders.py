"""Blocking calls on folders: make, list, delete, and how much room there is. For a tier's own threads.

They leave OSError as it is; the driver translates it once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from dataclasses import dataclass

from stepwell.tiers.base import Found

#: names that commit a checkpoint begin so; they are deleted first
MANIFEST_PREFIX = "manifest"
#: and those from which a later writer commits what a dead one left: gone durably before anything else, too, so that
#: none comes back after a crash beside shards that were begun anew
RANK_PREFIX = "rank-"
COMMIT_PREFIXES = (MANIFEST_PREFIX, RANK_PREFIX)
#: of a record that has not got its name yet
TEMPORARY_SUFFIX = ".tmp"

#: over NFS, a deleted file that a reader still has open; the server removes it later
_OPEN_PREFIX = ".nfs"

_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def sync_folder(path: str) -> None:
    """Makes the folder's entries durable. File systems that know no such call are taken to do it anyway."""
    descriptor = os.open(path, _FOLDER)
    try:
        _sync_open_folder(descriptor)
    finally:
        os.close(descriptor)


def _sync_open_folder(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise


def make_folders(root: str, path: str) -> None:
    """Makes `path` under an existing `root`, and durable each name that was made. umask and setgid hold."""
    missing = []
    while path != root and not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            continue  # another rank was faster; it syncs the parent, too
        sync_folder(os.path.dirname(folder))


def remove_if_empty(path: str) -> None:
    try:
        os.rmdir(path)
    except OSError:
        pass  # not empty, or gone: both are fine


@dataclass(frozen=True, slots=True)
class Space:
    """Room on a file system, as an unprivileged user sees it."""

    free_bytes: int
    total_bytes: int


def space(path: str) -> Space:
    stat = os.statvfs(path)
    return Space(stat.f_bavail * stat.f_frsize, stat.f_blocks * stat.f_frsize)


@dataclass(frozen=True, slots=True)
class Listed:
    """One found file with the bytes that it takes on the medium."""

    found: Found
    physical_bytes: int


def list_run(path: str) -> tuple[list[str], list[Listed]] | None:
    """Folders (names) and files of a run; None if the run is not there."""
    folders: list[str] = []
    files: list[Listed] = []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir():
                    folders.append(entry.name)
                else:
                    files += _listed("", entry)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return folders, files


def list_folders(run: str, attempts: list[str]) -> list[Listed]:
    """Every file of these folders. One that vanishes meanwhile has none; an empty one is told with the name ""."""
    result: list[Listed] = []
    for attempt in attempts:
        try:
            with os.scandir(os.path.join(run, attempt)) as entries:
                files = [file for entry in entries for file in _listed(attempt, entry)]
        except (FileNotFoundError, NotADirectoryError):
            continue
        result += files or [Listed(Found(attempt, "", 0), 0)]
    return result


def _listed(attempt: str, entry: os.DirEntry[str]) -> list[Listed]:
    try:
        if entry.is_dir():
            return []
        stat = entry.stat()
    except FileNotFoundError:  # deleted meanwhile, or a link to nothing: no data either way
        return []
    return [Listed(Found(attempt, entry.name, stat.st_size), stat.st_blocks * 512)]


def check_inside(root: str, path: str) -> None:
    """Raises OSError(EXDEV) if links lead `path` out of `root`: nothing is deleted there."""
    real_root, real_path = os.path.realpath(root), os.path.realpath(path)
    if os.path.commonpath((real_root, real_path)) != real_root:
        raise OSError(errno.EXDEV, "a symbolic link leads out of the tier's root: nothing is deleted there", path)


def check_something_to_commit(folder: str) -> None:
    """Raises OSError(ENOENT) if no rank's record is in a checkpoint's folder (any more)."""
    with os.scandir(folder) as entries:
        if not any(entry.name.startswith(RANK_PREFIX) for entry in entries):
            raise OSError(errno.ENOENT, "what it commits is gone: another process has deleted it", folder)


def commits_first(names: Iterable[str]) -> list[str]:
    """Those of a folder's names that must go before all others, in their order: manifests first."""
    commits = [name for name in names if name.startswith(COMMIT_PREFIXES)]
    return sorted(commits, key=lambda name: not name.startswith(MANIFEST_PREFIX))


def drop_folder(path: str) -> None:
    """Deletes a checkpoint's folder: what commits it first, durably, then the rest. Follows no link.

    Folders inside are none of ours and stay, and so does then the folder itself.
    """
    try:
        folder = os.open(path, _FOLDER | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        if _empty(folder):
            _empty(folder)  # what a writer that was not told in time has put there meanwhile
    finally:
        os.close(folder)
    remove_if_empty(path)


def _empty(folder: int) -> int:
    """Deletes the files in an open folder; how many there were."""
    names = os.listdir(folder)
    commits = commits_first(names)
    under_way = [name for name in names if name.endswith(TEMPORARY_SUFFIX)]  # without it the record does not arrive
    first = dict.fromkeys((*under_way, *commits))
    for name in first:
        _unlink_at(folder, name)
    if commits:
        _sync_open_folder(folder)
    for name in names:
        if name not in first:
            _unlink_at(folder, name)
    return len(names)


def _unlink_at(folder: int, name: str) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except (FileNotFoundError, IsADirectoryError):
        pass
    except OSError as error:
        if not (error.errno == errno.EBUSY and name.startswith(_OPEN_PREFIX)):
            raise


def names_in(path: str) -> list[str]:
    """The files of a checkpoint's folder that `drop_folder` would delete. Follows no link."""
    try:
        folder = os.open(path, _FOLDER | os.O_NOFOLLOW)
    except FileNotFoundError:
        return []
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.is_dir(follow_symlinks=False)]
    finally:
        os.close(folder)
    return [name for name in names if not name.startswith(_OPEN_PREFIX)]


def drop_file(path: str) -> None:
    """Deletes one file, or a link itself. What is not there is no error."""
    try:
        os.unlink(path)
    except (FileNotFoundError, NotADirectoryError):
        pass


def drop(root: str, path: str, is_folder: bool) -> None:
    """Deletes a checkpoint's folder or one file, if it really lies inside of `root`; what commits one, durably."""
    check_inside(root, os.path.dirname(path))
    if is_folder:
        drop_folder(path)
        return
    drop_file(path)
    folder, name = os.path.split(path)
    if name.startswith(COMMIT_PREFIXES) and os.path.isdir(folder):
        sync_folder(folder)


def check_root(root: str, make: bool) -> None:
    """Raises OSError if the root is not a folder; makes it if asked and its parent exists."""
    if make and not os.path.isdir(root):
        try:
            os.mkdir(root)
        except FileExistsError:
            pass  # another rank was faster, or it is no folder: the next line tells
        else:
            sync_folder(os.path.dirname(root))
    os.close(os.open(root, _FOLDER))
