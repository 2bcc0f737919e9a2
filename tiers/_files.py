"""Open shard files: the blocking calls that open them, and who still uses each descriptor.

A descriptor must not be closed while the kernel works on it: its number could be given to another file,
which would then receive the bytes. So every user holds the file, and the last to let go closes it.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Callable

from stepwell.tiers._folders import MANIFEST_PREFIX, drop_file, make_folders, remove_if_empty
from stepwell.tiers._probe import ALIGNMENT_BYTES, O_DIRECT
from stepwell.tiers.base import Reservation

#: what a file system says that takes no direct I/O here
_NO_DIRECT = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
#: and where a file's length cannot be set
_NO_TRUNCATE = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}
#: another rank's abort may remove the empty folder between our mkdir and our open
_OPEN_TRIES = 4


class OpenFile:
    """A descriptor and its users. Used on the loop's thread only; `close` is called with the descriptor."""

    __slots__ = ("close", "direct", "fd", "path", "users")

    def __init__(self, path: str, fd: int, direct: bool, close: Callable[[int], None]) -> None:
        self.path = path
        self.fd = fd
        self.direct = direct
        self.users = 1  # whoever opened it
        self.close = close

    def hold(self) -> None:
        self.users += 1

    def let_go(self) -> None:
        self.users -= 1
        if self.users == 0 and self.fd >= 0:
            self.close(self.take())

    def take(self) -> int:
        """The descriptor, which the caller now has to close."""
        fd, self.fd = self.fd, -1
        return fd


class WriteFile(OpenFile):
    """A reserved shard's file."""

    __slots__ = ("failure", "reservation", "sealed", "size_bytes", "unallocated_bytes")

    def __init__(self, path: str, fd: int, direct: bool, close: Callable[[int], None], size_bytes: int) -> None:
        super().__init__(path, fd, direct, close)
        self.size_bytes = size_bytes
        self.unallocated_bytes = size_bytes  # promised, but the file system does not know yet
        self.reservation: Reservation | None = None  # the very object that was handed out
        self.sealed = False  # while it is being made durable: no write may come in between, also if a timeout hid that
        self.failure = ""  # set once a sync failed: the kernel reports such a loss only once


def create(root: str, path: str, size_bytes: int, direct: bool) -> tuple[int, bool]:
    """Makes folder and file anew; the descriptor and whether it takes direct writes.

    Whether it does is tried with one real page: the open alone says little, and a batch of linked writes
    is too late to find out. A file that belongs to a committed checkpoint is never replaced.
    """
    folder = os.path.dirname(path)
    for attempt in range(_OPEN_TRIES):
        make_folders(root, folder)
        if os.path.lexists(path):
            _check_uncommitted(path)
            os.unlink(path)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            break
        except FileNotFoundError:
            if attempt == _OPEN_TRIES - 1:
                raise
    try:
        return fd, direct and size_bytes > 0 and set_direct(fd, True) and _trial_write(fd)
    except OSError:
        os.close(fd)
        os.unlink(path)
        raise


def _check_uncommitted(path: str) -> None:
    if any(other.startswith(MANIFEST_PREFIX) for other in os.listdir(os.path.dirname(path))):
        raise OSError(errno.EEXIST, "belongs to a committed checkpoint", path)


def taken_bytes(path: str, size_bytes: int) -> int | None:
    """What the file takes on the medium; None if there is none that was reserved with this size."""
    try:
        found = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    padded_bytes = -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES  # after a direct write of the last chunk
    if not stat.S_ISREG(found.st_mode) or found.st_size not in (size_bytes, padded_bytes):
        return None
    return found.st_blocks * 512


def resume(path: str, size_bytes: int, direct: bool) -> tuple[int, bool]:
    """As `create`, but opens the file that is there, with all its bytes."""
    _check_uncommitted(path)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        # pages that another process failed to write may look clean: what is verified must come from the medium
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return fd, direct and size_bytes > 0 and set_direct(fd, True) and _trial_rewrite(fd)
    except OSError:
        os.close(fd)
        raise


def lengthen(fd: int, size_bytes: int) -> None:
    """Gives a file that cannot be preallocated its reserved length, so that it can be read and resumed.

    One that is append-only, or whose file system has no such call, grows by being written.
    """
    if os.fstat(fd).st_size < size_bytes:
        try:
            os.ftruncate(fd, size_bytes)
        except OSError as error:
            if error.errno not in _NO_TRUNCATE:
                raise


def open_reading(path: str, direct: bool) -> tuple[int, bool]:
    """Opens for reading; the descriptor and whether it takes direct reads (tried, too)."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return fd, direct and set_direct(fd, True) and _trial_read(fd)
    except OSError:
        os.close(fd)
        raise


def set_direct(fd: int, wanted: bool) -> bool:
    """Switches direct I/O of an open file; False where the file system refuses it."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | O_DIRECT if wanted else flags & ~O_DIRECT)
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        return False
    return not wanted or O_DIRECT != 0


def _trial_write(fd: int) -> bool:
    with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
        return _try(fd, lambda: os.pwrite(fd, page, 0))


def _trial_rewrite(fd: int) -> bool:
    """The first page, as it is. Padding goes with the file's last byte, at the commit."""
    with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
        return _try(fd, lambda: os.preadv(fd, [page], 0) and os.pwrite(fd, page, 0))


def _trial_read(fd: int) -> bool:
    with mmap.mmap(-1, ALIGNMENT_BYTES) as page:
        return _try(fd, lambda: os.preadv(fd, [page], 0))


def _try(fd: int, call: Callable[[], int]) -> bool:
    try:
        call()
    except OSError as error:
        if error.errno not in _NO_DIRECT:
            raise
        set_direct(fd, False)
        return False
    return True


def finish(files: list[tuple[int, int]]) -> None:
    """Cuts off what padding and preallocation added: (descriptor, bytes) each."""
    for fd, size_bytes in files:
        if os.fstat(fd).st_size != size_bytes:  # an append-only file refuses even what changes nothing
            os.ftruncate(fd, size_bytes)


def close_all(descriptors: list[int]) -> list[int]:
    """Closes all, whatever fails; an errno or 0 each. Network file systems report lost writes here."""
    numbers = []
    for fd in descriptors:
        try:
            os.close(fd)
            numbers.append(0)
        except OSError as error:
            numbers.append(error.errno or errno.EIO)
    return numbers


def discard(path: str, descriptors: list[int]) -> None:
    """Closes and removes what an aborted shard left, and its folder if nothing else is in it."""
    close_all(descriptors)
    drop_file(path)
    remove_if_empty(os.path.dirname(path))
