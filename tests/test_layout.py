"""The rules of the source tree that matter are run here, not reviewed: who may import whom, how the folders map to
packages, how long a file may be, and that what is exported is what is documented."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LINES_MAX = 450  # one thing a file; a longer one is two things

#: folder -> what it may import of the project, besides itself. stepwell/ may import all of it.
MAY_IMPORT = {
    "native": (),
    "tiers": ("stepwell.native", "stepwell.errors"),
    "policies": ("stepwell.tiers.base", "stepwell.errors"),  # chunk and catalog view types, and no I/O
}
PACKAGE_FOLDERS = ("stepwell", *MAY_IMPORT)
SOURCE_FOLDERS = (*PACKAGE_FOLDERS, "tests", "benchmarks", "examples")


def python_files(folder: str) -> list[Path]:
    """The .py files of a top-level folder; links (stepwell/tiers and so on) are not followed."""
    return [path for path in sorted((ROOT / folder).rglob("*.py")) if not _behind_link(path)]


def _behind_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent != ROOT and ROOT in parent.parents)


def project_imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import of the project's own modules, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_bytes(), str(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "stepwell")


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_downward_only(folder: str) -> None:
    allowed = (f"stepwell.{folder}", *MAY_IMPORT[folder])
    upward = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in python_files(folder)
        for line, name in project_imports(path)
        if not any(within(name, package) for package in allowed)
    ]
    assert not upward, f"{folder}/ may import only {allowed} of the project"


@pytest.mark.parametrize("folder", PACKAGE_FOLDERS)
def test_product_code_does_not_import_tests_examples_or_benchmarks(folder: str) -> None:
    outside = {"tests", "benchmarks", "examples", "tiers", "policies", "native"}
    for path in python_files(folder):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found = outside & {name.split(".")[0] for name in names}
            assert not found, f"{path.relative_to(ROOT)} imports {found}"


@pytest.mark.parametrize("folder", SOURCE_FOLDERS)
def test_imports_are_absolute(folder: str) -> None:
    relative = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files(folder)
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative


def test_package_dir_and_links_say_the_same() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = settings["package-dir"]
    assert set(folders) == {f"stepwell.{name}" for name in MAY_IMPORT}
    for package, folder in folders.items():
        link = ROOT / package.replace(".", "/")
        if not link.is_symlink():
            pytest.skip("no links here: an unpacked source distribution")
        assert link.resolve() == ROOT / folder
        assert not Path(link.readlink()).is_absolute()


def test_every_package_is_listed_for_the_wheel() -> None:
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    found = set()
    for folder in PACKAGE_FOLDERS:
        for path in python_files(folder):
            parts = path.parent.relative_to(ROOT).parts
            found.add(".".join(parts if parts[0] == "stepwell" else ("stepwell", *parts)))
    assert found == listed


def test_files_are_one_thing_each() -> None:
    files = [path for folder in SOURCE_FOLDERS for path in python_files(folder)]
    files += [path for pattern in ("*.c", "*.h") for path in (ROOT / "native").rglob(pattern)]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert len(lengths) > 10  # the walk found the tree
    assert {path: length for path, length in lengths.items() if length > LINES_MAX} == {}


def test_what_is_exported_is_what_is_documented() -> None:
    import stepwell

    page = (ROOT / "docs" / "api.md").read_text()
    documented = set(re.findall(r"`stepwell\.(\w+)", page))
    missing = set(stepwell.__all__) - documented
    assert not missing, "in stepwell.__all__, but not in docs/api.md"
    unknown = {name for name in documented if not hasattr(stepwell, name)}
    assert not unknown, "in docs/api.md, but not in stepwell"
