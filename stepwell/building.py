"""From a config to the objects of a store: drivers, not started yet, and policies."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import entry_points
from typing import Any, Literal

import msgspec

from stepwell.checking import DRIVER_GROUP, POLICY_GROUP, Mistakes, check_order, rules_of
from stepwell.config import Config
from stepwell.errors import ConfigError
from stepwell.format.names import check_run_name
from stepwell.hostmem import LIMIT_SHARE, cgroup_limit_bytes, free_memory_bytes, local_rank, local_ranks, world_ranks
from stepwell.policies.announced import Announced
from stepwell.policies.base import Policy
from stepwell.policies.evict import EVICTION
from stepwell.policies.flush import FlushNewest, FlushRule, side_by_side
from stepwell.policies.prefetch import PrefetchNewest
from stepwell.policies.retain import Best, Retain
from stepwell.schema import BestRule, Capacity, EvictTable, PrefetchRule, TierConfig, is_memory
from stepwell.settings import TierOptions
from stepwell.tiers.base import EvictionPolicy, Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.gpu import GpuTier
from stepwell.tiers.host import HostTier, chunk_bytes_for
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.pfs import PfsTier
from stepwell.tiers.shared import SHARED_ROOT, SharedHostTier, arena_name
from stepwell.units import format_bytes

Mode = Literal["w", "r"]

#: of shared memory, where the file says nothing: it outlives the process, so it has a size from the start
SHARED_CAPACITY = Capacity(fraction=LIMIT_SHARE)

log = logging.getLogger("stepwell")

_EVICTION_METHODS = ("entered", "used", "left", "victims", "state", "resume")


@dataclass(frozen=True, slots=True)
class Built:
    """What a store is made of."""

    run: str
    tiers: list[Tier]  # nearest first, not started
    policies: list[Policy]  # all that flush before all that retain, and those before all that prefetch
    settings: dict[str, float | str]  # by the names of `stepwell.settings.Settings`
    options: dict[str, TierOptions]  # by the names of the tiers


@dataclass(frozen=True, slots=True)
class Node:
    """What the machine gives to this process."""

    local_ranks: int
    limit_bytes: int  # of memory, of all local ranks together
    free_bytes: int | None = None  # of it; None: nobody has looked
    world: int | None = None  # the ranks of the whole job; None: those of this node are all
    local_rank: int = 0  # which of the local ranks this process is

    @classmethod
    def here(cls) -> Node:
        return cls(local_ranks(), cgroup_limit_bytes(), free_memory_bytes(), world_ranks(), local_rank())


def build(
    config: Config, *, run: str | None = None, mode: Mode = "w", node: Node | None = None,
    environ: Mapping[str, str] | None = None, storage_only: bool = False,
) -> Built:  # fmt: skip
    """Makes the drivers and policies that a config asks for.

    run: else `STEPWELL_RUN`, else the file's. mode: "r" makes tiers that write nothing, and of policies those that
    prefetch.
    node: None looks at the machine. storage_only: leaves out tiers in memory, for which this machine may be too small.

    Raises ConfigError for what only shows here: no run, a host tier larger than the memory or too small, a driver or
    policy that cannot be loaded or does not take what the file gives it.
    """
    name = run_name(config, run, environ)
    mistakes = Mistakes(config.file, [tier.name for tier in config.tiers])
    node = node or Node.here()
    tiers = []
    for i, tier in enumerate(config.tiers):
        if storage_only and is_memory(tier):
            continue
        make = _MAKERS.get(tier.driver, make_other)
        if tier.driver == "host":
            make = partial(make_host, run=name, place=_place(config.tiers[-1]))
        try:
            tiers.append(make(tier, mode == "r", node))
        except ConfigError as error:
            key = error.where.get("key")
            raise mistakes.error(f"tier[{i}]" + (f".{key}" if key else ""), error.what, error.todo) from error.__cause__
    check_order([tier.info.name for tier in tiers], [tier.info.scope for tier in tiers], mistakes)
    policies = [*(_policies(config, mistakes) if mode == "w" else []), *_prefetches(config, mistakes)]
    options = {tier.name: _options(tier) for tier in config.tiers if not is_memory(tier)}
    return Built(name, tiers, policies, dict(config.settings), options)


def run_name(config: Config, run: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """The run that is meant: `run`, else `STEPWELL_RUN`, else the file's. Raises ConfigError if nothing names one."""
    named = run or (os.environ if environ is None else environ).get("STEPWELL_RUN") or config.run
    if not named:
        todo = "Give run='my-run' to open(), set STEPWELL_RUN, or write run = \"my-run\" in the file"
        raise ConfigError("nothing says which run is meant", todo=todo, file=config.file)
    return check_run_name(named)


