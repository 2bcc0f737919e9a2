"""The JSON records of a checkpoint and of its run: typed, and sealed with a checksum of their own.

Every record carries a field `seal`, the crc32c of its bytes with the eight digits of the seal read as
zeros. One flipped byte is found before anything in the record is believed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from stepwell import native
from stepwell.errors import CorruptData, FormatError

FORMAT = 1
#: which stepwell reads format FORMAT, for the message an older one gives
SINCE_VERSION = "0.1.0"

_ZERO_SEAL = "00000000"
_SEAL = re.compile(rb'"seal":\s*"([0-9a-f]{8})"')


class Sealed(msgspec.Struct, kw_only=True):
    """Common head of all records."""

    format: int = FORMAT
    needs: str = SINCE_VERSION
    seal: str = _ZERO_SEAL


class RunRecord(Sealed, kw_only=True):
    """run.json: that this folder is a run, and which."""

    run_id: str
    made: float
    forked_from: str | None = None  # the checkpoint of another run that this one began from


class ShardRecord(msgspec.Struct, kw_only=True):
    """One shard: how long it is and the checksums of its bytes."""

    file: str
    size: int
    data_start: int
    leaves: bytes  # rows of the skeleton's table of tensors in the file's order, little-endian u32
    blocks: bytes  # crc32c of each MiB of the file, little-endian u32

    def crcs(self) -> np.ndarray[Any, np.dtype[np.uint32]]:
        return np.frombuffer(self.blocks, dtype="<u4").astype(np.uint32)


class Rewind(msgspec.Struct, frozen=True):
    """From attempt (epoch, call) on, earlier attempts at steps above `to` are abandoned."""

    to: int
    epoch: int
    call: int


class FileRecord(msgspec.Struct, frozen=True):
    """A sidecar file, such as a tokenizer's."""

    size: int
    crc: int


class Manifest(Sealed, kw_only=True):
    """The commit record: the checkpoint exists on this tier because this does."""

    run_id: str
    step: int
    attempt: str
    world: int
    parts: dict[str, int]  # the parts that are on this tier: name -> bytes over all ranks
    absent: list[str] = []  # parts of the checkpoint that are not; it is partial here if there are any
    covers: list[int]  # the ranks whose records are on this tier; on a shared tier all of them
    digests: list[int]  # crc32c of each of those ranks' records
    files: dict[str, FileRecord] = {}
    metrics: dict[str, float | str | None] = {}
    tags: list[str] = []
    parent: str | None = None
    timeline: int = 0
    rewinds: list[Rewind] = []
    made: float
    seconds: dict[str, float] = {}

    @property
    def size(self) -> int:
        """Bytes of all parts on this tier."""
        return sum(self.parts.values())

    @property
    def complete(self) -> bool:
        """Whether this tier alone holds every part of every rank."""
        return not self.absent and len(self.covers) == self.world


class Draft(msgspec.Struct, kw_only=True):
    """What only the saving process knows of the manifest to be. It travels in each rank's record, so
    that a later writer can commit an attempt whose records are all there."""

    run_id: str
    files: dict[str, FileRecord] = {}
    metrics: dict[str, float | str | None] = {}
    tags: list[str] = []
    parent: str | None = None
    timeline: int = 0
    rewinds: list[Rewind] = []
    made: float
    seconds: dict[str, float] = {}


class RankRecord(Sealed, kw_only=True):
    """One rank's part of a checkpoint."""

    step: int
    attempt: str
    rank: int
    world: int
    parts: dict[str, list[str]]  # part -> files of this rank
    part_bytes: dict[str, int]
    shards: list[ShardRecord]
    draft: Draft
    skeleton: msgspec.Raw

    def files_of(self, parts: Iterable[str]) -> set[str]:
        """This rank's files that any of these parts lie in; it may have none of a part."""
        return {file for part in parts for file in self.parts.get(part, ())}


class EpochRecord(Sealed, kw_only=True):
    """Who writes a run: made exclusively, so that two processes never hold one epoch."""

    token: str
    user: str
    host: str
    boot: str
    pid_space: str
    pid: int
    pid_started: float
    job: str | None = None
    restarts: int = 0
    made: float


class Beat(Sealed, kw_only=True):
    """A writer's heartbeat."""

    token: str
    count: int
    state: Literal["running", "closed"] = "running"


class Seen(Sealed, kw_only=True):
    """What was committed when an epoch began. An older epoch's manifest that is not listed came late:
    its writer had lost the run."""

    attempts: list[str]
    alone: bool = False  # its writer saw only this tier: of what is on others alone, the list before tells


class Rewound(Sealed, kw_only=True):
    """epochs/….rewind.json: that its epoch was taken only to rewind the run. All that older epochs made at steps above
    `to` is abandoned."""

    to: int
    made: float


class Deleted(Sealed, kw_only=True):
    """deleted.json: that a checkpoint was deleted, and that its files follow."""

    reason: str
    made: float


class Growing(Sealed, kw_only=True):
    """growing.json: that a copy without these parts made way for one of more. grown-00000.json: that all which this
    rank adds is durable; the new copy lacks these parts."""

    absent: list[str]
    made: float


class Note(Sealed, kw_only=True):
    """notes/0000012.json: what was said of a checkpoint after it was saved. Of two notes the higher number counts."""

    number: int
    attempt: str  # its folder
    step: int
    metrics: dict[str, float | str | None] = {}
    tags: dict[str, bool] = {}  # False takes it away
    keep: bool | None = None  # whether `holder` keeps it from retention from now on
    holder: str = "user"
    who: str  # user@host and pid, for people
    made: float


class Repair(Sealed, kw_only=True):
    """repair-….json: that a shard on this tier was bad and has been written again from another tier."""

    file: str
    wrong: str
    made: float


R = TypeVar("R", bound=Sealed)


def encode(record: Sealed) -> bytes:
    """The record's bytes, indented, sealed."""
    record.seal = _ZERO_SEAL
    plain = msgspec.json.encode(record)
    data = bytes(msgspec.json.format(plain, indent=1)) if len(plain) < 1 << 16 else plain
    seal = native.crc32c(data)
    match = _SEAL.search(data)
    assert match is not None and match[1] == _ZERO_SEAL.encode()
    record.seal = f"{seal:08x}"
    return data[: match.start(1)] + record.seal.encode() + data[match.end(1) :]


def decode(data: bytes, kind: type[R], **where: Any) -> R:
    """Checks and reads a record. Raises CorruptData if its bytes are not those written, FormatError if
    it comes from a newer stepwell or is no such record; both say `where`."""
    match = _SEAL.search(data)
    if match is None:
        raise CorruptData("the record has no seal", **where)
    if native.crc32c(data[: match.start(1)] + _ZERO_SEAL.encode() + data[match.end(1) :]) != int(match[1], 16):
        raise CorruptData("the record's bytes are not those that were written", **where)
    try:
        head = msgspec.json.decode(data, type=Sealed)
        if head.format > FORMAT:
            raise FormatError(f"newer format: needs stepwell >= {head.needs}", todo="Upgrade stepwell", **where)
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"not a {kind.__name__}: {error}", **where) from error
