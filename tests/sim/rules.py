"""The rules of a world's tiers: drawn from its seed, as plain facts, for the policies and for the model beside them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from stepwell.policies.base import Policy
from stepwell.policies.flush import FlushNewest, FlushRule, side_by_side
from stepwell.policies.retain import Best, Retain
from stepwell.settings import TierOptions

#: what saves and evaluations measure
METRICS = ("loss", "eval")
TAGS = ("release", "odd")


@dataclass(frozen=True, slots=True)
class Flushing:
    """One rule of what goes down to a tier."""

    every_steps: int | None = None
    every_s: float | None = None
    parts: tuple[str, ...] | None = None
    idle: bool = False
    newest_wins: bool = False

    def policy(self, tier: str) -> Policy:
        return FlushRule(
            tier, every_steps=self.every_steps, every_s=self.every_s, parts=self.parts, idle=self.idle,
            newest_wins=self.newest_wins,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Retaining:
    """What stays on a tier: a union."""

    last: int | None = None
    every_steps: int | None = None
    every_s: float | None = None
    best: tuple[tuple[str, Literal["min", "max"], int], ...] = ()
    newer_than_s: float | None = None
    tagged: tuple[str, ...] | Literal[True] = ()

    def policy(self, tier: str) -> Policy:
        return Retain(
            tier, last=self.last, every_steps=self.every_steps, every_s=self.every_s,
            best=[Best(*each) for each in self.best], newer_than_s=self.newer_than_s, tagged=self.tagged,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TierRules:
    """All that is set for one tier."""

    flush: tuple[Flushing, ...] = ()
    at_close: bool = True  # the newest gets there at closing
    retain: Retaining | None = None
    grace_s: float | None = None
    verify: Literal["size", "digest"] | None = None
    by_rules: bool = False  # also of the first tier: else it gets every save

    @property
    def options(self) -> TierOptions:
        return TierOptions(delete_grace_s=self.grace_s, verify_after_flush=self.verify, by_rules=self.by_rules)


Rules = dict[str, TierRules]


def policies_of(rules: Rules, storage: Sequence[str]) -> list[Policy]:
    """As a config file's are made: all that flush before all that retain, whole checkpoints before parts."""
    flushes: list[Policy] = []
    for tier in storage[0 if rules[storage[0]].by_rules else 1 :]:
        mine = rules[tier]
        flushes += [FlushNewest(tier)] * mine.at_close
        made = [rule.policy(tier) for rule in sorted(mine.flush, key=lambda rule: rule.parts is not None)]
        side_by_side(made)
        flushes += made
    return flushes + [retain.policy(tier) for tier in storage if (retain := rules[tier].retain) is not None]


def draw_rules(rng: random.Random, storage: Sequence[str], small: bool, alone: bool = False) -> Rules:
    """small: there is so little room that retention has to make some. alone: the first tier gets what its rules name,
    and the rest stays in memory."""
    found: Rules = {}
    for tier in storage:
        first, last = tier == storage[0], tier == storage[-1]
        everything = rng.random() < 0.4 and not (first and alone)
        flush = () if first and not alone else (Flushing(),) if everything else _draw_flushes(rng)
        found[tier] = TierRules(
            flush=flush,
            at_close=last or everything,
            retain=_draw_retaining(rng, small) if rng.random() < (0.9 if small else 0.6) else None,
            grace_s=rng.choice((None, None, 0.0, 5.0, 90.0, 600.0)),
            verify=None if first else rng.choice((None, "size", "digest", "digest")),
            by_rules=first and alone,
        )
    return found


def _draw_flushes(rng: random.Random) -> tuple[Flushing, ...]:
    return tuple(_draw_flushing(rng) for _ in range(rng.choice((0, 1, 1, 1, 2, 2, 3))))


def _draw_flushing(rng: random.Random) -> Flushing:
    kind = rng.random()
    return Flushing(
        every_steps=rng.choice((2, 3, 5, 10)) if kind < 0.4 else None,
        every_s=rng.choice((0.05, 1.0, 30.0)) if kind > 0.75 else None,
        parts=rng.choice((None, None, ("model",), ("extra", "model"))),
        idle=rng.random() < 0.2,
        newest_wins=rng.random() < 0.4,
    )


def _draw_retaining(rng: random.Random, small: bool) -> Retaining:
    while True:
        best = rng.random() < 0.3
        drawn = Retaining(
            last=rng.randint(1, 3) if small or rng.random() < 0.6 else None,
            every_steps=rng.choice((4, 10, 30)) if rng.random() < (0.1 if small else 0.3) else None,
            every_s=rng.choice((1.0, 60.0)) if rng.random() < (0.0 if small else 0.15) else None,
            best=((rng.choice(METRICS), rng.choice(("min", "max")), rng.randint(1, 2)),) if best else (),
            newer_than_s=rng.choice((1.0, 40.0, 400.0)) if rng.random() < (0.0 if small else 0.2) else None,
            tagged=rng.choice((True, TAGS[:1])) if rng.random() < 0.2 else (),
        )
        if drawn != Retaining():
            return drawn
