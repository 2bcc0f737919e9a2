"""What is made of the schema: the reference page and the JSON Schema; and that both tell what the loader takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.config import load_config
from stepwell.errors import ConfigError
from stepwell.reference import INNER, find_key, how_to_write, in_toml, json_schema, keys_of, renewed
from stepwell.schema import FileSchema, TierConfig

PAGE = Path(__file__).parents[2] / "docs" / "config.md"
STORAGE = '[[tier]]\nname = "m"\ndriver = "memory"\n'


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == renewed(PAGE.read_text()), "run: python -m stepwell.reference docs/config.md"


def test_the_page_names_every_key_once_a_table() -> None:
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |<!--|\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    tables = {
        "The top of the file": FileSchema,
        "A tier": TierConfig,
        **{k: v for k, v in INNER.items() if k != "tier"},
    }
    assert set(sections) == set(tables)
    for title, table in tables.items():
        assert re.findall(r"^\| `(\w+)` \|", sections[title], re.MULTILINE) == list(keys_of(table)), title


def test_the_page_keeps_what_was_written_by_hand() -> None:
    stale = renewed("by hand\n" + PAGE.read_text().replace("| `every_steps` |", "| `gone` |") + "and below\n")
    assert stale == "by hand\n" + PAGE.read_text() + "and below\n"


# -- the JSON Schema ---------------------------------------------------------------------


def parts(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from parts(each)


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is valid: as far as our schema goes, and no further."""
    whole = json_schema()
    if "$ref" in schema:
        return fits(value, whole["$defs"][schema["$ref"].rpartition("/")[2]])
    if "anyOf" in schema:
        return any(fits(value, each) for each in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    kinds: dict[str, Any] = {
        "string": str,
        "integer": int,
        "number": (int, float),
        "boolean": bool,
        "array": list,
        "object": dict,
    }
    if isinstance(value, bool) != (schema["type"] == "boolean") or not isinstance(value, kinds[schema["type"]]):
        return False
    if isinstance(value, list):
        return all(fits(each, schema["items"]) for each in value)
    if isinstance(value, dict):
        known, more = schema["properties"], schema["additionalProperties"]
        inside = all(fits(each, known[name]) if name in known else more for name, each in value.items())
        return inside and set(schema["required"]) <= set(value)
    return not isinstance(value, int | float) or (
        value >= schema.get("minimum", value) and (value > schema.get("exclusiveMinimum", value - 1))
    )


def test_every_key_is_described_and_nothing_is_null() -> None:
    schema = json_schema()
    for each in parts(schema):
        assert "null" not in (each.get("type"), each.get("default", 0))
        assert "keywords" not in each.get("properties", {})
        for name, described in each.get("properties", {}).items():
            if isinstance(described, dict) and name not in ("properties",):
                assert described.get("description"), name
    assert set(schema["$defs"]) == {"FileSchema", *(table.__name__ for table in INNER.values())}


#: (a value of a key, whether it is right)
TRIED: list[tuple[str, Any, bool]] = [
    ("flush", "all", True), ("flush", "idle", False), ("flush", {}, True), ("flush", [], True), ("flush", 3, False),
    ("flush", [{"every_steps": 100, "parts": ["model"]}, {"every": "10min", "when": "idle"}], True),
    ("flush", {"every_steps": 0}, False), ("flush", {"every_step": 5}, False), ("flush", {"every_steps": True}, False),
    ("flush", {"policy": "theirs", "day": 3}, True), ("flush", {"policy": 3}, False),
    ("retain", {"last": 3, "tagged": True}, True), ("retain", {"tagged": ["x"], "newer_than": "7d"}, True),
    ("retain", {"best": {"metric": "l", "mode": "min", "count": 1}}, True), ("retain", {"policy": "p", "a": 1}, True),
    ("retain", {"best": [{"metric": "l", "mode": "min", "count": 1}]}, True), ("retain", {"last": "3"}, False),
    ("retain", {"best": {"metric": "l", "mode": "most", "count": 1}}, False), ("retain", {"best": {}}, False),
    ("delete_grace", 0, True), ("delete_grace", "30min", True), ("delete_grace", -1, False),
    ("timeout", 0, False), ("timeout", 1.5, True), ("bandwidth", "20GB/s", True), ("bandwidth", 0, False),
    ("capacity", "25%", True), ("capacity", 1.5, False), ("verify_after_flush", "digest", True),
    ("verify_after_flush", "sha", False), ("survives", "node-loss", True), ("evict", {"policy": "lru"}, True),
    ("evict", "s3-fifo", True), ("evict", "fifo", False), ("evict", {"policy": "theirs", "a": 1}, True),
    ("evict", {"a": 1}, False), ("shared", False, True), ("shared", "no", False), ("xyzzy", 1, False),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "right"), TRIED, ids=lambda value: in_toml(value)[:40])
def test_the_schema_takes_what_is_right_of_a_tier(key: str, value: Any, right: bool) -> None:
    file = {"tier": [{"name": "a", "driver": "memory"}, {"name": "b", "driver": "pfs", key: value}]}
    assert fits(file, json_schema()) is right


def test_the_schema_takes_what_is_right_at_the_top() -> None:
    tier = [{"name": "a", "driver": "memory"}]
    assert fits(
        {"tier": tier, "on_pressure": "skip", "max_unsaved": "1h", "exit_timeout": 9, "run": "r"}, json_schema()
    )
    wrong: list[dict[str, Any]] = [{}, {"tier": {}}, {"tier": [{"name": "a"}]}, {"tier": tier, "on_pressure": "drop"}]
    assert not any(fits(each, json_schema()) for each in wrong)


# -- remedies ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1, "b": [True, "x"]}, '{ a = 1, b = [true, "x"] }'),
        ({}, "{}"),
        ('say "hi"\n', '"say \\"hi\\"\\n"'),
        (1.5, "1.5"),
    ],
)
def test_toml_as_people_write_it(value: Any, text: str) -> None:
    assert in_toml(value) == text


def test_a_remedy_for_every_key_and_only_for_keys() -> None:
    assert find_key("tier[3].retain.best[0].mode") is keys_of(INNER["best"])["mode"]
    assert find_key("tier.nope") is None and how_to_write("nope.tier") == ""
    for table, at in [(FileSchema, ""), *((table, f"{name}.") for name, table in INNER.items())]:
        for name in keys_of(table):
            where = {"best.": "tier.retain.best.", "": "", "tier.": "tier."}.get(at, f"tier.{at}")
            assert how_to_write(where + name).startswith(f"Write {name} = "), name


@pytest.mark.parametrize("name", ["flush", "retain", "verify_after_flush", "delete_grace", "capacity"])
def test_what_a_remedy_says_is_right(name: str, tmp_path: Path) -> None:
    """Each 'name = value' of the remedy, put into a file, is accepted."""
    file = tmp_path / "c.toml"
    key = keys_of(TierConfig)[name]
    for value in [*key.choices, *key.examples]:
        assert in_toml(value) in how_to_write(f"tier.{name}")
        file.write_text(STORAGE + STORAGE.replace('"m"', '"n"') + f"{name} = {in_toml(value)}\n")
        assert getattr(load_config(file, {}).tiers[1], name) is not None
    file.write_text(STORAGE + STORAGE.replace('"m"', '"n"') + f"{name} = [[]]\n")
    with pytest.raises(ConfigError) as caught:
        load_config(file, {})
    assert caught.value.todo.startswith("Write ")
