"""What a simulation is made of, from a config: places with speeds, host tiers without bytes, the config's policies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from stepwell.building import SHARED_CAPACITY, Node, build, bytes_per_s, eviction_of
from stepwell.commit import manifest_of, rank_record
from stepwell.config import Config
from stepwell.errors import ConfigError
from stepwell.format.names import MANIFEST, Attempt, rank_file
from stepwell.format.records import Draft, encode
from stepwell.hostmem import host_budget_bytes
from stepwell.jobs import Job, LocalStore
from stepwell.lab.memory import Region, snapshot_of
from stepwell.lab.process import EPOCH_S, MODELS, Setup
from stepwell.lab.speeds import Speeds
from stepwell.lab.tier import Place
from stepwell.lab.trace import Workload
from stepwell.policies.base import Policy
from stepwell.runtime import STAGING_BYTES
from stepwell.saving import Order
from stepwell.schema import DRIVERS, OTHER_DRIVER, TierConfig
from stepwell.settings import Settings
from stepwell.shardjob import ShardJob
from stepwell.tiers.base import CheckpointKey, RecordKey, ShardKey, Survives, TierInfo
from stepwell.tiers.host import HostTier, chunk_bytes_for
from stepwell.units import format_bytes

RUN = "lab"
_USUAL: dict[str, Survives] = {"memory": "process", "pfs": "node-loss"}


def survives_of(tier: TierConfig) -> Survives:
    """What a tier's copies outlive, as its driver says."""
    if tier.driver == "host":
        return "process" if tier.shared else "nothing"
    return tier.survives or _USUAL.get(tier.driver, "reboot")


def simulated(config: Config) -> Config:
    """What the lab knows to play of a config: all but a gpu tier, which nothing outlives and no other tier feels."""
    return replace(config, tiers=tuple(tier for tier in config.tiers if tier.driver != "gpu"))


def set_up(config: Config, workload: Workload, speeds: Speeds, memory_bytes: int) -> Setup:
    """All that the processes of a simulation have in common. memory_bytes: what the job may use of the node's.

    Raises ConfigError if the speed of a tier is not known, or a tier that only the lab can do without is missing.
    """
    config, ranks = simulated(config), len(workload.ranks)
    node = Node(ranks, memory_bytes, None, ranks)
    storage = [tier for tier in config.tiers if tier.driver != "host"]
    places = {tier.name: Place(_info(tier, node), speeds.of(tier.name)) for tier in storage}
    hosts = [tier for tier in config.tiers if tier.driver == "host"]
    models = {name: number for number, name in enumerate(workload.models, 1)}
    last = places[storage[-1].name]
    for name, step in models.items():
        put_there(last, MODELS, step, workload.models[name])
    # only the names and rules of tiers matter to policies: no driver is made of what the file says
    plain = [structs.replace(tier, driver="memory", path=None, capacity=None) for tier in storage]
    bare = replace(config, tiers=(*hosts, *plain))

    def make_policies() -> Sequence[Policy]:
        return build(bare, run=RUN, node=node, environ={}, storage_only=True).policies

    settings = {name: value for name, value in config.settings.items() if name != "trace"}
    return Setup(
        run=RUN,
        names=tuple(tier.name for tier in config.tiers),
        places=places,
        make_host=(lambda: _host(hosts[0], ranks, memory_bytes, workload.state_bytes)) if hosts else None,
        staging_bytes=STAGING_BYTES,
        settings=Settings().override(settings),
        options=build(bare, run=RUN, node=node, environ={}, storage_only=True).options,
        make_policies=make_policies,
        copy_bytes_per_s=speeds.copy_bytes_per_s,
        models=models,
    )


def _info(tier: TierConfig, node: Node) -> TierInfo:
    rules = DRIVERS.get(tier.driver, OTHER_DRIVER)
    capacity = tier.capacity.size_bytes if tier.capacity else None
    return TierInfo(
        tier.name, "lab", rules.scope or "node", survives_of(tier), capacity, write_bytes_per_s=bytes_per_s(tier, node)
    )


def host_bytes(tier: TierConfig, ranks: int, memory_bytes: int, state_bytes: int) -> int:
    """What the host tier of one process may keep of a state of so many bytes of its own."""
    capacity = SHARED_CAPACITY if tier.capacity is None and tier.shared else tier.capacity
    if capacity is not None:
        return max(1, capacity.of(memory_bytes) // ranks)
    return host_budget_bytes(state_bytes, ranks, limit_bytes=lambda: memory_bytes, free_bytes=lambda: memory_bytes)


def _host(tier: TierConfig, ranks: int, memory_bytes: int, state_bytes: int) -> HostTier:
    """One process's. What grows by itself has the size from the start that the first save would give it."""
    size = host_bytes(tier, ranks, memory_bytes, state_bytes)
    if size > memory_bytes:
        what = f"tier {tier.name} takes {format_bytes(size)}, and the node has {format_bytes(memory_bytes)}"
        raise ConfigError(what, todo="Say what the node has: --memory 512GiB", tier=tier.name)
    given = size if tier.capacity is not None or tier.shared else None
    host = HostTier(
        eviction_of(tier), given, tier.name, memory=Region, background=False, ahead=False,
        chunk_bytes=chunk_bytes_for(None if tier.shared else given),
    )  # fmt: skip
    if given is None:
        host.grow(size)
        host.grows = False  # a save would ask this machine how much more there is
    if tier.shared:
        host.info = replace(host.info, survives="process")
    return host


def put_there(place: Place, run: str, step: int, files: Mapping[str, int], ranks: int = 1) -> None:
    """A checkpoint that is on a place from the beginning. files: bytes by name, of each rank."""
    attempt = Attempt(epoch=1, call=step, step=step)
    key = CheckpointKey(run, attempt.folder)
    records: dict[int, bytes] = {}
    for rank in range(ranks):
        snapshot = snapshot_of({name.removesuffix(".safetensors"): size for name, size in files.items()}, rank, ranks)
        order = Order(
            call=step, step=step, job=Job(rank, ranks, LocalStore(), None, 0), snapshot=snapshot.as_snapshot(),
            metrics={}, tags=[], files={}, began=0.0, made=EPOCH_S, capture_seconds=0.0, rewind_to=None,
        )  # fmt: skip
        jobs = [ShardJob(ShardKey(key, shard.file), shard.size, snapshot.source(0)) for shard in snapshot.shards]
        for job in jobs:
            place.books.adopt(job.key, job.size, job.size)
        records[rank] = rank_record(order, attempt, jobs, Draft(run_id=run, made=EPOCH_S))
        place.records[RecordKey(run, f"{attempt.folder}/{rank_file(rank)}")] = records[rank]
    place.records[RecordKey(run, f"{attempt.folder}/{MANIFEST}")] = encode(manifest_of(attempt, records))
    place.most_bytes = max(place.most_bytes, place.books.taken_bytes)
