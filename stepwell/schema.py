"""What can be written in a config file: one typed schema, and what each driver takes of it.

A field's comment is its documentation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from stepwell.tiers.base import Scope


class Seconds(float):
    """Written '1h', or a number of seconds."""


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


class Evict(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    policy: Literal["lru"]  # lru: least recently used shard first, its tail first


class Retain(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    last: int  # how many of the newest checkpoints stay, by step; complete and partial ones counted apart


class TierConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """One `[[tier]]`, nearest first."""

    name: str  # as save.wait and messages name it
    driver: str  # host, file, pfs, memory, or the name of an entry point of the group stepwell.tiers
    path: str | None = None  # the tier's root folder; '~' and $VARIABLES are replaced, relative to the config file
    capacity: Capacity | None = None  # per node, shared by its local ranks: "400GiB"; of the host tier also "25%"
    shared: bool = False  # host: one arena for all processes of the node
    survives: Literal["process", "reboot", "node-loss"] | None = None  # what its copies outlive; None: driver's word
    evict: Literal["lru"] | Evict = "lru"  # host: what goes first when room is needed
    flush: Literal["all"] | None = None  # what comes down to it; None: all
    retain: Retain | None = None  # which checkpoints live on; None: all
    bandwidth: BytesPerSecond | None = None  # pfs: per node, what its local ranks write there at most
    timeout: Seconds | None = None  # pfs: how long a call may hang before the tier counts as unavailable


class FileSchema(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """A whole file."""

    tier: list[TierConfig]
    run: str | None = None  # left out in site files
    max_unsaved: Seconds | None = None  # how long nothing may become durable before save() raises
    block_timeout: Seconds | None = None  # the longest that save() blocks
    exit_timeout: Seconds | None = None  # the longest that leaving the interpreter waits


@dataclass(frozen=True, slots=True)
class DriverRules:
    """What a driver takes beside name and driver, what it must have, and what it is."""

    takes: frozenset[str]
    needs: frozenset[str] = frozenset()
    scope: Scope | None = "node"  # None: shows only when the driver is made
    survives: frozenset[str] = frozenset({"process", "reboot", "node-loss"})


_STORAGE = frozenset({"capacity", "survives", "flush", "retain"})
DRIVERS = {
    "host": DriverRules(frozenset({"capacity", "shared", "evict"}), scope="process"),
    "memory": DriverRules(_STORAGE, survives=frozenset({"process"})),
    "file": DriverRules(_STORAGE | {"path"}, frozenset({"path"})),
    "pfs": DriverRules(
        _STORAGE | {"path", "bandwidth", "timeout"}, frozenset({"path"}), "shared", frozenset({"node-loss"})
    ),
}
#: a third party's, made with the keywords that `stepwell.building.make_other` tells
OTHER_DRIVER = DriverRules(_STORAGE | {"path", "bandwidth", "timeout"}, scope=None)

#: keys that the design names and this version does not have yet -> what to do meanwhile
LATER = {
    "verify_after_flush": "Leave it out; `stepwell verify` checks every checksum",
    "on_pressure": "Leave it out; save() blocks, at most block_timeout",
    "delete_grace": "Leave it out; what retain lets go is deleted at once, unless this process reads it",
    "bandwidth_per_job": "Leave it out; bandwidth = '2GB/s' limits each node",
    "tier.retain.every_steps": "Leave it out; retain = { last = 3 } keeps the newest three",
    "tier.retain.best": "Leave it out; retain = { last = 3 } keeps the newest three",
    "tier.retain.newer_than": "Leave it out; retain = { last = 3 } keeps the newest three",
    "tier.retain.tagged": "Leave it out; retain = { last = 3 } keeps the newest three",
}
