"""Restores into tensors of the device: from host memory, cold from the disk, and back from a gpu tier.

Each is timed between two samples of what it is compared with: plain copies from pinned memory, plain direct reads of
the disk, plain copies on the device. Every restored byte is checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import stepwell
from benchmarks.gpu.bench import GB, Bench, Better, Record
from benchmarks.gpu.copies import Plain
from benchmarks.gpu.disk import Disk, forget
from benchmarks.gpu.stores import WAIT_S, WINDOW, opened

COLD_ROUNDS = 2  # of seven seconds each, with 10 GB and 1.6 GB/s
Samples = tuple[list[float], list[float]]  # seconds of restores; the rates that they are compared with


def run(bench: Bench) -> list[Record]:
    """From each tier that there is."""
    target = Target(bench)
    with bench.scratch() as folder:
        _host_and_disk(bench, target, folder)
    if not bench.device.is_gpu:
        bench.note("left out: rollback from a gpu tier; there is no GPU")
    elif bench.has_time_for(30, "rollback from a gpu tier"):
        with bench.scratch() as folder:
            _rollback(bench, target, folder)
    return bench.records


class Target:
    """The tensors that are saved and restored, whose content is known."""

    def __init__(self, bench: Bench) -> None:
        count, size = bench.scale.restored
        self.device = bench.device
        self.tensors = {f"w{i:03}": torch.empty(size // 4, device=self.device.torch) for i in range(count)}
        self.bytes = count * size
        for i, tensor in enumerate(self.tensors.values()):
            tensor.copy_(self._content(i, tensor))

    def _content(self, number: int, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=torch.Generator(like.device).manual_seed(number), device=like.device)

    def restore(self, store: stepwell.CheckpointStore, tier: str, step: int | None = None) -> float:
        """Seconds. Raises RuntimeError if bytes are wrong, or come from somewhere else."""
        for tensor in self.tensors.values():
            tensor.zero_()
        self.device.wait()
        began = time.perf_counter()
        found = store.restore({"model": self.tensors}, step=step)
        self.device.wait()
        seconds = time.perf_counter() - began
        if found is None or set(found.sources) != {tier}:
            raise RuntimeError(f"not restored from {tier} alone: {found and found.sources}")
        for i, (name, tensor) in enumerate(self.tensors.items()):
            if not torch.equal(tensor, self._content(i, tensor)):
                raise RuntimeError(f"{name} came back wrong from {tier}")
        return seconds


def _host_and_disk(bench: Bench, target: Target, folder: Path) -> None:
    plain = Plain(bench.device, bench.scale.copy_bytes)
    with opened(folder, target.bytes * 5 // 4) as store:
        save = store.save(WINDOW, {"model": target.tensors})
        save.wait("nvme", timeout=WAIT_S)
        warm = _between(bench.scale.saves, lambda: target.restore(store, "host"), lambda: plain.rate("h2d"))
    _report(bench, target, "from host memory: restore / plain copy", warm, (">=", 0.80))
    plain.close()
    disk = Disk(folder, bench.scale.disk_bytes)
    disk.choose()

    def cold() -> float:
        forget(folder / "nvme")
        with opened(folder, target.bytes * 5 // 4) as store:
            return target.restore(store, "nvme")

    if bench.has_time_for(COLD_ROUNDS * 15, "cold restores"):
        samples = _between(COLD_ROUNDS, cold, disk.read)
        _report(bench, target, "cold: restore's seconds / (bytes / the disk's rate)", samples, ("<=", 1.08))


def _rollback(bench: Bench, target: Target, folder: Path) -> None:
    plain = Plain(bench.device, bench.scale.copy_bytes)
    with opened(folder, 2 * target.bytes, gpu_bytes=target.bytes * 5 // 4) as store:
        for step in (WINDOW, WINDOW + 1, WINDOW + 2):  # the first save of a process finds no memory ready
            store.save(step, {"model": target.tensors}).wait("host", timeout=WAIT_S)
        target.restore(store, "gpu", step)
        samples = _between(bench.scale.saves, lambda: target.restore(store, "gpu", step), lambda: plain.rate("d2d"))
        store.save(2 * WINDOW, {"model": target.tensors}).wait("nvme", timeout=WAIT_S)
    _report(bench, target, "from a gpu tier: restore / plain copy on the device", samples, (">=", 0.65))
    plain.close()


def _between(count: int, restore: Callable[[], float], ceiling: Callable[[], float]) -> Samples:
    """Restores, each with the mean of the ceilings just before and after it."""
    seconds, rates = [], []
    before = ceiling()
    for _ in range(count):
        seconds.append(restore())
        after = ceiling()
        rates.append((before + after) / 2)
        before = after
    return seconds, rates


def _report(bench: Bench, target: Target, name: str, samples: Samples, bar: tuple[Better, float]) -> None:
    shares = [target.bytes / took / rate for took, rate in zip(*samples, strict=True)]
    ratios = shares if bar[0] == ">=" else [1 / share for share in shares]
    speeds = [target.bytes / took / GB for took in samples[0]]
    rates = [rate / GB for rate in samples[1]]
    bench.record(
        name, statistics.median(ratios), "ratio", bar,
        samples=ratios, gb_s=speeds, ceiling_gb_s=rates, bytes=target.bytes,
    )  # fmt: skip
