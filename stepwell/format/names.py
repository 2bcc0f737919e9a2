"""The names of files and folders inside a run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from stepwell.errors import ConfigError
from stepwell.tiers.base import NOTES

MANIFEST = "manifest.json"
RUN_FILE = "run.json"
EPOCHS = "epochs"
#: in a step folder: its checkpoint was deleted, and its files stay only for those who are reading them
DELETED = "deleted.json"
#: in a step folder: some parts were committed there, and the manifest made way so that more can come
GROWING = "growing.json"

#: what the usual file systems allow for one name, in bytes (encrypted homes: 143)
NAME_BYTES_MAX = 143

_ATTEMPT = re.compile(r"step-(\d{9,})\.(\d+)-(\d+)")
_RANK = re.compile(r"rank-(\d{5,})\.json")
_GROWN = re.compile(r"grown-\d{5,}\.json")
_NOTE = re.compile(r"(\d{7,})\.json")
_EPOCH = re.compile(r"(\d{7,})\.(json|beat|seen\.json|rewind\.json)")


@dataclass(frozen=True, slots=True, order=True)
class Attempt:
    """One try to save a step: the `call`-th save() of the writer that holds `epoch`.

    Ordered by when it was begun, which is not the order of steps after a rewind.
    """

    epoch: int
    call: int
    step: int
    renamed: str | None = field(default=None, compare=False)  # what a copied folder is called now

    @property
    def folder(self) -> str:
        return self.renamed or f"step-{self.step:09d}.{self.epoch}-{self.call}"

    @classmethod
    def parse(cls, folder: str) -> Attempt | None:
        """The attempt that a folder's name stands for; None if it is not such a name."""
        match = _ATTEMPT.fullmatch(folder)
        return cls(step=int(match[1]), epoch=int(match[2]), call=int(match[3])) if match else None


def rank_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def grown_file(rank: int) -> str:
    """In a step folder, beside GROWING: what the rank adds is there."""
    return f"grown-{rank:05d}.json"


def is_grown(name: str) -> bool:
    return _GROWN.fullmatch(name) is not None


def rank_of(name: str) -> int | None:
    """The rank whose record has this name; None if it is no such name."""
    match = _RANK.fullmatch(name)
    return int(match[1]) if match else None


def epoch_file(epoch: int, kind: str = "json") -> str:
    """kind: `json` (who writes), `beat` (its heartbeat), `seen.json` (what it found) or `rewind.json` (that it took
    the run only to rewind it)."""
    return f"{EPOCHS}/{epoch:07d}.{kind}"


def epoch_of(name: str) -> tuple[int, str] | None:
    """(epoch, kind) of a file name inside `epochs/`."""
    match = _EPOCH.fullmatch(name)
    return (int(match[1]), match[2]) if match else None


def note_file(number: int) -> str:
    return f"{NOTES}/{number:07d}.json"


def note_of(name: str) -> int | None:
    """The number of a file name inside `notes/`."""
    match = _NOTE.fullmatch(name)
    return int(match[1]) if match else None


def check_run_name(run: str) -> str:
    """Returns `run` if it can name a folder; raises ConfigError that says why not."""
    if run in ("", ".", "..") or "/" in run or "\0" in run:
        raise ConfigError(f"{run!r} cannot name a run", todo="Use a plain folder name without '/'")
    size = len(run.encode("utf-8", "surrogateescape"))
    if size > NAME_BYTES_MAX:
        raise ConfigError(
            f"the run's name has {size} bytes, more than the {NAME_BYTES_MAX} that every file system takes",
            todo="Use a shorter name",
        )
    return run
