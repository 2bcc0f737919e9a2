"""What a simulation sees of its first rank: how the work grows, which copies of it are where, what failures cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from stepwell.events import Entry
from stepwell.format.names import Attempt
from stepwell.lab.exposure import Copy, Exposure, Stretch, exposure
from stepwell.lab.outcome import FailureSeen
from stepwell.lab.process import Process
from stepwell.tiers.base import Survives

#: what a copy on a tier survives, from little to much
STRENGTHS: tuple[Survives, ...] = ("nothing", "process", "reboot", "node-loss")


class Observed:
    """Told of everything at the moment when it happens."""

    def __init__(self, strengths: Mapping[str, Survives], now: Callable[[], float]) -> None:
        """strengths: what each tier survives, by name."""
        self._strengths, self._now = strengths, now
        self.failures: list[FailureSeen] = []
        self._copies: list[Copy] = []
        self._stretches: list[Stretch] = []
        self._saved: dict[int, tuple[int, float]] = {}  # step -> its place among the saves, and the work that it holds
        self._saves = 0
        self._began: float | None = None  # of the stretch that is under way
        self._work = 0.0  # at its beginning
        self._lost: tuple[str, float, float] | None = None  # of a failure: level, moment, work that was done

    def outlives(self, tier: str, level: str) -> bool:
        """Whether a copy on the tier is still there after a failure of this level."""
        return STRENGTHS.index(self._strengths[tier]) >= [str(each) for each in STRENGTHS].index(level)

    def started(self) -> None:
        self._began = self._now()

    def saving(self, step: int) -> None:
        """`save` is called."""
        self._saved[step] = self._saves, self._done()
        self._saves += 1

    def heard(self, process: Process, entry: Entry) -> None:
        """An entry of the event log: there may be a whole checkpoint more on a tier."""
        attempt = Attempt.parse(entry.checkpoint)
        if entry.what not in ("saved", "flushed") or attempt is None or entry.step not in self._saved:
            return
        tier = next(tier for tier in process.tiers if tier.info.name == entry.tier)
        manifest = process.catalog.known_manifest(attempt, tier)
        if manifest is None or manifest.complete:
            order, work = self._saved[entry.step]
            self._copies.append(Copy(entry.tier, order, work, self._now()))

    def ended(self, process: Process) -> None:
        """The process is killed now, or closes: no work is done until the next one starts."""
        if self._began is None:
            return
        self._stretches.append(Stretch(self._began, self._now(), self._work))
        self._work, self._began = self._done(), None
        host = process.host.info.name if process.host is not None else ""
        for save in process.saves:
            seconds = save.report().tier_seconds.get(host)
            if seconds is not None and save.step in self._saved:
                order, work = self._saved[save.step]
                self._copies.append(Copy(host, order, work, save.began + seconds))

    def failed(self, level: str) -> None:
        now = self._now()
        for copy in self._copies:
            if copy.gone > now and not self.outlives(copy.tier, level):
                copy.gone = now
        self._lost = level, now, self._work

    def restored(self, step: int | None, took_s: float) -> None:
        """A restore has ended: the work goes on from what it brought."""
        _, work = self._saved.get(-1 if step is None else step, (0, 0.0))
        if self._lost is not None:
            level, at, done = self._lost
            self.failures.append(FailureSeen(level, at, max(0.0, done - work), took_s, step))
            self._lost = None
        self._began, self._work = self._now(), work

    def exposure(self, level: str) -> Exposure:
        """What one more failure of this level costs, averaged over the run."""
        tiers = {tier for tier in self._strengths if self.outlives(tier, level)}
        return exposure(self._stretches, self._copies, tiers)

    def committed(self, tier: str) -> int:
        """How many whole checkpoints have been on a tier."""
        return len({copy.order for copy in self._copies if copy.tier == tier})

    def _done(self) -> float:
        return self._work + (self._now() - self._began if self._began is not None else 0.0)
