"""Traces: what this process saves, restores, loads and prefetches, and when, as lines of JSON.

Switched on by `trace = FILE` or by STEPWELL_TRACE. Each process has a file of its own: rank 3 of 8 writes
`FILE` with `.rank00003-of-00008` before its ending, and `%p` stands for the process's id. A process that finds the file
appends to it: its `start` line then tells of a restart. docs/lab.md has the format; `stepwell lab simulate` replays it.

A line is made and queued in the caller's thread, a few microseconds; another thread writes it, so that a hung file
system delays nobody. What cannot be written is dropped: a trace is never worth a checkpoint.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from stepwell.jobs import Job, current_job

if TYPE_CHECKING:
    from stepwell.checkpoint import Checkpoint
    from stepwell.reader import OpenShards
    from stepwell.refs import Place
    from stepwell.saving import Save
    from stepwell.state import Fill

log = logging.getLogger("stepwell")

VERSION = 1
VARIABLE = "STEPWELL_TRACE"
#: a process stops after so much: some 300,000 lines
TRACE_BYTES_MAX = 64 << 20
#: chunks that are named in a trace are of this size, whatever the arena's are
TRACE_CHUNK_BYTES = 8 << 20
#: what the end of a store waits for lines that are not written yet
_FLUSH_S = 1.0

#: when this process began, as its traces count: what it did before it named a file lies after that, too
_BEGAN = time.monotonic()

Chunks = dict[str, list[tuple[int, int]]]  # file -> (first chunk, how many)


class Start(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="start"):
    """A process begins. after, lost (in made-up traces): how long the process before it still ran since its last event,
    and what a copy must survive to be still there."""

    version: int = VERSION
    rank: int = 0
    world: int = 1
    made: float = 0.0  # seconds since 1970
    by: str = ""
    after: float = 0.0
    lost: str | None = None


class Saved(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="save"):
    """A `save`. t: seconds since the process began, when it was called; took: how long it blocked."""

    t: float
    took: float
    run: str
    step: int
    parts: dict[str, int]  # bytes, of this rank


class Restored(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="restore"):
    """A `restore`. step: what was asked for; None: the newest."""

    t: float
    took: float
    run: str
    step: int | None = None
    found: int | None = None  # the step that it brought
    parts: dict[str, int] = {}
    sources: dict[str, int] = {}  # tier -> bytes


class Loaded(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="load"):
    """A `load`. chunks: those that were read, of each file; None: all."""

    t: float
    took: float
    ref: str
    files: dict[str, int]  # bytes
    chunks: Chunks | None = None
    sources: dict[str, int] = {}


class Prefetched(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="prefetch"):
    """A `prefetch`, most urgent first. wait: whether what follows waits for its end (in made-up traces)."""

    t: float
    run: str
    refs: list[str]
    to: str = "host"
    took: float = 0.0
    wait: bool = False


class Closed(msgspec.Struct, frozen=True, kw_only=True, tag_field="do", tag="close"):
    """A store was closed."""

    t: float
    took: float
    run: str


Event = Start | Saved | Restored | Loaded | Prefetched | Closed


class Recorder:
    """Writes one process's trace. Any thread."""

    def __init__(self, path: str) -> None:
        self._path, self._pid = path, os.getpid()
        self._lock = threading.Lock()
        self._lines: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<Recorder to {self._path}: {self._bytes} bytes>"

    def since(self, moment: float) -> float:
        """A moment of the monotonic clock, as the trace has it."""
        return round(moment - _BEGAN, 6)

    def add(self, event: Event, job: Job | None) -> None:
        """Queues a line; `job` counts at the first one. None: only if there was one before."""
        if self._pid != os.getpid():  # of a forked child: what its parent has open is not its own
            return
        if job is not None:
            self._begin(job)
        elif self._thread is None:
            return
        line = msgspec.json.encode(event) + b"\n"
        self._bytes += len(line)
        if self._bytes <= TRACE_BYTES_MAX:
            self._lines.put(line)

    def _begin(self, job: Job) -> None:
        with self._lock:
            if self._thread is not None:
                return
            path = _of_rank(self._path, job)
            start = Start(
                rank=job.rank, world=job.world, made=time.time() - (time.monotonic() - _BEGAN),
                by=f"{socket.gethostname()}, pid {self._pid}",
            )  # fmt: skip
            self._lines.put(msgspec.json.encode(start) + b"\n")
            self._thread = threading.Thread(target=self._write, args=(path,), name="stepwell-trace", daemon=True)
            self._thread.start()

    def _write(self, path: Path) -> None:
        try:
            with open(path, "ab", buffering=0) as file:
                while True:
                    line = self._lines.get()
                    if isinstance(line, threading.Event):
                        line.set()
                    else:
                        file.write(line)
        except OSError as error:
            log.warning("the trace %s cannot be written, and ends here: %s", path, error)
        while True:  # nobody waits in vain for what comes now
            if isinstance(line := self._lines.get(), threading.Event):
                line.set()

    def flush(self) -> None:
        """Returns when all lines so far are written, or a moment later."""
        if self._thread is not None and self._pid == os.getpid():
            written = threading.Event()
            self._lines.put(written)
            written.wait(_FLUSH_S)


