"""What the disk gives: a file of the same size, written and read without the page cache and without stepwell's store.

One thread hands large pieces to stepwell's own native engine, as plain as it gets: no checksums, no copies, no commits.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from stepwell.native import Engine, Job, Op, Region

PIECE_BYTES = 8 << 20
MEMORY_BYTES = 64 << 20  # written and read over and over: what is in it does not matter
ROUNDS = 3  # the best one counts
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Bytes a second. direct: without the page cache; False where the file system does not take that."""

    write: float
    read: float
    direct: bool


def measure_ceiling(folder: Path, size: int) -> Ceiling:
    """Writes (with fdatasync) and reads a file of about `size` bytes in `folder` a few times, and removes it."""
    path = folder / "ceiling"
    size = max(PIECE_BYTES, size // PIECE_BYTES * PIECE_BYTES)
    direct = _takes_direct(path)
    writes, reads = [], []
    with contextlib.closing(Region(MEMORY_BYTES)) as memory, Engine("ceiling", depth=32) as engine:
        try:
            for _ in range(ROUNDS):
                path.unlink(missing_ok=True)
                with _opened(path, os.O_WRONLY | os.O_CREAT, direct) as fd:
                    began = time.perf_counter()
                    _run(engine, [Job(Op.FALLOCATE, fd=fd, length=size)], must=False)
                    _run(engine, [_job(Op.WRITE, fd, memory, start, direct) for start in range(0, size, PIECE_BYTES)])
                    os.fdatasync(fd)
                    writes.append(size / (time.perf_counter() - began))
                with _opened(path, os.O_RDONLY, direct) as fd:
                    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                    began = time.perf_counter()
                    _run(engine, [_job(Op.READ, fd, memory, start, direct) for start in range(0, size, PIECE_BYTES)])
                    reads.append(size / (time.perf_counter() - began))
        finally:
            path.unlink(missing_ok=True)
    return Ceiling(max(writes), max(reads), direct)


def _job(op: Op, fd: int, memory: Region, start: int, direct: bool) -> Job:
    address = memory.address + start % MEMORY_BYTES
    return Job(op, fd=fd, address=address, offset=start, length=PIECE_BYTES, direct=direct, keep=memory)


def _run(engine: Engine, jobs: list[Job], must: bool = True) -> None:
    engine.submit(jobs)
    left, deadline = len(jobs), time.monotonic() + TIMEOUT_S
    while left:
        for done in engine.reap():
            left -= 1
            if must and done.result != done.job.length:
                raise RuntimeError(f"measuring the disk failed: {os.strerror(max(0, -done.result))}")
        if time.monotonic() > deadline:
            raise RuntimeError(f"measuring the disk took longer than {TIMEOUT_S:.0f} s")
        time.sleep(0.0002)


@contextlib.contextmanager
def _opened(path: Path, flags: int, direct: bool) -> Iterator[int]:
    fd = os.open(path, flags | (os.O_DIRECT if direct else 0), 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def _takes_direct(path: Path) -> bool:
    """Found by writing: some file systems let O_DIRECT pass at open and refuse it later."""
    try:
        with contextlib.closing(Region(4096)) as page, _opened(path, os.O_WRONLY | os.O_CREAT, True) as fd:
            with Engine("probe") as engine:
                _run(engine, [Job(Op.WRITE, fd=fd, address=page.address, length=4096, direct=True, keep=page)])
    except (OSError, RuntimeError):
        return False
    return True
