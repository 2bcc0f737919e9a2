"""What the retention rules of a config file would let go of a run, and why: for `stepwell rm RUN --by-policy`."""

from __future__ import annotations

from dataclasses import dataclass

from stepwell.building import build
from stepwell.catalog import Catalog
from stepwell.clock import SystemClock
from stepwell.config import Config
from stepwell.errors import ConfigError
from stepwell.format.names import Attempt
from stepwell.policies.base import Drop, Opened
from stepwell.promises import refusal
from stepwell.tiers.base import Tier
from stepwell.viewing import Views


@dataclass(frozen=True, slots=True)
class Beyond:
    """One copy that the rules let go, or would if no promise forbade it."""

    attempt: Attempt
    tier: Tier
    why: str
    why_not: str | None  # the promise; None: it may go


async def beyond_rules(catalog: Catalog, config: Config | None) -> list[Beyond]:
    """All copies that retention rules do not want any more, by step; `catalog` has been refreshed.

    The rules are the config's; every move is checked as a writer's are (`stepwell.promises`), but for flushes that a
    writer has decided and not done: nobody may write the run meanwhile. Raises ConfigError without a config, or if it
    keeps all checkpoints on every tier.
    """
    if config is None:
        raise ConfigError(
            "no config file says which checkpoints stay",
            todo="Set STEPWELL_CONFIG to it, and name the run alone: stepwell rm my-run --by-policy",
        )
    policies = build(config, run=catalog.run, storage_only=True).policies
    views = Views(catalog, catalog.tiers, SystemClock())
    await views.look()
    found: dict[tuple[Attempt, str], Beyond] = {}
    retaining = 0
    for policy in policies:
        drops = [move for move in policy.decide(Opened(), views.now()) if isinstance(move, Drop)]
        retaining += hasattr(policy, "explain")
        for drop in drops:
            attempt = Attempt.parse(drop.checkpoint)
            tier = next((tier for tier in catalog.tiers if tier.info.name == drop.tier), None)
            if attempt is None or tier is None:
                continue
            why_not = refusal(drop, views.now())
            found[attempt, drop.tier] = Beyond(attempt, tier, drop.reason, why_not)
            if why_not is None:
                views.leaving.add((drop.checkpoint, drop.tier))  # the next one must not count on it
    if not retaining:
        raise ConfigError(
            "no tier has a retain rule: every checkpoint stays", todo="Write retain = { last = 3 }", file=config.file
        )
    return [found[key] for key in sorted(found, key=lambda key: (key[0].step, key[0], key[1]))]
