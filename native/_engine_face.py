"""The engine: a queue of jobs served by io_uring or by threads, behind one interface."""

from __future__ import annotations

import errno
import itertools
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

from stepwell.native._engine import ffi, lib
from stepwell.native._jobs import Done, Job, fill
from stepwell.native._memory import Region

REAP_MAX = 256  # completions fetched in one call

#: jobs of engines that hung at close: the kernel may still write into their memory
_abandoned: list[dict[int, Job]] = []


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """Counts since the engine was made. Bytes are of finished jobs."""

    jobs_submitted: int
    jobs_done: int
    jobs_failed: int
    bytes_read: int
    bytes_written: int
    bytes_gathered: int
    bytes_scattered: int
    requests: int  # issued; retries and continuations of short transfers not counted again
    requests_fixed: int  # of them through registered memory
    requests_in_flight: int
    requests_in_flight_max: int
    short_transfers: int
    retries_eagain: int
    retries_eintr: int
    bad_blocks: int
    register_errno: int  # why the last register() was refused; 0: it was not
    ring_errno: int  # last unexpected error of io_uring_enter
    bytes_fetched: int  # issued by a device's engine, also of jobs that failed: from the device,
    bytes_delivered: int  # to it,
    bytes_packed: int  # and within it: to slots,
    bytes_unpacked: int  # and from them
    copies: int  # that these took
    kernels: int
    device_bytes: int  # memory of the device that is held now


def probe_uring() -> tuple[bool, str]:
    """Can this process use io_uring (found by using it), and the reason in words."""
    reason = ffi.new("char[256]")
    result = lib.sw_probe_uring(reason, 256)
    return result == 0, ffi.string(reason).decode()


def make_engine(engine: Engine, more: dict[str, Any], reason: Callable[[], str] = str) -> Any:
    """Starts the native part of an engine, with `more` of sw_options than all engines have. `reason`: why not, in
    words; empty: the errno says it. Raises ValueError for options out of range, OSError."""
    name = ffi.new("char[]", f"sw-{engine.name}".encode()[:15])
    options = ffi.new("sw_options *", more)
    options.name = name
    options.uring = engine.kind == "io_uring"
    options.threads, options.depth, options.request_bytes = engine._threads, engine._depth, engine._request_bytes
    out = ffi.new("sw_engine **")
    result = lib.sw_engine_new(options, out)
    if result == -errno.EINVAL:
        raise ValueError(
            f"threads {engine._threads} (1 to 256), depth {engine._depth} (1 to 1024) or request_bytes "
            f"{engine._request_bytes} (a multiple of 4096 up to 1 GiB) is out of range"
        )
    if result:
        raise OSError(-result, f"starting the engine {engine.name}: {reason() or os.strerror(-result)}")
    return out[0]


