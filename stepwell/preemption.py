"""Preemption: a signal says that this process will be killed soon. It is noted, and the training loop asks.

A handler that saves would run between any two lines of the loop, in the middle of a collective, and not on all ranks.
So the handler only notes the time, and `preempted(step)` gives all ranks the same answer, where the loop can stop.
Launchers often send a signal twice, to the group and to each child: what comes within ECHO_S is the same notice.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from stepwell.clock import Clock
from stepwell.errors import ConfigError, StepwellError
from stepwell.jobs import Job
from stepwell.units import format_duration, parse_duration

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

log = logging.getLogger("stepwell")

#: a signal that comes again so soon is the launcher's, not that of an operator who has lost patience
ECHO_S = 1.0
#: of the grace, what is kept for the end of the process itself; at most
MARGIN_SHARE, MARGIN_S = 0.1, 2.0
#: between two looks whether the other ranks have answered; Ctrl-C is heard in between
_LOOK_S = 0.001


class Preemption:
    """What one store knows of the end of its process, from `CheckpointStore.handle_preemption`."""

    def __init__(self, run: str, clock: Clock) -> None:
        self.run = run
        self._clock = clock
        self._signals: tuple[int, ...] = ()  # that it listens to
        self._grace_s: float | None = None
        self._came: dict[int, float] = {}  # signal -> when it came first
        self._since: float | None = None  # when the grace began, on whichever rank heard first
        self._votes: _Votes | None = None
        self._told = self._warned = False

    def __repr__(self) -> str:
        names = ", ".join(signal.Signals(number).name for number in self._signals) or "no signal"
        grace = "" if self._grace_s is None else f", grace {format_duration(self._grace_s)}"
        return f"<Preemption of run {self.run!r} by {names}{grace}>"

    # -- the signal ----------------------------------------------------------------------

    def handle(self, signals: int | Sequence[int], grace: str | float) -> None:
        """Listens from now on. The same call again changes nothing; another one raises ConfigError, as does one
        outside of the main thread or for a signal that cannot be handled."""
        grace_s = parse_duration(grace)
        numbers = tuple(_number(each) for each in ([signals] if isinstance(signals, int) else signals))
        if not numbers:
            raise ConfigError("there is no signal to listen to", todo="Give signals=(signal.SIGTERM,), say")
        if self._signals:
            if (numbers, grace_s) != (self._signals, self._grace_s):
                raise ConfigError(f"preemption is handled already: {self!r}", todo=".remove() that first", run=self.run)
            return
        if threading.current_thread() is not threading.main_thread():
            todo = "Call handle_preemption() in the thread that the script began with, where the store is opened"
            raise ConfigError("signals can be handled in the main thread only", todo=todo, run=self.run)
        for number in numbers:
            if not isinstance(signal.getsignal(number), _Handler):
                signal.signal(number, _Handler(signal.getsignal(number)))
        self._signals, self._grace_s = numbers, grace_s
        _listening.append(self)

    def note(self, number: int) -> bool:
        """A signal has come. Whether it had come before, so long ago that somebody has lost patience.

        Nothing is logged here: the handler may have interrupted whoever holds the log's lock."""
        now = self._clock.monotonic()
        if self._since is None:
            self._since = now
        return now - self._came.setdefault(number, now) > ECHO_S

    def remove(self) -> None:
        """Listens no more; the handlers from before are put back. What was heard stays known. Idempotent."""
        numbers, self._signals = self._signals, ()
        if self in _listening:
            _listening.remove(self)
        if threading.current_thread() is not threading.main_thread():
            return  # the handlers stay, and do what those from before would do
        for number in numbers:
            handler = signal.getsignal(number)
            if isinstance(handler, _Handler) and not any(number in other._signals for other in _listening):
                signal.signal(number, handler.before)

    # -- the answer ----------------------------------------------------------------------

    @property
    def listening(self) -> bool:
        return bool(self._signals)

    @property
    def left_s(self) -> float | None:
        """Seconds until all should be done, below 0 if that is past; None: nobody has to end."""
        if self._since is None or self._grace_s is None:
            return None
        margin_s = min(MARGIN_S, MARGIN_SHARE * self._grace_s)
        return self._since + self._grace_s - margin_s - self._clock.monotonic()

    def preempted(self, step: int, job: Job) -> bool:
        """Whether to save and stop. The first call that says so logs it, with the time that is left."""
        if self._told:
            return True
        if self._grace_s is None and not self._warned:
            self._warned = True
            log.warning("preempted() without handle_preemption(): no signal will be heard by this process")
        self._told = self._since is not None if job.world == 1 else self._ask()
        if self._told:
            left = "" if self.left_s is None else f", {format_duration(max(0.0, self.left_s))} are left"
            log.warning("run %s is preempted at step %d%s", self.run, step, left)
        return self._told

    def _ask(self) -> bool:
        """As all ranks heard until the call before. Clocks are not compared: ranks tell how long ago it was."""
        self._votes = self._votes or _Votes()
        now = self._clock.monotonic()
        ago_s = None if self._since is None else now - self._since
        heard = self._votes.ask(0 if ago_s is None else 1 + int(1000 * ago_s), now)
        if heard is None:
            return False
        ago_ms, at = heard
        since = at - (ago_ms - 1) / 1000
        self._since = since if self._since is None else min(self._since, since)
        return True


