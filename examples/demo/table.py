"""What moved: the tables at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from examples.demo.ceiling import ROUNDS, Ceiling
from stepwell import SaveReport

STORAGE = "nvme"  # the tier whose commit makes a save durable


@dataclass(frozen=True, slots=True)
class Saved:
    """One save; seconds count from the call."""

    run: str
    step: int
    size: int
    blocked_s: float
    tier_s: Mapping[str, float]

    @classmethod
    def of(cls, run: str, report: SaveReport) -> Saved:
        return cls(run, report.step, report.bytes, report.blocked_seconds, report.tier_seconds)

    @classmethod
    def noted(cls, run: str, record: Mapping[str, Any]) -> Saved:
        """From a training process's log."""
        return cls(run, record["step"], record["bytes"], record["blocked_seconds"], record["tier_seconds"])


@dataclass(frozen=True, slots=True)
class Read:
    """One restore or load."""

    what: str
    sources: Mapping[str, int]  # tier -> bytes from there
    seconds: float

    @property
    def size(self) -> int:
        return sum(self.sources.values())


def show(console: Console, saves: Sequence[Saved], reads: Sequence[Read], ceiling: Ceiling) -> None:
    """Prints both tables, and under them what the ceiling is."""
    view = _table("Saved", "MB", "blocked s", "host s", "nvme s", "pfs s", "GB/s to nvme", "of ceiling")
    for save in saves:
        times = [f"{save.tier_s[tier]:.3f}" if tier in save.tier_s else "-" for tier in ("host", STORAGE, "pfs")]
        seconds = save.tier_s.get(STORAGE)
        rates = ("-", "-") if seconds is None else _rates(save.size / seconds, ceiling.write)
        view.add_row(
            f"save step {save.step} ({save.run})", f"{save.size / 1e6:.1f}", f"{save.blocked_s:.3f}", *times, *rates
        )
    console.print(view)
    view = _table("Read", "MB", "seconds", "from", "GB/s", "of ceiling")
    for read in reads:
        rates = _rates(read.size / read.seconds, ceiling.read)
        if not _from_disk_only(read):
            rates = (rates[0], "-")
        origin = ", ".join(f"{tier} {size / 1e6:.1f}" for tier, size in read.sources.items())
        view.add_row(read.what, f"{read.size / 1e6:.1f}", f"{read.seconds:.3f}", origin, *rates)
    console.print(view)
    how = "direct I/O" if ceiling.direct else "buffered I/O, because the disk takes no direct I/O"
    console.print(
        f"The ceiling is the best of {ROUNDS} plain writes (fdatasync included) and reads of one file of that size on\n"
        f"the same disk, {how}, by stepwell's own native engine in this process:\n"
        f"{ceiling.write / 1e9:.2f} GB/s written, {ceiling.read / 1e9:.2f} GB/s read. While a training runs, its "
        "processor time and the flushes\nto the pfs, a folder on the same disk, take their share of both."
    )


def _table(title: str, *columns: str) -> Table:
    view = Table(title=title, title_justify="left")
    view.add_column("")
    for column in columns:
        view.add_column(column, justify="right")
    return view


def _rates(rate: float, ceiling: float) -> tuple[str, str]:
    return f"{rate / 1e9:.2f}", f"{rate / ceiling:.0%}"


def _from_disk_only(read: Read) -> bool:
    return not {"host", "page cache"} & read.sources.keys()
