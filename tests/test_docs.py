"""The documentation against the tree: links lead somewhere, modules are all named, examples can be parsed."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from stepwell.listing import find_here

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PACKAGES = ("stepwell", "stepwell/state", "stepwell/format", "policies", "tiers", "native")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names by which headings are linked to."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def sources(package: str) -> set[str]:
    """Names of a package's modules and C files, without `__init__.py`; the command line belongs to stepwell/."""
    folders = [ROOT / package, *([ROOT / "stepwell" / "cli"] if package == "stepwell" else [])]
    found = {path.name for folder in folders for ending in ("py", "c", "h") for path in folder.glob(f"*.{ending}")}
    return found - {"__init__.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_can_be_parsed(page: Path) -> None:
    for language, text in _BLOCK.findall(page.read_text()):
        if language == "python":
            ast.parse(text)
        elif language == "toml":
            tomllib.loads(text)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_architecture_names_every_module(package: str) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    tables = re.split(r"^\*\*`", page[page.index("## The modules") : page.index("## A save")], flags=re.MULTILINE)
    own = "".join(table for table in tables if table.startswith(f"{package}/`"))
    named = set(re.findall(r"`(\w+\.(?:py|c|h))`", own))
    assert sources(package) - named == set(), f"modules of {package}/ that docs/architecture.md does not name"
    assert named - sources(package) == set(), f"modules that docs/architecture.md names and {package}/ does not have"


def test_the_first_example_of_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(text for language, text in _BLOCK.findall((ROOT / "README.md").read_text()) if language == "python")
    monkeypatch.chdir(tmp_path)
    code = compile(first, "README.md", "exec")
    for _ in range(2):
        exec(code, {"__name__": "example"})
    [found] = find_here(tmp_path)
    assert (found.checkpoints, found.newest_step) == (20, 20)
