"""The config file: where it is found, how it is read, and what is wrong with it.

`load_config` gives pure data and touches nothing but the file. Driver and policy objects are made of it by
`stepwell.building`; what can be written is in `stepwell.schema`.
"""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import msgspec

from stepwell.errors import ConfigError
from stepwell.format.names import check_run_name
from stepwell.schema import (
    DRIVERS,
    LATER,
    OTHER_DRIVER,
    BytesPerSecond,
    Capacity,
    Evict,
    FileSchema,
    Retain,
    Seconds,
    TierConfig,
)
from stepwell.tiers.base import Scope
from stepwell.units import parse_duration, parse_percent, parse_rate, parse_size

SITE_FILE = Path("/etc/stepwell.toml")
DRIVER_GROUP = "stepwell.tiers"  # of the entry points by which others add drivers


@dataclass(frozen=True, slots=True)
class Config:
    """A config file, validated: paths are absolute, sizes are bytes, times are seconds."""

    file: str
    run: str | None
    tiers: tuple[TierConfig, ...]  # nearest first
    settings: dict[str, float]  # those of max_unsaved, block_timeout and exit_timeout that it sets


@dataclass(frozen=True, slots=True)
class Mistakes:
    """Makes the errors of one file: each names file, dotted key and, inside a tier, the tier."""

    file: str
    names: list[str]  # of the tiers, in order; "" where there is none

    def error(self, key: str, what: str, todo: str) -> ConfigError:
        inside = re.match(r"tier\[(\d+)\]", key)
        tier = self.names[int(inside[1])] if inside else ""
        return ConfigError(what, todo=todo, file=self.file, key=key or None, tier=tier or None)


def find_config(
    target: str | os.PathLike[str] | None = None, environ: Mapping[str, str] | None = None, site: Path = SITE_FILE
) -> Path | None:
    """The config file that counts: `target` if it is named *.toml, else, without a target, `STEPWELL_CONFIG`, else
    the site's file if there is one. None for any other target: that is a run's folder, which needs no config.

    Raises ConfigError if the file that target or STEPWELL_CONFIG name is not there.
    """
    if target is not None:
        path = Path(target).expanduser()
        if path.suffix != ".toml" or path.is_dir():
            return None
        if not path.is_file():
            raise ConfigError("there is no such config file", todo="Mend the path", file=str(path.absolute()))
        return path.absolute()
    named = (os.environ if environ is None else environ).get("STEPWELL_CONFIG", "")
    if named:
        path = Path(named).expanduser()
        if not path.is_file():
            todo = "Mend the variable, or unset it"
            raise ConfigError("STEPWELL_CONFIG names a config file that is not there", todo=todo, file=named)
        return path.absolute()
    return site if site.is_file() else None


def load_config(path: str | os.PathLike[str], environ: Mapping[str, str] | None = None) -> Config:
    """Reads and validates a config file. Raises ConfigError that names file, key, what is wrong and what is right."""
    file = os.path.abspath(path)
    raw = _read(file)
    mistakes = Mistakes(file, _names(raw.get("tier")))
    for key, what, todo in _wrong_keys(raw, FileSchema, ""):
        raise mistakes.error(key, what, todo)
    schema = _convert(raw, mistakes)
    environ = os.environ if environ is None else environ
    if schema.run is not None:
        try:
            check_run_name(schema.run)
        except ConfigError as error:
            raise mistakes.error("run", error.what, error.todo) from None
    tiers = [_placed(tier, f"tier[{i}]", mistakes, environ) for i, tier in enumerate(schema.tier)]
    for i, tier in enumerate(tiers):
        _check_tier(tier, raw["tier"][i], f"tier[{i}]", mistakes)
    _check_chain(tiers, mistakes)
    times = {name: getattr(schema, name) for name in ("max_unsaved", "block_timeout", "exit_timeout")}
    settings = {name: float(value) for name, value in times.items() if value is not None}
    return Config(file, schema.run, tuple(tiers), settings)


def _read(file: str) -> dict[str, Any]:
    try:
        data = Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the config file cannot be read: {error.strerror}", todo="Mend its path or permissions", file=file
        ) from error
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError("this is not a text file in UTF-8", todo="Give a TOML file", file=file) from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"this is not valid TOML: {error}", todo="Texts need quotes, tiers begin with [[tier]]", file=file
        ) from error


def _names(tiers: object) -> list[str]:
    names = [tier.get("name") if isinstance(tier, dict) else "" for tier in tiers] if isinstance(tiers, list) else []
    return [name if isinstance(name, str) else "" for name in names]


# -- unknown keys ------------------------------------------------------------------------


