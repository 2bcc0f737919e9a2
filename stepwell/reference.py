"""What the schema of the config file says, told to others: editors, the reference page, messages.

`python -m stepwell.reference docs/config.md` makes the tables of that page anew.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

from stepwell.schema import (
    DRIVERS,
    BestRule,
    BytesPerSecond,
    Capacity,
    EvictTable,
    FileSchema,
    FlushRule,
    Grace,
    PrefetchRule,
    RetainTable,
    Seconds,
    TierConfig,
)

#: keys whose value is a table, or a list of tables, of their own
INNER: dict[str, type[Struct]] = {
    "tier": TierConfig, "evict": EvictTable, "prefetch": PrefetchRule, "flush": FlushRule, "retain": RetainTable,
    "best": BestRule,
}  # fmt: skip
#: fields that are no keys
HIDDEN = frozenset({"keywords"})

_QUANTITIES: dict[Any, tuple[str, dict[str, Any]]] = {
    Seconds: ("a duration", {"anyOf": [{"type": "string"}, {"type": "number", "exclusiveMinimum": 0}]}),
    Grace: ("a duration or 0", {"anyOf": [{"type": "string"}, {"type": "number", "minimum": 0}]}),
    BytesPerSecond: ("a rate", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}),
    Capacity: ("a size", {"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 1}]}),
}
_PLAIN: dict[Any, str] = {str: "a text", int: "a whole number", bool: "`true` or `false`"}

_BEGIN = "<!-- made from the schema by `python -m stepwell.reference docs/config.md` -->"
_END = "<!-- end of what is made from the schema -->"


@dataclass(frozen=True, slots=True)
class Key:
    """One key of a table."""

    name: str
    kinds: tuple[Any, ...]  # the types that its value may have
    choices: tuple[str, ...]  # the texts that it may be, where those are fixed
    text: str  # what it means, in Markdown
    examples: tuple[Any, ...]
    default: Any  # None: it has none, or its description tells


@cache
def keys_of(table: type[Struct]) -> dict[str, Key]:
    """The keys of a table, by name, in the schema's order."""
    hints = get_type_hints(table, include_extras=True)
    shown = [field for field in msgspec.structs.fields(table) if field.name not in HIDDEN]
    return {field.name: _key(field, hints[field.name]) for field in shown}


def _key(field: msgspec.structs.FieldInfo, hint: Any) -> Key:
    assert get_origin(hint) is Annotated
    of, meta = get_args(hint)
    assert isinstance(meta, Meta)
    kinds = tuple(kind for kind in (get_args(of) if _is_union(of) else (of,)) if kind is not type(None))
    choices = tuple(choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind))
    default = None if field.default is msgspec.NODEFAULT else field.default
    return Key(field.name, kinds, choices, meta.description or "", tuple(meta.examples or ()), default)


def _is_union(of: Any) -> bool:
    return bool(get_args(of)) and get_origin(of) not in (Literal, list)


def find_key(dotted: str) -> Key | None:
    """The key of a path such as tier[2].retain.last; None: there is none."""
    table: type[Struct] = FileSchema
    found = None
    for name in re.sub(r"\[\d+\]", "", dotted).split("."):
        found = keys_of(table).get(name)
        if found is None:
            return None
        table = INNER.get(name, table)
    return found


