"""The engine of a GPU: moves bytes between pieces of the device's memory and slots, in host memory or in its own."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stepwell.native import _engine
from stepwell.native._engine import ffi, lib
from stepwell.native._engine_face import Engine, make_engine
from stepwell.native._latches import Latch, Mark

LIBRARY = "libcuda.so.1"  # comes with NVIDIA's kernel driver, not with CUDA's toolkit
DEPTH = 512  # jobs issued and not ended; a stream takes about a thousand copies before it blocks who issues one
TEXT_BYTES = 256
NOT_ALLOCATED = "no memory was allocated there, or it was lent and has been freed"
TRIP_ALLOC, TRIP_FREE = "stepwell_trip_alloc", "stepwell_trip_free"  # functions of `trip_library`


def probe_device(library: str = LIBRARY) -> tuple[bool, str]:
    """Is there a GPU and its driver (found by starting it), and the reason in words."""
    reason = ffi.new("char[]", TEXT_BYTES)
    count = lib.sw_probe_cuda(library.encode(), reason, TEXT_BYTES)
    return count > 0, ffi.string(reason).decode()


def device_total_bytes(device: int, library: str = LIBRARY) -> int:
    """All memory of a device, whoever uses it, found without using the device. Raises OSError in the driver's words."""
    reason = ffi.new("char[]", TEXT_BYTES)
    total = lib.sw_cuda_total_bytes(library.encode(), device, reason, TEXT_BYTES)
    if total < 0:
        raise OSError(-total, f"memory of device {device}: {ffi.string(reason).decode()}")
    return total


def trip_library() -> str:
    """The path of a library whose functions TRIP_ALLOC and TRIP_FREE are as torch's CUDAPluggableAllocator takes them.

    The first gives blocks of a device that an engine is open for. The second frees one, and then all memory that is
    lent there: where torch keeps a block that nobody uses, it does that before it would raise for want of memory.
    """
    return _engine.__file__


