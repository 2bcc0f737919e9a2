"""What a path takes, found by trying: direct I/O, its alignment, and which way of reading is faster.

Asking is not enough: an open with O_DIRECT often passes where the first write fails, and statx(STATX_DIOALIGN)
is missing on most network file systems. So a small file is really written and read, and removed again.

Direct reading (no copy, little CPU) is preferred. Some disks and file systems give one buffered stream per
thread more than they give a direct ring; a short measurement finds those, once per machine and disk.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import secrets
import time
from dataclasses import asdict, dataclass, replace

from stepwell.native import AsyncEngine, Job, Op, Region

#: what the engine pads to, so no larger alignment can be served
ALIGNMENT_BYTES = 4096
O_DIRECT = getattr(os, "O_DIRECT", 0)  # not on macOS

PROBE_FILE_BYTES = 64 << 20
PROBE_GROUP_BYTES = 16 << 20
PROBE_JOB_BYTES = 4 << 20
PROBE_WRITE_S = 0.12
PROBE_READ_S = 0.08  # of each way, in all rounds
PROBE_ROUNDS = 3
#: buffered reading costs three times the CPU of direct reading: it must be clearly faster
BUFFERED_ADVANTAGE_MIN = 1.15
#: rates of one way that differ more from round to round were measured on a busy disk
STEADY_SPREAD_MAX = 1.5
#: so close to the threshold, another measurement may say the opposite
NOISE = 1.15
#: measurements of a disk whose answer is not clear; then the best of each way decides
TRIALS_MAX = 3
CACHE_ENTRIES_MAX = 64

_REFUSES_WRITING = {errno.EROFS, errno.EACCES, errno.EPERM}
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
_STATX_OFFSET_ALIGN = 156  # of stx_dio_offset_align in struct statx


@dataclass(frozen=True, slots=True)
class Access:
    """What a root takes. `writable` is False where the file system or the permissions say so; `deletes`, where
    files can be added but not removed."""

    writable: bool
    direct_write: bool
    direct_read: bool
    why: str
    deletes: bool = True


def probe_path(root: str) -> str:
    return os.path.join(root, f".stepwell-probe-{os.getpid()}-{secrets.token_hex(4)}.tmp")


def probe_access(root: str) -> Access:
    """Writes and reads a small file under `root`. Raises OSError only for what makes the root unusable."""
    path = probe_path(root)
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in _REFUSES_WRITING:
            raise
        reading, why = probe_reading(root)
        return Access(False, False, reading, f"not writable: {errno.errorcode[error.errno]}; {why}")
    try:
        required = direct_alignment(descriptor)
        if required > ALIGNMENT_BYTES:
            access = Access(True, False, False, f"buffered: direct I/O wants {required} bytes alignment")
        else:
            access = _try_direct(path)
    finally:
        os.close(descriptor)
        deleted = _delete(path)
    return access if deleted else replace(access, deletes=False, why=f"{access.why}; nothing can be deleted here")


def _delete(path: str) -> bool:
    """False where the root is append-only: the file stays."""
    try:
        os.unlink(path)
    except OSError as error:
        if error.errno not in _REFUSES_WRITING:
            raise
        return False
    return True


def _try_direct(path: str) -> Access:
    stage, writing = "open", False
    try:
        descriptor = _open_direct(path, os.O_RDWR)
        try:
            with mmap.mmap(-1, 2 * ALIGNMENT_BYTES) as buffer:
                stage = "write"
                if os.pwrite(descriptor, buffer, ALIGNMENT_BYTES) != len(buffer):
                    raise OSError(errno.EIO, "short write")
                stage = "cut"  # a shard's last write is padded
                os.ftruncate(descriptor, 3 * ALIGNMENT_BYTES - 1)
                writing, stage = True, "read"
                with memoryview(buffer)[:ALIGNMENT_BYTES] as half:
                    os.preadv(descriptor, [half], ALIGNMENT_BYTES)
        finally:
            os.close(descriptor)
    except OSError as error:
        return Access(True, writing, False, f"{stage} with O_DIRECT: {_name(error)}")
    return Access(True, True, True, f"direct I/O tried at {ALIGNMENT_BYTES} bytes alignment")


def probe_reading(root: str) -> tuple[bool, str]:
    """Tries a direct read of some file that is there; writes nothing."""
    path = _some_file(root)
    if path is None:
        return O_DIRECT != 0, "no file to try a direct read on; each file falls back by itself"
    try:
        descriptor = _open_direct(path, os.O_RDONLY)
        try:
            with mmap.mmap(-1, ALIGNMENT_BYTES) as buffer:
                os.preadv(descriptor, [buffer], 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        return False, f"read with O_DIRECT: {_name(error)}"
    return True, "direct read tried on a file that was there"


def _open_direct(path: str, flags: int) -> int:
    if not O_DIRECT:
        raise OSError(errno.EINVAL, "no O_DIRECT on this system", path)
    return os.open(path, flags | O_DIRECT | os.O_CLOEXEC)


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, str(error))


def _some_file(root: str, folders_max: int = 32) -> str | None:
    folders = [root]
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if entry.is_file() and entry.stat().st_size:
                        return entry.path
                    if entry.is_dir() and len(folders) < folders_max:
                        folders.append(entry.path)
        except OSError:
            continue
    return None


def direct_alignment(descriptor: int) -> int:
    """Alignment of offsets that the kernel asks of direct I/O on this file; 0 where it does not say."""
    call = getattr(ctypes.CDLL(None), "statx", None)
    if call is None:
        return 0
    answer = ctypes.create_string_buffer(256)
    if call(descriptor, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return 0
    return int.from_bytes(answer.raw[_STATX_OFFSET_ALIGN : _STATX_OFFSET_ALIGN + 4], "little")


@dataclass(frozen=True, slots=True)
class ReadSpeed:
    """What a short measurement of both ways of reading gave."""

    direct_bytes_per_s: float
    buffered_bytes_per_s: float
    steady: bool = True
    trials: int = 1

    @property
    def settled(self) -> bool:
        """False: the next start had better measure again."""
        advantage = self.buffered_bytes_per_s / self.direct_bytes_per_s / BUFFERED_ADVANTAGE_MIN
        return self.trials >= TRIALS_MAX or (self.steady and not 1 / NOISE < advantage < NOISE)

    def merged(self, earlier: ReadSpeed) -> ReadSpeed:
        """The best of both: other work on the disk only ever makes it slower."""
        return ReadSpeed(
            max(self.direct_bytes_per_s, earlier.direct_bytes_per_s),
            max(self.buffered_bytes_per_s, earlier.buffered_bytes_per_s),
            self.steady,
            self.trials + earlier.trials,
        )

    @property
    def buffered_is_faster(self) -> bool:
        return self.buffered_bytes_per_s > BUFFERED_ADVANTAGE_MIN * self.direct_bytes_per_s

    def __str__(self) -> str:
        return f"direct {self.direct_bytes_per_s / 1e9:.2f} GB/s, buffered {self.buffered_bytes_per_s / 1e9:.2f} GB/s"


class SpeedProbe:
    """A temporary file, written direct and read both ways. `open` and `remove` block: for a tier's threads."""

    def __init__(self, root: str) -> None:
        self._path = probe_path(root)
        self._direct = self._plain = -1

    def open(self) -> None:
        self._plain = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._direct = _open_direct(self._path, os.O_RDWR)

    def remove(self) -> None:
        made = self._plain >= 0
        for descriptor in (self._direct, self._plain):
            if descriptor >= 0:
                os.close(descriptor)
        if made:
            os.unlink(self._path)

    async def measure(self, writer: AsyncEngine, direct: AsyncEngine, buffered: AsyncEngine) -> ReadSpeed | None:
        """None if the disk is too slow or too odd to tell within a fraction of a second."""
        region = Region(PROBE_JOB_BYTES)
        try:
            region.populate(0, PROBE_JOB_BYTES)
            written, _ = await _sweep(writer, Op.WRITE, self._direct, region, PROBE_FILE_BYTES, PROBE_WRITE_S)
            rates: tuple[list[float], list[float]] = [], []
            left_s = 2 * PROBE_READ_S
            while left_s > 0 and len(rates[0]) < PROBE_ROUNDS:  # by turns: other work hits both ways alike
                for way, engine, descriptor in ((0, direct, self._direct), (1, buffered, self._plain)):
                    self._forget_pages()
                    limit_s = PROBE_READ_S / PROBE_ROUNDS
                    moved, seconds = await _sweep(engine, Op.READ, descriptor, region, written, limit_s)
                    if not moved:
                        return None
                    rates[way].append(moved / seconds)
                    left_s -= seconds
            self._forget_pages()
        finally:
            region.close()
        steady = all(max(way) <= STEADY_SPREAD_MAX * min(way) for way in rates)
        return ReadSpeed(max(rates[0]), max(rates[1]), steady)

    def _forget_pages(self) -> None:
        os.posix_fadvise(self._plain, 0, 0, os.POSIX_FADV_DONTNEED)


