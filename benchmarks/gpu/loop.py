"""Iterations of a training loop, timed in the order of the device's work."""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.gpu.model import Training

WARM = 2  # iterations of a block that are not counted: the kind of block before them still shows there


@dataclass(slots=True)
class Times:
    """Of the counted iterations of one or several blocks, in seconds."""

    iterations: list[float] = field(default_factory=list)  # from one's begin to the next one's
    passes: list[float] = field(default_factory=list)  # of them, forward and backward
    in_caller: list[float] = field(default_factory=list)  # of each save, in the thread that called it

    def add(self, other: Times) -> None:
        self.iterations += other.iterations
        self.passes += other.passes
        self.in_caller += other.in_caller

    @property
    def mean(self) -> float:
        return statistics.mean(self.iterations)

    @property
    def median(self) -> float:
        return statistics.median(self.iterations)

    @property
    def p99(self) -> float:
        return percentile(self.iterations, 99)


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that so many percent of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def block(
    training: Training, count: int, save: Callable[[], object] | None = None, every: int = 1, warm: int = WARM
) -> Times:
    """`count` iterations, with a save after each `every`th, the first included. The caller runs at most one iteration
    ahead of the device, as loops do that print the last loss. Nothing of it is under way when this returns, but saves.

    Python's garbage is collected before: a full collection takes 0.2 s in a process with torch, and would fall into
    some block or other. What blocks make anew counts.
    """
    gc.collect()
    device = training.device
    begins, befores, times = [device.moment()], [], Times()
    for number in range(count):
        begins[-1 if number == 0 else -2].wait()
        training.forward_backward()
        befores.append(device.moment())
        training.update()
        if save is not None and number % every == 0:
            began = time.perf_counter()
            save()
            if number >= warm:
                times.in_caller.append(time.perf_counter() - began)
        begins.append(device.moment())
    device.wait()
    for number in range(warm, count):
        times.iterations.append(begins[number + 1].since(begins[number]))
        times.passes.append(befores[number].since(begins[number]))
    return times
