"""stepwell in the harness that compares checkpoint libraries.

The harness (`run.py`, `peers.py`, `workloads.py`) lies outside this project; `harness()` finds it and adds stepwell's
adapter. Its folder comes from the environment variable STEPWELL_PEERS, or is ../shared/peers beside the repository.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

from benchmarks.fio import drop_caches

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEFAULT_FOLDER = ROOT.parent / "shared" / "peers"


def harness_folder() -> Path:
    return Path(os.environ.get("STEPWELL_PEERS") or DEFAULT_FOLDER).resolve()


def available() -> bool:
    return (harness_folder() / "run.py").is_file()


def harness() -> ModuleType:
    """The harness's `run` module, with stepwell among its peers and its workers started through our run.py."""
    folder = harness_folder()
    if not available():
        raise FileNotFoundError(f"no harness in {folder}: set STEPWELL_PEERS to the folder that holds its run.py")
    os.environ["STEPWELL_PEERS"] = str(folder)  # for the workers
    sys.path[:] = [str(folder), *(entry for entry in sys.path if Path(entry or ".").resolve() != HERE)]
    run = importlib.import_module("run")
    run.HERE = HERE  # type: ignore[attr-defined]  # a worker is `HERE / "run.py"`, and must know stepwell, too
    run.drop_caches = drop_caches  # type: ignore[attr-defined]  # ours can be told not to
    adapter = importlib.import_module("benchmarks.peers.adapter")
    importlib.import_module("peers").register(adapter.Stepwell)
    return run


def workloads() -> ModuleType:
    """The harness's `workloads` module; call `harness` before."""
    return importlib.import_module("workloads")
