"""What an engine is asked for: jobs, the tickets between them, and maps of pieces of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from stepwell.native._engine import ffi, lib
from stepwell.native._latches import Latch, Mark

BLOCK_BYTES = 1 << 20  # one checksum each
ALIGN_BYTES = 4096  # of direct I/O
CHECKED_BYTES_MAX = 64 * BLOCK_BYTES  # Done.bad_blocks has 64 bits

_STATES: tuple[Literal["pending", "done", "failed"], ...] = ("pending", "done", "failed")


class Op(IntEnum):
    """The numbers are those of `enum sw_op` in stepwell.h."""

    READ = 0
    WRITE = 1
    SYNC = 2  # fdatasync; covers writes that had completed when it started
    FALLOCATE = 3  # the system call, never an emulation: EOPNOTSUPP is a result
    GATHER = 4  # pieces -> buffer, checksums out; threads only
    SCATTER = 5  # buffer -> pieces, only blocks with the expected checksum; threads only
    D2H = 6  # pieces in a device's memory -> buffer; a DeviceEngine's only, as all that follow
    H2D = 7  # buffer -> pieces in a device's memory
    PACK = 8  # pieces -> slots, both in a device's memory
    UNPACK = 9  # slots -> pieces, both in a device's memory


class Ticket:
    """Fires once, as done or failed; jobs of any engine can wait for it and fire it.

    A job keeps its tickets alive until it is reaped. When a pending ticket is collected, what still
    waits for it is cancelled.
    """

    __slots__ = ("__weakref__", "_handle")

    def __init__(self) -> None:
        handle = lib.sw_ticket_new()
        if handle == ffi.NULL:
            raise MemoryError("no memory for a ticket")
        self._handle = ffi.gc(handle, lib.sw_ticket_free)

    @property
    def state(self) -> Literal["pending", "done", "failed"]:
        return _STATES[lib.sw_ticket_state(self._handle)]

    def fire(self, ok: bool = True) -> None:
        """Ends the wait of those who wait for it, from Python. A second firing does nothing."""
        lib.sw_ticket_fire(self._handle, ok)

    def __repr__(self) -> str:
        return f"<Ticket {self.state}>"


class PieceMap:
    """Where in memory the bytes of a shard live: piece i is [offsets[i], offsets[i+1]) at addresses[i].

    Address 0 is a hole: those bytes are not touched. Immutable and shared by any number of jobs at once;
    `keep` is held for as long as the map, so that what owns the memory stays alive. Raises ValueError if
    the arrays do not fit together or the offsets do not ascend.
    """

    __slots__ = ("_addresses", "_handle", "_offsets", "keep")

    def __init__(self, offsets: NDArray[np.uint64], addresses: NDArray[np.uint64], keep: object = None) -> None:
        self._offsets = np.array(offsets, dtype=np.uint64)  # copies: nobody else can change them
        self._addresses = np.array(addresses, dtype=np.uint64)
        if self._offsets.ndim != 1 or self._offsets.size != self._addresses.size + 1 or self._addresses.ndim != 1:
            raise ValueError(f"{self._addresses.size} pieces need one offset more, not {self._offsets.size}")
        if bool(np.any(self._offsets[1:] < self._offsets[:-1])):
            raise ValueError("offsets of pieces must ascend")
        self.keep = keep
        self._handle = ffi.new("sw_map *")
        self._handle.count = self._addresses.size
        self._handle.offsets = ffi.cast("uint64_t *", self._offsets.ctypes.data)
        self._handle.addresses = ffi.cast("uint64_t *", self._addresses.ctypes.data)

    def __len__(self) -> int:
        return self._addresses.size

    @property
    def offsets(self) -> NDArray[np.uint64]:
        """Where each piece begins, and where the last one ends. Not to be changed."""
        return self._offsets

    @property
    def addresses(self) -> NDArray[np.uint64]:
        """Where each piece lies. Not to be changed."""
        return self._addresses

    def __repr__(self) -> str:
        return f"<PieceMap of {len(self)} pieces, bytes {self._offsets[0]} to {self._offsets[-1]}>"


@dataclass(slots=True, eq=False)
class Job:
    """One thing for an engine to do. Read it anew from `Done.job`; do not change it after submit.

    READ, WRITE: `length` bytes between `address` and `offset` of `fd`. `direct`: the file is open with
    O_DIRECT, so the length is rounded up to 4096; a write leaves its padding in the file, a read may write
    past `length` in memory. SYNC: `fd`. FALLOCATE: `offset`, `length`.
    GATHER, SCATTER: bytes [pieces_offset, pieces_offset + length) of `pieces` and the buffer at `address`, or for
    GATHER in `slots`, several buffers, each of which begins a block.
    `crcs`: one uint32 for each block of 1 MiB, written by GATHER (which then also fills the buffer with
    zeros up to a multiple of 4096), expected by SCATTER; `pieces_offset` is then a multiple of 1 MiB.
    SCATTER without `pieces` only verifies.
    D2H, H2D: the same bytes, of `address` or `slots`, with `pieces` in the device's memory; no checksums, and neither
    side of a hole is touched. `mark`: the copies start after that point of the stream that it was made on.
    PACK, UNPACK: the same bytes of `pieces` and of `slots`, of any length, both in memory of the engine's device, with
    `mark` as before. A hole on either side leaves those bytes as they are. No piece may cross the border of two
    allocations of the driver's.
    `after`: starts when that ticket is done; if it fails, the job ends with -ECANCELED. `signal`: fired
    when the job ends: done if it moved all its bytes, else failed. `latches`: each is counted down, once for each
    time that it is named, by D2H and PACK when their copies are issued, else when the job has ended, well or not;
    not if `submit` raises. `keep`: held until the job is reaped: what owns the memory at `address`.
    """

    op: Op
    fd: int = -1
    address: int = 0
    offset: int = 0
    length: int = 0
    direct: bool = False
    pieces: PieceMap | None = None
    pieces_offset: int = 0
    slots: PieceMap | None = None
    crcs: NDArray[np.uint32] | None = None
    after: Ticket | None = None
    signal: Ticket | None = None
    mark: Mark | None = None
    latches: Sequence[Latch] = ()
    keep: object = None


class Done(NamedTuple):
    """What became of a job: `result` is bytes moved or -errno.

    READ: fewer bytes than asked if the file ended. SCATTER: bytes of good blocks; bit i of `bad_blocks`
    is set where block i of the job had another checksum than expected.
    """

    job: Job
    result: int
    bad_blocks: int


def check(job: Job) -> None:
    """Raises ValueError for a job that would make the engine touch memory that is not there."""
    packs = job.op in (Op.PACK, Op.UNPACK)
    if packs and (job.pieces is None or job.slots is None):
        raise ValueError(f"{job.op.name} needs pieces and slots")
    if job.slots is not None and job.op not in (Op.GATHER, Op.D2H, Op.H2D, Op.PACK, Op.UNPACK):
        raise ValueError(f"{job.op.name} takes no slots")
    crcs = job.crcs
    if crcs is None:
        return
    if crcs.dtype != np.uint32 or not crcs.flags.c_contiguous:
        raise ValueError("crcs must be a contiguous array of uint32")
    if job.op not in (Op.GATHER, Op.SCATTER):
        raise ValueError(f"{job.op.name} takes no crcs")
    if crcs.size * BLOCK_BYTES < job.length:
        raise ValueError(f"{job.length} bytes need {-(-job.length // BLOCK_BYTES)} crcs, not {crcs.size}")
    if job.op is Op.GATHER and not crcs.flags.writeable:
        raise ValueError("GATHER writes crcs, but they are read-only")


def fill(target: Any, number: int, job: Job) -> object:
    """Writes `job` into a C struct sw_job. What is returned must be kept until that is submitted."""
    target.id = number
    target.op = job.op
    target.fd = job.fd
    target.address = job.address
    target.offset = job.offset
    target.length = job.length
    if job.direct:
        target.flags = lib.SW_DIRECT
    if job.pieces is not None:
        target.map = job.pieces._handle
        target.map_offset = job.pieces_offset
    if job.crcs is not None or job.slots is not None or job.op >= Op.PACK:
        check(job)
    if job.slots is not None:
        target.slots = job.slots._handle
    if job.crcs is not None:
        target.map_offset = job.pieces_offset
        target.crcs = ffi.cast("uint32_t *", job.crcs.ctypes.data)
    if job.after is not None:
        target.after = job.after._handle
    if job.signal is not None:
        target.signal = job.signal._handle
    if job.mark is not None:
        target.mark = job.mark._handle
    if not job.latches:
        return None
    latches = ffi.new("sw_latch *[]", [latch._handle for latch in job.latches])
    target.latches = latches
    target.latch_count = len(job.latches)
    return latches