class Engine:
    """Runs jobs in native threads. Oldest jobs first; they may end in any order.

    backend: "auto" takes io_uring where it works, else threads; "io_uring" raises OSError where it does
    not. `kind` and `reason` say what was chosen and why. threads: of the thread back end. depth: requests
    in flight of the io_uring back end. request_bytes: what a job is cut into, a multiple of 4096.

    Methods may be called from any thread. Memory, files and tickets of a job must stay valid until it is
    reaped; the engine keeps the Job objects until then. All methods but close raise RuntimeError after
    close and in a forked child.
    """

    _handle: Any = None  # of one that could not be made
    _pid = -1

    def __init__(
        self,
        name: str,
        *,
        backend: Literal["auto", "io_uring", "threads"] = "auto",
        threads: int = 1,
        depth: int = 16,
        request_bytes: int = 1 << 20,
    ) -> None:
        if backend not in ("auto", "io_uring", "threads"):
            raise ValueError(f"backend must be auto, io_uring or threads, not {backend!r}")
        works, reason = probe_uring() if backend != "threads" else (False, "asked for")
        if backend == "io_uring" and not works:
            raise OSError(errno.ENOSYS, f"io_uring cannot be used: {reason}")
        kind = "io_uring" if works else "threads"
        self._begin(name, kind, reason, threads=threads, depth=depth, request_bytes=request_bytes)

    def _begin(self, name: str, kind: str, reason: str, *, threads: int, depth: int, request_bytes: int) -> None:
        self._pid = os.getpid()
        self.name, self.kind, self.reason = name, kind, reason
        self._threads, self._depth, self._request_bytes = threads, depth, request_bytes
        self._handle = self._make()
        self._fileno = lib.sw_engine_fileno(self._handle)
        self._lock = threading.Lock()  # between close and the calls of other threads
        self._numbers = itertools.count(1)
        self._jobs: dict[int, Job] = {}
        self._reaped = ffi.new("sw_done[]", REAP_MAX)
        self._listener: Callable[[list[Done]], None] | None = None

    def _make(self) -> Any:
        return make_engine(self, {})

    def _alive(self) -> Any:
        if os.getpid() != self._pid:
            raise RuntimeError(f"engine {self.name} belongs to the parent of this forked process; make a new one here")
        if self._handle is None:
            raise RuntimeError(f"engine {self.name} is closed")
        return self._handle

    @property
    def closed(self) -> bool:
        return self._handle is None

    def submit(self, jobs: Sequence[Job]) -> None:
        """Hands all the jobs to the engine in one call, or none of them.

        Raises ValueError for a malformed job (GATHER and SCATTER need an engine of kind "threads", D2H, H2D, PACK and
        UNPACK one of kind "device", which takes no others),
        BlockingIOError if over a million jobs are not reaped yet.
        """
        if not jobs:
            return
        self._alive()
        count = len(jobs)
        array = ffi.new("sw_job[]", count)
        numbers = list(itertools.islice(self._numbers, count))
        kept = [fill(array[index], numbers[index], job) for index, job in enumerate(jobs)]
        with self._lock:
            handle = self._alive()
            self._jobs.update(zip(numbers, jobs, strict=True))
            result = lib.sw_engine_submit(handle, array, count)
            del kept
            if result:
                for number in numbers:
                    del self._jobs[number]
        if result == -errno.EINVAL:
            raise ValueError(f"a job of {count} is malformed, or not for an engine of kind {self.kind}: {jobs[0]}")
        if result == -errno.EBUSY:
            raise BlockingIOError(errno.EBUSY, f"engine {self.name} holds too many jobs that were not reaped")
        if result:
            raise OSError(-result, f"submitting to the engine {self.name}: {os.strerror(-result)}")

    def reap(self) -> list[Done]:
        """All jobs that have ended since the last call; never blocks."""
        self._alive()
        with self._lock:
            return self._reap(self._alive())

    def _reap(self, handle: Any) -> list[Done]:
        found: list[Done] = []
        reaped, jobs = self._reaped, self._jobs
        count = REAP_MAX
        while count == REAP_MAX:
            count = lib.sw_engine_reap(handle, reaped, REAP_MAX)
            for index in range(count):
                done = reaped[index]
                found.append(Done(jobs.pop(done.id), done.result, done.bad_blocks))
        return found

    def fileno(self) -> int:
        """An eventfd that is readable while ended jobs wait for `reap`; for select, poll, asyncio."""
        self._alive()
        return self._fileno

    def register(self, region: Region) -> bool:
        """Lets the kernel keep the region mapped, which makes requests cheaper. False: it will not (see
        `statistics().register_errno`; often the limit of locked memory), and jobs work all the same."""
        self._alive()
        with self._lock:
            if lib.sw_engine_register(self._alive(), region.address, region.size):
                return False
        me = weakref.ref(self)
        address = region.address

        def withdraw() -> None:
            engine = me()
            if engine is not None and engine._pid == os.getpid():
                with engine._lock:
                    if engine._handle is not None:
                        lib.sw_engine_unregister(engine._handle, address)

        region._on_close.append(withdraw)
        return True

    def statistics(self) -> EngineStatistics:
        """Counts so far."""
        self._alive()
        out = ffi.new("sw_statistics *")
        with self._lock:
            lib.sw_engine_statistics(self._alive(), out)
        return EngineStatistics(**{name: getattr(out, name) for name in EngineStatistics.__slots__})

    def inject_faults(self, *, bytes_max: int = 0, every: int = 0, error: int = 0) -> None:
        """For tests: cuts each system call to `bytes_max`; each `every`-th fails with errno `error`. 0: off."""
        self._alive()
        with self._lock:
            lib.sw_engine_fault(self._alive(), bytes_max, every, error)

    def close(self, timeout: float = 5.0) -> bool:
        """Cancels what has not started, waits for what has, ends the threads. Idempotent.

        False: something still hung after `timeout` seconds; the threads are abandoned, and the jobs and
        what they keep alive stay in memory until the process ends, because the kernel may still use it.
        """
        if os.getpid() != self._pid or self._handle is None:
            return True
        with self._lock:
            handle, self._handle = self._handle, None
        if handle is None:
            return True
        stopped = lib.sw_engine_stop(handle, max(0, round(timeout * 1000))) == 0
        rest = self._reap(handle)
        if stopped:
            lib.sw_engine_free(handle)
        elif self._jobs:
            _abandoned.append(self._jobs)
            rest += [Done(job, -errno.ETIMEDOUT, 0) for job in self._jobs.values()]
            for job in self._jobs.values():
                for latch in job.latches:  # it fails, and nobody must wait for what will never come
                    latch.open()
        if self._listener is not None:
            self._listener(rest)
        return stopped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if self._handle is not None and os.getpid() == self._pid:
            warnings.warn(f"{self!r} was never closed", ResourceWarning, source=self, stacklevel=2)
            self.close(timeout=1.0)

    def __repr__(self) -> str:
        what = f"<Engine {self.name}, {self.kind}"
        if os.getpid() != self._pid:
            return what + ", of the parent process>"
        if self._handle is None:
            return what + ", closed>"
        counts = self.statistics()
        return (
            f"{what}, {counts.jobs_done} jobs done, {counts.jobs_failed} failed, {len(self._jobs)} not reaped, "
            f"{counts.requests_in_flight} requests in flight>"
        )