def _of_rank(path: str, job: Job) -> Path:
    named = Path(os.path.expandvars(path.replace("%p", str(os.getpid())))).expanduser()
    if job.world == 1:
        return named
    return named.with_name(f"{named.stem}.rank{job.rank:05d}-of-{job.world:05d}{named.suffix}")


_recorders: dict[tuple[int, str], Recorder] = {}
_making = threading.Lock()


def recorder(setting: str | None = None) -> Recorder | None:
    """This process's recorder to the file of a setting, else of STEPWELL_TRACE; None: nothing is recorded."""
    path = setting or os.environ.get(VARIABLE)
    if not path:
        return None
    with _making:
        return _recorders.setdefault((os.getpid(), path), Recorder(path))


class Trace:
    """What one store tells. Stores of a process that name one file share it; without a file nothing is done."""

    def __init__(self, run: str, setting: str | None) -> None:
        self._run, self._to = run, recorder(setting)

    def saved(self, save: Save, job: Job) -> None:
        """`save` comes back."""
        if self._to is not None:
            since = self._to.since(save.began)
            event = Saved(t=since, took=save.blocked_seconds, run=self._run, step=save.step, parts=save.part_bytes)
            self._to.add(event, job)

    def restored(self, began: float, step: int | None, found: Checkpoint, state: Collection[Any], job: Job) -> None:
        """`restore` has brought a checkpoint. state: the parts that were asked for."""
        if self._to is None:
            return
        event = Restored(
            t=self._to.since(began), took=time.monotonic() - began, run=self._run, step=step, found=found.step,
            parts={part: size for part, size in found.parts.items() if part in state}, sources=dict(found.sources),
        )  # fmt: skip
        self._to.add(event, job)

    def prefetched(self, refs: Sequence[object], to: str, job: Job) -> None:
        """`prefetch` was called."""
        if self._to is not None:
            named = [str(os.fspath(ref)) if isinstance(ref, os.PathLike) else str(ref) for ref in refs]
            self._to.add(Prefetched(t=self._to.since(time.monotonic()), run=self._run, refs=named, to=to), job)

    @contextlib.contextmanager
    def closing(self) -> Iterator[None]:
        """Around `close`."""
        began = time.monotonic()
        try:
            yield
        finally:
            if self._to is not None:
                self._to.add(Closed(t=self._to.since(began), took=time.monotonic() - began, run=self._run), None)
                self._to.flush()


def note_load(place: Place, began: float, opened: OpenShards, fills: Sequence[Fill]) -> None:
    """`load` has filled tensors from open shards; `began`: by the monotonic clock."""
    to = recorder()
    if to is None:
        return
    wanted = {fill.label for fill in fills}
    chunks: Chunks = {}
    for shard in opened.shards:
        mine = wanted.intersection(shard.layout.labels)
        spans = [(0, shard.size)] if len(mine) == len(shard.layout.labels) else [*map(shard.layout.span, mine)]
        chunks[shard.key.name] = chunks_of(spans, shard.size)
    whole = all(chunks[shard.key.name] == chunks_of([(0, shard.size)], shard.size) for shard in opened.shards)
    step = f"@{opened.step}" if place.kind == "run" else f"/{place.file}" if place.file else ""
    event = Loaded(
        t=to.since(began), took=time.monotonic() - began, ref=f"{place.folder}{step}",
        files={shard.key.name: shard.size for shard in opened.shards}, chunks=None if whole else chunks,
        sources=dict(opened.healing.read_bytes),
    )  # fmt: skip
    to.add(event, current_job())


def chunks_of(spans: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """The chunks that cover spans of a file of `size` bytes, as (first, count), rising and apart."""
    numbers = sorted(
        {
            number
            for begin, end in spans
            for number in range(begin // TRACE_CHUNK_BYTES, -(-min(end, size) // TRACE_CHUNK_BYTES))
        }
    )
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and sum(runs[-1]) == number:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((number, 1))
    return runs


# -- reading -----------------------------------------------------------------------------


class NotATrace(ValueError):
    """A line of a file is no line of a trace; `line` counts from 1."""

    def __init__(self, line: int, why: str) -> None:
        super().__init__(f"line {line}: {why}")


def read_trace(data: bytes) -> list[Event]:
    """The events of a trace. A last line that was cut off is left out. Raises NotATrace."""
    decoder = msgspec.json.Decoder(Event)
    events: list[Event] = []
    lines = data.split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            events.append(decoder.decode(line))
        except msgspec.DecodeError as error:
            if number == len(lines):
                break
            raise NotATrace(number, re.sub(r"\s+", " ", str(error))) from None
    newer = next((event.version for event in events if isinstance(event, Start) and event.version > VERSION), None)
    if newer is not None:
        raise NotATrace(1, f"it is of version {newer}, and this stepwell reads version {VERSION}")
    return events
