"""What can be written in a config file: one typed schema, and what each driver takes of it.

The JSON Schema for editors and the tables of docs/config.md are made of it (`stepwell.reference`), so a field's
description is its documentation. Defaults that None stands for are told in the description.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stepwell.tiers.base import Scope


class Seconds(float):
    """Written '1h', or a number of seconds; above 0."""


class Grace(float):
    """As Seconds, or 0."""


class BytesPerSecond(int):
    """Written '20GB/s'."""


class Capacity:
    """Bytes of the node, or a fraction of the memory that the job may use there; exactly one of them.

    A plain class, since msgspec would read a dataclass from a table of its own accord.
    """

    def __init__(self, size_bytes: int | None = None, fraction: float | None = None) -> None:
        assert (size_bytes is None) != (fraction is None)
        self.size_bytes, self.fraction = size_bytes, fraction

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Capacity) and (self.size_bytes, self.fraction) == (other.size_bytes, other.fraction)

    def __hash__(self) -> int:
        return hash((self.size_bytes, self.fraction))

    def __repr__(self) -> str:
        return f"Capacity({self.size_bytes} bytes)" if self.fraction is None else f"Capacity({self.fraction:.0%})"

    def of(self, memory_bytes: int) -> int:
        """In bytes, where the job may use `memory_bytes`."""
        return self.size_bytes if self.size_bytes is not None else int((self.fraction or 0.0) * memory_bytes)


def _doc(text: str, *examples: Any) -> Meta:
    return Meta(description=text, examples=list(examples) or None)


def _count(text: str, example: int) -> Meta:
    return Meta(description=text, examples=[example], extra_json_schema={"minimum": 1})


#: those of `stepwell.policies.evict`
Eviction = Literal["s3-fifo", "lru", "cost-aware"]


class EvictTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    policy: Annotated[
        str,
        _doc(
            "one of the names above, or an entry point of the group `stepwell.policies`; further keys are then its own",
            "cost-aware",
        ),
    ]
    keywords: dict[str, Any] = {}  # those further keys; put here by stepwell.config


class PrefetchRule(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """`prefetch`, where it is more than a word: the newest checkpoint, or what another package's policy says."""

    parts: Annotated[
        list[str] | None, _doc("of the newest checkpoint, only these parts come up. Default: all", ["model"])
    ] = None
    policy: Annotated[
        str | None,
        _doc("instead: an entry point of the group `stepwell.policies`; further keys are its own"),
    ] = None
    keywords: dict[str, Any] = {}  # those further keys; put here by stepwell.config


