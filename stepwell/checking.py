"""What is wrong in a config file beyond keys and types: contradictions, in a tier and between tiers.

Each is a ConfigError that names file, dotted key and remedy. Nothing but the schema's data is looked at.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, get_args

from stepwell.errors import ConfigError
from stepwell.schema import (
    DRIVERS,
    OTHER_DRIVER,
    BestRule,
    Eviction,
    EvictTable,
    FlushRule,
    PrefetchRule,
    RetainTable,
    TierConfig,
    is_memory,
)
from stepwell.tiers.base import Scope

#: of the entry points by which others add drivers and policies
DRIVER_GROUP = "stepwell.tiers"
POLICY_GROUP = "stepwell.policies"


@dataclass(frozen=True, slots=True)
class Mistakes:
    """Makes the errors of one file: each names file, dotted key and, inside a tier, the tier."""

    file: str
    names: list[str]  # of the tiers, in order; "" where there is none

    def error(self, key: str, what: str, todo: str) -> ConfigError:
        inside = re.match(r"tier\[(\d+)\]", key)
        tier = self.names[int(inside[1])] if inside else ""
        return ConfigError(what, todo=todo, file=self.file, key=key or None, tier=tier or None)


def nearest(name: str, known: Sequence[str], none: str = "There are none") -> str:
    """The remedy for a name that is not known."""
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}" if known else none


# -- one tier ----------------------------------------------------------------------------


def check_tier(tier: TierConfig, raw: Mapping[str, Any], key: str, mistakes: Mistakes) -> None:
    """Raises ConfigError for what cannot be right in a tier, wherever it stands. raw: as it was written."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", tier.name):
        todo = "Use letters, digits, '-' and '_'"
        raise mistakes.error(f"{key}.name", f"{tier.name!r} cannot name a tier", todo)
    if tier.capacity is not None and tier.capacity.fraction is not None and not is_memory(tier):
        todo = "Write a size such as '400GiB'"
        raise mistakes.error(f"{key}.capacity", "a percentage is of memory, so only for gpu and host tiers", todo)
    _check_driver(tier, raw, key, mistakes)
    if tier.driver == "host" and tier.path is not None and not tier.shared:
        raise mistakes.error(f"{key}.path", "private memory has no path", "Leave it out, or write shared = true")
    if isinstance(tier.evict, EvictTable) and tier.evict.policy not in get_args(Eviction):
        _check_policy(tier.evict.policy, f"{key}.evict", mistakes, get_args(Eviction))
    if isinstance(tier.prefetch, PrefetchRule):
        if tier.prefetch.policy is not None:
            _check_policy(tier.prefetch.policy, f"{key}.prefetch", mistakes)
        _check_parts(tier.prefetch.parts, f"{key}.prefetch", mistakes)
    if tier.retain is not None:
        _check_retain(tier.retain, f"{key}.retain", mistakes)
    if tier.flush == []:
        raise mistakes.error(f"{key}.flush", "flush has no rules", 'Leave it out, or write flush = "at-close"')
    rules = rules_of(tier)
    for i, rule in enumerate(rules):
        at = f"{key}.flush[{i}]" if isinstance(tier.flush, list) else f"{key}.flush"
        _check_flush(rule, at, mistakes)
        if rule in rules[:i]:
            raise mistakes.error(at, f"this rule is the same as rule {rules.index(rule)}", "Leave one of them out")


def rules_of(tier: TierConfig) -> list[FlushRule]:
    """The rules of its `flush`; none where it is a word or nothing."""
    if isinstance(tier.flush, FlushRule):
        return [tier.flush]
    return list(tier.flush) if isinstance(tier.flush, list) else []


def _check_driver(tier: TierConfig, raw: Mapping[str, Any], key: str, mistakes: Mistakes) -> None:
    others = [point.name for point in entry_points(group=DRIVER_GROUP)]
    if tier.driver not in DRIVERS and tier.driver not in others:
        what = f"there is no driver {tier.driver!r}"
        raise mistakes.error(f"{key}.driver", what, nearest(tier.driver, list(dict.fromkeys([*DRIVERS, *others]))))
    rules = DRIVERS.get(tier.driver, OTHER_DRIVER)
    for name in raw:
        if name not in rules.takes and name not in ("name", "driver"):
            who = ", ".join(other for other, theirs in DRIVERS.items() if name in theirs.takes)
            todo = f"Leave it out; drivers that take it: {who}"
            raise mistakes.error(f"{key}.{name}", f"the {tier.driver} driver has no {name!r}", todo)
    for name in sorted(rules.needs):
        if getattr(tier, name) is None:
            todo = f"Write {name} = " + ('"16GiB"' if name == "capacity" else '"/local/$USER"')
            raise mistakes.error(f"{key}.{name}", f"the {tier.driver} driver needs a {name}", todo)
    if tier.survives is not None and tier.survives not in rules.survives:
        todo = f"Leave it out; it is {min(rules.survives)!r}"
        raise mistakes.error(f"{key}.survives", f"a {tier.driver} tier does not survive {tier.survives!r}", todo)


def _check_flush(rule: FlushRule, key: str, mistakes: Mistakes) -> None:
    if rule.policy is not None:
        _check_policy(rule.policy, key, mistakes)
        return
    _check_at_least_one(rule, ("every_steps",), key, mistakes)
    if rule.every_steps is not None and rule.every is not None:
        what = "a rule has one window, of steps or of time, not both"
        raise mistakes.error(f"{key}.every", what, "Leave one out, or write two rules: flush = [{ … }, { … }]")
    _check_parts(rule.parts, key, mistakes)


