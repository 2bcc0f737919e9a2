"""The config file: where it is found, how it is read, and what is wrong with it.

`load_config` gives pure data and touches nothing but the file. Driver and policy objects are made of it by
`stepwell.building`; what can be written is in `stepwell.schema`.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import msgspec

from stepwell.checking import Mistakes, check_chain, check_tier, nearest
from stepwell.errors import ConfigError
from stepwell.format.names import check_run_name
from stepwell.reference import INNER, how_to_write, keys_of
from stepwell.schema import (
    SETTINGS,
    BytesPerSecond,
    Capacity,
    Eviction,
    EvictTable,
    FileSchema,
    FlushRule,
    Grace,
    PrefetchRule,
    RetainTable,
    Seconds,
    TierConfig,
)
from stepwell.units import parse_duration, parse_percent, parse_rate, parse_size

SITE_FILE = Path("/etc/stepwell.toml")


@dataclass(frozen=True, slots=True)
class Config:
    """A config file, validated: paths are absolute, sizes are bytes, times are seconds."""

    file: str
    run: str | None
    tiers: tuple[TierConfig, ...]  # nearest first
    settings: dict[str, float | str]  # those that it sets, by the names of `stepwell.settings.Settings`
    written: Mapping[str, Any] = field(default_factory=dict)  # the file as it was read, before anything was replaced


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
    schema = _convert(_gathered(raw), mistakes)
    environ = os.environ if environ is None else environ
    if schema.run is not None:
        try:
            check_run_name(schema.run)
        except ConfigError as error:
            raise mistakes.error("run", error.what, error.todo) from None
    tiers = [_placed(tier, f"tier[{i}]", mistakes, environ) for i, tier in enumerate(schema.tier)]
    for i, tier in enumerate(tiers):
        check_tier(tier, raw["tier"][i], f"tier[{i}]", mistakes)
    check_chain(tiers, mistakes)
    set_here = {name: value for name in SETTINGS if (value := getattr(schema, name)) is not None}
    settings = {name: value if isinstance(value, str) else float(value) for name, value in set_here.items()}
    return Config(file, schema.run, tuple(tiers), settings, raw)


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


def _wrong_keys(raw: object, table: type[msgspec.Struct], key: str) -> Iterator[tuple[str, str, str]]:
    """(dotted key, what is wrong, what to do) of each key that is not in the schema."""
    if not isinstance(raw, dict) or _is_others(raw, table):
        return
    known = list(keys_of(table))
    for name, value in raw.items():
        dotted = f"{key}.{name}" if key else name
        if name not in known:
            yield dotted, f"there is no key {name!r}", _where(name, table) or nearest(name, known)
        elif name in INNER and isinstance(value, list):
            for i, each in enumerate(value):
                yield from _wrong_keys(each, INNER[name], f"{dotted}[{i}]")
        elif name in INNER:
            yield from _wrong_keys(value, INNER[name], dotted)


def _where(name: str, table: type[msgspec.Struct]) -> str:
    """Where a key belongs that is written in the wrong place; empty: nowhere."""
    if table is FileSchema and name in keys_of(TierConfig):
        return "It belongs inside a [[tier]]"
    if table is TierConfig and name in keys_of(FileSchema):
        return "It belongs at the top of the file, before the first [[tier]]"
    if table is TierConfig and name in keys_of(RetainTable):
        flush = f"flush = {{ {name} = … }} or " if name in keys_of(FlushRule) else ""
        return f"It belongs inside {flush}retain = {{ {name} = … }}"
    if table is TierConfig and name in keys_of(FlushRule):
        return f"It belongs inside a rule, flush = {{ {name} = … }}"
    return ""


def _is_others(raw: Mapping[str, Any], table: type[msgspec.Struct]) -> bool:
    """Whether a rule is another package's: all its keys but `policy` are then that package's."""
    policy = raw.get("policy")
    return isinstance(policy, str) and (
        table in (FlushRule, PrefetchRule, RetainTable) or table is EvictTable and policy not in get_args(Eviction)
    )


def _gathered(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The file with the keys of other packages' rules gathered in one, as the schema has them."""

    def rule(value: Any, table: type[msgspec.Struct]) -> Any:
        if isinstance(value, list):
            return [rule(each, table) for each in value]
        if not isinstance(value, dict) or not _is_others(value, table):
            return value
        return {"policy": value["policy"], "keywords": {k: v for k, v in value.items() if k != "policy"}}

    def tier(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        rules = {
            name: rule(value[name], INNER[name]) for name in ("flush", "retain", "evict", "prefetch") if name in value
        }
        return {**value, **rules}

    tiers = raw.get("tier")
    return {**raw, "tier": [tier(each) for each in tiers]} if isinstance(tiers, list) else dict(raw)


# -- types -------------------------------------------------------------------------------


def _capacity(value: object) -> Capacity:
    if isinstance(value, str) and "%" in value:
        return Capacity(fraction=parse_percent(value))
    return Capacity(size_bytes=parse_size(value))


_PARSERS: dict[type, Callable[[Any], Any]] = {
    Capacity: _capacity,
    Seconds: lambda value: Seconds(parse_duration(value)),
    Grace: lambda value: Grace(parse_duration(value, or_zero=True)),
    BytesPerSecond: lambda value: BytesPerSecond(parse_rate(value)),
}

_WORDS = {"null": "", "array": "list", "object": "table", "str": "text", "int": "whole number", "bool": "true or false"}
#: where the schema's examples and choices do not say it all
_TYPE_TODO = {
    "tier": "Begin each tier with [[tier]], in double brackets",
    "tier.retain.tagged": 'Write tagged = ["release"], or tagged = true for any tag',
}


def _type_words(types: str) -> str:
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
            todo = how_to_write(name) if key else 'Begin a tier with [[tier]], name = "nvme", driver = "file"'
            raise mistakes.error(name, f"{missing[1]!r} is missing", todo) from None
        what = re.sub(r"`([\w |]+)`", lambda m: _type_words(m[1]), text)
        what = re.sub(r"Invalid enum value (.*)", r"\1 cannot be chosen", what).replace("Expected", "expected")
        plain = re.sub(r"\[\d+\]", "", key)
        raise mistakes.error(key, what, _TYPE_TODO.get(plain) or how_to_write(plain)) from None


# -- paths -------------------------------------------------------------------------------


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