def in_toml(value: Any) -> str:
    """A value as one writes it in the file."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {in_toml(each)}" for key, each in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(in_toml(each) for each in value) + "]"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def how_to_write(dotted: str) -> str:
    """What would be right for a key: an order such as 'Write last = 3'. Empty if there is no such key."""
    key = find_key(dotted)
    if key is None:
        return ""
    choices = " or ".join(in_toml(choice) for choice in key.choices)
    examples = " or ".join(f"{key.name} = {in_toml(example)}" for example in key.examples)
    if choices:
        return f"Write {key.name} = {choices}" + (f", or {examples}" if examples else "")
    return f"Write {examples or f'{key.name} = …'}"


# -- for editors -------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """The JSON Schema of a config file."""
    made = _without_null(msgspec.json.schema(FileSchema, schema_hook=lambda kind: dict(_QUANTITIES[kind][1])))
    for table in INNER.values():
        definition = made["$defs"][table.__name__]
        for hidden in HIDDEN & set(definition["properties"]):
            del definition["properties"][hidden]
        if table is EvictTable:
            definition["additionalProperties"] = True  # of another package's policy
        elif "policy" in definition["properties"]:
            policy = definition["properties"].pop("policy")
            other = {
                "type": "object", "properties": {"policy": policy}, "required": ["policy"],
                "additionalProperties": True, "title": f"{table.__name__} of another package",
            }  # fmt: skip
            made["$defs"][table.__name__] = {"anyOf": [definition, other]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "stepwell's config file"}
    return {**head, **made}


def _without_null(value: Any) -> Any:
    """TOML has no null: a key that is not set is left out."""
    if isinstance(value, list):
        return [_without_null(each) for each in value if each != {"type": "null"}]
    if not isinstance(value, dict):
        return value
    kept = {name: _without_null(each) for name, each in value.items() if not (name == "default" and each is None)}
    if len(kept.get("anyOf", ())) == 1:
        return {**kept.pop("anyOf")[0], **kept}
    if isinstance(kept.get("enum"), list) and None in kept["enum"]:
        kept["enum"] = [each for each in kept["enum"] if each is not None]
    return kept


# -- for the reference page --------------------------------------------------------------


def tables() -> str:
    """The tables of docs/config.md."""
    sections: list[tuple[str, str, type[Struct]]] = [
        ("## The top of the file", "Before the first tier:", FileSchema),
        ("## A tier", "In each `[[tier]]`:", TierConfig),
        ("## flush", "In a rule of `flush`:", FlushRule),
        ("## retain", "In `retain`, at least one of:", RetainTable),
        ("## best", "In `best`, all of:", BestRule),
        ("## evict", "In `evict`, where it is a table:", EvictTable),
        ("## prefetch", "In `prefetch`, where it is a table:", PrefetchRule),
    ]
    return "\n\n".join(f"{head}\n\n{text}\n\n{_table(table)}" for head, text, table in sections)


def _table(table: type[Struct]) -> str:
    takers = table is TierConfig
    head = ["key", "for", "value", "meaning"] if takers else ["key", "value", "meaning"]
    rows = [head, ["---"] * len(head)]
    for key in keys_of(table).values():
        cells = [f"`{key.name}`", _takers(key.name), _value(key), key.text]
        rows.append(cells if takers else [cells[0], *cells[2:]])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _takers(name: str) -> str:
    if name in ("name", "driver"):
        return "all"
    who = [driver for driver, rules in DRIVERS.items() if name in rules.takes]
    return "all" if len(who) == len(DRIVERS) else ", ".join(who)


def _value(key: Key) -> str:
    kinds = list(_kinds(key))
    words = ", ".join(kinds[:-1]) + (" or " if kinds[:-1] else "") + kinds[-1]
    if key.default is not None:
        words += f" (default `{in_toml(key.default)}`)"
    return words + "".join(f", such as `{in_toml(each)}`" for each in key.examples if each != key.default)


def _kinds(key: Key) -> Iterator[str]:
    for kind in key.kinds:
        if get_origin(kind) is Literal:
            yield ", ".join(f"`{in_toml(choice)}`" for choice in get_args(kind))
        elif get_origin(kind) is list:
            [of] = get_args(kind)
            yield "a list of texts" if of is str else "a list of tables"
        elif kind in _QUANTITIES:
            yield _QUANTITIES[kind][0]
        else:
            yield _PLAIN.get(kind, "a table")


def renewed(page: str) -> str:
    """The page with the tables between its two marks made anew."""
    head, _, rest = page.partition(_BEGIN)
    _, found, tail = rest.partition(_END)
    assert found, f"the page has no lines {_BEGIN!r} and {_END!r}"
    return f"{head}{_BEGIN}\n\n{tables()}\n\n{_END}{tail}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(renewed(Path(name).read_text()))
