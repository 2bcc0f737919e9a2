"""Arenas in named shared memory: the folder of each, whom it belongs to, and how it is found and removed.

    <root>/stepwell-<uid>/<name>/
        owner       locked (flock) by the process that the arena belongs to; says who that is
        index       a row for each slot
        slots       the slots themselves; sparse. A link where the memory is on another mount (hugetlbfs)
        records/    what was committed, a file for each record
        evict.json  the eviction policy's state
        socket      where the owner answers other processes

Whether an owner lives is told by the lock alone: process ids mean nothing in another container, and may have been
given anew. The lock belongs to an open file of its own, which a forked child closes without unlocking it, so the
parent's death shows although children live on. Nothing is ever truncated: whoever has it mapped would be killed by
that. Removing unlinks, and the memory is free once the last process has let go of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import getpass
import hashlib
import json
import os
import socket
import stat
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from stepwell.errors import TierError, TierUnavailable

#: where shared memory is, unless the tier's `path` says otherwise
ROOT = Path("/dev/shm")

OWNER, INDEX, SLOTS, RECORDS, EVICT, SOCKET = "owner", "index", "slots", "records", "evict.json", "socket"

#: how long a lock that is taken is tried again: whoever only looks has it for microseconds
TRY_S, TRY_AGAIN_S = 0.1, 0.005
#: of a tier's and a run's name in the folder's; with them, a socket's path fits into the 107 bytes that it may have
TIER_CHARS, RUN_CHARS = 16, 32


@dataclass(frozen=True, slots=True)
class OwnerInfo:
    """The process that an arena belongs to, or belonged to last."""

    pid: int
    pid_space: str  # the namespace in which `pid` means something
    host: str
    user: str
    run: str
    since: float  # seconds since 1970
    slot_bytes: int
    capacity_bytes: int

    def __str__(self) -> str:
        return f"user {self.user}, host {self.host}, pid {self.pid}"


def describe_owner(run: str, slot_bytes: int, capacity_bytes: int) -> OwnerInfo:
    """This process, as an owner."""
    space = ""
    with contextlib.suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")
    return OwnerInfo(
        os.getpid(), space, socket.gethostname(), _user_name(), run, round(time.time(), 3), slot_bytes, capacity_bytes
    )


def _user_name() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # no name for this uid, as in many containers
        return str(os.geteuid())


def user_folder(root: Path | str = ROOT) -> Path:
    """Where this user's arenas are."""
    return Path(root) / f"stepwell-{os.geteuid()}"


def arena_name(tier: str, run: str, local_rank: int, place: str) -> str:
    """The folder's name. place: the last tier's path, which tells runs of one name apart."""
    told = hashlib.blake2b("\0".join((place, tier, run)).encode("utf-8", "surrogateescape"), digest_size=6).hexdigest()
    return f"{tier[:TIER_CHARS]}.{run[:RUN_CHARS]}.{local_rank}.{told}"


# -- files that forked children let go of ------------------------------------------------

_held: weakref.WeakSet[HeldFile] = weakref.WeakSet()


class HeldFile:
    """An open file of this process alone: a forked child closes its copy, and what it held is the parent's only."""

    def __init__(self, path: Path | str, flags: int) -> None:
        """A link at the end of the path is not followed. Raises OSError."""
        self.fd = -1
        self.fd = os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        _held.add(self)

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        _held.discard(self)
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()


def _let_go() -> None:
    for file in list(_held):
        file.close()


os.register_at_fork(after_in_child=_let_go)


# -- the folder of a user, and of an arena -----------------------------------------------


