"""Which checkpoints go down to a tier, in which order, and which of them are given up for newer ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from stepwell.errors import ConfigError
from stepwell.policies.base import (
    Cancel,
    CheckpointView,
    Closing,
    Committed,
    Event,
    Flush,
    Idle,
    Pressure,
    View,
)
from stepwell.policies.windows import check_seconds, check_steps, firsts, of_seconds, of_steps, spoken

__all__ = ["DropBacklog", "FlushNewest", "FlushRule", "side_by_side"]


class FlushRule:
    """Checkpoints go down to `tier`, newest first: each, or the first of each window of steps or seconds.

    What is newer than all that is there is asked for again at each event, so that neither a failed flush nor the
    end of a process leaves it behind. Older ones are not: they were there and retention deleted them, or a later
    process passed them over.

    parts: only these go, as far as a checkpoint has them; one that is there with all of them counts, whoever sent
    it. idle: asks only while nothing else is on its way to the tier and no save is under way. newest_wins: only
    the newest that is due is asked for, and older flushes of this rule that have not begun are taken back, but for
    those that a rule of `beside` would ask for again.
    """

    def __init__(
        self, tier: str, *, every_steps: int | None = None, every_s: float | None = None,
        parts: Sequence[str] | None = None, idle: bool = False, newest_wins: bool = False,
    ) -> None:  # fmt: skip
        """Raises ConfigError for a window that is not above 0, for two kinds of windows, and for no parts."""
        if every_steps is not None and every_s is not None:
            raise ConfigError(
                f"a flush rule for tier {tier} has windows of steps and of seconds",
                todo="Write two rules, one for each",
            )
        if every_steps is not None:
            check_steps(every_steps, tier)
        if every_s is not None:
            check_seconds("every_s", every_s, tier)
        if parts is not None and (isinstance(parts, str) or not parts):
            raise ConfigError(
                f"parts={parts!r} for tier {tier}", todo="Give a list of top-level keys of the state, or leave it out"
            )
        self.tier, self.every_steps, self.every_s = tier, every_steps, every_s
        self.parts = None if parts is None else frozenset(parts)
        self.idle, self.newest_wins = idle, newest_wins
        self.beside: Sequence[FlushRule] = ()  # the other rules of the tier: see `side_by_side`

    def __repr__(self) -> str:
        return f"<FlushRule to {self.tier}: {self._words()}>"

    def _words(self) -> str:
        words = [f"every {self._window()}" if self._window() else "every checkpoint"]
        if self.parts is not None:
            words.append(f"only {', '.join(sorted(self.parts))}")
        words += ["when idle"] * self.idle + ["newest wins"] * self.newest_wins
        return ", ".join(words)

    def _window(self) -> str:
        if self.every_steps is not None:
            return f"{self.every_steps} steps"
        return spoken(self.every_s) if self.every_s is not None else ""

    def decide(self, event: Event, view: View) -> Sequence[Flush | Cancel]:
        """What is due and not promised yet; nothing at closing, nor when there is no room: then the backlog shrinks.
        Raises ConfigError if the view has no such tier."""
        nearer = _nearer(self.tier, view)
        if isinstance(event, Closing | Pressure) or (self.idle and not self._is_idle(event, view)):
            return []
        due = self._due(event, view, nearer)
        if self.newest_wins:
            due = due[:1]
        moves: list[Flush | Cancel] = [self._flush(c) for c in due]
        return moves + self._given_up(due[0], view) if due and self.newest_wins else moves

    def _is_idle(self, event: Event, view: View) -> bool:
        now = any(tier.idle for tier in view.tiers if tier.name == self.tier)
        return now or (isinstance(event, Idle) and event.tier == self.tier)

    def _due(self, event: Event, view: View, nearer: frozenset[str]) -> list[CheckpointView]:
        """Newest first."""
        line = [c for c in view.line() if self._applies(c)]
        windows = self._windows(view.line())
        there = [c for c in line if c.has(self.tier, self._wanted(c))]
        coming = [c for c in line if view.coming(c, self.tier, self._wanted(c))]
        taken = {windows[c.name] for c in coming}
        reached = max((windows[c.name] for c in (coming if self.newest_wins else there)), default=-1)
        above = [c for c in line if any(c.has(tier, self._wanted(c)) for tier in nearer)]
        first = firsts([c for c in above if windows[c.name] not in taken], windows)
        return [
            c
            for c in reversed(above)
            if c.name in first and (windows[c.name] > reached or self._just_came_down(c, event, view))
        ]

    def _windows(self, line: Sequence[CheckpointView]) -> dict[str, int]:
        """Without a cadence each checkpoint is a window of its own."""
        if self.every_steps is not None:
            return of_steps(line, self.every_steps)
        if self.every_s is not None:
            return of_seconds(line, self.every_s)
        return {c.name: i for i, c in enumerate(line)}

    def _applies(self, checkpoint: CheckpointView) -> bool:
        """A checkpoint without any of the parts is none of this rule's business."""
        return self.parts is None or not self.parts.isdisjoint(checkpoint.parts)

    def _wanted(self, checkpoint: CheckpointView) -> frozenset[str] | None:
        if self.parts is None or self.parts >= checkpoint.parts:
            return None
        return self.parts & checkpoint.parts

    def _just_came_down(self, checkpoint: CheckpointView, event: Event, view: View) -> bool:
        """Whether the event is the checkpoint's commit on the lowest tier that has it.

        Commits may overtake each other, so a new checkpoint can be older than what is there. One that was
        prefetched to the event's tier is on a lower one, too; it has had its flush.
        """
        if self.newest_wins or not isinstance(event, Committed) or event.checkpoint != checkpoint.name:
            return False
        holders = [tier.name for tier in view.tiers if checkpoint.has(tier.name, self._wanted(checkpoint))]
        return holders[-1:] == [event.tier]

    def _flush(self, checkpoint: CheckpointView) -> Flush:
        wanted = self._wanted(checkpoint)
        reason = f"the first in its window of {self._window()}" if self._window() else "every checkpoint goes there"
        return Flush(
            checkpoint.name, self.tier, reason, parts=None if wanted is None else tuple(sorted(wanted)),
            policy=f"flush to {self.tier}: {self._words()}",
        )  # fmt: skip

    def _given_up(self, newest: CheckpointView, view: View) -> list[Flush | Cancel]:
        order = view.order()
        needed = {name for rule in self.beside for name in rule._counts_on(view)}
        return [
            Cancel(
                c.name, self.tier, f"step {newest.step} is newer, and the newest wins",
                policy=f"flush to {self.tier}: {self._words()}",
            )
            for c in view.line()
            if order[c.name] < order[newest.name]
            and c.name not in needed
            and (c.name, self.tier) in view.promised.keys() - view.running
            and view.promised[c.name, self.tier] == self._wanted(c)
        ]  # fmt: skip

    def _counts_on(self, view: View) -> list[str]:
        """Checkpoints that are on their way and that it would ask for if they were not. Whose flush it is, nobody says:
        what one rule has asked for, the others do not ask for again."""
        line = view.line()
        coming = [c for c in line if self._applies(c) and view.coming(c, self.tier, self._wanted(c))]
        first = firsts(coming, self._windows(line))
        names = [c.name for c in coming if c.name in first]
        return names[-1:] if self.newest_wins else names


