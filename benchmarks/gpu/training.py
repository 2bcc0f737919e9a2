"""What a training loop feels: iterations with checkpoints against iterations without, in turns.

Iterations are of two lengths: one outlasts the copy of the state to the host, one does not. Checkpoints go to host
memory after every iteration, or down to the disk at an interval that the disk keeps up with, each time lazily, behind a
guard; then, without a guard, save() is timed by itself. Extra memory of the device is what other than the training has
in use once all that runs, against before the store was opened.
"""

from __future__ import annotations

import math
import statistics
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

import stepwell
from benchmarks.gpu.bench import GB, GIB, MIB, Bench, Record
from benchmarks.gpu.copies import Plain
from benchmarks.gpu.loop import WARM, Times, block, percentile
from benchmarks.gpu.model import Training
from benchmarks.gpu.stores import WAIT_S, Saver, guarded, opened

SPARE = 1.3  # the interval is so much longer than the disk needs
INTERVAL_MAX = 200
TENTH = 10  # iterations from one checkpoint to the next, where not each has one
APART = 3  # short iterations from one to the next: together longer than a copy, so that a gpu tier has room again
NO_GUARD = "no guard: save() blocks"


def run(bench: Bench) -> list[Record]:
    """All of it with one model."""
    study = Study(bench)
    with bench.scratch() as folder:
        study.with_host_tier(folder)
    if not bench.device.is_gpu:
        bench.note("left out: a gpu tier; there is no GPU")
    elif study.stall_s is not None and bench.has_time_for(30, "a gpu tier"):
        with bench.scratch() as folder:
            study.with_gpu_tier(folder, study.stall_s)
    study.plain.close()
    return bench.records


