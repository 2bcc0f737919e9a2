"""The event log: what was done with each checkpoint, by which rule and why. Bounded, one JSON object a line.

It is told of every move, so that metrics, the simulation and people (`stepwell show`) see the same. A copy lies
beside the run on its last tier, `events/0000007.jsonl` for each writer's epoch; it is a record for people: nothing
depends on it, it need not be durable, and a tier that hangs holds up nobody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec

from stepwell.clock import Clock
from stepwell.errors import StepwellError
from stepwell.format.names import Attempt
from stepwell.tiers.base import RecordKey, Tier

EVENTS = "events"
#: entries that are kept of one writer, and logs of earlier writers
ENTRIES_MAX, LOGS_MAX = 1000, 8
#: between two writes of the log
WRITE_S = 5.0

What = Literal[
    "saved",  # on a tier by a save
    "failed",  # a save, or a try of a flush
    "skipped",  # a save that was given up so that training need not wait
    "planned",  # a flush was decided
    "flushed",
    "cancelled",  # a flush that was decided is not done
    "not done",  # a promise forbids what a policy asked for
    "deleted",  # its manifest is gone: the checkpoint is no more on that tier
    "freed",  # and so are its files
    "verified",
    "prefetched",  # to host memory, because a policy asked for it
]


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="event"):
    """One thing that happened to one checkpoint."""

    at: float  # seconds since 1970, by the writer's clock; entries are in order whatever it says
    what: What
    step: int
    checkpoint: str = ""  # its folder; "" for a save that never got one
    tier: str = ""
    reason: str = ""
    bytes: int = 0
    seconds: float = 0.0  # how long it took


class Outlook(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="kind", tag="outlook"):
    """What will happen next with a copy, as policies saw it when the log was written."""

    step: int
    checkpoint: str
    tier: str
    reason: str


class EventLog:
    """What one writer has done. Lives on the event loop."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.entries: deque[Entry] = deque(maxlen=ENTRIES_MAX)
        self.outlook: Callable[[], Iterable[Outlook]] = lambda: ()
        self.changed = asyncio.Event()
        self.listeners: list[Callable[[Entry], object]] = []

    def add(
        self,
        what: What,
        attempt: Attempt | int,
        tier: str = "",
        reason: str = "",
        *,
        size_bytes: int = 0,
        seconds: float = 0.0,
    ) -> None:
        """attempt: the checkpoint's, or the step of one that has none."""
        step, folder = (attempt, "") if isinstance(attempt, int) else (attempt.step, attempt.folder)
        entry = Entry(self._clock.wall(), what, step, folder, tier, reason, size_bytes, round(seconds, 6))
        last = self.entries[-1] if self.entries else None
        if what in ("not done", "failed") and last is not None and _same(last, entry):
            return  # it is asked for, or tried, again and again
        self.entries.append(entry)
        self.changed.set()
        for listener in self.listeners:
            listener(entry)

    def encode(self) -> bytes:
        """The log as lines of JSON."""
        lines = [msgspec.json.encode(line) for line in (*self.entries, *self.outlook())]
        return b"".join(line + b"\n" for line in lines)


def _same(one: Entry, other: Entry) -> bool:
    return msgspec.structs.replace(one, at=other.at) == other


class LogKeeper:
    """Writes a log beside its run, now and then. Lives on the event loop."""

    def __init__(self, log: EventLog, run: str, tier: Tier, clock: Clock) -> None:
        self._log, self._run, self._tier, self._clock = log, run, tier, clock

    async def keep(self, epoch: int) -> None:
        """Writes the log whenever it has changed, for as long as it is not cancelled."""
        with contextlib.suppress(StepwellError):
            await self._tier.drop([self._place(epoch - LOGS_MAX)])
        while True:
            await self._log.changed.wait()
            await self._clock.sleep(WRITE_S)
            await self.write(epoch)

    async def write(self, epoch: int) -> None:
        self._log.changed.clear()
        with contextlib.suppress(StepwellError):  # it is for people: what is not there is missed by nobody else
            await self._tier.beat(self._place(epoch), self._log.encode())

    def _place(self, epoch: int) -> RecordKey:
        return RecordKey(self._run, log_file(epoch))


def log_file(epoch: int) -> str:
    """Where the writer of an epoch keeps its log, below the run's folder."""
    return f"{EVENTS}/{max(0, epoch):07d}.jsonl"


def decode_log(lines: Sequence[bytes]) -> list[Entry | Outlook]:
    """Reads a log; lines that are none (cut off, or of a newer stepwell) are left out."""
    found: list[Entry | Outlook] = []
    for line in lines:
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(line, type=Entry | Outlook))
    return found
