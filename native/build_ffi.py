"""Builds the native core: `stepwell.native._engine`, a cffi extension in API mode for the stable ABI."""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path

from cffi import FFI

HERE = Path("native")  # setuptools runs from the root of the repository and wants relative paths
SOURCES = ["crc32c", "crc32c_x86", "copy", "pieces", "region", "ticket", "latch", "task", "engine", "threads", "uring"]
SOURCES += ["cuda", "holdings", "crossing", "device", "probe"]


def compiler() -> list[str]:
    return shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")


def run(*arguments: str, text: str = "") -> str | None:
    """What the compiler prints; None if it fails or is not there."""
    try:
        done = subprocess.run([*compiler(), *arguments], input=text, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def liburing() -> str | None:
    """The static library's path, where the header is there, too."""
    if run("-E", "-xc", "-", text="#include <liburing.h>\nint ok = IORING_SETUP_COOP_TASKRUN;") is None:
        return None
    archive = run("-print-file-name=liburing.a") or ""
    return archive if Path(archive).is_file() else None


def builder() -> FFI:
    archive = liburing()
    if archive is None:
        print("stepwell: liburing-dev not found; the engine will use threads only")
    # -Wno-unused-parameter: the code that cffi makes has many
    flags = ["-std=c11", "-O3", "-g1", "-Wall", "-Wextra", "-Wno-unused-parameter", "-fvisibility=hidden", "-pthread"]
    if os.environ.get("STEPWELL_WERROR") == "1":
        flags.append("-Werror")
    flags += shlex.split(os.environ.get("STEPWELL_CFLAGS", ""))  # sanitizers
    ffi = FFI()
    ffi.cdef((HERE / "_engine.cdef.txt").read_text())
    ffi.set_source(
        "stepwell.native._engine",
        '#include "stepwell.h"',
        sources=[str(HERE / f"{name}.c") for name in SOURCES],
        depends=[str(HERE / name) for name in ("stepwell.h", "device.h", "_engine.cdef.txt")],
        include_dirs=[str(HERE)],
        define_macros=[("_GNU_SOURCE", None), ("_FILE_OFFSET_BITS", "64")]
        + ([] if archive else [("SW_NO_URING", None)]),
        extra_compile_args=flags,
        extra_link_args=["-pthread", "-ldl", *shlex.split(os.environ.get("STEPWELL_LDFLAGS", ""))],
        extra_objects=[archive] if archive else [],  # static: wheels run where the library is not installed
        py_limited_api=True,
    )
    return ffi


ffibuilder = builder()