def make_folder(folder: Path) -> None:
    """Makes a folder that only this user can look into; one that is there must be like that.

    Raises TierUnavailable for a link, another user's folder, or one that others may enter: whoever can write there
    could have put anything into the memory that is read as checkpoints.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found = os.stat(folder, follow_symlinks=False)
    except OSError as error:
        raise _unavailable(f"cannot make the folder of shared memory: {error.strerror}", folder) from error
    if not stat.S_ISDIR(found.st_mode):
        raise _unavailable("what should be the folder of shared memory is none", folder)
    if found.st_uid != os.geteuid():
        raise _unavailable(f"the folder of shared memory belongs to another user (uid {found.st_uid})", folder)
    if found.st_mode & 0o077:
        raise _unavailable(f"others may enter the folder of shared memory (mode {found.st_mode & 0o777:o})", folder)


def _unavailable(what: str, path: Path) -> TierUnavailable:
    error = TierUnavailable(
        what, todo="Remove it, or set the host tier's path to a folder of your own in memory", path=str(path)
    )
    error.retry = False
    return error


class Lock:
    """That this process owns an arena. Ends with `close`, or with the process."""

    def __init__(self, folder: Path, file: HeldFile) -> None:
        self.folder, self._file = folder, file

    @property
    def held(self) -> bool:
        """False once closed, and in a forked child."""
        return self._file.fd >= 0

    def tell(self, owner: OwnerInfo) -> None:
        """Says to others who owns the arena."""
        data = json.dumps(asdict(owner)).encode()
        os.pwrite(self._file.fd, data.ljust(os.fstat(self._file.fd).st_size), 0)

    def close(self) -> None:
        """Idempotent."""
        self._file.close()


def try_to_lock(folder: Path) -> Lock | None:
    """Makes the folder of an arena and takes it; None if somebody has it. Its parent is made, too.

    Blocks for up to TRY_S if it is taken. Raises TierUnavailable for a folder that cannot be trusted, OSError.
    """
    deadline = time.monotonic() + TRY_S
    while True:
        for each in (folder.parent, folder):
            make_folder(each)
        lock = _lock_once(folder)
        if lock is not None or time.monotonic() > deadline:
            return lock
        time.sleep(TRY_AGAIN_S)


def _lock_once(folder: Path) -> Lock | None:
    try:
        file = HeldFile(folder / OWNER, os.O_RDWR | os.O_CREAT)
    except FileNotFoundError:  # the folder was removed meanwhile
        return None
    try:
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found, here = os.stat(folder / OWNER, follow_symlinks=False), os.fstat(file.fd)
        if (found.st_dev, found.st_ino) == (here.st_dev, here.st_ino):  # else it was removed before it was locked
            return Lock(folder, file)
    except (BlockingIOError, FileNotFoundError):
        pass
    file.close()
    return None


# -- all arenas of a user ----------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Found:
    """One arena that is there."""

    folder: Path
    owner: OwnerInfo | None  # None: nothing readable says so
    alive: bool
    size_bytes: int  # of memory that it takes now

    @property
    def name(self) -> str:
        return self.folder.name

    @property
    def socket(self) -> Path:
        return self.folder / SOCKET


def arenas(root: Path | str = ROOT) -> list[Found]:
    """This user's arenas below a root, by name. A user who has none has no folder; that is no error.

    Raises TierUnavailable if the folder is not this user's alone.
    """
    above = user_folder(root)
    if not os.path.lexists(above):
        return []
    make_folder(above)
    found = []
    for name in sorted(os.listdir(above)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # removed meanwhile, or none of ours
            if (one := look(above / name)) is not None:
                found.append(one)
    return found


def look(folder: Path) -> Found | None:
    """One arena, whoever has it; None if it is not there."""
    if not stat.S_ISDIR(os.stat(folder, follow_symlinks=False).st_mode):
        return None
    return Found(folder, read_owner(folder), is_alive(folder), size_bytes(folder))


def read_owner(folder: Path) -> OwnerInfo | None:
    """Who says that the arena is theirs; None if that cannot be read. Whether they live is told by `is_alive`."""
    try:
        told = json.loads((folder / OWNER).read_bytes())
        return OwnerInfo(**{field.name: told[field.name] for field in fields(OwnerInfo)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


def is_alive(folder: Path) -> bool:
    """Whether a process owns the arena now."""
    try:
        file = HeldFile(folder / OWNER, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file.fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who look do not see each other
        return False
    except BlockingIOError:
        return True
    finally:
        file.close()


def size_bytes(folder: Path) -> int:
    """The memory that an arena takes now, in bytes."""
    return sum(os.stat(path).st_blocks * 512 for path in _files(folder) if path.exists())


def _files(folder: Path) -> Iterator[Path]:
    for inside, _, names in os.walk(folder):
        for name in names:
            yield Path(inside) / name


def remove(folder: Path) -> int:
    """Removes an arena that nobody owns; returns the bytes of memory that it took.

    They are free once the last process that reads it has let go. Raises TierError (EBUSY) if it has an owner,
    TierUnavailable for a folder that cannot be trusted.
    """
    lock = try_to_lock(folder)
    if lock is None:
        error = TierError(
            f"the arena belongs to a live process ({read_owner(folder) or 'nobody knows which'})",
            todo="End that process first", path=str(folder),
        )  # fmt: skip
        error.errno = errno.EBUSY
        raise error
    try:
        freed_bytes = size_bytes(folder)
        wipe(folder)
        os.unlink(folder / OWNER)  # last: until then nobody else can begin anew here
    finally:
        lock.close()
    with contextlib.suppress(OSError):  # another process has begun anew already
        os.rmdir(folder)
    return freed_bytes


def wipe(folder: Path) -> None:
    """Unlinks all that an arena consists of, but for what says whose it is. Whoever calls this owns it."""
    for path in list(_files(folder)):
        if path == folder / OWNER:
            continue
        if path == folder / SLOTS and path.is_symlink():
            Path(os.path.realpath(path)).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder / RECORDS)
