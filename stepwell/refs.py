"""References: how a checkpoint is named, the same in Python and on the command line.

`PATH@1200`, `PATH@latest`, `PATH@best:METRIC`, `PATH@best:max:METRIC`, `PATH@TAG`, where PATH is a run's
folder; or a plain path of a step folder, a folder of safetensors files, or one such file. Where several
checkpoints may be meant, also ranges of steps, both ends included: `PATH@..5000`, `PATH@100..200`, `PATH@100..`.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stepwell.checkpoint import Checkpoint
from stepwell.errors import CheckpointNotFound, ConfigError, FormatError
from stepwell.format.names import MANIFEST, RUN_FILE, Attempt

#: of a step or a range: no folder's name holds more
_NUMBER_CHARS_MAX = 512
_RANGE = re.compile(r"(\d*)\.\.(\d*)")


@dataclass(frozen=True, slots=True)
class Place:
    """What a reference stands for: a run (and which checkpoint of it), a step folder, or plain files."""

    kind: Literal["run", "step", "plain"]
    folder: Path
    select: str = "latest"
    file: str | None = None  # of a plain folder: only this one
    selected: bool = False  # the reference itself said which checkpoint


def find(ref: str | os.PathLike[str]) -> Place:
    """Looks at the path. Raises CheckpointNotFound or FormatError with what is really there, ConfigError."""
    text = os.fspath(ref)
    select = None
    path = Path(text).expanduser().absolute()
    if "@" in text and not os.path.lexists(path):
        text, _, select = text.rpartition("@")
        path = Path(text).expanduser().absolute()
    if not text:
        raise CheckpointNotFound(f"{ref!r} names no path", todo="Give the path of a run, a checkpoint or a file")
    if select is not None and len(select) > _NUMBER_CHARS_MAX and not select.strip("0123456789."):
        raise ConfigError(f"no step has so many digits: @{select[:20]}...", path=str(path))
    if not path.exists():
        what = "a link to nothing" if path.is_symlink() else "no such file or folder"
        raise CheckpointNotFound(f"{what}: {path}", path=str(path))
    if path.is_dir():
        return _folder(path, select)
    if select is not None:
        raise CheckpointNotFound(f"@{select} needs a run's folder, and this is a file", path=str(path))
    if not path.is_file():
        raise FormatError("neither a file nor a folder", path=str(path))
    return Place("plain", path.parent, file=path.name)


def _folder(path: Path, select: str | None) -> Place:
    with os.scandir(path) as listing:
        names = {entry.name for entry in listing}
    kind = kind_of(path.name, names)
    if kind == "run":
        return Place("run", path, select or "latest", selected=bool(select))
    if kind is not None:
        return Place(kind, path)
    held = ", ".join(sorted(names)[:5]) or "nothing"
    raise CheckpointNotFound(
        f"neither a run, a checkpoint nor a folder of safetensors files; it holds {held}", path=str(path)
    )


def kind_of(folder: str, names: Collection[str]) -> Literal["run", "step", "plain"] | None:
    """What a folder of this name, which holds these names, is; None if it is nothing of these."""
    if MANIFEST in names or Attempt.parse(folder):
        return "step"
    if RUN_FILE in names or any(Attempt.parse(name) for name in names):
        return "run"
    return "plain" if any(name.endswith(".safetensors") for name in names) else None


def step_range(select: str) -> tuple[int, int | None] | None:
    """(first, last) step of a range, both included; last is None where it is open. None if it is no range."""
    match = _RANGE.fullmatch(select)
    if match is None or not (match[1] or match[2]):
        return None
    return int(match[1] or 0), int(match[2]) if match[2] else None


def choose(found: Sequence[Checkpoint], select: str, where: str) -> Checkpoint:
    """The checkpoint of the list (by rising step) that `select` means. Raises CheckpointNotFound."""
    if not found:
        raise CheckpointNotFound("the run has no checkpoint", path=where)
    if select == "latest":
        return found[-1]
    if step_range(select) is not None:
        raise CheckpointNotFound(f"@{select} may mean several checkpoints", todo="Name one of them", path=where)
    if select.isdecimal():
        matching = [c for c in found if c.step == int(select)]
    elif select.startswith("best:"):
        mode, _, metric = select.removeprefix("best:").rpartition(":")
        if mode not in ("", "min", "max"):
            raise CheckpointNotFound(
                f"@{select} is not understood", todo="Write @best:METRIC or @best:max:METRIC", path=where
            )
        matching = best(found, metric, "max" if mode == "max" else "min")
    else:
        matching = [c for c in found if select in c.tags]
    if not matching:
        steps = ", ".join(str(c.step) for c in found[-8:])
        raise CheckpointNotFound(f"no checkpoint matches @{select}", todo=f"The newest steps are {steps}", path=where)
    return matching[-1]


def best(found: Sequence[Checkpoint], metric: str, mode: Literal["min", "max"]) -> list[Checkpoint]:
    """Those that have the metric as a number (NaN never counts), the best one last; of equals the newer."""
    usable = [c for c in found if metric in c.metrics and not math.isnan(c.metrics[metric])]
    sign = 1.0 if mode == "max" else -1.0
    return sorted(usable, key=lambda c: (sign * c.metrics[metric], c.step))
