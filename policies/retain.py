"""Which checkpoints live on in a tier."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.errors import ConfigError
from stepwell.policies.base import CheckpointView, Drop, Event, View

__all__ = ["KeepLast"]


class KeepLast:
    """The newest `last` checkpoints of the current timeline stay on `tier`, by step.

    Partial ones are counted apart, against the same number. Abandoned ones are neither counted nor dropped;
    kept ones count as any other, but are never dropped. This only says what may go by number: whether the copy
    may really go (another committed copy, flushes still promised, readers) is decided by `stepwell.promises`.
    """

    def __init__(self, tier: str, last: int) -> None:
        """Raises ConfigError if `last` is not an integer above 0."""
        if isinstance(last, bool) or not isinstance(last, int) or last < 1:
            raise ConfigError(f"last={last!r} for tier {tier}", todo="Give how many checkpoints stay, at least 1")
        self.tier, self.last = tier, last

    def __repr__(self) -> str:
        return f"<KeepLast {self.last} on {self.tier}>"

    def decide(self, event: Event, view: View) -> Sequence[Drop]:
        """What is beyond the newest ones, oldest first, whatever the event."""
        partial = [c for c in view.checkpoints if self.tier in c.partial_on and not c.abandoned]
        return [*self._beyond(view.on(self.tier), "complete"), *self._beyond(partial, "partial")]

    def _beyond(self, found: Sequence[CheckpointView], which: str) -> list[Drop]:
        by_step = sorted(found, key=lambda c: c.step)  # stable: of equal steps the one saved later is newer
        newest = ", ".join(str(c.step) for c in by_step[-self.last :])
        reason = f"beyond the last {self.last} {which} checkpoints on {self.tier} (steps {newest})"
        return [Drop(c.name, self.tier, reason) for c in by_step[: -self.last] if not c.kept]
