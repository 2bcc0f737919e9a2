"""The copying of a state out of the device, by itself: nothing trains meanwhile.

Two states: few large tensors, and 10,000 small ones. Each save is timed between two plain copies; a figure is the
save's bytes per second over their mean. Without a guard save() returns when the state is copied; with one it may
return before that. Both are timed from the call until the state is copied, so finding out what is to be copied counts,
too. Then the same of the copying alone: from the first to the last thing that the GPU does for a save, as its profiler
saw it.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field

import torch
from torch import nn

from benchmarks.gpu.bench import GB, Bench, Better, Record
from benchmarks.gpu.copies import Plain
from benchmarks.gpu.stores import Saver, guarded, opened

LARGE_BAR: tuple[Better, float] = (">=", 0.95)
SMALL_BAR: tuple[Better, float] = (">=", 0.80)
PROFILED = 3  # saves of which the profiler is asked


@dataclass(slots=True)
class Timed:
    """Of several saves: seconds until the state is copied, and in the caller; the plain copies around each."""

    whole: list[float] = field(default_factory=list)
    in_caller: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def ratios(self, size: int) -> list[float]:
        """Bytes per second over those of plain copies."""
        return [size / took / rate for took, rate in zip(self.whole, self.plain, strict=True)]


def large(bench: Bench) -> nn.ParameterList:
    count, size = bench.scale.large
    make = torch.Generator(bench.device.torch).manual_seed(1)
    return nn.ParameterList(torch.randn(size // 4, generator=make, device=bench.device.torch) for _ in range(count))


def small(bench: Bench) -> nn.ParameterList:
    count, least, most = bench.scale.small
    sizes = torch.randint(least // 4, most // 4 + 1, (count,), generator=torch.Generator().manual_seed(2)).tolist()
    return nn.ParameterList(torch.randn(size, device=bench.device.torch) for size in sizes)


def run(bench: Bench) -> list[Record]:
    """Both states, without a guard and with one."""
    plain = Plain(bench.device, bench.scale.copy_bytes)
    bench.record("plain d2h", plain.rate("d2h") / GB, "GB/s", way=str(plain.best["d2h"]))
    for name, make, bar in (("large tensors", large, LARGE_BAR), ("small tensors", small, SMALL_BAR)):
        _measure(bench, plain, name, make(bench), bar)
        bench.device.give_back()
    plain.close()
    return bench.records


def _measure(bench: Bench, plain: Plain, name: str, tensors: nn.ParameterList, bar: tuple[Better, float]) -> None:
    size = sum(tensor.nbytes for tensor in tensors)
    optimizer = torch.optim.SGD(tensors.parameters(), lr=0.01)
    with bench.scratch() as folder, opened(folder, 3 * size) as store:
        saver = Saver(store, {"model": tensors})
        saver.to_disk().wait("nvme")  # the plan is made, and the memory of a save has been used once
        saver.settle()
        strict = _saves(bench, plain, saver)
        alone = _device_seconds(bench, saver)
        with guarded(store, optimizer):
            lazy = _saves(bench, plain, saver)
    details = {"bytes": size, "tensors": len(tensors)}
    for how, timed in (("without guard", strict), ("with guard", lazy)):
        bench.record(
            f"{name}: save() {how} until copied / plain copy", statistics.median(timed.ratios(size)), "ratio", bar,
            samples=timed.ratios(size), seconds=timed.whole, plain_gb_s=[rate / GB for rate in timed.plain], **details,
        )  # fmt: skip
    if alone:
        rates = [size / seconds / statistics.median(strict.plain) for seconds in alone]
        what = f"{name}: the GPU's part of it / plain copy"
        bench.record(what, statistics.median(rates), "ratio", bar, samples=rates, seconds=alone, **details)
    caller = [seconds * 1000 for seconds in lazy.in_caller]
    bench.record(f"{name}: save() with guard, in the caller", statistics.median(caller), "ms", samples=caller)


def _saves(bench: Bench, plain: Plain, saver: Saver) -> Timed:
    timed = Timed()
    before = plain.rate("d2h")
    for _ in range(bench.scale.saves):
        bench.device.wait()
        began = time.perf_counter()
        save = saver.to_host()
        timed.in_caller.append(time.perf_counter() - began)
        save.copied.result()
        timed.whole.append(time.perf_counter() - began)
        saver.settle()
        after = plain.rate("d2h")
        timed.plain.append((before + after) / 2)
        before = after
    return timed


def _device_seconds(bench: Bench, saver: Saver) -> list[float]:
    """What the GPU alone takes for a save; nothing where no profiler can say."""
    try:
        found = [bench.device.seconds_of(saver.to_host) for _ in range(PROFILED)]
    except RuntimeError as error:
        bench.note(f"the profiler does not work here: {error}")
        return []
    saver.settle()
    return [seconds for seconds in found if seconds is not None]
