"""What is replayed: for each rank the events of its processes, one after the other, from files or made up."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stepwell.errors import ConfigError
from stepwell.tracing import Event, Loaded, NotATrace, Prefetched, Restored, Saved, Start, read_trace


@dataclass(frozen=True, slots=True)
class Workload:
    """One list of events a rank. `notes` says what of its source is not in it.

    models: what is loaded or prefetched by name and not saved by it: (file, bytes) of each. It is on the last tier
    from the beginning.
    """

    name: str
    ranks: list[list[Event]]
    models: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def state_bytes(self) -> int:
        """Of the largest save of one rank, or of what is restored or loaded at once."""
        sizes = [
            sum(event.parts.values()) for rank in self.ranks for event in rank if isinstance(event, Saved | Restored)
        ]
        return max([*sizes, *(sum(files.values()) for files in self.models.values())], default=0)


def from_files(paths: Sequence[str | os.PathLike[str]]) -> Workload:
    """Recorded traces of one job, a file a rank. Of several runs in them, the one that saves most is replayed.

    Raises ConfigError for what is no trace, and for ranks that do not belong together.
    """
    ranks: dict[int, list[Event]] = {}
    worlds = set()
    notes: list[str] = []
    for path in paths:
        events = _read(path)
        start = events[0]
        assert isinstance(start, Start)
        worlds.add(start.world)
        if start.rank in ranks:
            todo = "Give one file a rank; files of processes of their own are replayed one at a time"
            raise ConfigError(f"two files are of rank {start.rank}", todo=todo, file=os.fspath(path))
        ranks[start.rank] = events
    if len(worlds) > 1:
        raise ConfigError(f"the files are of jobs of {sorted(worlds)} ranks", todo="Give the files of one job")
    world = worlds.pop()
    if len(ranks) < world:
        notes.append(f"{len(ranks)} of {world} ranks are replayed, as a job of their own")
    runs = Counter(
        event.run for rank in ranks.values() for event in rank if isinstance(event, Saved | Restored | Prefetched)
    )
    if len(runs) > 1:
        saved = Counter(event.run for rank in ranks.values() for event in rank if isinstance(event, Saved))
        chosen = max(runs, key=lambda run: (saved[run], runs[run]))
        notes.append(f"only run {chosen} is replayed; left out: {', '.join(sorted(set(runs) - {chosen}))}")
        ranks = {rank: [e for e in events if getattr(e, "run", chosen) == chosen] for rank, events in ranks.items()}
    lists = [ranks[rank] for rank in sorted(ranks)]
    models = {event.ref: event.files for events in lists for event in events if isinstance(event, Loaded)}
    return Workload(", ".join(Path(path).name for path in paths), lists, models, notes)


def _read(path: str | os.PathLike[str]) -> list[Event]:
    file = os.fspath(path)
    try:
        events = read_trace(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"the trace cannot be read: {error.strerror}", todo="Mend its path", file=file) from error
    except NotATrace as error:
        todo = "Record one with STEPWELL_TRACE=FILE; docs/lab.md has the format"
        raise ConfigError(f"this is no trace: {error}", todo=todo, file=file) from None
    if not events or not isinstance(events[0], Start):
        todo = "Record one with STEPWELL_TRACE=FILE; docs/lab.md has the format"
        raise ConfigError("this is no trace: it does not begin with a start", todo=todo, file=file)
    return events


def pauses(events: Sequence[Event]) -> list[float]:
    """What passes before each event since the one before it had ended: the program's own time, which stays as it is."""
    found, ended = [], 0.0
    for event in events:
        if isinstance(event, Start):
            found.append(event.after)
            ended = 0.0
        else:
            found.append(max(0.0, event.t - ended))
            ended = max(ended, event.t + event.took)
    return found


def duration_s(events: Sequence[Event]) -> float:
    """How long the program itself takes, without what it waits for."""
    return sum(pauses(events))