class Study:
    """A model, the lengths of its iterations, and the plain copies that its saves are compared with."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.scale = bench, bench.scale
        self.training = Training(bench.device, self.scale.shape)
        self.long, self.short = self.training.calibrate(self.scale.iteration_s, self.scale.short_s)
        self.size = self.training.state_bytes()
        tensors = sum(1 for _ in self.training.tensors())
        self.plain = Plain(bench.device, self.scale.copy_bytes)
        self.rates: list[float] = [self.plain.rate("d2h")]
        self.stall_s: float | None = None  # of each checkpoint between short iterations, once it was measured
        bench.record("state", self.size / GB, "GB", tensors=tensors, batches=[self.long, self.short])

    @property
    def copy_s(self) -> float:
        """What plain copies of the state take in this run."""
        return self.size / statistics.median(self.rates)

    def with_host_tier(self, folder: Path) -> None:
        self.training.batch = self.long
        alone = block(self.training, self.scale.block)
        self.bench.device.peak_bytes()
        block(self.training, 3)
        peak, foreign = self.bench.device.peak_bytes(), self.bench.device.foreign_bytes()
        with opened(folder, 3 * self.size) as store:
            saver = Saver(store, self.training.state)
            save = saver.to_disk().wait("nvme", timeout=WAIT_S)
            seconds = save.report().tier_seconds["nvme"]
            self.bench.record("first save, until it is on the disk", seconds, "s", blocked_s=save.blocked_seconds)
            interval = min(INTERVAL_MAX, math.ceil(SPARE * seconds / alone.mean))
            with guarded(store, self.training.optimizer):
                for _ in range(3):  # at once: on some machines memory is slow when it is used first
                    saver.to_host()
                saver.settle()
                self._to_host(saver)
                self._extra_memory(store, peak, foreign)
                if self.bench.has_time_for(3 * interval * alone.mean, "checkpoints down to the disk"):
                    self._to_disk(saver, interval)
                if self.bench.has_time_for(30, "short iterations"):
                    self._every_stall(saver)
                    self.stall_s = self._stall(saver, "")
            self._blocked(saver)
            saver.to_disk()  # the newest is on the disk: nothing is left to do at close
            saver.settle("nvme")

    def with_gpu_tier(self, folder: Path, without_s: float) -> None:
        """The short iteration again, with room for a copy on the device. without_s: the stall without it."""
        with ExitStack() as stack:
            store = stack.enter_context(opened(folder, 2 * self.size, gpu_bytes=self.size * 5 // 4))
            saver = Saver(store, self.training.state)
            saver.to_disk().wait("nvme", timeout=WAIT_S)
            self._rollback(saver)
            stack.enter_context(guarded(store, self.training.optimizer))
            stall = self._stall(saver, "with a gpu tier, ")
            saver.to_disk()
            saver.settle("nvme")
        name = "short iteration: stall with a gpu tier / without"
        self.bench.record(name, stall / without_s, "ratio", ("<=", 0.1), stall_s=stall, without_s=without_s)

    def _rollback(self, saver: Saver) -> None:
        """Back to the last step, from GPU memory, into the live model and optimizer."""
        for _ in range(3):  # the first ones find no memory ready
            saver.to_host()
            saver.settle()
        tensors = list(self.training.tensors())
        before = [tensor.clone() for tensor in tensors]
        seconds, ceilings = [], [self.plain.rate("d2d")]
        for _ in range(self.scale.saves + 1):
            for tensor in tensors:
                tensor.zero_()
            self.bench.device.wait()
            began = time.perf_counter()
            found = saver.store.restore(saver.state, step=saver.step)
            self.bench.device.wait()
            seconds.append(time.perf_counter() - began)
            ceilings.append(self.plain.rate("d2d"))
            if found is None or set(found.sources) != {"gpu"}:
                raise RuntimeError(f"not restored from the gpu tier alone: {found and found.sources}")
            if not all(map(torch.equal, tensors, before)):
                raise RuntimeError("the state came back wrong from the gpu tier")
        del before
        ratio = self.size / statistics.median(seconds[1:]) / statistics.median(ceilings)
        name = "rollback of model and optimizer from a gpu tier / plain copy on the device"
        self.bench.record(name, ratio, "ratio", (">=", 0.65), samples=seconds, first_s=seconds[0])

    def _alternate(self, saver: Saver, blocks: int, every: int = 1) -> tuple[Times, Times]:
        """Blocks without and with a checkpoint to host memory after each `every`th iteration, in turns."""
        without, with_saves = Times(), Times()
        for _ in range(blocks):
            without.add(block(self.training, self.scale.block))
            with_saves.add(block(self.training, self.scale.block, saver.to_host, every))
            saver.settle()
            self.rates.append(self.plain.rate("d2h"))
        return without, with_saves

    def _to_host(self, saver: Saver) -> None:
        without, lazily = self._alternate(saver, self.scale.blocks)
        passes = statistics.mean(without.passes)
        details = {"copy_s": self.copy_s, "forward_backward_s": passes}
        tenth = block(self.training, 2 * TENTH + WARM, saver.to_host, every=TENTH)
        saver.settle()
        self._iterations("no checkpoint", without, **details)
        self._iterations("to host, every iteration", lazily, **details)
        if passes < self.copy_s:
            self.bench.note(f"forward and backward ({passes:.3f} s) are shorter than the copy ({self.copy_s:.3f} s)")
        name = "to host every iteration / no checkpoint"
        self.bench.record(f"{name}, mean", lazily.mean / without.mean, "ratio", ("<=", 1.015))
        self.bench.record(f"{name}, p99", lazily.p99 / without.p99, "ratio", ("<=", 1.05))
        self.bench.record(f"to host every {TENTH} / no checkpoint, mean", tenth.mean / without.mean, "ratio")
        caller = [seconds * 1000 for seconds in lazily.in_caller]
        worst = max(caller)
        self.bench.record("save() with guard, in the caller", statistics.median(caller), "ms", ("<=", 1), max=worst)

    def _iterations(self, name: str, times: Times, **details: Any) -> None:
        samples = times.iterations
        details |= {"p50": percentile(samples, 50), "p99": times.p99, "samples": samples}
        self.bench.record(f"iteration, {name}", times.mean, "s", **details)

    def _extra_memory(self, store: stepwell.CheckpointStore, peak: int, foreign: int) -> None:
        """With what of it the driver takes for host memory that is pinned, whoever pins it."""
        device = self.bench.device
        grown = {"foreign": device.foreign_bytes() - foreign, "torch": device.peak_bytes() - peak}
        parts = {f"{name}_mib": size / MIB for name, size in grown.items()}
        whole = sum(grown.values()) / MIB
        pinned = (store.status().tier("host").ready_bytes or 0) / GIB
        by_driver = device.pinning_bytes(GIB) * pinned / MIB
        parts |= {"pinned_gib": pinned, "for_pinned_mib": by_driver}
        name = "extra memory of the device"
        self.bench.record(f"{name}, without the driver's tables", whole - by_driver, "MiB", ("<=", 64), **parts)
        self.bench.record(f"{name}, with those for {pinned:.1f} GiB of pinned memory", whole, "MiB")

    def _to_disk(self, saver: Saver, interval: int) -> None:
        """Whole intervals are counted, two of them, between blocks without checkpoints."""
        without = block(self.training, self.scale.block)
        down = block(self.training, 2 * interval, saver.to_disk, every=interval, warm=0)
        slowest = max(save.report().tier_seconds["nvme"] for save in saver.settle("nvme"))
        without.add(block(self.training, self.scale.block))
        self._iterations(f"to the disk, every {interval}", down)
        ratio = down.mean / without.mean
        name = "to the disk at an interval / no checkpoint, mean"
        kept_up = slowest <= interval * down.mean
        self.bench.record(
            name, ratio, "ratio", ("<=", 1.03), interval=interval, save_s=slowest, disk_kept_up=kept_up
        )  # fmt: skip

    def _every_stall(self, saver: Saver) -> None:
        """What a checkpoint to host memory adds to each iteration, where all are too short to hide it."""
        self.training.batch = self.short
        without, lazily = self._alternate(saver, 2)
        self.training.batch = self.long
        stall, passes = lazily.median - without.median, statistics.median(without.passes)
        self._iterations("short, no checkpoint", without, copy_s=self.copy_s, forward_backward_s=passes)
        self._iterations("short, to host, every iteration", lazily)
        excess = (stall - max(0.0, self.copy_s - passes)) * 1000
        name = "short iteration: stall - (copy - forward - backward)"
        self.bench.record(name, excess, "ms", ("<=", 5), stall_s=stall, copy_s=self.copy_s)

    def _stall(self, saver: Saver, where: str) -> float:
        """Seconds that each checkpoint adds to the iterations from one to the next, together."""
        self.training.batch = self.short
        without, lazily = self._alternate(saver, 2, APART)
        self.training.batch = self.long
        self._iterations(f"short, {where}to host, every {APART}", lazily, without_s=without.mean)
        periods = zip(*(lazily.iterations[at::APART] for at in range(APART)), strict=False)
        return statistics.median(map(sum, periods)) - APART * without.median

    def _blocked(self, saver: Saver) -> None:
        blocked, peaks = [], [self.plain.rate("d2h")]
        for _ in range(self.scale.saves):
            self.training.forward_backward()
            self.training.update()
            self.bench.device.wait()
            began = time.perf_counter()
            saver.to_host()
            blocked.append(time.perf_counter() - began)
            saver.settle()
            peaks.append(self.plain.rate("d2h"))
        seconds = statistics.median(blocked)
        self.bench.record(NO_GUARD, seconds, "s", samples=blocked, bytes=self.size)
        least = self.size / statistics.median(peaks)
        self.bench.record("no guard: save() / (bytes / plain copy)", seconds / least, "ratio", ("<=", 1.1))