def _wrong_keys(raw: object, kind: type[msgspec.Struct], key: str) -> Iterator[tuple[str, str, str]]:
    """(dotted key, what is wrong, what to do) of each key that is not in the schema."""
    if not isinstance(raw, dict):
        return
    known = [field.name for field in msgspec.structs.fields(kind)]
    for name, value in raw.items():
        dotted = f"{key}.{name}" if key else name
        if name not in known:
            yield dotted, *_unknown(name, known, re.sub(r"\[\d+\]", "", dotted), key)
        elif name == "tier" and isinstance(value, list):
            for i, tier in enumerate(value):
                yield from _wrong_keys(tier, TierConfig, f"tier[{i}]")
        elif name == "retain":
            yield from _wrong_keys(value, Retain, dotted)
        elif name == "evict":
            yield from _wrong_keys(value, Evict, dotted)


def _unknown(name: str, known: list[str], plain: str, table: str) -> tuple[str, str]:
    meanwhile = LATER.get(plain) or LATER.get(name)
    if meanwhile is not None:
        return f"{name!r} is not built yet; it comes in a later version", meanwhile
    elsewhere = {f.name for f in msgspec.structs.fields(TierConfig if not table else FileSchema)} - {"tier"}
    if name in elsewhere and "." not in table:
        place = "inside a [[tier]]" if not table else "at the top of the file, before the first [[tier]]"
        return f"there is no key {name!r} here", f"It belongs {place}"
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f"there is no key {name!r}", f"Did you mean {near[0]!r}?"
    return f"there is no key {name!r}", f"There are {', '.join(known)}"


# -- types -------------------------------------------------------------------------------


def _capacity(value: object) -> Capacity:
    if isinstance(value, str) and "%" in value:
        return Capacity(fraction=parse_percent(value))
    return Capacity(size_bytes=parse_size(value))


_PARSERS: dict[type, Callable[[Any], Any]] = {
    Capacity: _capacity,
    Seconds: lambda value: Seconds(parse_duration(value)),
    BytesPerSecond: lambda value: BytesPerSecond(parse_rate(value)),
}

_WORDS = {"null": "", "array": "list", "object": "table", "str": "text", "int": "whole number", "bool": "true or false"}
_TYPE_TODO = {
    "tier": "Begin each tier with [[tier]], in double brackets",
    "tier.flush": 'Write flush = "all"; other rules are not built yet and come in a later version',
    "tier.evict": 'Write evict = "lru"; other policies are not built yet and come in a later version',
    "tier.evict.policy": 'Write policy = "lru"; others are not built yet and come in a later version',
    "tier.retain": "Write retain = { last = 3 }",
    "tier.retain.last": "Write how many checkpoints stay, such as last = 3",
    "tier.survives": 'Write "process", "reboot" or "node-loss"',
    "tier.shared": "Write shared = false",
}


def _in_toml(types: str) -> str:
    words = (_WORDS.get(word, word) for word in types.split(" | "))
    return " or ".join(word for word in words if word)


def _convert(raw: dict[str, Any], mistakes: Mistakes) -> FileSchema:
    def parse(kind: type, value: object) -> object:
        return _PARSERS[kind](value)

    try:
        return msgspec.convert(raw, FileSchema, dec_hook=parse)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        key = path.rstrip("`").lstrip(".")
        if isinstance(error.__cause__, ConfigError):
            raise mistakes.error(key, error.__cause__.what, error.__cause__.todo) from None
        missing = re.fullmatch(r"Object missing required field `(.*)`", text)
        if missing:
            name = f"{key}.{missing[1]}" if key else missing[1]
            todo = (
                'Begin a tier with [[tier]], name = "nvme", driver = "file"' if not key else f"Write {missing[1]} = …"
            )
            raise mistakes.error(name, f"{missing[1]!r} is missing", todo) from None
        what = re.sub(r"`([\w |]+)`", lambda m: _in_toml(m[1]), text)
        what = re.sub(r"Invalid enum value (.*)", r"\1 cannot be chosen", what).replace("Expected", "expected")
        todo = _TYPE_TODO.get(re.sub(r"\[\d+\]", "", key), "Write a text, in quotes")
        raise mistakes.error(key, what, todo) from None


# -- one tier ----------------------------------------------------------------------------


