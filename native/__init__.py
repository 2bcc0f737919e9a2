"""The native core's Python face: I/O engines, copy and checksum, memory for slots.

Knows nothing of the rest of stepwell. An `Engine` moves bytes between memory and files (io_uring, or
threads where that is missing) and between memory and memory, checksumming on the way; `Ticket`s chain
jobs across engines without Python; `AsyncEngine` brings completions to asyncio. A `DeviceEngine` moves bytes
between host memory and a GPU's, and within that; `Latch`es are what user threads wait for, `Mark`s what a GPU's
copies do.
"""

try:
    import stepwell.native._engine  # noqa: F401  so that a missing extension is told before anything needs it
except ImportError as error:
    raise ImportError(
        f"stepwell's native part cannot be loaded ({error}). It is built by installing stepwell: run "
        "'pip install stepwell', or 'pip install -e .' in a checkout"
    ) from error

from stepwell.native._checksum import crc32c, crc32c_combine, features, force_crc32c
from stepwell.native._device import (
    TRIP_ALLOC,
    TRIP_FREE,
    DeviceEngine,
    Gathering,
    device_total_bytes,
    probe_device,
    trip_library,
)
from stepwell.native._engine_face import Engine, EngineStatistics, probe_uring
from stepwell.native._jobs import ALIGN_BYTES, BLOCK_BYTES, Done, Job, Op, PieceMap, Ticket
from stepwell.native._latches import Latch, Mark
from stepwell.native._memory import Mapping, Region, allocate, fence, give_back, memory_kind
from stepwell.native.aio import AsyncEngine

__all__ = [
    "ALIGN_BYTES",
    "BLOCK_BYTES",
    "TRIP_ALLOC",
    "TRIP_FREE",
    "AsyncEngine",
    "DeviceEngine",
    "Done",
    "Engine",
    "EngineStatistics",
    "Gathering",
    "Job",
    "Latch",
    "Mapping",
    "Mark",
    "Op",
    "PieceMap",
    "Region",
    "Ticket",
    "allocate",
    "crc32c",
    "crc32c_combine",
    "device_total_bytes",
    "features",
    "fence",
    "force_crc32c",
    "give_back",
    "memory_kind",
    "probe_device",
    "probe_uring",
    "trip_library",
]
