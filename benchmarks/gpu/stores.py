"""Stores for the benchmarks: made from a config file, with memory that is ready, and saves that go where they should.

Each checkpoint goes to host memory; the disk takes the first of each window of WINDOW steps. So the number of a step
alone says whether its checkpoint goes down, and one store serves both kinds of saves.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch

import stepwell
from benchmarks.gpu.bench import GIB, MIB
from stepwell.native import Region
from stepwell.saving import Save

WINDOW = 1_000_000
STAGING_BYTES = (128 * MIB, 512 * MIB)  # host memory beside what it keeps: for a tiny state, and at most
SPARE_BYTES = 4 * GIB  # memory of the machine that stays free
READY_S = 120.0
WAIT_S = 180.0  # for a save, on any tier

_GPU = """
[[tier]]
name = "gpu"
driver = "gpu"
capacity = {capacity}
"""

_CONFIG = """
[[tier]]
name = "host"
driver = "host"
capacity = {capacity}

[[tier]]
name = "nvme"
driver = "file"
path = "{path}"
flush = [{{ every_steps = {every} }}]
retain = {{ last = 1 }}
"""


@contextmanager
def opened(folder: Path, host_bytes: int, gpu_bytes: int = 0) -> Iterator[stepwell.CheckpointStore]:
    """A store with so much to keep in host memory, which is ready, and in the gpu tier, if any. Closes it."""
    least, most = STAGING_BYTES
    capacity = host_bytes + min(least + host_bytes, most)
    _grow(capacity)
    config = folder / "config.toml"
    gpu = _GPU.format(capacity=gpu_bytes) if gpu_bytes else ""
    config.write_text(gpu + _CONFIG.format(capacity=capacity, path=folder / "nvme", every=WINDOW))
    with stepwell.open(config, run="bench") as store:
        _wait_ready(store)
        yield store


def _grow(wanted: int) -> None:
    """Some virtual machines show more memory only once what they have was used."""
    if psutil.virtual_memory().available < wanted + SPARE_BYTES:
        with Region(wanted) as region:
            for at in range(0, wanted, 256 * MIB):
                region.populate(at, min(256 * MIB, wanted - at))


def _wait_ready(store: stepwell.CheckpointStore) -> None:
    deadline = time.monotonic() + READY_S
    while True:
        host = store.status().tier("host")
        assert host.capacity_bytes is not None and host.ready_bytes is not None
        if host.ready_bytes >= host.capacity_bytes:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"only {host.ready_bytes} of {host.capacity_bytes} bytes of host memory became ready")
        time.sleep(0.05)


@contextmanager
def guarded(store: stepwell.CheckpointStore, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Saves are lazy inside."""
    handle = store.guard(optimizer)
    try:
        yield
    finally:
        handle.remove()


class Saver:
    """Saves one state again and again."""

    def __init__(self, store: stepwell.CheckpointStore, state: Mapping[str, Any]) -> None:
        self.store, self.state, self.step = store, state, 0
        self.saves: list[Save] = []  # since the last `settle`

    def to_host(self) -> Save:
        """A checkpoint that stays in host memory."""
        return self._save(self.step + 1)

    def to_disk(self) -> Save:
        """A checkpoint that goes down to the disk, too."""
        return self._save((self.step // WINDOW + 1) * WINDOW)

    def _save(self, step: int) -> Save:
        self.step = step
        self.saves.append(self.store.save(step, self.state))
        return self.saves[-1]

    def settle(self, tier: str = "host") -> list[Save]:
        """Waits until the newest save is on that tier; raises if any since the last call has failed. Returns them."""
        saves, self.saves = self.saves, []
        if saves:
            saves[-1].wait(tier, timeout=WAIT_S)
        for save in saves:
            if (error := save.report().error) is not None:
                raise RuntimeError(f"the save of step {save.step} failed: {error}")
        return saves