class FlushRule(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One rule of `flush`; without `every_steps` and `every` it takes every checkpoint."""

    every_steps: Annotated[
        int | None, _count("the first checkpoint in each window of so many steps (`step // k` grew)", 100)
    ] = None
    every: Annotated[Seconds | None, _doc("the first checkpoint in each window of so much time", "10min")] = None
    parts: Annotated[
        list[str] | None, _doc("only these parts go down; the copy there is then partial. Default: all", ["model"])
    ] = None
    when: Annotated[Literal["idle"] | None, _doc("only while nothing else is under way. Default: at once")] = None
    backlog: Annotated[
        Literal["keep-all", "newest-wins"],
        _doc("`keep-all`: what waits to go down is never passed over; `newest-wins`: a newer checkpoint replaces it"),
    ] = "keep-all"
    policy: Annotated[
        str | None,
        _doc("instead of all the others: an entry point of the group `stepwell.policies`; further keys are its own"),
    ] = None
    keywords: dict[str, Any] = {}  # those further keys; put here by stepwell.config


class BestRule(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One rule of `retain.best`."""

    metric: Annotated[str, _doc("as `save(metrics=…)` and `annotate` name it", "eval/acc")]
    mode: Annotated[Literal["min", "max"], _doc("whether the smallest or the largest values are best")]
    count: Annotated[int, _count("how many of the best stay", 2)]


class RetainTable(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Which checkpoints live on: all that at least one of its rules names, and those that were marked with `keep`."""

    last: Annotated[
        int | None, _count("the newest so many, by step; complete and partial checkpoints are counted apart", 3)
    ] = None
    every_steps: Annotated[
        int | None, _count("the first in each window of so many steps (`step // k` grew)", 10000)
    ] = None
    every: Annotated[Seconds | None, _doc("the first in each window of so much time", "1d")] = None
    best: Annotated[
        BestRule | list[BestRule] | None,
        _doc(
            "the best by a metric; several tables for several metrics. A checkpoint whose metric is missing yet stays",
            {"metric": "eval/acc", "mode": "max", "count": 2},
        ),
    ] = None
    newer_than: Annotated[Seconds | None, _doc("those that are not older than this", "7d")] = None
    tagged: Annotated[
        bool | list[str] | None, _doc("those with one of these tags; `true`: with any tag", ["release"])
    ] = None
    policy: Annotated[
        str | None,
        _doc("instead of all the others: an entry point of the group `stepwell.policies`; further keys are its own"),
    ] = None
    keywords: dict[str, Any] = {}  # those further keys; put here by stepwell.config


class TierConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One `[[tier]]`, nearest first."""

    name: Annotated[
        str, _doc('its name in `wait("nvme")`, `status()` and messages: letters, digits, `-` and `_`', "nvme")
    ]
    driver: Annotated[
        str,
        _doc(
            "`gpu`: memory of this process's GPU, for instant rollback and warm models; `host`: this process's memory, "
            "as staging and cache; `file`: a folder on a local disk; `pfs`: a folder "
            "that all nodes see; `memory`: plain storage in this process, for tests; or the name of an entry point of "
            "the group `stepwell.tiers`",
            "file",
        ),
    ]
    path: Annotated[
        str | None,
        _doc(
            "the folder that holds the runs. `~` and `$VARIABLES` are replaced; a relative path starts at the config "
            "file. A `pfs` folder must exist: stepwell never makes it. Of `host` with `shared = true`: where shared "
            "memory is mounted, a tmpfs or a hugetlbfs; default `/dev/shm`",
            "/local/$USER",
        ),
    ] = None
    capacity: Annotated[
        Capacity | None,
        _doc(
            "the most that stepwell's shards take there. Per node, shared by its local ranks (of `pfs`, per run); "
            "of the host tier also `\"25%\"` of the memory that the job's cgroup may use, of a gpu tier of each GPU's "
            "memory, of which it takes what saves need while enough is free for training. The host tier takes all "
            "of it from the system at the start, in the background. Without it, the host tier grows with the first "
            "save (with `shared = true`: it is 25%), and storage tiers have their medium's own limit",
            "400GiB",
        ),
    ] = None
    shared: Annotated[
        bool,
        _doc(
            "`true`: the memory is named and outlives the process, also one that is killed: the next one that opens "
            "this run on the node goes on with what is there, and other processes read from it. `stepwell host ls` "
            "shows it, `stepwell host free` gives it back. Default: `false`, private memory",
            True,
        ),
    ] = False
    survives: Annotated[
        Literal["process", "reboot", "node-loss"] | None,
        _doc(
            'what a copy there outlives. Default of `file`: `"reboot"`. A `memory` tier can only say `"process"`, '
            'a `pfs` tier only `"node-loss"`'
        ),
    ] = None
    evict: Annotated[
        Eviction | EvictTable,
        _doc(
            "what leaves memory first, of what another tier has, too. `s3-fifo`: what was not used again since it "
            "came; a scan or a save pushes out little else; `lru`: the shard used longest ago; `cost-aware`: what is "
            "cheap to fetch again and seldom used. What prefetches have announced goes last, whichever it is",
            {"policy": "cost-aware"},
        ),
    ] = "s3-fifo"
    prefetch: Annotated[
        Literal["newest"] | PrefetchRule | None,
        _doc(
            'what comes up to it before anybody asks. `"newest"`: the newest complete checkpoint, the likely next '
            "restore, when a store is opened (for reading, too), when a newer one is there, and when a part of it had "
            "to give way; never during a save, and after all that `store.prefetch` asks for. Default: nothing",
            {"parts": ["model"]},
        ),
    ] = None
    flush: Annotated[
        Literal["all", "at-close"] | FlushRule | list[FlushRule] | None,
        _doc(
            'what comes down to it. `"all"` (the default): every checkpoint; `"at-close"`: only the newest, when '
            "the store is closed or drained; or rules, each of which sends what it names. The first storage tier gets "
            "every save; where it has rules, and there is a host tier, what they do not name stays in host memory, "
            "where the newest of it lives until a newer one is there. Whatever they say, closing sends the newest "
            "checkpoint to the last tier",
            [{"every_steps": 100, "parts": ["model"]}, {"every_steps": 1000}],
        ),
    ] = None
    retain: Annotated[
        RetainTable | None, _doc("which checkpoints live on there. Without it nothing is deleted", {"last": 3})
    ] = None
    verify_after_flush: Annotated[
        Literal["size", "digest"] | None,
        _doc(
            "what is looked at after a flush to it, before the last nearer copy may go: the files' sizes, or every "
            "byte read again and checked. Default: nothing"
        ),
    ] = None
    delete_grace: Annotated[
        Grace | None,
        _doc(
            'how long files stay after their manifest is gone, for readers that have them open. Default: `"30min"` '
            "on a tier that all nodes share, 0 on a node's",
            "30min",
        ),
    ] = None
    bandwidth: Annotated[BytesPerSecond | None, _doc("per node: what its local ranks write there at most", "2GB/s")] = (
        None
    )
    bandwidth_per_job: Annotated[
        BytesPerSecond | None,
        _doc("per job: what all its ranks write there at most. Of both limits the smaller one counts", "20GB/s"),
    ] = None
    timeout: Annotated[
        Seconds | None,
        _doc('how long a call may hang before the tier counts as unavailable. Default: `"60s"`', "60s"),
    ] = None


class FileSchema(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A whole file."""

    tier: Annotated[
        list[TierConfig],
        _doc(
            "one table for each tier, nearest first: saves go down through them. At least one of them must be a "
            "storage tier"
        ),
    ]
    run: Annotated[str | None, _doc("the run; left out in files for a whole site", "llama-sft")] = None
    on_pressure: Annotated[
        Literal["block", "skip", "newest-wins"] | None,
        _doc(
            "what `save` does while the first storage tier has no room until older checkpoints are flushed and deleted "
            'there. `"block"` (the default): it waits, at most `block_timeout`; `"skip"`: it gives this checkpoint up; '
            '`"newest-wins"`: flushes of older ones that have not begun are given up, so that those can go'
        ),
    ] = None
    max_unsaved: Annotated[
        Seconds | None, _doc('`save` raises once nothing has become durable for so long. Default: `"1h"`', "1h")
    ] = None
    block_timeout: Annotated[
        Seconds | None,
        _doc('the longest that `save` blocks; then that checkpoint is skipped. Default: `"2min"`', "2min"),
    ] = None
    exit_timeout: Annotated[
        Seconds | None,
        _doc('the longest that `close` or leaving the interpreter waits. Default: `"10min"`', "10min"),
    ] = None
    trace: Annotated[
        str | None,
        _doc(
            "a file to which each process appends what it saves, restores and prefetches, for `stepwell lab simulate`: "
            "rank 3 of 8 writes `.rank00003-of-00008` before its ending, `%p` stands for the process's id. `~` and "
            "`$VARIABLES` are replaced. Default: what STEPWELL_TRACE names",
            "trace.jsonl",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class DriverRules:
    """What a driver takes beside name and driver, what it must have, and what it is."""

    takes: frozenset[str]
    needs: frozenset[str] = frozenset()
    scope: Scope | None = "node"  # None: shows only when the driver is made
    survives: frozenset[str] = frozenset({"process", "reboot", "node-loss"})


_STORAGE = frozenset({"capacity", "survives", "flush", "retain", "verify_after_flush", "delete_grace"})
_REMOTE = _STORAGE | {"path", "bandwidth", "bandwidth_per_job", "timeout"}
DRIVERS = {
    "gpu": DriverRules(frozenset({"capacity", "evict"}), frozenset({"capacity"}), scope="process"),
    "host": DriverRules(frozenset({"capacity", "shared", "path", "evict", "prefetch"}), scope="process"),
    "memory": DriverRules(_STORAGE, survives=frozenset({"process"})),
    "file": DriverRules(_STORAGE | {"path"}, frozenset({"path"})),
    "pfs": DriverRules(_REMOTE, frozenset({"path"}), "shared", frozenset({"node-loss"})),
}
#: a third party's, made with the keywords that `stepwell.building.make_other` tells
OTHER_DRIVER = DriverRules(_REMOTE, scope=None)


def is_memory(tier: TierConfig) -> bool:
    """Whether a tier is memory of the process, which saves pass through; all others are storage tiers."""
    return DRIVERS.get(tier.driver, OTHER_DRIVER).scope == "process"


#: the top-level keys that are fields of `stepwell.settings.Settings`
SETTINGS = ("on_pressure", "max_unsaved", "block_timeout", "exit_timeout", "trace")
