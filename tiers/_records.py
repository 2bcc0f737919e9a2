"""Small JSON files: written beside their place, made durable, then put there whole.

A record that exists is never replaced. Three ways to say "only if it is not there", best first:
link(2), which every POSIX file system with hard links takes and which is safe over NFS; renameat2 with
RENAME_NOREPLACE, for those without hard links (FUSE, some object gateways); and last a claim file made with
O_EXCL, which is safe between writers that use it, and is taken over when its maker died.

All functions are coroutines that run on the tier's own threads. They leave OSError as it is.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from typing import Any, Literal, TypeVar

import aiofiles

from stepwell.tiers._folders import TEMPORARY_SUFFIX, sync_folder

T = TypeVar("T")

#: a larger "record" is some other file, and reading it whole would only fill memory
RECORD_BYTES_MAX = 512 << 20
#: after this long a claim's maker is dead: between its two calls lie milliseconds
CLAIM_STALE_S = 60.0
#: how long another's fresh claim is waited for, and how often it is looked at
CLAIM_WAIT_S = 2.0
CLAIM_POLL_S = 0.005

_NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EACCES}
_NO_NOREPLACE = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}
_ABSENT = {errno.ENOENT, errno.ENOTDIR}
_AT_FDCWD = -100
_RENAME_NOREPLACE = 1


async def _run(executor: Executor, call: Callable[..., T], *args: object) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, call, *args)


async def publish(path: str, data: bytes, executor: Executor, check: Callable[[], None] = lambda: None) -> bool:
    """Makes the record durable at `path`; False, and nothing changed, if something is there already.

    check: called right before the record gets its name, raises OSError if it must not.
    When the folder cannot be made durable the record is taken back before the error is raised: nobody must
    see a commit that failed.
    """
    temporary = await _write_beside(path, data, executor, durable=True)
    return await _run(executor, _place_durably, temporary, path, check)


async def replace(path: str, data: bytes, executor: Executor) -> None:
    """Puts a file that need not be durable at `path`, whole, over whatever is there."""
    temporary = await _write_beside(path, data, executor, durable=False)
    try:
        await _run(executor, os.rename, temporary, path)
    except OSError:
        await _run(executor, _unlink_quietly, temporary)
        raise


async def fetch(path: str, executor: Executor) -> bytes | None:
    """The file's bytes; None if it is not there."""
    try:
        return await _run(executor, _read, path)
    except OSError as error:
        if error.errno in _ABSENT:
            return None
        raise


def _read(path: str) -> bytes:
    """In one call: a run of thousands of checkpoints has as many manifests."""
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_size > RECORD_BYTES_MAX:
            raise OSError(errno.EFBIG, f"not a record: more than {RECORD_BYTES_MAX} bytes", path)
        return file.read()


@asynccontextmanager
async def _opened(path: str, mode: Literal["xb"], executor: Executor) -> AsyncIterator[Any]:
    """aiofiles' own context manager closes on asyncio's shared executor, which is gone when the interpreter exits."""
    file = await aiofiles.open(path, mode, executor=executor)
    try:
        yield file
    finally:
        await file.close()


async def _write_beside(path: str, data: bytes, executor: Executor, *, durable: bool) -> str:
    folder, name = os.path.split(path)
    # a short name of its own: the record's name may use up the file system's limit
    temporary = os.path.join(folder, f".{name[:64]}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY_SUFFIX}")
    try:
        async with _opened(temporary, "xb", executor) as file:
            await file.write(data)
            await file.flush()
            if durable:
                await _run(executor, os.fsync, file.fileno())
    except OSError:
        await _run(executor, _unlink_quietly, temporary)
        raise
    return temporary


def _unlink_quietly(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass  # debris with a name of its own; scan reports it


def _place_durably(temporary: str, path: str, check: Callable[[], None]) -> bool:
    """In one call: between its steps an executor may refuse the next."""
    try:
        check()
        created = _place_new(temporary, path)
    finally:
        _unlink_quietly(temporary)
    if created:
        try:
            sync_folder(os.path.dirname(path))
        except OSError:
            _unlink_quietly(path)
            raise
    return created


def _place_new(temporary: str, path: str) -> bool:
    try:
        os.link(temporary, path)
        return True
    except FileExistsError:
        # over NFS the answer to a successful link may get lost, and its repetition finds the file there
        return os.stat(temporary).st_nlink == 2 and os.path.samefile(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
    try:
        rename_noreplace(temporary, path)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_NOREPLACE:
            raise
    return _place_claimed(temporary, path)


def rename_noreplace(source: str, target: str) -> None:
    """renameat2(RENAME_NOREPLACE). Raises OSError: EEXIST if the target is there, ENOSYS where unknown."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), source)
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), _RENAME_NOREPLACE) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), source, None, target)


def _place_claimed(temporary: str, path: str) -> bool:
    folder, name = os.path.split(path)
    claim = os.path.join(folder, f".{name[:64]}.claim")
    deadline = time.monotonic() + CLAIM_WAIT_S
    while not _try_claim(claim, temporary):
        if os.path.lexists(path):
            return False
        if time.monotonic() >= deadline:
            raise OSError(errno.EBUSY, "another writer has claimed this record", path)
        time.sleep(CLAIM_POLL_S)
    try:
        if os.path.lexists(path):
            return False
        os.rename(temporary, path)
        return True
    finally:
        _unlink_quietly(claim)


def _try_claim(claim: str, temporary: str) -> bool:
    try:
        os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o666))
        return True
    except FileExistsError:
        pass
    try:
        old = os.stat(claim)
        # both times are the file system's own, so clocks of nodes do not matter
        if os.stat(temporary).st_mtime - old.st_mtime >= CLAIM_STALE_S:
            aside = f"{temporary}.stale"
            os.rename(claim, aside)  # of many who find it stale, one gets it
            if os.path.samestat(os.stat(aside), old):
                os.unlink(aside)
            else:
                os.rename(aside, claim)  # it was a new one already
    except FileNotFoundError:
        pass  # just given up: the next try gets it
    return False
