"""Which checkpoint is brought up to host memory before anybody asks for it."""

from __future__ import annotations

from collections.abc import Sequence

from stepwell.errors import ConfigError
from stepwell.policies.base import Closing, Event, Prefetch, Pressure, View

__all__ = ["PrefetchNewest"]


class PrefetchNewest:
    """The newest complete checkpoint of the current timeline, the likely next restore, is brought to the host tier:
    when a store is opened, when a newer one is there, and when a part of it had to give way; never during a save.

    parts: only these, as far as the checkpoint has them.
    """

    looks_ahead = True

    def __init__(self, tier: str = "host", *, parts: Sequence[str] | None = None) -> None:
        """Raises ConfigError for no parts."""
        if parts is not None and (isinstance(parts, str) or not parts):
            raise ConfigError(
                f"parts={parts!r} for tier {tier}", todo="Give a list of top-level keys of the state, or leave it out"
            )
        self.tier = tier
        self.parts = None if parts is None else frozenset(parts)

    def __repr__(self) -> str:
        only = "" if self.parts is None else f", only {', '.join(sorted(self.parts))}"
        return f"<PrefetchNewest to {self.tier}{only}>"

    def decide(self, event: Event, view: View) -> Sequence[Prefetch]:
        """At most one prefetch: of what is not there and not on its way."""
        idle = any(tier.idle for tier in view.tiers if tier.name == self.tier)
        whole = [c for c in view.line() if c.complete_on]
        if isinstance(event, Closing | Pressure) or not idle or not whole:
            return []
        newest = whole[-1]
        parts = None if self.parts is None or self.parts >= newest.parts else self.parts & newest.parts
        if newest.has(self.tier, parts) or (newest.name, self.tier) in view.brought or parts == frozenset():
            return []
        return [
            Prefetch(
                newest.name, self.tier, "the newest complete checkpoint is the likely next restore",
                parts=None if parts is None else tuple(sorted(parts)), policy=f"prefetch to {self.tier}: newest",
            )
        ]  # fmt: skip

    def explain(self, view: View) -> dict[str, str]:
        """Name of a checkpoint -> what will happen with its copy."""
        return {name: "stays in memory until room is needed" for name, tier in view.brought if tier == self.tier}
