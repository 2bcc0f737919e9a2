"""The driver contract: what every storage tier does, and the plain data that it is asked with.

A tier keeps two kinds of things. *Shards* are files of up to terabytes that move chunk by chunk between
caller-owned memory and the tier; they are reserved, written in any order, and become durable with the
record that commits them. *Records* are small JSON files; a record that exists is never replaced, which
is all that the commit protocol needs (object stores can do it, too). A tier knows nothing of tensors.

Whatever drivers share beyond this contract (throttling, faults, tracing) is a wrapper in
`stepwell.tiers.wrap`, not a flag in a driver.
"""

from __future__ import annotations

import errno
import os
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Protocol

from stepwell.errors import TierError, TierFull, TierUnavailable
from stepwell.native import Ticket
from stepwell.native._objects import untracked as untracked  # for policies, too

#: a run's folder of small records that are never replaced and that readers commit, too
NOTES = "notes"

Scope = Literal["process", "node", "shared"]
Survives = Literal["nothing", "process", "reboot", "node-loss"]  # what a tier's copy outlives

#: bytes a chunk; the unit of movement. Not above MAX_CHUNK_BYTES: one bad-block bitmap is 64 bits of 1 MiB
CHUNK_BYTES = 8 << 20
MAX_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class CheckpointKey:
    """One attempt at one step. `run` is "" for a folder that is not inside a run."""

    run: str
    attempt: str  # the folder's name: step-000001200.7-31

    def __str__(self) -> str:
        return f"{self.run}/{self.attempt}" if self.run else self.attempt


@dataclass(frozen=True, slots=True)
class ShardKey:
    """One shard file of a checkpoint."""

    checkpoint: CheckpointKey
    name: str  # model.safetensors

    def __str__(self) -> str:
        return f"{self.checkpoint}/{self.name}"


@dataclass(frozen=True, slots=True)
class RecordKey:
    """A small file inside a run: `epochs/0000007.json`, `step-000001200.7-31/manifest.json`."""

    run: str
    name: str  # with '/', at most two parts

    def __str__(self) -> str:
        return f"{self.run}/{self.name}" if self.run else self.name


@dataclass(frozen=True, slots=True)
class TierInfo:
    """What a driver says of itself. The contract suite chooses its tests by these fields."""

    name: str
    driver: str
    scope: Scope
    survives: Survives
    capacity_bytes: int | None = None  # None: only the medium's own limit
    alignment_bytes: int = 1  # of offsets and of buffers; lengths are padded by the driver
    request_bytes: int = 1 << 20  # what one request to the medium likes to be
    depth: int = 16  # how many of them at once
    linked: bool = False  # honours ChunkIO.after and ChunkIO.signal without the event loop's help
    read_only: bool = False
    write_bytes_per_s: float | None = None  # limits asked for; who moves chunks keeps them, the driver does not
    read_bytes_per_s: float | None = None
    detail: dict[str, str] = field(default_factory=dict)  # what was probed and why, for `doctor`


@dataclass(slots=True)
class ChunkIO:
    """One chunk between a shard on the tier and memory of the caller's.

    `address` must stay valid until the result is there. It is page-aligned and may be written past
    `length` up to the next multiple of 4096 (padding of direct I/O); `offset` is a multiple of 4096.
    With a `linked` tier, I/O starts when `after` has fired and `signal` fires when it is done.
    """

    shard: ShardKey
    offset: int  # first byte in the shard
    length: int
    address: int
    after: Ticket | None = None
    signal: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one chunk: `error` is None if all its bytes moved."""

    error: TierError | None = None


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room promised for one shard of exactly `size_bytes`; ends with `commit` or `abort`.

    `resumed`: bytes of an earlier reservation are still there. Nobody vouches for them: whoever asked reads
    the chunks back, verifies them and writes those that are not good.
    """

    shard: ShardKey
    size_bytes: int
    resumed: bool = field(default=False, compare=False)


@dataclass(frozen=True, slots=True)
class Refused:
    """Why there is no room: a normal answer, not an error."""

    reason: Literal["full", "unhealthy", "read-only"]
    detail: str
    needed_bytes: int = 0
    free_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Found:
    """One file that is really there. `attempt` is "" for files beside the step folders."""

    attempt: str  # or the folder beside them: "epochs", "notes"
    name: str  # "" for an empty folder
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Usage:
    logical_bytes: int = 0  # of committed and reserved shards
    physical_bytes: int = 0  # what they take on the medium
    in_flight_bytes: int = 0  # reserved, not yet committed
    free_bytes: int | None = None  # on the medium; None: unknown


@dataclass(frozen=True, slots=True)
class Chunk:
    """One chunk in a tier that evicts. `shard` and `index` say where it belongs; the host arena's `shard` is the hex
    digest of the shard's key, the same in every process and after a restart."""

    key: Hashable
    shard: Hashable
    index: int
    size_bytes: int
    fetch_s: float = 0.0  # what fetching it again takes, in seconds; 0: nobody has measured it