def _options(tier: TierConfig) -> TierOptions:
    grace = None if tier.delete_grace is None else float(tier.delete_grace)
    by_rules = tier.flush not in (None, "all")
    return TierOptions(delete_grace_s=grace, verify_after_flush=tier.verify_after_flush, by_rules=by_rules)


# -- policies ----------------------------------------------------------------------------


def _policies(config: Config, mistakes: Mistakes) -> list[Policy]:
    """One object for each rule of each tier. Without one, the first storage tier gets every save."""
    storage = [(i, tier) for i, tier in enumerate(config.tiers) if not is_memory(tier)]
    flushes: list[Policy] = []
    for i, tier in storage[1 if storage[0][1].flush in (None, "all") else 0 :]:
        flushes += _flushes(tier, f"tier[{i}]", mistakes, last=tier is storage[-1][1])
    retains = [_retain(tier, f"tier[{i}]", mistakes) for i, tier in storage if tier.retain is not None]
    return flushes + retains


def _prefetches(config: Config, mistakes: Mistakes) -> list[Policy]:
    """Also for readers: nothing is written by them."""
    made: list[Policy] = []
    for i, tier in enumerate(config.tiers):
        rule = PrefetchRule() if tier.prefetch == "newest" else tier.prefetch
        if not isinstance(rule, PrefetchRule):
            continue
        if rule.policy is not None:
            made.append(_others_policy(tier, rule.policy, rule.keywords, f"tier[{i}].prefetch", mistakes))
        else:
            made.append(PrefetchNewest(tier.name, parts=rule.parts))
    return made


def _flushes(tier: TierConfig, key: str, mistakes: Mistakes, *, last: bool) -> list[Policy]:
    """What goes down first comes first: the newest at closing, then rules of whole checkpoints, then of parts."""
    everything = tier.flush in (None, "all")
    made: list[Policy] = [FlushNewest(tier.name)] if last or everything or tier.flush == "at-close" else []
    if everything:
        made.append(FlushRule(tier.name))
    rules = list(enumerate(rules_of(tier)))
    for i, rule in sorted(rules, key=lambda each: each[1].parts is not None):  # stable: in the order of the file
        if rule.policy is not None:
            at = f"{key}.flush[{i}]" if isinstance(tier.flush, list) else f"{key}.flush"
            made.append(_others_policy(tier, rule.policy, rule.keywords, at, mistakes))
            continue
        made.append(
            FlushRule(
                tier.name,
                every_steps=rule.every_steps,
                every_s=None if rule.every is None else float(rule.every),
                parts=rule.parts,
                idle=rule.when == "idle",
                newest_wins=rule.backlog == "newest-wins",
            )
        )
    side_by_side(made)
    return made


def _retain(tier: TierConfig, key: str, mistakes: Mistakes) -> Policy:
    table = tier.retain
    assert table is not None
    if table.policy is not None:
        return _others_policy(tier, table.policy, table.keywords, f"{key}.retain", mistakes)
    best = [table.best] if isinstance(table.best, BestRule) else table.best or []
    return Retain(
        tier.name,
        last=table.last,
        every_steps=table.every_steps,
        every_s=None if table.every is None else float(table.every),
        best=[Best(rule.metric, rule.mode, rule.count) for rule in best],
        newer_than_s=None if table.newer_than is None else float(table.newer_than),
        tagged=True if table.tagged is True else table.tagged or (),
    )