def side_by_side(policies: Sequence[object]) -> None:
    """Lets the rules of one tier know each other."""
    rules = [policy for policy in policies if isinstance(policy, FlushRule)]
    for rule in rules:
        rule.beside = [other for other in rules if other is not rule]


class FlushNewest:
    """At closing the newest checkpoint gets down to `tier`, complete, whatever the cadence of other rules."""

    def __init__(self, tier: str) -> None:
        self.tier = tier

    def __repr__(self) -> str:
        return f"<FlushNewest to {self.tier}: at closing>"

    def decide(self, event: Event, view: View) -> Sequence[Flush]:
        """At most one flush. Raises ConfigError if the view has no such tier."""
        nearer = _nearer(self.tier, view)
        above = [c for c in view.line() if c.complete_on & nearer]
        if not isinstance(event, Closing) or not above:
            return []
        newest, order = above[-1], view.order()
        if view.coming(newest, self.tier) or any(order[c.name] > order[newest.name] for c in view.on(self.tier)):
            return []
        reason = f"the newest checkpoint must be on {self.tier} at closing"
        return [Flush(newest.name, self.tier, reason, policy=f"flush to {self.tier}: the newest, at closing")]


class DropBacklog:
    """When a save gets no room on a tier, flushes from there that newer ones have overtaken are taken back, so
    that retention can let those checkpoints go. What is being copied goes on."""

    def __repr__(self) -> str:
        return "<DropBacklog: the newest wins when there is no room>"

    def decide(self, event: Event, view: View) -> Sequence[Cancel]:
        """Oldest first."""
        if not isinstance(event, Pressure):
            return []
        here = [c for c in view.checkpoints if event.tier in c.complete_on | c.partial_on]
        reason = f"a save needs room on {event.tier}, and a newer checkpoint is on its way or there"
        return [
            Cancel(c.name, tier.name, reason, policy="on pressure the newest wins")
            for c in sorted(here, key=lambda c: c.step)
            for tier in view.tiers
            if tier.name != event.tier
            and (c.name, tier.name) in view.promised.keys() - view.running
            and view.overtaken(c, tier.name)
        ]


def _nearer(tier: str, view: View) -> frozenset[str]:
    names = [each.name for each in view.tiers]
    if tier not in names:
        raise ConfigError(f"there is no tier {tier!r} to flush to", todo=f"The tiers are {', '.join(names)}")
    return frozenset(takewhile(lambda name: name != tier, names))