def _number(value: int) -> int:
    try:
        number = signal.Signals(value)
    except ValueError:
        raise ConfigError(f"{value!r} is not a signal", todo="Give signals=(signal.SIGTERM,), say") from None
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise ConfigError(f"{number.name} cannot be handled", todo="Give signals=(signal.SIGTERM,), say")
    if signal.getsignal(number) is None:
        raise ConfigError(f"{number.name} has a handler that Python does not know of", todo="Give another signal")
    return int(number)


_listening: list[Preemption] = []
os.register_at_fork(after_in_child=_listening.clear)  # what a data loader's worker hears is none of our business


class _Handler:
    """Stands in the place of a signal's handler, for all stores that listen to it."""

    def __init__(self, before: Any) -> None:
        self.before = before

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """A handler from before is called each time. The default action, which ends the process, is left to a signal
        for which everybody has lost patience, or to which nobody listens any more."""
        again = [each.note(number) for each in _listening if number in each._signals]
        if callable(self.before):
            self.before(number, frame)
        elif self.before == signal.SIG_DFL and all(again):
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)


class _Votes:
    """One number of each rank, of which all get the highest: given in one call, answered in the next."""

    def __init__(self) -> None:
        import torch.distributed as dist

        if not dist.is_gloo_available():
            raise ConfigError("this torch has no gloo, which ranks agree by", todo="Install a torch with gloo")
        self._group = dist.new_group(backend="gloo")
        self._open: tuple[dist.Work, torch.Tensor, float] | None = None

    def ask(self, mine: int, now: float) -> tuple[int, float] | None:
        """(the highest, when this rank gave its own) of the call before, if anybody gave more than 0; nothing more is
        asked then. Raises StepwellError if a rank is gone."""
        import torch
        import torch.distributed as dist

        before = self._answer()
        if before is not None and before[0] > 0:
            return before
        number = torch.tensor([mine], dtype=torch.int64, device="cpu")
        work = dist.all_reduce(number, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        self._open = (work, number, now)
        return None

    def _answer(self) -> tuple[int, float] | None:
        if self._open is None:
            return None
        work, number, at = self._open
        try:
            while not work.is_completed():
                time.sleep(_LOOK_S)
            work.wait()
        except RuntimeError as error:
            raise StepwellError(
                f"the ranks cannot agree whether to stop: {error}",
                todo="See whether all of them are alive, and call preempted() equally often",
            ) from error
        return int(number.item()), at