def _others_policy(tier: TierConfig, name: str, keywords: Mapping[str, Any], key: str, mistakes: Mistakes) -> Policy:
    """A third party's policy: what its entry point names is called with tier and the rule's other keys."""
    try:
        point = next(point for point in entry_points(group=POLICY_GROUP) if point.name == name)
        made = point.load()(tier=tier.name, **keywords)
    except Exception as error:  # its code is not ours: whatever it raises, the reader needs the place in the file
        todo = f"Check the package that brings the policy {name!r}, and the keys that it takes"
        raise mistakes.error(key, f"the policy cannot be made: {error!r}", todo) from error
    if not callable(getattr(made, "decide", None)):
        todo = "Its entry point must name a class that follows stepwell.policies.base.Policy"
        raise mistakes.error(key, f"the policy {name!r} has no decide(), as {type(made).__name__} shows", todo)
    policy: Policy = made
    return policy


def eviction_of(tier: TierConfig) -> Announced:
    """What leaves a tier in memory first; what prefetches announce goes last, whoever's policy it is."""
    table = tier.evict if isinstance(tier.evict, EvictTable) else EvictTable(policy=tier.evict)
    if table.policy in EVICTION:
        return Announced(EVICTION[table.policy]())
    try:
        point = next(point for point in entry_points(group=POLICY_GROUP) if point.name == table.policy)
        made = point.load()(tier=tier.name, **table.keywords)
    except Exception as error:  # its code is not ours: whatever it raises, the reader needs the place in the file
        todo = f"Check the package that brings the policy {table.policy!r}, and the keys that it takes"
        raise ConfigError(f"the policy cannot be made: {error!r}", todo=todo, key="evict") from error
    if missing := [name for name in _EVICTION_METHODS if not callable(getattr(made, name, None))]:
        raise ConfigError(
            f"the policy {table.policy!r} has no {missing[0]}(), as {type(made).__name__} shows",
            todo="Its entry point must name a class that follows stepwell.tiers.base.EvictionPolicy",
            key="evict",
        )
    policy: EvictionPolicy = made
    return Announced(policy)


# -- drivers -----------------------------------------------------------------------------


def make_host(tier: TierConfig, read_only: bool, node: Node, *, run: str = "", place: str = "") -> Tier:
    """The host tier; all of a capacity that was set is taken as soon as it is started. Raises ConfigError if the
    memory cannot be there, warns if it is not free now.

    run, place: whose memory it is, where it is shared; place: of the run's last tier.
    """
    asked = _private_bytes(tier, node)
    if tier.shared and asked is None:
        asked = _private_bytes(msgspec.structs.replace(tier, capacity=SHARED_CAPACITY), node)
    if tier.shared:
        assert asked is not None
        arena = arena_name(tier.name, run, node.local_rank, place)
        root = tier.path or SHARED_ROOT
        host: HostTier = SharedHostTier(
            eviction_of(tier), asked, tier.name, arena=arena, run=run, root=root, ahead=not read_only,
        )  # fmt: skip
    else:
        host = HostTier(eviction_of(tier), asked, tier.name, ahead=not read_only, chunk_bytes=chunk_bytes_for(asked))
    least = host.info.capacity_bytes or 0
    if asked is not None and least > asked:
        each = f" for each of {node.local_ranks} local ranks" if node.local_ranks > 1 else ""
        raise ConfigError(
            f"{format_bytes(asked)}{each} are too little to stage through",
            todo=f"Write at least {format_bytes(least * node.local_ranks)}",
            key="capacity",
        )
    if asked is not None and node.free_bytes is not None and asked * node.local_ranks > node.free_bytes:
        log.warning(
            "tier %s will take %s of memory, and only %s are free now: the system may end this process. "
            "Give it less, or free memory first",
            tier.name, format_bytes(asked * node.local_ranks), format_bytes(node.free_bytes),
        )  # fmt: skip
    return host


