"""`stepwell config check`: where each value of a config comes from, and whether this machine can do what it asks."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stepwell.building import SHARED_CAPACITY, Node, build, bytes_per_s
from stepwell.config import Config, load_config
from stepwell.deletion import GRACE_S
from stepwell.doctor import Diagnosis, Finding, examine
from stepwell.errors import TierUnavailable
from stepwell.hostmem import cgroup_limit_bytes
from stepwell.reference import in_toml, keys_of
from stepwell.schema import DRIVERS, OTHER_DRIVER, SETTINGS, TierConfig, is_memory
from stepwell.settings import Settings
from stepwell.tiers.pfs import TIMEOUT_S
from stepwell.tiers.shared import SHARED_ROOT, shared_room
from stepwell.tracing import VARIABLE
from stepwell.units import format_bytes, format_duration

Source = Literal["file", "default", "environment", "derived"]


@dataclass(frozen=True, slots=True)
class Value:
    """One value that counts, and where it comes from."""

    key: str  # dotted, as messages name it: tier[1].capacity
    value: str | int | float | bool | None  # for programs: bytes, seconds, TOML for what is more than one value
    text: str  # for people
    source: Source  # derived: of what is in the file, by what this machine or its environment says


@dataclass(frozen=True, slots=True)
class Inspection:
    """A config file that is valid."""

    config: Config
    values: list[Value]
    found: Diagnosis | None  # None: the machine was not looked at

    @property
    def good(self) -> bool:
        """Whether nothing was found that would not work."""
        if self.found is None:
            return True
        every = [*self.found.machine, *(each for findings in self.found.paths.values() for each in findings)]
        return all(each.grade != "bad" for each in every)


def inspect(
    path: str | os.PathLike[str], *, probe: bool = True, environ: Mapping[str, str] | None = None
) -> Inspection:
    """Validates a config file as `stepwell.open` does, opening nothing; with `probe` then looks at the machine.

    Raises ConfigError for a mistake in the file. Without `probe` the host tier's size is not held against this
    machine's memory, so that files of other machines can be checked.
    """
    environ = os.environ if environ is None else environ
    config = load_config(path, environ)
    node = Node.here()
    run = environ.get("STEPWELL_RUN") or config.run or "any"  # what is made is the same for every run
    build(config, run=run, node=node, environ=environ, storage_only=not probe)
    values = [*_top(config, environ), *_tiers(config, node)]
    return Inspection(config, values, _look(config) if probe else None)


# -- values ------------------------------------------------------------------------------


def _top(config: Config, environ: Mapping[str, str]) -> Iterator[Value]:
    if environ.get("STEPWELL_RUN"):
        yield Value("run", environ["STEPWELL_RUN"], f"{environ['STEPWELL_RUN']}, as STEPWELL_RUN says", "environment")
    elif config.run is not None:
        yield Value("run", config.run, config.run, "file")
    else:
        yield Value("run", None, "not set: stepwell.open(run=…) or STEPWELL_RUN names it", "default")
    usual = Settings()
    for name in SETTINGS:
        value = config.settings.get(name, getattr(usual, name))
        if value is None and name == "trace":
            yield _trace(environ)
            continue
        text = value if isinstance(value, str) else format_duration(value)
        yield Value(name, value, text, "file" if name in config.settings else "default")


def _trace(environ: Mapping[str, str]) -> Value:
    if file := environ.get(VARIABLE):
        return Value("trace", file, f"{file}, as {VARIABLE} says", "environment")
    return Value("trace", None, "nothing is recorded", "default")


def _tiers(config: Config, node: Node) -> Iterator[Value]:
    storage = [tier.name for tier in config.tiers if not is_memory(tier)]
    for i, tier in enumerate(config.tiers):
        written = config.written["tier"][i]
        takes = DRIVERS.get(tier.driver, OTHER_DRIVER).takes
        for name in keys_of(TierConfig):
            if name not in takes and name not in ("name", "driver"):
                continue
            if name == "path" and tier.driver == "host" and not tier.shared:
                continue
            key = f"tier[{i}].{name}"
            if name in written:
                yield _given(key, name, tier, written[name], node)
            else:
                yield _default(key, name, tier, place=storage.index(tier.name) if tier.name in storage else -1)
        share = bytes_per_s(tier, node)
        if share is not None:
            text = f"{format_bytes(int(share))}/s for each of the job's ranks on this node"
            yield Value(f"tier[{i}].write_bytes_per_s", share, text, "derived")


def _given(key: str, name: str, tier: TierConfig, written: Any, node: Node) -> Value:
    """A value that stands in the file."""
    if name == "path" and tier.path != written:
        return Value(key, tier.path, f"{tier.path}, written {in_toml(written)}", "derived")
    if name == "capacity" and tier.capacity is not None and tier.driver == "gpu" and tier.capacity.fraction is not None:
        return Value(key, written, f"{tier.capacity.fraction:.0%} of each GPU's memory", "file")
    if name == "capacity" and tier.capacity is not None:
        size = tier.capacity.of(node.limit_bytes)
        text = format_bytes(size)
        if tier.capacity.fraction is None:
            return Value(key, size, text, "file")
        of = f"{format_bytes(node.limit_bytes)} that this job may use here"
        return Value(key, size, f"{text}: {written} of the {of}", "derived")
    value = getattr(tier, name)
    if isinstance(value, int | float | bool):
        return Value(key, value, written if isinstance(written, str) else in_toml(written), "file")
    if isinstance(value, str):
        return Value(key, value, value, "file")
    return Value(key, in_toml(written), in_toml(written), "file")


def _default(key: str, name: str, tier: TierConfig, place: int) -> Value:
    """A value that does not stand in the file. place: of the tier among those of storage; -1 for the host tier."""
    scope = DRIVERS.get(tier.driver, OTHER_DRIVER).scope
    value: str | int | float | bool | None
    value, text = None, "none"
    if name == "capacity":
        text = "grows with the first save" if place < 0 else "what its medium has"
        if tier.shared:
            text = f"{SHARED_CAPACITY.fraction or 0:.0%} of the memory that this job may use"
    elif name == "path":
        value = text = str(SHARED_ROOT)
    elif name == "survives":
        value = {"file": "reboot", "memory": "process", "pfs": "node-loss"}.get(tier.driver)
        text = value or "as its driver says"
    elif name == "flush":
        value, text = ("all", "all: every save is written there") if place == 0 else ("all", "all")
    elif name == "retain":
        text = "nothing is deleted"
    elif name == "verify_after_flush":
        text = "nothing is looked at"
    elif name == "delete_grace":
        value = GRACE_S if scope == "shared" else None if scope is None else 0.0
        text = "by its scope" if value is None else format_duration(value) if value else "0"
    elif name in ("bandwidth", "bandwidth_per_job"):
        text = "no limit"
    elif name == "timeout":
        value = TIMEOUT_S if tier.driver == "pfs" else None
        text = "as its driver says" if value is None else format_duration(value)
    elif name in ("shared", "evict"):
        value = getattr(tier, name)
        text = in_toml(value) if name == "shared" else str(value)
    return Value(key, value, text, "default")


# -- the machine -------------------------------------------------------------------------


def _look(config: Config) -> Diagnosis:
    """As `stepwell doctor` looks at the machine and at each tier's folder; of one that a tier would make, at the
    folder above."""
    storage = [tier for tier in config.tiers if not is_memory(tier)]
    exists = [(tier, *_exists(tier, Path(tier.path))) for tier in storage if tier.path is not None]
    seen = examine([place for _, place, _ in exists if place is not None])
    paths = {tier.path or str(SHARED_ROOT): _shared(tier) for tier in config.tiers if tier.shared}
    for tier, place, first in exists:
        found = seen.paths.get(str(place), [])
        paths[str(tier.path)] = [first, *found, *_room(tier, found)]
    machine = [each for each in seen.machine if each.key != "config"]  # another file than the one that is checked
    return Diagnosis(machine, paths)


def _shared(tier: TierConfig) -> list[Finding]:
    """Whether memory can be shared there, and how much of it."""
    root = Path(tier.path or SHARED_ROOT)
    try:
        kind, free_bytes = shared_room(root)
    except TierUnavailable as error:
        return [Finding("memory", False, error.what, "bad", error.todo)]
    wanted_bytes = (tier.capacity or SHARED_CAPACITY).of(cgroup_limit_bytes())
    found = Finding("memory", kind, kind, "good")
    text = f"{format_bytes(free_bytes)} free or without an owner, and {format_bytes(wanted_bytes)} are wanted"
    if free_bytes >= wanted_bytes:
        return [found, Finding("free_bytes", free_bytes, text, "good")]
    todo = "Give it more (of a container: docker run --shm-size), name a larger mount as path, or less as capacity"
    return [found, Finding("free_bytes", free_bytes, text, "slow", todo)]


def _exists(tier: TierConfig, path: Path) -> tuple[Path | None, Finding]:
    """(the folder that can be tried, None if there is none; whether the tier's own is there)."""
    if path.is_dir():
        return path, Finding("exists", True, "yes", "good")
    if path.exists():
        return None, Finding("exists", False, "it is a file", "bad", "Name a folder")
    if tier.driver != "file":
        todo = "See whether it is mounted, or make it: stepwell never makes the folder of a shared tier"
        return None, Finding("exists", False, "there is no such folder", "bad", todo)
    if not path.parent.is_dir():
        todo = f"Make {path.parent}, or mend the path"
        return None, Finding("exists", False, f"there is no such folder, nor {path.parent}", "bad", todo)
    return path.parent, Finding("exists", False, f"it will be made in {path.parent}, and that was looked at")


def _room(tier: TierConfig, found: list[Finding]) -> list[Finding]:
    free = next((each.value for each in found if each.key == "free_bytes"), None)
    if tier.capacity is None or tier.capacity.size_bytes is None or not isinstance(free, int):
        return []
    size = tier.capacity.size_bytes
    if size <= free:
        return [Finding("capacity_bytes", size, f"{format_bytes(size)}, and {format_bytes(free)} are free", "good")]
    text = f"{format_bytes(size)}, and only {format_bytes(free)} are free: what is really free counts"
    todo = "Write less, unless this tier's own checkpoints take the rest"
    return [Finding("capacity_bytes", size, text, "slow", todo)]
