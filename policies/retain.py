"""Which checkpoints live on in a tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from stepwell.errors import ConfigError
from stepwell.policies.base import CheckpointView, Drop, Event, View
from stepwell.policies.windows import check_seconds, check_steps, firsts, of_seconds, of_steps, spoken

__all__ = ["Best", "Retain"]


@dataclass(frozen=True, slots=True)
class Best:
    """The `count` best by a metric; of equal ones the newer is better."""

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1


@dataclass(frozen=True, slots=True)
class _Rule:
    """Picks what stays from the copies of one kind on the tier, lowest step first."""

    words: str  # what those are that stay; with "not" before it, what the others are
    wants: Callable[[Sequence[CheckpointView], View], set[str]]  # their names
    said: bool = True  # whether "not ..." tells people anything


class Retain:
    """A checkpoint stays on `tier` if any of the rules wants it; the others are dropped.

    last: the newest ones, by step. every_steps, every_s: the first of each window. best: the best by a metric; a
    checkpoint whose metric is still missing stays, it may yet be the best. newer_than_s: those made less than so
    many seconds ago. tagged: those with one of these tags; True for any tag.

    Complete and partial copies are judged apart, each against all the rules. Abandoned ones are neither counted
    nor dropped; kept ones count as any other, but are never dropped, nor is the newest copy of what it holds: the
    flush rules would send it again. This only says what may go: whether the copy may really go (another committed
    copy, flushes still promised, readers) is decided by `stepwell.promises`.
    """

    def __init__(
        self, tier: str, *, last: int | None = None, every_steps: int | None = None, every_s: float | None = None,
        best: Sequence[Best] = (), newer_than_s: float | None = None, tagged: Sequence[str] | bool = (),
    ) -> None:  # fmt: skip
        """Raises ConfigError if there is no rule, or one that makes no sense."""
        self.tier, self.rules = tier, list[_Rule]()
        if last is not None:
            _check_count("last", last, tier)
            self.rules.append(_last(last))
        if every_steps is not None:
            check_steps(every_steps, tier)
            self.rules.append(_every_steps(every_steps))
        if every_s is not None:
            check_seconds("every_s", every_s, tier)
            self.rules.append(_every_s(every_s))
        for one in best:
            _check_best(one, tier)
            self.rules += [_best(one), _missing(one.metric)]
        if newer_than_s is not None:
            check_seconds("newer_than_s", newer_than_s, tier)
            self.rules.append(_newer_than(newer_than_s))
        if isinstance(tagged, str):
            raise ConfigError(f"tagged={tagged!r} for tier {tier}", todo="Give a list of tags, or True for any tag")
        if tagged:
            self.rules.append(_tagged(tagged))
        if not self.rules:
            todo = "Say what stays (last, every_steps, every_s, best, newer_than_s, tagged), or give no retention"
            raise ConfigError(f"retention for tier {tier} has no rule, and would let everything go", todo=todo)

    def __repr__(self) -> str:
        return f"<Retain on {self.tier}: {self._words()}>"

    def _words(self) -> str:
        return ", or ".join(rule.words for rule in self.rules if rule.said)

    def decide(self, event: Event, view: View) -> Sequence[Drop]:
        """What no rule wants, complete copies first, each kind oldest first, whatever the event."""
        return [
            Drop(c.name, self.tier, self._gone_for(which), policy=f"stays on {self.tier}: {self._words()}")
            for which, found in self._copies(view).items()
            for c, wanted_by in self._judged(found, view)
            if not wanted_by and not c.kept
        ]

    def explain(self, view: View) -> dict[str, str]:
        """For each checkpoint on the tier (by name, newest last), why it stays or goes."""
        told: dict[str, str] = {}
        for which, found in self._copies(view).items():
            for c, wanted_by in self._judged(found, view):
                reasons = [rule.words for rule in wanted_by] + ["kept"] * c.kept
                told[c.name] = f"stays: {', '.join(reasons)}" if reasons else f"goes: {self._gone_for(which)}"
        for c in view.checkpoints:
            if c.abandoned and self.tier in c.complete_on | c.partial_on:
                told[c.name] = "stays: abandoned by a rewind, retention leaves it alone"
        return {c.name: told[c.name] for c in sorted(view.checkpoints, key=lambda c: c.step) if c.name in told}

    def _copies(self, view: View) -> dict[str, list[CheckpointView]]:
        """What is judged together; lowest step first."""
        return {
            "complete": view.on(self.tier),
            "partial": [c for c in view.line() if self.tier in c.partial_on - c.complete_on],
        }

    def _judged(self, found: Sequence[CheckpointView], view: View) -> Iterator[tuple[CheckpointView, list[_Rule]]]:
        """Each with the rules that want it."""
        wanted = [(rule, rule.wants(found, view)) for rule in self.rules]
        newest = _newest(self.tier)
        for c in found:
            wanted_by = [rule for rule, names in wanted if c.name in names]
            yield c, wanted_by or [newest] * bool(newest.wants([c], view))

    def _gone_for(self, which: str) -> str:
        reason = ", ".join(f"not {rule.words}" for rule in self.rules if rule.said)
        return reason if which == "complete" else f"{reason} (partial copies are counted apart)"


# -- the rules ---------------------------------------------------------------------------------------


def _last(count: int) -> _Rule:
    return _Rule(f"among the last {count}", lambda found, view: {c.name for c in found[-count:]})


def _every_steps(steps: int) -> _Rule:
    words = f"the first in its window of {steps} steps"
    return _Rule(words, lambda found, view: firsts(found, of_steps(found, steps)))


def _every_s(seconds: float) -> _Rule:
    words = f"the first in its window of {spoken(seconds)}"
    return _Rule(words, lambda found, view: firsts(found, of_seconds(view.line(), seconds)))


def _best(best: Best) -> _Rule:
    sign = 1 if best.mode == "max" else -1

    def wants(found: Sequence[CheckpointView], view: View) -> set[str]:
        known = [c for c in found if _is_known(c, best.metric)]
        rising = sorted(known, key=lambda c: sign * c.metrics[best.metric])  # stable: of equal ones the newer is last
        return {c.name for c in rising[-best.count :]}

    return _Rule(
        f"among the {best.count} best by {best.metric}" if best.count > 1 else f"the best by {best.metric}", wants
    )


def _missing(metric: str) -> _Rule:
    """Whose metric is not known yet may still be the best."""
    words = f"without {metric} so far"
    return _Rule(words, lambda found, view: {c.name for c in found if not _is_known(c, metric)}, said=False)


def _newest(tier: str) -> _Rule:
    """Of which no newer copy on the tier has all."""

    def wants(found: Sequence[CheckpointView], view: View) -> set[str]:
        newest_first = view.line()[::-1]
        return {c.name for c in found if not _is_covered(c, tier, newest_first)}

    return _Rule("the newest here", wants, said=False)


def _is_covered(checkpoint: CheckpointView, tier: str, newest_first: Sequence[CheckpointView]) -> bool:
    holds = None if tier in checkpoint.complete_on else checkpoint.parts_on.get(tier)
    newer = takewhile(lambda c: c.name != checkpoint.name, newest_first)
    return any(c.has(tier, holds) for c in newer)


def _is_known(checkpoint: CheckpointView, metric: str) -> bool:
    return math.isfinite(checkpoint.metrics.get(metric, math.nan))


def _newer_than(seconds: float) -> _Rule:
    words = f"younger than {spoken(seconds)}"
    return _Rule(words, lambda found, view: {c.name for c in found if view.wall - c.made < seconds})


def _tagged(tags: Sequence[str] | Literal[True]) -> _Rule:
    if tags is True:
        return _Rule("tagged", lambda found, view: {c.name for c in found if c.tags})
    one_of = frozenset(tags)
    words = f"tagged {' or '.join(sorted(one_of))}"
    return _Rule(words, lambda found, view: {c.name for c in found if not one_of.isdisjoint(c.tags)})


def _check_count(name: str, count: object, tier: str) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ConfigError(f"{name}={count!r} for tier {tier}", todo="Give how many checkpoints stay, at least 1")


def _check_best(best: Best, tier: str) -> None:
    _check_count("count", best.count, tier)
    if best.mode not in ("min", "max"):
        raise ConfigError(f"mode={best.mode!r} for tier {tier}", todo="Write 'min' or 'max'")
    if not isinstance(best.metric, str) or not best.metric:
        raise ConfigError(f"metric={best.metric!r} for tier {tier}", todo="Give the name of a metric of your saves")
