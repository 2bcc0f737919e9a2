"""What is shipped: the wheel, that it runs on newer Pythons than it was built on, and what importing costs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORT_LIMIT_S = 0.3
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "stepwell", "tiers", "policies", "native")
COMMAND_TIMEOUT_S = 100

# loads the native package without `stepwell/__init__.py`, which needs torch
NATIVE_ALONE = """
import importlib.util, sys, types
place = importlib.util.find_spec("stepwell").submodule_search_locations
package = types.ModuleType("stepwell")
package.__path__ = list(place)
sys.modules["stepwell"] = package
from stepwell.native import crc32c
print(sys.version_info[:2], hex(crc32c(b"123456789")))
"""


def run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    words = [str(part) for part in command]
    return subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources so that nothing is left behind here."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    home = tmp_path_factory.mktemp("wheel")
    source = home / "source"
    source.mkdir()
    for name in SOURCES:
        path = ROOT / name
        if path.is_dir():
            ignore = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
            shutil.copytree(path, source / name, symlinks=True, ignore=ignore)
        else:
            shutil.copy(path, source / name)
    out = home / "out"
    done = run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", out, source)
    assert done.returncode == 0, done.stdout + done.stderr
    [built] = out.iterdir()
    return built


@pytest.mark.slow
def test_the_wheel_is_for_every_python_from_3_11(wheel: Path) -> None:
    assert re.fullmatch(r"stepwell-[\d.]+-cp311-abi3-linux_\w+\.whl", wheel.name)


@pytest.mark.slow
def test_the_wheel_holds_the_packages_and_no_c(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"stepwell/py.typed", "stepwell/native/_engine.abi3.so"} <= names
    assert not [name for name in names if name.endswith((".c", ".h", ".txt")) and ".dist-info/" not in name]
    for folder, package in (("stepwell", "stepwell"), ("tiers", "stepwell/tiers"), ("native", "stepwell/native")):
        for path in (ROOT / folder).glob("*.py"):
            assert f"{package}/{path.name}" in names or path.name == "build_ffi.py"
    assert any(name.endswith("LICENSE") for name in names)
    assert not [name for name in names if name.split("/")[0] in ("tests", "tiers", "native", "policies", "benchmarks")]


def find_python(version: str) -> str | None:
    """A working interpreter of this version, on PATH or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for candidate in (f"python{version}", *sorted(map(str, pyenv.glob(f"{version}.*/bin/python{version}")))):
        if shutil.which(candidate) and run(candidate, "-c", "import ensurepip, venv").returncode == 0:
            return candidate
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_native_module_built_here_runs_on_newer_pythons(wheel: Path, tmp_path: Path, version: str) -> None:
    python = find_python(version)
    if python is None:
        pytest.skip(f"no Python {version} here")
    if sys.version_info >= tuple(map(int, version.split("."))):
        pytest.skip(f"the wheel was built on Python {sys.version_info[0]}.{sys.version_info[1]}")
    assert run(python, "-m", "venv", tmp_path / "venv").returncode == 0
    other = tmp_path / "venv" / "bin" / "python"
    fetched = run(other, "-m", "pip", "install", "-q", "numpy", "cffi")
    if fetched.returncode != 0:
        pytest.skip(f"pip cannot install numpy and cffi for Python {version}: {fetched.stderr[-200:]}")
    installed = run(other, "-m", "pip", "install", "-q", "--no-deps", wheel)
    assert installed.returncode == 0, installed.stderr
    done = run(other, "-W", "error", "-c", NATIVE_ALONE, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("(")[1] == f"{version.replace('.', ', ')}) 0xe3069283\n"  # the check value of CRC-32C


@pytest.mark.slow
def test_importing_adds_little_to_torch() -> None:
    """CPU time of a fresh process, the best of five: other work on the machine only ever adds to it."""
    code = (
        "import time, torch; began = time.process_time(); import stepwell; "
        "print(time.process_time() - began, torch.cuda.is_initialized())"
    )
    seconds = []
    for _ in range(5):
        done = run(sys.executable, "-c", code, cwd=ROOT)
        assert done.returncode == 0, done.stderr
        taken, cuda = done.stdout.split()
        assert cuda == "False", "importing must leave CUDA alone"
        seconds.append(float(taken))
        if seconds[-1] < IMPORT_LIMIT_S:
            return
    pytest.fail(f"importing stepwell took {min(seconds):.2f} s after torch, more than {IMPORT_LIMIT_S}")