def _check_parts(parts: Sequence[str] | None, key: str, mistakes: Mistakes) -> None:
    if parts is not None:
        what = "no part is named" if not parts else "a part has no name" if "" in parts else ""
        twice = [part for part in parts if parts.count(part) > 1]
        if what or twice:
            what = what or f"part {twice[0]!r} is named twice"
            raise mistakes.error(f"{key}.parts", what, 'Name each part once, as in parts = ["model"]')


def _check_retain(retain: RetainTable, key: str, mistakes: Mistakes) -> None:
    if retain.policy is not None:
        _check_policy(retain.policy, key, mistakes)
        return
    if retain == RetainTable():
        raise mistakes.error(key, "retain has no rule", "Write retain = { last = 3 }; without retain, all stay")
    _check_at_least_one(retain, ("last", "every_steps"), key, mistakes)
    best = [] if retain.best is None else [retain.best] if isinstance(retain.best, BestRule) else retain.best
    if retain.best == []:
        raise mistakes.error(f"{key}.best", "best has no rule", "Leave it out, or name a metric")
    for i, rule in enumerate(best):
        at = f"{key}.best[{i}]" if isinstance(retain.best, list) else f"{key}.best"
        if not rule.metric:
            raise mistakes.error(f"{at}.metric", "the metric has no name", 'Write it as in save(), metric = "loss"')
        _check_at_least_one(rule, ("count",), at, mistakes)
        if any((rule.metric, rule.mode) == (other.metric, other.mode) for other in best[:i]):
            what = f"there are two rules for the {rule.mode} of {rule.metric!r}"
            raise mistakes.error(at, what, "Leave out the one with the smaller count")
    if retain.tagged is False or retain.tagged == [] or isinstance(retain.tagged, list) and "" in retain.tagged:
        what = "an empty tag" if retain.tagged else "no tag is named"
        raise mistakes.error(f"{key}.tagged", what, 'Write tagged = true for any tag, or tagged = ["release"]')


def _check_at_least_one(
    table: FlushRule | RetainTable | BestRule, names: Sequence[str], key: str, mistakes: Mistakes
) -> None:
    for name in names:
        value = getattr(table, name)
        if value is not None and value < 1:
            keeps = not isinstance(table, FlushRule) and name != "every_steps"
            what = f"{name} = {value}" + (" keeps nothing" if keeps else " is no window")
            raise mistakes.error(f"{key}.{name}", what, "Write a number of at least 1, or leave the rule out")


def _check_policy(name: str, key: str, mistakes: Mistakes, built_in: Sequence[str] = ()) -> None:
    known = [*built_in, *(point.name for point in entry_points(group=POLICY_GROUP))]
    if name not in known:
        todo = nearest(name, known, "No package here brings policies: write the rule with stepwell's own keys")
        raise mistakes.error(f"{key}.policy", f"there is no policy {name!r}", todo)


# -- all tiers together ------------------------------------------------------------------


def check_chain(tiers: Sequence[TierConfig], mistakes: Mistakes) -> None:
    """Raises ConfigError for tiers that contradict each other, or stand in the wrong order."""
    for i, tier in enumerate(tiers):
        for other in tiers[:i]:
            if tier.name == other.name:
                raise mistakes.error(f"tier[{i}].name", f"two tiers are named {tier.name!r}", "Give each its own name")
            if tier.path is not None and tier.path == other.path:
                what = f"tiers {other.name!r} and {tier.name!r} are the same folder, {tier.path}"
                raise mistakes.error(f"tier[{i}].path", what, "Give each a folder of its own")
        if tier.driver == "gpu" and i:
            raise mistakes.error(f"tier[{i}]", "the gpu tier is not the nearest", "Move it up, before the others")
        if tier.driver == "host" and any(other.driver != "gpu" for other in tiers[:i]):
            what = "the host tier is not the nearest but that of a GPU"
            raise mistakes.error(f"tier[{i}]", what, "Move it up, before the others")
    storage = [i for i, tier in enumerate(tiers) if not is_memory(tier)]
    if not storage:
        todo = 'Add a [[tier]] with driver = "file" and a path'
        raise mistakes.error("tier", "there is no storage tier: nothing would outlive the process", todo)
    hosted = any(tier.driver == "host" for tier in tiers)
    _check_first(tiers[storage[0]], f"tier[{storage[0]}]", hosted, mistakes)
    scopes = [DRIVERS.get(tier.driver, OTHER_DRIVER).scope for tier in tiers]
    check_order([tier.name for tier in tiers], scopes, mistakes)


def _check_first(first: TierConfig, key: str, hosted: bool, mistakes: Mistakes) -> None:
    """Saves are written to the first storage tier. hosted: what is not wanted there can stay in host memory."""
    if first.flush not in (None, "all") and not hosted:
        what = f"{first.name!r} is the first tier: there is nothing above it where what is not sent there could stay"
        raise mistakes.error(f"{key}.flush", what, "Leave it out, add a host tier, or move the rules to a tier below")
    if first.verify_after_flush is not None:
        what = f"{first.name!r} is the first storage tier: saves are written there, and nothing is flushed to it"
        raise mistakes.error(f"{key}.verify_after_flush", what, "Leave it out, or move it to a tier below")


def check_order(names: Sequence[str], scopes: Sequence[Scope | None], mistakes: Mistakes) -> None:
    """Raises ConfigError for a node's tier below a shared one: what is flushed goes down, away from the node."""
    for i, (name, scope) in enumerate(zip(names, scopes, strict=True)):
        if scope in ("process", "node") and "shared" in scopes[:i]:
            above = names[scopes.index("shared")]
            what = f"tier {name!r} is of one node, but comes after {above!r}, which all nodes share"
            raise mistakes.error(f"tier[{i}]", what, f"Move {name!r} up, before {above!r}: nearest first")
