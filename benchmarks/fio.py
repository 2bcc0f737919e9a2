"""fio as the measure of what a disk can do: the settings that are tried, and one run of one of them.

Every write makes new files (a file that is written over again is faster, and no checkpoint is), with its room
allocated by the file system and an fsync inside the time. Every read is of files that the page cache does not hold.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Kind = Literal["write", "read"]
GB = 1e9
TIMEOUT_S = 300
BLOCK_BYTES = 4096  # sizes are rounded down to whole blocks, a job's share of them too


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to write or read: `jobs` processes, each with its share of the bytes."""

    engine: str
    direct: bool
    block: str
    depth: int
    jobs: int = 1
    fixed: bool = False  # buffers and files registered with io_uring

    def __str__(self) -> str:
        how = "direct" if self.direct else "buffered"
        jobs = f", {self.jobs} jobs" if self.jobs > 1 else ""
        return f"{how} {self.engine} {self.block} x{self.depth}{jobs}{', fixed buffers' if self.fixed else ''}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


#: what pilots try; buffered io_uring is not among them: it hands each request to a kernel thread and was slower
WRITE_SETTINGS = (
    Setting("io_uring", True, "4m", 16),
    Setting("io_uring", True, "4m", 16, fixed=True),
    Setting("io_uring", True, "1m", 16, fixed=True),
    Setting("io_uring", True, "1m", 4, fixed=True),
    Setting("io_uring", True, "4m", 4, jobs=4),
    Setting("sync", False, "1m", 1),
    Setting("sync", False, "1m", 1, jobs=4),
)
READ_SETTINGS = (
    Setting("io_uring", True, "4m", 16),
    Setting("io_uring", True, "4m", 16, fixed=True),
    Setting("io_uring", True, "1m", 16, fixed=True),
    Setting("io_uring", True, "4m", 4, jobs=4),
    Setting("sync", False, "1m", 1),
    Setting("sync", False, "1m", 1, jobs=4),
)


def available() -> bool:
    return shutil.which("fio") is not None


def drop_caches() -> None:
    """Writes back what is dirty, and empties the page cache. Needs root.

    With STEPWELL_KEEP_CACHES set it leaves the cache alone: for tests, which must not slow each other down.
    """
    os.sync()
    if os.environ.get("STEPWELL_KEEP_CACHES"):
        return
    Path("/proc/sys/vm/drop_caches").write_text("3")


def make_file(folder: Path, size: int) -> None:
    """The file that reads are measured on; direct writes, so that none of it is cached."""
    clear(folder)
    _run(_options(Setting("io_uring", True, "4m", 16), "write", size) + [f"--filename={folder / 'read.data'}"])


def clear(folder: Path) -> None:
    """Removes the files of earlier runs."""
    for path in folder.glob("*.data"):
        path.unlink()


def run(setting: Setting, kind: Kind, folder: Path, size: int) -> dict[str, float]:
    """One run over `size` bytes: {"gb_s", "seconds", "cpu_s_gb"}. A read needs `make_file` before it.

    Writes go to new files, one a job; reads to one file, each job to its own range of it.
    """
    options = _options(setting, kind, size)
    if kind == "write":
        clear(folder)
        options += [f"--directory={folder}", "--filename_format=write.$jobnum.data"]
    else:
        options += [f"--filename={folder / 'read.data'}", f"--offset_increment={_share(size, setting.jobs)}"]
    drop_caches()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    jobs = _run(options)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    moved = sum(job[kind]["io_bytes"] for job in jobs)
    # job_runtime covers the writes and the closing fsync, the slowest job decides
    seconds = max(max(job["job_runtime"], job[kind]["runtime"]) for job in jobs) / 1000
    seconds = max(seconds, 0.001)
    if kind == "write":
        clear(folder)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"gb_s": moved / seconds / GB, "seconds": seconds, "cpu_s_gb": cpu_s / (moved / GB)}


def _share(size: int, jobs: int) -> int:
    return size // jobs // BLOCK_BYTES * BLOCK_BYTES


def _options(setting: Setting, kind: Kind, size: int) -> list[str]:
    options = {
        "rw": kind,
        "ioengine": setting.engine,
        "direct": int(setting.direct),
        "bs": setting.block,
        "iodepth": setting.depth,
        "numjobs": setting.jobs,
        "size": _share(size, setting.jobs),
    }
    if kind == "write":
        options |= {"end_fsync": 1, "fallocate": "native"}
    if setting.fixed:
        options |= {"fixedbufs": 1, "registerfiles": 1}
    return [f"--{name}={value}" for name, value in options.items()]


def _run(options: list[str]) -> list[dict[str, Any]]:
    command = ["fio", "--name=ceiling", "--output-format=json", "--invalidate=0", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"fio failed: {' '.join(command)}: {done.stderr[-500:]}{done.stdout[-500:]}")
    jobs: list[dict[str, Any]] = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return jobs