class Gathering:
    """Pieces of a device's memory, to be copied one behind the other to one place of it, as often as is wanted."""

    def __init__(self, to: int, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> None:
        """to: an address. addresses, sizes (bytes): of each piece; nobody changes them."""
        self.to, self.addresses, self.sizes = to, np.ascontiguousarray(addresses), np.ascontiguousarray(sizes)
        self._told: Any = ffi.new("sw_gathering *", {"to": to, "count": len(addresses)})
        self._told.addresses, self._told.sizes = (
            ffi.cast("uint64_t *", words.ctypes.data) for words in (self.addresses, self.sizes)
        )

    def by(self, kernel: int) -> Any:
        """As the native part takes it. kernel: the function that gathers; 0: none."""
        self._told.kernel = kernel
        return self._told


class DeviceEngine(Engine):
    """Runs D2H, H2D, PACK and UNPACK jobs of one device, in native threads, on streams of its own.

    Jobs are issued, and end, in the order in which they were submitted (those with `after`: in which they became
    ready). Give each direction an engine of its own: copies of both ways overlap then. `library`: the driver's.
    depth: jobs issued and not ended, up to 1024. Raises OSError if the device cannot be used.

    `mark`, `release`, `pin`, `unpin` and what is about memory take no lock of the engine, so that a caller whose stream
    is full holds up nobody. They raise OSError with the driver's own words, EBUSY if the stream is being captured into
    a graph.
    """

    def __init__(self, name: str, device: int, *, library: str = LIBRARY, depth: int = DEPTH) -> None:
        self.device, self._library = device, library
        self._begin(name, "device", f"device {device} by {library}", threads=1, depth=depth, request_bytes=1 << 20)
        self._cuda = ffi.gc(lib.sw_device_cuda(self._handle), lib.sw_cuda_drop)
        self._gather = 0
        #: why `pin` was refused last, in words; empty: it was not
        self.pin_refusal = ""

    def _make(self) -> Any:
        library, reason = ffi.new("char[]", self._library.encode()), ffi.new("char[]", TEXT_BYTES)
        more = {"library": library, "device": self.device, "reason": reason, "reason_bytes": TEXT_BYTES}
        return make_engine(self, more, lambda: ffi.string(reason).decode())

    def mark(self, stream: int, first: Gathering | None = None) -> Mark:
        """The point that `stream` (a CUstream; 0: the default one) has come to in the caller's order: jobs with this
        mark start after all that was put on the stream before. Costs the caller one record of an event. first: is
        put on the stream before that: a kernel for a few hundred small pieces, a copy for each other one; where one
        fails, some may have been made."""
        cuda, out = self._context(), ffi.new("sw_event **")
        told = ffi.NULL if first is None else first.by(self._gather)
        if (result := lib.sw_cuda_mark(cuda, stream, told, out)) < 0:
            raise self._refusal(cuda, result, "marking a stream")
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

    def allocate(self, size: int) -> int:
        """The address of `size` bytes of the device's memory, aligned to 256 or more, with anything in them; to be
        freed, or lent, before the engine is closed. Raises OSError: with ENOMEM there is not as much now; with
        EADDRINUSE what was lent there was freed, and has to be asked for by `take_back` (or `free`) first."""
        if size <= 0:
            raise ValueError(f"memory of a device is at least one byte, not {size}")
        out = ffi.new("uint64_t *")
        reused = "memory that was lent was freed there, and who lent it has not been told"
        self._check(lambda cuda: lib.sw_cuda_allocate(cuda, size, out), f"allocating {size} bytes", reused)
        return int(out[0])

    def free(self, address: int) -> None:
        """Gives back an `allocate` of any engine of the device. No job may be using the memory. It may wait for all
        that the device is doing. Raises OSError with EINVAL if it is not allocated, or was lent and is gone."""
        self._check(lambda cuda: lib.sw_cuda_free(cuda, address), "freeing memory", NOT_ALLOCATED)

    def lend(self, addresses: Sequence[int]) -> None:
        """From now on these, each of an `allocate`, may be freed at any moment by the tripwire, see `trip_library`; at
        the latest they are when the engine that allocated them is closed. No job may be using them. Every one is to be
        asked for by `take_back` in time. Raises OSError with EINVAL if one is not allocated; none is lent then."""
        given = ffi.new("uint64_t[]", addresses)
        self._check(lambda cuda: lib.sw_cuda_lend(cuda, given, len(addresses)), "lending memory", NOT_ALLOCATED)

    def take_back(self, addresses: Sequence[int]) -> list[bool]:
        """Ends a `lend`. For each: True: it is the caller's again, with the same bytes in it; False: it has been freed
        meanwhile, and the address means nothing any more."""
        given, ours = ffi.new("uint64_t[]", addresses), ffi.new("uint8_t[]", len(addresses))
        self._check(lambda cuda: lib.sw_cuda_take_back(cuda, given, len(addresses), ours), "taking memory back")
        return [byte != 0 for byte in ffi.buffer(ours)[:]]

    def trips(self) -> tuple[int, int]:
        """How often the tripwire of the device has fired in this process, and how many lent bytes it has freed."""
        trips, trip_bytes = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        self._check(lambda cuda: lib.sw_cuda_trips(cuda, trips, trip_bytes), "counting trips")
        return int(trips[0]), int(trip_bytes[0])

    def memory(self) -> tuple[int, int]:
        """Bytes of the device's memory that nobody holds just now, and all that it has."""
        unused, total = ffi.new("uint64_t *"), ffi.new("uint64_t *")
        self._check(lambda cuda: lib.sw_cuda_memory(cuda, unused, total), "looking at memory")
        return int(unused[0]), int(total[0])

    def use_kernels(self, gather: int, scatter: int, move: int = 0) -> None:
        """Functions (CUfunction) of the device, compiled from `stepwell.native._kernels.SOURCE`: from the next job on
        small pieces cross together with the first two, and all is packed and unpacked by the third. 0: each piece is
        a copy of its own. They must outlive the engine."""
        with self._lock:
            lib.sw_device_kernels(self._alive(), gather, scatter, move)
            self._gather = gather

    @property
    def memory_bytes(self) -> int:
        """Memory of the device that the engine holds for itself: none before small pieces cross to or from the host,
        then at most 12 MiB."""
        return self.statistics().device_bytes

    @property
    def last_error(self) -> str:
        """The call of the driver that failed last, and its name for the error; empty if none did."""
        text = ffi.new("char[]", TEXT_BYTES)
        lib.sw_cuda_error(self._context(), text, TEXT_BYTES)
        return ffi.string(text).decode()

    def close(self, timeout: float = 5.0) -> bool:
        """As `Engine.close`. What was pinned, or allocated and not lent, must be given back before."""
        closed = super().close(timeout)
        self._cuda = None
        return closed

    def _context(self) -> Any:
        self._alive()
        cuda = self._cuda  # keeps it while we use it, although another thread may close the engine
        if cuda is None:
            raise RuntimeError(f"engine {self.name} is closed")
        return cuda

    def _check(self, call: Callable[[Any], int], what: str, wrong: str = "") -> int:
        """wrong: what it means when not the driver refuses an address."""
        cuda = self._context()
        if (result := call(cuda)) < 0:
            raise self._refusal(cuda, result, what, wrong)
        return result

    def _refusal(self, cuda: Any, result: int, what: str, wrong: str = "") -> OSError:
        text = ffi.new("char[]", TEXT_BYTES)
        lib.sw_cuda_error(cuda, text, TEXT_BYTES)
        words = ffi.string(text).decode() or os.strerror(-result)
        if result in (-errno.EINVAL, -errno.EADDRINUSE):
            words = wrong or words
        if result == -errno.EBUSY:
            words += " (the stream is being captured into a graph)"
        return OSError(-result, f"{what} of device {self.device}: {words}")
