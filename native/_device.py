"""The engine of a GPU: moves bytes between slots of host memory and pieces of the device's memory."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

from stepwell.native._engine import ffi, lib
from stepwell.native._engine_face import Engine, make_engine
from stepwell.native._latches import Latch, Mark

LIBRARY = "libcuda.so.1"  # comes with NVIDIA's kernel driver, not with CUDA's toolkit
DEPTH = 512  # jobs issued and not ended; a stream takes about a thousand copies before it blocks who issues one
TEXT_BYTES = 256


def probe_device(library: str = LIBRARY) -> tuple[bool, str]:
    """Is there a GPU and its driver (found by starting it), and the reason in words."""
    reason = ffi.new("char[]", TEXT_BYTES)
    count = lib.sw_probe_cuda(library.encode(), reason, TEXT_BYTES)
    return count > 0, ffi.string(reason).decode()


class DeviceEngine(Engine):
    """Runs D2H and H2D jobs of one device, in native threads, on streams of its own.

    Jobs are issued, and end, in the order in which they were submitted (those with `after`: in which they became
    ready). Give each direction an engine of its own: copies of both ways overlap then. `library`: the driver's.
    depth: jobs issued and not ended, up to 1024. Raises OSError if the device cannot be used.

    `mark`, `release`, `pin` and `unpin` take no lock of the engine, so that a caller whose stream is full holds up
    nobody. They raise OSError with the driver's own words, EBUSY if the stream is being captured into a graph.
    """

    def __init__(self, name: str, device: int, *, library: str = LIBRARY, depth: int = DEPTH) -> None:
        self.device, self._library = device, library
        self._begin(name, "device", f"device {device} by {library}", threads=1, depth=depth, request_bytes=1 << 20)
        self._cuda = ffi.gc(lib.sw_device_cuda(self._handle), lib.sw_cuda_drop)
        #: why `pin` was refused last, in words; empty: it was not
        self.pin_refusal = ""

    def _make(self) -> Any:
        library, reason = ffi.new("char[]", self._library.encode()), ffi.new("char[]", TEXT_BYTES)
        more = {"library": library, "device": self.device, "reason": reason, "reason_bytes": TEXT_BYTES}
        return make_engine(self, more, lambda: ffi.string(reason).decode())

    def mark(self, stream: int) -> Mark:
        """The point that `stream` (a CUstream; 0: the default one) has come to in the caller's order: jobs with this
        mark start after all that was put on the stream before. Costs the caller one record of an event."""
        out = ffi.new("sw_event **")
        self._check(lambda cuda: lib.sw_cuda_mark(cuda, stream, out), "marking a stream")
        return Mark(out[0])

    def release(self, latch: Latch, stream: int) -> bool:
        """What is put on `stream` from now on starts after the copies that this engine has issued for the latch.
        False: it has issued none. Wait for the latch first: copies that are issued later are not covered."""
        return self._check(lambda cuda: lib.sw_cuda_release(cuda, latch._alive(), stream), "releasing a stream") > 0

    def pin(self, address: int, size: int) -> bool:
        """Lets all devices copy from and to this memory directly. False: the driver will not (`pin_refusal` says
        why), and jobs work all the same, slower, holding up those behind them. One copy must lie in one pinned
        stretch, or in none."""
        try:
            self._check(lambda cuda: lib.sw_cuda_pin(cuda, address, size), f"pinning {size} bytes")
        except OSError as error:
            self.pin_refusal = error.strerror or str(error)
            return False
        self.pin_refusal = ""
        return True

    def unpin(self, address: int) -> None:
        """Takes back a `pin`. No job of any engine may be using the memory."""
        self._check(lambda cuda: lib.sw_cuda_unpin(cuda, address), "unpinning memory")

    def use_kernels(self, gather: int, scatter: int) -> None:
        """Functions (CUfunction) of the device, compiled from `stepwell.native._kernels.SOURCE`, that small pieces
        cross together with from the next job on; 0: each piece is a copy of its own. They must outlive the engine."""
        with self._lock:
            lib.sw_device_kernels(self._alive(), gather, scatter)

    @property
    def memory_bytes(self) -> int:
        """Memory of the device that the engine holds: none before small pieces cross, then at most 24 MiB."""
        return self.statistics().device_bytes

    @property
    def last_error(self) -> str:
        """The call of the driver that failed last, and its name for the error; empty if none did."""
        text = ffi.new("char[]", TEXT_BYTES)
        lib.sw_cuda_error(self._context(), text, TEXT_BYTES)
        return ffi.string(text).decode()

    def close(self, timeout: float = 5.0) -> bool:
        """As `Engine.close`. What was pinned must be unpinned before."""
        closed = super().close(timeout)
        self._cuda = None
        return closed

    def _context(self) -> Any:
        self._alive()
        cuda = self._cuda  # keeps it while we use it, although another thread may close the engine
        if cuda is None:
            raise RuntimeError(f"engine {self.name} is closed")
        return cuda

    def _check(self, call: Callable[[Any], int], what: str) -> int:
        cuda = self._context()
        result = call(cuda)
        if result >= 0:
            return result
        text = ffi.new("char[]", TEXT_BYTES)
        lib.sw_cuda_error(cuda, text, TEXT_BYTES)
        words = ffi.string(text).decode() or os.strerror(-result)
        if result == -errno.EBUSY:
            words += " (the stream is being captured into a graph)"
        raise OSError(-result, f"{what} of device {self.device}: {words}")