def _place(last: TierConfig) -> str:
    """What tells runs of one name apart: alike for all processes of this node that open one run."""
    return f"{last.driver}:{last.name}" if last.path is None else os.path.realpath(last.path)


def _make_gpu(tier: TierConfig, read_only: bool, node: Node) -> Tier:
    """A size is of all GPUs of the node together, a percentage of each one."""
    assert tier.capacity is not None
    share, size = tier.capacity.fraction, tier.capacity.size_bytes
    return GpuTier(
        eviction_of(tier), None if size is None else max(1, size // node.local_ranks), tier.name, share=share
    )


def _make_memory(tier: TierConfig, read_only: bool, node: Node) -> Tier:
    return MemoryTier(tier.name, _private_bytes(tier, node))


def _private_bytes(tier: TierConfig, node: Node) -> int | None:
    """This process's share of a node's memory; None: nothing was said."""
    if tier.capacity is None:
        return None
    size = tier.capacity.of(node.limit_bytes)
    if size > node.limit_bytes:
        raise ConfigError(
            f"{format_bytes(size)} are more than the {format_bytes(node.limit_bytes)} of memory that this job may use",
            todo="Write a percentage such as '25%', or a smaller size",
            key="capacity",
        )
    return max(1, size // node.local_ranks)


def _make_file(tier: TierConfig, read_only: bool, node: Node) -> Tier:
    assert tier.path is not None
    capacity = tier.capacity.size_bytes if tier.capacity else None
    survives = tier.survives or "reboot"
    return FileTier(
        tier.path, name=tier.name, survives=survives, capacity_bytes=capacity, siblings=node.local_ranks > 1,
        read_only=read_only,
    )  # fmt: skip


def _make_pfs(tier: TierConfig, read_only: bool, node: Node) -> Tier:
    assert tier.path is not None
    given: dict[str, Any] = {} if tier.timeout is None else {"timeout_s": float(tier.timeout)}
    return PfsTier(
        tier.path,
        name=tier.name,
        capacity_bytes=tier.capacity.size_bytes if tier.capacity else None,
        read_only=read_only,
        write_bytes_per_s=bytes_per_s(tier, node),
        **given,
    )


def bytes_per_s(tier: TierConfig, node: Node) -> float | None:
    """This process's share of what the node and the job may write there; the smaller one."""
    shares = []
    if tier.bandwidth is not None:
        shares.append(tier.bandwidth / node.local_ranks)
    if tier.bandwidth_per_job is not None:
        shares.append(tier.bandwidth_per_job / max(node.world or 1, node.local_ranks))
    return min(shares, default=None)


def make_other(tier: TierConfig, read_only: bool, node: Node) -> Tier:
    """A third party's driver: what its entry point names is called with name and read_only, and with those of path,
    capacity_bytes, survives, write_bytes_per_s and timeout_s that the file gives."""
    given = {
        "path": tier.path,
        "capacity_bytes": tier.capacity.size_bytes if tier.capacity else None,
        "survives": tier.survives,
        "write_bytes_per_s": bytes_per_s(tier, node),
        "timeout_s": None if tier.timeout is None else float(tier.timeout),
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        point = next(point for point in entry_points(group=DRIVER_GROUP) if point.name == tier.driver)
        made = point.load()(name=tier.name, read_only=read_only, **given)
    except Exception as error:  # its code is not ours: whatever it raises, the reader needs the place in the file
        todo = f"Check the package that brings the driver {tier.driver!r}, and the keys that it takes"
        raise ConfigError(f"the driver cannot be made: {error!r}", todo=todo, key="driver") from error
    if not isinstance(made, Tier):
        todo = "Its entry point must name a class that follows stepwell.tiers.base.Tier"
        raise ConfigError(f"the driver {tier.driver!r} is no tier, but {type(made).__name__}", todo=todo, key="driver")
    return made


_MAKERS: dict[str, Callable[[TierConfig, bool, Node], Tier]] = {
    "gpu": _make_gpu, "host": make_host, "memory": _make_memory, "file": _make_file, "pfs": _make_pfs,
}  # fmt: skip
