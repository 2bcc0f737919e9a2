"""What the disk takes and gives: new files written and read past the page cache, durable within the time."""

from __future__ import annotations

import os
import select
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from stepwell.native import Engine, Job, Op, Region

CHUNK_BYTES = 8 << 20
BUFFER_BYTES = 128 << 20  # what is written and read over and over
TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to write or read."""

    backend: Literal["io_uring", "threads"]
    request_bytes: int
    depth: int  # requests in flight, or threads
    direct: bool = True

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        return f"{how} {self.backend} {self.request_bytes >> 20}m x{self.depth}"


SETTINGS = (
    Setting("io_uring", 4 << 20, 16),
    Setting("io_uring", 1 << 20, 16),
    Setting("io_uring", 1 << 20, 4),
    Setting("threads", 4 << 20, 8),
    Setting("threads", 4 << 20, 4, direct=False),
)


@dataclass(slots=True)
class Disk:
    """The disk of a folder. One file of `size` bytes is there after the first `write`."""

    folder: Path
    size: int
    settings: Sequence[Setting] = SETTINGS
    best: dict[str, Setting] = field(default_factory=dict)
    pilots: dict[str, float] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.folder / "ceiling.data"

    def choose(self, rounds: int = 1) -> None:
        """Tries all settings that work here, and takes the best of each direction."""
        for kind in ("write", "read"):
            medians: dict[Setting, float] = {}
            for setting in self.settings:
                try:
                    medians[setting] = statistics.median(self._run(kind, setting) for _ in range(rounds))
                except OSError:
                    continue  # no io_uring, or no direct I/O here
                self.pilots[f"{kind} {setting}"] = round(medians[setting] / 1e9, 3)
            self.best[kind] = max(medians, key=medians.__getitem__)

    def write(self) -> float:
        """Bytes per second, fdatasync included."""
        return self._run("write", self.best["write"])

    def read(self) -> float:
        """Bytes per second of the file, cold."""
        return self._run("read", self.best["read"])

    def clear(self) -> None:
        self.path.unlink(missing_ok=True)

    def _run(self, kind: str, setting: Setting) -> float:
        if kind == "write":
            self.clear()  # a file that is written over again is faster, and no checkpoint is
        flags = os.O_RDWR | os.O_CREAT | (os.O_DIRECT if setting.direct else 0)
        options = {"threads" if setting.backend == "threads" else "depth": setting.depth}
        fd = os.open(self.path, flags, 0o600)
        try:
            with (
                Region(min(BUFFER_BYTES, self.size)) as region,
                Engine("bench", backend=setting.backend, request_bytes=setting.request_bytes, **options) as engine,
            ):
                region.populate(0, region.size)
                forget(self.path)
                began = time.perf_counter()
                self._move(engine, Op.WRITE if kind == "write" else Op.READ, fd, region, setting.direct)
                return self.size / (time.perf_counter() - began)
        finally:
            os.close(fd)

    def _move(self, engine: Engine, op: Op, fd: int, region: Region, direct: bool) -> None:
        if op is Op.WRITE:
            _finish(engine, [Job(Op.FALLOCATE, fd=fd, length=self.size)], may_fail=True)
        size = min(CHUNK_BYTES, region.size)
        places = region.size // size
        jobs = [
            Job(op, fd, region.address + i % places * size, at, min(size, self.size - at), direct, keep=region)
            for i, at in enumerate(range(0, self.size, size))
        ]
        _finish(engine, jobs)
        if op is Op.WRITE:
            _finish(engine, [Job(Op.SYNC, fd=fd)])


def _finish(engine: Engine, jobs: Sequence[Job], may_fail: bool = False) -> None:
    engine.submit(jobs)
    left = len(jobs)
    while left:
        if not select.select([engine], [], [], TIMEOUT_S)[0]:
            raise TimeoutError(f"the disk did nothing for {TIMEOUT_S:.0f} s")
        done = engine.reap()
        left -= len(done)
        for one in done:
            if one.result < 0 and not may_fail:
                raise OSError(-one.result, f"{one.job.op.name}: {os.strerror(-one.result)}")


def forget(path: Path) -> None:
    """Of a file, or of all files below a folder: makes them durable and takes them from the page cache."""
    below = (os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names)
    for each in [path] if path.is_file() else below:
        try:
            fd = os.open(each, os.O_RDONLY)
        except FileNotFoundError:  # deleted meanwhile, as an older checkpoint may be
            continue
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
