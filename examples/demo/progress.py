"""Shows how far a training process is, tier by tier: live on a terminal, else a line for each change."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

PAUSE_S = 1.0  # a tier to which nothing has moved for so long has come to rest; its next rate begins anew


@dataclass(slots=True)
class TierView:
    """One tier as far as the log tells."""

    step: int | None = None  # newest checkpoint there
    to_go: int = 0  # bytes of checkpoints that must still get there
    rate: float | None = None  # bytes a second, while something was moving
    _began: tuple[float, int] = (0.0, 0)  # when the movement under way began, and the bytes until then
    _looked: tuple[float, int] = (0.0, 0)  # the same at the last look
    _grew_at: float | None = None

    def moved(self, at: float, total_bytes: int) -> None:
        """Tells that `total_bytes` have moved here in all until the time `at`."""
        looked_at, moved = self._looked
        if total_bytes > moved and looked_at:
            if self._grew_at is None or at - self._grew_at > PAUSE_S:
                self._began = self._looked
            began, before = self._began
            self.rate = (total_bytes - before) / (at - began)
            self._grew_at = at
        self._looked = (at, total_bytes)


class Watch:
    """Follows one training process by its log. A context manager: the display ends with it."""

    def __init__(self, log: Path, name: str, steps: int, console: Console) -> None:
        self.name, self.steps = name, steps
        self.step, self.loss = 0, 0.0
        self.tiers: dict[str, TierView] = {}
        self._log, self._console = log, console
        self._read_bytes = 0
        self._saves: dict[int, dict[str, Any]] = {}
        self._shown = ""
        self._live = Live(console=console, transient=True, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> Watch:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.look()
        if self._live:
            self._live.stop()

    def look(self) -> None:
        """Reads what is new in the log, and shows it."""
        if not self._log.exists():
            return
        with self._log.open("rb") as file:
            file.seek(self._read_bytes)
            lines = file.read().rpartition(b"\n")[0]
        if not lines:
            return
        self._read_bytes += len(lines) + 1
        for line in lines.splitlines():
            record = json.loads(line)
            take: Callable[[dict[str, Any]], None] | None = getattr(self, f"_take_{record['kind']}", None)
            if take is not None:
                take(record)
        if self._live:
            self._live.update(self.table(), refresh=True)
        elif (words := self.words()) != self._shown:
            self._shown = words
            self._console.print(f"[{self.name}] step {self.step:3d}  loss {self.loss:.3f}  {words}")

    # -- records of the log --------------------------------------------------------------

    def _take_loss(self, record: dict[str, Any]) -> None:
        self.step, self.loss = record["step"], float.fromhex(record["loss"])

    def _take_save(self, record: dict[str, Any]) -> None:
        self._saves[record["step"]] = record
        first = next(iter(self.tiers.values()), None)
        for seconds in list(record["tier_seconds"].values())[:1]:
            if first is not None:  # nothing but saves goes to the first tier
                first.rate = record["bytes"] / seconds

    def _take_status(self, record: dict[str, Any]) -> None:
        for name, tier in record["tiers"].items():
            view = self.tiers.setdefault(name, TierView())
            newer = [save for step, save in self._saves.items() if step > (tier["step"] or 0)]
            coming = sum(save["bytes"] for save in newer if name not in save["tier_seconds"])
            view.step, view.to_go = tier["step"], max(tier["to_go"], coming)
            view.moved(record["at"], sum(moved for _, target, moved in record["edges"] if target == name))

    # -- what is seen --------------------------------------------------------------------

    def words(self) -> str:
        """The newest step of each tier, and what must still get there."""
        parts = []
        for name, view in self.tiers.items():
            behind = f", {view.to_go / 1e6:.0f} MB to go" if view.to_go else ""
            parts.append(f"{name}: {'none' if view.step is None else f'step {view.step}'}{behind}")
        return "; ".join(parts)

    def table(self) -> Table:
        """The same for a terminal, with rates."""
        table = Table(
            title=f"{self.name}: step {self.step} of {self.steps}, loss {self.loss:.3f}", title_justify="left"
        )
        for title in ("tier", "newest step", "MB to go", "GB/s"):
            table.add_column(title, justify="left" if title == "tier" else "right", min_width=10)
        for name, view in self.tiers.items():
            rate = "" if view.rate is None else f"{view.rate / 1e9:.2f}"
            table.add_row(name, str(view.step or ""), f"{view.to_go / 1e6:.0f}" if view.to_go else "", rate)
        return table