async def _sweep(engine: AsyncEngine, op: Op, fd: int, region: Region, size: int, limit_s: float) -> tuple[int, float]:
    """Moves up to `size` bytes in order, all into or from one buffer, for about `limit_s`; bytes and seconds."""
    begin = time.perf_counter()
    moved, seconds = 0, 0.0
    direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & O_DIRECT)
    while moved < size and seconds < limit_s:
        end = min(size, moved + PROBE_GROUP_BYTES)
        jobs = [
            Job(op, fd, region.address, offset, min(PROBE_JOB_BYTES, end - offset), direct)
            for offset in range(moved, end, PROBE_JOB_BYTES)
        ]
        done = await engine.run(jobs)
        if any(each.result < each.job.length for each in done):
            return 0, 0.0
        moved, seconds = end, time.perf_counter() - begin
    return moved, seconds


class SpeedCache:
    """Remembers measurements per disk and boot, in this process and in the user's cache folder.

    Best effort: whatever goes wrong with the cache file only costs another measurement.
    """

    _memory: dict[str, ReadSpeed] = {}

    def __init__(self) -> None:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        self._path = os.path.join(base, "stepwell", "probe.json")

    @staticmethod
    def key(root: str) -> str:
        try:
            with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
                boot = file.read().strip()
        except OSError:
            boot = "?"
        return f"{os.stat(root).st_dev}@{boot}"

    def get(self, key: str) -> ReadSpeed | None:
        if key not in self._memory:
            entry = self._load().get(key)
            if isinstance(entry, dict):
                try:
                    rates = float(entry["direct_bytes_per_s"]), float(entry["buffered_bytes_per_s"])
                    if min(rates) > 0:
                        self._memory[key] = ReadSpeed(*rates, bool(entry["steady"]), int(entry["trials"]))
                except (KeyError, TypeError, ValueError):
                    pass
        return self._memory.get(key)

    def put(self, key: str, speed: ReadSpeed) -> None:
        self._memory[key] = speed
        entries = {**self._load(), key: asdict(speed)}
        newest = dict(list(entries.items())[-CACHE_ENTRIES_MAX:])
        temporary = f"{self._path}.{os.getpid()}-{secrets.token_hex(4)}"
        try:
            os.makedirs(os.path.dirname(self._path), exist_ok=True)
            with open(temporary, "w", encoding="utf-8") as file:
                json.dump(newest, file, indent=1)
            os.replace(temporary, self._path)
        except OSError:
            pass

    def _load(self) -> dict[str, object]:
        try:
            with open(self._path, encoding="utf-8") as file:
                entries = json.load(file)
        except (OSError, ValueError):
            return {}
        return entries if isinstance(entries, dict) else {}
