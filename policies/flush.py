"""Which checkpoints go down to a tier, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from stepwell.errors import ConfigError
from stepwell.policies.base import CheckpointView, Closing, Committed, Event, Flush, View

__all__ = ["FlushAll"]


class FlushAll:
    """Every checkpoint goes down to `tier`, newest first.

    What is newer than the newest complete checkpoint there is asked for again at each event, so that neither a
    failed flush nor the end of a process leaves it behind. Older ones are not: they were there and retention
    deleted them, or a later process passed them over. At closing only the newest must still get down.
    """

    def __init__(self, tier: str) -> None:
        self.tier = tier

    def __repr__(self) -> str:
        return f"<FlushAll to {self.tier}>"

    def decide(self, event: Event, view: View) -> Sequence[Flush]:
        """The flushes that are due and not promised yet. Raises ConfigError if the view has no such tier."""
        nearer = self._nearer(view)
        order = {c.name: (c.step, i) for i, c in enumerate(view.checkpoints)}
        there = max((order[c.name] for c in view.on(self.tier)), default=(-1, -1))
        newest_first = sorted(view.checkpoints, key=lambda c: order[c.name], reverse=True)
        above = [c for c in newest_first if not c.abandoned and c.complete_on & nearer]
        if isinstance(event, Closing):
            due = [c for c in above[:1] if order[c.name] > there]
            reason = f"the newest checkpoint must be on {self.tier} at closing"
        else:
            due = [c for c in above if order[c.name] > there or _just_came_down(c, event, view)]
            reason = f"every checkpoint goes to {self.tier}"
        return [
            Flush(c.name, self.tier, reason)
            for c in due
            if self.tier not in c.complete_on and (c.name, self.tier) not in view.promised
        ]

    def _nearer(self, view: View) -> frozenset[str]:
        names = [tier.name for tier in view.tiers]
        if self.tier not in names:
            raise ConfigError(f"there is no tier {self.tier!r} to flush to", todo=f"The tiers are {', '.join(names)}")
        return frozenset(takewhile(lambda name: name != self.tier, names))


def _just_came_down(checkpoint: CheckpointView, event: Event, view: View) -> bool:
    """Whether the event is the checkpoint's commit on the lowest tier that has it.

    Commits may overtake each other, so a new checkpoint can be older than what is there. One that was
    prefetched to the event's tier is on a lower one, too; it has had its flush.
    """
    if not isinstance(event, Committed) or event.checkpoint != checkpoint.name:
        return False
    holders = [tier.name for tier in view.tiers if tier.name in checkpoint.complete_on]
    return holders[-1:] == [event.tier]
