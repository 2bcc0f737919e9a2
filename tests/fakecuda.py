"""A GPU's driver for tests on machines without one: see tests/native/fakecuda.h for what it models.

`build` compiles it; `DeviceEngine(..., library=path)` runs on it, and `FakeCuda(path)` is the test's hand in it. All of
a process shares one: knobs are set back by `reset`, and counts are compared with former ones.
"""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from pathlib import Path

SOURCES = [
    Path(__file__).resolve().parent / "native" / name for name in ("fakecuda.c", "fakememory.c", "fakestreams.c")
]
GATHER, SCATTER, MOVE = 1, 2, 3  # handles of the kernels that it knows
ENGINE, USER = 1, 2  # kinds of streams
OWNED = ("contexts", "streams", "events", "buffers", "pinned")  # what must be given back


def build(folder: Path) -> str:
    """Compiles the library into `folder`, unless it is there, and returns its path."""
    path = folder / "libfakecuda.so"
    if not path.exists():
        fresh = folder / f"libfakecuda.{os.getpid()}.so"
        compiler = shlex.split(os.environ.get("CC") or "cc")
        flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC"]
        flags.append("-ftls-model=initial-exec")  # the thread sanitizer misreads how others are given back
        subprocess.run([*compiler, *flags, "-pthread", "-o", str(fresh), *map(str, SOURCES)], check=True)
        fresh.rename(path)
    return str(path)


class FakeCuda:
    """The test's hand in the driver: holds its streams, slows it down, makes its calls fail, counts."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._lib = ctypes.CDLL(path)
        u64, i64, text = ctypes.c_uint64, ctypes.c_int64, ctypes.c_char_p
        for name, arguments in {
            "fake_hold": [ctypes.c_int, i64],
            "fake_slow_ns": [u64],
            "fake_fail": [text, i64, ctypes.c_int, i64],
            "fake_off": [ctypes.c_int],
            "fake_memory": [u64, u64],
            "fake_dry": [ctypes.c_int],
            "fake_reuse": [ctypes.c_int],
            "fake_moved": [u64, ctypes.POINTER(u64)],
            "fake_count": [text],
            "fake_stream": [],
            "fake_stream_end": [u64],
            "fake_write": [u64, u64, ctypes.c_int, u64],
            "fake_capture": [u64, ctypes.c_int],
            "fake_pending": [u64],
            "fake_finish": [u64],
        }.items():
            getattr(self._lib, name).argtypes = arguments
            returns = {"fake_count": i64, "fake_stream": u64, "fake_pending": u64, "fake_moved": ctypes.c_int}
            getattr(self._lib, name).restype = returns.get(name)

    def reset(self) -> None:
        """Sets all knobs back; what was held goes on."""
        self.off(False)
        self._lib.fake_fail(b"", 0, 0, 0)
        self.slow(0.0)
        self.memory()
        self.dry(False)
        self.reuse(False)
        self.go()

    def hold(self, kinds: int = ENGINE, *, steps: int = 0) -> None:
        """Streams of these kinds stop before their next operation; held ones of engines do `steps` more, together."""
        self._lib.fake_hold(kinds, steps)

    def go(self) -> None:
        """Nothing is held any more."""
        self._lib.fake_hold(0, 0)

    def slow(self, seconds: float) -> None:
        """What each copy and kernel takes at least."""
        self._lib.fake_slow_ns(round(seconds * 1e9))

    def fail(self, call: str, error: int, *, nth: int = 1, times: int = 1) -> None:
        """The nth call of the driver by that name ("*": by any) from now on fails, `times` in a row (-1: for good)."""
        self._lib.fake_fail(call.encode(), nth, error, times)

    def off(self, off: bool = True) -> None:
        """The driver is torn down, as at the end of a process: all calls fail."""
        self._lib.fake_off(off)

    def memory(self, total: int = 0, used: int = 0) -> None:
        """Bytes of a device's memory (0: 64 GiB, or what FAKECUDA_TOTAL_BYTES in the environment says), and those of it
        that are taken by others, such as a training's tensors. All devices share them."""
        self._lib.fake_memory(total, used)

    def reuse(self, reuse: bool = True) -> None:
        """What is freed from now on is allocated again, for the next one that wants as much: most drivers do so."""
        self._lib.fake_reuse(reuse)

    def dry(self, dry: bool = True) -> None:
        """Kernels that move runs only note them: what they are told lies nowhere."""
        self._lib.fake_dry(dry)

    def moved(self) -> list[tuple[int, int, int]]:
        """Where to, where from and how many bytes: the runs of those kernels since `dry`, as they were launched."""
        found, run = list[tuple[int, int, int]](), (ctypes.c_uint64 * 3)()
        while self._lib.fake_moved(len(found), run):
            found.append((run[0], run[1], run[2]))
        return found

    def count(self, what: str) -> int:
        """contexts, streams, events, buffers, pinned: not given back; copies, kernels, calls: so far; under_way: copies
        and kernels that have not ended; depth: contexts that this thread has entered and not left."""
        return int(self._lib.fake_count(what.encode()))

    def free(self, address: int) -> None:
        """Frees memory past whoever allocated it, and has lost it."""
        context = ctypes.c_void_p()
        self._lib.cuCtxPushCurrent_v2(context)
        assert self._lib.cuMemFree_v2(ctypes.c_uint64(address)) == 0
        self._lib.cuCtxPopCurrent_v2(ctypes.byref(context))

    def owned(self) -> dict[str, int]:
        """All that was taken and not given back."""
        return {what: self.count(what) for what in OWNED}

    def stream(self) -> int:
        """A stream of the user's, to be ended by `end_stream`."""
        return int(self._lib.fake_stream())

    def end_stream(self, stream: int) -> None:
        self._lib.fake_stream_end(stream)

    def write(self, stream: int, address: int, value: int, length: int) -> None:
        """Puts a kernel on the stream that sets `length` bytes."""
        self._lib.fake_write(stream, address, value, length)

    def capture(self, stream: int, on: bool) -> None:
        """Whether the stream is being captured into a graph."""
        self._lib.fake_capture(stream, on)

    def pending(self, stream: int) -> int:
        """What is on the stream and not done."""
        return int(self._lib.fake_pending(stream))

    def finish(self, stream: int) -> None:
        """Waits until all that is on the stream is done."""
        self._lib.fake_finish(stream)
