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

SOURCES = [Path(__file__).resolve().parent / "native" / name for name in ("fakecuda.c", "fakestreams.c")]
GATHER, SCATTER = 1, 2  # handles of the kernels that it knows
ENGINE, USER = 1, 2  # kinds of streams
OWNED = ("contexts", "streams", "events", "buffers", "pinned")  # what must be given back


def build(folder: Path) -> str:
    """Compiles the library into `folder`, unless it is there, and returns its path."""
    path = folder / "libfakecuda.so"
    if not path.exists():
        fresh = folder / f"libfakecuda.{os.getpid()}.so"
        compiler = shlex.split(os.environ.get("CC") or "cc")
        flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-shared", "-fPIC"]
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
            "fake_count": [text],
            "fake_stream": [],
            "fake_stream_end": [u64],
            "fake_write": [u64, u64, ctypes.c_int, u64],
            "fake_capture": [u64, ctypes.c_int],
            "fake_pending": [u64],
            "fake_finish": [u64],
        }.items():
            getattr(self._lib, name).argtypes = arguments
            getattr(self._lib, name).restype = {"fake_count": i64, "fake_stream": u64, "fake_pending": u64}.get(name)

    def reset(self) -> None:
        """Sets all knobs back; what was held goes on."""
        self.off(False)
        self._lib.fake_fail(b"", 0, 0, 0)
        self.slow(0.0)
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

    def count(self, what: str) -> int:
        """contexts, streams, events, buffers, pinned: not given back; copies, kernels, calls: so far; under_way: copies
        and kernels that have not ended; depth: contexts that this thread has entered and not left."""
        return int(self._lib.fake_count(what.encode()))

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