class EvictionPolicy(Protocol):
    """Ranks the chunks of one tier. Told of all that happens to them; chooses, but removes nothing itself."""

    def entered(self, chunk: Chunk) -> None:
        """A chunk has become resident."""
        ...

    def used(self, chunk: Chunk) -> None:
        """A chunk was read. One that is not resident is no error."""
        ...

    def left(self, chunk: Chunk) -> None:
        """A chunk is gone, evicted or dropped. Idempotent."""
        ...

    def victims(self, needed_bytes: int, may_go: Callable[[Chunk], bool]) -> Iterator[Chunk]:
        """Chunks that should go, first to go first, only such as `may_go`, until `needed_bytes` are together
        or nothing more may go; none twice. Chunks may enter, be used and leave while this runs."""
        ...

    def state(self) -> Any:
        """What is worth knowing after a restart, as JSON has it, of bounded size. Of chunks whose `shard` is no text
        it knows nothing."""
        ...

    def resume(self, state: Any) -> None:
        """Goes on from what `state` gave in an earlier process; called first of all. `entered` follows for each chunk
        that is still there, in any order, and changes nothing of the order remembered. Never raises: what it does not
        understand, it forgets."""
        ...


class Lease:
    """Keeps shards readable until it is closed, even if the checkpoint is dropped meanwhile."""

    async def close(self) -> None:
        """Gives the shards back. Idempotent."""

    async def __aenter__(self) -> Lease:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class Tier(ABC):
    """A place in the hierarchy. Methods are called on one event loop; none of them blocks it."""

    info: TierInfo

    async def start(self) -> None:  # noqa: B027 - optional: not every driver has something to start
        """Probes the place and fills in `info`. Raises TierUnavailable if it is not there."""

    @abstractmethod
    async def reserve(self, shard: ShardKey, size_bytes: int, *, resume: bool = False) -> Reservation | Refused:
        """Promises room for a shard and makes it writable. What was there under this name is replaced
        (only an attempt that nobody committed can be there).

        With `resume` a shard of that size that was reserved earlier (also by a process that died) and never
        committed is kept instead, and the answer says `resumed`. A driver that cannot keep it replaces it.
        """

    @abstractmethod
    async def write(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        """Moves chunks of reserved shards from memory to the tier, in any order. Not yet durable."""

    @abstractmethod
    async def read(self, chunks: Sequence[ChunkIO]) -> list[Result]:
        """Moves chunks from the tier to memory. A chunk that reaches past the shard's end is an error.
        Reserved shards are read like committed ones, also while they are being written."""

    @abstractmethod
    async def commit(self, record: RecordKey, data: bytes, *, shards: Sequence[Reservation] = ()) -> bool:
        """Makes `shards` exactly as long as reserved and durable, then `record`.

        When it returns True, shards and record outlive what `info.survives` says. The record is there
        whole or not at all, and never before the shards are durable. Returns False, changing nothing of
        it, if the record exists already: a record is never replaced. It is durable then, too; `shards` are not.
        Raises TierError (ENOENT) for a manifest without shards where no rank's record is (any more). A tier that was
        opened for reading only commits records in NOTES, and makes nothing but that folder for them.
        """

    @abstractmethod
    async def fetch(self, record: RecordKey) -> bytes | None:
        """A record's bytes; None if the tier answered and it is not there."""

    @abstractmethod
    async def beat(self, record: RecordKey, data: bytes) -> None:
        """Replaces a small file that need not be durable (a writer's heartbeat)."""

    @abstractmethod
    async def abort(self, reservation: Reservation) -> None:
        """Gives up a reserved shard and frees its room. Idempotent."""

    @abstractmethod
    async def drop(self, what: Sequence[CheckpointKey | ShardKey | RecordKey]) -> None:
        """Deletes. Of a checkpoint the manifest goes first, durably, so that no moment shows a committed
        checkpoint with files missing. What is not there is no error."""

    @abstractmethod
    def scan(self, run: str) -> AsyncIterator[Found]:
        """Every file of the run that is really there, in any order. A run that is not there has none."""

    @abstractmethod
    def usage(self) -> Usage:
        """Bytes in use, from the driver's own books (no I/O)."""

    async def lease(self, shards: Sequence[ShardKey]) -> Lease:
        """Opens the shards for reading. Raises CheckpointGone if their checkpoint is not there (any more), and
        TierError (ENOENT) if only a shard of a committed checkpoint is missing."""
        return Lease()

    async def close(self) -> None:  # noqa: B027 - optional, too
        """Frees threads, rings and files. Does not wait for a hung medium. Idempotent."""


#: errno of the operating system -> the class that tells the caller what can be done
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_AWAY = {errno.ETIMEDOUT, errno.ENOTCONN, errno.ESTALE, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENODEV, errno.ENXIO}


def tier_error(number: int, what: str, *, todo: str = "", **where: Any) -> TierError:
    """Translates an errno (positive) into stepwell's error for it. The only place that does."""
    kind = TierFull if number in _FULL else TierUnavailable if number in _AWAY else TierError
    if kind is TierFull and not todo:
        todo = "Free space or raise the quota; older checkpoints are untouched and the next save tries again"
    why = f"{os.strerror(number).lower()} ({errno.errorcode[number]})" if number in errno.errorcode else str(number)
    error = kind(f"{what}: {why}", todo=todo, **where)
    error.errno = number
    return error


def not_open(tier: str, state: str, **where: Any) -> TierUnavailable:
    """The error for calls on a tier that is not started or was closed: trying again does not help."""
    error = TierUnavailable(f"Tier {tier} is {state}", **where)
    error.retry = False
    return error
