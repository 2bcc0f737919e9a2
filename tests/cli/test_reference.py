"""docs/cli.md against the command: every command, option and JSON key is there, and nothing else is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from stepwell.cli import app
from tests.cli.helpers import Cli, flip, folder_of

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
GROUP: Any = typer.main.get_command(app)
#: by what is typed: `ls`, `config check`
COMMANDS: dict[str, Any] = {
    f"{name} {inner}" if inner else name: made
    for name, command in GROUP.commands.items()
    for inner, made in getattr(command, "commands", {"": command}).items()
}
SECTIONS: dict[str, str] = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
SHARED = SECTIONS["What all commands share"]
#: findings of `doctor` about a path that is not there, or cannot be used
RARE = {"exists", "usable"}


def section(command: str) -> str:
    return SECTIONS[f"stepwell {command}"]


def options(command: Any) -> set[str]:
    return {option for each in command.params for option in each.opts if option.startswith("-")} | {"--help", "-h"}


def keys(document: Any) -> Iterator[str]:
    """The keys of a document and of the documents in its lists; not those of maps, which are the user's names."""
    if isinstance(document, dict):
        yield from document
        for value in document.values():
            if isinstance(value, list):
                for each in value:
                    yield from keys(each)


def in_tables(text: str) -> set[str]:
    """What the first columns of a section's tables name."""
    first = re.findall(r"^\| (`[^|]+) \|", text, re.MULTILINE)
    return {name for cell in first for name in re.findall(r"`([a-z_0-9]+)`", cell)}


def marked(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_0-9]+)`", text))


def test_every_command_has_a_section_and_every_section_a_command() -> None:
    assert list(SECTIONS) == ["What all commands share", *(f"stepwell {name}" for name in COMMANDS)]
    assert all(f"[`stepwell {name}`](#stepwell-{name.replace(' ', '-')})" in PAGE for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_argument_and_option_is_there(name: str) -> None:
    command = COMMANDS[name]
    for argument in (each for each in command.params if not each.opts[0].startswith("-")):
        assert f"`{argument.metavar}`" in section(name), argument.metavar
    shared = {"--json", "--help", "-h"}
    missing = {o for o in options(command) if f"`{o}`" not in (SHARED if o in shared else section(name))}
    assert not missing, f"options of stepwell {name} that docs/cli.md does not name"


def test_the_options_before_the_command_are_there() -> None:
    assert {option for option in options(GROUP) if f"`{option}`" not in SHARED} == set()


def test_no_option_is_there_that_does_not_exist() -> None:
    named = {(name, o) for name in COMMANDS for o in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", section(name))}
    unknown = {(name, o) for name, o in named if o not in options(COMMANDS[name])}
    assert unknown == set()


def test_every_key_is_there_and_no_other(cli: Cli, run: Path, plain: Path, tmp_path: Path) -> None:
    broken = folder_of(run, 3)
    (run / "step-000000009.1-9").mkdir()
    said = {
        "show": [cli("show", run, "--tensors", "--json"), cli("show", plain, "--tensors", "--json")],
        "cp": [cli("cp", f"{run}@1", tmp_path / "copy", "--json")],
        "rm": [cli("rm", f"{run}@1", "--dry-run", "--json")],
    }
    flip(folder_of(run, 2) / "model.safetensors", 1 << 20)
    said["verify"] = [cli("verify", run, tmp_path / "nothing", "--json")]
    (broken / "manifest.json").write_text("{}")
    said["ls"] = [cli("ls", run, run.parent, "--json")]
    for command, answers in said.items():
        found = {key for answer in answers for key in keys(answer.json)}
        tables = in_tables(section(command))
        assert found - marked(section(command)) == set(), f"keys of stepwell {command} that docs/cli.md does not name"
        assert tables - found == set(), f"keys that docs/cli.md names and stepwell {command} does not give"
        top = {key for answer in answers for key in answer.json}
        also = marked(section("ls")) if command == "show" else set()  # a checkpoint is what `ls` lists
        assert top - tables - also == set(), f"top-level keys of stepwell {command} that no table names"


def test_every_finding_of_doctor_is_there_and_no_other(cli: Cli, tmp_path: Path) -> None:
    document = cli("doctor", tmp_path, "--json").json
    findings = {**document["machine"], **document["paths"][str(tmp_path)]}
    fields = {field for finding in findings.values() for field in finding}
    assert in_tables(section("doctor")) == {*document, *findings, *fields, *RARE}
    nothing = cli("doctor", tmp_path / "nothing", "--json").json["paths"][str(tmp_path / "nothing")]
    assert set(nothing) < RARE


def test_every_key_of_config_check_is_there_and_no_other(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(f'[[tier]]\nname = "d"\ndriver = "file"\npath = "{tmp_path}"\ncapacity = "1MB"\n')
    document = cli("config", "check", file, "--json").json
    findings = {key for each in document["paths"].values() for key in each}
    told = {*keys(document), *(findings - in_tables(section("doctor")))}
    assert in_tables(section("config check")) == told


def test_the_document_of_an_error_is_there(cli: Cli, tmp_path: Path) -> None:
    document = cli("show", tmp_path / "nothing", "--json").json
    assert {*document, *document["error"]} <= marked(SHARED)
