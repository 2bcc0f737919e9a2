"""What every measurement is given: the device, a scratch folder, sizes, the time that is left, a place for records."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.device import Device
from benchmarks.gpu.model import Shape

GB = 1e9
MIB, GIB = 1 << 20, 1 << 30
#: a measured value; `bar` such as "<= 1.015", or None where there is none. A line of words has `note` instead
Record = dict[str, Any]
Better = Literal["<=", ">="]


@dataclass(frozen=True, slots=True)
class Scale:
    """How large everything is."""

    shape: Shape
    iteration_s: float  # an iteration that outlasts the copy of the state
    short_s: float  # one that does not
    blocks: int  # of each kind, in turns
    block: int  # iterations of one, the first WARM of which are not counted
    saves: int  # where single saves are timed
    copy_bytes: int  # of one sample of plain copies
    disk_bytes: int  # of one sample of the disk
    large: tuple[int, int]  # tensors, and bytes of each
    small: tuple[int, int, int]  # tensors, least and most bytes of one
    restored: tuple[int, int]  # tensors, and bytes of each
    resume_steps: int


FULL = Scale(
    shape=Shape(layers=24, width=2048, heads=16, vocabulary=32_000, sequence=1024),
    iteration_s=0.45, short_s=0.167, blocks=4, block=17, saves=7, copy_bytes=4 * GIB, disk_bytes=4 * GIB,
    large=(64, 128 * MIB), small=(10_000, 4096, 65536), restored=(80, 128 * MIB), resume_steps=200,
)  # fmt: skip

TINY = Scale(
    shape=Shape(layers=2, width=64, heads=4, vocabulary=256, sequence=16),
    iteration_s=0.01, short_s=0.005, blocks=2, block=5, saves=2, copy_bytes=32 * MIB, disk_bytes=16 * MIB,
    large=(4, 2 * MIB), small=(100, 4096, 65536), restored=(4, 2 * MIB), resume_steps=12,
)  # fmt: skip


@dataclass(slots=True)
class Bench:
    """One run of one measurement. Records go to `out` at once, so that a run that is cut keeps what it has."""

    measurement: str
    device: Device
    folder: Path  # on the disk that is measured; a measurement leaves nothing in it
    out: Path
    scale: Scale
    until: float  # wall clock; what is not begun by then is left out
    records: list[Record] = field(default_factory=list)

    def record(
        self, name: str, value: float, unit: str, bar: tuple[Better, float] | None = None, **details: object
    ) -> None:
        """A value that was measured, with the bar that it must meet."""
        limit = f"{bar[0]} {bar[1]:g}" if bar else None
        self._put({"name": name, "value": value, "unit": unit, "bar": limit, **details})

    def note(self, text: str) -> None:
        """What a reader of the records must know, such as what was left out and why."""
        self._put({"note": text})

    def _put(self, record: Record) -> None:
        full = {"at": round(time.time(), 3), "measurement": self.measurement, "device": self.device.name, **record}
        self.records.append(full)
        append(self.out, full)

    def has_time_for(self, seconds: float, what: str) -> bool:
        """Whether so many seconds are left; else notes that `what` was left out."""
        left = self.until - time.time()
        if left < seconds:
            self.note(f"left out: {what}; it needs about {seconds:.0f} s, and {max(left, 0):.0f} s are left")
        return left >= seconds

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A folder of its own on the disk that is measured; empty again afterwards."""
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=f"{self.measurement}-") as made:
            yield Path(made).resolve()


def append(out: Path, record: Record) -> None:
    """A line at the end of a file of records, and on the screen."""
    line = json.dumps(record)
    with out.open("a") as file:
        file.write(line + "\n")
    print(line if len(line) < 400 else line[:400] + "…", flush=True)
