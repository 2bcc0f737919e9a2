"""crc32c over memory, in the fastest version that this processor runs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from stepwell.native._engine import ffi, lib

VERSIONS = ("avx512", "sse4.2", "portable")


def crc32c(data: bytes | bytearray | memoryview | NDArray[np.generic], crc: int = 0) -> int:
    """The checksum of `data`, continuing from `crc`, the checksum of what came before it."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return lib.sw_crc32c(crc, ffi.from_buffer(view), view.nbytes)


def crc32c_combine(a: int, b: int, len_b: int) -> int:
    """The checksum of A followed by B, from the checksum of each and the length of B in bytes."""
    return lib.sw_crc32c_combine(a, b, len_b)


def crc32c_versions() -> list[str]:
    """Names of the versions that this processor runs, the fastest first."""
    return [name for name in VERSIONS if lib.sw_crc32c_supported(name.encode())]


def force_crc32c(name: str | None) -> None:
    """Uses the version `name` for everything in this process; None goes back to the fastest. For tests.

    Raises ValueError if there is no such version or this processor cannot run it.
    """
    if lib.sw_crc32c_select(ffi.NULL if name is None else name.encode()):
        raise ValueError(f"no crc32c version {name!r} on this processor; there are: {', '.join(crc32c_versions())}")


def features() -> dict[str, str]:
    """What the native core found on this machine, for `stepwell doctor`."""
    from stepwell.native._engine_face import probe_uring

    works, reason = probe_uring()
    return {
        "crc32c": ffi.string(lib.sw_crc32c_name()).decode(),
        "crc32c_versions": ", ".join(crc32c_versions()),
        "io_uring": "yes" if works else "no",
        "io_uring_reason": reason,
    }