def _placed(tier: TierConfig, key: str, mistakes: Mistakes, environ: Mapping[str, str]) -> TierConfig:
    """The tier with its path made absolute."""
    if tier.path is None:
        return tier

    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        if not environ.get(name):
            what = f"the environment variable {name} is {'empty' if name in environ else 'not set'}"
            raise mistakes.error(f"{key}.path", what, f"Set it, or write the path out: {tier.path!r}")
        return environ[name]

    path = re.sub(r"\$(?:(\w+)|\{(\w+)\})", value, tier.path)
    if not path or "\0" in path or "$" in path:
        todo = "Write a folder, with variables as $NAME or ${NAME}"
        raise mistakes.error(f"{key}.path", f"{tier.path!r} is not a path", todo)
    home = os.path.expanduser(path)
    if home.startswith("~"):
        raise mistakes.error(f"{key}.path", f"there is no home folder for {path!r}", "Write the path out")
    whole = os.path.normpath(os.path.join(os.path.dirname(mistakes.file), home))
    return msgspec.structs.replace(tier, path=whole)


def _check_tier(tier: TierConfig, raw: Mapping[str, Any], key: str, mistakes: Mistakes) -> None:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", tier.name):
        todo = "Use letters, digits, '-' and '_'"
        raise mistakes.error(f"{key}.name", f"{tier.name!r} cannot name a tier", todo)
    if tier.retain is not None and tier.retain.last < 1:
        todo = "Keep at least 1; without retain, all stay"
        raise mistakes.error(f"{key}.retain.last", f"last = {tier.retain.last} keeps nothing", todo)
    if tier.capacity is not None and tier.capacity.fraction is not None and tier.driver != "host":
        todo = "Write a size such as '400GiB'"
        raise mistakes.error(f"{key}.capacity", "a percentage is of memory, so only for the host tier", todo)
    others = [point.name for point in entry_points(group=DRIVER_GROUP)]
    if tier.driver not in DRIVERS and tier.driver not in others:
        known = [*DRIVERS, *others]
        near = difflib.get_close_matches(tier.driver, known, 1)
        todo = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}"
        raise mistakes.error(f"{key}.driver", f"there is no driver {tier.driver!r}", todo)
    rules = DRIVERS.get(tier.driver, OTHER_DRIVER)
    for name in raw:
        if name not in rules.takes and name not in ("name", "driver"):
            who = ", ".join(other for other, theirs in DRIVERS.items() if name in theirs.takes)
            todo = f"Leave it out; drivers that take it: {who}"
            raise mistakes.error(f"{key}.{name}", f"the {tier.driver} driver has no {name!r}", todo)
    for name in sorted(rules.needs):
        if getattr(tier, name) is None:
            todo = f'Write {name} = "/local/$USER"'
            raise mistakes.error(f"{key}.{name}", f"the {tier.driver} driver needs a {name}", todo)
    if tier.survives is not None and tier.survives not in rules.survives:
        todo = f"Leave it out; it is {min(rules.survives)!r}"
        raise mistakes.error(f"{key}.survives", f"a {tier.driver} tier does not survive {tier.survives!r}", todo)
    if tier.shared:
        raise mistakes.error(
            f"{key}.shared", "shared host memory is not built yet; it comes in a later version", "Write shared = false"
        )


# -- all tiers together ------------------------------------------------------------------


def _check_chain(tiers: list[TierConfig], mistakes: Mistakes) -> None:
    for i, tier in enumerate(tiers):
        for other in tiers[:i]:
            if tier.name == other.name:
                raise mistakes.error(f"tier[{i}].name", f"two tiers are named {tier.name!r}", "Give each its own name")
            if tier.path is not None and tier.path == other.path:
                what = f"tiers {other.name!r} and {tier.name!r} are the same folder, {tier.path}"
                raise mistakes.error(f"tier[{i}].path", what, "Give each a folder of its own")
        if tier.driver == "host" and i:
            raise mistakes.error(f"tier[{i}]", "the host tier is not the nearest", "Move it up, before the others")
    if not any(tier.driver != "host" for tier in tiers):
        todo = 'Add a [[tier]] with driver = "file" and a path'
        raise mistakes.error("tier", "there is no storage tier: nothing would outlive the process", todo)
    scopes = [DRIVERS.get(tier.driver, OTHER_DRIVER).scope for tier in tiers]
    check_order([tier.name for tier in tiers], scopes, mistakes)


def check_order(names: Sequence[str], scopes: Sequence[Scope | None], mistakes: Mistakes) -> None:
    """Raises ConfigError for a node's tier below a shared one: what is flushed goes down, away from the node."""
    for i, (name, scope) in enumerate(zip(names, scopes, strict=True)):
        if scope in ("process", "node") and "shared" in scopes[:i]:
            above = names[scopes.index("shared")]
            what = f"tier {name!r} is of one node, but comes after {above!r}, which all nodes share"
            raise mistakes.error(f"tier[{i}]", what, f"Move {name!r} up, before {above!r}: nearest first")
